"""The compose testbed: it starts, obeys, keeps its promises under faults, and leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from runtime.tracing import TraceSettings
from tests.compose.projects import docker, everything_of, wait_for
from topology.checker import judge_sequences
from topology.claims import running_testbeds
from topology.compose_driver import ComposeDriver, sweep
from topology.containers import PROJECT_LABEL, open_engine
from topology.driver import DriverSettings, running
from topology.errors import DriverError
from topology.gateway import Way
from topology.load_runner import LoadRunner
from topology.model import parse_topology
from topology.snapshot import take_snapshot

pytestmark = pytest.mark.compose

NEAR_MS, FAR_MS = 10, 40
APART = f"""\
lans:
  near: {{edges: 1, wan: {{delay_ms: {NEAR_MS}}}}}
  far: {{edges: 1, wan: {{delay_ms: {FAR_MS}}}}}
routers: 2
topics:
  up: {{period_ms: 20, loss_tolerance: 0, retention: 500}}
publishers: [{{lan: far, topic: up, rate_per_s: 50}}]
subscribers: [{{lan: near, topic: up}}]
"""


async def _eventually(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 40.0) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not await condition():
        assert loop.time() < deadline_s, f"{what} not within {timeout_s:g} s"
        await asyncio.sleep(0.1)


async def test_messages_survive_faults_across_an_emulated_wan(tmp_path: Path) -> None:
    traces = TraceSettings(tmp_path / "traces", sampling=1.0)
    async with running(parse_topology(APART), ComposeDriver, DriverSettings(trace=traces)) as driver:
        project = driver.project
        load = LoadRunner(driver)
        await load.start()
        await load.wait_warm()
        await load.measure()

        await _clients_reach_their_own_lan_only(driver)
        await _the_primary_is_killed_and_comes_back(driver)
        await _a_frozen_router_thaws(driver)
        await _a_lan_is_cut_off_and_healed(driver)
        await _an_edge_is_taken_off_the_wan_and_put_back(driver)

        await load.stop()
        results = await load.results()
        passed = await driver.wan_statistics("far")
        assert driver.died_unasked() == []
        directory = driver.directory
    assert everything_of(project) == [] and not directory.exists()
    (stream,) = results.streams
    verdict = judge_sequences(stream.sent, stream.sequences)
    assert results.drained and stream.sent > 100
    assert verdict.lost == verdict.duplicates == verdict.reordered == 0
    fastest_ns = min(b - a for a, b in zip(stream.sent_ns, stream.received_ns, strict=True))
    assert fastest_ns >= (NEAR_MS + FAR_MS) * 1e6
    assert passed.messages_out[str(results.topic_ids["up"])] >= stream.sent and passed.unreadable == 0
    # Of every node and of both clients.
    writers = {path.name.partition("-")[0] for path in traces.folder.glob("*.segment")}
    assert {"near_1", "far_1", "router_1", "router_2"} <= writers and len(writers) > 4, writers


async def _clients_reach_their_own_lan_only(driver: ComposeDriver) -> None:
    async def reaches(host: str) -> bool:
        line = f"exec 3<>/dev/tcp/{host}/7400"
        return (await driver.execute("near", "timeout", "2", "bash", "-c", line))[0] == 0

    assert await reaches("near-1")
    for other in ("far-1", "router-1"):
        assert not await reaches(other)
        assert not await reaches(driver.nodes[other].http.partition(":")[0])


async def _the_primary_is_killed_and_comes_back(driver: ComposeDriver) -> None:
    primary = (await take_snapshot(driver)).assignment["up"][0]
    await driver.kill(primary)
    assert not driver.nodes[primary].is_alive and primary not in await driver.statuses()
    assert driver.died_unasked() == []

    async def moved() -> bool:
        return (await take_snapshot(driver)).assignment["up"][0] not in {"", primary}

    await _eventually(moved, "another primary")
    await driver.start_node(primary)
    with pytest.raises(DriverError, match=f"{primary} runs already"):
        await driver.start_node(primary)
    await driver.wait_ready()


async def _a_frozen_router_thaws(driver: ComposeDriver) -> None:
    await driver.freeze("router-1")
    assert driver.nodes["router-1"].is_alive and "router-1" not in await driver.statuses()
    await driver.thaw("router-1")
    await _eventually(lambda: _is_joined(driver, "far-1"), "links to a thawed router")


async def _a_lan_is_cut_off_and_healed(driver: ComposeDriver) -> None:
    await driver.cut("far", [Way.OUT])
    await _eventually(lambda: _is_apart(driver, "far-1"), "links are down")
    await driver.heal("far", [Way.OUT])
    await _eventually(lambda: _is_joined(driver, "far-1"), "links are up again")


async def _an_edge_is_taken_off_the_wan_and_put_back(driver: ComposeDriver) -> None:
    await driver.disconnect("far-1")
    # It is still heard of, by its LAN.
    await _eventually(lambda: _is_apart(driver, "far-1"), "links are down")
    await driver.connect("far-1")
    await _eventually(lambda: _is_joined(driver, "far-1"), "links are up again")


async def _links_up(driver: ComposeDriver, edge: str) -> int:
    status = (await driver.statuses([edge])).get(edge, {})
    return sum(link["up"] for link in status["links"]) if status else -1


async def _is_apart(driver: ComposeDriver, edge: str) -> bool:
    return await _links_up(driver, edge) == 0


async def _is_joined(driver: ComposeDriver, edge: str) -> bool:
    return await _links_up(driver, edge) == len(driver.routers)


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    file = tmp_path / "apart.yaml"
    file.write_text(APART)
    return file


@pytest.fixture
def stranger() -> Iterator[str]:
    """A volume of a project that looks like ours, but that no state file names."""
    name = f"isthmus-compose-{os.getpid()}-stranger"
    docker("volume", "create", "--label", f"{PROJECT_LABEL}={name}", name)
    yield name
    docker("volume", "rm", name)


def _start_demo(topology: Path) -> tuple["subprocess.Popen[str]", str]:
    """A demonstration as a process of its own, once it has containers; and its project."""
    # The demonstration wants three routing brokers.
    topology.write_text(APART.replace("routers: 2", "routers: 3"))
    command = [sys.executable, "-m", "isthmus", "demo", str(topology), "--driver", "compose", "--no-report"]
    runner = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(topology.parent)},
    )
    try:
        assert runner.stdout is not None
        said = ""
        while "containers of project" not in said:
            line = runner.stdout.readline()
            assert line, said
            said += line
        run = next(facts["run"] for facts in running_testbeds() if facts["pid"] == runner.pid)
        project = f"isthmus-{run}"
        # Some containers, not yet all: the worst moment to be interrupted.
        wait_for(lambda: len(everything_of(project)) > 8, 60, "containers")
    except BaseException:
        runner.kill()
        runner.communicate()
        raise
    return runner, project


def test_ctrl_c_leaves_nothing(topology: Path) -> None:
    runner, project = _start_demo(topology)
    runner.send_signal(signal.SIGINT)
    said, _ = runner.communicate(timeout=90)
    assert runner.returncode == 1, said
    assert everything_of(project) == []


def test_what_a_killed_runner_leaves_is_swept_up_and_nothing_else(topology: Path, stranger: str) -> None:
    runner, project = _start_demo(topology)
    engine = open_engine()
    try:
        run = project.removeprefix("isthmus-")
        assert run not in sweep(engine), "its runner is alive"
        runner.kill()
        runner.communicate(timeout=30)
        assert everything_of(project)
        assert run in sweep(engine)
        assert everything_of(project) == []
        assert everything_of(stranger) == [stranger]
    finally:
        engine.close()
