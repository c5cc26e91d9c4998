"""A child process that never outlives us, not even when we are killed with SIGKILL.

Between us and the real program stands a small guard process. It holds the read end of a pipe whose write
end only we hold: the kernel closes it however we die, and the guard then kills the program.
`PR_SET_PDEATHSIG` alone would not do: it fires when the *thread* that started the child ends, and to set it
in a process with threads takes code between fork and exec that may deadlock.

Three more ways to lose the program are closed here. A process forked from us keeps a copy of the pipe's
write end, so the guard also looks at its parent's pid. The guard itself may be killed, so the program (whose
parent has a single thread) does get `PR_SET_PDEATHSIG`. Ctrl-C reaches every process of the terminal's group,
so the guard and the program live in a session of their own and end when we say so.

This file is both sides of that agreement: imported, it offers `GuardedProcess`; run as a script, it is the
guard. The guard runs without site-packages, so only the standard library is imported here.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PARENT_CHECK_S = 1.0
"""How often the guard looks at its parent's pid, for the case that the pipe stays open."""

_PR_SET_PDEATHSIG = 1
_EXEC_FAILED = 127


class GuardedProcess:
    """A running program and its guard. Ends with this process at the latest."""

    def __init__(self, command: Sequence[str], directory: Path, console: Path) -> None:
        """Start `command` in `directory`; what it prints is appended to `console`."""
        with console.open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        assert self._guard.stdout is not None
        with self._guard.stdout as report:
            # Without a line the guard itself failed; the console says why and `alive` is soon false.
            self.pid = int(report.readline() or 0)

    @property
    def guard_pid(self) -> int:
        """The guard's pid; it is the program's parent."""
        return self._guard.pid

    @property
    def alive(self) -> bool:
        """Whether the program still runs."""
        return self._guard.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The program's exit status, 128 + signal if one ended it; None while it runs."""
        return self._guard.poll()

    def terminate(self) -> None:
        """Ask the program to end."""
        # The guard passes it on. We never signal the program's pid, which may be somebody else's by now.
        self._guard.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the program's end; False if it did not come in time."""
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._close_pipe()
        return True

    def kill(self) -> None:
        """End the program with SIGKILL and wait until it is gone."""
        self._close_pipe()
        self._guard.wait()

    def _close_pipe(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()


def _start(command: list[str]) -> int:
    """Fork and exec the program. Safe here: the guard has one thread."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    guard_pid = os.getpid()
    program_pid = os.fork()
    if program_pid:
        return program_pid
    try:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The guard may have died before the line above took effect.
        if os.getppid() == guard_pid:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(2, 1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(_EXEC_FAILED)


def guard(parent_pid: int, command: list[str]) -> int:
    """Run `command` until it ends or until the parent is gone; give its exit status."""
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        # The wake-up pipe carries the news; a handler must exist for it to be written.
        signal.signal(number, lambda _number, _frame: None)
    program_pid = _start(command)
    with contextlib.suppress(BrokenPipeError):
        os.write(1, b"%d\n" % program_pid)
    os.close(1)
    while True:
        readable, _, _ = select.select([0, wake_read], [], [], PARENT_CHECK_S)
        finished, status = os.waitpid(program_pid, os.WNOHANG)
        if finished:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if 0 in readable or os.getppid() != parent_pid:
            os.kill(program_pid, signal.SIGKILL)
            _, status = os.waitpid(program_pid, 0)
            return 128 + signal.SIGKILL
        if wake_read in readable and signal.SIGTERM in os.read(wake_read, 4096):
            os.kill(program_pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
