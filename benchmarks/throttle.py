"""A share of a processor core for one process, in slices of a fraction of a millisecond (Linux, root).

    python -m benchmarks.throttle PID CORE     reads shares from its input, one a line

The process is moved to a core of its own, where another one with real-time priority keeps the rest of every
two milliseconds busy: all the process sees is a slower processor. A control group's quota would be simpler,
but the kernel may look at it only with its ticks: with 250 a second a busy process can get four milliseconds
at once, and then nothing until they are paid for, which is forty if its share is a tenth. That would measure
freezes, not a processor that is short. Stopping and continuing it by signals costs it some fifty microseconds
each time, most of what a small share gives it.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from topology.errors import DriverError

PERIOD_S: Final = 0.002
_PRIORITY: Final = 20
"""Our real-time priority; nobody else has one."""
SHARE_LEAST: Final = 0.06
"""The kernel gives real-time processes no more than 95 % of a core, and takes the rest in one piece."""
_END_S: Final = 5.0
_READY: Final = "ready"


class Throttle:
    """Keeps a core busy for a part of the time, in a process of its own."""

    def __init__(self, worker: "subprocess.Popen[str]") -> None:
        self._worker = worker

    def set_share(self, share: float) -> None:
        """Let the process use this share of its core; 1 for all it wants."""
        assert self._worker.stdin is not None
        try:
            self._worker.stdin.write(f"{share}\n")
            self._worker.stdin.flush()
        except OSError as error:
            raise DriverError(f"the throttle has ended: {error}") from error


@contextlib.contextmanager
def throttled(pid: int, core: int) -> Iterator[Throttle]:
    """The process gets no more than the share of this core that is set, for as long as the block lasts.

    Keep others off that core: they would take of what is left.
    """
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.throttle", str(pid), str(core)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None
    try:
        if worker.stdout.readline().strip() != _READY:
            raise DriverError("no real-time priority for the throttle; this needs root on Linux")
        yield Throttle(worker)
    finally:
        worker.stdout.close()
        with contextlib.suppress(OSError):
            worker.stdin.close()
        try:
            worker.wait(_END_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def move(pid: int, core: int) -> None:
    """Let all threads of a process run on this core only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


class _Shares:
    """What was read last; None at the end."""

    def __init__(self) -> None:
        self.share: float | None = 1.0

    def read(self) -> None:
        for line in sys.stdin:
            self.share = float(line)
        self.share = None


def _keep_busy(pid: int, core: int) -> None:
    """Leave the process its share of every period, until the input ends or the process does."""
    shares = _Shares()
    reader = threading.Thread(target=shares.read, daemon=True)
    reader.start()
    move(pid, core)
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    print(_READY, flush=True)
    end_s = time.monotonic()
    while (share := shares.share) is not None and Path(f"/proc/{pid}").exists():
        if share < 1:
            busy_s = (1 - max(share, SHARE_LEAST)) * PERIOD_S
            # From now on: what we slept too long was the process's and is not taken from it again.
            while time.monotonic() < end_s + busy_s:
                pass
        time.sleep(PERIOD_S if share >= 1 else max(share, SHARE_LEAST) * PERIOD_S)
        end_s = time.monotonic()


if __name__ == "__main__":
    _keep_busy(int(sys.argv[1]), int(sys.argv[2]))
