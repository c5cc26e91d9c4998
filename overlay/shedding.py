"""Dropping messages on purpose, within what their topics allow.

When a peer takes less than is sent to it, deadlines can only be kept for some by giving up
others. Best effort goes first and whole. Of a topic with a loss tolerance, a few messages in a
row are dropped, counted by sequence, so that what was lost before this hop is counted too.
Everything else passes.

A routing broker may die in the middle of an overload, and what it takes with it lies right beside
what was shed. So a topic's tolerance is divided: `crash_losses` of it belong to a crash, the rest
is shared out among the nodes on the way. However the losses meet, they stay within the tolerance.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
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
from overlay.bounds import Delays, needs_replication
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from overlay.trace import Reason

if TYPE_CHECKING:
    from mypy_extensions import i64


class Hop(IntEnum):
    """A node on a message's way that may shed; the first ones get what does not divide evenly."""

    ROUTER = 0
    INGRESS = 1
    EGRESS = 2


Shares = tuple[int, ...] | None
"""What each hop may shed in a row, by `Hop`; None: anything."""


def crash_losses(qos: TopicQos, delays: Delays) -> int:
    """Losses in a row that a crash must be allowed, so that it needs no copies (FRAME, Lemma 1).

    That is at most the topic's tolerance. All of it, if the topic needs copies even so.
    """
    tolerance = qos.loss_tolerance
    assert tolerance is not None, "best effort promises nothing"
    if needs_replication(qos, delays):
        return tolerance

    def suffices(losses: int) -> bool:
        return not needs_replication(replace(qos, loss_tolerance=losses), delays)

    return bisect_left(range(tolerance + 1), True, key=suffices)


@lru_cache(1_024)  # thousands of topics have the same few requirements
def shares_of(qos: TopicQos, delays: Delays) -> Shares:
    """What each hop may shed in a row: all of them and a crash add up to the tolerance at most."""
    if qos.loss_tolerance is None:
        return None
    each, left = divmod(qos.loss_tolerance - crash_losses(qos, delays), len(Hop))
    return tuple(each + (hop < left) for hop in Hop)


class Shedder:
    """What has been let pass to one peer while it was overloaded."""

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        # Highest sequence passed, by publisher. Without an entry nothing is known, so it passes.
        self._passed: dict[int, int] = {}

    def sift(self, run: Run, may_shed: int | None) -> Run | None:
        """What of a run must be sent although the peer is overloaded; None if nothing."""
        if may_shed is None:
            return None
        if may_shed == 0:
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
            if passed is None or sequence - passed > may_shed or sequence <= passed:
                kept.append(data[offset:end])
                self._passed[publisher] = max(sequence, passed or 0)
            offset = end
        if len(kept) == run.messages:
            return run
        return Run(len(kept), b"".join(kept)) if kept else None

    def relieve(
        self, outbox: Outbox, run: Run, may_shed: int | None, dropped: "Counter[str]", now_ns: int
    ) -> Run | None:
        """What of a run is to be queued for the peer of this outbox; None if nothing.

        All of it, unless the peer is overloaded. What is shed is counted in `dropped`, and traced.
        """
        if not outbox.is_overloaded(now_ns):
            return run
        sifted = self.sift(run, may_shed)
        if sifted is not run:
            reason = Reason.SHED_BEST_EFFORT if may_shed is None else Reason.SHED_TOLERATED
            dropped[reason.name.lower()] += run.messages - (sifted.messages if sifted else 0)
            if outbox.trace is not None:
                outbox.trace.shed(run, sifted, int(reason), now_ns)
        return sifted

    def calm(self) -> None:
        """The overload is over. Forgetting is safe: what is unknown passes."""
        self._passed.clear()
