"""The netns testbed: real delays, LANs that cannot be left, crashes survived, nothing left behind."""

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.topology.namespaces_needed import needs_namespaces
from tests.topology.processes import descendants, wait_gone
from topology.checker import judge_sequences, percentile
from topology.claims import running_testbeds
from topology.driver import DriverSettings, running
from topology.errors import DriverError
from topology.load_runner import LoadRunner
from topology.model import parse_topology
from topology.namespaces import names_of, open_socket, sweep
from topology.netns_driver import NetnsDriver
from topology.network import CLOUD, lan_host
from topology.snapshot import take_snapshot

pytestmark = [needs_namespaces, pytest.mark.testbed]

NEAR_MS, FAR_MS = 30, 250
FAR_APART = f"""\
lans:
  near: {{edges: 1, wan: {{delay_ms: {NEAR_MS}}}}}
  far: {{edges: 1, wan: {{delay_ms: {FAR_MS}}}}}
routers: 3
topics:
  up: {{loss_tolerance: 0, retention: 200}}
  down: {{loss_tolerance: 0, retention: 200}}
publishers:
  - {{lan: near, topic: up, rate_per_s: 20}}
  - {{lan: far, topic: down, rate_per_s: 20}}
subscribers:
  - {{lan: far, topic: up}}
  - {{lan: near, topic: down}}
"""
TINY = """\
wan: {delay_ms: 5}
lans: {a: {edges: 1}}
routers: 1
"""


@pytest.mark.slow
async def test_messages_cross_far_links_and_a_killed_primary() -> None:
    async with running(parse_topology(FAR_APART), NetnsDriver) as driver:
        load = LoadRunner(driver)
        await load.start()
        await load.wait_warm()
        await load.measure()
        await _clients_reach_their_own_lan_only(driver)
        primary = (await take_snapshot(driver)).assignment["up"][0]
        await driver.kill(primary)
        assert await _eventually(lambda: _has_moved(driver, primary), 20.0)
        await load.stop()
        results = await load.results()
        passed = await driver.wan_statistics("near")
        assert driver.died_unasked() == []
        run = driver.network.namespaces.run
        assert len(names_of(run)) == 8
    assert results.drained
    assert {stream.topic for stream in results.streams} == {"up", "down"}
    for stream in results.streams:
        verdict = judge_sequences(stream.sent, stream.sequences)
        assert stream.sent > 20 and verdict.lost == verdict.duplicates == verdict.reordered == 0
        latencies = sorted(b - a for a, b in zip(stream.sent_ns, stream.received_ns, strict=True))
        assert latencies[0] >= (NEAR_MS + FAR_MS) * 1e6
        assert percentile(latencies, 0.5) < (NEAR_MS + FAR_MS) * 2e6
    # The tap reads messages from the packets themselves.
    assert passed.messages_out[str(results.topic_ids["up"])] >= results.sent[0]
    assert passed.messages_back[str(results.topic_ids["down"])] >= results.sent[1]
    assert passed.unreadable == 0
    assert names_of(run) == []


async def _eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not await condition():
        if loop.time() > deadline_s:
            return False
        await asyncio.sleep(0.05)
    return True


async def _has_moved(driver: NetnsDriver, dead: str) -> bool:
    primary = (await take_snapshot(driver)).assignment["up"][0]
    return primary not in {"", dead}


async def _clients_reach_their_own_lan_only(driver: NetnsDriver) -> None:
    own, other, router = (driver.nodes[name].locator for name in ("near-1", "far-1", "router-1"))
    namespace = driver.network.path(lan_host("near"))
    for locator, expected in ((own, 0), (other, errno.ENETUNREACH), (router, errno.ENETUNREACH)):
        host, _, port = locator.rpartition(":")
        with open_socket(namespace, socket.AF_INET, socket.SOCK_STREAM) as sock:
            assert sock.connect_ex((host, int(port))) == expected
    # Nor is there anything on the way that would carry their packets: no other site, no default route.
    status, routes = await driver.execute("near", "ip", "route")
    assert status == 0 and "wan0" not in routes and "default" not in routes
    # Brokers do reach the other site.
    status, said = await driver.execute("near-1", "ip", "route", "get", other.rpartition(":")[0])
    assert status == 0 and "wan0" in said, said


async def test_faults_and_commands() -> None:
    async with running(parse_topology(TINY), NetnsDriver) as driver:
        status = await driver.status("a-1")
        assert status["locator"].startswith("198.18.1.10:")
        assert _reaches_the_cloud(driver)
        await driver.cut("a")
        # The edge does not reach the cloud any more, but we still hear of the edge.
        assert not _reaches_the_cloud(driver)
        assert (await driver.status("a-1"))["lan"] == "a"
        await driver.heal("a")
        assert _reaches_the_cloud(driver)
        await driver.limit("a", 125_000.0)
        lanes = (await driver.network.statistics())["lanes"]
        assert {lane["conditions"]["rate_mbit"] for lane in lanes} == {1.0}
        for call, complaint in (
            (driver.cut("b"), "there is no LAN b: use one of a"),
            (driver.execute("b", "true"), "there is no broker or LAN b: use one of router-1, a-1, a"),
            (driver.execute("a", "sleep", "60", timeout_s=0.2), r"sleep 60 at a took longer than 0\.2 s"),
        ):
            with pytest.raises(DriverError, match=complaint):
                await call
        assert await driver.execute("a", "false") == (1, "")
        await driver.kill("a-1")
        await driver.start_node("a-1")
        await driver.wait_ready()
        driver.keeps_directory = True
    written = json.loads((driver.directory / "wan-statistics.json").read_text())
    shutil.rmtree(driver.directory)
    assert written["forwarded"] > 0 and {lane["from"] for lane in written["lanes"]} == {"a", CLOUD}


def _reaches_the_cloud(driver: NetnsDriver) -> bool:
    host, _, port = driver.nodes["router-1"].locator.rpartition(":")
    with open_socket(driver.network.path("a-1"), socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(0.5)
        try:
            sock.connect((host, int(port)))
        except TimeoutError:
            return False
        return True


def _start_demo(folder: Path) -> tuple["subprocess.Popen[str]", str, set[int]]:
    """`isthmus demo --driver netns` as a process of its own, once it has its namespaces and ZooKeeper."""
    command = [sys.executable, "-m", "isthmus", "demo", "--driver", "netns", "--seconds", "60"]
    runner = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        assert runner.stdout is not None
        said = ""
        while "router-1 serves" not in said:
            line = runner.stdout.readline()
            assert line, said
            said += line
        run = next(facts["run"] for facts in running_testbeds() if facts["pid"] == runner.pid)
        assert len(names_of(run)) == 9
    except BaseException:
        runner.kill()
        runner.communicate()
        raise
    return runner, run, descendants(runner.pid)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    runner, run, pids = _start_demo(tmp_path)
    runner.send_signal(signal.SIGINT)
    said, _ = runner.communicate(timeout=30)
    assert runner.returncode == 1, said
    assert not wait_gone(pids, 1.0)
    assert names_of(run) == [] and run not in sweep()


def test_what_a_killed_runner_leaves_goes_with_the_next_start(tmp_path: Path) -> None:
    runner, run, pids = _start_demo(tmp_path)
    runner.kill()
    runner.communicate(timeout=30)
    # Its processes end by themselves, and the devices with the ferry; the namespaces remain.
    assert not wait_gone(pids)
    assert len(names_of(run)) == 9
    other, another_run, other_pids = _start_demo(tmp_path)
    assert names_of(run) == []
    assert len(names_of(another_run)) == 9
    other.send_signal(signal.SIGINT)
    other.communicate(timeout=30)
    assert not wait_gone(other_pids, 1.0) and names_of(another_run) == []


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    driver = NetnsDriver(parse_topology(TINY), DriverSettings(directory=tmp_path))
    try:
        await driver.network.start()
        run = driver.network.namespaces.run
        assert len(names_of(run)) == 4
        await driver.network.cut("a", CLOUD)
        with pytest.raises(DriverError, match="the WAN is not what was asked for: rtt_ms"):
            await driver._calibrate()
    finally:
        await driver.stop()
    assert names_of(run) == []
