"""One direction of an emulated link: when, if ever, a packet that enters now comes out. Pure.

A packet passes three stations. *Loss*: independent, or in bursts (Gilbert's model, see
`topology.conditions`). *Rate*: packets leave one after the other, each for as long as its bits take;
the queue before that holds `QUEUE_MAX_NS` worth of waiting, what does not fit is dropped at the tail.
*Delay*: the same for all, plus or minus the jitter, uniform. Packets never overtake each other: a
path's queues vary, but they are queues, and TCP would take a shuffled path for a lossy one. On a
busy link with jitter the delay is therefore nearer to the upper end.

All randomness comes from the seed, one generator per lane: the same packets meet the same fate.
"""

import random
from dataclasses import asdict, dataclass
from typing import Any, Final

from overlay.limits import MILLISECOND_NS
from topology.conditions import LinkConditions

QUEUE_MAX_NS: Final = 200 * MILLISECOND_NS
"""The most a packet waits for the rate; a modem's buffer."""


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """What has entered a lane and what became of it."""

    packets: int
    bytes: int
    lost: int
    """Taken by the emulated loss."""
    queue_dropped: int
    """Found the queue before the rate full."""
    cut_dropped: int
    """Came while the lane was cut."""


class Lane:
    """One direction between two sites."""

    def __init__(self, conditions: LinkConditions, seed: str) -> None:
        self.is_cut = False
        self._random = random.Random(seed)
        self._in_burst = False
        self._free_ns = 0
        """When the last packet has left the station of the rate."""
        self._last_due_ns = 0
        self._packets = self._bytes = self._lost = self._queue_dropped = self._cut_dropped = 0
        self.conditions = conditions
        self.change(conditions)

    def change(self, conditions: LinkConditions) -> None:
        """Other conditions for what enters from now on; order is kept across the change."""
        self.conditions = conditions
        self._delay_ns = conditions.delay_ms * MILLISECOND_NS
        self._jitter_ns = conditions.jitter_ms * MILLISECOND_NS
        self._ns_per_byte = 0.0 if conditions.rate_mbit is None else 8_000.0 / conditions.rate_mbit
        self._in_burst = False

    def admit(self, now_ns: int, size: int) -> int | None:
        """When a packet of `size` bytes that enters now comes out; None if it never does."""
        self._packets += 1
        self._bytes += size
        if self.is_cut:
            self._cut_dropped += 1
            return None
        conditions = self.conditions
        if conditions.loss and self._is_lost(conditions):
            self._lost += 1
            return None
        due_ns = float(now_ns)
        if self._ns_per_byte:
            start_ns = max(now_ns, self._free_ns)
            if start_ns - now_ns > QUEUE_MAX_NS:
                self._queue_dropped += 1
                return None
            due_ns = start_ns + size * self._ns_per_byte
            self._free_ns = round(due_ns)
        due_ns += self._delay_ns
        if self._jitter_ns:
            due_ns += self._jitter_ns * (2 * self._random.random() - 1)
        self._last_due_ns = max(self._last_due_ns, round(due_ns))
        return self._last_due_ns

    def statistics(self) -> LaneStatistics:
        """What has passed."""
        return LaneStatistics(self._packets, self._bytes, self._lost, self._queue_dropped, self._cut_dropped)

    def record(self) -> dict[str, Any]:
        """The same in the plain form, for JSON."""
        return asdict(self.statistics())

    def _is_lost(self, conditions: LinkConditions) -> bool:
        draw = self._random.random()
        if conditions.burst is None:
            return draw < conditions.loss
        if self._in_burst:
            self._in_burst = draw >= conditions.leave_burst_probability
        else:
            self._in_burst = draw < conditions.enter_burst_probability
        return self._in_burst
