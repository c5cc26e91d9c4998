"""A process of the coordination benchmark: some of the brokers, driven over standard input.

Commands come in and answers go out as JSON, one per line, in turn. The end of standard input ends
the worker, however the parent died; a worker that hangs ends itself and prints where it hung.
"""

import asyncio
import contextlib
import faulthandler
import json
import logging
import resource
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from benchmarks import machine
from benchmarks.workload import Declaration, Workload
from edge_broker import EdgeBroker
from edge_broker.model import Topic
from overlay.messages import ControlMessage, Declare, Declared, Refused, Role
from routing_broker import RoutingBroker
from runtime.config import EdgeConfig, RouterConfig
from runtime.link import Link

HEARTBEAT_MS: Final = 10_000.0
SILENCE_MS: Final = 60_000.0
"""4,800 links at the usual 10 ms would send a million heartbeats a second, all on this machine."""
SESSION_TIMEOUT_S: Final = 30.0
WATCHDOG_S: Final = 300.0
"""A command that takes longer hangs."""
CLOSE_WATCHDOG_S: Final = 30.0
LINE_MAX_BYTES: Final = 16 * 1024 * 1024
EXAMPLES: Final = 5
"""How many of the wrong routes are named."""


class LocalClient(Link):
    """A client inside the edge broker's process: it declares like any other, without a socket."""

    def __init__(self, name: str, answered: Callable[[ControlMessage], None]) -> None:
        super().__init__(name, Role.CLIENT)
        self._answered = answered

    @property
    def is_up(self) -> bool:
        """It cannot be cut off."""
        return True

    def send(self, message: ControlMessage) -> bool:
        """The broker answers."""
        self._answered(message)
        return True


class Worker:
    """Some of the brokers of a run."""

    def __init__(self, workload: Workload, routers: Iterable[str], edges: Iterable[str]) -> None:
        self._workload = workload
        self._router_names = tuple(routers)
        self._edge_names = tuple(edges)
        self.routers: dict[str, RoutingBroker] = {}
        self.edges: dict[str, EdgeBroker] = {}
        self._endpoints: dict[str, Counter[str]] = {name: Counter() for name in self._edge_names}
        """Endpoints declared here, by edge and topic."""
        self._assignments: dict[str, tuple[str | None, str | None]] = {}
        self._routes: Mapping[str, frozenset[str]] = {}
        self._routes_of: int | None = None
        """The number of subscribers that `_routes` is for."""

    async def start_routers(self, hosts: str, chroot: str) -> None:
        """Start the routing brokers; returns when all are registered."""
        for name in self._router_names:
            config = RouterConfig(
                id=name,
                zookeeper=hosts,
                chroot=chroot,
                session_timeout_s=SESSION_TIMEOUT_S,
                heartbeat_ms=HEARTBEAT_MS,
                silence_ms=SILENCE_MS,
                host_label=self._workload.host_of(name),
            )
            config.check()
            self.routers[name] = RoutingBroker(config)
        await asyncio.gather(*(router.start() for router in self.routers.values()))

    async def start_edges(self, hosts: str, chroot: str) -> None:
        """Start the edge brokers; returns when all are registered."""
        for name in self._edge_names:
            config = EdgeConfig(
                id=name,
                zookeeper=hosts,
                chroot=chroot,
                session_timeout_s=SESSION_TIMEOUT_S,
                heartbeat_ms=HEARTBEAT_MS,
                silence_ms=SILENCE_MS,
                lan=self._workload.lan_of(name),
                discovery=False,
            )
            config.check()
            self.edges[name] = EdgeBroker(config)
        await asyncio.gather(*(edge.start() for edge in self.edges.values()))

    async def declare(self, declarations: Iterable[Declaration]) -> dict[str, Any]:
        """Declare those endpoints that are ours, all at once; returns when the edges have answered."""
        waiting: set[int] = set()
        done = asyncio.Event()
        refused: list[str] = []

        def answered(message: ControlMessage) -> None:
            if isinstance(message, Refused):
                refused.append(message.reason)
            if isinstance(message, Declared | Refused):
                waiting.discard(message.endpoint)
                if not waiting:
                    done.set()

        ours = [declaration for declaration in declarations if declaration.edge in self.edges]
        for declaration in ours:
            waiting.add(declaration.endpoint)
        for declaration in ours:
            broker = self.edges[declaration.edge]
            client = LocalClient(f"client-{declaration.endpoint}", answered)
            client.context = broker.core.client(client.key, client.outbox)
            broker.declarations.declare(
                client, Declare(declaration.endpoint, declaration.kind, declaration.topic)
            )
            self._endpoints[declaration.edge][declaration.topic] += 1
        if ours:
            await done.wait()
        return {"declared": len(ours) - len(refused), "refused": refused[:EXAMPLES]}

    def set_assignments(self, assignments: Mapping[str, list[str | None]]) -> None:
        """Learn which routing brokers ZooKeeper names for each topic."""
        self._assignments = {topic: (pair[0], pair[1]) for topic, pair in assignments.items()}

    def check(self, subscribers: int) -> dict[str, Any]:
        """Compare every route here with what it must be once `subscribers` have joined."""
        if self._routes_of != subscribers:
            self._routes_of, self._routes = subscribers, self._workload.routes(subscribers)
        wrong = [*self._check_routers(), *self._check_edges()]
        return {"wrong": len(wrong), "examples": wrong[:EXAMPLES]}

    def _check_routers(self) -> Iterable[str]:
        for name, router in self.routers.items():
            served = {topic.name: topic.subscribers.keys() for topic in router.core.topics.values()}
            for topic, pair in self._assignments.items():
                if name not in pair:
                    continue
                expected = self._routes[topic]
                if topic not in served:
                    yield f"{name} does not serve {topic}"
                elif served[topic] != expected:
                    yield f"{name} routes {topic} to {len(served[topic])} edges, not {len(expected)}"

    def _check_edges(self) -> Iterable[str]:
        for name, edge in self.edges.items():
            known = {topic.name: topic for topic in edge.core.topics.values()}
            up = edge.core.routers_up
            for topic, endpoints in self._endpoints[name].items():
                if topic not in known:
                    yield f"{name} does not know {topic}"
                    continue
                yield from self._check_edge(name, known[topic], endpoints, up)

    def _check_edge(self, name: str, topic: Topic, endpoints: int, up: Collection[str]) -> Iterable[str]:
        pair = self._assignments[topic.name]
        if (topic.primary, topic.backup) != pair:
            yield f"{name} takes {topic.primary} and {topic.backup} for the routers of {topic.name}"
        yield from (f"{name} has no link to {router}, of {topic.name}" for router in pair if router not in up)
        here = topic.subscribers.total() + len(topic.publishers)
        if here != endpoints:
            yield f"{name} has {here} endpoints of {topic.name}, not {endpoints}"

    def statistics(self) -> dict[str, Any]:
        """What the brokers here have done so far."""
        brokers: list[RoutingBroker | EdgeBroker] = [*self.routers.values(), *self.edges.values()]
        totals: Counter[str] = Counter()
        for broker in brokers:
            coordination = broker.coordinator.statistics()
            totals["requests"] += coordination.session.requests
            totals["hints"] += coordination.session.hints
            totals["reconnects"] += coordination.session.reconnects
            totals["mirrors"] += coordination.mirrors
            totals["mirror_reads"] += coordination.mirror_reads
            totals["mirror_changes"] += coordination.mirror_changes
            totals["assignments_changed"] += coordination.assignments_changed
        totals["links_up"] = sum(len(edge.core.routers_up) for edge in self.edges.values())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **totals,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "memory_mib": usage.ru_maxrss / 1024,
        }

    async def stop(self) -> None:
        """End all brokers; edges first, so that nobody dials a router that is gone."""
        await asyncio.gather(*(edge.close() for edge in self.edges.values()))
        await asyncio.gather(*(router.close() for router in self.routers.values()))


class _Commands:
    """Reads commands, one after the other, and answers each."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._workload = Workload()

    async def run(self, commands: asyncio.StreamReader) -> None:
        """Serve until standard input ends."""
        try:
            while line := await commands.readline():
                faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
                answer = await self._obey(json.loads(line))
                print(json.dumps(answer), flush=True)
                faulthandler.cancel_dump_traceback_later()
        finally:
            faulthandler.dump_traceback_later(CLOSE_WATCHDOG_S, exit=True)
            if self._worker is not None:
                await self._worker.stop()

    async def _obey(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "prepare":
            machine.confine(command["cores"])
            self._workload = Workload.from_record(command["workload"])
            self._worker = Worker(self._workload, command["routers"], command["edges"])
            return {}
        worker = self._worker
        assert worker is not None
        match command["do"]:
            case "start_routers":
                await worker.start_routers(command["hosts"], command["chroot"])
            case "start_edges":
                await worker.start_edges(command["hosts"], command["chroot"])
            case "publish":
                return await worker.declare(self._workload.publishers())
            case "join":
                return await worker.declare(self._workload.subscribers(command["first"], command["end"]))
            case "assign":
                worker.set_assignments(command["assignments"])
            case "check":
                return worker.check(command["subscribers"])
            case "statistics":
                return worker.statistics()
            case unknown:
                raise ValueError(f"command is {unknown!r}: the parent is of another version")
        return {}


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=LINE_MAX_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    await _Commands().run(commands)


def main() -> None:
    """Run a worker."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    machine.raise_file_limit()
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_serve())


if __name__ == "__main__":
    main()
