"""What a subscriber is told besides messages: that some are slow, that some are missing, that none come.

A subscriber that only gets messages cannot tell a quiet topic from a broken path. One that asks to
be *aware* (`subscribe(..., aware=True)`) gets events as well:

    SlowMessage    a message may be older than the subscription's limit
    Gap            sequences of a publisher were skipped: these messages are lost, or come too late
    MissedPeriod   a live publisher has not been heard for the topic's period and an allowance

Whether a publisher lives is what the overlay says: one that left in order, or whose client has
been gone for its liveliness, is not waited for. One that was never heard is waited for from when the
edge broker first named it: declaring a publisher on a topic with a period is the promise to publish.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from overlay.limits import MILLISECOND_NS, SECOND_NS

EVENTS_MAX: Final = 1_024
"""Events that wait for a subscriber; beyond it the oldest are dropped, and counted."""


@dataclass(frozen=True, slots=True)
class SlowMessage:
    """A message was delivered that may be older than the limit."""

    topic: str
    publisher: int
    sequence: int
    age_bound_ms: float
    limit_ms: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages of a publisher are missing before one that was delivered."""

    topic: str
    publisher: int
    first: int
    """Sequence of the first missing message."""
    last: int
    """Sequence of the last one."""


@dataclass(frozen=True, slots=True)
class MissedPeriod:
    """A publisher that lives has not been heard for too long. Told once until it is heard again.

    Also of one that has declared itself and not published since, or whose messages never came here.
    """

    topic: str
    publisher: int
    sequence: int
    """The last that was heard; 0 if none was since the edge broker named the publisher."""
    silent_ms: float
    """Since that one came, or since the publisher was named."""
    allowed_ms: float


AwarenessEvent = SlowMessage | Gap | MissedPeriod


class Awareness:
    """The events of one subscription, and the watch over its publishers' periods."""

    def __init__(self, topic: str, clock: Callable[[], int]) -> None:
        self._topic = topic
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._events: deque[AwarenessEvent] = deque(maxlen=EVENTS_MAX)
        self._arrived = asyncio.Event()
        self._allowed_ns: int | None = None
        self._heard: dict[int, tuple[int, int]] = {}
        """By publisher: when it was last heard, and which sequence; if never, when it was named, and 0."""
        self._silent: set[int] = set()
        """Publishers whose silence has been told."""
        self._live: frozenset[int] = frozenset()
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0

    @property
    def has_events(self) -> bool:
        """An event waits to be taken."""
        return bool(self._events)

    def allow(self, period_ms: float | None, allowance_ms: float) -> None:
        """How long publishers may be silent; without a period, as long as they like."""
        allowed_ns = None
        if period_ms is not None:
            allowed_ns = round((period_ms + allowance_ms) * MILLISECOND_NS)
        if allowed_ns != self._allowed_ns:
            self._allowed_ns = allowed_ns
            self._arm()

    def set_publishers(self, live: frozenset[int]) -> None:
        """Who publishes on the topic now.

        Messages may be faster than this news, so only who was on the list before can have left. Who is
        new on it and was not heard yet has a period and the allowance from now.
        """
        for publisher in self._live - live:
            self._heard.pop(publisher, None)
            self._silent.discard(publisher)
        named = self._clock(), 0
        for publisher in live - self._live:
            self._heard.setdefault(publisher, named)
        self._live = live
        if self._timer is None:
            self._arm()

    def heard(self, publisher: int, sequence: int) -> None:
        """A message was delivered."""
        self._heard[publisher] = self._clock(), sequence
        self._silent.discard(publisher)
        if self._timer is None:
            self._arm()

    def tell(self, event: AwarenessEvent) -> None:
        """Something the subscriber should know."""
        self.dropped += len(self._events) == EVENTS_MAX
        self._events.append(event)
        self._arrived.set()

    def take(self) -> AwarenessEvent:
        """The oldest event that waits."""
        return self._events.popleft()

    async def wait(self) -> None:
        """Wait for something to take, or for the end."""
        self._arrived.clear()
        await self._arrived.wait()

    def end(self) -> None:
        """No more events; those that wait can still be taken."""
        self._allowed_ns = None
        self._arm()
        self._arrived.set()

    def _arm(self) -> None:
        """Wake up when the next publisher will have been silent for too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = [
            when_ns for publisher, (when_ns, _) in self._heard.items() if publisher not in self._silent
        ]
        if self._allowed_ns is not None and waiting:
            wait_ns = min(waiting) + self._allowed_ns - self._clock()
            self._timer = self._loop.call_later(max(0, wait_ns) / SECOND_NS, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._allowed_ns is None:
            return
        now_ns = self._clock()
        for publisher, (when_ns, sequence) in self._heard.items():
            silent_ns = now_ns - when_ns
            if silent_ns >= self._allowed_ns and publisher not in self._silent:
                self._silent.add(publisher)
                self.tell(
                    MissedPeriod(
                        self._topic,
                        publisher,
                        sequence,
                        silent_ns / MILLISECOND_NS,
                        self._allowed_ns / MILLISECOND_NS,
                    )
                )
        self._arm()
