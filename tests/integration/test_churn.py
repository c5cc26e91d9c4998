"""Reconnects, reassignments and expiries by the dozen leave nothing behind and lose nothing."""

import asyncio

import pytest

from overlay.errors import CloseReason
from tests.coordinator.faults import Resources, expire_session, lose_connection, server_watches
from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration

ROUNDS = 25
"""Of each of four kinds of trouble: a hundred in all."""


async def _watches_when_set(hosts: str) -> int:
    """A session that has just come back sets its watches one after the other."""
    before, seen = 0, await server_watches(hosts)
    while seen > before:
        before = seen
        await asyncio.sleep(0.5)
        seen = await server_watches(hosts)
    return before


async def test_a_hundred_troubles_leave_nothing_behind(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.router("r1")
        await testbed.router("r2")
        await testbed.edge("ea", "a")
        edge_b = await testbed.edge("eb", "b")
        subscription = await (await testbed.client("eb")).subscribe("alarm")
        publisher = await (await testbed.client("ea")).publisher("alarm")
        await publisher.wait_for_subscribers(1, 10)
        await testbed.wait_for_route("alarm", "ea", "eb")
        state = testbed.topic_at("ea", "alarm")
        await eventually(lambda: state.backup is not None, "a backup is assigned")
        sent = received = 0

        async def exchange():
            nonlocal sent, received
            for _ in range(5):
                await publisher.publish(b"%d" % sent)
                sent += 1
            while received < sent:
                assert (await subscription.receive(10)).payload == b"%d" % received
                received += 1

        async def links_are_up():
            edges = testbed.edges.values()
            await eventually(
                lambda: all(
                    edge.core.topics and all(dial.link.is_up for dial in edge._dialers.values())
                    for edge in edges
                ),
                "all links are up",
            )

        async def client_comes_and_goes():
            client = await testbed.client("ea")
            guest = await client.subscribe("alarm")
            await guest.close()
            testbed.clients.remove(client)
            await client.close()

        async def connections_break():
            for connection in list(testbed.edges["ea"].hub._connections):
                connection.abort(CloseReason.LOST, "cut by the test")

        async def zookeeper_connection_breaks():
            await lose_connection(edge_b.session)

        async def zookeeper_session_expires():
            await expire_session(edge_b.session, zookeeper_hosts)
            await eventually(lambda: publisher.subscribers == 1, "the endpoint is registered again")

        async def round_of_troubles():
            for trouble in (
                client_comes_and_goes,
                connections_break,
                zookeeper_connection_breaks,
                zookeeper_session_expires,
            ):
                await trouble()
                await exchange()
                await links_are_up()

        await round_of_troubles()
        before = Resources()
        watches = await _watches_when_set(zookeeper_hosts)
        for _ in range(ROUNDS):
            await round_of_troubles()
        await eventually(lambda: Resources().within(before), f"{Resources()} is back at {before}")

        async def watches_are_back():
            return await server_watches(zookeeper_hosts) <= watches

        await eventually(watches_are_back, "no watch is left at the server")
        assert subscription.statistics().lost == 0


async def test_routers_that_come_and_go_move_topics_and_leave_nothing_behind(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.router("r1")
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        subscription = await (await testbed.client("eb")).subscribe("alarm")
        publisher = await (await testbed.client("ea")).publisher("alarm")
        await publisher.wait_for_subscribers(1, 10)
        await testbed.wait_for_route("alarm", "ea", "eb")
        state = testbed.topic_at("ea", "alarm")
        sent = 0

        async def publish_until(condition, what):
            async def step():
                nonlocal sent
                await publisher.publish(b"%d" % sent)
                sent += 1
                return condition()

            await eventually(step, what)

        for _ in range(3):
            guest = await testbed.router("r2")
            await publish_until(lambda: state.backup == "r2", "the new router becomes backup")
            old = testbed.routers.pop("r1")
            await old.drain()
            await publish_until(lambda: state.primary == "r2", "the topic moves")
            await old.close()
            await testbed.router("r1")
            await publish_until(lambda: state.backup == "r1", "the other one becomes backup")
            del testbed.routers["r2"]
            await guest.drain()
            await publish_until(lambda: state.primary == "r1", "the topic moves back")
            await guest.close()
        for number in range(sent):
            assert (await subscription.receive(10)).payload == b"%d" % number
        assert subscription.statistics().lost == 0
        await asyncio.sleep(0)
