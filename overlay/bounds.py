"""How long a routing broker may take to dispatch and to replicate a message (FRAME, section III).

A topic promises a deadline from publisher to subscriber and at most `loss_tolerance` losses in
a row when a broker dies. From these follow, for each message, the time within which the primary
must dispatch it (Lemma 2) and the time within which it must have replicated it to the backup
(Lemma 1). If the dispatch time comes first, the message is gone before its copy would be
needed, and replication can be left out (Proposition 1).

All times are relative to the message's arrival at the primary, in nanoseconds. UNBOUNDED stands
for infinity.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from overlay.errors import QosError
from overlay.limits import MILLISECOND_NS, RETENTION_MAX
from overlay.qos import SubscriptionQos, TopicQos, check_compatible, strictest

UNBOUNDED: Final = 2**62
"""A time that never comes; far enough from 2⁶³ to add to."""


@dataclass(frozen=True, slots=True)
class Delays:
    """What lies between the parties of a topic."""

    publisher_to_primary_ns: int
    primary_to_subscriber_ns: int
    primary_to_backup_ns: int
    failover_ns: int
    """From the death of the primary until publishers' edges have turned to the backup."""

    def at_least(self, other: "Delays") -> "Delays":
        """The longer of each."""
        return Delays(
            max(self.publisher_to_primary_ns, other.publisher_to_primary_ns),
            max(self.primary_to_subscriber_ns, other.primary_to_subscriber_ns),
            max(self.primary_to_backup_ns, other.primary_to_backup_ns),
            max(self.failover_ns, other.failover_ns),
        )

    def longer_by(self, percent: int) -> "Delays":
        """All of them longer by this much."""
        return Delays(
            self.publisher_to_primary_ns * (100 + percent) // 100,
            self.primary_to_subscriber_ns * (100 + percent) // 100,
            self.primary_to_backup_ns * (100 + percent) // 100,
            self.failover_ns * (100 + percent) // 100,
        )


NO_DELAYS: Final = Delays(0, 0, 0, 0)


class AdmissionError(QosError):
    """A topic whose requirements cannot be met; `retention` is the smallest that would do, if any."""

    def __init__(self, message: str, retention: int | None = None) -> None:
        super().__init__(message)
        self.retention = retention


def dispatch_within_ns(qos: TopicQos, delays: Delays) -> int:
    """FRAME, Lemma 2: D - ΔPB - ΔBS. Negative if the deadline cannot be met at all."""
    if qos.deadline_ns is None:
        return UNBOUNDED
    return qos.deadline_ns - delays.publisher_to_primary_ns - delays.primary_to_subscriber_ns


def replicate_within_ns(qos: TopicQos, delays: Delays) -> int:
    """FRAME, Lemma 1: (N + L)T - ΔPB - ΔBB - x. Negative if too little is retained.

    Best effort never needs replication. A topic without a period counts as one whose messages
    are far apart: one retained message outlasts any failover.
    """
    if qos.loss_tolerance is None:
        return UNBOUNDED
    covered = qos.kept_messages + qos.loss_tolerance
    if covered and qos.period_ms is None:
        return UNBOUNDED
    covered_ns = round(covered * (qos.period_ms or 0) * MILLISECOND_NS)
    return covered_ns - delays.publisher_to_primary_ns - delays.primary_to_backup_ns - delays.failover_ns


def needs_replication(qos: TopicQos, delays: Delays) -> bool:
    """FRAME, Proposition 1: not if a message is dispatched before its copy would have to be made."""
    return dispatch_within_ns(qos, delays) > replicate_within_ns(qos, delays)


def smallest_retention(qos: TopicQos, delays: Delays) -> int:
    """The least retention with which Lemma 1 can hold."""
    if qos.loss_tolerance is None:
        return 0
    if qos.period_ms is None:
        return 0 if qos.loss_tolerance else 1
    needed_ns = delays.publisher_to_primary_ns + delays.primary_to_backup_ns + delays.failover_ns
    period_ns = round(qos.period_ms * MILLISECOND_NS)
    return max(0, -(-needed_ns // period_ns) - qos.loss_tolerance)


def retention_without_replication(qos: TopicQos, delays: Delays) -> int:
    """The retention one higher, if that spares replication (FRAME+); the topic's own if not."""
    if not needs_replication(qos, delays) or qos.retention >= RETENTION_MAX:
        return qos.retention
    more = replace(qos, retention=qos.retention + 1)
    return qos.retention if needs_replication(more, delays) else more.retention


def check_admission(qos: TopicQos, delays: Delays) -> None:
    """Raise AdmissionError, with the numbers and the remedy, unless both lemmas can hold."""
    check_deadline(qos, delays)
    check_losses(qos, delays)


def check_deadline(qos: TopicQos, delays: Delays) -> None:
    """Raise AdmissionError, with the numbers and the remedy, unless the deadline can be met."""
    dispatch_ns = dispatch_within_ns(qos, delays)
    if dispatch_ns < 0:
        least_ns = delays.publisher_to_primary_ns + delays.primary_to_subscriber_ns
        raise AdmissionError(
            f"deadline_ms is {qos.deadline_ms:g}, but {_ms(delays.publisher_to_primary_ns)} ms to the "
            f"routing broker and {_ms(delays.primary_to_subscriber_ns)} ms from it leave nothing: "
            f"set deadline_ms to at least {_ms(least_ns)}"
        )


def check_losses(qos: TopicQos, delays: Delays) -> None:
    """Raise AdmissionError, with the numbers and the remedy, unless a crash costs few enough messages."""
    replicate_ns = replicate_within_ns(qos, delays)
    if replicate_ns < 0:
        retention = smallest_retention(qos, delays)
        missing = retention - qos.kept_messages
        tolerable = qos.loss_tolerance + missing if qos.loss_tolerance is not None else missing
        raise AdmissionError(
            f"retention {qos.kept_messages} and loss_tolerance {qos.loss_tolerance} at a period of "
            f"{qos.period_ms or 0:g} ms do not cover a failover of {_ms(delays.failover_ns)} ms "
            f"({_ms(-replicate_ns)} ms short): set retention to at least {retention}, "
            f"or loss_tolerance to at least {tolerable}",
            retention,
        )


def admit_request(offered: TopicQos, request: SubscriptionQos, delays: Delays) -> None:
    """Raise QosError if a subscriber asks for something that the topic cannot be served with.

    Only what is stricter than the topic itself is judged: a subscriber is not refused because of
    what others ask for. Deadlines and loss tolerances are checked apart from each other, so
    requests that are each admitted are admitted together.
    """
    check_compatible(offered, (request,))
    qos = strictest(offered, (request,))
    if qos.deadline_ms != offered.deadline_ms:
        check_deadline(qos, delays)
    if qos.loss_tolerance != offered.loss_tolerance:
        check_losses(qos, delays)


def admit(offered: TopicQos, requests: Iterable[SubscriptionQos], delays: Delays) -> TopicQos:
    """What a topic is served with if its subscribers ask for this; raises QosError if it cannot be."""
    asked = tuple(requests)
    check_compatible(offered, asked)
    qos = strictest(offered, asked)
    check_admission(qos, delays)
    return qos


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / MILLISECOND_NS:.3g}"
