"""Verdicts from full histories: every publisher's log of what was accepted against every subscriber's.

Pure. The overlay is not asked how it did; what it says about itself is no evidence. `topology.checker`
has what is said about sequences alone, this module adds what needs times: whether deadlines were kept
before, during and after the faults, whether an age bound was ever below the truth, and whether each
message is the one it claims to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from overlay.limits import MILLISECOND_NS
from topology.checker import Stream, TopicVerdict, judge_topic, longest_silence_ns, loss_runs
from topology.errors import LoadError


@dataclass(frozen=True, slots=True)
class Phases:
    """When the first fault happened, and when the overlay was whole again after the last."""

    fault_ns: int
    whole_ns: int

    def of(self, at_ns: int) -> int:
        """0 before, 1 during, 2 after."""
        return (at_ns >= self.fault_ns) + (at_ns >= self.whole_ns)


@dataclass(frozen=True, slots=True)
class DeadlineHits:
    """Messages that came within their deadline, in % of those published; None if there were none."""

    before: float | None
    during: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class TopicHistory:
    """What became of a topic in a drill."""

    verdict: TopicVerdict
    deliveries: int
    """To all subscribers together."""
    lost: int
    """By all subscribers together."""
    lost_beyond_tolerance: int
    """Messages lost in a row after as many as the topic tolerates, at all subscribers together."""
    deadline_hits: DeadlineHits
    bounds: int
    """Deliveries that came with an age bound."""
    bounds_broken: int
    """... which was below the true age."""
    forged: int
    """Deliveries whose content is not what the publisher logged under that number."""


def judge_history(
    topic: str,
    streams: Sequence[Stream],
    loss_tolerance: int | None,
    deadline_ms: float | None,
    phases: Phases,
) -> TopicHistory:
    """The verdict on one topic. Raises LoadError if the records cannot be what happened."""
    sent = {stream.publisher: stream.sent for stream in streams}
    gap_ms = longest_gap_ms(streams, phases, max((s.accepted_ns[-1] for s in streams if s.sent), default=0))
    verdict = judge_topic(topic, streams, sum(sent.values()), loss_tolerance, deadline_ms, gap_ms)
    bounds = broken = forged = 0
    for stream in streams:
        for number, sequence in enumerate(stream.sequences):
            sent_ns, received_ns = stream.sent_ns[number], stream.received_ns[number]
            if received_ns < sent_ns:
                raise LoadError(
                    f"message {sequence} of {topic} came {sent_ns - received_ns} ns before it was sent: "
                    "the record is broken"
                )
            accepted_ns = stream.accepted_ns[sequence - 1]
            before_ns = stream.accepted_ns[sequence - 2] if sequence > 1 else 0
            forged += not before_ns <= sent_ns <= accepted_ns
            bound_ns = stream.age_bound_ns[number]
            if bound_ns >= 0:
                bounds += 1
                # Accepted after it was stamped: it is at least this old.
                broken += bound_ns < received_ns - accepted_ns
    runs = [last - first + 1 for s in streams for first, last in loss_runs(s.sent, s.sequences)]
    beyond = 0 if loss_tolerance is None else sum(max(0, run - loss_tolerance) for run in runs)
    return TopicHistory(
        verdict=verdict,
        deliveries=sum(len(stream.sequences) for stream in streams),
        lost=sum(runs),
        lost_beyond_tolerance=beyond,
        deadline_hits=deadline_hits(streams, deadline_ms, phases),
        bounds=bounds,
        bounds_broken=broken,
        forged=forged,
    )


def deadline_hits(streams: Sequence[Stream], deadline_ms: float | None, phases: Phases) -> DeadlineHits:
    """Deadlines kept by when a message was published; what never came missed its deadline.

    A topic which crosses the WAN is judged by what crossed it.
    """
    if deadline_ms is None:
        return DeadlineHits(None, None, None)
    published, hits = [0, 0, 0], [0, 0, 0]
    for stream in [stream for stream in streams if stream.crosses_wan] or streams:
        for at_ns in stream.accepted_ns:
            published[phases.of(at_ns)] += 1
        seen: set[int] = set()
        for sequence, sent_ns, received_ns in zip(
            stream.sequences, stream.sent_ns, stream.received_ns, strict=True
        ):
            if sequence not in seen and received_ns - sent_ns <= deadline_ms * MILLISECOND_NS:
                hits[phases.of(stream.accepted_ns[sequence - 1])] += 1
            seen.add(sequence)
    shares = [100 * hit / count if count else None for hit, count in zip(hits, published, strict=True)]
    return DeadlineHits(*shares)


def longest_gap_ms(streams: Sequence[Stream], phases: Phases, stopped_ns: int) -> float | None:
    """Longest silence of a stream from the first fault until the overlay was whole, beyond its period.

    Of the streams that cross the WAN, if there are any; None without streams.
    """
    gaps = [
        longest_silence_ns(stream.received_ns, phases.fault_ns, phases.whole_ns, stopped_ns)
        - stream.period_ns
        for stream in [stream for stream in streams if stream.crosses_wan] or streams
    ]
    return max(0.0, max(gaps) / MILLISECOND_NS) if gaps else None
