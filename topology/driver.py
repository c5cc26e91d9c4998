"""What a testbed is to those who use it, whichever way it runs: the interface of all drivers.

    process   `topology.process_driver`: processes on loopback, needs nothing
    netns     `topology.netns_driver`: network namespaces with an emulated WAN, needs root
    compose   `topology.compose_driver`: containers of a compose file, needs a Docker engine

Demonstrations, drills and benchmarks are written against `Driver` and run on all of them:

    life       start, stop; `running` is both around a block of code
    faults     kill, freeze, cut, limit; repaired by start_node, thaw, heal, limit
    programs   start_load for the applications of a LAN, execute for anything else
    looking    status, wan_statistics, watch_wan, check_wan, died_unasked
    records    collect brings logs, results and traces to this machine

A driver that cannot do something says so with a DriverError; it never pretends.
"""

import abc
import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import aiohttp

from runtime.tracing import TraceSettings
from topology.errors import DriverError
from topology.gateway import GatewayStatistics, Way
from topology.model import Topology
from topology.wan_kind import WanKind

START_TIMEOUT_S: Final = 30.0
READY_TIMEOUT_S: Final = 20.0
STATUS_TIMEOUT_S: Final = 2.0
EXECUTE_TIMEOUT_S: Final = 30.0
READY_POLL_S: Final = 0.05
SESSION_TIMEOUT_S: Final = 4.0
DIRECTORY_PREFIX: Final = "isthmus-testbed-"

BOTH_WAYS: Final = tuple(Way)

Say = Callable[[str], None]


def ignore(_: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """How a topology is run, whichever driver runs it."""

    session_timeout_s: float = SESSION_TIMEOUT_S
    directory: Path | None = None
    """For logs, configuration and results; None: one of its own."""
    say: Say = ignore
    """Is told how the start goes."""
    trace: TraceSettings | None = None
    """Where and how much all nodes and applications trace."""
    wan: WanKind = WanKind.AUTO
    """What emulates the WAN, where one is emulated."""


DEFAULT_SETTINGS: Final = DriverSettings()


class Node(Protocol):
    """A broker of the testbed."""

    name: str
    role: str
    """edge or router."""
    lan: str
    """Empty for routing brokers."""
    locator: str
    """Where it serves, once it has been started."""
    http: str

    @property
    def is_alive(self) -> bool:
        """Whether its process is there; a frozen one is."""


class Load(Protocol):
    """The applications of one LAN, `topology.load`: takes commands, tells events."""

    async def wait_for(self, event: str, timeout_s: float) -> dict[str, Any]:
        """Wait for an event, passing over others. Raises DriverError if it does not come."""

    async def ask(self, command: str, answer_within_s: float, **fields: Any) -> dict[str, Any]:
        """Give a command and wait for its answer, the event of the same name."""


class Driver(abc.ABC):
    """A running topology. Use `running`, or `start` and `stop` in a `try`."""

    def __init__(self, topology: Topology, settings: DriverSettings) -> None:
        self.topology = topology
        self.session_timeout_s = settings.session_timeout_s
        self.directory = settings.directory or Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        """Logs, configuration and results of this run."""
        self.keeps_directory = False
        """Whether `running` leaves the directory; it does so by itself when something fails."""
        self.trace = settings.trace
        """Where and how much all nodes and applications trace."""
        self._say = settings.say
        self._http: aiohttp.ClientSession | None = None

    # Life

    @abc.abstractmethod
    async def start(self) -> None:
        """Start everything; returns when all brokers serve. Raises DriverError or CoordinationError."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Collect, then end and remove everything; also after a start that failed."""

    @abc.abstractmethod
    async def collect(self) -> None:
        """Bring what was recorded so far into `directory`, and traces to where they were asked for."""

    # Faults and repairs

    @abc.abstractmethod
    async def start_node(self, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start a broker again after it was killed; returns when it serves, where it served before."""

    @abc.abstractmethod
    async def kill(self, name: str) -> None:
        """End a broker as a crash would, with SIGKILL; returns when it is gone."""

    @abc.abstractmethod
    def kill_nowait(self, name: str) -> None:
        """Send SIGKILL to a broker and go on."""

    @abc.abstractmethod
    async def freeze(self, name: str) -> None:
        """Stop a broker in its tracks; its connections stay open."""

    @abc.abstractmethod
    async def thaw(self, name: str) -> None:
        """Let a frozen broker go on."""

    @abc.abstractmethod
    async def cut(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Cut a LAN off from everything else, in these directions."""

    @abc.abstractmethod
    async def heal(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Join a LAN to everything else again."""

    @abc.abstractmethod
    async def limit(self, lan: str, bytes_per_s: float | None, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Let each link of a LAN carry only so much in each of these directions; None: no limit."""

    # Faults that not every driver knows

    async def drain(self, name: str) -> None:
        """Ask a broker to hand over and end (SIGTERM); returns when it has."""
        raise self._cannot(f"drain {name}")

    async def add_router(self, name: str, host: str) -> None:
        """Start another routing broker, on a host of its own; returns when it serves."""
        raise self._cannot(f"add {name} on {host}")

    async def remove_router(self, name: str) -> None:
        """Drain a routing broker that was added, and forget it."""
        raise self._cannot(f"remove {name}")

    async def zookeeper_leader(self) -> str:
        """The server that leads the ensemble; the only one if there is one."""
        raise self._cannot("ask ZooKeeper who leads")

    def zookeeper_servers(self) -> list[str]:
        """Names of all ZooKeeper servers."""
        return [f"zookeeper-{number}" for number in range(1, self.topology.zookeeper_servers + 1)]

    async def kill_zookeeper(self, server: str) -> None:
        """End a ZooKeeper server with SIGKILL; returns when it is gone."""
        raise self._cannot(f"kill {server}")

    async def start_zookeeper(self, server: str) -> None:
        """Start a killed ZooKeeper server on its data; returns when it runs, perhaps without a quorum."""
        raise self._cannot(f"start {server}")

    async def cut_zookeeper(self, broker: str) -> None:
        """Cut a broker off from ZooKeeper and from nobody else."""
        raise self._cannot(f"cut {broker} off from ZooKeeper alone")

    async def heal_zookeeper(self, broker: str) -> None:
        """Join a broker to ZooKeeper again."""
        raise self._cannot(f"join {broker} to ZooKeeper")

    async def cut_routers(self, one: str, other: str) -> None:
        """Cut two routing brokers off from each other and from nobody else."""
        raise self._cannot(f"cut {one} off from {other} alone")

    async def heal_routers(self, one: str, other: str) -> None:
        """Join two routing brokers again."""
        raise self._cannot(f"join {one} and {other}")

    async def delay(self, lan: str, delay_ms: float | None) -> None:
        """Let a LAN's link to the cloud take so long each way; None: as the topology has it."""
        raise self._cannot(f"change the delay of {lan}")

    async def shift_wall_clock(self, seconds: float) -> None:
        """Let the wall clock of all brokers and applications be ahead of the machine's by so much."""
        raise self._cannot("shift a wall clock")

    # Programs

    @abc.abstractmethod
    async def start_load(self, lan: str) -> Load:
        """Start the publishers and subscribers of a LAN, inside it; they end with the testbed."""

    @abc.abstractmethod
    async def load_results(self, lan: str) -> dict[str, Any]:
        """What the subscribers of a LAN recorded, after their load was drained."""

    @abc.abstractmethod
    async def execute(
        self, place: str, *command: str, timeout_s: float = EXECUTE_TIMEOUT_S
    ) -> tuple[int, str]:
        """Run a program where a broker is, or where the clients of a LAN are; gives its status and output."""

    # Looking

    @property
    @abc.abstractmethod
    def nodes(self) -> Mapping[str, Node]:
        """All brokers by name."""

    @property
    @abc.abstractmethod
    def zookeeper_hosts(self) -> str:
        """Where ZooKeeper serves."""

    @abc.abstractmethod
    async def wan_statistics(self, lan: str) -> GatewayStatistics:
        """What has passed between a LAN and everything else."""

    @abc.abstractmethod
    async def watch_wan(self) -> None:
        """Judge the WAN by what it does from now on: how it fares while everything starts says nothing."""

    @abc.abstractmethod
    async def check_wan(self) -> tuple[bool, str] | None:
        """Whether the WAN was what it claims to be, and a word on it; None if that is not watched."""

    @abc.abstractmethod
    def died_unasked(self) -> list[str]:
        """What ended although nobody made it."""

    async def status(self, name: str) -> dict[str, Any]:
        """What a broker says about itself. Raises DriverError if it does not answer."""
        content, _ = await self._ask_status(name)
        return content

    async def time_of_day_s(self, name: str) -> float:
        """What a broker's wall clock says, to the second. Raises DriverError if it does not answer."""
        _, headers = await self._ask_status(name)
        return parsedate_to_datetime(headers["Date"]).timestamp()

    async def _ask_status(self, name: str) -> tuple[dict[str, Any], Mapping[str, str]]:
        node = self.nodes[name]
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=STATUS_TIMEOUT_S), connector=self._connector()
            )
        try:
            async with self._http.get(f"http://{node.http}/status") as response:
                response.raise_for_status()
                content = json.loads(await response.read())
                headers = response.headers
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise DriverError(f"{name} gives no status at http://{node.http}/status: {error}") from error
        assert isinstance(content, dict)
        return content, headers

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

    @property
    def routers(self) -> list[str]:
        """Names of all routing brokers."""
        return [router.name for router in self.topology.routers]

    def edges_of(self, lan: str) -> list[str]:
        """Addresses of the edge brokers of a LAN."""
        return [node.locator for node in self.nodes.values() if node.lan == lan]

    # For the drivers

    def _connector(self) -> aiohttp.TCPConnector:
        """Opens the connections to the brokers' HTTP."""
        return aiohttp.TCPConnector()

    async def _close_http(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _cannot(self, what: str) -> DriverError:
        return DriverError(f"{type(self).__name__} cannot {what}: use the process testbed")

    def _unknown(self, broker: str) -> DriverError:
        return DriverError(f"there is no broker {broker}: use one of {', '.join(self.nodes)}")

    def _lan(self, name: str) -> str:
        """The name, if there is such a LAN. Raises DriverError otherwise."""
        known = [lan.name for lan in self.topology.lans]
        if name not in known:
            raise DriverError(f"there is no LAN {name}: use one of {', '.join(known)}")
        return name

    def _check_place(self, place: str) -> None:
        """Raise DriverError unless this is a broker or a LAN."""
        known = [*self.nodes, *(lan.name for lan in self.topology.lans)]
        if place not in known:
            raise DriverError(f"there is no broker or LAN {place}: use one of {', '.join(known)}")


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Run together; the first error ends the others and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for item in work:
                group.create_task(item)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


Kind = TypeVar("Kind", bound=Driver)


@contextlib.asynccontextmanager
async def running(
    topology: Topology,
    kind: type[Kind],
    settings: DriverSettings = DEFAULT_SETTINGS,
    *,
    keep: bool = False,
) -> AsyncIterator[Kind]:
    """A testbed for as long as the block lasts. Its directory stays if the block fails or `keep` is set."""
    driver = kind(topology, settings)
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
                settings.say(f"logs and records are kept in {driver.directory}")
            else:
                shutil.rmtree(driver.directory, ignore_errors=True)
