"""Quality of service of a topic: what publishers promise and subscribers may rely on.

`docs/notation.md` maps these names to the symbols of the papers (period T, deadline D,
loss tolerance L, retention N).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, Self

from overlay.errors import QosError, show
from overlay.limits import (
    LIVELINESS_MAX_NS,
    LIVELINESS_NS,
    MILLISECOND_NS,
    PERIOD_MAX_NS,
    RETENTION_DEFAULT,
    RETENTION_MAX,
)
from overlay.paths import Policy


class Reliability(StrEnum):
    """Whether the ingress edge keeps messages to send them again after a failure."""

    BEST_EFFORT = "best_effort"
    RELIABLE = "reliable"


@dataclass(frozen=True, slots=True)
class TopicQos:
    """What a topic needs. `None` means: not limited."""

    period_ms: float | None = None
    """Minimum time between two messages of one publisher; None if sporadic."""
    deadline_ms: float | None = None
    """Publisher to subscriber, soft."""
    loss_tolerance: int | None = 0
    """Most consecutive losses a subscriber can bear; None for best effort."""
    retention: int = RETENTION_DEFAULT
    """Latest messages the ingress edge keeps per publisher for sending again."""
    reliability: Reliability = Reliability.RELIABLE
    liveliness_ms: float = LIVELINESS_NS / MILLISECOND_NS
    """How long an endpoint may be silent before it counts as gone."""
    paths: Policy | None = None
    """Which ways between LANs its messages take; None: as their edge is configured."""

    def __post_init__(self) -> None:
        if self.period_ms is not None:
            _check_duration("period_ms", self.period_ms, PERIOD_MAX_NS)
        if self.deadline_ms is not None:
            _check_duration("deadline_ms", self.deadline_ms, PERIOD_MAX_NS)
        _check_duration("liveliness_ms", self.liveliness_ms, LIVELINESS_MAX_NS)
        _check_count("retention", self.retention, RETENTION_MAX)
        if self.loss_tolerance is not None:
            _check_count("loss_tolerance", self.loss_tolerance, 2**31)
        if self.reliability is Reliability.BEST_EFFORT and self.loss_tolerance is not None:
            raise QosError(
                f"reliability is best_effort but loss_tolerance is {self.loss_tolerance}: "
                "set loss_tolerance to none, or reliability to reliable"
            )

    @property
    def deadline_ns(self) -> int | None:
        """The deadline in nanoseconds."""
        return None if self.deadline_ms is None else round(self.deadline_ms * MILLISECOND_NS)

    @property
    def liveliness_ns(self) -> int:
        """The liveliness period in nanoseconds."""
        return round(self.liveliness_ms * MILLISECOND_NS)

    @property
    def kept_messages(self) -> int:
        """Messages the ingress edge really keeps."""
        return self.retention if self.reliability is Reliability.RELIABLE else 0

    def to_record(self) -> dict[str, Any]:
        """The plain form that travels in znodes and control frames."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Read the plain form back; raises QosError on anything else."""
        values = _known_fields("QoS", {field.name for field in fields(cls)}, record)
        if "reliability" in values:
            try:
                values["reliability"] = Reliability(values["reliability"])
            except ValueError:
                raise QosError(
                    f"reliability is {show(values['reliability'])}: use one of {', '.join(Reliability)}"
                ) from None
        if values.get("paths") is not None:
            try:
                values["paths"] = Policy(values["paths"])
            except ValueError:
                raise QosError(f"paths is {show(values['paths'])}: use one of {', '.join(Policy)}") from None
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SubscriptionQos:
    """What one subscriber asks of a topic. `None` means: what the topic has will do.

    A topic is served as its strictest subscriber asks (`strictest`). A subscriber can only make
    it stricter: whoever asks for less gets what the others get.
    """

    deadline_ms: float | None = None
    """Publisher to subscriber, soft; to the microsecond."""
    loss_tolerance: int | None = None
    """Most consecutive losses this subscriber can bear."""

    def __post_init__(self) -> None:
        if self.deadline_ms is not None:
            _check_duration("deadline_ms", self.deadline_ms, PERIOD_MAX_NS)
            if self.deadline_ms < DEADLINE_LEAST_MS:
                raise QosError(
                    f"deadline_ms is {self.deadline_ms:g}: a subscriber can ask for {DEADLINE_LEAST_MS:g} "
                    "at least"
                )
        if self.loss_tolerance is not None:
            _check_count("loss_tolerance", self.loss_tolerance, 2**31)

    def to_record(self) -> dict[str, Any]:
        """The plain form that travels in control frames."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Read the plain form back; raises QosError on anything else."""
        return cls(**_known_fields("request", {field.name for field in fields(cls)}, record))


DEADLINE_LEAST_MS: Final = 0.001
NO_REQUEST: Final = SubscriptionQos()


def strictest(offered: TopicQos, requests: Iterable[SubscriptionQos]) -> TopicQos:
    """What a topic must be served with so that all its subscribers get what they ask for.

    A best-effort topic keeps nothing to send again, so no request can make it lose less; such
    requests are refused (`check_compatible`), and passed over here.
    """
    deadline_ms, loss_tolerance = offered.deadline_ms, offered.loss_tolerance
    for request in requests:
        if request.deadline_ms is not None and (deadline_ms is None or request.deadline_ms < deadline_ms):
            deadline_ms = request.deadline_ms
        if (
            request.loss_tolerance is not None
            and offered.reliability is Reliability.RELIABLE
            and (loss_tolerance is None or request.loss_tolerance < loss_tolerance)
        ):
            loss_tolerance = request.loss_tolerance
    if (deadline_ms, loss_tolerance) == (offered.deadline_ms, offered.loss_tolerance):
        return offered
    return replace(offered, deadline_ms=deadline_ms, loss_tolerance=loss_tolerance)


def check_compatible(offered: TopicQos, requests: Iterable[SubscriptionQos]) -> None:
    """Raise QosError if what subscribers ask for is of a kind the topic does not offer."""
    if offered.reliability is Reliability.RELIABLE:
        return
    for request in requests:
        if request.loss_tolerance is not None:
            raise QosError(
                f"a subscriber asks for a loss_tolerance of {request.loss_tolerance}, but the topic is "
                "best_effort and keeps nothing to send again: set the topic's reliability to reliable, "
                "or subscribe without a loss tolerance"
            )


def _known_fields(what: str, known: set[str], record: object) -> dict[str, Any]:
    """The fields of a plain form, if it has no others."""
    if not isinstance(record, Mapping):
        raise QosError(f"{what} is {type(record).__name__}, expected a map of fields")
    unknown = sorted(str(name)[:40] for name in record if name not in known)[:8]
    if unknown:
        raise QosError(
            f"{what} has unknown fields {', '.join(unknown)}: known are {', '.join(sorted(known))}"
        )
    return dict(record)


def _check_duration(name: str, value: object, most_ns: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise QosError(f"{name} is {show(value)}: give a number of milliseconds")
    most_ms = most_ns // MILLISECOND_NS
    if not 0 < value <= most_ms:
        raise QosError(f"{name} is {show(value)}: it must be above 0 and at most {most_ms}")


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise QosError(f"{name} is {show(value)}: give a whole number")
    if not 0 <= value <= most:
        raise QosError(f"{name} is {show(value)}: it must be between 0 and {most}")


BEST_EFFORT = TopicQos(loss_tolerance=None, retention=0, reliability=Reliability.BEST_EFFORT)


def explain_difference(existing: TopicQos, asked: TopicQos) -> str:
    """Name the fields in which two QoS differ, for a refusal; empty if they are equal."""
    return "; ".join(
        f"{field.name} is {getattr(existing, field.name)}, asked for {getattr(asked, field.name)}"
        for field in fields(existing)
        if getattr(existing, field.name) != getattr(asked, field.name)
    )
