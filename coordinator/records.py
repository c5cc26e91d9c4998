"""What znodes hold: JSON, so that it can be read in zkCli, checked field by field when read.

A znode is written by another process, perhaps of another version or by hand. Whatever is in
it, reading raises RecordError and nothing else.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, Self

from coordinator.errors import RecordError
from coordinator.limits import TOPIC_ID_MAX
from overlay.bounds import NO_DELAYS, Delays
from overlay.errors import InvalidNameError, QosError
from overlay.limits import ENDPOINT_ID_MAX
from overlay.messages import EndpointKind
from overlay.names import check_name, check_topic
from overlay.qos import NO_REQUEST, SubscriptionQos, TopicQos

FORMAT = 1
"""Version of the tree's layout, written into /cluster."""
_RECORDS_KEPT: Final = 256
"""Most znodes are read again unchanged: after every reconnect, and by a leader besides its broker."""
_DELAYS: Final = tuple(asdict(NO_DELAYS))
"""Their names."""


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """Which cluster a tree belongs to, and in which format it is written."""

    cluster: str
    format: int = FORMAT

    def to_json(self) -> bytes:
        """The znode's content."""
        return _encode({"cluster": self.cluster, "format": self.format})

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read the znode's content."""
        fields = _decode("cluster", data)
        return cls(_text("cluster", fields, "cluster"), _whole("cluster", fields, "format"))


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """A routing broker that is alive, and what it reports of itself."""

    id: str
    locator: str
    host: str
    capacity: float = 1.0
    """Share of the topics relative to other routers: one with 2.0 gets twice as many."""
    draining: bool = False
    """On the way out: gets nothing new, its topics move away."""
    messages_per_s: float = 0.0
    http: str = ""
    topics: int = 0
    """Topics it served as primary while `messages_per_s` was measured."""
    delays: Delays = NO_DELAYS
    """What it is configured to check topics against; for those who change topics and are no brokers."""

    def __post_init__(self) -> None:
        _checked_name("router", self.id)
        if not (math.isfinite(self.capacity) and self.capacity > 0):
            raise RecordError(f"capacity of router {self.id} is {self.capacity}: it must be above 0")
        if not (math.isfinite(self.messages_per_s) and self.messages_per_s >= 0):
            raise RecordError(
                f"messages_per_s of router {self.id} is {self.messages_per_s}: it must be 0 or above"
            )
        if self.topics < 0:
            raise RecordError(f"topics of router {self.id} is {self.topics}: it must be 0 or above")

    def to_json(self) -> bytes:
        """The znode's content."""
        return _encode(
            {
                "id": self.id,
                "locator": self.locator,
                "host": self.host,
                "capacity": self.capacity,
                "draining": self.draining,
                "load": {"messages_per_s": self.messages_per_s, "topics": self.topics},
                "http": self.http,
                "delays": asdict(self.delays),
            }
        )

    @classmethod
    @lru_cache(_RECORDS_KEPT)
    def from_json(cls, data: bytes) -> Self:
        """Read the znode's content."""
        kind = "router"
        fields = _decode(kind, data)
        load = _map(kind, fields, "load")
        delays = _map(kind, fields, "delays") if "delays" in fields else asdict(NO_DELAYS)
        return cls(
            id=_text(kind, fields, "id"),
            locator=_text(kind, fields, "locator"),
            host=_text(kind, fields, "host"),
            capacity=_number(kind, fields, "capacity"),
            draining=_flag(kind, fields, "draining"),
            messages_per_s=_number(kind, load, "messages_per_s"),
            http=_text(kind, fields, "http"),
            topics=_whole(kind, load, "topics"),
            delays=Delays(**{name: _whole(kind, delays, name) for name in _DELAYS}),
        )


@dataclass(frozen=True, slots=True)
class EdgeRecord:
    """An edge broker that is alive."""

    id: str
    locator: str
    lan: str
    host: str
    http: str = ""

    def __post_init__(self) -> None:
        _checked_name("edge", self.id)
        _checked_name("LAN", self.lan)

    def to_json(self) -> bytes:
        """The znode's content."""
        return _encode(
            {
                "id": self.id,
                "locator": self.locator,
                "lan": self.lan,
                "host": self.host,
                "http": self.http,
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read the znode's content."""
        kind = "edge"
        fields = _decode(kind, data)
        return cls(
            id=_text(kind, fields, "id"),
            locator=_text(kind, fields, "locator"),
            lan=_text(kind, fields, "lan"),
            host=_text(kind, fields, "host"),
            http=_text(kind, fields, "http"),
        )


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic: its number on the wire, what it needs, and who serves it since which epoch."""

    id: int
    name: str
    qos: TopicQos
    primary: str | None
    backup: str | None
    epoch: int

    def __post_init__(self) -> None:
        try:
            check_topic(self.name)
        except InvalidNameError as error:
            raise RecordError(f"topic record: {error}") from None
        if not 0 < self.id <= TOPIC_ID_MAX:
            raise RecordError(f"id of topic {self.name!r} is {self.id}: it must be 1 to {TOPIC_ID_MAX}")
        if self.epoch < 0:
            raise RecordError(f"epoch of topic {self.name!r} is {self.epoch}: it must be 0 or above")
        for router in (self.primary, self.backup):
            if router is not None:
                _checked_name("router", router)

    def to_json(self) -> bytes:
        """The znode's content."""
        return _encode(
            {
                "id": self.id,
                "name": self.name,
                "qos": self.qos.to_record(),
                "primary": self.primary,
                "backup": self.backup,
                "epoch": self.epoch,
            }
        )

    @classmethod
    @lru_cache(_RECORDS_KEPT)
    def from_json(cls, data: bytes) -> Self:
        """Read the znode's content."""
        kind = "topic"
        fields = _decode(kind, data)
        try:
            qos = TopicQos.from_record(_map(kind, fields, "qos"))
        except QosError as error:
            raise RecordError(f"topic record: {error}") from None
        return cls(
            id=_whole(kind, fields, "id"),
            name=_text(kind, fields, "name"),
            qos=qos,
            primary=_optional_text(kind, fields, "primary"),
            backup=_optional_text(kind, fields, "backup"),
            epoch=_whole(kind, fields, "epoch"),
        )


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The fencing counter, and the candidate that raised it last. Epoch 0 is before any leader."""

    epoch: int = 0
    leader: str | None = None
    candidate: str | None = None
    """Name of the leader's znode in /leader: while it exists, the leader has not been deposed."""

    def to_json(self) -> bytes:
        """The znode's content."""
        return _encode({"epoch": self.epoch, "leader": self.leader, "candidate": self.candidate})

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read the znode's content."""
        kind = "epoch"
        fields = _decode(kind, data)
        return cls(
            epoch=_whole(kind, fields, "epoch"),
            leader=_optional_text(kind, fields, "leader"),
            candidate=_optional_text(kind, fields, "candidate"),
        )


def encode_candidate(router: str) -> bytes:
    """Content of a candidate's znode in /leader."""
    return _encode({"router": router})


def decode_candidate(data: bytes) -> str:
    """Which router stands behind a candidate's znode."""
    return _text("candidate", _decode("candidate", data), "router")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One publisher or subscriber of a topic. Its znode's name alone says all that routing needs.

    What a subscriber asks for is part of the name too, so that whoever lists the endpoints of a
    topic can tell how strict its subscribers are, and a request lives exactly as long as its
    subscriber.
    """

    kind: EndpointKind
    lan: str
    edge: str
    endpoint_id: int
    request: SubscriptionQos = NO_REQUEST

    def __post_init__(self) -> None:
        _checked_name("LAN", self.lan)
        _checked_name("edge", self.edge)
        if not 0 <= self.endpoint_id <= ENDPOINT_ID_MAX:
            raise RecordError(f"endpoint id is {self.endpoint_id}: it must fit in 63 bits")
        if self.kind is EndpointKind.PUBLISHER and self.request != NO_REQUEST:
            raise RecordError("a publisher asks for nothing: it declares what the topic offers")

    @property
    def name(self) -> str:
        """The znode's name, below its topic."""
        name = f"{self.kind}.{self.lan}.{self.edge}.{self.endpoint_id:016x}"
        return name + _request_suffix(self.request)

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read the znode's name."""
        parts = name.split(".")
        if len(parts) not in {4, 5} or parts[0] not in {"pub", "sub"} or len(parts[3]) != 16:
            raise RecordError(
                f"endpoint name is {name!r}: expected <pub|sub>.<lan>.<edge>.<16 hexadecimal digits>, "
                "and of a subscriber what it asks for"
            )
        request = _parse_request(name, parts[4]) if len(parts) == 5 else NO_REQUEST
        try:
            endpoint = cls(EndpointKind(parts[0]), parts[1], parts[2], int(parts[3], 16), request)
        except ValueError:
            raise RecordError(f"endpoint name is {name!r}: {parts[3]!r} is not hexadecimal") from None
        if endpoint.name != name:
            raise RecordError(f"endpoint name is {name!r}: its digits are not in the usual form")
        return endpoint


_REQUEST = re.compile(r"(?:d(?P<deadline>[0-9]{1,17}))?-?(?:l(?P<losses>[0-9]{1,10}))?")


def _request_suffix(request: SubscriptionQos) -> str:
    """What a subscriber asks for, at the end of its znode's name: `.d20000-l0` for 20 ms and no loss."""
    parts = []
    if request.deadline_ms is not None:
        parts.append(f"d{round(request.deadline_ms * 1000)}")
    if request.loss_tolerance is not None:
        parts.append(f"l{request.loss_tolerance}")
    return f".{'-'.join(parts)}" if parts else ""


def _parse_request(name: str, text: str) -> SubscriptionQos:
    match = _REQUEST.fullmatch(text)
    if match is None:
        raise RecordError(f"endpoint name is {name!r}: {text!r} is no request, expected one like d20000-l0")
    deadline, losses = match["deadline"], match["losses"]
    try:
        return SubscriptionQos(
            deadline_ms=int(deadline) / 1000 if deadline is not None else None,
            loss_tolerance=int(losses) if losses is not None else None,
        )
    except QosError as error:
        raise RecordError(f"endpoint name is {name!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class FlagRecord:
    """A topic whose promise does not hold as the network is now, as its primary found."""

    topic: str
    router: str
    """The primary that found it."""
    reason: str
    """For people: the numbers and the remedy."""

    def to_json(self) -> bytes:
        """The znode's content."""
        return _encode({"topic": self.topic, "router": self.router, "reason": self.reason})

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read the znode's content."""
        fields = _decode("flag", data)
        return cls(
            topic=_text("flag", fields, "topic"),
            router=_text("flag", fields, "router"),
            reason=_text("flag", fields, "reason"),
        )


@dataclass(frozen=True, slots=True)
class TopicView:
    """What a broker must know of a topic to route it."""

    record: TopicRecord
    endpoints: frozenset[Endpoint]
    exists: bool = True
    """False once the topic has been deleted; then there are no routers and no endpoints."""

    @property
    def requests(self) -> frozenset[SubscriptionQos]:
        """What its subscribers ask for, each request once."""
        return requests_of(self.endpoints)


def requests_of(endpoints: Iterable[Endpoint]) -> frozenset[SubscriptionQos]:
    """What the subscribers among these ask for, each request once."""
    return frozenset(endpoint.request for endpoint in endpoints if endpoint.request != NO_REQUEST)


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(", ", ": ")).encode()


def _decode(kind: str, data: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{kind} record is {data[:80]!r}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise RecordError(f"{kind} record is a {type(fields).__name__}: expected an object with fields")
    return fields


def _checked_name(kind: str, name: str) -> None:
    try:
        check_name(kind, name)
    except InvalidNameError as error:
        raise RecordError(str(error)) from None


def _field(kind: str, fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise RecordError(
            f"{kind} record has no field {name!r}: it has {', '.join(sorted(fields)) or 'none'}"
        )
    return fields[name]


def _text(kind: str, fields: Mapping[str, Any], name: str) -> str:
    value = _field(kind, fields, name)
    if not isinstance(value, str):
        raise RecordError(f"{name} of the {kind} record is {value!r}: expected text")
    return value


def _optional_text(kind: str, fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields.get(name) is None else _text(kind, fields, name)


def _whole(kind: str, fields: Mapping[str, Any], name: str) -> int:
    value = _field(kind, fields, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RecordError(f"{name} of the {kind} record is {value!r}: expected a whole number")
    return value


def _number(kind: str, fields: Mapping[str, Any], name: str) -> float:
    value = _field(kind, fields, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"{name} of the {kind} record is {value!r}: expected a number")
    try:
        return float(value)
    except OverflowError:
        raise RecordError(f"{name} of the {kind} record is too large a number") from None


def _flag(kind: str, fields: Mapping[str, Any], name: str) -> bool:
    value = _field(kind, fields, name)
    if not isinstance(value, bool):
        raise RecordError(f"{name} of the {kind} record is {value!r}: expected true or false")
    return value


def _map(kind: str, fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = _field(kind, fields, name)
    if not isinstance(value, dict):
        raise RecordError(f"{name} of the {kind} record is {value!r}: expected an object with fields")
    return value
