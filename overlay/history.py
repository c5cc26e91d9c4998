"""What a node has seen of one publisher: tells new messages from duplicates and late ones.

Sequences of a publisher start at 1 and rise by one. A message is delivered only if its sequence
is above all delivered before, so a subscriber never sees a step back. A sequence that was
skipped is remembered as missing; if it still comes it is *late*: lost for the subscriber, and
counted apart from duplicates.
"""

from enum import IntEnum

from overlay.limits import MISSING_SEQUENCES_MAX


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
