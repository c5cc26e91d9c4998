"""A whole overlay in this process: real brokers, real sockets, the session's real ZooKeeper."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from clients import Client
from edge_broker import EdgeBroker
from overlay.errors import CloseReason
from routing_broker import RoutingBroker
from runtime.config import EdgeConfig, RouterConfig

DEADLINE_S = 20.0


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = DEADLINE_S
) -> None:
    """Wait for a condition; fail with its description when it does not come true."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                result = condition()
                if await result if isinstance(result, Awaitable) else result:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


class RouterProcess:
    """A routing broker as a process."""

    def __init__(self, process: asyncio.subprocess.Process, http: str) -> None:
        self._process = process
        self._http = http

    async def status(self) -> dict[str, Any]:
        """What the broker says of itself."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{self._http}/status") as response:
            return await response.json()

    def freeze(self) -> None:
        """SIGSTOP: it does nothing any more, but its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: it goes on as if nothing had happened."""
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Overlay:
    """Brokers of one test. Heartbeats are slow so that a busy machine causes no false alarm."""

    def __init__(self, zookeeper_hosts: str, chroot: str, **settings: object) -> None:
        self._common = {
            "zookeeper": zookeeper_hosts,
            "chroot": chroot,
            "session_timeout_s": 2.0,
            "heartbeat_ms": 50.0,
            "silence_ms": 1000.0,
            "drain_timeout_s": 5.0,
            **settings,
        }
        self.routers: dict[str, RoutingBroker] = {}
        self.edges: dict[str, EdgeBroker] = {}
        self.clients: list[Client] = []
        self.processes: list[RouterProcess] = []

    async def router(self, name: str, host: str = "") -> RoutingBroker:
        """Start a routing broker."""
        broker = RoutingBroker(RouterConfig(id=name, host_label=host or f"host-{name}", **self._common))
        self.routers[name] = broker
        await broker.start()
        return broker

    async def edge(self, name: str, lan: str, **settings: object) -> EdgeBroker:
        """Start an edge broker."""
        broker = EdgeBroker(EdgeConfig(id=name, lan=lan, **{"discovery": False, **self._common, **settings}))
        self.edges[name] = broker
        await broker.start()
        return broker

    async def client(self, *edges: str, start_timeout_s: float = DEADLINE_S, **options: Any) -> Client:
        """Connect a client to edges by name."""
        client = Client([self.edges[edge].locator for edge in edges], **options)
        self.clients.append(client)
        await client.start(start_timeout_s)
        return client

    def leader(self) -> RoutingBroker | None:
        """The routing broker that leads now."""
        return next((router for router in self.routers.values() if router.is_leader), None)

    def topic_at(self, edge: str, topic: str):
        """The topic as the edge's core knows it, or None."""
        return next((item for item in self.edges[edge].core.topics.values() if item.name == topic), None)

    async def wait_for_route(self, topic: str, ingress: str, egress: str) -> None:
        """Wait until messages of the topic can flow from one edge to another."""

        def ready() -> bool:
            state = self.topic_at(ingress, topic)
            if state is None or state.target is None:
                return False
            router = self.routers.get(state.target.name.partition(":")[2])
            return router is not None and any(
                known.name == topic and egress in known.subscribers for known in router.core.topics.values()
            )

        await eventually(ready, f"route of {topic} from {ingress} to {egress}")

    async def router_process(self, name: str) -> "RouterProcess":
        """Start a routing broker as a process of its own, which can be killed."""
        settings = [f"--{key.replace('_', '-')}={value}" for key, value in self._common.items()]
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "isthmus"),
            "router",
            f"--id={name}",
            f"--host-label=host-{name}",
            "--log-level=warning",
            "--json",
            *settings,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            started = json.loads(await process.stdout.readline())
        router = RouterProcess(process, started["http"])
        self.processes.append(router)
        return router

    async def vanish(self, edge: EdgeBroker) -> None:
        """An edge broker is gone from one moment to the next, as far as its clients can tell."""
        for connection in list(edge.hub._connections):
            connection.abort(CloseReason.LOST, "vanished")
        del self.edges[edge.id]
        await edge.close()

    async def close(self) -> None:
        """Stop everything."""
        for client in self.clients:
            await client.close(flush_timeout_s=0.5)
        for edge in self.edges.values():
            await edge.close()
        for router in self.routers.values():
            await router.close()
        for process in self.processes:
            await process.kill()


@asynccontextmanager
async def overlay(zookeeper_hosts: str, chroot: str, **settings: object) -> AsyncIterator[Overlay]:
    """An overlay that is gone after the test, and has left no task behind."""
    before = asyncio.all_tasks()
    testbed = Overlay(zookeeper_hosts, chroot, **settings)
    try:
        yield testbed
        for edge in testbed.edges.values():
            edge.core.validate()
        for router in testbed.routers.values():
            router.core.validate()
    finally:
        await testbed.close()
    left = {task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()}
    assert not left, f"tasks left behind: {left}"
