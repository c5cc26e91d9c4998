"""How long messages to each edge take at least: what FRAME's replication decision may count on.

FRAME measured the way from primary to subscriber with synchronised clocks. Here it is a lower bound
that local clocks prove (`LinkClock.least_delay_ns`), and a too large one would spare copies that a
crash needs. So an edge's value falls at once when a faster message is seen, and rises only after it
has been higher for a while, by somewhat less than what was measured. Steps below a millisecond are
no news: each change makes the broker look at all its topics.
"""

from collections.abc import Mapping
from typing import Final

from overlay.limits import MILLISECOND_NS, SECOND_NS

RISE_AFTER_NS: Final = 5 * SECOND_NS
"""How long a bound must have been higher before it counts."""
MARGIN_PERCENT: Final = 10
"""How much of a measured bound is not counted on."""


class ProvenDelays:
    """The lower bounds that are counted on, edge by edge."""

    def __init__(self) -> None:
        self._counted_ns: dict[str, int] = {}
        self._higher: dict[str, tuple[int, int]] = {}
        """Since when an edge's bound has been higher than what is counted on, and the least of it."""

    @property
    def counted_ns(self) -> Mapping[str, int]:
        """What is counted on; edges of which nothing is proven are left out."""
        return self._counted_ns

    def update(self, measured_ns: Mapping[str, int], now_ns: int) -> bool:
        """Look at what is measured now, about every second; says whether `counted_ns` has changed."""
        before = dict(self._counted_ns)
        for edge in self._counted_ns.keys() | self._higher.keys() | measured_ns.keys():
            self._judge(edge, _usable_ns(measured_ns.get(edge, 0)), now_ns)
        return before != self._counted_ns

    def _judge(self, edge: str, usable_ns: int, now_ns: int) -> None:
        counted_ns = self._counted_ns.get(edge, 0)
        if usable_ns <= counted_ns:
            self._higher.pop(edge, None)
            self._count_on(edge, usable_ns)
            return
        since_ns, least_ns = self._higher.get(edge, (now_ns, usable_ns))
        least_ns = min(least_ns, usable_ns)
        self._higher[edge] = since_ns, least_ns
        if now_ns - since_ns >= RISE_AFTER_NS:
            del self._higher[edge]
            self._count_on(edge, least_ns)

    def _count_on(self, edge: str, usable_ns: int) -> None:
        if usable_ns:
            self._counted_ns[edge] = usable_ns
        else:
            self._counted_ns.pop(edge, None)


def _usable_ns(measured_ns: int) -> int:
    return measured_ns * (100 - MARGIN_PERCENT) // 100 // MILLISECOND_NS * MILLISECOND_NS
