"""Runs a topology as processes on this machine: ZooKeeper, gateways, brokers, all on loopback.

Every LAN has an address range of its own, and so has the cloud:

    127.<lan>.0.1    gateway of LAN number <lan>, the only way from its edges to the cloud
    127.<lan>.0.10   and on: its edge brokers           239.255.75.<lan> is its discovery group
    127.100.<n>.1    routing broker number <n>
    127.0.0.1        ZooKeeper

Edges reach routing brokers through the gateway, which delays, limits the rate and can be cut;
ZooKeeper is reached directly. Gateways relay TCP and see no packets, so jitter and loss are left out,
and so are links to single hosts and between LANs: `unemulated` names what a run leaves out. Each
process has a log in the run directory, which goes when the testbed ends well and stays when it fails.
No process outlives the testbed, see `topology.launcher`.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from coordinator import EmbeddedZooKeeper
from topology.children import Child, child_environment
from topology.errors import DriverError
from topology.gateway import GatewayStatistics, Way
from topology.model import Topology

START_TIMEOUT_S: Final = 30.0
READY_TIMEOUT_S: Final = 20.0
STATUS_TIMEOUT_S: Final = 2.0
COMMAND_TIMEOUT_S: Final = 5.0
EXECUTE_TIMEOUT_S: Final = 30.0
READY_POLL_S: Final = 0.05
SESSION_TIMEOUT_S: Final = 4.0
DIRECTORY_PREFIX: Final = "isthmus-testbed-"

MBIT_BYTES: Final = 125_000
"""A megabit in bytes."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Node:
    """A broker of the testbed."""

    name: str
    role: str
    lan: str
    """Empty for routing brokers."""
    host: str
    """The address it listens on."""
    arguments: tuple[str, ...]
    child: Child | None = None
    locator: str = ""
    http: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.child is not None and self.child.is_alive


def ignore(_: str) -> None:
    """Nobody listens."""


class ProcessDriver:
    """A running topology. Use `running()`, or `start` and `stop` in a `try`."""

    def __init__(
        self,
        topology: Topology,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        directory: Path | None = None,
        say: Say = ignore,
    ) -> None:
        self.topology = topology
        self.session_timeout_s = session_timeout_s
        self.nodes: dict[str, Node] = {}
        self.directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)) if directory is None else directory
        """Logs, configuration and results of this run."""
        self.keeps_directory = False
        """Whether `running` leaves the directory; it does so by itself when something fails."""
        self._say = say
        self._zookeeper = EmbeddedZooKeeper(
            topology.zookeeper_servers, self.directory / "zookeeper", force_sync=False
        )
        self._zookeeper_threads: Executor | None = None
        """Where calls that start a server run; None: any thread."""
        self._hosts = ""
        self._gateways: dict[str, Child] = {}
        self._proxies: dict[str, str] = {}
        self._helpers: list[Child] = []
        self._http: aiohttp.ClientSession | None = None

    # Life

    async def start(self) -> None:
        """Start everything; returns when all processes serve. Raises DriverError or CoordinationError."""
        (self.directory / "topology.yaml").write_text(self.topology.text, encoding="utf-8")
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=STATUS_TIMEOUT_S), connector=self._connector()
        )
        await self._start_ground()
        self._plan()
        await _all(*(self.start_node(name) for name in self.nodes))

    async def stop(self) -> None:
        """End everything; returns when nothing runs any more."""
        children = [*self._helpers, *(node.child for node in self.nodes.values() if node.child is not None)]
        await asyncio.gather(*(child.stop() for child in children))
        if self._http is not None:
            await self._http.close()
        await asyncio.to_thread(self._zookeeper.stop)
        await self._stop_wan()

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every broker is ready and one routing broker leads."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            statuses = await self.statuses()
            unready = [name for name in self.nodes if not statuses.get(name, {}).get("ready")]
            leaders = [name for name, status in statuses.items() if status.get("leader")]
            if not unready and len(leaders) == 1:
                return
            if loop.time() > deadline_s:
                what = f"{', '.join(unready)} not ready" if unready else f"{len(leaders)} leaders"
                raise DriverError(
                    f"the testbed is not ready after {timeout_s:g} s: {what}; logs are in {self.directory}"
                )
            await asyncio.sleep(READY_POLL_S)

    # Brokers

    async def start_node(self, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start a broker, perhaps again after it was killed; returns when it serves."""
        node = self.nodes[name]
        if node.is_alive:
            raise DriverError(f"{name} runs already: kill it before it is started again")
        if node.child is not None:
            await node.child.stop()
        # A broker that comes back is found where it was.
        listen = node.locator or f"{node.host}:0"
        child = node.child = Child(
            name,
            "isthmus",
            [
                *(node.role, "--id", name, "--json"),
                *("--listen", listen, "--http", node.http or f"{node.host}:0"),
                *("--zookeeper", self._hosts, "--session-timeout-s", str(self.session_timeout_s)),
                *node.arguments,
            ],
            self.directory,
            self._namespace(name),
        )
        await child.start()
        where = await child.next_event(timeout_s)
        node.locator, node.http = where["locator"], where["http"]
        self._say(f"{name} serves at {node.locator}")

    async def kill(self, name: str) -> None:
        """End a broker as a crash would, with SIGKILL; returns when it is gone."""
        await self._child(name).kill()

    def kill_nowait(self, name: str) -> None:
        """Send SIGKILL to a broker and go on."""
        self._child(name).signal(signal.SIGKILL)

    def freeze(self, name: str) -> None:
        """Stop a broker in its tracks (SIGSTOP); its connections stay open."""
        self._child(name).signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a frozen broker go on."""
        self._child(name).signal(signal.SIGCONT)

    async def status(self, name: str) -> dict[str, Any]:
        """What a broker says about itself. Raises DriverError if it does not answer."""
        assert self._http is not None
        node = self.nodes[name]
        try:
            async with self._http.get(f"http://{node.http}/status") as response:
                response.raise_for_status()
                content = json.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise DriverError(f"{name} gives no status at http://{node.http}/status: {error}") from error
        assert isinstance(content, dict)
        return content

    async def statuses(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """The status of every broker that is alive and answers, by name."""
        wanted = [name for name in (self.nodes if names is None else names) if self.nodes[name].is_alive]
        answers = await asyncio.gather(*(self.status(name) for name in wanted), return_exceptions=True)
        found: dict[str, dict[str, Any]] = {}
        for name, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, dict):
                found[name] = answer
            elif not isinstance(answer, DriverError):
                raise answer
        return found

    @property
    def routers(self) -> list[str]:
        """Names of all routing brokers."""
        return [router.name for router in self.topology.routers]

    @property
    def zookeeper_hosts(self) -> str:
        """Where ZooKeeper serves."""
        return self._hosts

    def edges_of(self, lan: str) -> list[str]:
        """Addresses of the edge brokers of a LAN."""
        return [node.locator for node in self.nodes.values() if node.lan == lan]

    def died_unasked(self) -> list[str]:
        """Processes that ended although nobody made them."""
        children = [*self._helpers, *self._wan_processes()]
        children += [node.child for node in self.nodes.values() if node.child is not None]
        dead = [child.name for child in children if child.died_unasked]
        dead += [f"zookeeper-{m.index + 1}" for m in self._zookeeper.members if not m.alive]
        return dead

    # The WAN

    async def cut(self, lan: str, ways: Iterable[Way] = tuple(Way)) -> None:
        """Cut a LAN off from the cloud."""
        await self._gateways[lan].ask("cut", COMMAND_TIMEOUT_S, ways=list(ways))

    async def heal(self, lan: str, ways: Iterable[Way] = tuple(Way)) -> None:
        """Join a LAN to the cloud again."""
        await self._gateways[lan].ask("heal", COMMAND_TIMEOUT_S, ways=list(ways))

    async def limit(self, lan: str, bytes_per_s: float | None, ways: Iterable[Way] = tuple(Way)) -> None:
        """Let a LAN's link carry only so much in each of these directions; None: no limit."""
        await self._gateways[lan].ask("rate", COMMAND_TIMEOUT_S, bytes_per_s=bytes_per_s, ways=list(ways))

    async def wan_statistics(self, lan: str) -> GatewayStatistics:
        """What has passed between a LAN and the cloud."""
        answer = await self._gateways[lan].ask("statistics", COMMAND_TIMEOUT_S)
        answer.pop("event")
        return GatewayStatistics(**answer)

    # Helpers of others

    async def start_helper(self, name: str, module: str, arguments: list[str], lan: str) -> Child:
        """Start another process of ours, among the clients of a LAN, that ends with the testbed."""
        child = Child(name, module, arguments, self.directory, self._clients_namespace(lan))
        self._helpers.append(child)
        await child.start()
        return child

    async def execute(
        self, place: str, *command: str, timeout_s: float = EXECUTE_TIMEOUT_S
    ) -> tuple[int, str]:
        """Run a program where a broker is, or where the clients of a LAN are; gives its status and output."""
        if place in self.nodes:
            namespace = self._namespace(place)
        elif any(place == lan.name for lan in self.topology.lans):
            namespace = self._clients_namespace(place)
        else:
            known = [*self.nodes, *(lan.name for lan in self.topology.lans)]
            raise DriverError(f"there is no broker or LAN {place}: use one of {', '.join(known)}")
        where = ("--namespace", str(namespace)) if namespace is not None else ()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "topology.launcher", str(os.getpid()), *where, "--command", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self.directory,
            env=child_environment(),
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            raise DriverError(f"{' '.join(command)} at {place} took longer than {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace")

    # What another driver does differently

    def _connector(self) -> aiohttp.TCPConnector:
        """Opens the connections to the brokers' HTTP."""
        return aiohttp.TCPConnector()

    def _namespace(self, broker: str) -> Path | None:
        """The network namespace of a broker; None: the machine's."""
        return None

    def _clients_namespace(self, lan: str) -> Path | None:
        """The network namespace of a LAN's clients; None: the machine's."""
        return None

    async def _start_ground(self) -> None:
        """Start what brokers stand on: ZooKeeper and the WAN."""
        if left_out := unemulated(self.topology):
            self._say(f"left out, because this testbed has no packets to lose: {'; '.join(left_out)}")
        await _all(self._start_zookeeper(), *(self.start_gateway(lan.name) for lan in self.topology.lans))

    async def _stop_wan(self) -> None:
        await asyncio.gather(*(gateway.stop() for gateway in self._gateways.values()))

    def _wan_processes(self) -> list[Child]:
        return list(self._gateways.values())

    async def check_wan(self) -> tuple[bool, str] | None:
        """Whether the WAN was what it claims to be, and a word on it; None if that is not watched."""
        return None

    # Details

    def _child(self, name: str) -> Child:
        node = self.nodes.get(name)
        if node is None or node.child is None:
            raise DriverError(f"there is no broker {name}: use one of {', '.join(self.nodes)}")
        return node.child

    async def _start_zookeeper(self) -> None:
        starting = asyncio.get_running_loop().run_in_executor(
            self._zookeeper_threads, self._zookeeper.start, START_TIMEOUT_S
        )
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: let it come to its end, so that `stop` finds what it started.
            await asyncio.wait({starting})
            raise
        self._hosts = self._zookeeper.hosts
        self._say(f"ZooKeeper serves at {self._hosts}")

    async def start_gateway(self, lan: str) -> None:
        """Start the gateway of a LAN with the conditions of its link; returns when it serves."""
        number = 1 + [item.name for item in self.topology.lans].index(lan)
        link = self.topology.lan(lan).wan
        ways = link.ways
        child = self._gateways[lan] = Child(
            f"gateway-{lan}",
            "topology.gateway",
            [
                f"127.{number}.0.1",
                *("--delay-ms", str(ways.out.delay_ms), "--back-delay-ms", str(ways.back.delay_ms)),
            ],
            self.directory,
        )
        await child.start()
        self._proxies[lan] = (await child.wait_for("serving", START_TIMEOUT_S))["locator"]
        for way, conditions in ((Way.OUT, ways.out), (Way.BACK, ways.back)):
            if conditions.rate_mbit is not None:
                await self.limit(lan, conditions.rate_mbit * MBIT_BYTES, [way])
        self._say(f"gateway of {lan} serves at {self._proxies[lan]}, {link.delay_ms:g} ms to the cloud")

    def _plan(self) -> None:
        """All brokers with their addresses and arguments."""
        for number, router in enumerate(self.topology.routers, 1):
            arguments: tuple[str, ...] = ("--host-label", router.host)
            self.nodes[router.name] = Node(router.name, "router", "", f"127.100.{number}.1", arguments)
        for number, lan in enumerate(self.topology.lans, 1):
            arguments = ("--lan", lan.name, "--proxy", self._proxies[lan.name])
            arguments += ("--discovery-group", f"239.255.75.{number}")
            for index, edge in enumerate(lan.edges):
                self.nodes[edge] = Node(edge, "edge", lan.name, f"127.{number}.0.{10 + index}", arguments)


def unemulated(topology: Topology) -> list[str]:
    """What the topology says about its links and this testbed leaves out, for people."""
    left_out = []
    for link in (lan.wan for lan in topology.lans):
        both = (link.ways.out, link.ways.back)
        names = [name for name in ("jitter_ms", "loss") if any(getattr(one, name) for one in both)]
        if names:
            left_out.append(f"{' and '.join(names)} of {link.name}")
    if topology.links:
        left_out.append(f"{len(topology.links)} links to single hosts or between LANs")
    if not topology.cloud.is_perfect:
        left_out.append("the conditions between hosts of the cloud")
    return left_out


async def _all(*work: Any) -> None:
    """Run together; the first error ends the others and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for item in work:
                group.create_task(item)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@contextlib.asynccontextmanager
async def running(
    topology: Topology, *, keep: bool = False, say: Say = ignore, kind: type[ProcessDriver] = ProcessDriver
) -> AsyncIterator[ProcessDriver]:
    """A testbed for as long as the block lasts. Its directory stays if the block fails or `keep` is set."""
    driver = kind(topology, say=say)
    driver.keeps_directory = keep
    try:
        await driver.start()
        await driver.wait_ready()
        yield driver
    except Exception:
        driver.keeps_directory = True
        raise
    finally:
        stopping = asyncio.ensure_future(driver.stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await asyncio.wait({stopping})
            raise
        finally:
            if driver.keeps_directory:
                say(f"logs and records are kept in {driver.directory}")
            else:
                shutil.rmtree(driver.directory, ignore_errors=True)
