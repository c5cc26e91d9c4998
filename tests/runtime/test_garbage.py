"""The collector looks at the young every time, and at the rest once it has grown."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from runtime.garbage import LOOK_EVERY, Garbage

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
    gc.unfreeze()
    gc.set_threshold(*before)


def test_a_young_cycle_goes_by_itself(garbage: Garbage) -> None:
    gone = weakref.ref(Node())
    keep = [[number] for number in range(2 * gc.get_threshold()[0])]
    assert gone() is None
    assert keep


def test_what_is_garbage_already_is_not_set_aside(garbage: Garbage) -> None:
    gone = weakref.ref(Node())
    assert gone() is not None, "too few objects for a collection"
    garbage.set_aside()
    assert gone() is None


def test_what_is_set_aside_is_not_looked_at_until_much_has_been_added(garbage: Garbage) -> None:
    node = Node()
    gone = weakref.ref(node)
    garbage.set_aside()
    del node
    gc.collect()
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
