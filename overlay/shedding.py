"""Dropping messages on purpose, within what their topics allow.

When a peer takes less than is sent to it, deadlines can only be kept for some by giving up
others. Best effort goes first and whole. Of a topic with a loss tolerance, at most that many
messages in a row are dropped, counted by sequence, so that what was lost before this hop is
counted too. Everything else passes.
"""

from typing import TYPE_CHECKING

from librt.strings import read_i64_le

from overlay.batch import (
    LENGTH_WORD_OFFSET,
    MESSAGE_HEADER_BYTES,
    PUBLISHER_OFFSET,
    SEQUENCE_OFFSET,
    U32,
    Run,
)
from overlay.limits import SHEDDING_HOPS

if TYPE_CHECKING:
    from mypy_extensions import i64


def share_of(loss_tolerance: int | None) -> int | None:
    """What one node may shed in a row: what several nodes shed must add up to the tolerance at most."""
    return None if loss_tolerance is None else loss_tolerance // SHEDDING_HOPS


class Shedder:
    """What has been let pass to one peer while it was overloaded."""

    __slots__ = ("_passed", "shed")

    def __init__(self) -> None:
        self.shed = 0
        """Messages dropped so far."""
        # Highest sequence passed, by publisher. Without an entry nothing is known, so it passes.
        self._passed: dict[int, int] = {}

    def sift(self, run: Run, loss_tolerance: int | None) -> Run | None:
        """What of a run must be sent although the peer is overloaded; None if nothing."""
        if loss_tolerance is None:
            self.shed += run.messages
            return None
        if loss_tolerance == 0:
            return run
        data = run.data
        kept: list[bytes] = []
        offset: i64 = 0
        while offset < len(data):
            publisher = read_i64_le(data, offset + PUBLISHER_OFFSET)
            sequence = read_i64_le(data, offset + SEQUENCE_OFFSET)
            length: i64 = read_i64_le(data, offset + LENGTH_WORD_OFFSET) >> 32
            end: i64 = offset + MESSAGE_HEADER_BYTES + (length & U32)
            passed = self._passed.get(publisher)
            if passed is None or sequence - passed > loss_tolerance or sequence <= passed:
                kept.append(data[offset:end])
                self._passed[publisher] = max(sequence, passed or 0)
            offset = end
        self.shed += run.messages - len(kept)
        if len(kept) == run.messages:
            return run
        return Run(len(kept), b"".join(kept)) if kept else None

    def calm(self) -> None:
        """The overload is over. Forgetting is safe: what is unknown passes."""
        self._passed.clear()
