"""Traces of nodes, made by hand through the real log and the real segment format."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from overlay.qos import TopicQos
from overlay.trace import BlockKind, Event, Sampling, SegmentHeader, TraceLog, encode_block

MS: Final = 1_000_000
WALL_NS: Final = 1_700_000_000_000_000_000
"""The calendar time at which the clocks of all test hosts read 0."""


QOS: Final = TopicQos(period_ms=10, deadline_ms=50, loss_tolerance=2)


@dataclass
class Node:
    """A node that records what a test tells it to."""

    name: str
    role: str
    lan: str = ""
    host: str = "boot-1"
    offset_ns: int = 0
    """What the clock of its host is ahead of that of the others."""
    sampling: float = 1.0
    log: TraceLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = TraceLog(Sampling(self.sampling))

    def header(self, **changes: object) -> SegmentHeader:
        values: dict[str, object] = {
            "node": self.name,
            "role": self.role,
            "lan": self.lan,
            "host": self.host,
            "clock": f"{self.host}/{self.name}",
            "pid": 1,
            "number": 1,
            "wall_ns": WALL_NS,
            "monotonic_ns": self.offset_ns,
            "sampling": self.sampling,
        }
        return SegmentHeader(**(values | changes))

    def segment(self, **changes: object) -> bytes:
        """Everything recorded since the last one."""
        _, records = self.log.take()
        blocks = self.log.tables() + encode_block(BlockKind.RECORDS, records)
        return self.header(**changes).encode() + blocks

    def write(self, folder: Path, number: int = 1, suffix: str = ".segment", **changes: object) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}-1-1-{number:06}{suffix}"
        path.write_bytes(self.segment(number=number, **changes))
        return path

    def saw(
        self,
        event: Event,
        publisher: int,
        sequence: int,
        *,
        topic: int = 1,
        came: str | None = None,
        went: str | None = None,
        in_ns: int = 0,
        out_ns: int = 0,
        **rest: int,
    ) -> None:
        """One event; times are those of an ideal clock, the node's own offset is added."""
        log = self.log
        log.record(
            event,
            topic,
            publisher,
            sequence,
            in_ns=in_ns + self.offset_ns if in_ns else 0,
            out_ns=out_ns + self.offset_ns if out_ns else 0,
            peer_in=log.peer(came) if came else 0,
            peer_out=log.peer(went) if went else 0,
            **rest,
        )


@dataclass(frozen=True)
class Delays:
    """How long a message takes on each part of its way, in ns."""

    to_ingress: int = 1 * MS
    ingress: int = 2 * MS
    to_router: int = 10 * MS
    router: int = 3 * MS
    to_egress: int = 20 * MS
    egress: int = 4 * MS
    to_subscriber: int = 1 * MS

    @property
    def total(self) -> int:
        return (
            self.to_ingress
            + self.ingress
            + self.to_router
            + self.router
            + self.to_egress
            + self.egress
            + self.to_subscriber
        )


class Overlay:
    """A publisher in the plant, a subscriber in the office, two routers between them."""

    def __init__(self, qos: TopicQos, *, sampling: float = 1.0) -> None:
        self.publisher = Node("pub-1", "client", "plant", sampling=sampling)
        self.ingress = Node("edge-plant", "edge", "plant", sampling=sampling)
        self.router = Node("router-1", "router", sampling=sampling)
        self.second_router = Node("router-2", "router", sampling=sampling)
        self.egress = Node("edge-office", "edge", "office", sampling=sampling)
        self.subscriber = Node("sub-1", "client", "office", sampling=sampling)
        self.others: list[Node] = []
        """More clients, if a test adds some."""
        self.deadline_ns = qos.deadline_ns or 0
        for node in self.nodes:
            node.log.define_topic(1, "valve", qos)

    @property
    def nodes(self) -> list[Node]:
        return [
            self.publisher,
            self.ingress,
            self.router,
            self.second_router,
            self.egress,
            self.subscriber,
            *self.others,
        ]

    def carry(
        self,
        sequence: int,
        at_ns: int,
        delays: Delays | None = None,
        *,
        publisher: int = 7,
        topic: int = 1,
        lost_at: str = "",
        router: Node | None = None,
        subscriber: Node | None = None,
        bound_error_ns: int = MS,
    ) -> None:
        """A message travels all the way, or until the node `lost_at` (which sends it and nobody gets it)."""
        delays = delays or Delays()
        carrier = router or self.router
        stops = (
            (self.publisher, 0, 0),
            (self.ingress, delays.to_ingress, delays.ingress),
            (carrier, delays.to_router, delays.router),
            (self.egress, delays.to_egress, delays.egress),
            (subscriber or self.subscriber, delays.to_subscriber, 0),
        )
        now_ns = at_ns
        for number, (node, link_ns, wait_ns) in enumerate(stops):
            now_ns += link_ns
            last = number + 1 == len(stops)
            age_ns = now_ns - at_ns
            node.saw(
                Event.DELIVERED if last else Event.DISPATCHED,
                publisher,
                sequence,
                topic=topic,
                came=stops[number - 1][0].name if number else None,
                went=None if last else stops[number + 1][0].name,
                in_ns=now_ns,
                out_ns=0 if last else now_ns + wait_ns,
                born_ns=at_ns,
                age_bound_ns=age_ns + bound_error_ns if number else 0,
                link_bound_ns=link_ns + bound_error_ns if number else 0,
                slack_ns=self.deadline_ns - age_ns - bound_error_ns,
                deadline_ns=self.deadline_ns,
            )
            now_ns += wait_ns
            if node.name == lost_at:
                return

    def write(self, folder: Path) -> None:
        for node in self.nodes:
            node.write(folder)
