"""Order at a subscriber that changes its edge.

The new edge sends what comes from now on, and again what the subscriber has missed; the old one, if it
lives, the rest of what it has. So for a while messages may come before their predecessors. Those wait:
until the gap is closed, as long as the topic's deadline allows, or, if more are missing than the topic may
lose, until all that is sent again should have come. Then what is missing is lost.

The new edge may have to ask ZooKeeper for the topic before it can have anything sent again, and that may take
any time. So it is waited for from when the edge serves the subscription, not from when it was reached.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from overlay.history import History
from overlay.limits import MILLISECOND_NS, RESUME_NS
from overlay.messages import Message
from overlay.qos import TopicQos

HELD_MAX: Final = 65_536
"""Messages that may wait for their predecessors; with more of them nothing waits any longer."""
_HOLD_MOST_NS: Final = 200 * MILLISECOND_NS
"""Longest that a message waits for predecessors that its topic may lose."""


class Arrived(NamedTuple):
    """A message as it came."""

    message: Message
    age_ns: int | None
    now_ns: int
    bound_ns: int = 0
    """How long its last link took at most."""
    edge: int = 0
    """The edge it came from, as traces name it."""
    until_ns: int = 0
    """It waits no longer than this."""


class Resumption:
    """The messages of one subscription that wait for their predecessors."""

    __slots__ = ("_held", "_is_served", "_number", "_until_ns")

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Arrived]] = {}
        """By publisher and sequence."""
        self._number = 0
        self._is_served = False
        self._until_ns = 0

    def begin(self, now_ns: int) -> None:
        """The edge changes: until a while after `served` messages may come out of order."""
        self._is_served = False
        self._until_ns = now_ns + RESUME_NS

    def served(self, now_ns: int) -> None:
        """The new edge has the subscription."""
        self._is_served = True
        self._until_ns = now_ns + RESUME_NS

    def is_over(self, now_ns: int) -> bool:
        """Messages come in order, and none waits."""
        return self._is_served and now_ns >= self._until_ns and not self._held

    @property
    def due_ns(self) -> int | None:
        """When the next one stops waiting; None if none waits."""
        return min((item.until_ns for held in self._held.values() for item in held.values()), default=None)

    def take(self, arrived: Arrived, history: History, qos: TopicQos) -> Iterator[Arrived]:
        """The messages to deliver now that this one has come: none if it has to wait."""
        publisher, sequence = arrived.message.publisher, arrived.message.sequence
        held = self._held.get(publisher)
        missing = sequence - history.highest - 1
        # Whoever is heard for the first time starts with whatever comes first.
        mixed = not self._is_served or arrived.now_ns < self._until_ns
        waits = history.highest > 0 and missing > 0 and (held is not None or mixed)
        if not waits or qos.loss_tolerance is None:
            yield arrived
            yield from self._successors(publisher, history)
            return
        if held is None:
            held = self._held[publisher] = {}
        if sequence not in held:
            until_ns = self._until_ns if self._is_served else arrived.now_ns + RESUME_NS
            if missing <= qos.loss_tolerance:
                deadline_ns = qos.deadline_ns or _HOLD_MOST_NS
                until_ns = min(until_ns, arrived.now_ns + min(deadline_ns, _HOLD_MOST_NS))
            held[sequence] = arrived._replace(until_ns=max(until_ns, arrived.now_ns))
            self._number += 1
        if self._number > HELD_MAX:
            yield from self.release(None)

    def release(self, now_ns: int | None) -> Iterator[Arrived]:
        """Those that can wait no longer, with all before them, in order; all of them if None."""
        for publisher, held in list(self._held.items()):
            due = [sequence for sequence, item in held.items() if now_ns is None or item.until_ns <= now_ns]
            last = max(due, default=0)
            while last + 1 in held:
                last += 1
            for sequence in sorted(sequence for sequence in held if sequence <= last):
                yield held.pop(sequence)
                self._number -= 1
            if not held:
                del self._held[publisher]

    def _successors(self, publisher: int, history: History) -> Iterator[Arrived]:
        """What waited only for what has just been delivered."""
        held = self._held.get(publisher)
        if held is None:
            return
        while (item := held.pop(history.highest + 1, None)) is not None:
            self._number -= 1
            yield item
        if not held:
            del self._held[publisher]
