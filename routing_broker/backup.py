"""Copies kept for other routing brokers, in case one of them dies (FRAME, IV.B).

A primary sends copies as data frames on its link to the backup; frames on a link are numbered,
so a copy is named by the number of its frame, and pruning by ranges of numbers. A copy stays
until it is pruned, recovered, or pushed out by newer ones: the buffer is a ring.

FRAME's ring has room for ten messages per topic. A primary that cannot reach an edge has more copies made of
what waits for it, and they are all that is left when it dies or its topics are moved. So where copies are
pruned, which keeps the ring all but empty otherwise, it pushes none out before they take some memory.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from overlay.batch import Passage


class Kept(NamedTuple):
    """A frame of copies."""

    body: bytes
    clock_shift_ns: int
    """Of the link to the primary when it came."""
    messages: int
    came: Passage | None = None
    """Set if some of them are traced."""


class BackupBuffer:
    """Copies of one primary, by frame number."""

    def __init__(self, capacity_messages: int, capacity_bytes: int = 0) -> None:
        """Room for so many messages, or so many bytes of frames, whichever is more."""
        self.capacity_messages = capacity_messages
        self._capacity_bytes = capacity_bytes
        self.evicted = 0
        """Messages pushed out by newer ones."""
        self.pruned = 0
        self._frames: OrderedDict[int, Kept] = OrderedDict()
        self._messages = 0
        self._bytes = 0

    def __len__(self) -> int:
        """Messages kept."""
        return self._messages

    def keep(self, number: int, kept: Kept) -> None:
        """Store a frame; the oldest ones make room."""
        self._frames[number] = kept
        self._messages += kept.messages
        self._bytes += len(kept.body)
        while not self._fits and len(self._frames) > 1:
            _, oldest = self._frames.popitem(last=False)
            self._forget(oldest)
            self.evicted += oldest.messages

    def prune(self, ranges: Iterable[tuple[int, int]]) -> list[Kept]:
        """The primary has dispatched the frames of these ranges, first and last included; returns them."""
        pruned: list[Kept] = []
        for first, last in ranges:
            numbers = (
                range(first, last + 1)
                if last - first < len(self._frames)
                else [number for number in self._frames if first <= number <= last]
            )
            for number in numbers:
                kept = self._frames.pop(number, None)
                if kept is not None:
                    self._forget(kept)
                    self.pruned += kept.messages
                    pruned.append(kept)
        return pruned

    def recover(self) -> list[Kept]:
        """Take everything, oldest first: the primary is dead."""
        frames = list(self._frames.values())
        self._frames.clear()
        self._messages = self._bytes = 0
        return frames

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._messages == sum(kept.messages for kept in self._frames.values())
        assert self._bytes == sum(len(kept.body) for kept in self._frames.values())
        assert self._fits or len(self._frames) == 1

    @property
    def _fits(self) -> bool:
        return self._messages <= self.capacity_messages or self._bytes <= self._capacity_bytes

    def _forget(self, kept: Kept) -> None:
        self._messages -= kept.messages
        self._bytes -= len(kept.body)


def to_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Frame numbers as ranges, first and last included."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
