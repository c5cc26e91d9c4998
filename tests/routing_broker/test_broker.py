"""A routing broker without sockets and ZooKeeper: what it lets go of, whom it asks, what it confirms."""

from collections.abc import Iterable

from coordinator.records import Endpoint, TopicRecord, TopicView
from overlay.limits import ROUTE_LINGER_NS, SECOND_NS
from overlay.messages import ControlMessage, EndpointKind, Hello, Message, Prune, Resume, Role
from overlay.qos import TopicQos
from routing_broker.broker import RoutingBroker
from runtime.config import RouterConfig
from runtime.host import Host
from runtime.hub import Hub, Identity
from runtime.link import Link
from tests.wires import body_of

NOW = 10**12
QOS = TopicQos(period_ms=100, deadline_ms=500, loss_tolerance=0, retention=1)
LANS = {"ea": "a", "eb": "b", "ec": "b"}
PUBLISHER = Endpoint(EndpointKind.PUBLISHER, "a", "ea", 77)
SUBSCRIBER = Endpoint(EndpointKind.SUBSCRIBER, "b", "eb", 88)


class Wire:
    """A connection that writes nothing and notes what it is told."""

    liveness = channel = None

    def __init__(self) -> None:
        self.told: list[ControlMessage] = []

    def send_control(self, message: ControlMessage) -> None:
        self.told.append(message)

    def flush_soon(self) -> None:
        """What waits stays in the outbox."""


class Router:
    """The primary of a topic with a publisher at ea and a subscriber at eb; the backup is r2."""

    def __init__(self) -> None:
        self.now_ns = NOW
        self.broker = RoutingBroker(RouterConfig(id="r1"), Host(self.clock))
        self.core = self.broker.core
        self.broker.hub = Hub(Identity(Role.ROUTER, "r1", 1), self.broker, clock=self.clock)
        self.broker.session._connected_ns = NOW
        self.reads({"ea", "eb"}, PUBLISHER, SUBSCRIBER)
        self.wires: dict[str, Wire] = {}

    def clock(self) -> int:
        return self.now_ns

    def reads(self, edges: Iterable[str], *endpoints: Endpoint) -> None:
        """What ZooKeeper says from now on."""
        self.broker._on_edges(frozenset(edges))
        self.broker._on_topic(TopicView(TopicRecord(1, "t", QOS, "r1", "r2", 1), frozenset(endpoints)))

    def connect(self, name: str) -> Link:
        role = Role.EDGE if name in LANS else Role.ROUTER
        link, _ = self.broker.admit(Hello(role, name, 1, SECOND_NS, LANS.get(name, "")))
        link.connection = self.wires[name] = Wire()
        self.broker.on_link_up(link)
        return link

    def publish(self, count: int) -> None:
        messages = [Message(1, 77, sequence, self.now_ns, b"") for sequence in range(1, count + 1)]
        self.broker.on_data(self.connect("ea"), body_of(messages), self.now_ns)

    async def passes(self, duration_ns: int, *, answered: bool = True) -> None:
        """Time passes, with housekeeping every second; ZooKeeper answers or is out of reach."""
        end_ns = self.now_ns + duration_ns
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + SECOND_NS)
            if answered:
                self.broker.session._lease_sent_ns = self.now_ns
            await self.broker._housekeeping()
            self.core.validate()

    def subscribes(self, edge: str) -> bool:
        return edge in self.core.topics[1].subscribers


async def test_what_waits_for_an_edge_that_came_back_without_its_clients_is_given_up():
    router = Router()
    router.publish(3)
    await router.passes(60 * SECOND_NS)
    assert router.core.statistics().copies_undispatched > 0, "its clients may be about to come back"
    router.reads({"ea", "eb"}, PUBLISHER)  # registered again, with no reason to connect to us
    await router.passes(ROUTE_LINGER_NS + 15 * SECOND_NS)
    assert router.core.statistics().copies_undispatched == 0
    assert "eb" not in router.core.peers


async def test_copies_of_an_edge_that_is_given_up_are_pruned_though_nobody_acknowledges_anything():
    router = Router()
    backup = router.connect("r2")
    router.publish(3)
    assert backup.outbox.take_frames(10**6, router.now_ns)
    await router.passes(60 * SECOND_NS)
    assert not router.wires["r2"].told
    router.reads({"ea"}, PUBLISHER)
    await router.passes(ROUTE_LINGER_NS + 15 * SECOND_NS)
    assert [type(message) for message in router.wires["r2"].told] == [Prune]


async def test_the_route_to_a_subscriber_that_told_us_of_its_new_edge_stays_while_zookeeper_is_away():
    router = Router()
    router.broker.on_control(router.connect("ec"), Resume("t", 88, "b", "ec"))
    await router.passes(60 * SECOND_NS, answered=False)
    assert router.subscribes("ec"), "it may be registered long since"
    router.broker.session._connected_ns = router.now_ns
    await router.passes(ROUTE_LINGER_NS - 1)
    assert router.subscribes("ec"), "what is registered takes a moment to read"
    await router.passes(1)
    assert not router.subscribes("ec")
    assert router.subscribes("eb")


async def test_an_edge_whose_session_has_ended_is_asked_for_what_a_subscriber_has_missed():
    router = Router()
    for edge in ("ea", "ec"):
        router.connect(edge)
    router.reads({"eb", "ec"}, SUBSCRIBER)  # ea works on, and so do its publishers
    await router.passes(60 * SECOND_NS)
    frame = Resume("t", 88, "b", "ec", None, (77, 5))
    router.broker.on_control(router.broker._links["edge:ec"], frame)
    assert router.wires["ea"].told == [frame]
    assert router.wires["ec"].told == []


async def test_assignments_are_confirmed_when_their_topics_have_been_read():
    router = Router()
    confirmed: list[int] = []

    async def confirm(router_id: str, version: int) -> None:
        confirmed.append(version)

    router.broker.coordinator.confirm_assignments = confirm
    router.broker.coordinator.watch_topic = lambda name, callback: None
    router.broker._on_assignments(frozenset({"t", "u"}), 3)
    await router.broker._confirm_assignments()
    assert confirmed == []
    router.broker._on_topic(TopicView(TopicRecord(2, "u", QOS, "r2", "r1", 1), frozenset()))
    await router.broker._confirm_assignments()
    assert confirmed == [3]
