"""A long row of crashes: a routing broker is killed at a random moment, started again, and so on.

The load of FRAME's experiment, smaller, runs all the time. A crash comes only when the last one
is overcome (every topic has a primary and a backup that are linked to both edges): the guarantee
is about one crash at a time. In the end no topic may have lost more messages in a row than it
tolerates, and no subscriber may have seen a message twice or out of order.
"""

import asyncio
import random
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks import machine
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
from benchmarks.frame_workload import CATEGORIES, categories_of
from overlay.limits import SECOND_NS
from topology.errors import DriverError

OVERCOME_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.1
_FOR_EVER_NS: Final = 2**62
_ROUTERS: Final = (PRIMARY, BACKUP)


@dataclass(frozen=True, slots=True)
class Settings:
    """One row of crashes."""

    setup: Setup
    count: int
    seed: int = 1
    pause_most_s: float = 1.0
    """A crash comes at a random moment of this time after the last one is overcome."""


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Do the whole row; `ok` says whether every promise was kept."""
    description = machine.describe()
    randomness = random.Random(settings.seed)
    crashes: list[dict[str, Any]] = []
    async with running(settings.setup, say) as testbed:
        await testbed.warm_up()
        await testbed.wait_for(lambda: is_whole(testbed), "a whole overlay", OVERCOME_TIMEOUT_S)
        await testbed.measure(time.monotonic_ns(), _FOR_EVER_NS)
        began_s = time.monotonic()
        for number in range(1, settings.count + 1):
            crashes.append(await _crash(testbed, randomness, settings.pause_most_s))
            if number % 10 == 0 or number == settings.count:
                say(f"{number} of {settings.count} crashes, {time.monotonic() - began_s:.0f} s")
        sent, received = await testbed.results(0)
        memory = testbed.memory_mib()
        dropped = {
            name: (await testbed.status(name))["core"]["dropped"] for name in (*_ROUTERS, INGRESS, EGRESS)
        }
    categories = _categories(settings.setup.topics, received)
    kinds = categories_of(settings.setup.topics)
    broken = [row["category"] for row in categories if row["topics_beyond_tolerance"]]
    return {
        "ok": not broken and not received["duplicates"] and not received["reordered"],
        "crashes": len(crashes),
        "topics": settings.setup.topics,
        "config": settings.setup.mode,
        "seconds": round(time.monotonic() - began_s, 1),
        "lost": received["lost"],
        "duplicates": received["duplicates"],
        "reordered": received["reordered"],
        "offered": sum(sent["offered"]),
        "delivered": sum(received["delivered"]),
        "categories": categories,
        "memory_mib": memory,
        "dropped": dropped,
        "publisher": {"slipped_periods": sent["slipped_periods"], "latest_send_ms": sent["latest_send_ms"]},
        "history": crashes,
        "slow_windows": [
            {
                "after_crash": sum(crash["killed_ns"] <= end_ns for crash in crashes),
                "after_ms": _since_crash_ms(crashes, end_ns),
                "peaks_ms": peaks,
            }
            for end_ns, peaks in received["slow_windows"]
        ],
        "gaps": [
            {
                "after_crash": sum(crash["killed_ns"] <= at_ns for crash in crashes),
                "after_ms": _since_crash_ms(crashes, at_ns),
                "category": kinds[received["numbers"][str(topic_id)]],
                "topic": received["numbers"][str(topic_id)],
                "messages": run,
            }
            for at_ns, topic_id, run in received["gaps"]
        ],
        "settings": asdict(settings),
        "machine": description,
    }


async def _crash(testbed: Testbed, randomness: random.Random, pause_most_s: float) -> dict[str, Any]:
    """Kill one of the two routing brokers, start it again, wait until all is as before."""
    victim = randomness.choice(_ROUTERS)
    await asyncio.sleep(randomness.uniform(0, pause_most_s))
    killed_ns = time.monotonic_ns()
    await testbed.child(victim).kill()
    await testbed.start_broker(victim)
    started_s = (time.monotonic_ns() - killed_ns) / SECOND_NS
    await testbed.wait_for(lambda: is_whole(testbed), f"{victim}'s return", OVERCOME_TIMEOUT_S)
    return {
        "router": victim,
        "killed_ns": killed_ns,
        "started_s": round(started_s, 2),
        "overcome_s": round((time.monotonic_ns() - killed_ns) / SECOND_NS, 2),
    }


def _since_crash_ms(crashes: list[dict[str, Any]], at_ns: int) -> float | None:
    """How long after the last crash before it something was noticed."""
    before = [crash["killed_ns"] for crash in crashes if crash["killed_ns"] <= at_ns]
    return round((at_ns - before[-1]) / 1e6, 1) if before else None


async def is_whole(testbed: Testbed) -> bool:
    """Every topic has both routing brokers, and every link that a crash would need is up."""
    try:
        statuses = {name: await testbed.status(name) for name in (*_ROUTERS, INGRESS, EGRESS)}
    except DriverError:
        return False
    topics = testbed.setup.topics
    for name in _ROUTERS:
        status = statuses[name]
        linked = {(link["role"], link["peer"]) for link in status["links"] if link["up"]}
        others = {("edge", INGRESS), ("edge", EGRESS), ("router", *(set(_ROUTERS) - {name}))}
        served = len(status["primary_of"]) + len(status["backup_of"])
        routed = sum(bool(edges) for edges in status["routes"].values())
        if served != topics or routed != topics or not others <= linked:
            return False
    return all(
        {topic["primary"], topic["backup"]} == set(_ROUTERS)
        for edge in (INGRESS, EGRESS)
        for topic in statuses[edge]["core"]["topics"]
    )


def _categories(topics: int, received: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = categories_of(topics)
    runs: list[list[int]] = [[] for _ in CATEGORIES]
    for topic_id, number in received["numbers"].items():
        runs[kinds[number]].append(received["longest_run"][topic_id])
    return [
        {
            "category": category.number,
            "loss_tolerance": category.loss_tolerance,
            "topics": len(runs[category.number]),
            "longest_loss_run": max(runs[category.number]),
            "topics_beyond_tolerance": 0
            if category.loss_tolerance is None
            else sum(run > category.loss_tolerance for run in runs[category.number]),
            "late": received["late"][category.number],
            "delivered": received["delivered"][category.number],
            "peak_ms": round(received["peak_ms"][category.number], 1),
        }
        for category in CATEGORIES
    ]


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        f"{result['crashes']} crashes in {result['seconds']:.0f} s, {result['offered']:,} messages offered, "
        f"{result['delivered']:,} delivered, {result['lost']} lost, {result['duplicates']} duplicates, "
        f"{result['reordered']} out of order: {'every promise kept' if result['ok'] else 'A PROMISE BROKEN'}",
        "",
        "| category | loss tolerance | topics | longest loss run | topics beyond | late | peak, ms |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["categories"]:
        tolerance = "∞" if row["loss_tolerance"] is None else row["loss_tolerance"]
        lines.append(
            f"| {row['category']} | {tolerance} | {row['topics']} | {row['longest_loss_run']} "
            f"| {row['topics_beyond_tolerance']} | {row['late']} of {row['delivered']} "
            f"| {row['peak_ms']:.0f} |"
        )
    return "\n".join(lines)
