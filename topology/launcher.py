"""Start a Python module, or a command, as a process that never outlives the testbed.

    python -m topology.launcher PARENT_PID [--namespace FILE] MODULE ARGUMENT...
    python -m topology.launcher PARENT_PID [--namespace FILE] --command PROGRAM ARGUMENT...

The process asks the kernel to be killed when its parent dies, checks that the parent is still there,
enters a network namespace if one is given, and becomes MODULE or PROGRAM. That costs no
second process per node, as a guard would (`coordinator._child` needs one because it starts programs
that are not ours), and it also ends a node that is frozen with SIGSTOP. The kernel ties the request to
the parent's *thread*: the testbed starts its processes from the thread of its event loop and ends them
before that thread does.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Final

from topology.errors import DriverError
from topology.namespaces import enter

_PR_SET_PDEATHSIG: Final = 1


def die_with(parent_pid: int) -> None:
    """Be killed when the parent is; exits at once if it is gone already."""
    if sys.platform != "linux":
        sys.exit(
            "the process testbed needs Linux: it relies on the kernel to end processes with their parent"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"PR_SET_PDEATHSIG: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    """Become the module or program that the command line names."""
    parent_pid, *rest = sys.argv[1:]
    die_with(int(parent_pid))
    try:
        if rest[0] == "--namespace":
            enter(Path(rest[1]))
            rest = rest[2:]
        if rest[0] == "--command":
            os.execvp(rest[1], rest[1:])
    except (DriverError, OSError) as error:
        sys.exit(f"{' '.join(rest)}: {error}")
    module, *arguments = rest
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
