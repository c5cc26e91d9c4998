"""A broker whose processor bears less than is offered: who loses how much, and who is still in time.

FRAME's workload through real processes. First the broker has a core to itself, all others the rest, and what
it needs of it is measured. Then it gets less (`benchmarks.throttle`), until what is offered is `factor` times
what passes. Topics must not lose more in a row than they tolerate, and messages with the shortest deadline
must be in time. What brokers counted as dropped is told beside it, over a slightly longer time: while
messages count, nobody is asked anything.

What a message costs changes with the load: batches grow, or windows shrink. So a share of the time that is
needed without overload is where the search begins, and `overload` of the result is what it came to.
"""

import asyncio
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

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
from benchmarks.frame_workload import CATEGORIES, categories_of, offered_rate, topics_per_category
from benchmarks.throttle import SHARE_LEAST, Throttle, throttled
from overlay.limits import SECOND_NS
from topology.errors import DriverError

NEED_S: Final = 6.0
"""How long it is measured what the broker needs, and what passes a throttled one."""
SEARCHED_MOST: Final = 6
"""Shares of the processor that are tried."""
NEAR: Final = 0.08
"""How far from the factor the overload may be for the search to end."""
SETTLE_S: Final = 4.0
"""How long after a change the windows need to find their size."""
PASSED_LEAST: Final = 0.95
"""Of what is offered, before the broker gets less time."""
USED_LEAST: Final = 0.9
"""Of the time a broker gets: one that leaves some bears its load, and shows nothing."""
IN_TIME_LEAST_PCT: Final = 99.0
"""Of the messages with the shortest deadline."""
_NO_LOSS: Final = ("duplicate", "no_subscriber")
_DROPPED: Final = "messages_dropped "
_PASSED: Final = {PRIMARY: "messages_admitted", EGRESS: "messages_delivered"}
"""What a broker counts when messages pass it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    setup: Setup
    broker: str = PRIMARY
    """Whose processor is short."""
    factor: float = 1.5
    seconds: float = 20.0


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run it; `ok` says whether every promise was kept."""
    description = machine.describe()
    async with running(settings.setup, say) as testbed:
        await testbed.warm_up()
        cores = sorted(os.sched_getaffinity(0))
        testbed.keep_off(cores[-1], settings.broker)
        with throttled(testbed.pid(settings.broker), cores[-1]) as throttle:
            needed = await _needed(testbed, settings)
            allowed = await _search(testbed, throttle, needed, settings, say)
            before = await _dropped(testbed)
            passed = await _passed(testbed, settings.broker, settings.seconds, measured=True)
            sent, received = await testbed.results(None)
            dropped = await _dropped(testbed) - before
        memory = testbed.memory_mib()
    categories = _categories(settings.setup.topics, sent, received)
    offered_per_s = sum(sent["offered"]) / settings.seconds
    _check_overloaded(passed.share / allowed, settings)
    return {
        "ok": all(row["ok"] for row in categories) and not received["duplicates"] + received["reordered"],
        "broker": settings.broker,
        "factor": settings.factor,
        "seconds": settings.seconds,
        "processor_needed": round(needed, 4),
        "processor_allowed": round(allowed, 4),
        "processor_used": round(passed.share, 4),
        "offered_per_s": round(offered_per_s),
        "passed_per_s": round(passed.per_s),
        "overload": round(offered_per_s / passed.per_s, 2),
        "lost": received["lost"],
        "dropped": dict(dropped),
        "duplicates": received["duplicates"],
        "reordered": received["reordered"],
        "categories": categories,
        "publisher": {name: sent[name] for name in ("slipped_periods", "latest_send_ms")},
        "memory_mib": memory,
        "settings": asdict(settings),
        "machine": description,
    }


class Passed(NamedTuple):
    """What passes a broker."""

    per_s: float
    share: float
    """Of a core, that it uses for that."""


def _check_overloaded(used: float, settings: Settings) -> None:
    """Raise DriverError if a broker did not use all the time it got: then it was not overloaded."""
    if used < USED_LEAST:
        raise DriverError(
            f"{settings.broker} used {used:.0%} of the time it got, so it bore its load: something else was "
            "short; try again on a quieter machine"
        )


async def _needed(testbed: Testbed, settings: Settings) -> float:
    """What share of a core the broker needs for what is offered."""
    offered_per_s = offered_rate(settings.setup.topics)
    passed = await _passed(testbed, settings.broker, NEED_S)
    if passed.per_s < PASSED_LEAST * offered_per_s:
        raise DriverError(
            f"only {passed.per_s:,.0f} of {offered_per_s:,.0f} messages/s pass with all the time "
            f"{settings.broker} wants: something else is short; try again on a quieter machine"
        )
    return passed.share


async def _search(testbed: Testbed, throttle: Throttle, needed: float, settings: Settings, say: Say) -> float:
    """Give the broker less until so much less passes; returns the share of a core that it has then."""
    allowed = needed / settings.factor
    offered_per_s = offered_rate(settings.setup.topics)
    overload = settings.factor
    for _ in range(SEARCHED_MOST):
        # Half way, as the ratio goes: much of what passes is the backlog of the share before.
        allowed *= (overload / settings.factor) ** 0.5
        if allowed < SHARE_LEAST:
            raise DriverError(
                f"{settings.broker} needs {needed:.3f} of a core, and {SHARE_LEAST} is the least it can be "
                "given: offer more topics"
            )
        throttle.set_share(allowed)
        await asyncio.sleep(SETTLE_S)
        passed = await _passed(testbed, settings.broker, NEED_S)
        overload = offered_per_s / passed.per_s
        say(
            f"{settings.broker} needs {needed:.3f} of a core and gets {allowed:.3f}: {overload:.2f} times "
            "what passes is offered"
        )
        if abs(overload / settings.factor - 1) < NEAR:
            break
    return allowed


async def _passed(testbed: Testbed, broker: str, seconds: float, *, measured: bool = False) -> Passed:
    counter = _PASSED[broker]
    counted, began_s = (await testbed.counters(broker))[counter], time.monotonic()
    if measured:
        start_ns = time.monotonic_ns() + SECOND_NS // 2
        await testbed.measure(start_ns, start_ns + round(seconds * SECOND_NS))
        await asyncio.sleep(0.5)
    used_s, used_from_s = testbed.processor_times_s()[broker], time.monotonic()
    await asyncio.sleep(seconds)
    share = (testbed.processor_times_s()[broker] - used_s) / (time.monotonic() - used_from_s)
    passed = (await testbed.counters(broker))[counter] - counted
    return Passed(passed / (time.monotonic() - began_s), share)


async def _dropped(testbed: Testbed) -> "Counter[str]":
    """What all brokers have dropped so far, by reason; what nobody misses left out."""
    found: Counter[str] = Counter()
    for name in (PRIMARY, BACKUP, INGRESS, EGRESS):
        for key, count in (await testbed.counters(name)).items():
            reason = key.removeprefix(_DROPPED)
            if key.startswith(_DROPPED) and reason not in _NO_LOSS:
                found[f"{name} {reason}"] += round(count)
    return found


def _categories(topics: int, sent: dict[str, Any], received: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = categories_of(topics)
    runs: list[list[int]] = [[] for _ in CATEGORIES]
    for topic_id, number in received["numbers"].items():
        runs[kinds[number]].append(received["longest_run"][topic_id])
    urgent_ms = min(category.deadline_ms for category in CATEGORIES)
    found = []
    for category, count in zip(CATEGORIES, topics_per_category(topics), strict=True):
        kind = category.number
        longest = max(runs[kind])
        delivered, late = received["delivered"][kind], received["late"][kind]
        in_time_pct = round(100 * (1 - late / delivered), 3) if delivered else 0.0
        within = category.loss_tolerance is None or longest <= category.loss_tolerance
        urgent = category.deadline_ms == urgent_ms
        found.append(
            {
                "category": kind,
                "ok": within and (not urgent or in_time_pct >= IN_TIME_LEAST_PCT),
                "topics": count,
                "offered": sent["offered"][kind],
                "delivered": delivered,
                "loss_tolerance": category.loss_tolerance,
                "longest_loss_run": longest,
                "deadline_ms": category.deadline_ms,
                "latency_success_pct": in_time_pct,
                "p99_ms": round(received["p99_ms"][kind], 1),
                "peak_ms": round(received["peak_ms"][kind], 1),
            }
        )
    return found


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        f"{result['broker']} with {result['processor_allowed']:.3f} of a core (it needs "
        f"{result['processor_needed']:.3f}) was offered {result['offered_per_s']:,} messages/s for "
        f"{result['seconds']:g} s, {result['overload']:g} times the {result['passed_per_s']:,} that passed: "
        f"{result['lost']} lost: "
        f"{'every promise kept' if result['ok'] else 'A PROMISE BROKEN'}",
        "",
        "| category | offered | lost, % | longest run | tolerated | in time, % | p99, ms | deadline, ms |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["categories"]:
        tolerance = "∞" if row["loss_tolerance"] is None else row["loss_tolerance"]
        lost_pct = 100 * (1 - row["delivered"] / max(1, row["offered"]))
        lines.append(
            f"| {row['category']} | {row['offered']} | {lost_pct:.1f} | {row['longest_loss_run']} "
            f"| {tolerance} | {row['latency_success_pct']} | {row['p99_ms']} | {row['deadline_ms']} |"
        )
    drops = ", ".join(f"{name}: {count}" for name, count in result["dropped"].items())
    return "\n".join([*lines, "", f"dropped and counted: {drops or 'nothing'}"])
