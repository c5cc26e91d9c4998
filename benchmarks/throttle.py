"""A share of a processor core for one process, in slices of a fraction of a millisecond (Linux, root).

    python -m benchmarks.throttle PID     reads shares from its input, one a line

The process is stopped and continued every two milliseconds, and while it may run nobody else comes first.
A control group's quota would be simpler, but the kernel may look at it only with its ticks: with 250 a
second a busy process can get four milliseconds at once, and then nothing until they are paid for, which is
forty if its share is a tenth. That would measure freezes, not a processor that is short.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from topology.errors import DriverError

PERIOD_S: Final = 0.002
_OURS: Final = 20
"""Our real-time priority; the process has a lower one, and everybody else none."""
_THEIRS: Final = 10
_END_S: Final = 5.0
_READY: Final = "ready"


class Throttle:
    """Stops and continues one process, in a process of its own."""

    def __init__(self, worker: "subprocess.Popen[str]") -> None:
        self._worker = worker

    def set_share(self, share: float) -> None:
        """Let the process use this share of one core; 1 for all it wants."""
        assert self._worker.stdin is not None
        try:
            self._worker.stdin.write(f"{share}\n")
            self._worker.stdin.flush()
        except OSError as error:
            raise DriverError(f"the throttle has ended: {error}") from error


@contextlib.contextmanager
def throttled(pid: int) -> Iterator[Throttle]:
    """The process gets no more than the share that is set, for as long as the block lasts."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.throttle", str(pid)],
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _put_first(pid: int, priority: int) -> None:
    """Give all threads of a process this real-time priority; 0 for an ordinary one."""
    policy = os.SCHED_FIFO if priority else os.SCHED_OTHER
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), policy, os.sched_param(priority))


class _Shares:
    """What was read last; None at the end."""

    def __init__(self) -> None:
        self.share: float | None = 1.0

    def read(self) -> None:
        for line in sys.stdin:
            self.share = float(line)
        self.share = None


def _alternate(pid: int) -> None:
    """Let the process run for its share of every period, until the input ends or the process does."""
    shares = _Shares()
    reader = threading.Thread(target=shares.read, daemon=True)
    reader.start()
    _put_first(os.getpid(), _OURS)
    _put_first(pid, _THEIRS)
    print(_READY, flush=True)
    try:
        begin_s = time.monotonic()
        while (share := shares.share) is not None:
            if share < 1:
                time.sleep(max(0.0, begin_s + share * PERIOD_S - time.monotonic()))
                os.kill(pid, signal.SIGSTOP)
            time.sleep(max(0.0, begin_s + PERIOD_S - time.monotonic()))
            # What was slept too long is not made up for: the process would get it in one piece.
            begin_s = max(begin_s + PERIOD_S, time.monotonic())
            if share < 1:
                os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            _put_first(pid, 0)


if __name__ == "__main__":
    _alternate(int(sys.argv[1]))
