"""The processes of FRAME's experiment: ZooKeeper, two routing brokers, an edge on either side, the load.

All run on this machine, over loopback. The primary of all topics is made so by its capacity:
beside it the backup counts as nothing, and the leader gives it no topic and moves none to it.
"""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.frame_workload import BACKUP_DELAY_MS, FAILOVER_MS, SUBSCRIBER_DELAY_MS
from benchmarks.machine import processor_time_s
from benchmarks.processes import resident_mib
from coordinator import EmbeddedZooKeeper
from topology.children import Child
from topology.errors import DriverError

PRIMARY: Final = "router-a"
BACKUP: Final = "router-b"
INGRESS: Final = "edge-a"
EGRESS: Final = "edge-b"
PUBLISHER: Final = "publishers"
SUBSCRIBER: Final = "subscribers"
ZOOKEEPER: Final = "zookeeper"
SWITCHBOARD: Final = "switchboard"

START_TIMEOUT_S: Final = 30.0
HTTP_TIMEOUT_S: Final = 20.0
ANSWER_TIMEOUT_S: Final = 60.0
PATIENCE_S: Final = 5.0
"""How long the last messages may take."""
DECLARE_TIMEOUT_S: Final = 900.0
_ALL_TOPICS: Final = 1e6
"""Capacity beside which another routing broker counts as nothing."""

Say = Callable[[str], None]

PINNINGS: Final[Mapping[str, Mapping[str, int]]] = {
    "none": {},
    "load": {PUBLISHER: 1, SUBSCRIBER: 1, ZOOKEEPER: 1, PRIMARY: 0, BACKUP: 0, INGRESS: 0, EGRESS: 0},
    "edges": {INGRESS: 1, EGRESS: 1, PUBLISHER: 0, SUBSCRIBER: 0, ZOOKEEPER: 0, PRIMARY: 0, BACKUP: 0},
    "sides": {INGRESS: 0, PUBLISHER: 0, ZOOKEEPER: 0, BACKUP: 0, PRIMARY: 1, EGRESS: 1, SUBSCRIBER: 1},
}
"""Which process runs on which of two cores."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How the brokers are run."""

    topics: int
    mode: str
    pinning: str = "none"
    niceness: int = 0
    """Of all processes; below 0 needs the right to."""
    session_timeout_s: float = 4.0
    silence_ms: float = 1_000.0
    """Counts as a broker's death while its connections stay open; a killed one is noticed by their end."""
    keep_logs: bool = False
    backup_leads: bool = False
    """The backup is the leader, so that the primary has nothing to do but messages."""
    equal_capacity: bool = False
    """Both routing brokers are primaries, of half the topics each."""
    interpreted: str = ""
    """A broker that runs interpreted though there are compiled modules: a slower one."""
    proxied: bool = False
    """Edges reach routing brokers through lines that can be cut."""


def _quiet(_: str) -> None:
    """Nobody listens."""


class Testbed:
    """The running processes, by name."""

    def __init__(self, setup: Setup, say: Say = _quiet) -> None:
        self.setup = setup
        self.directory = Path(tempfile.mkdtemp(prefix="isthmus-frame-"))
        self._say = say
        self._zookeeper = EmbeddedZooKeeper(1, self.directory / "zookeeper", force_sync=False)
        self._children: dict[str, Child] = {}
        self._addresses: dict[str, tuple[str, str]] = {}
        self._http: aiohttp.ClientSession | None = None
        self._proxies: dict[str, str] = {}

    async def start(self) -> None:
        """Start everything and declare all endpoints."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HTTP_TIMEOUT_S))
        await asyncio.to_thread(self._zookeeper.start, START_TIMEOUT_S)
        self._prioritise(ZOOKEEPER)
        if self.setup.proxied:
            await self._open_lines()
        routers = (BACKUP, PRIMARY) if self.setup.backup_leads else (PRIMARY, BACKUP)
        for name in (*routers, INGRESS, EGRESS):
            await self.start_broker(name)
        await self.wait_for(self._is_led, "a leader")
        topics = str(self.setup.topics)
        for name, role, edge in (
            (PUBLISHER, "publish", INGRESS),
            (SUBSCRIBER, "subscribe", EGRESS),
        ):
            await self._start_child(name, "benchmarks.frame_load", [role, topics, self._addresses[edge][0]])
        await asyncio.gather(*(self._declare(name) for name in (PUBLISHER, SUBSCRIBER)))

    async def stop(self) -> None:
        """End everything; returns when nothing runs any more."""
        await asyncio.gather(*(child.stop() for child in self._children.values()))
        if self._http is not None:
            await self._http.close()
        await asyncio.to_thread(self._zookeeper.stop)

    async def start_broker(self, name: str) -> None:
        """Start a broker, perhaps again after it was killed; returns when it serves."""
        if (child := self._children.get(name)) is not None:
            await child.stop()
        # A broker that comes back is found where it was.
        locator, http = self._addresses.get(name, ("127.0.0.1:0", "127.0.0.1:0"))
        runner = ["isthmus"] if name != self.setup.interpreted else ["benchmarks.interpreted", "isthmus"]
        child = await self._start_child(
            name,
            runner[0],
            [
                *runner[1:],
                *("router" if name in (PRIMARY, BACKUP) else "edge", "--id", name, "--json"),
                *("--listen", locator, "--http", http, "--zookeeper", self._zookeeper.hosts),
                *("--session-timeout-s", str(self.setup.session_timeout_s)),
                *("--silence-ms", str(self.setup.silence_ms)),
                *("--failover-ms", str(FAILOVER_MS), "--subscriber-delay-ms", str(SUBSCRIBER_DELAY_MS)),
                *("--backup-delay-ms", str(BACKUP_DELAY_MS)),
                *self._special_arguments(name),
            ],
        )
        where = await child.next_event(START_TIMEOUT_S)
        self._addresses[name] = (where["locator"], where["http"])

    def _special_arguments(self, name: str) -> Sequence[str]:
        if name in (PRIMARY, BACKUP):
            capacity = _ALL_TOPICS if name == PRIMARY and not self.setup.equal_capacity else 1.0
            return "--mode", self.setup.mode, "--host-label", f"host-{name}", "--capacity", str(capacity)
        more = ("--retain-more",) if self.setup.mode == "frame+" else ()
        proxy = ("--proxy", self._proxies[name]) if name in self._proxies else ()
        return ("--lan", f"lan-{name}", "--no-discovery", *more, *proxy)

    async def _open_lines(self) -> None:
        board = await self._start_child(SWITCHBOARD, "topology.switchboard", ["127.0.0.1"])
        for edge in (INGRESS, EGRESS):
            self._proxies[edge] = (await board.ask("open", START_TIMEOUT_S, line=edge))["locator"]

    async def cut(self, router: str) -> None:
        """Let nothing pass any more between a routing broker and all edges."""
        await self._lines("cut", router)

    async def heal(self, router: str) -> None:
        """Let everything pass again."""
        await self._lines("heal", router)

    async def _lines(self, command: str, router: str) -> None:
        for edge in self._proxies:
            target = self._addresses[router][0]
            await self._children[SWITCHBOARD].ask(command, HTTP_TIMEOUT_S, line=edge, target=target)

    async def warm_up(self) -> None:
        """Let publishers publish; returns when every topic has been heard."""
        for name in (PUBLISHER, SUBSCRIBER):
            await self.child(name).send("start")
        await self.child(SUBSCRIBER).wait_for("warm", ANSWER_TIMEOUT_S)

    async def measure(self, start_ns: int, end_ns: int) -> None:
        """What is sent between these two times counts."""
        for name in (PUBLISHER, SUBSCRIBER):
            await self.child(name).send("measure", start_ns=start_ns, end_ns=end_ns)

    async def results(self, crash_ns: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Publish no more; returns what publishers sent and subscribers got.

        Raises DriverError if a process has ended unasked.
        """
        sent = await self.child(PUBLISHER).ask("stop", ANSWER_TIMEOUT_S)
        file = self.directory / "results.json"
        await self.child(SUBSCRIBER).ask(
            "results",
            ANSWER_TIMEOUT_S + PATIENCE_S,
            last=sent["last"],
            crash_ns=crash_ns,
            patience_s=PATIENCE_S,
            file=str(file),
        )
        if dead := self.died_unasked():
            raise DriverError(f"{', '.join(dead)} ended unasked; logs are in {self.directory}")
        return sent, json.loads(file.read_text())

    def child(self, name: str) -> Child:
        """A process of ours."""
        return self._children[name]

    async def status(self, name: str) -> dict[str, Any]:
        """What a broker says about itself; slow with many topics."""
        content = json.loads(await self._get(name, "status"))
        assert isinstance(content, dict)
        return content

    async def counters(self, name: str) -> dict[str, float]:
        """A routing broker's counters; cheap at any number of topics."""
        text = (await self._get(name, "metrics")).decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = "".join(f" {value}" for value in sample.labels.values())
                found[sample.name.removeprefix("isthmus_").removesuffix("_total") + labels] = sample.value
        return found

    async def wait_for(
        self, condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 60.0
    ) -> None:
        """Poll an asynchronous condition. Raises DriverError if it does not come true in time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while not await condition():
            if loop.time() > deadline_s:
                raise DriverError(f"{what} did not come within {timeout_s:g} s; logs are in {self.directory}")
            await asyncio.sleep(0.05)

    def pin(self) -> None:
        """Put every thread of every process on the core its pinning names."""
        for name, core in PINNINGS[self.setup.pinning].items():
            for thread in self._threads(name):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, {core})

    def keep_off(self, core: int, but: str) -> None:
        """Let all processes but one run on the other cores only."""
        others = os.sched_getaffinity(0) - {core}
        for name in (*self._children, ZOOKEEPER):
            for thread in self._threads(name) if name != but else ():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, others)

    def _prioritise(self, name: str) -> None:
        """Give a process the priority wanted, before it has many threads; new ones inherit it."""
        if not self.setup.niceness:
            return
        # Each process is a session of its own, and Linux may weigh whole sessions first.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid(name)}/autogroup").write_text(str(self.setup.niceness))
        for thread in self._threads(name):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread, self.setup.niceness)

    def _threads(self, name: str) -> list[int]:
        return [int(task.name) for task in Path(f"/proc/{self.pid(name)}/task").iterdir()]

    def pid(self, name: str) -> int:
        """The process id."""
        return self._zookeeper.members[0].pid if name == ZOOKEEPER else self._children[name].pid

    def processor_times_s(self) -> dict[str, float]:
        """Processor time each process has used so far."""
        return {name: processor_time_s(self.pid(name)) for name in (*self._children, ZOOKEEPER)}

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of each process that runs."""
        return {name: round(resident_mib(self.pid(name)), 1) for name in (*self._children, ZOOKEEPER)}

    def died_unasked(self) -> list[str]:
        """Processes that ended although nobody made them."""
        return [name for name, child in self._children.items() if child.died_unasked]

    async def _start_child(self, name: str, module: str, arguments: Sequence[str]) -> Child:
        child = self._children[name] = Child(name, module, arguments, self.directory)
        await child.start()
        self._prioritise(name)
        return child

    async def _declare(self, name: str) -> None:
        child = self._children[name]
        await child.send("declare")
        while (event := await child.next_event(DECLARE_TIMEOUT_S))["event"] != "declared":
            if event["event"] == "progress":
                self._say(f"{name}: {event['done']} of {event['total']} declared")

    async def _is_led(self) -> bool:
        leaders = [await self.counters(name) for name in (PRIMARY, BACKUP)]
        return sum(counters.get("leader", 0) for counters in leaders) == 1

    async def _get(self, name: str, page: str) -> bytes:
        assert self._http is not None
        url = f"http://{self._addresses[name][1]}/{page}"
        try:
            async with self._http.get(url) as response:
                response.raise_for_status()
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DriverError(f"{name} does not answer at {url}: {error!r}") from error


@contextlib.asynccontextmanager
async def running(setup: Setup, say: Say = _quiet) -> AsyncIterator[Testbed]:
    """The processes for as long as the block lasts; their logs stay if it fails."""
    testbed = Testbed(setup, say)
    keep = True
    try:
        await testbed.start()
        yield testbed
        keep = setup.keep_logs
    finally:
        stopping = asyncio.ensure_future(testbed.stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await asyncio.wait({stopping})
            raise
        finally:
            if keep:
                say(f"logs are kept in {testbed.directory}")
            else:
                shutil.rmtree(testbed.directory, ignore_errors=True)
