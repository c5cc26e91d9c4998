"""Packets cross the emulated WAN, and it is what was asked for: measured, not believed."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from tests.topology.namespaces_needed import needs_namespaces
from topology.conditions import LinkConditions
from topology.emulation import EmulatedNetwork, calibrate_conditions, two_sites
from topology.errors import DriverError
from topology.namespaces import names_of, open_socket
from topology.wan_control import change_link, cut_link, heal_link

pytestmark = needs_namespaces


@pytest.mark.parametrize(
    ("conditions", "packets"),
    [
        (LinkConditions(delay_ms=30), 2_000),
        (LinkConditions(delay_ms=20, jitter_ms=5, loss=0.05, burst=3), 10_000),
        (LinkConditions(delay_ms=5, rate_mbit=5), 2_000),
    ],
    ids=lambda value: value.describe() if isinstance(value, LinkConditions) else str(value),
)
@pytest.mark.testbed
async def test_calibration(conditions: LinkConditions, packets: int, tmp_path: Path) -> None:
    record = await calibrate_conditions(conditions, directory=tmp_path, packets=packets)
    assert all(item["ok"] for item in record["measurements"]), record
    kinds = [item["what"] for item in record["measurements"]]
    assert kinds.count("rtt_ms") == 1 and kinds.count("loss") == 2
    assert kinds.count("rate_mbit") == (2 if conditions.rate_mbit else 0)


@pytest.mark.testbed
async def test_calibration_notices_a_wan_that_is_something_else(tmp_path: Path) -> None:
    conditions = LinkConditions(delay_ms=10, rate_mbit=5)
    network = EmulatedNetwork(two_sites(conditions, conditions), tmp_path)
    try:
        await network.start()
        await network.change("a", "b", delay_ms=12, loss=0.02, rate_mbit=4.0)
        calibration = await network.calibrate(packets=5_000)
    finally:
        await network.stop()
    assert not calibration.ok
    assert len(calibration.failures()) == len(calibration.measurements) == 5


@pytest.mark.testbed
async def test_links_change_while_running_and_everything_goes(tmp_path: Path) -> None:
    network = EmulatedNetwork(two_sites(LinkConditions(delay_ms=20), LinkConditions()), tmp_path)
    try:
        await network.start()
        run = network.namespaces.run
        assert len(names_of(run)) == 2
        # As the command line does it, from outside.
        answer = await asyncio.to_thread(change_link, "a", "b", {"delay_ms": 60}, run=run)
        assert {lane["delay_ms"] for lane in answer.values()} == {60}
        assert await _crossing_ms(network) >= 60
        await asyncio.to_thread(cut_link, "a", "b", one_way=True, run=run)
        with pytest.raises(TimeoutError):
            await _crossing_ms(network, timeout_s=0.3)
        await asyncio.to_thread(heal_link, "a", "b", run=run)
        assert await _crossing_ms(network) >= 60
        with pytest.raises(DriverError, match="there is no link from a to moon: sites are a, b"):
            await network.cut("a", "moon")
        with pytest.raises(DriverError, match="no testbed 0-nobody runs"):
            await asyncio.to_thread(cut_link, "a", "b", run="0-nobody")
        statistics = await network.statistics()
        lane = next(lane for lane in statistics["lanes"] if lane["from"] == "a")
        assert lane["cut_dropped"] == 1 and lane["packets"] == 3
    finally:
        await network.stop()
    assert names_of(run) == []


@pytest.mark.testbed
async def test_a_ferry_that_was_held_up_says_so(tmp_path: Path) -> None:
    network = EmulatedNetwork(two_sites(LinkConditions(delay_ms=1), LinkConditions()), tmp_path)
    try:
        await network.start()
        ferry = network.ferry
        assert ferry is not None
        await _crossing_ms(network)
        ferry.signal(signal.SIGSTOP)
        crossing = asyncio.create_task(_crossing_ms(network))
        await asyncio.sleep(0.2)
        ferry.signal(signal.SIGCONT)
        assert await crossing > 100
        statistics = await network.statistics()
        await network.watch()
        statistics_anew = await network.statistics()
    finally:
        await network.stop()
    assert statistics["late"] >= 1 and statistics["late_max_ms"] > 100
    assert "too busy" in statistics["invalid"]
    assert statistics_anew["forwarded"] == statistics_anew["late"] == 0
    assert statistics_anew["invalid"] is None


async def _crossing_ms(network: EmulatedNetwork, timeout_s: float = 5.0) -> float:
    """How long one datagram takes from a to b. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    b = network.plan.host("b")
    with (
        open_socket(network.path("b"), socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        open_socket(network.path("a"), socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.setblocking(False)
        receiver.bind((b.address, 0))
        started_s = loop.time()
        sender.sendto(b"x", receiver.getsockname())
        async with asyncio.timeout(timeout_s):
            await loop.sock_recv(receiver, 10)
        return (loop.time() - started_s) * 1e3
