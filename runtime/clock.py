"""How fast the monotonic clock runs against the wall clock.

The wall clock is the only other clock a host has. Where NTP steers it, it follows real time in the
long run, so over minutes the difference tells the drift. Linux steers the monotonic clock by the
same amount, so the two hardly differ; what the crystal does, and what the monotonic clock would do
if the steering stopped, shows in the *raw* clock. Both are compared.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

_TRIES: Final = 50
"""Readings of which the one with the shortest time in between counts."""
_POLL_S: Final = 0.1
_STEP_PPM: Final = 5_000
"""No clock drifts and no NTP steers as much: whoever sees more has seen the clock being set."""


class ClockReading(NamedTuple):
    """All clocks at one moment."""

    monotonic_ns: int
    raw_ns: int
    """The monotonic clock as nobody steers it; the same where there is none."""
    wall_ns: int
    uncertainty_ns: int
    """How far apart the moments of the readings can be."""


@dataclass(frozen=True, slots=True)
class Drift:
    """What was found."""

    ppm: float
    """How much faster the monotonic clock runs; negative if slower."""
    raw_ppm: float
    """The same of the raw clock."""
    uncertainty_ppm: float
    seconds: float
    stepped: bool
    """The wall clock was set in between: the rest means nothing."""


def read_clocks() -> ClockReading:
    """All clocks, as close together as can be had."""
    best: ClockReading | None = None
    for _ in range(_TRIES):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        raw_ns = _raw_ns()
        after_ns = time.monotonic_ns()
        if best is None or after_ns - before_ns < best.uncertainty_ns:
            best = ClockReading((before_ns + after_ns) // 2, raw_ns, wall_ns, after_ns - before_ns)
    assert best is not None
    return best


def measure_drift(seconds: float, read: Callable[[], ClockReading] = read_clocks) -> Drift:
    """Compare the clocks over some time; blocks for as long."""
    first = last = read()
    stepped = False
    while last.monotonic_ns - first.monotonic_ns < seconds * 1e9:
        time.sleep(min(_POLL_S, seconds))
        before, last = last, read()
        stepped |= _has_stepped(before, last)
    elapsed_ns = last.monotonic_ns - first.monotonic_ns
    wall_ns = last.wall_ns - first.wall_ns
    uncertainty_ns = first.uncertainty_ns + last.uncertainty_ns
    return Drift(
        ppm=1e6 * (elapsed_ns - wall_ns) / elapsed_ns,
        raw_ppm=1e6 * (last.raw_ns - first.raw_ns - wall_ns) / elapsed_ns,
        uncertainty_ppm=1e6 * uncertainty_ns / elapsed_ns,
        seconds=elapsed_ns / 1e9,
        stepped=stepped,
    )


def _raw_ns() -> int:
    if hasattr(time, "CLOCK_MONOTONIC_RAW"):
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    return time.monotonic_ns()


def _has_stepped(before: ClockReading, after: ClockReading) -> bool:
    elapsed_ns = after.monotonic_ns - before.monotonic_ns
    off_ns = abs(after.wall_ns - before.wall_ns - elapsed_ns)
    return off_ns > _STEP_PPM * elapsed_ns // 1_000_000 + before.uncertainty_ns + after.uncertainty_ns
