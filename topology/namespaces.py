"""Network namespaces of a testbed: made, entered, and removed, also after their runner was killed.

Every namespace that a run makes is called `isthmus-<run>-<host>`; all else (interfaces, bridges, routes)
lives inside these namespaces and goes with them. Whose leftovers may be removed: `topology.claims`.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from topology.claims import Claim, control_path, sweep_dead
from topology.errors import DriverError

NAME_PREFIX: Final = "isthmus-"
NAMESPACES_DIRECTORY: Final = Path("/run/netns")
KIND: Final = "netns"
IP_TIMEOUT_S: Final = 20.0
TUN_DEVICE: Final = Path("/dev/net/tun")

_CLONE_NEWNET: Final = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_unavailable() -> str | None:
    """Why namespaces cannot be used here, for people; None if they can."""
    if os.uname().sysname != "Linux":
        return "network namespaces need Linux"
    if shutil.which("ip") is None:
        return "the command ip is missing: install iproute2"
    if not TUN_DEVICE.exists():
        return f"{TUN_DEVICE} is missing: load the kernel module tun"
    found: list[str | None] = []

    def try_it() -> None:
        # The thread ends with its namespace; no other thread is moved.
        try:
            enter_new()
        except DriverError as error:
            found.append(str(error))
        else:
            found.append(None)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0]


def require_available() -> None:
    """Raise DriverError where namespaces cannot be used."""
    if reason := why_unavailable():
        raise DriverError(f"the netns testbed cannot run here: {reason}, or use the process testbed")


def enter_new() -> None:
    """Move the calling thread, and what it starts from now on, into a new namespace without a name."""
    if _libc.unshare(_CLONE_NEWNET):
        reason = os.strerror(ctypes.get_errno())
        raise DriverError(f"a network namespace cannot be made ({reason}): run as root")


def enter(path: Path) -> None:
    """Move the calling thread, and what it starts from now on, into a namespace."""
    with path.open("rb") as file:
        _set_namespace(file.fileno(), str(path))


@contextlib.contextmanager
def inside(path: Path) -> Iterator[None]:
    """Be in a namespace for a block of code without `await`: only sockets opened there stay in it."""
    with Path("/proc/thread-self/ns/net").open("rb") as home:
        enter(path)
        try:
            yield
        finally:
            _set_namespace(home.fileno(), "the namespace we came from")


def open_socket(path: Path, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """A socket that belongs to a namespace, wherever it is used."""
    with inside(path):
        return socket.socket(family, kind, protocol)


def run_ip(*arguments: str, batch: Sequence[str] = ()) -> str:
    """Run `ip`; with `batch`, these commands at once. Raises DriverError with what `ip` says."""
    command = ["ip", *arguments, *(("-batch", "-") if batch else ())]
    try:
        done = subprocess.run(
            command,
            input="\n".join(batch),
            capture_output=True,
            text=True,
            timeout=IP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverError(f"{' '.join(command)} did not work: {error}") from error
    if done.returncode:
        raise DriverError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def speak_ipv4_only() -> None:
    """Let hosts of the calling thread's namespace not forward, and speak IPv4 only."""
    for setting, value in (
        ("ipv4/ip_forward", "0"),
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
    ):
        # A kernel without IPv6 has nothing to switch off.
        with contextlib.suppress(FileNotFoundError):
            Path("/proc/sys/net", setting).write_text(value)


class Namespaces:
    """The namespaces of one run."""

    def __init__(self) -> None:
        self._claim: Claim | None = None

    @property
    def run(self) -> str:
        """Names this run; empty while nothing is claimed."""
        return "" if self._claim is None else self._claim.run

    def claim(self, **facts: Any) -> None:
        """Take a name for this run; `facts` are for whoever looks for running testbeds."""
        assert self._claim is None
        self._claim = Claim(KIND, **facts)

    @property
    def control(self) -> Path:
        """Where the WAN of this run takes commands."""
        return control_path(self.run)

    def path(self, host: str) -> Path:
        """The file that stands for the namespace of a host."""
        return NAMESPACES_DIRECTORY / self.name(host)

    def name(self, host: str) -> str:
        """The name of a host's namespace, as `ip netns exec` wants it."""
        return f"{NAME_PREFIX}{self.run}-{host}"

    def add(self, host: str) -> None:
        """Make a namespace with nothing but its loopback. Hosts in it do not forward and speak IPv4 only."""
        run_ip("netns", "add", self.name(host))
        run_ip("-n", self.name(host), "link", "set", "lo", "up")
        with inside(self.path(host)):
            speak_ipv4_only()

    def remove_all(self) -> None:
        """Remove every namespace of this run, and the claim."""
        if self._claim is not None:
            _remove(self.run)
            self._claim.release()
            self._claim = None


def sweep() -> list[str]:
    """Remove what killed runners left; gives the names of their runs."""
    return sweep_dead(KIND, _remove)


def names_of(run: str) -> list[str]:
    """The namespaces of a run that exist."""
    prefix = f"{NAME_PREFIX}{run}-"
    if not run or not NAMESPACES_DIRECTORY.is_dir():
        return []
    return sorted(path.name for path in NAMESPACES_DIRECTORY.iterdir() if path.name.startswith(prefix))


def _remove(run: str) -> None:
    names = names_of(run)
    if names:
        run_ip(batch=[f"netns del {name}" for name in names])


def _set_namespace(descriptor: int, name: str) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise DriverError(f"cannot enter {name}: {os.strerror(ctypes.get_errno())}")
