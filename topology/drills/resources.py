"""What processes use, over time, and whether it grows: memory, descriptors, threads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from topology.promises import Promise

PAGE_BYTES: Final = 4096
MIB: Final = 1024 * 1024
WARM_UP_SHARE: Final = 1 / 3
"""What is used in the first part of a run is not held against anybody."""
LIFE_SHARE: Final = 0.6
"""Only processes that lived for so much of the run are judged."""


@dataclass(frozen=True, slots=True)
class Use:
    """What one process used at one moment."""

    memory_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """Growth over the judged part of a run that is noise: the larger of the two."""

    share: float
    least: float


ALLOWED: Final = {
    "memory_bytes": Allowance(0.10, 6 * MIB),
    "descriptors": Allowance(0.10, 12),
    "threads": Allowance(0.0, 2),
}
"""Clients come and go between two looks, and each has a descriptor; Python's memory comes in arenas."""


def look(pid: int) -> Use | None:
    """What a process uses now, from /proc; None if it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
        threads = int((folder / "stat").read_text().rpartition(")")[2].split()[17])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return Use(pages * PAGE_BYTES, descriptors, threads)


@dataclass(slots=True)
class Record:
    """What all processes used, by name and process id."""

    times_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    uses: dict[tuple[str, int], list[Use]] = field(default_factory=dict)

    def add(self, at_s: float, pids: Mapping[str, int]) -> None:
        """Look at all of them."""
        for name, pid in pids.items():
            use = look(pid)
            if use is not None:
                self.times_s.setdefault((name, pid), []).append(at_s)
                self.uses.setdefault((name, pid), []).append(use)

    def promise(self) -> Promise:
        """No process that lived long enough grows in anything."""
        return flat(self.times_s, self.uses)


def flat(
    times_s: Mapping[tuple[str, int], Sequence[float]], uses: Mapping[tuple[str, int], Sequence[Use]]
) -> Promise:
    """Whether nothing grows. Pure."""
    until_s = max((times[-1] for times in times_s.values()), default=0.0)
    problems, largest = [], 0.0
    judged = 0
    for key, times in times_s.items():
        if times[-1] - times[0] < LIFE_SHARE * until_s:
            continue
        judged += 1
        for what, allowance in ALLOWED.items():
            values = [float(getattr(use, what)) for use in uses[key]]
            growth, level = grown(times, values, times[0] + WARM_UP_SHARE * (times[-1] - times[0]))
            if what == "memory_bytes":
                largest = max(largest, growth)
            if growth > max(allowance.least, allowance.share * level):
                problems.append(f"{what} of {key[0]} grew by {growth:.0f} from {level:.0f}")
    if not judged:
        problems.append("no process lived long enough to be judged")
    return Promise(
        "memory, descriptors and threads are flat",
        not problems,
        "; ".join(problems) or f"of {judged} processes none grew by more than {largest / MIB:.1f} MiB",
    )


def grown(times_s: Sequence[float], values: Sequence[float], since_s: float) -> tuple[float, float]:
    """How much a straight line through the values since then rises to the end, and where it begins."""
    points = [(at_s, value) for at_s, value in zip(times_s, values, strict=True) if at_s >= since_s]
    middle_s = sum(at_s for at_s, _ in points) / len(points)
    mean = sum(value for _, value in points) / len(points)
    spread = sum((at_s - middle_s) ** 2 for at_s, _ in points)
    slope = sum((at_s - middle_s) * (value - mean) for at_s, value in points) / spread if spread else 0.0
    return slope * (points[-1][0] - points[0][0]), mean + slope * (points[0][0] - middle_s)
