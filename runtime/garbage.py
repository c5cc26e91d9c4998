"""Keeping the garbage collector out of the way of messages.

A broker holds hundreds of thousands of objects per ten thousand topics, and one full collection
looks through all of them while messages wait: half a second and more. But hardly anything a broker
drops is held by a cycle. So only young objects are collected automatically. What outlives that is
set aside every second, where no collection looks (`gc.freeze`). Cycles among it are found when the
process holds twice as much and more: then everything is looked through once. A closed connection may
leave some ten objects behind, so that is after some hundred thousand of them.

How much it holds is asked of the allocator, which knows it per page. The collector would count what is
set aside one by one, up to a tenth of a second with ten thousand topics.
"""

import gc
import logging
import sys
from typing import Final

log = logging.getLogger("isthmus.garbage")

YOUNG_OBJECTS: Final = 5_000
"""New objects that call for a collection of the young; it takes a millisecond or two."""
NEVER: Final = 1_000_000_000
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
        """Set the survivors aside; called every second."""
        # What is garbage already would be set aside with them: each request to ZooKeeper leaves a cycle.
        gc.collect(0)
        gc.freeze()
        self._calls += 1
        if self._calls % LOOK_EVERY == 0:
            self.look_through_if_grown()

    def look_through_if_grown(self) -> None:
        """Collect everything if much has been added since the last time."""
        if sys.getallocatedblocks() > GROWTH * self._base + self._growth_least:
            self._collect()
            log.info("looked through all objects", extra={"blocks": self._base})

    def _collect(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._base = sys.getallocatedblocks()
        self.full_collections += 1
