"""One overlay of a run: ZooKeeper, brokers, clients, and whether all is as it should be."""

import asyncio
import gc
import logging
import random
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Final

from coordinator import TopicRecord
from overlay.bounds import Delays, smallest_retention
from overlay.limits import MILLISECOND_NS, SECOND_NS
from overlay.messages import Role
from overlay.paths import Policy
from overlay.qos import TopicQos
from simulation.network import Network
from simulation.nodes import (
    ClientProcess,
    EdgeProcess,
    History,
    MachineClock,
    Process,
    RouterProcess,
    TopicPlan,
)
from simulation.schedule import Step, World
from simulation.transports import Listener
from simulation.world import SimulatedLoop
from simulation.zookeeper import Ensemble, Member

CHROOT: Final = "/isthmus"
ZOOKEEPER_PORT: Final = 2181
MEMBERS: Final = ("zk-1", "zk-2", "zk-3")
HEARTBEAT_MS: Final = 250.0
SILENCE_MS: Final = 1_000.0
FAILOVER_MS: Final = 2_500.0
BACKUP_DELAY_MS: Final = 60.0
PLANNED_FAILOVER_MS: Final = FAILOVER_MS + BACKUP_DELAY_MS + 500.0
"""Topics are planned for a longer failover: what is measured counts when they are declared."""
_DIRECT_SHARE: Final = 0.3
"""Of the runs: in those, topics also take the direct way between edges."""
_CLOCK_OFFSET_MAX_S: Final = 100_000
_DRIFT_MAX_PPM: Final = 100


class Errors(logging.Handler):
    """Errors that brokers log because nobody else could be told: bugs."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self._world.failures.append(f"{record.name}: {record.getMessage()}: {cause!r}")


@dataclass(frozen=True, slots=True)
class Shape:
    """How large an overlay is."""

    routers: int
    edges_per_lan: tuple[int, ...]
    topics: int
    session_timeout_s: float


def draw_shape(randomness: random.Random) -> Shape:
    """Two LANs, two or three routing brokers, a few topics."""
    return Shape(
        routers=randomness.choice((2, 3, 3)),
        edges_per_lan=randomness.choice(((1, 1), (1, 1), (1, 2))),
        topics=randomness.choice((2, 2, 3)),
        session_timeout_s=randomness.choice((2.0, 3.0, 4.0)),
    )


class SimulatedOverlay:
    """All processes of a run."""

    def __init__(self, seed: int) -> None:
        self.world = World()
        self.randomness = random.Random(f"isthmus/{seed}")
        self.network = Network(self.world, f"{seed}")
        self.network.delays_of = self._draw_delays
        self.shape = draw_shape(self.randomness)
        self.history = History()
        self._seed = seed
        self._path_randomness = random.Random(f"paths/{seed}")
        self._one_way: dict[frozenset[str], tuple[int, int]] = {}
        self.ensemble = Ensemble(SimulatedLoop(self.world, "zookeeper"), random.Random(f"zookeeper/{seed}"))
        self.members = {name: self._make_member(name) for name in MEMBERS}
        self.listeners: dict[str, Listener] = {}
        self._records: dict[str, tuple[bytes, TopicRecord]] = {}
        self.routers = [self._make_router(number) for number in range(1, self.shape.routers + 1)]
        self.edges = [
            self._make_edge(lan, number)
            for lan, count in zip(("plant", "office"), self.shape.edges_per_lan, strict=True)
            for number in range(1, count + 1)
        ]
        clients = ("client-plant", "client-office")
        self._policies = random.Random(f"direct/{seed}")
        self.has_direct_paths = self._policies.random() < _DIRECT_SHARE
        self.topics = [self._draw_topic(number, clients) for number in range(1, self.shape.topics + 1)]
        self.clients = [self._make_client(name) for name in clients]

    @property
    def processes(self) -> list[Process]:
        """Everything that can be killed."""
        return [*self.routers, *self.edges, *self.clients]

    @property
    def brokers(self) -> list[RouterProcess | EdgeProcess]:
        """The routing and the edge brokers."""
        return [*self.routers, *self.edges]

    def start(self) -> None:
        """Start everything at once."""
        for name in MEMBERS:
            self.open_member(name)
        for process in self.processes:
            process.start()

    def open_member(self, name: str) -> None:
        """Let a member of the ensemble accept clients."""
        member, loop = self.members[name]
        member.cut_off = False
        member.catch_up()
        self.world.soon(Step(loop.actor, self._listen, (name, loop, member), None))

    def _listen(self, name: str, loop: SimulatedLoop, member: Member) -> None:
        async def listen() -> None:
            server = await member.listen(name, ZOOKEEPER_PORT)
            assert isinstance(server, Listener)
            self.listeners[name] = server

        loop.create_task(listen())

    def close_member(self, name: str) -> None:
        """A member of the ensemble is gone, with all connections."""
        member, _ = self.members[name]
        self.listeners[name].close()
        member.stop_serving()
        member.cut_off = True

    # Making

    def _draw_delays(self, source: str, target: str) -> tuple[int, int]:
        """Delay and jitter of a path; about the same in both directions."""
        pair = frozenset((source, target))
        if pair not in self._one_way:
            own = random.Random(f"{self._seed}/{'/'.join(sorted(pair))}")
            near = any(name.startswith("client") for name in pair)
            most_ms = 1.0 if near else 20.0
            delay_ns = int(own.uniform(0.05, most_ms) * MILLISECOND_NS)
            self._one_way[pair] = delay_ns, int(delay_ns * own.uniform(0.1, 1.0))
        return self._one_way[pair]

    def _clock(self, name: str) -> MachineClock:
        own = random.Random(f"{self._seed}/clock/{name}")
        offset_ns = own.randrange(1, _CLOCK_OFFSET_MAX_S) * SECOND_NS + own.randrange(SECOND_NS)
        return MachineClock(offset_ns, own.choice((-_DRIFT_MAX_PPM, _DRIFT_MAX_PPM, own.randint(-100, 100))))

    def _make_member(self, name: str) -> tuple[Member, SimulatedLoop]:
        loop = SimulatedLoop(self.world, name, self.network.machine(name))
        return Member(self.ensemble, loop, name), loop

    def _common(self, name: str) -> tuple[Any, ...]:
        return self.world, self.network, name, self._clock(name), f"{self._seed}"

    def _settings(self) -> dict[str, Any]:
        return {
            "zookeeper": ",".join(f"{name}:{ZOOKEEPER_PORT}" for name in MEMBERS),
            "chroot": CHROOT,
            "session_timeout_s": self.shape.session_timeout_s,
            "heartbeat_ms": HEARTBEAT_MS,
            "silence_ms": SILENCE_MS,
            "failover_ms": FAILOVER_MS,
            "backup_delay_ms": BACKUP_DELAY_MS,
        }

    def _make_router(self, number: int) -> RouterProcess:
        return RouterProcess(*self._common(f"router-{number}"), settings=self._settings())

    def _make_edge(self, lan: str, number: int) -> EdgeProcess:
        return EdgeProcess(*self._common(f"edge-{lan}-{number}"), lan=lan, settings=self._settings())

    def _make_client(self, name: str) -> ClientProcess:
        lan = name.partition("-")[2]
        edges = [edge.name for edge in self.edges if edge.lan == lan]
        return ClientProcess(*self._common(name), edges=edges, topics=self.topics, history=self.history)

    def _draw_topic(self, number: int, clients: tuple[str, ...]) -> TopicPlan:
        randomness = self.randomness
        period_ms = float(randomness.choice((300, 400, 600)))
        loss_tolerance = randomness.choice((0, 0, 1, 3))
        qos = TopicQos(
            period_ms=period_ms,
            deadline_ms=float(randomness.choice((400, 4_000, 8_000))),
            loss_tolerance=loss_tolerance,
        )
        delays = Delays(0, 0, 0, int(PLANNED_FAILOVER_MS * MILLISECOND_NS))
        retention = max(smallest_retention(qos, delays), 1)
        policy = self._policies.choice((Policy.BOTH, Policy.ADAPTIVE)) if self.has_direct_paths else None
        qos = TopicQos(period_ms, qos.deadline_ms, loss_tolerance, retention, paths=policy)
        publisher, other = randomness.sample(clients, 2)
        subscribers = (other,) if randomness.random() < 0.7 else clients
        return TopicPlan(f"topic-{number}", qos, 1.02 * period_ms / 1000, publisher, subscribers)

    # Looking

    def record_of(self, topic: str) -> TopicRecord | None:
        """Who serves a topic, as ZooKeeper has it."""
        node = self.ensemble.tree.nodes.get(f"{CHROOT}/topics/{topic}")
        if node is None:
            return None
        # Asked several times a second, and changed a few times in a run.
        known = self._records.get(topic)
        if known is None or known[0] != node.data:
            known = self._records[topic] = (node.data, TopicRecord.from_json(node.data))
        return known[1]

    def is_replicated(self, plan: TopicPlan) -> bool:
        """Copies of all messages of a topic go to its backup."""
        record = self.record_of(plan.name)
        for router in self.routers:
            if record is not None and router.broker is not None and router.name == record.primary:
                topic = router.broker.core.topics.get(record.id)
                return topic is not None and topic.replicates
        return False

    def what_is_wrong(self) -> str:
        """Why messages cannot flow and survive a fault right now; empty if they can."""
        for process in self.processes:
            if not process.is_running:
                return f"{process.name} does not run"
        for client in self.clients:
            if not client.ready or client.client is None or not client.client.is_connected:
                return f"{client.name} is not connected"
        for broker in self.brokers:
            if broker.broker is None or not broker.broker.session.lease_valid(broker.broker.hub.clock()):
                return f"{broker.name} has no session"
        leaders = [router.name for router in self.routers if router.broker and router.broker.is_leader]
        if len(leaders) != 1:
            return f"leaders: {leaders}"
        for edge in self.edges:
            if edge.broker is not None and edge.broker.core.has_held:
                return f"{edge.name} holds messages back"
        for topic in self.topics:
            if wrong := self._wrong_with(topic):
                return wrong
        return ""

    def _wrong_with(self, plan: TopicPlan) -> str:
        record = self.record_of(plan.name)
        if record is None or record.primary is None or record.backup is None:
            return f"{plan.name} has no primary or no backup"
        serving = [router for router in self.routers if router.name in (record.primary, record.backup)]
        if len(serving) != 2:
            return f"{plan.name} is served by {record.primary} and {record.backup}"
        by_client = {client.name: client.client.edge for client in self.clients if client.client is not None}
        ingress = by_client[plan.publisher]
        remote = {by_client[name] for name in plan.subscribers if name != plan.publisher}
        for edge in self.edges:
            assert edge.broker is not None
            if edge.name != ingress and edge.name not in remote:
                continue
            known = edge.broker.core.topics.get(record.id)
            if known is None or (known.primary, known.backup) != (record.primary, record.backup):
                return f"{edge.name} does not know who serves {plan.name}"
            if not {record.primary, record.backup} <= set(edge.broker.core.routers_up):
                return f"{edge.name} is not connected to {record.primary} and {record.backup}"
            if edge.name == ingress and remote and known.target is None:
                return f"{edge.name} does not send {plan.name}"
            mirrored = edge.broker.declarations._known.get(plan.name)
            if mirrored is not None and not mirrored.subscribers.is_settled:
                return f"{edge.name} has not heard whether subscribers of {plan.name} are back"
        for router in serving:
            assert router.broker is not None
            topic = router.broker.core.topics.get(record.id)
            if topic is None or not remote <= topic.subscribers.keys():
                return f"{router.name} does not know all subscribers of {plan.name}"
            subscribers = router.broker._subscribers.get(plan.name)
            if subscribers is not None and not subscribers.is_settled:
                return f"{router.name} has not heard whether subscribers of {plan.name} are back"
            if topic.primary != (None if router.name == record.primary else record.primary):
                return f"{router.name} does not know its part in {plan.name}"
            other = record.backup if router.name == record.primary else record.primary
            link = router.broker._links.get(f"{Role.ROUTER}:{other}")
            if link is None or not link.is_up:
                return f"{router.name} is not connected to {other}"
        return ""

    def is_served(self, process: ClientProcess) -> bool:
        """The edge that a client is connected to has its subscriptions, and the topics' primaries know."""
        client = process.client
        if client is None or not client.is_connected:
            return False
        edge = next(edge for edge in self.edges if edge.name == client.edge)
        for plan in self.topics:
            record = self.record_of(plan.name)
            if process.name not in plan.subscribers or plan.publisher == process.name or record is None:
                continue
            here = edge.broker.core.topics.get(record.id) if edge.broker is not None else None
            primary = next((router for router in self.routers if router.name == record.primary), None)
            if here is None or not here.subscribers or primary is None or primary.broker is None:
                return False
            there = primary.broker.core.topics.get(record.id)
            if there is None or edge.name not in there.subscribers:
                return False
        return True

    def validate(self) -> None:
        """Assert the invariants of every core."""
        for process in self.brokers:
            if process.is_alive and process.broker is not None:
                process.broker.core.validate()


def close(overlay: SimulatedOverlay) -> None:
    """Let go of everything without letting it run on."""
    for process in overlay.processes:
        if process.loop is not None:
            process.loop.actor.kill()
    overlay.ensemble.close()
    asyncio._set_running_loop(None)


def bury() -> None:
    """Free what processes left. Their coroutines end in the middle of something, which is no news."""
    report, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What ends may let go of more.
            while gc.collect():
                continue
    finally:
        sys.unraisablehook = report
