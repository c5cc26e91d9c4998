"""Looking at processes from outside, through /proc."""

import time
from collections.abc import Iterable
from pathlib import Path


def state(pid: int) -> str:
    """The kernel's letter for a process; empty if it is gone or only waits to be reaped."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if letter in "ZX" else letter


def descendants(pid: int) -> set[int]:
    """Children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def wait_gone(pids: Iterable[int], timeout_s: float = 10.0) -> set[int]:
    """Wait until these processes are gone; gives those that are not."""
    deadline_s = time.monotonic() + timeout_s
    while left := {pid for pid in pids if state(pid)}:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.02)
    return left
