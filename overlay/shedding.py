"""Dropping messages on purpose, within what their topics allow.

When a peer takes less than is sent to it, deadlines can only be kept for some by giving up
others. Best effort goes first and whole. Of a topic with a loss tolerance, every message whose
sequence is a multiple of some number always passes, and all others may be dropped. Every node on
the way keeps the same ones, so each may shed as much as the tolerance allows, however many of them
are overloaded at once, and none has to remember what it has shed.

A routing broker may die in the middle of an overload, and what it takes with it lies right beside
what was shed. So one message of fewer passes (`keep_every`) than the tolerance alone would ask for:
however the losses meet, they stay within it.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from librt.strings import read_i64_le

from overlay.batch import LENGTH_WORD_OFFSET, MESSAGE_HEADER_BYTES, SEQUENCE_OFFSET, U32, Run
from overlay.bounds import Delays, needs_replication
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from overlay.trace import Reason

if TYPE_CHECKING:
    from mypy_extensions import i64


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
def keep_every(qos: TopicQos, delays: Delays) -> int | None:
    """One message of so many passes every hop, by its sequence: 1 if none may be shed, None if all may.

    A crash takes some neighbours, and with them so many of those that pass: the losses on both sides of
    them join. That is the most that is lost in a row, and it is no more than the tolerance.
    """
    tolerance = qos.loss_tolerance
    if tolerance is None:
        return None
    taken = crash_losses(qos, delays)
    every = tolerance + 1
    while (-(-taken // every) + 1) * every - 1 > tolerance:
        every -= 1
    return every


def sift(run: Run, every: int | None) -> Run | None:
    """What of a run must be sent although the peer is overloaded; None if nothing."""
    if every is None:
        return None
    if every == 1:
        return run
    data = run.data
    kept: list[bytes] = []
    divisor: i64 = every
    offset: i64 = 0
    while offset < len(data):
        sequence: i64 = read_i64_le(data, offset + SEQUENCE_OFFSET)
        length: i64 = read_i64_le(data, offset + LENGTH_WORD_OFFSET) >> 32
        end: i64 = offset + MESSAGE_HEADER_BYTES + (length & U32)
        if sequence % divisor == 0:
            kept.append(data[offset:end])
        offset = end
    if len(kept) == run.messages:
        return run
    return Run(len(kept), b"".join(kept)) if kept else None


def relieve(outbox: Outbox, run: Run, every: int | None, dropped: "Counter[str]", now_ns: int) -> Run | None:
    """What of a run is to be queued for the peer of this outbox; None if nothing.

    All of it, unless the peer is overloaded. What is shed is counted in `dropped`, and traced.
    """
    if not outbox.is_overloaded(now_ns):
        return run
    sifted = sift(run, every)
    if sifted is not run:
        reason = Reason.SHED_BEST_EFFORT if every is None else Reason.SHED_TOLERATED
        dropped[reason.name.lower()] += run.messages - (sifted.messages if sifted else 0)
        if outbox.trace is not None:
            outbox.trace.shed(run, sifted, int(reason), now_ns)
    return sifted
