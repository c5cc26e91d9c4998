"""`isthmus status` against real brokers and a real ZooKeeper."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator import RouterRecord, Session
from isthmus.commands.cluster import open_cluster
from isthmus.commands.status import collect
from tests.integration.harness import Overlay, eventually, overlay
from tests.isthmus.run import isthmus

pytestmark = pytest.mark.integration


@pytest.fixture
async def testbed(zookeeper_hosts: str, chroot: str) -> AsyncIterator[Overlay]:
    """Two routing brokers, two LANs, one topic between them."""
    async with overlay(zookeeper_hosts, chroot) as brokers:
        await brokers.router("r1")
        await brokers.router("r2")
        await brokers.edge("ea", "a")
        await brokers.edge("eb", "b")
        publisher, subscriber = await brokers.client("ea"), await brokers.client("eb")
        await publisher.publisher("door")
        await subscriber.subscribe("door")
        await brokers.wait_for_route("door", "ea", "eb")
        yield brokers


async def healthy_report(zookeeper_hosts: str, chroot: str) -> dict[str, Any]:
    """The command's JSON once the overlay has settled."""
    last: dict[str, Any] = {}

    async def settled() -> bool:
        done = await isthmus("status", f"--zookeeper={zookeeper_hosts}", f"--chroot={chroot}", "--json")
        last.update(json.loads(done.output))
        assert (done.status == 0) == last["healthy"], done.errors
        return bool(last["healthy"])

    await eventually(settled, f"a healthy overlay, problems were {last.get('problems')}")
    return last


async def test_a_healthy_overlay_exits_with_0_and_tells_everything(
    testbed: Overlay, zookeeper_hosts: str, chroot: str
) -> None:
    report = await healthy_report(zookeeper_hosts, chroot)
    assert report["leader"] in {"r1", "r2"}
    assert report["epoch"] >= 1
    assert report["problems"] == []
    routers = {router["id"]: router for router in report["routers"]}
    assert sorted(router["primary_of"] + router["backup_of"] for router in routers.values()) == [
        ["door"],
        ["door"],
    ]
    assert all(router["ready"] for router in routers.values())
    edges = {edge["id"]: edge for edge in report["edges"]}
    assert {edge["lan"]: edge["clients"] for edge in edges.values()} == {"a": 1, "b": 1}
    assert {link["peer"] for link in edges["ea"]["links"] if link["up"]} == {"r1", "r2"}


async def test_the_table_names_all_brokers_and_the_verdict(
    testbed: Overlay, zookeeper_hosts: str, chroot: str
) -> None:
    await healthy_report(zookeeper_hosts, chroot)
    done = await isthmus("status", f"--zookeeper={zookeeper_hosts}", f"--chroot={chroot}")
    assert done.status == 0, done.output
    for word in ("r1", "r2", "ea", "eb", "(leader)", "healthy"):
        assert word in done.output


async def test_a_broker_that_does_not_answer_is_named_with_the_reason(
    testbed: Overlay, zookeeper_hosts: str, chroot: str
) -> None:
    ghost = RouterRecord(id="ghost", locator="127.0.0.1:1", host="nowhere", http="127.0.0.1:1")
    await testbed.routers["r1"].coordinator.register_router(ghost)
    done = await isthmus("status", f"--zookeeper={zookeeper_hosts}", f"--chroot={chroot}")
    assert done.status == 1
    assert "routing broker ghost: 127.0.0.1:1 cannot be asked" in done.output


async def test_without_routing_brokers_the_reason_is_that(zookeeper_hosts: str, chroot: str) -> None:
    async with overlay(zookeeper_hosts, chroot) as brokers:
        await brokers.edge("ea", "a")
        client = await brokers.client("ea")
        await client.publisher("door")
        async with open_cluster(zookeeper_hosts, chroot) as coordinator:
            report = await collect(coordinator)
    assert report.leader is None
    assert "there is no routing broker: start one with `isthmus router`" in report.problems
    assert "topic 'door': nobody is there to serve it" in report.problems


async def test_looking_at_nothing_is_an_error_and_leaves_no_traces(zookeeper_hosts: str, chroot: str) -> None:
    done = await isthmus("status", f"--zookeeper={zookeeper_hosts}", f"--chroot={chroot}")
    assert done.status == 1
    assert f"there is no overlay at {chroot}" in done.errors
    session = Session(zookeeper_hosts, "/")
    await session.start()
    try:
        assert await session.exists(chroot) is None
    finally:
        await session.close()
