"""How much coordination one ZooKeeper bears: PubSubCoord's Figures 35-37 with our brokers.

All edge and routing brokers of a WAN run in a few worker processes against one real ZooKeeper
server. Publishers are declared, then ever more subscribers join, as fast as the edges take them.
For each number of subscribers we ask the server itself (`mntr`, statistics reset before by `srst`)
for its latency, znodes and watches, and measure how long it takes until all routes are right.

*Right* is checked, not assumed. Who must get what follows from the workload; for every topic,

* ZooKeeper names a primary and a backup on different hosts, under a leader that stands;
* both route the topic to exactly the edges with subscribers;
* every edge with an endpoint of the topic knows both and has a link to both;
* ZooKeeper holds exactly the endpoints that were declared.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks import machine
from benchmarks.coordination_worker import (
    HEARTBEAT_MS,
    LINE_MAX_BYTES,
    SESSION_TIMEOUT_S,
    SILENCE_MS,
)
from benchmarks.workload import Workload
from coordinator import (
    CoordinationError,
    Coordinator,
    EmbeddedZooKeeper,
    Placement,
    RouterRecord,
    Session,
    check_placements,
)
from coordinator.fourletter import four_letter, parse_mntr

PAPER_LATENCY_MS: Final = {2_000: 10.0, 10_000: 20.0}
"""What the paper gives in words for the average latency; the rest is only drawn."""
CHROOT: Final = "/bench"
CONVERGE_TIMEOUT_S: Final = 120.0
COMMAND_TIMEOUT_S: Final = 240.0
CLOSE_TIMEOUT_S: Final = 30.0
CHECK_INTERVAL_S: Final = 0.25
FILES_PER_LINK: Final = 2
FILES_RESERVED: Final = 2_000
"""Sessions, listeners and the rest."""

Progress = Callable[[str], None]


class BenchmarkError(Exception):
    """The run could not be done, or its routes never converged."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    workload: Workload = field(default_factory=Workload)
    subscribers: tuple[int, ...] = (2_000, 4_000, 6_000, 8_000, 10_000)
    workers: int = 4
    reserve_core: bool = True
    """Keep the brokers off one core. ZooKeeper has a machine of its own wherever latency matters."""

    @property
    def broker_cores(self) -> list[int]:
        """The cores the brokers are confined to; none means all."""
        return machine.core_numbers()[1:] if self.reserve_core else []


@dataclass(frozen=True, slots=True)
class Point:
    """The measurement at one number of subscribers."""

    subscribers: int
    joined: int
    """How many of them joined for this point."""
    zk_latency_avg_ms: float
    zk_latency_max_ms: float
    znodes: int
    watches: int
    converged_s: float
    """From the first declaration until every route was right."""
    join_s: float
    """From the first declaration until every edge had answered the last one."""
    zk_requests: int
    """Requests the server got from `srst` until all routes were right."""
    zk_cpu_s: float
    brokers_cpu_s: float
    others_cpu_s: float
    """Processor time that went to processes which have nothing to do with the run: the noise."""
    hints: int
    mirror_reads: int
    links_up: int


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run."""

    points: tuple[Point, ...]
    start_s: float
    """Until all brokers were registered."""
    publish_s: float
    """Until all publishers were declared, all topics assigned and all routes right."""
    idle_zk_requests_per_s: float
    """What all brokers ask of ZooKeeper when nothing happens, after the last point."""
    memory_mib: float
    machine: dict[str, Any]
    settings: dict[str, Any]

    def to_record(self) -> dict[str, Any]:
        """What is saved as JSON."""
        return asdict(self)


class _WorkerProcess:
    """One worker, asked one thing at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "_WorkerProcess":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.coordination_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_MAX_BYTES,
            # Ctrl-C is for us; the workers end when we close their input.
            start_new_session=True,
        )
        return cls(process)

    async def ask(self, **command: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                stdin.write(json.dumps(command).encode() + b"\n")
                await stdin.drain()
                line = await stdout.readline()
        except TimeoutError:
            raise BenchmarkError(
                f"a worker did not {command['do']} within {COMMAND_TIMEOUT_S:g} s: try a smaller size"
            ) from None
        except ConnectionError as error:
            raise BenchmarkError(f"a worker is gone ({error}): its own message is above") from None
        if not line:
            raise BenchmarkError(f"a worker ended while asked to {command['do']}: its own message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def _worker_processes(count: int) -> AsyncIterator[list[_WorkerProcess]]:
    workers: list[_WorkerProcess] = []
    try:
        while len(workers) < count:
            workers.append(await _WorkerProcess.start())
        yield workers
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))


class _Run:
    """One run, while its ZooKeeper and its workers are up."""

    def __init__(
        self,
        settings: Settings,
        zookeeper: EmbeddedZooKeeper,
        coordinator: Coordinator,
        workers: Sequence[_WorkerProcess],
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._workload = settings.workload
        self._zookeeper = zookeeper
        self._coordinator = coordinator
        self._workers = workers
        self._progress = progress
        self._leader: str | None = None
        self._assignments: dict[str, tuple[str | None, str | None]] = {}
        coordinator.watch_leader(self._on_leader)

    def _on_leader(self, leader: str | None, _epoch: int) -> None:
        self._leader = leader

    async def start_brokers(self) -> float:
        """Start all brokers; returns how long that took."""
        workload, count = self._workload, len(self._workers)
        began_s = time.monotonic()
        await asyncio.gather(
            *(
                worker.ask(
                    do="prepare",
                    cores=self._settings.broker_cores,
                    workload=workload.to_record(),
                    routers=workload.router_names[index::count],
                    edges=workload.edge_names[index::count],
                )
                for index, worker in enumerate(self._workers)
            )
        )
        for what in ("routers", "edges"):
            await self._ask_all(do=f"start_{what}", hosts=self._zookeeper.hosts, chroot=CHROOT)
            self._progress(f"{what} registered after {time.monotonic() - began_s:.1f} s")
        return time.monotonic() - began_s

    async def publish(self) -> float:
        """Declare all publishers; returns how long it took until all their topics had routes."""
        began_s = time.monotonic()
        _no_refusals(await self._ask_all(do="publish"))
        self._progress(f"publishers declared after {time.monotonic() - began_s:.1f} s")
        while await self._learn_assignments():
            _check_time(began_s, ["topics without a primary or a backup"])
            await asyncio.sleep(CHECK_INTERVAL_S)
        converged_s = await self._wait_converged(0, began_s) - began_s
        self._progress(f"{self._workload.topics} topics assigned and routed after {converged_s:.1f} s")
        return converged_s

    async def join(self, before: int, subscribers: int) -> Point:
        """Let subscribers join until there are `subscribers`; measure."""
        statistics_before = await self._statistics()
        zk_cpu_before_s = self._zookeeper_cpu_s()
        own_before_s, busy_before_s = time.process_time(), machine.busy_time_s()
        await self._four_letter("srst")
        began_s = time.monotonic()
        _no_refusals(await self._ask_all(do="join", first=before, end=subscribers))
        join_s = time.monotonic() - began_s
        converged_at_s = await self._wait_converged(subscribers, began_s)
        server = await self._mntr()
        statistics = await self._statistics()
        zk_cpu_s = self._zookeeper_cpu_s() - zk_cpu_before_s
        brokers_cpu_s = statistics["cpu_s"] - statistics_before["cpu_s"]
        others_cpu_s = machine.busy_time_s() - busy_before_s - zk_cpu_s - brokers_cpu_s
        others_cpu_s -= time.process_time() - own_before_s
        await self._check_tree(subscribers)
        # Counted last: a watch that has just fired is set again only when its broker has read.
        tree = await self._mntr()
        point = Point(
            subscribers=subscribers,
            joined=subscribers - before,
            zk_latency_avg_ms=server["zk_avg_latency"],
            zk_latency_max_ms=server["zk_max_latency"],
            znodes=int(tree["zk_znode_count"]),
            watches=int(tree["zk_watch_count"]),
            converged_s=round(converged_at_s - began_s, 3),
            join_s=round(join_s, 3),
            zk_requests=int(server["zk_packets_received"]),
            zk_cpu_s=round(zk_cpu_s, 2),
            brokers_cpu_s=round(brokers_cpu_s, 2),
            others_cpu_s=round(max(0.0, others_cpu_s), 2),
            hints=int(statistics["hints"] - statistics_before["hints"]),
            mirror_reads=int(statistics["mirror_reads"] - statistics_before["mirror_reads"]),
            links_up=int(statistics["links_up"]),
        )
        self._progress(
            f"{subscribers} subscribers: joined in {point.join_s:.1f} s, routes right after "
            f"{point.converged_s:.1f} s, ZooKeeper {point.zk_latency_avg_ms:.2f} ms on average"
        )
        return point

    async def idle(self, seconds: float) -> tuple[float, float]:
        """Watch the brokers do nothing; returns requests per second and the memory of all workers."""
        await self._four_letter("srst")
        await asyncio.sleep(seconds)
        requests = (await self._mntr())["zk_packets_received"]
        return round(requests / seconds, 1), round((await self._statistics())["memory_mib"], 1)

    # Details

    async def _ask_all(self, **command: Any) -> list[dict[str, Any]]:
        return await asyncio.gather(*(worker.ask(**command) for worker in self._workers))

    async def _learn_assignments(self) -> int:
        """Read who serves which topic and tell the workers; returns how many topics lack someone."""
        records = await self._coordinator.topics()
        self._assignments = {name: (record.primary, record.backup) for name, record in records.items()}
        missing = self._workload.topics - sum(None not in pair for pair in self._assignments.values())
        if not missing:
            await self._ask_all(do="assign", assignments=self._assignments)
        return missing

    async def _wait_converged(self, subscribers: int, began_s: float) -> float:
        """Wait until all routes are right; returns when that was first seen.

        The assignments are read again afterwards: if the leader has moved topics meanwhile, what was
        compared was out of date, and the wait goes on.
        """
        while True:
            answers = await self._ask_all(do="check", subscribers=subscribers)
            seen_s = time.monotonic()
            wrong = [example for answer in answers for example in answer["examples"]]
            if not wrong:
                return seen_s
            _check_time(began_s, wrong)
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _check_tree(self, subscribers: int) -> None:
        """Compare ZooKeeper's own content with what was declared."""
        workload = self._workload
        if self._leader is None:
            raise BenchmarkError("there is no leader")
        assignments = self._assignments
        if await self._learn_assignments() or self._assignments != assignments:
            raise BenchmarkError("topics moved during the measurement: the machine is too busy for it")
        routers = await _routers(self._coordinator)
        if problems := list(
            check_placements({name: Placement(*pair) for name, pair in assignments.items()}, routers)
        ):
            raise BenchmarkError(f"{len(problems)} topics are badly placed: {problems[0]}")
        declared = Counter(
            (declaration.topic, declaration.kind, declaration.edge, declaration.endpoint)
            for declaration in (*workload.publishers(), *workload.subscribers(0, subscribers))
        )
        topics = workload.topic_names
        found = await asyncio.gather(*(self._coordinator.endpoints(topic) for topic in topics))
        registered = Counter(
            (topic, endpoint.kind, endpoint.edge, endpoint.endpoint_id)
            for topic, endpoints in zip(topics, found, strict=True)
            for endpoint in endpoints
        )
        if registered != declared:
            raise BenchmarkError(
                f"ZooKeeper holds {registered.total()} endpoints, {declared.total()} were declared"
            )

    async def _statistics(self) -> Counter[str]:
        totals: Counter[str] = Counter()
        for statistics in await self._ask_all(do="statistics"):
            totals.update(statistics)
        return totals

    async def _four_letter(self, word: str) -> str:
        return await four_letter("127.0.0.1", self._zookeeper.members[0].client_port, word, timeout_s=20.0)

    async def _mntr(self) -> dict[str, float]:
        fields = parse_mntr(await self._four_letter("mntr"))
        return {name: value for name, value in fields.items() if isinstance(value, float)}

    def _zookeeper_cpu_s(self) -> float:
        return machine.processor_time_s(self._zookeeper.members[0].pid)


async def _routers(coordinator: Coordinator) -> dict[str, RouterRecord]:
    found: asyncio.Future[dict[str, RouterRecord]] = asyncio.get_running_loop().create_future()

    def first(routers: dict[str, RouterRecord]) -> None:
        if not found.done():
            found.set_result(routers)

    watch = coordinator.watch_routers(first)
    try:
        return await found
    finally:
        watch.cancel()


def _no_refusals(answers: Sequence[dict[str, Any]]) -> None:
    refused = [reason for answer in answers for reason in answer["refused"]]
    if refused:
        raise BenchmarkError(f"endpoints were refused: {refused[0]}")


def _check_time(began_s: float, wrong: Sequence[str]) -> None:
    if time.monotonic() - began_s > CONVERGE_TIMEOUT_S:
        raise BenchmarkError(f"routes are not right after {CONVERGE_TIMEOUT_S:g} s: {'; '.join(wrong[:5])}")


def check_settings(settings: Settings) -> None:
    """Raise BenchmarkError for what cannot be run here."""
    workload = settings.workload
    if workload.routers < 2:
        raise BenchmarkError(f"routers is {workload.routers}: a primary and a backup need two")
    if list(settings.subscribers) != sorted(set(settings.subscribers)) or not settings.subscribers:
        raise BenchmarkError(f"subscribers are {settings.subscribers}: give growing numbers")
    # In the worst case a worker's edges are linked to all routers and its routers to all edges.
    links = FILES_PER_LINK * workload.lans * workload.routers // settings.workers
    limit = machine.raise_file_limit()
    if links + FILES_RESERVED > limit:
        raise BenchmarkError(
            f"a worker may need {links + FILES_RESERVED} open files, the limit is {limit}: "
            "raise it (ulimit -Hn), or use more workers"
        )


async def measure(settings: Settings, progress: Progress, idle_s: float = 5.0) -> Result:
    """Do the whole experiment."""
    check_settings(settings)
    description = machine.describe()
    zookeeper = EmbeddedZooKeeper()
    await asyncio.to_thread(zookeeper.start)
    try:
        session = Session(zookeeper.hosts, CHROOT, session_timeout_s=SESSION_TIMEOUT_S)
        await session.start()
        try:
            coordinator = Coordinator(session)
            await coordinator.start()
            async with _worker_processes(settings.workers) as workers:
                run = _Run(settings, zookeeper, coordinator, workers, progress)
                start_s = await run.start_brokers()
                publish_s = await run.publish()
                points = []
                before = 0
                for subscribers in settings.subscribers:
                    points.append(await run.join(before, subscribers))
                    before = subscribers
                idle_rate, memory_mib = await run.idle(idle_s)
                progress("closing")
            await coordinator.close()
        finally:
            await session.close()
    except CoordinationError as error:
        raise BenchmarkError(f"ZooKeeper did not keep up: {error}") from error
    finally:
        await asyncio.to_thread(zookeeper.stop)
    return Result(
        points=tuple(points),
        start_s=round(start_s, 3),
        publish_s=round(publish_s, 3),
        idle_zk_requests_per_s=idle_rate,
        memory_mib=memory_mib,
        machine=description,
        settings={
            **settings.workload.to_record(),
            "publishers": settings.workload.topics,
            "workers": settings.workers,
            "broker_cores": settings.broker_cores or machine.core_numbers(),
            "heartbeat_ms": HEARTBEAT_MS,
            "silence_ms": SILENCE_MS,
            "session_timeout_s": SESSION_TIMEOUT_S,
        },
    )


def table(result: Result) -> str:
    """The points as a Markdown table, beside the paper's mark."""
    lines = [
        "| subscribers | latency avg, ms | paper, ms | latency max, ms | znodes | watches | join, s "
        "| converged, s | requests |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for point in result.points:
        mark = PAPER_LATENCY_MS.get(point.subscribers)
        paper = "" if mark is None else f"{mark:g}"
        lines.append(
            f"| {point.subscribers:,} | {point.zk_latency_avg_ms:.2f} | {paper} "
            f"| {point.zk_latency_max_ms:.0f} | {point.znodes:,} | {point.watches:,} | {point.join_s:.1f} "
            f"| {point.converged_s:.1f} | {point.zk_requests:,} |"
        )
    return "\n".join(lines)
