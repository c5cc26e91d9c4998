"""Which ways a topic's messages take from its ingress edge to an egress edge (PubSubCoord, III.3.2.4).

There are two *paths*: through the topic's routing broker, and straight to the other edge. Three
policies choose among them:

    single      the routing broker, as if there were no other path
    both        every message takes both paths; the egress keeps what comes first (the paper's)
    adaptive    the cheapest choice that keeps the deadline with the wanted probability

All of it is a function of what is known of the links (`PathView`); nothing here knows sockets or
clocks. The probability that a path keeps a deadline is that of its delay, over all its links, times
that of not being lost on any of them. Paths fail independently of each other, copies on one link as
dependently as was measured (`overlay.quality`). What a choice costs is counted in frames on links.

*Reserve.* The owner of a message is the path it is sent on at once. With the direct path as the owner
the ingress sees from acknowledgements what has arrived. If the deadline leaves time for it, the routing
path is then a reserve: it carries only what has not been acknowledged at the last moment from which it
still arrives in time.

*No flapping.* A choice that no longer keeps the deadline is replaced at once. A cheaper one is taken
only if it would fail at most half as often as is allowed, without interruption for a while; and if it
has to be given up again soon, that while doubles (`Decider`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from overlay.limits import MILLISECOND_NS, SECOND_NS
from overlay.quality import Distribution, in_series, loss_of_all, quantile_ns

IN_TIME_WANTED: Final = 0.999
"""Share of messages that should keep their deadline, unless configured."""
NODE_NS: Final = 2 * MILLISECOND_NS
"""Allowed for each node on the way besides the links."""
RESERVE_MARGIN_NS: Final = 15 * MILLISECOND_NS
"""Acknowledgements are collected for a loop tick, and timers may be late."""
RESERVE_MOST_NS: Final = SECOND_NS
"""However far the deadline is: until then the ingress keeps every message for the other path in memory."""
CHEAPER_AFTER_NS: Final = 3 * SECOND_NS
CHEAPER_AFTER_MOST_NS: Final = 600 * SECOND_NS
SOON_NS: Final = 60 * SECOND_NS
"""A choice given up again within this time was made too early."""
_WORTH_A_PATH: Final = 0.001
"""Where the deadline cannot be kept as wanted, a second path must save at least this share."""


class Policy(StrEnum):
    """How to choose paths."""

    SINGLE = "single"
    BOTH = "both"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class LinkView:
    """What is known of one direction of a link."""

    delays: Distribution
    """Empty: not measured yet."""
    loss: float = 0.0
    burst: float = 0.0
    copies: int = 1
    """How often urgent messages are sent on it."""


@dataclass(frozen=True, slots=True)
class PathView:
    """A path as it is now: its links in order."""

    links: tuple[LinkView, ...]

    @property
    def delays(self) -> Distribution:
        """From ingress to egress, nodes included; empty while some link is not measured."""
        delays = in_series(link.delays for link in self.links)
        return tuple((delay_ns + len(self.links) * NODE_NS, share) for delay_ns, share in delays)

    @property
    def frames(self) -> int:
        """What one message costs on this path."""
        return sum(link.copies for link in self.links)

    def in_time(self, deadline_ns: int, delays: Distribution | None = None) -> float:
        """The probability that a message arrives within the deadline; `delays` if known already."""
        arrives = 1.0
        for link in self.links:
            arrives *= 1 - loss_of_all(link.loss, link.burst, link.copies)
        known = self.delays if delays is None else delays
        return arrives * sum(share for delay_ns, share in known if delay_ns <= deadline_ns)


@dataclass(frozen=True, slots=True)
class Choice:
    """The paths of a topic's messages to one egress edge."""

    routing: bool
    direct: bool
    reserve_after_ns: int = 0
    """When after its birth a message not acknowledged takes the routing path; 0: never."""

    @property
    def name(self) -> str:
        """For people."""
        if self.routing:
            return "both" if self.direct else "routing"
        return "direct, routing in reserve" if self.reserve_after_ns else "direct"


ROUTING: Final = Choice(routing=True, direct=False)
DIRECT: Final = Choice(routing=False, direct=True)
BOTH: Final = Choice(routing=True, direct=True)


@dataclass(frozen=True, slots=True)
class Option:
    """A choice with what it promises and costs."""

    choice: Choice
    in_time: float
    frames: float
    typical_ns: int
    """The median delay of its fastest path."""


def options(routing: PathView, direct: PathView, deadline_ns: int) -> list[Option]:
    """Every choice there is while both paths are open; empty while one of them is not measured."""
    by_routing, by_direct = routing.delays, direct.delays
    if not by_routing or not by_direct:
        return []
    routing_in_time = routing.in_time(deadline_ns, by_routing)
    direct_in_time = direct.in_time(deadline_ns, by_direct)
    together = 1 - (1 - routing_in_time) * (1 - direct_in_time)
    routing_ns, direct_ns = quantile_ns(by_routing, 0.5), quantile_ns(by_direct, 0.5)
    found = [
        Option(ROUTING, routing_in_time, routing.frames, routing_ns),
        Option(DIRECT, direct_in_time, direct.frames, direct_ns),
        Option(BOTH, together, routing.frames + direct.frames, min(routing_ns, direct_ns)),
    ]
    after_ns = reserve_after_ns(by_routing, by_direct, deadline_ns)
    if after_ns:
        frames = direct.frames + (1 - direct_in_time) * routing.frames
        found[1] = Option(Choice(False, True, after_ns), together, frames, direct_ns)
    return found


def reserve_after_ns(routing: Distribution, direct: Distribution, deadline_ns: int) -> int:
    """The last moment from which the routing path still keeps the deadline, if that is not too early.

    With a distant deadline sooner: once an acknowledgement is long overdue. 0 if a message sent directly
    cannot be acknowledged by then: it would nearly always be sent twice.
    """
    after_ns = deadline_ns - quantile_ns(routing, IN_TIME_WANTED) - RESERVE_MARGIN_NS
    acknowledged_ns = 2 * quantile_ns(direct, 0.99) + RESERVE_MARGIN_NS
    if after_ns < acknowledged_ns:
        return 0
    return min(after_ns, max(acknowledged_ns, RESERVE_MOST_NS))


def best(found: Sequence[Option], wanted: float) -> Option:
    """The cheapest option that keeps the deadline as wanted; else the one that comes nearest."""
    good = [option for option in found if option.in_time >= wanted]
    if good:
        return min(good, key=lambda option: (option.frames, -option.in_time, option.typical_ns))
    most = max(option.in_time for option in found)
    if not most:  # nothing can be in time: one path, the faster one
        return min(found, key=lambda option: (option.choice == BOTH, option.typical_ns))
    near = [option for option in found if option.in_time >= most - _WORTH_A_PATH]
    return min(near, key=lambda option: (option.frames, option.typical_ns))


class Decider:
    """The adaptive policy for one deadline and one egress edge."""

    __slots__ = ("_cheaper", "_cheaper_since_ns", "_since_ns", "_wanted", "_while_ns", "changes", "current")

    def __init__(self, wanted: float = IN_TIME_WANTED) -> None:
        self._wanted = wanted
        self.current = BOTH
        """Until something is known, nothing is risked."""
        self.changes = 0
        self._since_ns = 0
        self._cheaper = BOTH
        self._cheaper_since_ns: int | None = None
        self._while_ns = CHEAPER_AFTER_NS

    def decide(self, found: Sequence[Option], now_ns: int) -> Choice:
        """Choose anew; to be called regularly with the options as they are now."""
        if not found:
            return self.current
        now = next(option for option in found if _same(option.choice, self.current))
        if now.in_time < self._wanted:
            # Failing: whatever is best, at once. Something cheaper counts only as such, below.
            better = best(found, self._wanted)
            if better.in_time > now.in_time + _WORTH_A_PATH / 2 or (
                better.in_time >= self._wanted and better.frames >= now.frames
            ):
                too_early = now_ns - self._since_ns < SOON_NS and better.frames > now.frames
                self._while_ns = (
                    min(2 * self._while_ns, CHEAPER_AFTER_MOST_NS) if too_early else CHEAPER_AFTER_NS
                )
                return self._change(better.choice, now_ns)
        # What is allowed to fail is shared: half of it is kept for the noise of measuring.
        sure = 1 - (1 - self._wanted) / 2
        cheap = best(found, sure)
        if cheap.frames >= now.frames or (
            cheap.in_time < sure and cheap.in_time < now.in_time - _WORTH_A_PATH
        ):
            self._cheaper_since_ns = None
            self.current = now.choice  # its reserve may have moved
            return self.current
        if self._cheaper_since_ns is None or not _same(cheap.choice, self._cheaper):
            self._cheaper, self._cheaper_since_ns = cheap.choice, now_ns
        elif now_ns - self._cheaper_since_ns >= self._while_ns:
            return self._change(cheap.choice, now_ns)
        self.current = now.choice
        return self.current

    def _change(self, choice: Choice, now_ns: int) -> Choice:
        if not _same(choice, self.current):
            self.changes += 1
            self._since_ns = now_ns
        self._cheaper_since_ns = None
        self.current = choice
        return choice


def _same(a: Choice, b: Choice) -> bool:
    return (a.routing, a.direct) == (b.routing, b.direct)
