"""How soon brokers notice that another one is gone, and how often they are wrong about it.

FRAME's workload, small, runs through real broker processes while every core of the machine is kept
busy by processes that do nothing else. First nobody dies for a while: every connection that ends by
silence then is a false alarm. Then a routing broker is killed (SIGKILL), frozen (SIGSTOP) or cut off from
all edges, and the logs of both edges say when they noticed. Cuts are made by a relay between edges and
routing brokers, in a testbed of their own; there is none on the way of the others.
"""

import asyncio
import contextlib
import math
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.frame_crashes import OVERCOME_TIMEOUT_S, is_whole
from benchmarks.frame_testbed import (
    BACKUP,
    EGRESS,
    INGRESS,
    PRIMARY,
    Say,
    Setup,
    Testbed,
    running,
)
from runtime.process import wait_until
from topology.children import Child
from topology.errors import DriverError

NOTICE_TIMEOUT_S: Final = 10.0
KILLED: Final = "SIGKILL"
FROZEN: Final = "SIGSTOP"
CUT: Final = "cut"
_ROUTERS: Final = (PRIMARY, BACKUP)
_EDGES: Final = (INGRESS, EGRESS)


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    setup: Setup
    kills: int
    freezes: int
    cuts: int
    busy_seconds: float
    seed: int = 1


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """False alarms on a busy machine, then the time until ends are noticed."""
    description = machine.describe()
    randomness = random.Random(settings.seed)
    noticed: dict[str, list[float]] = {KILLED: [], FROZEN: [], CUT: []}
    hows = [KILLED] * settings.kills + [FROZEN] * settings.freezes
    randomness.shuffle(hows)
    async with _busy_testbed(settings.setup, say) as testbed:
        before, busy_before_s = await _silent_ends(testbed), machine.busy_time_s()
        began_s = time.monotonic()
        await asyncio.sleep(settings.busy_seconds)
        false_alarms = await _silent_ends(testbed) - before
        busy_cores = (machine.busy_time_s() - busy_before_s) / (time.monotonic() - began_s)
        say(f"{false_alarms} false alarms in {settings.busy_seconds:.0f} s, {busy_cores:.2f} cores busy")
        await _end_some(testbed, hows, noticed, randomness, say)
    if settings.cuts:
        async with _busy_testbed(replace(settings.setup, proxied=True), say) as testbed:
            await _end_some(testbed, [CUT] * settings.cuts, noticed, randomness, say)
    return {
        "silence_ms": settings.setup.silence_ms,
        "busy_seconds": settings.busy_seconds,
        "busy_cores": round(busy_cores, 2),
        "false_alarms": false_alarms,
        "detection": {how: spread(times) for how, times in noticed.items()},
        "settings": asdict(settings),
        "machine": description,
    }


@contextlib.asynccontextmanager
async def _busy_testbed(setup: Setup, say: Say) -> AsyncIterator[Testbed]:
    """A whole overlay under load, with all cores busy besides."""
    async with running(setup, say) as testbed:
        await testbed.warm_up()
        await _wait_whole(testbed)
        async with _all_cores_busy(testbed.directory):
            yield testbed
        if dead := testbed.died_unasked():
            raise DriverError(f"{', '.join(dead)} ended unasked; logs are in {testbed.directory}")


async def _end_some(
    testbed: Testbed,
    hows: Sequence[str],
    noticed: dict[str, list[float]],
    randomness: random.Random,
    say: Say,
) -> None:
    for number, how in enumerate(hows, 1):
        noticed[how] += await _end(testbed, randomness.choice(_ROUTERS), how)
        await _wait_whole(testbed)
        if number % 5 == 0:
            say(f"{number} of {len(hows)} ended")


async def _end(testbed: Testbed, victim: str, how: str) -> list[float]:
    """End a routing broker, or the way to it; gives the milliseconds until each edge had noticed."""
    await asyncio.sleep(0.1)
    logs = {edge: testbed.child(edge).log_path for edge in _EDGES}
    seen = {edge: len(losses_of(victim, log)) for edge, log in logs.items()}
    at_s = time.time()  # logs have wall time
    if how == CUT:
        await testbed.cut(victim)
    else:
        testbed.child(victim).signal(signal.Signals[how])
    try:
        if not await wait_until(
            lambda: all(len(losses_of(victim, log)) > seen[edge] for edge, log in logs.items()),
            NOTICE_TIMEOUT_S,
        ):
            raise DriverError(f"not all noticed the {how} of {victim} within {NOTICE_TIMEOUT_S:g} s")
        return [1e3 * (losses_of(victim, log)[seen[edge]] - at_s) for edge, log in logs.items()]
    finally:
        if how == CUT:
            await testbed.heal(victim)
        elif how == FROZEN:
            testbed.child(victim).signal(signal.SIGCONT)
        else:
            await testbed.child(victim).kill()
            await testbed.start_broker(victim)


def losses_of(router: str, log: Path) -> list[float]:
    """When an edge lost its link to a routing broker, as its log has it."""
    return [
        datetime.fromisoformat(line.split(" ", 1)[0]).timestamp()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if "routing broker disconnected" in line and f"router={router} " in line
    ]


async def _silent_ends(testbed: Testbed) -> int:
    """Connections between brokers that have ended by silence."""
    counters = [await testbed.counters(name) for name in (*_ROUTERS, *_EDGES)]
    return round(sum(each.get("connections_closed silent", 0) for each in counters))


async def _wait_whole(testbed: Testbed) -> None:
    await testbed.wait_for(lambda: is_whole(testbed), "a whole overlay", OVERCOME_TIMEOUT_S)


@contextlib.asynccontextmanager
async def _all_cores_busy(directory: Path) -> AsyncIterator[None]:
    burning = [
        Child(f"burn-{number}", "benchmarks.burn", [], directory)
        for number in range(machine.available_cores())
    ]
    try:
        for child in burning:
            await child.start()
        yield
    finally:
        await asyncio.gather(*(child.kill() for child in burning if child.is_alive))
        await asyncio.gather(*(child.stop() for child in burning))


def spread(times_ms: Sequence[float]) -> dict[str, float | int]:
    """Percentiles; empty without a single time."""
    if not times_ms:
        return {"noticed": 0}
    ordered = sorted(times_ms)

    def at(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 1)

    return {"noticed": len(ordered), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        f"{result['false_alarms']} false alarms in {result['busy_seconds']:g} s "
        f"with {result['busy_cores']:.1f} cores busy, silence {result['silence_ms']:g} ms",
        "",
        "| end | noticed by edges | p50, ms | p99, ms | max, ms |",
        "|---|---:|---:|---:|---:|",
    ]
    for how, spread in result["detection"].items():
        times = " | ".join(str(spread.get(name, "none")) for name in ("p50_ms", "p99_ms", "max_ms"))
        lines.append(f"| {how} | {spread['noticed']} | {times} |")
    return "\n".join(lines)
