"""The collector looks at the young every time, and at the rest once it has grown."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from runtime.garbage import LOOK_EVERY, SET_ASIDE_AFTER, SET_ASIDE_EVERY, YOUNG_OBJECTS, Garbage

GROWTH_LEAST = 100_000


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def garbage() -> Iterator[Garbage]:
    before = gc.get_threshold()
    garbage = Garbage(GROWTH_LEAST)
    garbage.start()
    yield garbage
    gc.set_threshold(*before)


def test_a_young_cycle_goes_by_itself(garbage: Garbage) -> None:
    gone = weakref.ref(Node())
    keep = [[number] for number in range(2 * gc.get_threshold()[0])]
    assert gone() is None
    assert keep


def outlive_the_young() -> None:
    """Collect the young: whoever lives now is not looked at again soon."""
    gc.collect(0)


def test_what_outlives_the_young_and_is_dropped_goes_before_it_is_set_aside(garbage: Garbage) -> None:
    """A request to ZooKeeper that takes a moment, a client that stays for ten seconds."""
    node = Node()
    gone = weakref.ref(node)
    outlive_the_young()
    del node
    gc.collect(0)
    assert gone() is not None, "it counts as young"
    for _ in range(SET_ASIDE_EVERY):
        garbage.set_aside()
    assert gone() is None


def test_many_survivors_are_set_aside_some_at_a_time(garbage: Garbage) -> None:
    node = Node()
    gone = weakref.ref(node)
    outlive_the_young()
    del node
    keep = [[number] for number in range(SET_ASIDE_AFTER * (YOUNG_OBJECTS + 1))]
    assert gc.get_count()[1] >= SET_ASIDE_AFTER - 1
    outlive_the_young()
    garbage.set_aside()
    assert gone() is None
    assert gc.get_count()[1] < SET_ASIDE_AFTER
    assert keep


def test_what_is_set_aside_is_not_looked_at_until_much_has_been_added(garbage: Garbage) -> None:
    node = Node()
    gone = weakref.ref(node)
    for _ in range(SET_ASIDE_EVERY):
        garbage.set_aside()
    del node
    gc.collect(1)
    assert gone() is not None, "a collection still looks at what was set aside"
    for _ in range(LOOK_EVERY):
        garbage.set_aside()
    assert garbage.full_collections == 1
    more = [[number] for number in range(sys.getallocatedblocks() + GROWTH_LEAST)]
    for _ in range(LOOK_EVERY):
        garbage.set_aside()
    assert garbage.full_collections == 2
    assert gone() is None
    assert more
