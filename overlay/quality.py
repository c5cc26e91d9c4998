"""What is known of a link: how long it takes, how much it loses, and whether losses come together.

Delays go into a histogram with buckets 9 % apart that forgets: once it holds many samples all counts
are halved, so a change of the network shows within seconds. Nodes do not compare clocks, so one way
counts as half of a round trip.

Losses are counted by whoever receives: datagrams are numbered, and a number that has not come by the
time 64 later ones have is lost. A lossless link has to prove itself: the estimate starts at half a per
cent, falls below 0.1 % after some four hundred datagrams without a loss, and is 0 after a thousand. A
loss is remembered for some twenty thousand.
"""

import math
from collections.abc import Iterable
from typing import Final

from overlay.limits import COPIES_MAX, MILLISECOND_NS

Distribution = tuple[tuple[int, float], ...]
"""Delays in nanoseconds, rising, each with its share; shares add up to 1."""

_LEAST_NS: Final = MILLISECOND_NS // 4
_PER_OCTAVE: Final = 8
_SAMPLES_MOST: Final = 1_024
"""With more, all counts are halved."""
_WINDOW: Final = 64
"""So many later datagrams must have come before one counts as lost."""
_COUNTED_MOST: Final = 8_192
_PRIOR_LOST: Final = 0.5
_PRIOR_COUNTED: Final = 100.0
_PROVEN_COUNTED: Final = 1_000
_FORGOTTEN: Final = 0.05
_BURSTY: Final = 0.4
_PRIOR_LOSSES: Final = 2.0
"""Until some losses were seen, the next one is taken to be independent."""


class DelayHistogram:
    """How long a way takes, lately."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def add(self, delay_ns: int) -> None:
        """One more sample."""
        bucket = 0 if delay_ns <= _LEAST_NS else math.ceil(_PER_OCTAVE * math.log2(delay_ns / _LEAST_NS))
        self._counts[bucket] = self._counts.get(bucket, 0.0) + 1
        self._total += 1
        if self._total > _SAMPLES_MOST:
            # What is less than a sample is forgotten.
            self._counts = {bucket: count / 2 for bucket, count in self._counts.items() if count >= 1}
            self._total = sum(self._counts.values())

    def distribution(self) -> Distribution:
        """The upper ends of the buckets with their shares; empty before the first sample."""
        return tuple(
            (round(_LEAST_NS * 2 ** (bucket / _PER_OCTAVE)), count / self._total)
            for bucket, count in sorted(self._counts.items())
        )


class LossMeter:
    """How many of a peer's numbered datagrams do not arrive; kept by the receiver."""

    __slots__ = ("_counted", "_highest", "_last_lost", "_lost", "_pairs", "_seen")

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0
        """Bit i: the datagram numbered `_highest - i` has come."""
        self._counted = 0.0
        self._lost = 0.0
        self._pairs = 0.0
        self._last_lost = False

    def note(self, number: int) -> None:
        """A datagram with this number has come; numbers start at 1."""
        if number <= self._highest:
            if self._highest - number < _WINDOW:
                self._seen |= 1 << (self._highest - number)
            return
        if not self._highest:
            # What was sent before the peer could be heard is not lost.
            self._seen = (1 << _WINDOW) - 1
            self._highest = number
            return
        for _ in range(min(number - self._highest, 2 * _WINDOW)):
            self._count(lost=not self._seen >> (_WINDOW - 1) & 1)
            self._seen = (self._seen << 1) & ((1 << _WINDOW) - 1)
        self._seen |= 1
        self._highest = number

    @property
    def loss(self) -> float:
        """Share of datagrams that are lost: from above while few were seen, 0 if no loss is remembered."""
        if self._counted >= _PROVEN_COUNTED and self._lost < _FORGOTTEN:
            return 0.0
        return (self._lost + _PRIOR_LOST) / (self._counted + _PRIOR_COUNTED)

    @property
    def burst(self) -> float:
        """Share of losses after which the next datagram is lost too."""
        return min(1.0, (self._pairs + _PRIOR_LOSSES * self.loss) / (self._lost + _PRIOR_LOSSES))

    def _count(self, *, lost: bool) -> None:
        self._counted += 1
        if lost:
            self._lost += 1
            self._pairs += self._last_lost
        self._last_lost = lost
        if self._counted > _COUNTED_MOST:
            self._counted /= 2
            self._lost /= 2
            self._pairs /= 2


def quantile_ns(delays: Distribution, share: float) -> int:
    """The delay that this share of messages does not exceed; 0 if nothing is known."""
    passed = 0.0
    for delay_ns, part in delays:
        passed += part
        if passed >= share:
            return delay_ns
    return delays[-1][0] if delays else 0


def in_series(ways: Iterable[Distribution]) -> Distribution:
    """The delay over several links, one after the other, as if they were independent."""
    total: dict[int, float] = {0: 1.0}
    for way in ways:
        if not way:
            return ()
        longer: dict[int, float] = {}
        for before_ns, before in total.items():
            for delay_ns, share in way:
                key = before_ns + delay_ns
                longer[key] = longer.get(key, 0.0) + before * share
        total = longer
    return tuple(sorted(total.items()))


def copies_for(loss: float, burst: float, residual: float) -> int:
    """How often a datagram must be sent so that at most this share is lost altogether.

    Once, if losses come in bursts that would swallow most copies: that is what congestion looks like,
    and more datagrams would only add to it.
    """
    copies = 1
    lost = loss
    while lost > residual and copies < COPIES_MAX and max(burst, loss) < _BURSTY:
        lost *= max(burst, loss)
        copies += 1
    return copies


def loss_of_all(loss: float, burst: float, copies: int) -> float:
    """The share of messages of which every copy is lost."""
    return loss * max(burst, loss) ** (copies - 1)
