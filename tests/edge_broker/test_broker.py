"""An edge broker without sockets: whom it trusts and waits for until it has heard from ZooKeeper."""

from coordinator.records import Endpoint, TopicRecord, TopicView
from edge_broker.broker import EdgeBroker
from edge_broker.declarations import _Known
from overlay.errors import CloseReason
from overlay.limits import RESUME_NS
from overlay.messages import Declare, EndpointKind, QosIntent, Role, Welcome
from overlay.outbox import Outbox
from runtime.config import EdgeConfig
from runtime.host import Host
from runtime.hub import Hub, Identity
from runtime.link import Link
from tests.edge_broker.lan import NOW, PUB, RELIABLE, a_message, sequences_in
from tests.wires import body_of

PUBLISHER = Endpoint(EndpointKind.PUBLISHER, "plant", "e1", 100)
SUBSCRIBER = Endpoint(EndpointKind.SUBSCRIBER, "office", "e9", 200)


class Wire:
    """A connection that writes nothing: what waits stays in the outbox."""

    liveness = channel = None

    def flush_now(self) -> None:
        """Nothing is written."""

    flush_soon = flush_now


class NoWatch:
    """Of a topic whose views come from the test."""

    def cancel(self) -> None:
        """There is nothing to end."""


class Edge:
    """An edge with a publisher of a topic that r1 and r2 serve."""

    def __init__(self) -> None:
        self.now_ns = NOW
        self.broker = EdgeBroker(EdgeConfig(id="e1", lan="plant"), Host(self.clock))
        self.broker.hub = Hub(Identity(Role.EDGE, "e1", 1, "plant"), self.broker, clock=self.clock)
        self.core = self.broker.core
        self.topic = self.core.ensure_topic(1, "t", RELIABLE)
        self.client = self.core.client("client:p", Outbox())
        self.core.add_endpoint(self.client, PUB, 100, self.topic)
        self.broker.declarations._known["t"] = _Known(self.topic, NoWatch(), RELIABLE)

    def clock(self) -> int:
        return self.now_ns

    def reads(self, *endpoints: Endpoint) -> None:
        """What ZooKeeper says of the topic."""
        self.broker.declarations._on_topic(
            TopicView(TopicRecord(1, "t", RELIABLE, "r1", "r2", 1), frozenset(endpoints))
        )
        self.core.validate()

    def connect(self, router: str, incarnation: int) -> Link:
        link = self.broker.broker_link(router, Role.ROUTER)
        self.broker.on_welcome(link, Welcome(Role.ROUTER, router, incarnation))
        link.attach(Wire(), incarnation, 0)
        self.broker.on_link_up(link)
        self.core.validate()
        return link

    def disconnect(self, link: Link) -> None:
        link.detach(link.connection)
        self.broker.on_link_down(link, CloseReason.LOST, "")
        self.core.validate()

    def publish(self, *sequences: int) -> None:
        body = body_of([a_message(sequence) for sequence in sequences])
        self.core.admit_from_client(self.client, body, 0, self.now_ns)
        self.core.validate()

    @property
    def target(self) -> str | None:
        return self.core.statistics().topics[0].target


async def test_a_router_that_was_restarted_is_turned_to_when_zookeeper_has_told_what_it_has_lost():
    edge = Edge()
    edge.reads(PUBLISHER, SUBSCRIBER)
    first, _ = edge.connect("r1", 1), edge.connect("r2", 1)
    asked: list[str | None] = []

    async def catch_up() -> None:
        asked.append(edge.target)

    edge.broker.coordinator.catch_up = catch_up
    edge.disconnect(first)
    edge.connect("r1", 1)
    assert edge.target == "r1", "the same process has what it had"
    edge.disconnect(first)
    edge.connect("r1", 2)
    assert edge.target == "r2"
    (trusting,) = edge.broker.background._tasks
    await trusting
    assert asked == ["r2"]
    assert edge.target == "r1"


async def test_a_publisher_that_comes_is_heard_by_who_is_missing_from_the_first_view_of_its_topic():
    edge = Edge()
    router = edge.connect("r1", 1)
    declared = Declare(100, PUB, "t", intent=QosIntent.NEW)
    edge.broker.declarations._resume(edge.topic, edge.client, declared)
    edge.now_ns += RESUME_NS - 1
    edge.reads(PUBLISHER)  # the session of the subscriber's edge has just ended
    edge.publish(1, 2)
    edge.now_ns += RESUME_NS - 1
    edge.core.expire(edge.now_ns)
    edge.publish(3)
    edge.reads(PUBLISHER, SUBSCRIBER)
    edge.publish(4)
    assert sequences_in(router.outbox) == [1, 2, 3, 4]
