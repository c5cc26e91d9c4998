"""Data frames that have been read and not processed yet, the most urgent first.

Usually there are none: what a socket gives is processed in the same turn of the loop. But a node that gets
too little of its processor has more to read than it can process, and bytes that wait in a socket are first
come, first served. So much at once is not processed where it is read. All sockets are read first, which
costs little, and their frames wait here by class, named in each frame's header; then frames are processed
for a millisecond or two, and all sockets are read again. An urgent frame waits for one such turn, however
much bulk has come before it.

Acknowledgements follow processing, so the sender's window bounds what waits here; where that is not enough,
because the peer is a client, its socket is not read for a while.
"""

import asyncio
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from overlay.limits import INBOX_BROKER_BYTES, INBOX_CLIENT_BYTES, INBOX_TURN_NS
from overlay.messages import Role
from overlay.urgency import SHEDDABLE, level_of
from runtime.host import Clock

if TYPE_CHECKING:
    from runtime.connection import Connection

_Item = tuple[int, int, "Connection", int, bytes]
"""Rank, order of arrival, where it came from, its number on the link, and the frame's body."""


class Inbox:
    """What waits to be processed at one node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._waiting: list[_Item] = []
        self._pushed = 0
        self._turn_scheduled = False
        self.is_processing = False
        """Frames are being processed: whoever is called by that must not ask for more."""

    @property
    def is_empty(self) -> bool:
        """Nothing waits."""
        return not self._waiting

    def push(self, connection: "Connection", rank: int, number: int, body: bytes) -> None:
        """Let a frame wait; `rank_of` says how it ranks."""
        self._pushed += 1
        heappush(self._waiting, (rank, self._pushed, connection, number, body))
        self._schedule()

    def drain(self, connection: "Connection") -> None:
        """Process now what waits of this connection: it ends, or what follows must not overtake that."""
        mine = sorted(item for item in self._waiting if item[2] is connection)
        if not mine:
            return
        self._waiting = [item for item in self._waiting if item[2] is not connection]
        heapify(self._waiting)
        self.is_processing = True
        try:
            for _, _, _, number, body in mine:
                connection.take_waiting(number, body)
        finally:
            self.is_processing = False

    def _schedule(self) -> None:
        if not self._turn_scheduled and self._waiting:
            self._turn_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_scheduled = False
        until_ns = self._clock() + INBOX_TURN_NS
        self.is_processing = True
        try:
            while self._waiting:
                _, _, connection, number, body = heappop(self._waiting)
                connection.take_waiting(number, body)
                if self._clock() >= until_ns:
                    break
        finally:
            self.is_processing = False
            self._schedule()


class Waiting:
    """What of one connection waits in the inbox."""

    __slots__ = ("_keeps_order", "_most_bytes", "_rank", "frames", "is_full", "waiting_bytes")

    def __init__(self, peer: Role) -> None:
        self._keeps_order = peer is Role.CLIENT
        """A client's frames stay in order, also where its topics become more or less urgent."""
        self._most_bytes = INBOX_CLIENT_BYTES if peer is Role.CLIENT else INBOX_BROKER_BYTES
        self._rank = 0
        self.frames = 0
        self.waiting_bytes = 0
        self.is_full = False
        """The peer's socket should not be read."""

    def add(self, body: bytes) -> int:
        """One more frame; returns how it ranks."""
        rank = rank_of(body)
        if self._keeps_order and self.frames:
            rank = max(rank, self._rank)
        self._rank = rank
        self.frames += 1
        self.waiting_bytes += len(body)
        self.is_full = self.is_full or self.waiting_bytes > self._most_bytes
        return rank

    def take(self, body: bytes) -> None:
        """A frame is being processed."""
        self.frames -= 1
        self.waiting_bytes -= len(body)
        self.is_full = self.is_full and self.waiting_bytes > self._most_bytes // 2


def rank_of(body: bytes) -> int:
    """How a data frame ranks, by its class: lower is sooner. Best effort comes last."""
    urgency = body[0] if body else 0
    return level_of(urgency) + (urgency & SHEDDABLE)
