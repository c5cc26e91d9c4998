"""What is there of a compose project, and programs inside its containers."""

import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from topology.containers import PROJECT_LABEL, SERVICE_LABEL

ROOT = Path(__file__).parents[2]


def docker(*words: str, check: bool = True) -> str:
    """Output of the docker command."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip()


def everything_of(project: str) -> list[str]:
    """Containers, networks and volumes that carry the label of a project."""
    label = f"label={PROJECT_LABEL}={project}"
    return [
        *docker("ps", "-aq", "--filter", label).split(),
        *docker("network", "ls", "-q", "--filter", label).split(),
        *docker("volume", "ls", "-q", "--filter", label).split(),
    ]


def container_of(project: str, service: str) -> str:
    """The container of a service."""
    labels = ("--filter", f"label={PROJECT_LABEL}={project}", "--filter", f"label={SERVICE_LABEL}={service}")
    found = docker("ps", "-aq", *labels).split()
    assert len(found) == 1, (project, service, found)
    return found[0]


def addresses_of(container: str) -> list[str]:
    """Its addresses on all of its networks."""
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
    return docker("inspect", "--format", form, container).split()


def reached(container: str, targets: Iterable[str]) -> set[str]:
    """To which of these, HOST:PORT, a connection can be opened from inside a container."""
    line = (
        'for target in "$@"; do '
        '(timeout 3 bash -c "exec 3<>/dev/tcp/${target%:*}/${target#*:}" 2> /dev/null && echo "$target") & '
        "done; wait; true"
    )
    return set(docker("exec", container, "bash", "-c", line, "probe", *targets).split())


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} not within {timeout_s:g} s"
        time.sleep(0.5)
