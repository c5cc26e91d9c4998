"""The frames of the wire protocol as types. `overlay.codec` turns them into bytes and back.

`docs/wire.md` draws each frame and says who sends it to whom.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple

from overlay.limits import DRIFT_PPM

PROTOCOL_VERSION: Final = 3

UNKNOWN_CLOCK_SHIFT: Final = -(2**63)
"""Clock shift of a batch whose age cannot be bounded: some link had no helper yet."""


class FrameKind(IntEnum):
    """The byte after the length of a frame."""

    HELLO = 1
    WELCOME = 2
    CLOSE = 3
    HEARTBEAT = 4
    DATA = 5
    DECLARE = 6
    DECLARED = 7
    REFUSED = 8
    UNDECLARE = 9
    MATCHED = 10
    PRUNE = 11
    QOS_CHANGED = 12
    PUBLISHERS = 13
    MEASURED = 14
    NUMBERED = 15
    DRAINING = 16
    RESUME = 17


class Role(StrEnum):
    """What a node is."""

    CLIENT = "client"
    EDGE = "edge"
    ROUTER = "router"


class EndpointKind(StrEnum):
    """The two kinds of endpoint."""

    PUBLISHER = "pub"
    SUBSCRIBER = "sub"


class QosIntent(StrEnum):
    """What the quality of service in a declaration is for."""

    MATCH = "match"
    """The topic must have it, or get it if it is new."""
    NEW = "new"
    """The topic gets it if it is new; else it stays as it is. So declares a client that was away."""
    CHANGE = "change"
    """The topic has it from now on."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame on a connection, from the side that opened it."""

    role: Role
    node: str
    incarnation: int
    """Drawn at random when the process starts: the same name with another incarnation is another process."""
    heartbeat_ns: int
    """How often the sender will send heartbeats, and asks to get them."""
    lan: str = ""
    cluster: str = ""
    """Empty for a client, which learns the cluster from the WELCOME."""
    peer_incarnation: int = 0
    """The incarnation of the receiver that `received` counts for; 0 if this is the first contact."""
    received: int = 0
    """Data frames received from the receiver so far: it goes on after these."""
    drift_ppm: int = DRIFT_PPM
    """Most that the sender's clock drifts against real time."""
    token: str = field(default="", repr=False)
    """Of a client without a certificate: what proves who it is."""
    protocol: int = PROTOCOL_VERSION
    datagrams: str = field(default="", repr=False)
    """How to seal datagrams to the sender (`runtime.datagrams`); empty: it takes none."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to HELLO: the connection is open."""

    role: Role
    node: str
    incarnation: int
    lan: str = ""
    cluster: str = ""
    received: int = 0
    """Data frames received from the dialling incarnation so far: it goes on after these."""
    edges: tuple[str, ...] = ()
    """For a client: locators of the other edge brokers of the LAN, to turn to if this one dies."""
    drift_ppm: int = DRIFT_PPM
    """Most that the sender's clock drifts against real time."""
    protocol: int = PROTOCOL_VERSION
    datagrams: str = field(default="", repr=False)
    """How to seal datagrams to the sender; empty: it takes none on this link."""
    datagram_port: int = 0
    """Where it takes them, on the host that was dialled."""


@dataclass(frozen=True, slots=True)
class Close:
    """Last frame on a connection."""

    reason: str
    detail: str = ""


class Heartbeat(NamedTuple):
    """Sent regularly both ways: liveness, acknowledgement and clock readings in one."""

    sent_ns: int
    """Sender's clock when it sent this."""
    echo_ns: int
    """`sent_ns` of the last heartbeat the sender received; 0 if none."""
    echo_received_ns: int
    """Sender's clock when it received that one."""
    received: int
    """Data frames the sender has received on this link."""


@dataclass(frozen=True, slots=True)
class Declare:
    """Client to edge: an endpoint exists. Repeated after every reconnect."""

    endpoint: int
    kind: EndpointKind
    topic: str
    qos: dict[str, Any] | None = None
    """None: take the topic as it is, or the default if it is new."""
    intent: QosIntent = QosIntent.MATCH
    request: dict[str, Any] | None = None
    """Of a subscriber: what it needs beyond what the topic has."""
    watches: bool = False
    """Of a subscriber: it wants to be told who publishes."""
    resume: tuple[int, ...] | None = None
    """Of a subscriber that was served before: publisher and last sequence received of it, in turn."""


@dataclass(frozen=True, slots=True)
class Declared:
    """Edge to client: the endpoint is known to the overlay."""

    endpoint: int
    topic_id: int
    qos: dict[str, Any] = field(default_factory=dict)
    """What the topic is served with: what it was declared with, or stricter if a subscriber asks for it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Edge to client: the endpoint cannot be."""

    endpoint: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Undeclare:
    """Client to edge: the endpoint is gone."""

    endpoint: int


@dataclass(frozen=True, slots=True)
class Matched:
    """Edge to publishing client: how many subscribers its topic has now, in all LANs."""

    endpoint: int
    subscribers: int


@dataclass(frozen=True, slots=True)
class Prune:
    """Primary to backup: these frames of copies have been dispatched and can go."""

    frames: tuple[int, ...]
    """First and last numbers of ranges, in turn."""


@dataclass(frozen=True, slots=True)
class QosChanged:
    """Edge to client: what the endpoint's topic is served with from now on."""

    endpoint: int
    qos: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Publishers:
    """Edge to subscribing client: who publishes on its topic now, in all LANs."""

    endpoint: int
    publishers: tuple[int, ...]
    complete: bool
    """False: there are more than are listed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Edge to edge of another LAN: what the sender knows of the links from routing brokers to it."""

    links: dict[str, Any] = field(default_factory=dict)
    """By routing broker: loss, burst, copies, then delays in ns and their shares, in turn."""


@dataclass(frozen=True, slots=True)
class Draining:
    """Edge to client: go over to another edge; until then, and for a while, this one serves on."""

    edges: tuple[str, ...] = ()
    """Locators of the other edge brokers of the LAN."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A subscriber has come to another edge: send it what it has not received.

    From its edge to the other edges of the LAN and to the topic's routing brokers, and from those to the
    edges of the topic's publishers.
    """

    topic: str
    endpoint: int
    lan: str
    edge: str
    """Where the subscriber is now."""
    request: dict[str, Any] | None = None
    """What it needs beyond what the topic has."""
    positions: tuple[int, ...] = ()
    """Publisher and last sequence received of it, in turn."""


ControlMessage = (
    Hello
    | Welcome
    | Close
    | Declare
    | Declared
    | Refused
    | Undeclare
    | Matched
    | Prune
    | QosChanged
    | Publishers
    | Measured
    | Draining
    | Resume
)


@dataclass(frozen=True, slots=True)
class Message:
    """One message as a subscriber's side sees it. Hot paths work on whole batches instead."""

    topic_id: int
    publisher: int
    sequence: int
    born_ns: int
    payload: bytes
