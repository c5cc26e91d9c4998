"""A share of a processor core for one process, by a control group of its own (Linux, root)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from topology.errors import DriverError

_QUOTA_LEAST_US: Final = 1_000
"""The kernel gives no less at a time."""
_PERIOD_LEAST_US: Final = 5_000
_ROOT: Final = Path("/sys/fs/cgroup")


class Throttle:
    """A control group that holds one process."""

    def __init__(self, folder: Path, unified: bool) -> None:
        self._folder = folder
        self._unified = unified

    def set_share(self, share: float) -> float:
        """Let it use this share of one core, in periods as short as the kernel allows; gives that share."""
        period_us = max(_PERIOD_LEAST_US, round(_QUOTA_LEAST_US / share))
        quota_us = max(_QUOTA_LEAST_US, round(share * period_us))
        if self._unified:
            (self._folder / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            # The quota must never be above what the parent has, so the limit is lifted in between.
            (self._folder / "cpu.cfs_quota_us").write_text("-1")
            (self._folder / "cpu.cfs_period_us").write_text(str(period_us))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        return quota_us / period_us


@contextlib.contextmanager
def throttled(pid: int) -> Iterator[Throttle]:
    """The process is in a control group of its own for as long as the block lasts."""
    unified = (_ROOT / "cgroup.controllers").exists()
    parent = _ROOT if unified else _ROOT / "cpu"
    folder = parent / f"isthmus-bench-{os.getpid()}-{pid}"
    try:
        if unified:
            (parent / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise DriverError(f"no control group at {folder}: {error}; this needs root on Linux") from error
    try:
        yield Throttle(folder, unified)
    finally:
        with contextlib.suppress(OSError):  # it may have ended
            (parent / "cgroup.procs").write_text(str(pid))
        folder.rmdir()
