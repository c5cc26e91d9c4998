"""Verdicts about messages, from what was sent and what each subscriber recorded. Pure.

A *stream* is what one subscriber got from one publisher. Sequences count from 1 and rise by one, so
what was sent is a number and what is missing follows from the sequences alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from topology.errors import LoadError


@dataclass(frozen=True, slots=True)
class Stream:
    """Everything one subscriber recorded of one publisher, in the order of arrival."""

    publisher: int
    subscriber: int
    topic: str
    crosses_wan: bool
    """Publisher and subscriber are in different LANs."""
    accepted_ns: Sequence[int]
    """The publisher's log: when each message had been accepted; the first is number 1."""
    period_ns: int
    sequences: Sequence[int]
    sent_ns: Sequence[int]
    received_ns: Sequence[int]
    age_bound_ns: Sequence[int]
    """How old each was at most when received, as the overlay said; -1: it did not say."""

    @property
    def sent(self) -> int:
        """Messages the publisher sent, numbered from 1."""
        return len(self.accepted_ns)


@dataclass(frozen=True, slots=True)
class SequenceVerdict:
    """What became of the messages of a stream."""

    delivered: int
    """Different messages that arrived."""
    lost: int
    longest_loss_run: int
    """Most consecutive messages that did not arrive."""
    duplicates: int
    """Arrivals of messages that had arrived before."""
    reordered: int
    """First arrivals after a message with a higher sequence."""


@dataclass(frozen=True, slots=True)
class TopicVerdict:
    """What became of the messages of a topic.

    Losses are those of its worst subscriber. Latencies are those of all deliveries, except that a topic
    which crosses the WAN is judged by the deliveries that crossed it.
    """

    topic: str
    sent: int
    delivered: int
    lost: int
    longest_loss_run: int
    loss_tolerance: int | None
    duplicates: int
    reordered: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    deadline_ms: float | None
    in_time: float | None
    """Share of deliveries within the deadline; None without one."""
    failover_gap_ms: float | None
    """Longest silence after the crash of the topic's primary, beyond the period; None if it lived."""

    @property
    def within_tolerance(self) -> bool:
        """No subscriber lost more messages in a row than the topic bears."""
        return self.loss_tolerance is None or self.longest_loss_run <= self.loss_tolerance


def judge_sequences(sent: int, sequences: Iterable[int]) -> SequenceVerdict:
    """Compare what arrived with what was sent. Raises LoadError for a message nobody sent."""
    seen: set[int] = set()
    highest = duplicates = reordered = 0
    for sequence in sequences:
        if not 1 <= sequence <= sent:
            raise LoadError(
                f"message {sequence} arrived but only 1 to {sent} were sent: the record is broken"
            )
        if sequence in seen:
            duplicates += 1
            continue
        seen.add(sequence)
        if sequence < highest:
            reordered += 1
        else:
            highest = sequence
    longest = previous = 0
    for sequence in sorted(seen):
        longest = max(longest, sequence - previous - 1)
        previous = sequence
    longest = max(longest, sent - previous)
    return SequenceVerdict(len(seen), sent - len(seen), longest, duplicates, reordered)


def loss_runs(sent: int, sequences: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of every stretch of consecutive messages that did not arrive."""
    runs = []
    previous = 0
    for sequence in [*sorted(set(sequences)), sent + 1]:
        if sequence > previous + 1:
            runs.append((previous + 1, sequence - 1))
        previous = sequence
    return runs


def longest_silence_ns(received_ns: Sequence[int], start_ns: int, end_ns: int, until_ns: int) -> int:
    """The longest time without a delivery that overlaps [start, end]; nothing is known after `until`."""
    edges = sorted(received_ns)
    longest = 0
    previous_ns = start_ns if not edges or edges[0] > start_ns else edges[0]
    for at_ns in [*edges, until_ns]:
        if at_ns > start_ns and previous_ns < end_ns:
            longest = max(longest, at_ns - previous_ns)
        previous_ns = max(previous_ns, at_ns)
    return longest


def percentile(ordered: Sequence[int], share: float) -> int:
    """The smallest value that at least this share of the ordered values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Crash:
    """A routing broker was killed."""

    broker: str
    at_ns: int
    until_ns: int
    """Silence that begins after this is not put down to the crash."""
    topics: frozenset[str]
    """Topics it was the primary of."""


def failover_gap_ms(streams: Iterable[Stream], crash: Crash, stopped_ns: int) -> float | None:
    """Longest silence of any stream whose primary crashed, beyond its period; None without streams.

    The silence is the time between two deliveries of one publisher at one subscriber, or between the
    last one and the end of publishing. One period of silence is normal, so it is taken off.
    """
    gaps = [
        longest_silence_ns(stream.received_ns, crash.at_ns, crash.until_ns, stopped_ns) - stream.period_ns
        for stream in streams
        if stream.topic in crash.topics and stream.crosses_wan
    ]
    return max(0.0, max(gaps) / 1e6) if gaps else None


def judge_topic(
    topic: str,
    streams: Sequence[Stream],
    sent: int,
    loss_tolerance: int | None,
    deadline_ms: float | None,
    gap_ms: float | None,
) -> TopicVerdict:
    """The verdict on one topic. Raises LoadError if a subscriber recorded nothing at all."""
    if not streams:
        raise LoadError(f"no subscriber of {topic} has recorded anything: nothing can be said about it")
    by_subscriber: dict[int, list[SequenceVerdict]] = {}
    for stream in streams:
        by_subscriber.setdefault(stream.subscriber, []).append(judge_sequences(stream.sent, stream.sequences))
    far = [stream for stream in streams if stream.crosses_wan]
    latencies = [
        received_ns - sent_ns
        for stream in far or streams
        for sent_ns, received_ns in zip(stream.sent_ns, stream.received_ns, strict=True)
    ]
    if not latencies:
        raise LoadError(f"no message of {topic} arrived anywhere: its route is broken")
    latencies.sort()
    verdicts = [verdict for group in by_subscriber.values() for verdict in group]
    delivered = min(sum(verdict.delivered for verdict in group) for group in by_subscriber.values())
    in_time = None
    if deadline_ms is not None:
        in_time = sum(latency <= deadline_ms * 1e6 for latency in latencies) / len(latencies)
    return TopicVerdict(
        topic=topic,
        sent=sent,
        delivered=delivered,
        lost=sent - delivered,
        longest_loss_run=max(verdict.longest_loss_run for verdict in verdicts),
        loss_tolerance=loss_tolerance,
        duplicates=sum(verdict.duplicates for verdict in verdicts),
        reordered=sum(verdict.reordered for verdict in verdicts),
        p50_ms=percentile(latencies, 0.5) / 1e6,
        p99_ms=percentile(latencies, 0.99) / 1e6,
        max_ms=latencies[-1] / 1e6,
        deadline_ms=deadline_ms,
        in_time=in_time,
        failover_gap_ms=gap_ms,
    )
