"""A broker whose processor bears less than is offered: who loses how much, and who is still in time.

FRAME's workload through real processes. First the broker has a core to itself, all others the rest, and what
it needs of it is measured. Then it gets less (`benchmarks.throttle`), until it bears no more than the offered
load divided by `factor`: it *bears* what passes it, divided by the share that it uses of the time it gets.
Topics must not lose more in a row than they tolerate, and messages with the shortest deadline must be in
time. What brokers counted as dropped is told beside it, over a slightly longer time.
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

NEED_S: Final = 2.0
"""How long it is measured what the broker needs, and what passes a throttled one."""
CALIBRATIONS_MAX: Final = 12
PASSED_LEAST: Final = 0.95
"""Of what is offered, before the broker gets less time."""
FACTOR_MOST: Final = 1.2
"""Offered over borne may be this much above what is wanted."""
FACTOR_LEAST: Final = 0.8
"""... or below it, while it counts: a broker that bears its load shows nothing."""
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
            found = await _calibrate(testbed, throttle, settings, say)
            before = await _dropped(testbed)
            start_ns = time.monotonic_ns() + SECOND_NS // 2
            await testbed.measure(start_ns, start_ns + round(settings.seconds * SECOND_NS))
            await asyncio.sleep(0.5)
            borne = await _passed(testbed, settings.broker, settings.seconds)
            await asyncio.sleep(0.1)
            sent, received = await testbed.results(None)
            dropped = await _dropped(testbed) - before
        memory = testbed.memory_mib()
    categories = _categories(settings.setup.topics, sent, received)
    offered_per_s = sum(sent["offered"]) / settings.seconds
    factor = _check_overloaded(offered_per_s / borne.at(found["processor_allowed"]), settings)
    return {
        "ok": all(row["ok"] for row in categories) and not received["duplicates"] + received["reordered"],
        "broker": settings.broker,
        "factor": round(factor, 2),
        "seconds": settings.seconds,
        **found,
        "processor_used": borne.share,
        "offered_per_s": round(offered_per_s),
        "passed_per_s": round(borne.per_s),
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

    def at(self, share: float) -> float:
        """What would pass, were all of its share used: what it bears."""
        return max(1.0, self.per_s * max(1.0, share / max(self.share, SHARE_LEAST)))


def _check_overloaded(factor: float, settings: Settings) -> float:
    """What was offered over what it bears. Raises DriverError if it was too little to be an overload."""
    if factor < FACTOR_LEAST * settings.factor:
        raise DriverError(
            f"{settings.broker} was offered {factor:.2f} times what it bears, {settings.factor:g} times "
            "were asked for: it was not overloaded while it counted; try again on a quieter machine"
        )
    return factor


async def _calibrate(testbed: Testbed, throttle: Throttle, settings: Settings, say: Say) -> dict[str, Any]:
    """Take processor time away until the offered load is `factor` times what passes."""
    offered_per_s = offered_rate(settings.setup.topics)
    unhindered = await _passed(testbed, settings.broker, NEED_S)
    if unhindered.per_s < PASSED_LEAST * offered_per_s:
        raise DriverError(
            f"only {unhindered.per_s:,.0f} of {offered_per_s:,.0f} messages/s pass with all the time "
            f"{settings.broker} wants: something else is short; try again on a quieter machine"
        )
    needed = unhindered.share
    enough, too_little = needed, 0.0
    for _ in range(CALIBRATIONS_MAX):
        share = max((enough + too_little) / 2, SHARE_LEAST)
        throttle.set_share(share)
        await asyncio.sleep(1.0)
        passed = await _passed(testbed, settings.broker, NEED_S)
        reached = offered_per_s / passed.at(share)
        say(
            f"{share:.3f} of a core, {passed.share:.3f} used: {passed.per_s:,.0f} of {offered_per_s:,.0f} "
            f"messages/s pass, {reached:.2f} times what it bears is offered"
        )
        if reached < settings.factor:
            enough = share
        elif reached > FACTOR_MOST * settings.factor:
            too_little = share
            throttle.set_share(1.0)  # what waits since then must not count for the next trial
            await asyncio.sleep(NEED_S)
        else:
            return {"processor_needed": round(needed, 4), "processor_allowed": round(share, 4)}
    raise DriverError(
        f"no share of a core lets {settings.broker} pass {1 / settings.factor:.0%} of what is offered: "
        f"{too_little:.3f} is too little, {enough:.3f} enough; offer more topics"
    )


async def _passed(testbed: Testbed, broker: str, seconds: float) -> Passed:
    counter = _PASSED[broker]
    counted = (await testbed.counters(broker))[counter]
    used_s, began_s = testbed.processor_times_s()[broker], time.monotonic()
    await asyncio.sleep(seconds)
    used_s = testbed.processor_times_s()[broker] - used_s
    elapsed_s = time.monotonic() - began_s
    passed = (await testbed.counters(broker))[counter] - counted
    return Passed(passed / (time.monotonic() - began_s), round(used_s / elapsed_s, 4))


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
        f"{result['processor_needed']:.3f}) was offered {result['factor']:g} times what it bears, "
        f"{result['offered_per_s']:,} messages/s for {result['seconds']:g} s: {result['lost']} lost: "
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
