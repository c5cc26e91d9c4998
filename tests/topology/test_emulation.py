"""Packets cross the emulated WAN, and it is what was asked for: measured, not believed."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.topology.namespaces_needed import needs_namespaces
from topology.conditions import LinkConditions
from topology.emulation import EmulatedNetwork, calibrate_conditions, table_row, two_sites
from topology.errors import DriverError
from topology.namespaces import names_of, open_socket, why_unavailable
from topology.netem import why_no_netem
from topology.network import NETWORK
from topology.tun import set_up_device
from topology.wan_control import ask, change_link, cut_link, heal_link
from topology.wan_kind import WanKind

pytestmark = needs_namespaces

_no_netem = why_no_netem() if why_unavailable() is None else "no namespaces"


@pytest.fixture(
    params=[
        WanKind.FERRY,
        pytest.param(
            WanKind.NETEM,
            marks=pytest.mark.skipif(_no_netem is not None, reason=f"make netem-test: {_no_netem}"),
        ),
    ]
)
def wan(request: pytest.FixtureRequest) -> WanKind:
    """Both must do the same."""
    kind: WanKind = request.param
    return kind


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
async def test_calibration(conditions: LinkConditions, packets: int, wan: WanKind, tmp_path: Path) -> None:
    record = await calibrate_conditions(conditions, directory=tmp_path, packets=packets, wan=wan)
    assert [item for item in record["measurements"] if not item["ok"]] == []
    assert record["emulated_by"] == wan
    kinds = [item["what"] for item in record["measurements"]]
    assert kinds.count("rtt_ms") == 1 and kinds.count("loss") == 2
    assert kinds.count("rate_mbit") == (2 if conditions.rate_mbit else 0)


def test_a_calibration_as_a_line_of_the_table() -> None:
    def item(what: str, measured: float) -> dict[str, Any]:
        return {"what": what, "measured": measured}

    measurements = [item("rtt_ms", 30.214), item("loss", 0.01), item("rate_mbit", 19.9), item("loss", 0)]
    record = {"ok": True, "invalid": None, "measurements": measurements}
    conditions = LinkConditions(delay_ms=15, rate_mbit=20)
    line = table_row(conditions, record)
    assert line == "| 15 ms, 20 Mbit/s | 30.21 ms | 1.000%, 0.000% | 19.900 Mbit/s | yes |"
    assert table_row(conditions, {**record, "ok": False}).endswith("| no |")
    assert table_row(conditions, {**record, "ok": False, "invalid": "too busy"}).endswith("| no: too busy |")


@pytest.mark.testbed
async def test_calibration_notices_a_wan_that_is_something_else(wan: WanKind, tmp_path: Path) -> None:
    conditions = LinkConditions(delay_ms=10, rate_mbit=5)
    network = EmulatedNetwork(two_sites(conditions, conditions), tmp_path, wan=wan)
    try:
        await network.start()
        await network.change("a", "b", delay_ms=12, loss=0.02, rate_mbit=4.0)
        calibration = await network.calibrate(packets=5_000)
    finally:
        await network.stop()
    assert not calibration.ok
    assert len(calibration.failures()) == len(calibration.measurements) == 5


@pytest.mark.testbed
async def test_links_change_while_running_and_everything_goes(wan: WanKind, tmp_path: Path) -> None:
    network = EmulatedNetwork(two_sites(LinkConditions(delay_ms=20), LinkConditions()), tmp_path, wan=wan)
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
        # The kernel does not tell a cut from a loss.
        assert lane["cut_dropped" if wan is WanKind.FERRY else "dropped"] == 1 and lane["packets"] == 3
    finally:
        await network.stop()
    assert names_of(run) == []


@pytest.mark.testbed
async def test_a_ferry_that_was_held_up_says_so(tmp_path: Path) -> None:
    plan = two_sites(LinkConditions(delay_ms=1), LinkConditions())
    network = EmulatedNetwork(plan, tmp_path, wan=WanKind.FERRY)
    try:
        await network.start()
        ferry = network.process
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


@pytest.mark.testbed
async def test_a_host_gets_another_device_while_packets_are_carried(wan: WanKind, tmp_path: Path) -> None:
    network = EmulatedNetwork(two_sites(LinkConditions(delay_ms=5), LinkConditions()), tmp_path, wan=wan)
    try:
        await network.start()
        a = network.plan.host("a")
        namespace = str(network.path("a"))
        with pytest.raises(DriverError, match="a is attached already: detach it first"):
            await ask(network.control, "attach", name="a", site="a", address=a.address, namespace=namespace)
        if wan is WanKind.FERRY:
            with pytest.raises(DriverError, match="0 descriptors came with attach: hand over two"):
                await ask(network.control, "attach", name="c", site="a", address="198.18.1.9")
        # The ferry goes on: what takes the kernel long happens on our side.
        for _ in range(3):
            await network.attach("a", "a", a.address, network.path("a"))
            set_up_device(network.path("a"), a.address, [NETWORK])
            assert await _crossing_ms(network) >= 5
        assert (await network.statistics())["stray"] == 0
    finally:
        await network.stop()


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
