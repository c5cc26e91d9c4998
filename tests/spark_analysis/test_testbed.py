"""A real overlay traces every message: the report says what the applications saw."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.tracing import TraceSettings
from spark_analysis.analysis import Analysis
from spark_analysis.histograms import RELATIVE_ERROR
from spark_analysis.outages import Outage
from topology.checker import judge_sequences
from topology.driver import DriverSettings, running
from topology.gateway import TIMER_STEP_S
from topology.load_runner import LoadResults, LoadRunner
from topology.model import parse_topology
from topology.process_driver import ProcessDriver
from topology.snapshot import take_snapshot

# Far apart, so that a failover is an outage: nobody can notice or repair it sooner than light travels.
TOPOLOGY = """\
wan: {delay_ms: 150}
lans: {plant: {edges: 1}, office: {edges: 1}}
routers: [{name: router-1, host: a}, {name: router-2, host: b}]
topics:
  alarm: {period_ms: 20, deadline_ms: 2000, loss_tolerance: 0, retention: 64}
  vibration: {period_ms: 20, deadline_ms: 1000, loss_tolerance: 0}
publishers:
  - {lan: plant, topic: alarm, rate_per_s: 50}
  - {lan: plant, topic: vibration, rate_per_s: 50}
subscribers:
  - {lan: office, topic: alarm}
  - {lan: plant, topic: alarm}
  - {lan: plant, topic: vibration}
"""
MESSAGES = 60
"""Let through before and after the kill."""
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Played:
    """What the applications know of a run."""

    results: LoadResults
    victim: str
    killed_us: int


async def flow(driver: ProcessDriver, messages: int) -> None:
    """Wait until the plant's edge has taken this many more messages."""

    async def accepted() -> int:
        return int((await driver.status("plant-1"))["core"]["messages_accepted"])

    enough = await accepted() + messages
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if await accepted() >= enough:
                return
            await asyncio.sleep(0.05)


async def play(folder: Path, *, kill: bool) -> Played:
    async with running(
        parse_topology(TOPOLOGY), ProcessDriver, DriverSettings(trace=TraceSettings(folder, sampling=1.0))
    ) as driver:
        load = LoadRunner(driver)
        await load.start()
        await load.wait_warm()
        await load.measure()
        await flow(driver, MESSAGES)
        victim, killed_us = "", 0
        if kill:
            victim, _ = (await take_snapshot(driver)).assignment["alarm"]
            killed_us = time.time_ns() // 1_000
            await driver.kill(victim)
            await flow(driver, MESSAGES)
        await load.stop()
        return Played(await load.results(), victim, killed_us)


def check_against_truth(found: Analysis, results: LoadResults) -> None:
    topics = {row["topic"]: row for row in found.summary["topics"]}
    assert {name: row["messages"] for name, row in topics.items()} == results.published
    for name, row in topics.items():
        verdicts = [judge_sequences(s.sent, s.sequences) for s in results.streams if s.topic == name]
        assert row["lost"] == sum(verdict.lost for verdict in verdicts)
        assert row["longest_loss_run"] == max(verdict.longest_loss_run for verdict in verdicts)
        # Applications count what came after the warm-up, the trace all.
        delivered = sum(verdict.delivered for verdict in verdicts)
        assert delivered < row["deliveries"] <= len(verdicts) * results.published[name]
    assert found.summary["bound_violations"] == 0
    assert found.summary["bounds_checked"] > found.summary["messages"]
    assert all(row["age_unknown"] == 0 or row["bounds_checked"] for row in topics.values())


@pytest.mark.slow
@pytest.mark.testbed
async def test_a_quiet_run(tmp_path: Path, analyse_folder: Callable[[Path], Analysis]):
    played = await play(tmp_path / "traces", kill=False)
    found = analyse_folder(tmp_path / "traces")
    check_against_truth(found, played.results)
    hops = {row["hop"]: row for row in found.summary["hops"]}
    # Gateways let bytes out to the nearest step of their timers, reports round to the middle of a bucket.
    least_ms = (150 - TIMER_STEP_S / 2 * 1_000) * (1 - RELATIVE_ERROR)
    assert hops["edge → router"]["p50_ms"] >= least_ms and hops["router → edge"]["p50_ms"] >= least_ms
    assert {row["node"] for row in found.rows("clocks") if row["role"] != "client"} == {
        "plant-1",
        "office-1",
        *(
            name
            for name in ("router-1", "router-2")
            if any(name in row["link"] for row in found.rows("links"))
        ),
    }
    assert not [text for text in found.problems if "no traces" in text or "lost" in text.partition(":")[0]]
    slowest = found.rows("slowest")
    legs = [row for row in slowest if row["sequence"] == slowest[0]["sequence"]]
    assert {row["from_node"] for row in legs} >= {"plant-1"}


@pytest.mark.slow
@pytest.mark.testbed
async def test_a_killed_router(tmp_path: Path, analyse_folder: Callable[[Path], Analysis]):
    played = await play(tmp_path / "traces", kill=True)
    found = analyse_folder(tmp_path / "traces")
    check_against_truth(found, played.results)
    survivor = ({"router-1", "router-2"} - {played.victim}).pop()

    def is_the_kill(outage: Outage) -> bool:
        return outage.start_us <= played.killed_us + 300_000 and outage.end_us >= played.killed_us

    # A machine that is busy makes short silences of its own.
    outage = max(filter(is_the_kill, found.outages), key=lambda outage: outage.duration_ms)
    assert outage.lost == 0
    (told,) = [row for row in found.summary["outages"] if row["number"] == outage.number]
    assert survivor in told["carriers"] or played.victim in told["carriers"]
    sides = {
        side: {
            row["router"] for row in found.carriers if (row["outage"], row["side"]) == (outage.number, side)
        }
        for side in ("before", "after")
    }
    assert played.victim in sides["before"]
    assert sides["after"] == {survivor}
    assert any(row["outage"] == outage.number for row in found.rows("outage_timeline"))
