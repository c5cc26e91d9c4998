"""FRAME's experiment (section VI): Table 2's workload through real brokers, the primary killed in mid-run.

Success for loss: the share of a category's topics whose longest run of consecutive losses is
within their loss tolerance. Success for latency: the share of distinct delivered messages that
took no longer than their deadline, from the publisher's call to the subscriber's. Both count what
was sent in the measured time, the crash included. A lost message counts for loss only.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks import machine
from benchmarks.frame_testbed import (
    BACKUP,
    EGRESS,
    INGRESS,
    PRIMARY,
    PUBLISHER,
    SUBSCRIBER,
    Say,
    Setup,
    Testbed,
    running,
)
from benchmarks.frame_workload import CATEGORIES, categories_of, offered_rate, topics_per_category
from benchmarks.processes import ProcessorUse
from overlay.limits import SECOND_NS

BOTTLENECK_PCT: Final = 90.0
"""A load process above this share of a core may be what limits a result."""
MEMORY_EVERY_S: Final = 10.0
NOISY_STEAL_PCT: Final = 0.5
_DROPPED: Final = "messages_dropped "


@dataclass(frozen=True, slots=True)
class Settings:
    """One run."""

    setup: Setup
    seconds: float
    crash: bool
    warm_up_s: float = 5.0
    crash_after_s: float | None = None
    """The middle of the measured time if not given."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Processor times and a routing broker's counters at one moment."""

    at_s: float
    processor_s: Mapping[str, float]
    use: ProcessorUse
    counters: Mapping[str, float]

    @classmethod
    async def take(cls, testbed: Testbed, router: str) -> "Snapshot":
        """As of now."""
        counters = await testbed.counters(router)
        return cls(time.monotonic(), testbed.processor_times_s(), ProcessorUse.now(), counters)

    def processor_pct(self, since: "Snapshot") -> dict[str, float]:
        """Processor time of each process since then, in percent of one core."""
        elapsed_s = self.at_s - since.at_s
        return {
            name: round(100 * (spent_s - since.processor_s.get(name, 0.0)) / elapsed_s, 1)
            for name, spent_s in self.processor_s.items()
        }

    def count(self, name: str, since: "Snapshot") -> int:
        """How much a counter of the routing broker has grown since then."""
        return round(self.counters.get(name, 0) - since.counters.get(name, 0))


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Do one run; returns its result as JSON has it."""
    description = machine.describe()
    setup = settings.setup
    began_s = time.monotonic()
    async with running(setup, say) as testbed:
        declared_s = time.monotonic() - began_s
        say(f"{setup.topics} topics declared after {declared_s:.1f} s")
        testbed.pin()
        await testbed.warm_up()
        await asyncio.sleep(settings.warm_up_s)
        run = _Run(settings, testbed, say)
        await run.measure()
        sent, received = await testbed.results(run.crash_ns)
        end = await run.end()
    return {
        "topics": setup.topics,
        "config": setup.mode,
        "crash": settings.crash,
        **_rates(sent, received, settings.seconds),
        **end,
        "categories": _categories(setup.topics, sent, received, settings.crash),
        "lost": received["lost"],
        "duplicates": received["duplicates"],
        "reordered": received["reordered"],
        "publisher": {
            name: sent[name] for name in ("slipped_periods", "latest_send_ms", "backlog_most_bytes")
        },
        "declared_s": round(declared_s, 1),
        "settings": asdict(settings),
        "machine": description,
        "notes": _notes(settings, sent, end, received),
        "slow_windows": [
            {"at_ms": round((end_ns - (run.crash_ns or run.start_ns)) / 1e6), "peaks_ms": peaks}
            for end_ns, peaks in received["slow_windows"]
        ],
        "courses": _courses(setup.topics, received, run.crash_ns) if run.crash_ns else [],
    }


class _Run:
    """The measured time of one run."""

    def __init__(self, settings: Settings, testbed: Testbed, say: Say) -> None:
        self.start_ns = 0
        self.crash_ns: int | None = None
        self._settings = settings
        self._testbed = testbed
        self._say = say
        self._snapshots: list[Snapshot] = []
        self._memory: dict[str, float] = {}
        self._memory_course: list[dict[str, float]] = []

    async def measure(self) -> None:
        """From the first counted message to the last, with the crash in between."""
        self._memory_course.append({"at_s": 0.0, **self._testbed.memory_mib()})
        watching = asyncio.create_task(self._watch_memory())
        try:
            await self._measure()
        finally:
            watching.cancel()

    async def _watch_memory(self) -> None:
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(MEMORY_EVERY_S)
            at_s = round(time.monotonic() - began_s, 1)
            self._memory_course.append({"at_s": at_s, **self._testbed.memory_mib()})

    async def _measure(self) -> None:
        settings, testbed = self._settings, self._testbed
        self.start_ns = time.monotonic_ns() + SECOND_NS // 5
        end_ns = self.start_ns + round(settings.seconds * SECOND_NS)
        await testbed.measure(self.start_ns, end_ns)
        await _sleep_until(self.start_ns)
        self._snapshots.append(await Snapshot.take(testbed, PRIMARY))
        self._say(f"measuring for {settings.seconds:g} s")
        if settings.crash:
            after_s = settings.seconds / 2 if settings.crash_after_s is None else settings.crash_after_s
            crash_ns = self.start_ns + round(after_s * SECOND_NS)
            # A little before, so that asking does not disturb what is measured.
            await _sleep_until(crash_ns - SECOND_NS // 4)
            self._memory[PRIMARY] = testbed.memory_mib()[PRIMARY]
            self._snapshots.append(await Snapshot.take(testbed, PRIMARY))
            self._snapshots.append(await Snapshot.take(testbed, BACKUP))
            await _sleep_until(crash_ns)
            self.crash_ns = time.monotonic_ns()
            await testbed.child(PRIMARY).kill()
            self._say("the primary is dead")
        await _sleep_until(end_ns)
        survivor = BACKUP if settings.crash else PRIMARY
        self._snapshots.append(await Snapshot.take(testbed, survivor))
        await asyncio.sleep(0.3)

    async def _dropped(self) -> dict[str, dict[str, int]]:
        """What each broker that lives has dropped since it started, by reason."""
        alive = (BACKUP, INGRESS, EGRESS) if self._settings.crash else (PRIMARY, BACKUP, INGRESS, EGRESS)
        found = {}
        for name in alive:
            counters = await self._testbed.counters(name)
            found[name] = {
                key.removeprefix(_DROPPED): round(count)
                for key, count in counters.items()
                if key.startswith(_DROPPED) and count
            }
        return found

    async def end(self) -> dict[str, Any]:
        """Processor, memory and replication of the run."""
        first, last = self._snapshots[0], self._snapshots[-1]
        calm = self._snapshots[1] if self._settings.crash else last
        use = calm.processor_pct(first)
        memory = {**self._testbed.memory_mib(), **self._memory}
        admitted = calm.count("messages_admitted", first)
        replicated = calm.count("messages_replicated", first)
        result: dict[str, Any] = {
            "cpu_primary_pct": use[PRIMARY],
            "cpu_backup_pct": use[BACKUP],
            "replicated_messages": replicated,
            "replicated_share": round(replicated / max(1, admitted), 4),
            "cpu_pct": use,
            "busy_cores": calm.use.busy_cores(first.use, machine.available_cores()),
            "steal_pct": last.use.stolen_pct(first.use),
            "memory_mib": memory,
            "memory_course_mib": self._memory_course,
            "counters_before_crash": dict(calm.counters),
            "dropped": await self._dropped(),
        }
        if self._settings.crash:
            before = self._snapshots[2]
            result["cpu_after_crash_pct"] = {
                name: value for name, value in last.processor_pct(before).items() if name != PRIMARY
            }
            result["busy_cores_after_crash"] = last.use.busy_cores(before.use, machine.available_cores())
            result["recovered_messages"] = last.count("messages_recovered", before)
            result["counters_at_end"] = dict(last.counters)
        return result


async def _sleep_until(at_ns: int) -> None:
    await asyncio.sleep(max(0, at_ns - time.monotonic_ns()) / SECOND_NS)


def _rates(sent: dict[str, Any], received: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "offered_rate": round(sum(sent["offered"]) / seconds, 1),
        "delivered_rate": round(sum(received["delivered"]) / seconds, 1),
    }


def _categories(
    topics: int, sent: dict[str, Any], received: dict[str, Any], crash: bool
) -> list[dict[str, Any]]:
    kinds = categories_of(topics)
    runs: list[list[int]] = [[] for _ in CATEGORIES]
    for topic_id, number in received["numbers"].items():
        runs[kinds[number]].append(received["longest_run"][topic_id])
    found = []
    for category, count in zip(CATEGORIES, topics_per_category(topics), strict=True):
        kind = category.number
        limit = category.loss_tolerance
        kept = count if limit is None else sum(run <= limit for run in runs[kind])
        delivered, late = received["delivered"][kind], received["late"][kind]
        found.append(
            {
                "category": kind,
                "deadline_ms": category.deadline_ms,
                "loss_tolerance": limit,
                "topics": count,
                "loss_success_pct": round(100 * kept / count, 2),
                "latency_success_pct": round(100 * (1 - late / delivered), 4) if delivered else 0.0,
                "peak_after_crash_ms": round(received["peak_after_crash_ms"][kind], 2) if crash else None,
                "longest_loss_run": max(runs[kind]),
                "offered": sent["offered"][kind],
                "delivered": delivered,
                "p50_ms": round(received["p50_ms"][kind], 2),
                "p99_ms": round(received["p99_ms"][kind], 2),
                "p999_ms": round(received["p999_ms"][kind], 2),
                "peak_ms": round(received["peak_ms"][kind], 2),
            }
        )
    return found


def _courses(topics: int, received: dict[str, Any], origin_ns: int) -> list[dict[str, Any]]:
    """When messages of one topic per category were sent, relative to the crash, and how long they took."""
    kinds = categories_of(topics)
    return [
        {
            "category": kinds[received["numbers"][topic_id]],
            "sent_ms": [round((sent_ns - origin_ns) / 1e6, 2) for sent_ns in course["sent_ns"]],
            "latency_ms": [round(latency_ns / 1e6, 2) for latency_ns in course["latency_ns"]],
        }
        for topic_id, course in received["courses"].items()
    ]


def _notes(
    settings: Settings, sent: dict[str, Any], end: dict[str, Any], received: dict[str, Any]
) -> list[str]:
    """What a reader must know to judge the figures."""
    notes = [
        "processor shares are in percent of one core, until the crash if there is one",
        "replicated_messages counts from the start of the measured time until the crash or the end",
    ]
    meant = offered_rate(settings.setup.topics)
    offered = sum(sent["offered"]) / settings.seconds
    if offered < 0.99 * meant:
        notes.append(
            f"publishers sent {offered:,.0f} messages/s instead of {meant:,.0f}: they were held up "
            f"({sent['slipped_periods']} periods skipped, up to {sent['latest_send_ms']:.0f} ms late)"
        )
    notes.extend(
        f"the load tool may be the bottleneck: {name} used {end['cpu_pct'][name]} % of a core"
        for name in (PUBLISHER, SUBSCRIBER)
        if end["cpu_pct"][name] > BOTTLENECK_PCT
    )
    if end["steal_pct"] > NOISY_STEAL_PCT:
        notes.append(f"{end['steal_pct']} % of the processor was stolen: latencies are not ours alone")
    ours = sum(end["cpu_pct"].values()) / 100
    if end["busy_cores"] > ours + 0.2:
        notes.append(
            f"other programs were using the machine: {end['busy_cores']} cores were busy, "
            f"{ours:.2f} of them by this run"
        )
    for name, dropped in end["dropped"].items():
        full = dropped.get("outbox_full", 0)
        if full:
            notes.append(f"{name} dropped {full} messages because an outbox was full: its peer was too slow")
    if received["duplicates"] or received["reordered"]:
        notes.append(
            f"subscribers saw {received['duplicates']} duplicates and {received['reordered']} steps back"
        )
    return notes


def summary(result: Mapping[str, Any]) -> str:
    """A result as text for people."""
    head = (
        f"{result['config']}, {result['topics']} topics, {'with' if result['crash'] else 'without'} crash: "
        f"{result['offered_rate']:,.0f} messages/s offered, {result['delivered_rate']:,.0f} delivered; "
        f"primary {result['cpu_primary_pct']:.0f} %, backup {result['cpu_backup_pct']:.0f} % of a core; "
        f"{result['replicated_messages']:,} replicated ({100 * result['replicated_share']:.0f} %)"
    )
    lines = [
        head,
        "",
        "| category | deadline, ms | loss tolerance | topics | loss success, % | longest run "
        "| latency success, % | p50 / p99.9, ms | peak after crash, ms |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["categories"]:
        tolerance = "∞" if row["loss_tolerance"] is None else row["loss_tolerance"]
        peak = "" if row["peak_after_crash_ms"] is None else f"{row['peak_after_crash_ms']:.1f}"
        lines.append(
            f"| {row['category']} | {row['deadline_ms']} | {tolerance} | {row['topics']} "
            f"| {row['loss_success_pct']:g} | {row['longest_loss_run']} | {row['latency_success_pct']:g} "
            f"| {row['p50_ms']:.1f} / {row['p999_ms']:.1f} | {peak} |"
        )
    return "\n".join([*lines, "", *(f"- {note}" for note in result["notes"])])
