"""Hostile peers against real brokers: what others notice of it.

A testbed of processes. Messages flow from LAN a to LAN b with a deadline; a hostile process attacks the
edge broker of the subscribers (or, for a flood, of the publishers). Quiet and hostile windows take turns,
so that what the machine does besides falls on both. Others must lose nothing and keep their deadlines
under every attack, and a stalled subscriber must not move their p99 by a tenth. The p99 of some seconds is
that of a few messages, and a machine that stands still for a moment makes it ten times as long, with and
without an attack. So that takes many windows, and a comparison that a few of them cannot decide.
"""

import asyncio
import contextlib
import statistics
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks import machine
from benchmarks.comparison import VALUES_LEAST, ratio_interval
from benchmarks.hostile_peer import KINDS
from benchmarks.processes import ProcessorUse, open_files, resident_mib
from clients import Client, Publisher, Subscription
from overlay.locator import Locator
from overlay.qos import TopicQos
from topology.driver import Say, running
from topology.errors import DriverError
from topology.model import Topology, parse_topology
from topology.process_driver import ProcessDriver

TOPIC: Final = "measured"
STALLED: Final = "stalled-subscriber"
DEADLINE_MS: Final = 100.0
QOS: Final = TopicQos(period_ms=2, deadline_ms=DEADLINE_MS, loss_tolerance=0, retention=512)
COUNTS: Final = {
    "silent": 10_000,
    "idle": 10_000,
    "half-open": 5_000,
    "slow": 1_000,
    "huge-length": 200,
    "garbage": 200,
    STALLED: 1,
    "flood": 1,
}
STALLED_P99_RATIO_MOST: Final = 1.1
IN_TIME_LEAST_PCT: Final = 99.0
_SETTLE_S: Final = 0.5
_READY_TIMEOUT_S: Final = 60.0
_STAMP: Final = struct.Struct("<q")
_VERDICTS: Final = (False, None, True)
"""The worst first."""
_SAID: Final = {
    True: "others go on as before",
    False: "OTHERS NOTICE",
    None: "it could not be told whether others notice: more rounds are needed",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    attacks: tuple[str, ...] = tuple(KINDS)
    rounds: int = 3
    stalled_rounds: int = 40
    """With a stalled subscriber, where percentiles are compared."""
    window_s: float = 3.0
    rate_per_s: float = 500.0
    scale: float = 1.0
    """Multiplies the number of hostile connections."""


def topology() -> Topology:
    """A publisher's LAN and a subscribers'."""
    return parse_topology("lans: {a: {edges: 1}, b: {edges: 1}}\nrouters: 2\n")


@dataclass(frozen=True, slots=True)
class Window:
    """What subscribers saw while a window lasted."""

    sent: int
    lost: int
    p50_ms: float
    p99_ms: float
    in_time_pct: float


class _Flow:
    """One publisher and one subscriber, in this process: one clock for both ends."""

    def __init__(self, publisher: Publisher, subscription: Subscription, rate_per_s: float) -> None:
        self._publisher = publisher
        self._subscription = subscription
        self._interval_s = 1 / rate_per_s

    async def window(self, seconds: float) -> Window:
        """Publish for that long and take everything that arrives."""
        first = self._publisher.sequence + 1
        receiving = asyncio.create_task(self._receive(first, round(seconds / self._interval_s)))
        next_s = time.monotonic()
        for _ in range(round(seconds / self._interval_s)):
            await self._publisher.publish(_STAMP.pack(time.monotonic_ns()))
            next_s += self._interval_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        sent = self._publisher.sequence + 1 - first
        latencies_ms = sorted(await receiving)
        in_time = sum(latency <= DEADLINE_MS for latency in latencies_ms)
        return Window(
            sent,
            sent - len(latencies_ms),
            round(_percentile(latencies_ms, 0.5), 3),
            round(_percentile(latencies_ms, 0.99), 3),
            round(100 * in_time / max(1, sent), 2),
        )

    async def _receive(self, first: int, count: int) -> list[float]:
        latencies_ms: list[float] = []
        with contextlib.suppress(TimeoutError):
            while len(latencies_ms) < count:
                message = await self._subscription.receive(5.0)
                if message.sequence >= first:
                    latencies_ms.append((time.monotonic_ns() - _STAMP.unpack(message.payload)[0]) / 1e6)
        return latencies_ms


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run all attacks; `ok` says whether others could go on as before, None if that cannot be told."""
    description, before = machine.describe(), ProcessorUse.now()
    results = []
    async with running(topology(), ProcessDriver) as driver, contextlib.AsyncExitStack() as stack:
        edges = {node.lan: node for node in driver.nodes.values() if node.role == "edge"}
        sender = await _client(stack, edges["a"].locator)
        receiver = await _client(stack, edges["b"].locator)
        subscription = await receiver.subscribe(TOPIC, QOS)
        if "flood" in settings.attacks:
            await stack.enter_async_context(_hostile_peer("sink", edges["b"].locator, 1))
        publisher = await sender.publisher(TOPIC, QOS)
        await publisher.wait_for_subscribers(1, 30)
        flow = _Flow(publisher, subscription, settings.rate_per_s)
        await flow.window(1.0)  # routes settle
        for attack in settings.attacks:
            victim = edges["a" if attack == "flood" else "b"]
            assert victim.child is not None
            result = await _attack(attack, victim.locator, victim.child.pid, flow, settings)
            say(_line(result))
            results.append(result)
        if dead := driver.died_unasked():
            raise DriverError(f"{', '.join(dead)} ended unasked; logs are in {driver.directory}")
    return {
        "ok": min((result["ok"] for result in results), key=_VERDICTS.index, default=None),
        "attacks": results,
        "deadline_ms": DEADLINE_MS,
        "stolen_pct": ProcessorUse.now().stolen_pct(before),
        "settings": asdict(settings),
        "machine": description,
    }


async def _client(stack: contextlib.AsyncExitStack, edge: str) -> Client:
    client = Client([edge])
    await client.start()
    stack.push_async_callback(client.close)
    return client


async def _attack(attack: str, locator: str, pid: int, flow: _Flow, settings: Settings) -> dict[str, Any]:
    quiet, hostile = [], []
    files, memory_mib = 0, 0.0
    count = max(1, round(COUNTS[attack] * (settings.scale if COUNTS[attack] > 1 else 1)))
    for _ in range(settings.stalled_rounds if attack == STALLED else settings.rounds):
        quiet.append(await flow.window(settings.window_s))
        async with _hostile_peer(attack, locator, count):
            await asyncio.sleep(_SETTLE_S)
            hostile.append(await flow.window(settings.window_s))
            files = max(files, open_files(pid))
            memory_mib = max(memory_mib, resident_mib(pid))
        await asyncio.sleep(_SETTLE_S)
    p99s = [[window.p99_ms for window in windows] for windows in (quiet, hostile)]
    low, ratio, high = ratio_interval(*p99s)
    lost = sum(window.lost for window in hostile)
    in_time_pct = min(window.in_time_pct for window in hostile)
    ok: bool | None = not lost and in_time_pct >= IN_TIME_LEAST_PCT
    if ok and attack == STALLED:
        ok = judge_stalled(low, high, len(quiet))
    return {
        "attack": attack,
        "connections": count,
        "ok": ok,
        "sent": sum(window.sent for window in hostile),
        "lost": lost,
        "in_time_pct": in_time_pct,
        "quiet_p99_ms": round(statistics.median(window.p99_ms for window in quiet), 2),
        "hostile_p99_ms": round(statistics.median(window.p99_ms for window in hostile), 2),
        "p99_ratio": round(ratio, 2),
        "p99_ratio_interval": [round(low, 2), round(high, 2)],
        "open_files_most": files,
        "memory_mib_most": round(memory_mib, 1),
        "quiet": [asdict(window) for window in quiet],
        "hostile": [asdict(window) for window in hostile],
    }


@contextlib.asynccontextmanager
async def _hostile_peer(attack: str, locator: str, count: int) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.hostile_peer", attack, str(Locator.parse(locator)), str(count)),
        TOPIC,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            if (await process.stdout.readline()).strip() != b"ready":
                raise DriverError(f"the hostile peer {attack} did not get going")
        yield
        if process.returncode is not None:
            raise DriverError(f"the hostile peer {attack} ended by itself: others had peace")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def judge_stalled(low: float, high: float, windows: int) -> bool | None:
    """Whether the p99 of others moved by less than a tenth; None if these windows cannot tell."""
    if windows < VALUES_LEAST:
        return None
    if low >= STALLED_P99_RATIO_MOST:
        return False
    return True if high < STALLED_P99_RATIO_MOST else None


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def _line(result: dict[str, Any]) -> str:
    low, high = result["p99_ratio_interval"]
    return (
        f"| {result['connections']} {result['attack']} | {result['sent']} | {result['lost']} "
        f"| {result['in_time_pct']:g} | {result['quiet_p99_ms']:g} | {result['hostile_p99_ms']:g} "
        f"| {result['p99_ratio']:g} | {low:g} to {high:g} "
        f"| {result['open_files_most']} | {result['memory_mib_most']:g} |"
    )


def summary(result: dict[str, Any]) -> str:
    """A result as a table."""
    lines = [
        f"{_SAID[result['ok']]}; deadline {result['deadline_ms']:g} ms, stolen {result['stolen_pct']:g} %",
        "",
        "| hostile | sent by others | lost | in time, % | p99 quiet, ms | p99 hostile, ms | ratio "
        "| 95 % sure | open files | memory, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *map(_line, result["attacks"]),
    ]
    return "\n".join(lines)
