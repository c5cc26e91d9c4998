"""What tracing costs real brokers: their processor time per message, sockets and disk included.

An edge, a routing broker and an edge, each a process of its own on one core, carry some thousand
messages from LAN to LAN in short turns: with their tracing on, paused, and paused once more as a
control, in random order. What counts is the processor time of each process per message, because that is
what limits a broker's throughput.

Two processes that run the same code differ by some percent, because of where their memory happens to be;
therefore tracing is switched in one. A core may be half as fast a second later, whatever we do, but hardly
within a hundredth of one. Therefore each turn is compared with the paused ones of the same round, and of
a thousand such comparisons the median is given, with the interval that holds the true one in 95 of 100
cases, whatever their distribution. What the control differs by is what the measurement cannot tell.

Turns are too short to have the writing of records, four times a second, in the right ones. That is
measured alone, as the processor time of a `TraceRecorder` that gets as many records as a broker with
nothing but messages to do, and added. What a paused tracer costs is a look at each run of messages
that leaves: `benchmarks.instructions` compares with none at all.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.comparison import median_interval
from benchmarks.processes import ProcessorUse
from benchmarks.tracing_worker import HEARTBEAT_MS
from clients import Client, Publisher, Subscription
from coordinator.embedded import EmbeddedZooKeeper
from overlay.errors import IsthmusError
from overlay.trace import Event
from runtime.compiled import compiled_modules
from runtime.tracing import FLUSH_INTERVAL_S, TraceRecorder, TraceSettings

BATCH: Final = 200
FLUSHES: Final = 20
SETTLE_S: Final = 0.002
"""Between turns: what is still acknowledged is not the next turn's."""
PAYLOAD: Final = bytes(16)
QUIET_S: Final = 30.0
"""Give up if nothing arrives for this long."""
ALLOWED_PERCENT: Final = 3.0
"""Of a broker's throughput, with `JUDGED` of the messages traced."""
JUDGED: Final = 0.01
PLACES: Final = ("ingress edge", "routing broker", "egress edge")
ALL: Final = "all three"
WAYS: Final = ("off", "control", "on")

Say = Callable[[str], None]
Turn = dict[str, float]
"""Microseconds of processor time per message, by place."""


class TracingBenchmarkError(IsthmusError):
    """The measurement could not be made."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    seconds: float = 120.0
    """For the share that is judged; others have a quarter of it."""
    messages: int = 2_000
    """Per turn."""
    sampling: tuple[float, ...] = (JUDGED, 1.0)
    seed: int = 1


class Worker:
    """The process with the brokers of one place."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.locators: list[str] = []
        """Where its brokers listen, in the order of the beds."""

    async def answer(self) -> str:
        """A line it says."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), QUIET_S)
        if not line:
            raise TracingBenchmarkError("a process with brokers ended: see above for its reason")
        return line.decode()

    async def switch(self, command: str) -> None:
        """`trace` or `pause`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self.answer()

    def processor_ns(self) -> int:
        """Processor time of all its threads."""
        spent = 0
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended
                spent += int((thread / "schedstat").read_text().split()[0])
        return spent


@asynccontextmanager
async def _worker(task: dict[str, Any]) -> AsyncIterator[Worker]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.tracing_worker",
        json.dumps(task),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        worker = Worker(process)
        worker.locators = json.loads(await worker.answer())
        yield worker
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), QUIET_S)
        except TimeoutError:
            process.kill()
            await process.wait()


class Bed:
    """The clients that load the three brokers with one share of traced messages."""

    def __init__(self, sampling: float, workers: dict[str, Worker], seed: int) -> None:
        self.sampling = sampling
        self.turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
        self._workers = workers
        self._randomness = random.Random(seed)
        self._publisher: Publisher
        self._subscription: Subscription

    async def connect(self, stack: AsyncExitStack, number: int) -> None:
        """Connect to the brokers of this number."""
        ends = (self._workers[place].locators[number] for place in ("ingress edge", "egress edge"))
        clients = [Client([locator]) for locator in ends]
        for client in clients:
            await client.start()
            stack.push_async_callback(client.close)
        self._publisher = await clients[0].publisher("load")
        self._subscription = await clients[1].subscribe("load")
        await self._publisher.wait_for_subscribers(1, QUIET_S)

    async def measure(self, seconds: float, messages: int) -> None:
        """Take turns for a while."""
        await self._carry(messages)  # makes routes, warms caches
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s or not self.turns["on"]:
            for way in self._randomness.sample(WAYS, len(WAYS)):
                for worker in self._workers.values():
                    await worker.switch("trace" if way == "on" else "pause")
                await asyncio.sleep(SETTLE_S)
                before = [worker.processor_ns() for worker in self._workers.values()]
                await self._carry(messages)
                await asyncio.sleep(SETTLE_S)
                spent = zip(self._workers.items(), before, strict=True)
                turn = {place: (worker.processor_ns() - ns) / messages / 1e3 for (place, worker), ns in spent}
                self.turns[way].append(turn | {ALL: sum(turn.values())})

    async def _carry(self, messages: int) -> None:
        for start in range(0, messages, BATCH):
            await self._publisher.publish_many([PAYLOAD] * min(BATCH, messages - start))
        received = 0
        while received < messages:
            received += len(await self._subscription.receive_many(QUIET_S))


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run it; `ok` tells whether the judged share costs no broker more than it may, None if that is open."""
    description = machine.describe()
    before = ProcessorUse.now()
    costs: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        traces = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-tracing-")))
        zookeeper = EmbeddedZooKeeper()
        await asyncio.to_thread(zookeeper.start)
        stack.push_async_callback(asyncio.to_thread, zookeeper.stop)
        # The load has the first core, the brokers share the last.
        cores = machine.core_numbers()
        machine.confine(cores[:1])
        stack.callback(machine.confine, cores)
        workers = {}
        for place in PLACES:
            brokers = [_options(place, sampling, traces) for sampling in settings.sampling]
            task = {"zookeeper": zookeeper.hosts, "cores": cores[-1:], "brokers": brokers}
            workers[place] = await stack.enter_async_context(_worker(task))
        for number, sampling in enumerate(settings.sampling):
            bed = Bed(sampling, workers, settings.seed)
            await bed.connect(stack, number)
            seconds = settings.seconds if sampling == JUDGED else settings.seconds / 4
            say(f"{100 * sampling:g} % traced, {seconds:g} s")
            await bed.measure(seconds, settings.messages)
            costs.append(_cost(bed, writing_us(sampling, traces / "alone")))
    return {
        "ok": judge(costs),
        "allowed_pct": ALLOWED_PERCENT,
        "compiled": bool(compiled_modules()),
        "costs": costs,
        "settings": asdict(settings),
        "stolen_pct": ProcessorUse.now().stolen_pct(before),
        "heartbeat_ms": HEARTBEAT_MS,
        "machine": description,
    }


def _options(place: str, sampling: float, traces: Path) -> dict[str, Any]:
    """The broker of a place."""
    options: dict[str, Any] = {
        "id": place.replace(" ", "-"),
        "chroot": f"/tracing-{sampling:g}",
        "trace_dir": str(traces / f"{sampling:g}"),
        "trace_sample": sampling,
    }
    if place != "routing broker":
        options["lan"] = "a" if place == "ingress edge" else "b"
    return options


def writing_us(sampling: float, folder: Path) -> float:
    """Microseconds of processor time per message for getting records to disk, one per traced message.

    At the rate of a broker that takes a microsecond for each message.
    """
    records = round(sampling * FLUSH_INTERVAL_S * 1e6)
    recorder = TraceRecorder.here(TraceSettings(folder, sampling), f"writer-{sampling:g}", "edge")
    spent_s = 0.0
    for flush in range(FLUSHES + 1):
        for sequence in range(records):
            recorder.log.record(Event.DISPATCHED, 1, 1, sequence)
        began_s = time.process_time()
        recorder.flush()
        while recorder.is_behind:
            time.sleep(0.001)
        if flush:  # the first one opens the segment
            spent_s += time.process_time() - began_s
    recorder.close()
    return 1e6 * spent_s / FLUSHES / (records / sampling)


def judge(costs: Sequence[dict[str, Any]]) -> bool | None:
    """Whether the judged share costs no broker more than it may; None if this run cannot tell."""
    judged = [place for cost in costs if cost["sampling"] == JUDGED for place in cost["places"]]
    if any(place["interval_pct"][0] > ALLOWED_PERCENT for place in judged):
        return False
    blurred = any(abs(end) > ALLOWED_PERCENT / 2 for place in judged for end in place["control_pct"])
    if not judged or blurred or any(place["interval_pct"][1] > ALLOWED_PERCENT for place in judged):
        return None
    return True


def _cost(bed: Bed, written_us: float) -> dict[str, Any]:
    places = []
    for place in (*PLACES, ALL):
        off, control, on = ([turn[place] for turn in bed.turns[way]] for way in WAYS)
        off_us = statistics.median(off)
        written_pct = 100 * written_us * (len(PLACES) if place == ALL else 1) / off_us
        # Both paused turns of a round are what the traced one is compared with: that is less noisy.
        paused = [(a + b) / 2 for a, b in zip(off, control, strict=True)]
        more = sorted(100 * (b / a - 1) + written_pct for a, b in zip(paused, on, strict=True))
        places.append(
            {
                "place": place,
                "off_us_per_message": round(off_us, 3),
                "more_pct": round(statistics.median(more), 2),
                "interval_pct": [round(end, 2) for end in median_interval(more)],
                "of_which_writing_pct": round(written_pct, 2),
                "control_pct": [
                    round(end, 2)
                    for end in median_interval([100 * (b / a - 1) for a, b in zip(off, control, strict=True)])
                ],
                "deciles_pct": [round(more[len(more) * tenth // 10], 1) for tenth in range(1, 10)],
            }
        )
    return {"sampling": bed.sampling, "rounds": len(bed.turns["on"]), "places": places}


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    verdict = {
        True: "costs no broker more than",
        False: "costs a broker more than",
        None: "could not be told to cost more or less than",
    }[result["ok"]]
    lines = [
        f"{'compiled' if result['compiled'] else 'interpreted'}, turns of "
        f"{result['settings']['messages']:,} messages: {100 * JUDGED:g} % traced {verdict} "
        f"{result['allowed_pct']:g} %",
        "",
        "| traced | broker | rounds | µs per message without | more | 95 % sure between | of it writing "
        "| control between |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines.extend(
        f"| {100 * cost['sampling']:g} % | {place['place']} | {cost['rounds']:,} "
        f"| {place['off_us_per_message']:.2f} | {place['more_pct']:+.1f} % "
        f"| {place['interval_pct'][0]:+.1f} and {place['interval_pct'][1]:+.1f} % "
        f"| {place['of_which_writing_pct']:.2f} % "
        f"| {place['control_pct'][0]:+.1f} and {place['control_pct'][1]:+.1f} % |"
        for cost in result["costs"]
        for place in cost["places"]
    )
    return "\n".join(lines)
