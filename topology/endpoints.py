"""Topics of a topology and who publishes and subscribes: what they are and how they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from overlay.errors import OverlayError
from overlay.limits import PAYLOAD_MAX_BYTES
from overlay.names import check_topic
from overlay.qos import TopicQos
from topology.document import Problems, Value

TOPICS_MAX: Final = 1_000
ENDPOINTS_MAX: Final = 2_000
RATE_MAX_PER_S: Final = 10_000.0
RATE_MIN_PER_S: Final = 0.1
PAYLOAD_MIN_BYTES: Final = 48
"""Room for what the load writes into each payload: publisher, sequence, time of sending."""

_DEFAULT_RATE_PER_S: Final = 10.0
_DEFAULT_PAYLOAD_BYTES: Final = 64
_QOS_FIELDS: Final = (
    "period_ms",
    "deadline_ms",
    "loss_tolerance",
    "retention",
    "reliability",
    "liveliness_ms",
    "paths",
)

Edges = Mapping[str, tuple[str, ...]]
"""The edge brokers of each LAN."""


@dataclass(frozen=True, slots=True)
class PublisherSpec:
    """An application that publishes at a fixed rate."""

    lan: str
    topic: str
    edge: str
    rate_per_s: float
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class SubscriberSpec:
    """An application that subscribes."""

    lan: str
    topic: str
    edge: str


def read_topics(value: Value, problems: Problems) -> dict[str, TopicQos]:
    """The section `topics`."""
    entries = value.entries()
    if len(entries) > TOPICS_MAX:
        raise value.error(f"has {len(entries)} topics: at most {TOPICS_MAX} are allowed")
    return {name: problems.read(_read_topic, entry, TopicQos(), name) for name, entry in entries.items()}


def _read_topic(value: Value, name: str) -> TopicQos:
    try:
        check_topic(name)
        record = {key: item.plain() for key, item in value.fields(_QOS_FIELDS).items()}
        return TopicQos.from_record(record)
    except OverlayError as error:
        raise value.error(f"cannot be used: {error}") from error


def read_publishers(
    value: Value, edges: Edges, topics: Mapping[str, TopicQos], problems: Problems
) -> tuple[PublisherSpec, ...]:
    """The section `publishers`."""
    read = (
        problems.read(_read_publisher, item, None, number, edges, topics)
        for number, item in enumerate(_endpoints(value))
    )
    return tuple(publisher for publisher in read if publisher is not None)


def _read_publisher(
    item: Value, number: int, edges: Edges, topics: Mapping[str, TopicQos]
) -> PublisherSpec | None:
    fields = item.fields(("lan", "topic", "edge", "rate_per_s", "payload_bytes"))
    lan, topic, edge = _read_place(item, fields, number, edges, topics)
    rate = fields.get("rate_per_s")
    rate_per_s = rate.number(RATE_MIN_PER_S, RATE_MAX_PER_S) if rate else _DEFAULT_RATE_PER_S
    period_ms = topics[topic].period_ms
    if period_ms is not None and rate_per_s * period_ms > 1000 * (1 + 1e-9):
        raise (rate or item).error(
            f"is {rate_per_s:g}, a message every {1000 / rate_per_s:g} ms, but period_ms of {topic} is "
            f"{period_ms:g}: lower the rate or the period"
        )
    size = fields.get("payload_bytes")
    payload = size.integer(PAYLOAD_MIN_BYTES, PAYLOAD_MAX_BYTES) if size else _DEFAULT_PAYLOAD_BYTES
    return PublisherSpec(lan, topic, edge, rate_per_s, payload)


def read_subscribers(
    value: Value, edges: Edges, topics: Mapping[str, TopicQos], problems: Problems
) -> tuple[SubscriberSpec, ...]:
    """The section `subscribers`."""
    read = (
        problems.read(_read_subscriber, item, None, number, edges, topics)
        for number, item in enumerate(_endpoints(value))
    )
    return tuple(subscriber for subscriber in read if subscriber is not None)


def _read_subscriber(
    item: Value, number: int, edges: Edges, topics: Mapping[str, TopicQos]
) -> SubscriberSpec | None:
    fields = item.fields(("lan", "topic", "edge"))
    return SubscriberSpec(*_read_place(item, fields, number, edges, topics))


def _endpoints(value: Value) -> list[Value]:
    items = list(value.items())
    if len(items) > ENDPOINTS_MAX:
        raise value.error(f"has {len(items)} entries: at most {ENDPOINTS_MAX} are allowed")
    return items


def _read_place(
    item: Value,
    fields: Mapping[str, Value],
    number: int,
    edges: Edges,
    topics: Mapping[str, TopicQos],
) -> tuple[str, str, str]:
    """LAN, topic and edge of an endpoint; without an edge they take turns."""
    for required in ("lan", "topic"):
        if required not in fields:
            raise item.error(f"has no {required}: give lan and topic")
    lan = fields["lan"].text()
    if lan not in edges:
        raise fields["lan"].error(f"is {lan!r}, no such LAN: use one of {', '.join(edges)}")
    topic = fields["topic"].text()
    if topic not in topics:
        raise fields["topic"].error(f"is {topic!r}, which topics does not have: add it there, or correct it")
    if "edge" not in fields:
        return lan, topic, edges[lan][number % len(edges[lan])]
    edge = fields["edge"].text()
    if edge not in edges[lan]:
        raise fields["edge"].error(f"is {edge!r}, no edge of LAN {lan}: use one of {', '.join(edges[lan])}")
    return lan, topic, edge
