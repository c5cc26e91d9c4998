"""Three edges and two routing brokers wired by hand: whatever breaks, the egress gets it all once, in order.

The guarantee under test: as long as fewer messages of a publisher are on their way than the
topic retains, routing brokers may crash, links may break and assignments may change, in any
order and at any moment. The two routing brokers back each other up: copies go to the backup,
are pruned when the edges have acknowledged the messages, and are dispatched when the link
between the two breaks, whether the primary is dead or not.
"""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_broker.core import EdgeCore
from edge_broker.model import Peer, Topic
from overlay.batch import decode_messages
from overlay.bounds import Delays, needs_replication
from overlay.limits import MILLISECOND_NS
from overlay.messages import EndpointKind, Message
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from routing_broker.core import RouterCore
from routing_broker.mode import Mode
from tests.wires import Wire, body_of

MS = MILLISECOND_NS
RETENTION = 5
QOS = TopicQos(period_ms=10, retention=RETENTION)
DELAYS = Delays(0, 1 * MS, 1 * MS, 20 * MS)
TOPIC = 1
ROUTERS = ("r1", "r2")
PUBLISHERS = (100, 101)
Clock = Callable[[], int]
_routers = st.sampled_from(ROUTERS)
_frames = st.integers(1, 3)
_budgets = st.sampled_from([1, 2**40])
_shifts = st.sampled_from([0, 1, 4 * MS])
"""What may be known of a clock that is in truth the same: the bound gets better and worse again."""

assert needs_replication(QOS, DELAYS)


class Edge:
    """An edge with one subscribing client that notes what it gets."""

    def __init__(self, edge: str, lan: str, clock: Clock) -> None:
        self.name = edge
        self.lan = lan
        self.clock = clock
        self.clock_shift_ns = 0
        self.core = EdgeCore(edge, lan, 2)
        topic = self.core.ensure_topic(TOPIC, "t", QOS)
        self.outbox = Outbox()
        client = self.core.client("client:s", self.outbox)
        self.core.add_endpoint(client, EndpointKind.SUBSCRIBER, 200, topic)
        self.wire = Wire(self.outbox, self._receive)
        self.got: dict[int, list[int]] = {publisher: [] for publisher in PUBLISHERS}

    def receive_from_broker(self, body: bytes) -> None:
        self.core.admit_from_broker(body, self.clock_shift_ns, self.clock())

    def _receive(self, body: bytes) -> None:
        for message in decode_messages(body):
            assert message.payload == _payload(message.publisher, message.sequence)
            self.got[message.publisher].append(message.sequence)


class Router:
    """One routing broker: its process comes and goes, the ingress keeps its link to it."""

    def __init__(self, name: str, mode: Mode, egresses: list[Edge], clock: Clock) -> None:
        self.name = name
        self.mode = mode
        self.clock = clock
        self.link = Outbox()
        self.uplink = Wire(self.link, self._receive, clock=clock)
        self.uplink.is_up = False
        self.egresses = egresses
        self.clock_shift_ns = 0
        self.processes = 0
        self.is_alive = False
        self.start()

    def start(self) -> None:
        """A new process that has not read the topic's routes yet; the edges connect to it."""
        self.core = RouterCore(self.mode, DELAYS)
        self.ingress_peer = self.core.peer("ingress", "a")
        self.processes += 1
        self.is_new = True
        self.is_alive = True
        self.downlinks = {
            edge.name: Wire(
                self.core.peer(edge.name, edge.lan).outbox,
                edge.receive_from_broker,
                clock=self.clock,
                on_acknowledged=self.core.acknowledged,
            )
            for edge in self.egresses
        }
        for edge in self.egresses:
            edge.core.router_up(self.name, Outbox(), self.clock())

    def crash(self) -> None:
        """All that it held is gone."""
        self.is_alive = False
        self.uplink.cut()
        for edge in self.egresses:
            self.lose_edge(edge)

    def lose_edge(self, edge: Edge) -> None:
        self.downlinks[edge.name].cut()
        edge.core.router_down(self.name, self.clock())

    def connect_edge(self, edge: Edge) -> None:
        wire = self.downlinks[edge.name]
        if self.is_alive and not wire.is_up:
            wire.reconnect()
            edge.core.router_up(self.name, Outbox(), self.clock())

    def connect_ingress(self) -> None:
        """The ingress connects, perhaps to another process than before."""
        if self.is_new:
            self.is_new = False
            self.uplink.reconnect_to_another(self._receive)
        else:
            self.uplink.reconnect()

    def read_routes(self, backup: str | None, primary: str | None, sees_egress: bool = True) -> None:
        """It learns who subscribes; the egress may be missing while it registers anew."""
        subscribers = {"neighbour": "a", "egress": "b"} if sees_egress else {"neighbour": "a"}
        self.core.set_topic(TOPIC, "t", QOS, subscribers, self.clock(), backup, primary)

    def _receive(self, body: bytes) -> None:
        self.core.admit(self.ingress_peer, body, self.clock_shift_ns, self.clock())


class Partners:
    """The link between the two routing brokers: copies and prunes both ways."""

    def __init__(self, first: Router, second: Router) -> None:
        self.is_up = False
        self._ways = [(first, second), (second, first)]
        self._met = (0, 0)
        self.wires: dict[str, Wire] = {}
        """By the name of the one that sends."""

    def connect(self) -> None:
        first, second = self._ways[0]
        if self.is_up or not (first.is_alive and second.is_alive):
            return
        self.is_up = True
        know_each_other = self._met == (first.processes, second.processes)
        self._met = (first.processes, second.processes)
        for sender, receiver in self._ways:
            if know_each_other:
                self.wires[sender.name].reconnect()
            else:
                self.wires[sender.name] = self._wire(sender, receiver)
        for sender, receiver in self._ways:
            sender.core.backup_up(receiver.name, self.wires[sender.name].outbox, sender.clock())

    def _wire(self, sender: Router, receiver: Router) -> Wire:
        def keep(body: bytes) -> None:
            receiver.core.keep(sender.name, wire.received, body, receiver.clock_shift_ns)

        wire = Wire(Outbox(), keep, clock=sender.clock)
        return wire

    def lose(self) -> None:
        """Each side that lives takes the other for dead and dispatches what it holds for it."""
        if not self.is_up:
            return
        self.is_up = False
        for wire in self.wires.values():
            wire.cut()
        for router, other in self._ways:
            if router.is_alive:
                router.core.backup_down(other.name)
                router.core.recover(other.name, router.clock())

    def prune(self, name: str) -> None:
        """A router tells its backup what it need not keep; this cannot overtake frames on the wire."""
        sender, receiver = self._ways[0] if self._ways[0][0].name == name else self._ways[1]
        prunes = sender.core.take_prunes() if sender.is_alive else {}
        if not self.is_up:
            return
        self.wires[name].arrive()
        for backup, ranges in prunes.items():
            assert backup == receiver.name
            receiver.core.prune(name, ranges)


def _payload(publisher: int, sequence: int) -> bytes:
    return b"%d/%d" % (publisher, sequence)


class FailoverMachine(RuleBasedStateMachine):
    """Publishers in LAN a; subscribers in LAN b, at the ingress itself and at its neighbour in LAN a."""

    @initialize(mode=st.sampled_from(Mode))
    def build(self, mode: Mode) -> None:
        self.now_ns = 10**12
        self.ingress = Edge("ingress", "a", self._clock)
        self.neighbour = Edge("neighbour", "a", self._clock)
        self.egress = Edge("egress", "b", self._clock)
        edges = [self.egress, self.neighbour]
        self.routers = {name: Router(name, mode, edges, self._clock) for name in ROUTERS}
        self.partners = Partners(*self.routers.values())
        self.topic: Topic = self.ingress.core.topics[TOPIC]
        self.client: Peer = self.ingress.core.client("client:p", Outbox())
        for publisher in PUBLISHERS:
            self.ingress.core.add_endpoint(self.client, EndpointKind.PUBLISHER, publisher, self.topic)
        lan_outbox = Outbox()
        self.ingress.core.set_lan_edges({"neighbour": lan_outbox})
        self.lan_wire = Wire(lan_outbox, self.neighbour.receive_from_broker, clock=self._clock)
        self.published: dict[int, int] = dict.fromkeys(PUBLISHERS, 0)
        self.expected: dict[int, list[int]] = {publisher: [] for publisher in PUBLISHERS}
        self.is_wanted = True
        self._assign("r1", "r2")

    def _clock(self) -> int:
        """Time rises whenever somebody looks."""
        self.now_ns += 10_000
        return self.now_ns

    def _assign(self, primary: str | None, backup: str | None) -> None:
        """The edges hear of it at once, a routing broker when it reads the routes."""
        self.primary, self.backup = primary, backup
        subscribers = [("a", "ingress"), ("a", "neighbour")]
        if self.is_wanted:
            subscribers.append(("b", "egress"))
        for edge in (self.ingress, self.neighbour, self.egress):
            edge.core.set_interest(
                edge.core.topics[TOPIC],
                primary=primary,
                backup=backup,
                subscribers=subscribers,
                publishers=frozenset(PUBLISHERS),
                now_ns=self._clock(),
            )

    # What the publisher does

    @rule(publisher=st.sampled_from(PUBLISHERS), count=st.integers(1, 3))
    def publish(self, publisher: int, count: int) -> None:
        on_their_way = len(self.expected[publisher]) - len(self.egress.got[publisher])
        if self.is_wanted:
            count = min(count, RETENTION - on_their_way)
        first = self.published[publisher] + 1
        sequences = range(first, first + count)
        self.published[publisher] += count
        if self.is_wanted:
            self.expected[publisher] += sequences
        messages = [
            Message(TOPIC, publisher, each, self._clock(), _payload(publisher, each)) for each in sequences
        ]
        shift_ns = self.ingress.clock_shift_ns
        self.ingress.core.admit_from_client(self.client, body_of(messages), shift_ns, self._clock())

    @rule(name=st.sampled_from(["ingress", "neighbour", "egress", *ROUTERS]), clock_shift_ns=_shifts)
    def somebody_learns_of_clocks(self, name: str, clock_shift_ns: int) -> None:
        edges = {edge.name: edge for edge in (self.ingress, self.neighbour, self.egress)}
        (edges | self.routers)[name].clock_shift_ns = clock_shift_ns

    # What the data does, a little at a time

    @rule(name=_routers, frames=_frames, budget_bytes=_budgets)
    def frames_reach_a_router(self, name: str, frames: int, budget_bytes: int) -> None:
        wire = self.routers[name].uplink
        wire.send(budget_bytes)
        wire.arrive(frames)

    @rule(name=_routers)
    def a_router_acknowledges(self, name: str) -> None:
        self.routers[name].uplink.acknowledge()

    @rule(name=_routers, frames=_frames, budget_bytes=_budgets)
    def frames_reach_the_egress(self, name: str, frames: int, budget_bytes: int) -> None:
        wire = self.routers[name].downlinks["egress"]
        wire.send(budget_bytes)
        wire.arrive(frames)

    @rule(name=_routers)
    def the_egress_acknowledges(self, name: str) -> None:
        self.routers[name].downlinks["egress"].acknowledge()

    @rule(name=_routers, frames=_frames, budget_bytes=_budgets)
    def copies_reach_the_other_router(self, name: str, frames: int, budget_bytes: int) -> None:
        if self.partners.is_up:
            self.partners.wires[name].send(budget_bytes)
            self.partners.wires[name].arrive(frames)

    @rule(name=_routers)
    def the_other_router_acknowledges(self, name: str) -> None:
        if self.partners.is_up:
            self.partners.wires[name].acknowledge()

    @rule(name=_routers)
    def a_router_prunes(self, name: str) -> None:
        self.partners.prune(name)

    @rule()
    def topics_turn(self) -> None:
        """Until then the ingress turns to another routing broker only with the next message."""
        self.ingress.core.turn_some(self._clock())

    @rule()
    def everything_flows(self) -> None:
        self.topics_turn()
        for router in self.routers.values():
            router.uplink.run()
            if self.partners.is_up:
                self.partners.wires[router.name].run()
            router.downlinks["egress"].run()
            self.recovered_messages_reach_the_neighbour(router.name)
            self.partners.prune(router.name)
        self.lan_wire.run()

    @rule(passed_ms=st.sampled_from([1, 30, 300, 2000]))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ns += passed_ms * MS
        for edge in (self.ingress, self.neighbour, self.egress):
            edge.core.release_held(self._clock())
        for router in self.routers.values():
            router.downlinks["egress"].acknowledge()

    @precondition(lambda self: self.lan_wire.is_up)
    @rule(name=_routers)
    def recovered_messages_reach_the_neighbour(self, name: str) -> None:
        """Recovery does not know where messages came from, but the LAN is nearer than the WAN."""
        if self.lan_wire.is_up:
            self.lan_wire.run()
            self.routers[name].downlinks["neighbour"].run()

    # What breaks

    @rule(name=_routers)
    def the_link_to_a_router_breaks(self, name: str) -> None:
        self.routers[name].uplink.cut()
        self.ingress.core.router_down(name, self._clock())

    @rule(name=_routers)
    def the_ingress_connects_to_a_router(self, name: str) -> None:
        router = self.routers[name]
        if router.is_alive and not router.uplink.is_up:
            router.connect_ingress()
            self.ingress.core.router_up(name, router.link, self._clock())

    @rule(name=_routers)
    def the_egress_loses_a_router(self, name: str) -> None:
        self.routers[name].lose_edge(self.egress)

    @rule(name=_routers)
    def the_egress_connects_to_a_router(self, name: str) -> None:
        self.routers[name].connect_edge(self.egress)

    @rule()
    def the_routers_lose_each_other(self) -> None:
        self.partners.lose()

    @rule()
    def the_routers_connect(self) -> None:
        self.partners.connect()

    @rule(name=_routers)
    def a_router_crashes(self, name: str) -> None:
        self.routers[name].crash()
        self.partners.lose()
        self.ingress.core.router_down(name, self._clock())

    @rule(name=_routers)
    def a_router_starts(self, name: str) -> None:
        if not self.routers[name].is_alive:
            self.routers[name].start()

    @rule(name=_routers, sees_egress=st.booleans())
    def a_router_reads_the_routes(self, name: str, sees_egress: bool) -> None:
        if self.routers[name].is_alive:
            partners = (self.backup, None) if name == self.primary else (None, self.primary)
            self.routers[name].read_routes(*partners, sees_egress)

    @rule()
    def the_neighbour_is_cut_off(self) -> None:
        self.lan_wire.cut()

    @rule()
    def the_neighbour_is_back(self) -> None:
        if not self.lan_wire.is_up:
            self.lan_wire.reconnect()

    # What the coordinator says

    @rule(primary=st.none() | _routers, backup=st.none() | _routers)
    def the_topic_is_assigned(self, primary: str | None, backup: str | None) -> None:
        self._assign(primary, backup if backup != primary else None)

    @precondition(lambda self: self.expected == self.egress.got)
    @rule(wanted=st.booleans())
    def interest_comes_or_goes(self, wanted: bool) -> None:
        self.is_wanted = wanted
        self._assign("r1", "r2")

    # What must hold

    @invariant()
    def cores_are_sound(self) -> None:
        for edge in (self.ingress, self.neighbour, self.egress):
            edge.core.release_held(self._clock())
            edge.wire.run()
            edge.core.validate()
        for router in self.routers.values():
            router.core.validate()
            router.link.validate()

    @invariant()
    def the_egress_has_everything_once_and_in_order_so_far(self) -> None:
        for publisher in PUBLISHERS:
            got = self.egress.got[publisher]
            assert got == self.expected[publisher][: len(got)]

    @invariant()
    def local_subscribers_have_everything_at_once(self) -> None:
        for publisher in PUBLISHERS:
            everything = list(range(1, self.published[publisher] + 1))
            assert self.ingress.got[publisher] == everything
            neighbour = self.neighbour.got[publisher]
            assert neighbour == everything[: len(neighbour)]

    def teardown(self) -> None:
        """Everything heals: now nothing may be missing, and nothing kept."""
        if not hasattr(self, "routers"):
            return
        self.the_neighbour_is_back()
        for name in ROUTERS:
            self.a_router_starts(name)
        self._assign("r1", "r2")
        self.the_routers_connect()
        for name in ROUTERS:
            self.the_ingress_connects_to_a_router(name)
            self.the_egress_connects_to_a_router(name)
            self.a_router_reads_the_routes(name, sees_egress=True)
        self.everything_flows()
        self.everything_flows()
        self.cores_are_sound()
        assert self.egress.got == self.expected
        assert self.neighbour.got == self.ingress.got
        assert not any(self.ingress.core.statistics().dropped.values())
        for router in self.routers.values():
            assert router.link.is_idle
            statistics = router.core.statistics()
            assert statistics.copies_undispatched == 0
            assert statistics.copies_kept == 0 or not router.mode.coordinates


TestFailoverMachine = FailoverMachine.TestCase
