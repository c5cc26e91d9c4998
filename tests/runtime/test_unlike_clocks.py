"""Peers whose clocks are worse than ours: what is learnt of them, and what is not."""

import logging

import pytest

from overlay.messages import Role
from tests.runtime.nodes import World


@pytest.mark.parametrize(("theirs_ppm", "is_known"), [(30, True), (5, True), (250, False)])
async def test_from_a_broker_with_a_worse_clock_ages_are_unknown(
    world: World, caplog: pytest.LogCaptureFixture, theirs_ppm: int, is_known: bool
) -> None:
    """Nobody after us knows of that clock. In the other direction ours is the better one."""
    caplog.set_level(logging.WARNING, "isthmus.connection")
    server = await world.node("server", listen=True, drift_ppm=30)
    node = await world.node("a", drift_ppm=theirs_ppm)
    link = await world.connect(node, server)
    at_server = server.links["a"]
    node.send("server")
    await server.until(lambda: server.got.get("a") == [1])
    await node.until_idle(link)
    assert link.connection is not None and at_server.connection is not None
    for each in (link.connection, at_server.connection):
        liveness = each.liveness
        assert liveness is not None and liveness.round_trip_ns, "both have had helpers"
    assert at_server.clock.is_known is is_known
    assert at_server.worse_drift_ppm == (0 if is_known else theirs_ppm)
    assert link.clock.is_known is (theirs_ppm >= 30)
    assert (at_server.statistics().clock_shift_ms is None) is not is_known
    warned = [record for record in caplog.records if "clock_drift_ppm" in record.getMessage()]
    assert len(warned) == (theirs_ppm != 30)


async def test_of_a_client_with_a_worse_clock_it_is_known_how_bad(world: World) -> None:
    server = await world.node("server", listen=True, drift_ppm=30)
    client = await world.node("c", Role.CLIENT, drift_ppm=250)
    server.link("c", Role.CLIENT)
    link = await world.connect(client, server)
    at_server = server.links["c"]
    client.send("server")
    await server.until(lambda: server.got.get("c") == [1])
    await client.until_idle(link)
    assert at_server.role is Role.CLIENT
    assert at_server.worse_drift_ppm == at_server.clock.drift_ppm == 250
    assert link.worse_drift_ppm == 0
    assert at_server.clock.is_known and link.clock.is_known
