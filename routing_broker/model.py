"""What a routing broker's core knows: peers, topics, routes, copies, and its statistics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from overlay.batch import BatchHeader, Run
from overlay.outbox import Outbox, Ticket
from overlay.qos import TopicQos
from overlay.schedule import Unsure, granule_ns
from overlay.urgency import level_of, urgency


class DropReason(StrEnum):
    """Why a message went no further."""

    UNROUTED = "unrouted"
    """No routes for its topic within the time or space allowed."""
    OUTBOX_FULL = "outbox_full"
    """The egress edge did not take messages fast enough."""
    EDGE_GONE = "edge_gone"
    """The egress edge left with messages waiting for it."""
    SHED_BEST_EFFORT = "shed_best_effort"
    """Best effort, given up in favour of others while an edge was overloaded."""
    SHED_TOLERATED = "shed_tolerated"
    """Within the topic's loss tolerance, given up while an edge was overloaded."""


class Peer:
    """A broker, connected or not, with its outbox."""

    __slots__ = ("lan", "name", "outbox", "routes")

    def __init__(self, name: str, lan: str, outbox: Outbox) -> None:
        self.name = name
        self.lan = lan
        self.outbox = outbox
        self.routes: dict[int, Route] = {}
        """Where messages from this peer go, by topic id; filled on demand."""


@dataclass(slots=True)
class Topic:
    """A topic this broker serves."""

    topic_id: int
    name: str
    qos: TopicQos
    subscribers: dict[str, str]
    """Edges with subscribers, and their LANs."""
    backup: str | None = None
    """The routing broker to replicate to, if this one is the primary and the topic is not best effort."""
    replicates: bool = False
    """Copies are needed also while deadlines are met."""
    primary: str | None = None
    """The topic's primary, if it is another routing broker: its copies come before what edges send us."""
    floor_ns: int = field(default=0, compare=False)
    """No message may be due before: older ones wait that were given a later deadline; 0 if none do."""
    floor_level: int = field(default=0, compare=False)
    """The level of those."""


class Route:
    """Where some messages go and by when; shared by all topics for which all of this is the same."""

    __slots__ = (
        "backup",
        "deadline_ns",
        "granule_ns",
        "keep_every",
        "level",
        "peers",
        "primary",
        "replicate_ns",
        "replicates",
        "unsure",
    )

    def __init__(
        self,
        peers: tuple[Peer, ...],
        deadline_ns: int,
        keep_every: int | None,
        topic: Topic,
        replicate_ns: int,
        unsure: Unsure,
    ) -> None:
        self.peers = peers
        self.deadline_ns = deadline_ns
        self.granule_ns = granule_ns(deadline_ns)
        self.keep_every = keep_every
        """One message of so many must pass an overloaded peer; None: none must."""
        self.level = max(level_of(urgency(topic.qos)), topic.floor_level)
        """Where its messages wait; less urgent while older ones wait that were."""
        self.backup = topic.backup
        self.primary = topic.primary
        self.replicates = topic.replicates
        """Copies go to the backup always, not only while an edge is overloaded."""
        self.replicate_ns = replicate_ns
        self.unsure = unsure
        """Shared by all routes of the core with this deadline."""


class ReplicaFrame:
    """A frame of copies at a backup."""

    __slots__ = ("backup", "number", "outstanding")

    def __init__(self, backup: str, number: int, outstanding: int) -> None:
        self.backup = backup
        self.number = number
        self.outstanding = outstanding
        """Copies in it that are not dispatched yet."""


class Copy(Ticket):
    """Follows a run that needs replication to its edges and to the backup."""

    __slots__ = ("at", "backup", "header", "pending", "replica", "replicate_by_ns", "run")

    def __init__(
        self, header: BatchHeader, run: Run, pending: int, backup: str, replicate_by_ns: int
    ) -> None:
        super().__init__()
        self.header = header
        self.run = run
        self.pending = pending
        """Edges that have not acknowledged it; 0: dispatched."""
        self.backup = backup
        """Where it should be."""
        self.at: str | None = None
        """The backup in whose outbox it waits or to which it has gone out."""
        self.replicate_by_ns = replicate_by_ns
        self.replica: ReplicaFrame | None = None
        """Set once it has gone out to `at`: replicated."""


class Unrouted(NamedTuple):
    """Messages of a topic whose routes are not known yet."""

    source: Peer
    header: BatchHeader
    run: Run
    clock_shift_ns: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """Counts since the broker started."""

    topics: int
    messages_admitted: int
    messages_dispatched: int
    messages_replicated: int
    messages_recovered: int
    copies_pruned: int
    copies_cancelled: int
    copies_undispatched: int
    copies_kept: int
    copies_evicted: int
    messages_unrouted_waiting: int
    dropped: Mapping[str, int]
