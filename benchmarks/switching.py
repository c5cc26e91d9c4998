"""What something costs real brokers that can be switched while they run: processor time per message.

An edge, a routing broker and an edge, each a process of its own on one core, carry some thousand
messages from LAN to LAN in short turns: with it *on*, *off*, and off once more as a *control*, in random
order. What counts is the processor time of each process per message, sockets and all, because that is what
limits a broker's throughput. A broker also does things that no message asks for, and does them as often as it
has the time: that is measured while nothing is sent and taken off, by the duration of each turn. Otherwise
whatever makes the *clients* slower would seem to cost brokers.

A core may be half as fast a second later, whatever we do, but hardly within a tenth of one. Therefore each
turn is compared with those of the same round that were off, and the median of some hundred rounds counts.
But two processes that run the same code differ by some percent, because of where their memory happens to
be, and so do two topics in one process. Therefore there are several *beds*: brokers that are started anew,
with the topics of the ways exchanged. What is said is the median over the beds, with the interval that holds
the true one in 95 of 100 cases, whatever their distribution. What the control differs by is noise alone.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.comparison import VALUES_LEAST, median_interval
from benchmarks.frame_client import LoadClient
from coordinator.embedded import EmbeddedZooKeeper
from overlay.batch import (
    FRAME_OVERHEAD_BYTES,
    MESSAGE_HEADER,
    Run,
    decode_batch_header,
    decode_messages,
    encode_batch,
)
from overlay.errors import IsthmusError
from overlay.limits import FRAME_TARGET_BYTES, MILLISECOND_NS
from overlay.locator import Locator
from overlay.messages import UNKNOWN_CLOCK_SHIFT, EndpointKind
from overlay.qos import TopicQos

PUBLISH_NS: Final = 5_000
"""What a call of `publish` takes a client, about: so far apart messages are born."""
TICK_NS: Final = 10 * MILLISECOND_NS
SETTLE_S: Final = 0.02
"""After the last message of a turn: what it still causes, as acknowledgements, is not the next turn's."""
PAYLOAD: Final = bytes(16)
BED_S: Final = 10.0
"""How long brokers are measured before others are started."""
QUIET_S: Final = 30.0
"""Give up if nothing arrives for this long."""
PLACES: Final = ("ingress edge", "routing broker", "egress edge")
ALL: Final = "all three"
WAYS: Final = ("off", "control", "on")

Say = Callable[[str], None]
Turn = dict[str, float]
"""Microseconds of processor time per message, by place."""
Turns = Mapping[str, Sequence[Turn]]
"""Those of a bed, by way."""


class _Window:
    """What brokers spend while it is open."""

    def __init__(self, workers: Mapping[str, "Worker"]) -> None:
        self._workers = workers
        self._before_ns = {place: worker.processor_ns() for place, worker in workers.items()}
        self._began_s = time.monotonic()
        self.took_s = 0.0
        self.spent_us: dict[str, float] = {}
        """By place."""

    def close(self) -> None:
        """It ends now."""
        self.took_s = time.monotonic() - self._began_s
        self.spent_us = {
            place: (worker.processor_ns() - self._before_ns[place]) / 1e3
            for place, worker in self._workers.items()
        }


class SwitchingBenchmarkError(IsthmusError):
    """The measurement could not be made."""


class Worker:
    """The process of the broker at one place."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.locator = ""
        """Where its broker listens."""

    async def answer(self) -> str:
        """A line it says."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), QUIET_S)
        if not line:
            raise SwitchingBenchmarkError("a broker ended: see above for its reason")
        return line.decode().strip()

    async def switch(self, command: str) -> None:
        """Have its broker do one of `benchmarks.switching_worker.COMMANDS`."""
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
        "benchmarks.switching_worker",
        json.dumps(task),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        worker = Worker(process)
        worker.locator = await worker.answer()
        yield worker
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), QUIET_S)
        except TimeoutError:
            process.kill()
            await process.wait()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is switched, in which brokers, and for how long."""

    name: str
    on: str
    off: str
    topics: tuple[tuple[str, TopicQos], ...]
    """One for all ways, or one for each."""
    seconds: float
    """Of all beds together, but for what it takes to start them."""
    messages: int
    """Of a turn."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every broker."""

    @property
    def beds(self) -> int:
        """How often brokers are started anew."""
        return max(1, round(self.seconds / BED_S))


async def measure(plan: Plan, say: Say) -> list["Bed"]:
    """Take turns in one bed after the other; the load has the first core, the brokers share the last."""
    beds: list[Bed] = []
    async with AsyncExitStack() as stack:
        zookeeper = EmbeddedZooKeeper()
        await asyncio.to_thread(zookeeper.start)
        stack.push_async_callback(asyncio.to_thread, zookeeper.stop)
        cores = machine.core_numbers()
        machine.confine(cores[:1])
        stack.callback(machine.confine, cores)
        for number in range(plan.beds):
            say(f"{plan.name}: bed {number + 1} of {plan.beds}, {plan.seconds / plan.beds:.1f} s")
            task = {"zookeeper": zookeeper.hosts, "cores": cores[-1:]}
            beds.append(await _measure_bed(plan, number, task))
    return beds


async def _measure_bed(plan: Plan, number: int, task: dict[str, Any]) -> "Bed":
    async with AsyncExitStack() as stack:
        workers = {}
        for place in PLACES:
            broker = {**_broker_at(place), **plan.options, "chroot": f"/bed-{number}"}
            workers[place] = await stack.enter_async_context(_worker(task | {"broker": broker}))
        bed = Bed(workers, plan, number)
        await bed.connect(stack)
        await bed.measure(plan.seconds / plan.beds)
    return bed


def _broker_at(place: str) -> dict[str, Any]:
    """The broker of a place, less its folder in ZooKeeper."""
    options: dict[str, Any] = {"id": place.replace(" ", "-")}
    if place != "routing broker":
        options["lan"] = "a" if place == "ingress edge" else "b"
    return options


class Bed:
    """The clients that load three brokers, and what is switched in these."""

    def __init__(self, workers: Mapping[str, Worker], plan: Plan, number: int) -> None:
        self.turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
        self.unknown = dict.fromkeys(WAYS, 0)
        """Messages of unknown age."""
        self.idle_us_per_s: dict[str, float] = {}
        """Processor time of each place while nothing is sent."""
        self._workers = workers
        self._messages = plan.messages
        self._commands = {way: plan.on if way == "on" else plan.off for way in WAYS}
        self._topics = {way: plan.topics[(at + number) % len(plan.topics)] for at, way in enumerate(WAYS)}
        self._randomness = random.Random(number)
        self._sender = LoadClient(TICK_NS)
        self._receiver = LoadClient(TICK_NS, self._arrived)
        self._publishers: dict[str, _Publisher] = {}
        self._way = WAYS[0]
        self._missing = 0
        self._all_here = asyncio.Event()

    async def connect(self, stack: AsyncExitStack) -> None:
        """Connect to the edges and declare the topics."""
        for place, client in (("ingress edge", self._sender), ("egress edge", self._receiver)):
            await client.open(Locator.parse(self._workers[place].locator))
            stack.callback(client.close)
        made: dict[str, _Publisher] = {}
        for way, (name, qos) in self._topics.items():
            if name not in made:
                await self._receiver.declare(EndpointKind.SUBSCRIBER, name, qos)
                endpoint, topic_id = await self._sender.declare(EndpointKind.PUBLISHER, name, qos)
                made[name] = _Publisher(endpoint, topic_id)
            self._publishers[way] = made[name]

    async def measure(self, seconds: float) -> None:
        """Take turns for a while."""
        for way in WAYS:  # makes routes, warms caches
            await self._switch(way)
            await self._carry(way, self._frames(way))
        self.unknown = dict.fromkeys(WAYS, 0)
        windows: dict[str, list[_Window]] = {way: [] for way in WAYS}
        idle: list[_Window] = []
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s or not idle:
            for way in self._randomness.sample(WAYS, len(WAYS)):
                await self._switch(way)
                frames = self._frames(way)
                window = _Window(self._workers)
                await self._carry(way, frames)
                await asyncio.sleep(SETTLE_S)
                window.close()
                windows[way].append(window)
            window = _Window(self._workers)
            await asyncio.sleep(SETTLE_S)
            window.close()
            idle.append(window)
        idle_s = sum(window.took_s for window in idle)
        self.idle_us_per_s = {
            place: sum(window.spent_us[place] for window in idle) / idle_s for place in self._workers
        }
        for way in WAYS:
            self.turns[way] = [self._turn(window) for window in windows[way]]

    def _turn(self, window: _Window) -> Turn:
        turn = {
            place: (spent_us - window.took_s * self.idle_us_per_s[place]) / self._messages
            for place, spent_us in window.spent_us.items()
        }
        return turn | {ALL: sum(turn.values())}

    async def _switch(self, way: str) -> None:
        for worker in self._workers.values():
            await worker.switch(self._commands[way])

    def _frames(self, way: str) -> list[bytes]:
        """What a publisher would send that has just called `publish` so many times."""
        return self._publishers[way].frames(self._messages, self._sender.incarnation, time.monotonic_ns())

    async def _carry(self, way: str, frames: Sequence[bytes]) -> None:
        self._way, self._missing = way, self._messages
        self._all_here.clear()
        for frame in frames:
            self._sender.send(frame)
        here = asyncio.create_task(self._all_here.wait())
        ends = (here, self._sender.failed, self._receiver.failed)
        done, _ = await asyncio.wait(ends, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
        here.cancel()
        for end in done - {here}:
            end.result()
        if not done:
            raise SwitchingBenchmarkError(
                f"{self._missing} of {self._messages} messages have not arrived after {QUIET_S:g} s"
            )

    def _arrived(self, body: bytes, now_ns: int) -> None:
        header = decode_batch_header(body)
        first = next(decode_messages(body))
        if not first.born_ns or header.clock_shift_ns == UNKNOWN_CLOCK_SHIFT:
            self.unknown[self._way] += header.messages
        self._missing -= header.messages
        if self._missing <= 0:
            self._all_here.set()


class _Publisher:
    """Makes the frames of a publisher that calls `publish` for every message, as fast as a client can."""

    def __init__(self, endpoint: int, topic_id: int) -> None:
        self._endpoint = endpoint
        self._topic_id = topic_id
        self._sequence = 0

    def frames(self, messages: int, origin: int, now_ns: int) -> list[bytes]:
        """So many messages, the last one born now."""
        first, self._sequence = self._sequence + 1, self._sequence + messages
        oldest_ns = now_ns - (messages - 1) * PUBLISH_NS
        parts = [
            MESSAGE_HEADER.pack(
                self._topic_id, self._endpoint, first + at, oldest_ns + at * PUBLISH_NS, len(PAYLOAD)
            )
            + PAYLOAD
            for at in range(messages)
        ]
        per_frame = (FRAME_TARGET_BYTES - FRAME_OVERHEAD_BYTES) // len(parts[0])
        runs = (parts[start : start + per_frame] for start in range(0, messages, per_frame))
        return [encode_batch(0, origin, 0, (Run(len(run), b"".join(run)),), now_ns) for run in runs]


def compare(beds: Sequence[Turns], added_us: float = 0.0) -> list[dict[str, Any]]:
    """What it costs at each place and at all; `added_us` per message and broker was measured elsewhere."""
    places = []
    for place in (*PLACES, ALL):
        off_us = statistics.median(turn[place] for turns in beds for turn in turns["off"])
        added_pct = 100 * added_us * (len(PLACES) if place == ALL else 1) / off_us
        more = sorted(_more_pct(turns, place) + added_pct for turns in beds)
        control = [_control_pct(turns, place) for turns in beds]
        places.append(
            {
                "place": place,
                "off_us_per_message": round(off_us, 3),
                "more_pct": round(statistics.median(more), 2),
                "interval_pct": [round(end, 2) for end in median_interval(more)],
                "added_pct": round(added_pct, 2),
                "control_pct": [round(end, 2) for end in median_interval(control)],
                "beds_pct": [round(each, 1) for each in more],
            }
        )
    return places


def _more_pct(turns: Turns, place: str) -> float:
    """What being on costs in one bed, against both turns of the same round that were off."""
    off, control, on = ([turn[place] for turn in turns[way]] for way in WAYS)
    without = [(a + b) / 2 for a, b in zip(off, control, strict=True)]
    return statistics.median(100 * (b / a - 1) for a, b in zip(without, on, strict=True))


def _control_pct(turns: Turns, place: str) -> float:
    off, control = ([turn[place] for turn in turns[way]] for way in ("off", "control"))
    return statistics.median(100 * (b / a - 1) for a, b in zip(off, control, strict=True))


def judge(places: Sequence[dict[str, Any]], allowed_pct: float) -> bool | None:
    """Whether it costs no broker more than it may; None if this measurement cannot tell."""
    if not places or any(len(place["beds_pct"]) < VALUES_LEAST for place in places):
        return None
    if any(place["interval_pct"][0] > allowed_pct for place in places):
        return False
    controls = [place["control_pct"] for place in places]
    # Off and off must not differ, or something else than what was switched does; nor may they be so noisy.
    biased = any(not low <= 0 <= high for low, high in controls)
    blurred = any(abs(end) > allowed_pct / 2 for ends in controls for end in ends)
    if biased or blurred or any(place["interval_pct"][1] > allowed_pct for place in places):
        return None
    return True


VERDICTS: Final = {
    True: "costs no broker more than",
    False: "costs a broker more than",
    None: "could not be told to cost more or less than",
}


def table(costs: Sequence[tuple[str, int, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Lines of a table: for each cost a name, how many rounds, and what `compare` found."""
    lines = [
        "| | broker | rounds | µs per message without | more | 95 % sure between | control between |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines.extend(
        f"| {name} | {place['place']} | {rounds:,} "
        f"| {place['off_us_per_message']:.2f} | {place['more_pct']:+.1f} % "
        f"| {place['interval_pct'][0]:+.1f} and {place['interval_pct'][1]:+.1f} % "
        f"| {place['control_pct'][0]:+.1f} and {place['control_pct'][1]:+.1f} % |"
        for name, rounds, places in costs
        for place in places
    )
    return lines
