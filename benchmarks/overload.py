"""A link that carries less than is offered: who loses how much, and who is still in time.

A testbed of processes with publishers in one LAN and subscribers in another. First the link of the
subscribers' LAN is unlimited, and what the load needs of it is measured. Then it carries that much
divided by `factor`. Urgent topics must lose nothing and keep their deadlines, tolerant ones must not
lose more in a row than they tolerate, best effort takes what is left; and the brokers must have
counted every message that is missing.
"""

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks import machine
from overlay.qos import BEST_EFFORT, TopicQos
from topology.checker import TopicVerdict, judge_topic
from topology.driver import Driver, Say, running
from topology.errors import DriverError
from topology.gateway import Way
from topology.load_runner import LoadResults, LoadRunner
from topology.model import Topology, parse_topology
from topology.process_driver import ProcessDriver

NEED_S: Final = 2.0
"""How long it is measured what the load needs."""
IN_TIME_LEAST: Final = 0.99
"""Share of urgent messages that must keep their deadline."""
_NO_LOSS: Final = ("duplicate", "no_subscriber")
"""Reasons to drop a copy of a message that is not missed by anybody."""


@dataclass(frozen=True, slots=True)
class Category:
    """Topics alike, one publisher and one subscriber each."""

    name: str
    topics: int
    rate_per_s: int
    payload_bytes: int
    qos: TopicQos
    is_urgent: bool = False


CATEGORIES: Final = (
    Category("urgent", 4, 50, 200, TopicQos(20, 100, 0, 8), is_urgent=True),
    Category("state", 4, 20, 1_200, TopicQos(50, 100, 3, 2)),
    Category("telemetry", 6, 100, 1_200, TopicQos(10, 150, 12, 15)),
    Category("best effort", 6, 100, 1_200, BEST_EFFORT),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    factor: float = 1.5
    """Offered load divided by what the link carries."""
    seconds: float = 20.0
    keep_logs: bool = False


def topology() -> Topology:
    """Publishers in LAN a, subscribers in LAN b."""
    topics, publishers, subscribers = [], [], []
    for category in CATEGORIES:
        fields = ("period_ms", "deadline_ms", "loss_tolerance", "retention", "reliability")
        values = category.qos.to_record()
        qos = ", ".join(
            f"{name}: {'null' if values[name] is None else values[name]}"
            for name in fields
            if values[name] is not None or name == "loss_tolerance"
        )
        for number in range(category.topics):
            topic = f"{category.name.replace(' ', '-')}-{number}"
            rate = f"rate_per_s: {category.rate_per_s}, payload_bytes: {category.payload_bytes}"
            topics.append(f"  {topic}: {{{qos}}}")
            publishers.append(f"  - {{lan: a, topic: {topic}, {rate}}}")
            subscribers.append(f"  - {{lan: b, topic: {topic}}}")
    lines = ["lans: {a: {edges: 1}, b: {edges: 1}}", "routers: 2", "topics:", *topics]
    return parse_topology("\n".join([*lines, "publishers:", *publishers, "subscribers:", *subscribers, ""]))


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run it; `ok` says whether every promise was kept."""
    description = machine.describe()
    layout = topology()
    async with running(layout, ProcessDriver, keep=settings.keep_logs) as driver:
        load = LoadRunner(driver)
        await load.start()
        await load.wait_warm()
        needed = await _bytes_per_s(driver, NEED_S)
        carried_per_s = needed / settings.factor
        say(f"the load needs {needed / 1e3:.0f} kB/s, the link carries {carried_per_s / 1e3:.0f} kB/s now")
        dropped_before = await _dropped(driver)
        await load.measure()
        await driver.limit("b", carried_per_s, [Way.BACK])
        used = await _bytes_per_s(driver, settings.seconds)
        await load.stop()
        results = await load.results()
        dropped = await _dropped(driver) - dropped_before
        if dead := driver.died_unasked():
            raise DriverError(f"{', '.join(dead)} ended unasked; logs are in {driver.directory}")
    categories = [_category(category, layout, results) for category in CATEGORIES]
    seen = sum(row["lost"] for row in categories)
    counted = sum(count for reason, count in dropped.items() if reason not in _NO_LOSS)
    return {
        # A link that lost nothing was not overloaded.
        "ok": 0 < seen == counted and all(row["ok"] for row in categories),
        "factor": settings.factor,
        "seconds": settings.seconds,
        "needed_bytes_per_s": round(needed),
        "carried_bytes_per_s": round(carried_per_s),
        "used_bytes_per_s": round(used),
        "losses_seen": seen,
        "drops_counted": counted,
        "dropped": dict(dropped),
        "categories": categories,
        "settings": asdict(settings),
        "machine": description,
    }


async def _bytes_per_s(driver: Driver, seconds: float) -> float:
    """What the link of the subscribers' LAN carries into it."""
    before, began_s = (await driver.wan_statistics("b")).bytes_back, time.monotonic()
    await asyncio.sleep(seconds)
    carried = (await driver.wan_statistics("b")).bytes_back - before
    return carried / (time.monotonic() - began_s)


async def _dropped(driver: Driver) -> "Counter[str]":
    """What all brokers have dropped so far, by reason."""
    found: Counter[str] = Counter()
    for name in driver.nodes:
        found.update((await driver.status(name))["core"]["dropped"])
    return found


def _category(category: Category, layout: Topology, results: LoadResults) -> dict[str, Any]:
    verdicts = [
        _verdict(topic, category, layout, results)
        for topic in layout.topics
        if topic.rpartition("-")[0] == category.name.replace(" ", "-")
    ]
    tolerance = category.qos.loss_tolerance
    longest = max(verdict.longest_loss_run for verdict in verdicts)
    delivered = sum(verdict.delivered for verdict in verdicts)
    in_time = None
    if category.qos.deadline_ms is not None:
        in_time = sum((verdict.in_time or 0) * verdict.delivered for verdict in verdicts) / max(1, delivered)
    disorder = sum(verdict.duplicates + verdict.reordered for verdict in verdicts)
    return {
        "category": category.name,
        "ok": not disorder
        and (tolerance is None or longest <= tolerance)
        and (not category.is_urgent or (in_time or 0) >= IN_TIME_LEAST),
        "topics": len(verdicts),
        "sent": sum(verdict.sent for verdict in verdicts),
        "lost": sum(verdict.lost for verdict in verdicts),
        "loss_tolerance": tolerance,
        "longest_loss_run": longest,
        "duplicates_and_steps_back": disorder,
        "deadline_ms": category.qos.deadline_ms,
        "latency_success_pct": None if in_time is None else round(100 * in_time, 2),
        "p99_ms": round(max(verdict.p99_ms for verdict in verdicts), 1),
    }


def _verdict(topic: str, category: Category, layout: Topology, results: LoadResults) -> TopicVerdict:
    streams = [stream for stream in results.streams if stream.topic == topic]
    sent = sum(results.sent[number] for number, item in enumerate(layout.publishers) if item.topic == topic)
    return judge_topic(topic, streams, sent, category.qos.loss_tolerance, category.qos.deadline_ms, None)


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        f"{result['factor']:g} times what the link carries, for {result['seconds']:g} s: "
        f"{result['losses_seen']} messages missed, {result['drops_counted']} counted by brokers: "
        f"{'every promise kept' if result['ok'] else 'A PROMISE BROKEN'}",
        "",
        "| topics | sent | lost | longest loss run | tolerated | in time, % | p99, ms | deadline, ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["categories"]:
        tolerance = "∞" if row["loss_tolerance"] is None else row["loss_tolerance"]
        deadline = "none" if row["deadline_ms"] is None else f"{row['deadline_ms']:g}"
        share = "none" if row["latency_success_pct"] is None else row["latency_success_pct"]
        lines.append(
            f"| {row['topics']} {row['category']} | {row['sent']} | {row['lost']} "
            f"| {row['longest_loss_run']} | {tolerance} | {share} | {row['p99_ms']} | {deadline} |"
        )
    return "\n".join(lines)
