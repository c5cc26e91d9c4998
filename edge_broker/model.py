"""What an edge broker's core knows: topics, publishers, peers, and its statistics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from overlay.batch import BatchHeader, Passage
from overlay.bounds import UNBOUNDED, Delays
from overlay.history import History
from overlay.outbox import Outbox
from overlay.paths import Choice
from overlay.qos import TopicQos
from overlay.retention import Retention
from overlay.schedule import Unsure, granule_ns
from overlay.shedding import keep_every
from overlay.urgency import deadline_ns, level_of, urgency


class DropReason(StrEnum):
    """Why a message went no further."""

    DUPLICATE = "duplicate"
    """Delivered before."""
    LATE = "late"
    """It came after its successor: lost for subscribers."""
    NO_SUBSCRIBER = "no_subscriber"
    """Nobody here subscribes any more."""
    NO_ROUTER = "no_router"
    """No routing broker could be reached and the topic is best effort, or too much waits."""
    OUTBOX_FULL = "outbox_full"
    """A subscriber or broker did not take messages fast enough."""
    SHED_BEST_EFFORT = "shed_best_effort"
    """Best effort, given up in favour of others while a peer was overloaded."""
    SHED_TOLERATED = "shed_tolerated"
    """Within the topic's loss tolerance, given up while a peer was overloaded."""


class Peer:
    """Anyone messages are sent to: a client, a routing broker or another edge."""

    __slots__ = ("is_direct", "name", "outbox", "publishers", "subscriptions")

    def __init__(self, name: str, outbox: Outbox, *, is_direct: bool = False) -> None:
        self.name = name
        self.is_direct = is_direct
        """It is an edge of another LAN."""
        self.outbox = outbox
        self.publishers: dict[int, Publisher] = {}
        """Of a client: its publishing endpoints."""
        self.subscriptions: dict[int, Topic] = {}
        """Of a client: its subscribing endpoints."""

    @property
    def bare_name(self) -> str:
        """The name it gives itself, without the role before it."""
        return self.name.partition(":")[2] or self.name


class Route:
    """Where some messages go and by when; shared by all topics for which all of this is the same."""

    __slots__ = (
        "deadline_ns",
        "granule_ns",
        "keep_every",
        "level",
        "peers",
        "reserve",
        "reserve_after_ns",
        "unsure",
        "urgency",
    )

    def __init__(
        self, peers: tuple[Peer, ...], deadline_ns: int, urgency: int, keep_every: int | None, unsure: Unsure
    ) -> None:
        self.peers = peers
        self.reserve: Peer | None = None
        """A routing broker for what the other edges have not acknowledged in time."""
        self.reserve_after_ns = 0
        """When, counted from a message's birth."""
        self.deadline_ns = deadline_ns
        self.granule_ns = granule_ns(deadline_ns)
        self.urgency = urgency
        self.level = level_of(urgency)
        """Less urgent while older messages wait that were."""
        self.keep_every = keep_every
        """One message of so many must pass an overloaded peer; None: none must."""
        self.unsure = unsure
        """Shared by all routes of the core with this deadline."""


NOWHERE: Final = Route((), 0, 0, None, Unsure())


class Held(NamedTuple):
    """A message that waits for its predecessor."""

    topic: "Topic"
    header: BatchHeader
    born_ns: int
    data: bytes
    until_ns: int
    came: Passage | None = None
    """Set if it is traced."""
    patient_until_ns: int = 0
    """So long it waits if more predecessors are missing than its topic may lose; 0: no longer than else."""


class Publisher:
    """A publishing endpoint of a local client."""

    __slots__ = (
        "accepted",
        "born_ns",
        "client",
        "departed_ns",
        "principal",
        "publisher_id",
        "retention",
        "topic",
    )

    def __init__(self, publisher_id: int, topic: "Topic", client: Peer, retention: Retention) -> None:
        self.publisher_id = publisher_id
        self.topic = topic
        self.client: Peer | None = client
        """None once the endpoint is gone; its messages are kept a little longer."""
        self.principal = ""
        """Whose it is; empty where nobody asks. Nobody else may go on in its name."""
        self.departed_ns = 0
        self.accepted = 0
        """Highest sequence taken from the client."""
        self.born_ns = 0
        """When its latest message was born, on our clock; 0 if not known."""
        self.retention = retention


class Topic:
    """A topic with endpoints at this edge."""

    __slots__ = (
        "_delays",
        "backup",
        "choices",
        "deadline_ns",
        "deliver",
        "delivered",
        "direct",
        "floor_level",
        "floor_ns",
        "forward",
        "histories",
        "ingress",
        "interested_edges",
        "interested_remotely",
        "is_turning",
        "keeps_sent",
        "keeps_unsent",
        "kept_messages",
        "known_publishers",
        "messages",
        "mixed_until_ns",
        "name",
        "primary",
        "publishers",
        "qos",
        "relied_on",
        "remote_edges",
        "requirements",
        "resuming",
        "subscribers",
        "subscribers_everywhere",
        "target",
        "tolerated",
        "topic_id",
        "unknown_since_ns",
        "via_routing",
    )

    def __init__(self, topic_id: int, name: str, qos: TopicQos, delays: Delays) -> None:
        self.topic_id = topic_id
        self.name = name
        self._delays = delays
        self.set_qos(qos)
        self.floor_level = 0
        self.floor_ns = 0
        """No message may be due before: older ones wait that were given a later deadline; 0 if none do."""
        self.publishers: dict[int, Publisher] = {}
        self.subscribers: Counter[Peer] = Counter()
        """Local clients that subscribe, with their number of endpoints."""
        self.primary: str | None = None
        self.backup: str | None = None
        self.interested_edges: tuple[str, ...] = ()
        """Other edges of this LAN with subscribers."""
        self.interested_remotely = False
        """Some other LAN has subscribers."""
        self.remote_edges: tuple[str, ...] = ()
        """The edges of other LANs with subscribers."""
        self.choices: Mapping[str, Choice] = {}
        """The paths to those of them that are not reached by the routing broker alone."""
        self.direct: tuple[str, ...] = ()
        """Those of them that are sent to directly."""
        self.relied_on: set[str] = set()
        """Those that were sent to directly alone since their link came up: it may hold the only copies."""
        self.via_routing = True
        """Messages for other LANs go to the routing broker; if not, every edge gets them directly."""
        self.keeps_sent = False
        """What is sent is kept for sending again, also within a LAN if subscribers can change their edge."""
        self.keeps_unsent = False
        """Messages for other LANs wait: for a routing broker, or for interest to be seen (`Resuming`)."""
        self.mixed_until_ns = 0
        """So long messages may race with earlier ones: a publisher came from another edge, or the topic has
        become more urgent."""
        self.resuming: dict[Peer, int] = {}
        """Clients whose subscribers came from another edge: so long they get also what others had before."""
        self.subscribers_everywhere = 0
        self.known_publishers: frozenset[int] = frozenset()
        self.target: Peer | None = None
        self.is_turning = False
        """The target is to be chosen anew before anything else happens to the topic (`Targets`)."""
        self.deliver = NOWHERE
        self.forward = NOWHERE
        self.ingress = NOWHERE
        self.histories: dict[int, History] = {}
        self.unknown_since_ns: dict[int, int] = {}
        """Since when publishers with a history have not been in ZooKeeper."""
        self.messages = 0
        """Messages accepted from local publishers."""
        self.delivered = 0
        """Messages given to local subscribers, each once however many there are."""

    def set_qos(self, qos: TopicQos) -> None:
        """What the topic is served with."""
        self.qos = qos
        self.deadline_ns = deadline_ns(qos)
        self.requirements = (self.deadline_ns, urgency(qos), keep_every(qos, self._delays))
        """What its routes depend on besides their peers."""
        self.tolerated = UNBOUNDED if qos.loss_tolerance is None else qos.loss_tolerance
        self.kept_messages = qos.kept_messages

    @property
    def peers(self) -> set[Peer]:
        """Everyone its messages go to from here."""
        return {*self.deliver.peers, *self.ingress.peers, *self.forward.peers}

    @property
    def is_idle(self) -> bool:
        """Nobody here subscribes, publishes, or published a moment ago."""
        return not (self.publishers or self.subscribers)

    def expire_histories(self, now_ns: int, linger_ns: int) -> None:
        """Forget publishers that have not been in ZooKeeper for this long."""
        unknown = self.histories.keys() - self.known_publishers - self.publishers.keys()
        if not unknown and not self.unknown_since_ns:
            return
        since = self.unknown_since_ns
        self.unknown_since_ns = {publisher_id: since.get(publisher_id, now_ns) for publisher_id in unknown}
        for publisher_id, since_ns in self.unknown_since_ns.items():
            if now_ns - since_ns > linger_ns:
                del self.histories[publisher_id]


@dataclass(frozen=True, slots=True)
class TopicStatistics:
    """One topic at this edge."""

    topic: str
    messages: int
    delivered: int
    lost: int
    longest_loss_run: int
    publishers: int
    subscribers: int
    target: str
    primary: str
    backup: str
    paths: Mapping[str, str]
    """By edge of another LAN with subscribers: how messages get there."""


@dataclass(frozen=True, slots=True)
class EdgeStatistics:
    """Counts since the broker started."""

    clients: int
    topics: tuple[TopicStatistics, ...]
    messages_accepted: int
    messages_delivered: int
    messages_resent: int
    messages_held: int
    messages_repeated: int
    """Given again to subscribers that came from another edge."""
    messages_from_reserve: int
    """Sent to the routing broker because an edge had not acknowledged them in time."""
    retained_bytes: int
    """Memory for what is kept for sending again or waits for a routing broker."""
    path_changes: int
    target_changes: int
    dropped: Mapping[str, int]


def topic_statistics(topic: Topic) -> TopicStatistics:
    """One topic as it is now."""
    return TopicStatistics(
        topic=topic.name,
        messages=topic.messages,
        delivered=topic.delivered,
        lost=sum(history.lost for history in topic.histories.values()),
        longest_loss_run=max((history.longest_gap for history in topic.histories.values()), default=0),
        publishers=sum(publisher.client is not None for publisher in topic.publishers.values()),
        subscribers=sum(topic.subscribers.values()),
        target=topic.target.bare_name if topic.target is not None else "",
        primary=topic.primary or "",
        backup=topic.backup or "",
        paths={
            edge: topic.choices[edge].name if edge in topic.choices else "routing"
            for edge in topic.remote_edges
        },
    )
