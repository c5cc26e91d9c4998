"""What a node has seen of one publisher: tells new messages from duplicates and late ones.

Sequences of a publisher start at 1 and rise by one. A message is delivered only if its sequence
is above all delivered before, so a subscriber never sees a step back. A sequence that was
skipped is remembered as missing; if it still comes it is *late*: lost for the subscriber, and
counted apart from duplicates.
"""

from collections.abc import Iterator
from enum import IntEnum

from overlay.limits import MISSING_SEQUENCES_MAX, PUBLISHERS_REMEMBERED_MAX


class Verdict(IntEnum):
    """What a sequence means."""

    NEW = 0
    DUPLICATE = 1
    LATE = 2


class History:
    """The sequences seen of one publisher."""

    __slots__ = ("_missing", "highest", "longest_gap", "lost")

    def __init__(self) -> None:
        self.highest = 0
        """Highest sequence delivered; 0 before the first."""
        self.lost = 0
        """Sequences skipped since the first delivered one, late arrivals included."""
        self.longest_gap = 0
        """Most sequences skipped in a row."""
        self._missing: dict[int, None] = {}

    def judge(self, sequence: int) -> Verdict:
        """Record `sequence` and say whether to deliver it."""
        highest = self.highest
        if sequence < 1:  # none that a publisher gives: above 2^63 on the wire it reads as negative
            return Verdict.DUPLICATE
        if sequence == highest + 1 or highest == 0:
            self.highest = sequence
            return Verdict.NEW
        if sequence > highest:
            self._skip(highest + 1, sequence)
            self.highest = sequence
            return Verdict.NEW
        if sequence in self._missing:
            del self._missing[sequence]
            return Verdict.LATE
        return Verdict.DUPLICATE

    def validate(self) -> None:
        """Assert the invariants."""
        assert all(0 < sequence < self.highest for sequence in self._missing)
        assert len(self._missing) <= min(self.lost, MISSING_SEQUENCES_MAX)
        assert self.longest_gap <= self.lost

    def _skip(self, first: int, end: int) -> None:
        gap = end - first
        self.lost += gap
        self.longest_gap = max(self.longest_gap, gap)
        missing = self._missing
        for sequence in range(max(first, end - MISSING_SEQUENCES_MAX), end):
            missing[sequence] = None
        while len(missing) > MISSING_SEQUENCES_MAX:
            del missing[next(iter(missing))]


class Histories:
    """The histories of a topic's publishers, of which any number may come and go.

    Those heard of lately are kept, up to a limit and as many again: when there are as many of them as may
    be, they become the older ones, and the older ones before them are forgotten but for what they lost.
    """

    __slots__ = ("_longest_gap", "_lost", "_most", "_older", "_recent")

    def __init__(self, most: int = PUBLISHERS_REMEMBERED_MAX) -> None:
        self._most = most
        self._recent: dict[int, History] = {}
        self._older: dict[int, History] = {}
        self._lost = 0
        self._longest_gap = 0

    def of(self, publisher: int) -> History:
        """What was seen of this publisher; a new history for a new one."""
        history = self._recent.get(publisher)
        if history is None:
            history = self._older.pop(publisher, None) or History()
            if len(self._recent) >= self._most:
                self._lost += sum(item.lost for item in self._older.values())
                self._longest_gap = max(
                    self._longest_gap, *(item.longest_gap for item in self._older.values()), 0
                )
                self._older, self._recent = self._recent, {}
            self._recent[publisher] = history
        return history

    def __iter__(self) -> Iterator[tuple[int, History]]:
        """Publishers and their histories, the youngest first."""
        for group in (self._recent, self._older):
            yield from reversed(group.items())

    @property
    def lost(self) -> int:
        """Sequences skipped, of all publishers ever."""
        return self._lost + sum(history.lost for _, history in self)

    @property
    def longest_gap(self) -> int:
        """Most sequences skipped in a row, of all publishers ever."""
        return max(self._longest_gap, *(history.longest_gap for _, history in self), 0)
