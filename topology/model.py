"""The description of a testbed: LANs, brokers, WAN links, topics and who publishes and subscribes.

One YAML file is the single description; drivers run it. This module reads and checks it, nothing
else. Everything is checked before anything starts: an error names the line, the value and the remedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from overlay.errors import OverlayError
from overlay.limits import PAYLOAD_MAX_BYTES
from overlay.names import check_name, check_topic
from overlay.qos import TopicQos
from topology.document import Value, read_document
from topology.errors import InvalidTopologyError

LANS_MAX: Final = 99
"""The process testbed gives LAN number n the addresses 127.n.x.y; the cloud has 127.100.x.y."""
EDGES_MAX_PER_LAN: Final = 100
ROUTERS_MAX: Final = 200
TOPICS_MAX: Final = 1_000
ENDPOINTS_MAX: Final = 2_000
DELAY_MAX_MS: Final = 10_000.0
RATE_MAX_PER_S: Final = 10_000.0
RATE_MIN_PER_S: Final = 0.1
PAYLOAD_MIN_BYTES: Final = 48
"""Room for what the load writes into each payload: publisher, sequence, time of sending."""

_DEFAULT_RATE_PER_S: Final = 10.0
_DEFAULT_PAYLOAD_BYTES: Final = 64
_LATER_LINK_KEYS: Final = ("jitter_ms", "loss", "rate_mbit_s")
_QOS_FIELDS: Final = (
    "period_ms",
    "deadline_ms",
    "loss_tolerance",
    "retention",
    "reliability",
    "liveliness_ms",
)


@dataclass(frozen=True, slots=True)
class WanLink:
    """The way between a LAN and the cloud."""

    delay_ms: float = 0.0
    """One way, in each direction."""


@dataclass(frozen=True, slots=True)
class Lan:
    """An isolated network with its edge brokers."""

    name: str
    edges: tuple[str, ...]
    wan: WanLink


@dataclass(frozen=True, slots=True)
class Router:
    """A routing broker in the cloud."""

    name: str
    host: str
    """The host it counts as; primary and backup of a topic go to different ones."""


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


@dataclass(frozen=True, slots=True)
class Topology:
    """A whole testbed."""

    name: str
    description: str
    zookeeper_servers: int
    lans: tuple[Lan, ...]
    routers: tuple[Router, ...]
    topics: Mapping[str, TopicQos]
    publishers: tuple[PublisherSpec, ...]
    subscribers: tuple[SubscriberSpec, ...]
    text: str
    """The YAML it was read from."""

    def lan(self, name: str) -> Lan:
        """The LAN of this name."""
        return next(lan for lan in self.lans if lan.name == name)

    def publishing_lans(self, topic: str) -> frozenset[str]:
        """LANs with publishers of a topic."""
        return frozenset(item.lan for item in self.publishers if item.topic == topic)

    def subscribing_lans(self, topic: str) -> frozenset[str]:
        """LANs with subscribers of a topic."""
        return frozenset(item.lan for item in self.subscribers if item.topic == topic)

    def crosses_wan(self, topic: str) -> bool:
        """Whether some subscriber is in another LAN than some publisher."""
        return any(
            publishing != subscribing
            for publishing in self.publishing_lans(topic)
            for subscribing in self.subscribing_lans(topic)
        )

    def rate_per_s(self, topic: str) -> float:
        """Messages a second of all publishers of a topic."""
        return sum(item.rate_per_s for item in self.publishers if item.topic == topic)


def library() -> dict[str, str]:
    """The topologies that come with Isthmus: name and text."""
    folder = resources.files("topology") / "library"
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def load_topology(name_or_path: str | Path) -> Topology:
    """Read a topology from a file, or from the library by its name."""
    path = Path(name_or_path)
    known = library()
    if path.suffix not in {".yaml", ".yml"} and str(name_or_path) in known:
        return parse_topology(known[str(name_or_path)], source=f"{name_or_path}.yaml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InvalidTopologyError(
            f"topology {str(name_or_path)!r} cannot be read: {reason}; "
            f"give a YAML file or one of {', '.join(known)}"
        ) from error
    return parse_topology(text, source=str(path))


def parse_topology(text: str, source: str = "topology") -> Topology:
    """Read a topology from YAML text; `source` names it in errors."""
    root = read_document(source, text)
    fields = root.fields(
        ("name", "description", "zookeeper", "wan", "lans", "routers", "topics", "publishers", "subscribers")
    )
    for required in ("lans", "routers"):
        if required not in fields:
            raise root.error(f"{required} is missing: a topology needs lans and routers")
    default_link = _read_link(fields["wan"], WanLink()) if "wan" in fields else WanLink()
    lans = _read_lans(fields["lans"], default_link)
    topics = _read_topics(fields["topics"]) if "topics" in fields else {}
    publishers = _read_publishers(fields["publishers"], lans, topics) if "publishers" in fields else ()
    subscribers = _read_subscribers(fields["subscribers"], lans, topics) if "subscribers" in fields else ()
    routers = _read_routers(fields["routers"])
    _check_broker_names(root, lans, routers)
    return Topology(
        name=fields["name"].text() if "name" in fields else Path(source).stem,
        description=fields["description"].text().strip() if "description" in fields else "",
        zookeeper_servers=_read_zookeeper(fields["zookeeper"]) if "zookeeper" in fields else 1,
        lans=lans,
        routers=routers,
        topics=topics,
        publishers=publishers,
        subscribers=subscribers,
        text=text,
    )


def _read_zookeeper(value: Value) -> int:
    fields = value.fields(("servers",))
    if "servers" not in fields:
        return 1
    servers = fields["servers"].integer(1, 3)
    if servers == 2:
        raise fields["servers"].error("is 2: use 1, or 3 for an ensemble that survives one crash")
    return servers


def _read_link(value: Value, default: WanLink) -> WanLink:
    fields = value.fields(("delay_ms",), unsupported=_LATER_LINK_KEYS)
    if "delay_ms" not in fields:
        return default
    return WanLink(fields["delay_ms"].number(0.0, DELAY_MAX_MS))


def _read_lans(value: Value, default_link: WanLink) -> tuple[Lan, ...]:
    lans = []
    for name, entry in value.entries().items():
        _named(entry, "LAN", name)
        fields = entry.fields(("edges", "wan"))
        edges = (
            _read_names(fields["edges"], "edge", f"{name}-", EDGES_MAX_PER_LAN) if "edges" in fields else None
        )
        lans.append(
            Lan(
                name=name,
                edges=edges or (f"{name}-1",),
                wan=_read_link(fields["wan"], default_link) if "wan" in fields else default_link,
            )
        )
    if not 1 <= len(lans) <= LANS_MAX:
        raise value.error(f"has {len(lans)} LANs: there must be 1 to {LANS_MAX}")
    return tuple(lans)


def _read_names(value: Value, kind: str, prefix: str, most: int) -> tuple[str, ...]:
    """A number of brokers, or a list of their names."""
    if not value.is_list:
        return tuple(f"{prefix}{number + 1}" for number in range(value.integer(1, most)))
    names = [_named(item, kind, item.text()) for item in value.items()]
    if not 1 <= len(names) <= most:
        raise value.error(f"has {len(names)} entries: there must be 1 to {most}")
    return tuple(names)


def _read_routers(value: Value) -> tuple[Router, ...]:
    if not value.is_list:
        names = _read_names(value, "routing broker", "router-", ROUTERS_MAX)
        return tuple(Router(name, f"host-{number + 1}") for number, name in enumerate(names))
    routers = []
    for number, item in enumerate(value.items()):
        host = f"host-{number + 1}"
        if not item.is_map:
            routers.append(Router(_named(item, "routing broker", item.text()), host))
            continue
        fields = item.fields(("name", "host"))
        name = f"router-{number + 1}"
        if "name" in fields:
            name = _named(fields["name"], "routing broker", fields["name"].text())
        if "host" in fields:
            host = _named(fields["host"], "host", fields["host"].text())
        routers.append(Router(name, host))
    if not 1 <= len(routers) <= ROUTERS_MAX:
        raise value.error(f"has {len(routers)} routing brokers: there must be 1 to {ROUTERS_MAX}")
    return tuple(routers)


def _read_topics(value: Value) -> dict[str, TopicQos]:
    topics: dict[str, TopicQos] = {}
    for name, entry in value.entries().items():
        try:
            check_topic(name)
            record = {key: item.plain() for key, item in entry.fields(_QOS_FIELDS).items()}
            topics[name] = TopicQos.from_record(record)
        except OverlayError as error:
            raise entry.error(f"cannot be used: {error}") from error
    if len(topics) > TOPICS_MAX:
        raise value.error(f"has {len(topics)} topics: at most {TOPICS_MAX} are allowed")
    return topics


def _read_publishers(
    value: Value, lans: tuple[Lan, ...], topics: Mapping[str, TopicQos]
) -> tuple[PublisherSpec, ...]:
    publishers = []
    for number, item in enumerate(_endpoints(value)):
        fields = item.fields(("lan", "topic", "edge", "rate_per_s", "payload_bytes"))
        lan, topic, edge = _read_place(item, fields, number, lans, topics)
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
        publishers.append(PublisherSpec(lan, topic, edge, rate_per_s, payload))
    return tuple(publishers)


def _read_subscribers(
    value: Value, lans: tuple[Lan, ...], topics: Mapping[str, TopicQos]
) -> tuple[SubscriberSpec, ...]:
    return tuple(
        SubscriberSpec(*_read_place(item, item.fields(("lan", "topic", "edge")), number, lans, topics))
        for number, item in enumerate(_endpoints(value))
    )


def _endpoints(value: Value) -> list[Value]:
    items = list(value.items())
    if len(items) > ENDPOINTS_MAX:
        raise value.error(f"has {len(items)} entries: at most {ENDPOINTS_MAX} are allowed")
    return items


def _read_place(
    item: Value,
    fields: Mapping[str, Value],
    number: int,
    lans: tuple[Lan, ...],
    topics: Mapping[str, TopicQos],
) -> tuple[str, str, str]:
    """LAN, topic and edge of an endpoint; without an edge they take turns."""
    for required in ("lan", "topic"):
        if required not in fields:
            raise item.error(f"has no {required}: give lan and topic")
    name = fields["lan"].text()
    lan = next((lan for lan in lans if lan.name == name), None)
    if lan is None:
        raise fields["lan"].error(
            f"is {name!r}, no such LAN: use one of {', '.join(lan.name for lan in lans)}"
        )
    topic = fields["topic"].text()
    if topic not in topics:
        raise fields["topic"].error(f"is {topic!r}, which topics does not have: add it there, or correct it")
    if "edge" not in fields:
        return lan.name, topic, lan.edges[number % len(lan.edges)]
    edge = fields["edge"].text()
    if edge not in lan.edges:
        raise fields["edge"].error(
            f"is {edge!r}, no edge of LAN {lan.name}: use one of {', '.join(lan.edges)}"
        )
    return lan.name, topic, edge


def _check_broker_names(root: Value, lans: tuple[Lan, ...], routers: tuple[Router, ...]) -> None:
    seen: set[str] = set()
    for name in [*(edge for lan in lans for edge in lan.edges), *(router.name for router in routers)]:
        if name in seen:
            raise root.error(f"two brokers are named {name!r}: every broker needs a name of its own")
        seen.add(name)


def _named(value: Value, kind: str, name: str) -> str:
    try:
        return check_name(kind, name)
    except OverlayError as error:
        raise value.error(f"cannot be used: {error}") from error
