"""Keeping the garbage collector out of the way of messages.

A broker holds hundreds of thousands of objects per ten thousand topics, and one full collection
looks through all of them while messages wait: half a second and more. But hardly anything a broker
drops is held by a cycle, and what is has mostly been made a moment before: each request to ZooKeeper
leaves one. So the collector looks at the young by itself, as they come. Those that outlive that are
looked at once more, some at a time, when twenty seconds have passed or many have come together, and
then never again (`gc.collect(1)`; nothing makes the collector look at the oldest by itself). A cycle
that is still in use at that moment and is dropped later stays. Such cycles are found when the process
holds twice as much and more: then everything is looked through once.

How much it holds is asked of the allocator, which knows it per page. The collector would count its
objects one by one, up to a tenth of a second with ten thousand topics.
"""

import asyncio
import gc
import logging
import sys
from typing import Final

log = logging.getLogger("isthmus.garbage")

YOUNG_OBJECTS: Final = 5_000
"""New objects that call for a collection of the young; it takes a millisecond or two."""
NEVER: Final = 1_000_000_000
SET_ASIDE_EVERY: Final = 20
"""What has outlived the young is looked at with every so manieth call, and set aside ..."""
SET_ASIDE_AFTER: Final = 8
"""... or after so many collections of the young: that many times their number take some ten milliseconds."""
GROWTH: Final = 2.0
GROWTH_LEAST: Final = 3_000_000
"""Blocks of memory, some 300 MB; what grows by less is not worth a pause."""
LOOK_EVERY: Final = 60
"""Blocks are counted with every so manieth call."""


class Garbage:
    """Decides what the garbage collector looks at. One per process."""

    def __init__(self, growth_least: int = GROWTH_LEAST) -> None:
        self._growth_least = growth_least
        self._calls = 0
        self._base = 0
        self.full_collections = 0

    def start(self) -> None:
        """Collect once, then only the young."""
        gc.set_threshold(YOUNG_OBJECTS, NEVER, NEVER)
        self._collect()

    def set_aside(self) -> None:
        """Set survivors aside if it is time to; called every second."""
        self._calls += 1
        if self._calls % SET_ASIDE_EVERY == 0 or gc.get_count()[1] >= SET_ASIDE_AFTER:
            gc.collect(1)
        if self._calls % LOOK_EVERY == 0:
            self.look_through_if_grown()

    def look_through_if_grown(self) -> None:
        """Collect everything if much has been added since the last time."""
        if sys.getallocatedblocks() > GROWTH * self._base + self._growth_least:
            self._collect()
            log.info("looked through all objects", extra={"blocks": self._base})

    def _collect(self) -> None:
        gc.collect()
        self._base = sys.getallocatedblocks()
        self.full_collections += 1


def let_go(transport: asyncio.BaseTransport) -> None:
    """Free a transport whose connection is gone: asyncio's refers to itself, by what it calls to read."""
    if hasattr(transport, "_read_ready_cb"):
        transport._read_ready_cb = None
