"""Which testbeds run on this machine, and which have died and left something behind.

A run claims a name by a locked file, `state_directory()/<run>.json`, before it makes anything, and all
that it makes carries that name: network namespaces, or the containers, networks and volumes of a
compose project. The kernel frees the lock however the runner dies, so a file whose lock is free marks
leftovers, and its name says exactly whose they are. What has no such file is somebody else's and stays.

The lock, not a pid, tells the dead from the living: pids are reused.
"""

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def state_directory() -> Path:
    """Where runs of this user are claimed; those of root outlive no reboot, as their namespaces do not."""
    if os.geteuid() == 0:
        return Path("/run/isthmus-testbeds")
    return Path(tempfile.gettempdir(), f"isthmus-testbeds-{os.geteuid()}")


def control_path(run: str) -> Path:
    """Where the WAN of a run takes commands."""
    return state_directory() / f"{run}.sock"


class Claim:
    """The name of one run, ours for as long as we live or until it is released."""

    def __init__(self, kind: str, **facts: Any) -> None:
        """`kind` is the driver's; `facts` are for whoever looks for running testbeds."""
        folder = state_directory()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.run = f"{kind}-{os.getpid()}-{secrets.token_hex(3)}"
        # Locked before it gets its name, so that nobody sees it without a lock.
        draft = folder / f".{self.run}"
        self._file: IO[str] = draft.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            known = {"run": self.run, "pid": os.getpid(), "control": str(control_path(self.run))}
            json.dump({**known, **facts}, self._file)
            self._file.flush()
            draft.replace(folder / f"{self.run}.json")
        except BaseException:
            draft.unlink(missing_ok=True)
            self._file.close()
            raise

    def release(self) -> None:
        """Everything of this run is gone."""
        control_path(self.run).unlink(missing_ok=True)
        (state_directory() / f"{self.run}.json").unlink(missing_ok=True)
        self._file.close()


def sweep_dead(kind: str, remove: Callable[[str], None]) -> list[str]:
    """Have everything removed that killed runners of this kind left; gives the names of their runs."""
    swept = []
    for state in sorted(state_directory().glob(f"{kind}-*.json")):
        try:
            with state.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file's name is the run; its content may be cut short.
                remove(state.stem)
                control_path(state.stem).unlink(missing_ok=True)
                state.unlink(missing_ok=True)
                swept.append(state.stem)
        except (BlockingIOError, FileNotFoundError):
            # Its runner lives, or removed it under our eyes.
            continue
    return swept


def running_testbeds() -> list[dict[str, Any]]:
    """The facts about every testbed of this user whose runner lives."""
    found = []
    for state in sorted(state_directory().glob("*.json")):
        with contextlib.suppress(FileNotFoundError), state.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(json.load(file))
    return found
