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

from overlay.limits import INBOX_TURN_NS
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


def rank_of(body: bytes) -> int:
    """How a data frame ranks, by its class: lower is sooner. Best effort comes last."""
    urgency = body[0] if body else 0
    return level_of(urgency) + (urgency & SHEDDABLE)
