"""Simulated processes: the real brokers and clients, each on its own machine, loop and clock."""

import asyncio
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from clients import Client, EdgeNotFoundError, Publisher, RefusedError, Subscription
from coordinator import CoordinationError, MakeClient
from edge_broker import EdgeBroker
from overlay.limits import SECOND_NS
from overlay.qos import TopicQos
from routing_broker import RoutingBroker
from runtime.config import EdgeConfig, RouterConfig
from runtime.host import Host
from simulation.network import Network
from simulation.schedule import Life, Step, World
from simulation.world import SimulatedLoop
from simulation.zookeeper_client import ModelClient

_BORN: Final = struct.Struct("<q")
_RESTART_S: Final = 1.0
"""How long a process that could not start is left alone."""
EDGE_PORT: Final = 7400


@dataclass(frozen=True, slots=True)
class MachineClock:
    """How a machine's monotonic clock differs from true time."""

    offset_ns: int
    drift_ppm: int

    def true_ns(self, local_ns: int) -> int:
        """True time of a reading, rounded down."""
        return (local_ns - self.offset_ns) * 1_000_000 // (1_000_000 + self.drift_ppm)


class Process(ABC):
    """A process that can be started, frozen, killed and started again without its memory."""

    def __init__(self, world: World, network: Network, name: str, clock: MachineClock, seed: str) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.machine = network.machine(name)
        self.starts = 0
        self.killed_at_ns: list[int] = []
        self._seed = seed
        self.loop: SimulatedLoop | None = None

    @abstractmethod
    def main(self, host: Host) -> Coroutine[Any, Any, None]:
        """What the process does."""

    @property
    def is_running(self) -> bool:
        """It has been started and neither killed nor frozen."""
        return self.loop is not None and self.loop.life is Life.RUNNING

    @property
    def is_alive(self) -> bool:
        """It has been started and not killed."""
        return self.loop is not None and self.loop.life is not Life.DEAD

    def start(self) -> None:
        """Start it."""
        assert not self.is_alive
        self.starts += 1
        loop = SimulatedLoop(self.world, self.name, self.machine, self.clock.offset_ns, self.clock.drift_ppm)
        self.loop = loop
        host = Host(loop.clock_ns, random.Random(f"{self._seed}/{self.name}/{self.starts}"))
        self.world.soon(Step(loop.actor, self._begin, (loop, host), None))

    def kill(self, randomness: random.Random | None = None) -> None:
        """SIGKILL; without randomness, everything that was written still arrives."""
        self._end()
        self.machine.kill_connections(randomness)

    def lose_power(self) -> None:
        """The machine stops, and tells nobody."""
        self._end()
        self.machine.lose_connections()

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.loop is not None:
            self.loop.actor.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        if self.loop is not None:
            self.loop.actor.thaw()

    def _end(self) -> None:
        assert self.loop is not None
        self.killed_at_ns.append(self.world.now_ns)
        self.world.graveyard.append((self.loop, dict(vars(self))))
        self.loop.actor.kill()
        self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Let go of what the dead process held."""

    def _begin(self, loop: SimulatedLoop, host: Host) -> None:
        task = loop.create_task(self.main(host), name=f"main of {self.name}")
        self.world.graveyard.append(task)
        task.add_done_callback(lambda done: self._ended(loop, done))

    def _ended(self, loop: SimulatedLoop, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            loop.actor.fail("the process ended", error)


Broker = TypeVar("Broker", RoutingBroker, EdgeBroker)


class BrokerProcess(Process, Generic[Broker]):
    """A broker, started again until ZooKeeper can be reached."""

    def __init__(self, *common: Any, settings: dict[str, Any]) -> None:
        super().__init__(*common)
        self.broker: Broker | None = None
        self._settings = {
            "id": self.name,
            "http": f"{self.name}:8000",
            "insecure": True,
            **settings,
        }

    @abstractmethod
    def make(self, host: Host, make_client: MakeClient) -> Broker:
        """A new broker that has not been started."""

    async def main(self, host: Host) -> None:
        """Start the broker, again if ZooKeeper cannot be reached."""
        while True:
            broker = self.make(host, partial(ModelClient, randomness=host.randomness))
            try:
                await broker.start()
            except CoordinationError:
                await broker.close()
                await asyncio.sleep(_RESTART_S)
                continue
            self.broker = broker
            return

    def forget(self) -> None:
        self.broker = None


class RouterProcess(BrokerProcess[RoutingBroker]):
    """A routing broker."""

    def make(self, host: Host, make_client: MakeClient) -> RoutingBroker:
        config = RouterConfig(listen=f"{self.name}:7000", host_label=self.name, **self._settings)
        return RoutingBroker(config, host, make_client)


class EdgeProcess(BrokerProcess[EdgeBroker]):
    """An edge broker."""

    def __init__(self, *common: Any, lan: str, settings: dict[str, Any]) -> None:
        super().__init__(*common, settings=settings)
        self.lan = lan

    def make(self, host: Host, make_client: MakeClient) -> EdgeBroker:
        config = EdgeConfig(
            lan=self.lan, listen=f"{self.name}:{EDGE_PORT}", discovery=False, **self._settings
        )
        return EdgeBroker(config, host, make_client)


@dataclass(slots=True)
class Published:
    """What one publisher has published; sequences count from 1."""

    topic: str
    client: str
    start: int
    """Of the client: which of its lives this was."""
    born_ns: list[int] = field(default_factory=list)
    """True time of each message."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message at one subscriber, in true time."""

    publisher: int
    sequence: int
    at_ns: int
    born_ns: int
    age_bound_ms: float | None


@dataclass(slots=True)
class Subscribed:
    """What one subscription has received, in order."""

    topic: str
    client: str
    start: int
    """Of the client: which of its lives this was."""
    since_ns: int
    messages: list[Received] = field(default_factory=list)


@dataclass(slots=True)
class History:
    """Everything the applications have done."""

    published: dict[int, Published] = field(default_factory=dict)
    subscribed: list[Subscribed] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    forgeries: list[str] = field(default_factory=list)
    """Messages that nobody has published."""


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """A topic of the run, and who uses it."""

    name: str
    qos: TopicQos
    interval_s: float
    publisher: str
    subscribers: tuple[str, ...]


class ClientProcess(Process):
    """An application: publishes on some topics, subscribes to others."""

    client: Client | None = None

    def __init__(
        self, *common: Any, edges: Sequence[str], topics: Sequence[TopicPlan], history: History
    ) -> None:
        super().__init__(*common)
        self._edges = [f"{edge}:{EDGE_PORT}" for edge in edges]
        self._topics = topics
        self._history = history
        self.publishing = True
        """Cleared by the run when it wants silence."""
        self._publishers: list[Publisher] = []
        self.ready = False

    async def main(self, host: Host) -> None:
        """Connect, declare, publish and receive for ever."""
        while True:
            client = Client(self._edges, host=host)
            try:
                await client.start()
            except EdgeNotFoundError:
                continue
            break
        self.client = client
        work: list[Coroutine[Any, Any, None]] = []
        for plan in self._topics:
            if self.name in plan.subscribers:
                work.append(self._receive(plan, await self._insist(client.subscribe, plan)))
            if plan.publisher == self.name:
                work.append(self._publish(plan, await self._insist(client.publisher, plan), host))
        self.ready = True
        await asyncio.gather(*work)

    def forget(self) -> None:
        self.client = None
        self.ready = False
        self._publishers = []

    async def _insist(self, declare: Any, plan: TopicPlan) -> Any:
        while True:
            try:
                return await declare(plan.name, plan.qos)
            except RefusedError as error:
                if error.code != "coordination":
                    self._history.refusals.append(f"{plan.name}: {error}")
                await asyncio.sleep(_RESTART_S)

    async def _publish(self, plan: TopicPlan, publisher: Publisher, host: Host) -> None:
        record = Published(plan.name, self.name, self.starts)
        self._history.published[publisher.endpoint_id] = record
        loop = self.loop
        assert loop is not None
        await publisher.wait_for_subscribers(len(plan.subscribers))
        next_s = loop.time()
        while True:
            if self.publishing:
                now_ns = self.world.now_ns
                sequence = await publisher.publish(_BORN.pack(now_ns))
                record.born_ns.append(now_ns)
                assert sequence == len(record.born_ns)
            # Never two messages closer than the interval, also after having been frozen.
            next_s = max(next_s, loop.time()) + plan.interval_s * (1 + 0.1 * host.randomness.random())
            await asyncio.sleep(next_s - loop.time())

    async def _receive(self, plan: TopicPlan, subscription: Subscription) -> None:
        record = Subscribed(plan.name, self.name, self.starts, self.world.now_ns)
        self._history.subscribed.append(record)
        async for message in subscription:
            if len(message.payload) != _BORN.size:
                self._history.forgeries.append(f"{plan.name}: {message.payload[:64]!r} to {self.name}")
                continue
            (born_ns,) = _BORN.unpack(message.payload)
            record.messages.append(
                Received(
                    message.publisher,
                    message.sequence,
                    self.clock.true_ns(message.received_ns),
                    born_ns,
                    message.age_bound_ms,
                )
            )


def seconds(time_ns: int) -> str:
    """A time for messages."""
    return f"{time_ns / SECOND_NS:.3f} s"
