"""The process testbed: it starts, obeys and ends, and nothing is left however it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlay.locator import Locator
from runtime.process import wait_until
from tests.topology.processes import descendants, state, wait_gone
from topology.children import Child
from topology.compose import broker_check, zookeeper_check
from topology.driver import DriverSettings, running
from topology.errors import DriverError
from topology.model import load_topology, parse_topology
from topology.process_driver import ProcessDriver, unemulated

TINY = """\
wan: {delay_ms: 20}
lans: {a: {edges: 1}}
routers: 1
topics: {t: {}}
publishers: [{lan: a, topic: t, rate_per_s: 20}]
subscribers: [{lan: a, topic: t}]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return file


@pytest.mark.testbed
async def test_starts_obeys_and_leaves_nothing() -> None:
    before = descendants(os.getpid())
    async with running(parse_topology(TINY), ProcessDriver) as driver:
        await _obeys(driver)
        pids = descendants(os.getpid()) - before
        directory = driver.directory
        assert len(pids) >= 5
    assert not wait_gone(pids, 1.0)
    assert not directory.exists()


def test_says_what_it_leaves_out_of_a_topology() -> None:
    assert unemulated(parse_topology(TINY)) == []
    assert unemulated(load_topology("star-8")) == ["jitter_ms and loss of site-8-wan"]
    assert unemulated(load_topology("global")) == ["28 links to single hosts or between LANs"]
    assert unemulated(parse_topology(TINY + "cloud: {delay_ms: 1}")) == [
        "the conditions between hosts of the cloud"
    ]


async def test_links_that_differ_by_direction_are_told_to_the_gateway(tmp_path: Path) -> None:
    text = TINY.replace(
        "wan: {delay_ms: 20}", "wan: {out: {delay_ms: 1, rate_mbit: 8}, back: {delay_ms: 60}}"
    )
    said: list[str] = []
    driver = ProcessDriver(parse_topology(text), DriverSettings(directory=tmp_path, say=said.append))
    try:
        # What is under test is the gateway alone; no ZooKeeper is needed for it.
        await driver.start_gateway("a")
        proxy = Locator.parse(said[-1].split(" serves at ")[1].split(",")[0])
        server = await asyncio.start_server(_echo_once, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
            writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            started_s = time.monotonic()
            writer.write(b"x" * 20_000)
            await reader.readexactly(1)
            # 1 ms there, 60 ms back, and 20 kB at a megabyte a second.
            assert time.monotonic() - started_s >= 0.075
            writer.close()
            await writer.wait_closed()
    finally:
        await driver.stop()
    assert "30.5 ms to the cloud" in said[-1]


async def _echo_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(20_000)
    writer.write(b"y")
    await writer.drain()
    await reader.read()
    writer.close()


async def _obeys(driver: ProcessDriver) -> None:
    status = await driver.status("router-1")
    assert status["leader"] and status["locator"].startswith("127.100.1.1:")
    edge = await driver.status("a-1")
    assert edge["lan"] == "a" and edge["locator"].startswith("127.1.0.10:")

    # The health checks of compose files, on the real things.
    keeper, router = (Locator.parse(text) for text in (driver.zookeeper_hosts, driver.nodes["router-1"].http))
    assert await _bash(zookeeper_check(keeper.host, keeper.port)) == 0
    assert await _bash(broker_check(router.host, router.port)) == 0
    assert await _bash(zookeeper_check(router.host, router.port)) != 0

    child = driver.nodes["router-1"].child
    assert child is not None
    await driver.freeze("router-1")
    assert await wait_until(lambda: state(child.pid) == "T", 5.0)
    await driver.thaw("router-1")
    assert await wait_until(lambda: state(child.pid) != "T", 5.0)
    assert (await driver.status("router-1"))["ready"]

    locator = driver.nodes["router-1"].locator
    await driver.kill("router-1")
    assert not driver.nodes["router-1"].is_alive
    assert "router-1" not in await driver.statuses()
    assert await _bash(broker_check(router.host, router.port)) != 0
    with pytest.raises(DriverError, match="router-1 gives no status"):
        await driver.status("router-1")
    assert driver.died_unasked() == []
    await driver.start_node("router-1")
    await driver.wait_ready()
    assert driver.nodes["router-1"].locator == locator

    await driver.cut("a")
    await driver.heal("a")
    assert (await driver.wan_statistics("a")).unreadable == 0
    with pytest.raises(DriverError, match=r"there is no broker nobody: use one of router-1, a-1"):
        await driver.freeze("nobody")

    # What crashes is not forgotten, neither because it is killed or drained afterwards nor started again.
    os.kill(driver.pid_of("router-1"), signal.SIGKILL)
    assert await wait_until(lambda: not driver.nodes["router-1"].is_alive, 5.0)
    await driver.kill("router-1")
    with pytest.raises(DriverError, match="router-1 had ended with SIGKILL before"):
        await driver.drain("router-1")
    assert driver.died_unasked() == ["router-1"]
    await driver.start_node("router-1")
    assert driver.died_unasked() == ["router-1"]


async def _bash(line: str) -> int:
    process = await asyncio.create_subprocess_exec("bash", "-c", line, stderr=asyncio.subprocess.DEVNULL)
    return await asyncio.wait_for(process.wait(), 5.0)


async def test_a_process_that_cannot_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    child = Child("broken", "isthmus", ["router", "--listen", "nonsense"], tmp_path)
    await child.start()
    try:
        with pytest.raises(
            DriverError, match=r"(?s)broken ended with status 1.*broken\.log.*listen is 'nonsense'"
        ):
            await child.next_event(20.0)
        assert child.died_unasked
    finally:
        await child.stop()


async def test_a_process_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    child = Child("mute", "http.server", ["--bind", "127.0.0.1", "0"], tmp_path)
    await child.start()
    try:
        with pytest.raises(DriverError, match=r"mute said nothing for 0\.1 s"):
            await child.wait_for("anything", 0.1)
    finally:
        await child.stop()
    assert not child.is_alive and not child.died_unasked


def _start_up(tiny: Path) -> tuple["subprocess.Popen[str]", set[int]]:
    """`isthmus up` as a process of its own, with everything it started."""
    command = [sys.executable, "-m", "isthmus", "up", str(tiny), "--json", "--every", "0.2"]
    runner = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A runner that is killed cannot remove its directory.
        env={**os.environ, "TMPDIR": str(tiny.parent)},
    )
    assert runner.stdout is not None
    view = json.loads(runner.stdout.readline() or "{}")
    assert view["leader"] == "router-1"
    pids = descendants(runner.pid)
    assert len(pids) >= 5
    return runner, pids


def _finish(runner: "subprocess.Popen[str]") -> str:
    try:
        return runner.communicate(timeout=20)[1]
    finally:
        runner.kill()


@pytest.mark.testbed
def test_nothing_survives_a_killed_runner(tiny: Path) -> None:
    runner, pids = _start_up(tiny)
    frozen = next(pid for pid in pids if b"router-1" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(frozen, signal.SIGSTOP)
    runner.kill()
    _finish(runner)
    assert not wait_gone(pids)


@pytest.mark.testbed
def test_ctrl_c_leaves_nothing(tiny: Path) -> None:
    runner, pids = _start_up(tiny)
    runner.send_signal(signal.SIGINT)
    said = _finish(runner)
    assert runner.returncode == 0, said
    assert "nothing is left running" in said
    assert not wait_gone(pids, 1.0)
