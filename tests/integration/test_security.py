"""A whole overlay that trusts only its own authority: brokers, clients, operators."""

import pytest

from clients import TopicQos
from overlay.errors import CloseReason
from overlay.messages import Role
from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration


async def test_an_encrypted_overlay_carries_messages_through_a_crash(zookeeper_hosts, chroot, certificates):
    """Client to edge, edge to edge, edge to router, router to router: all encrypted, nothing lost."""
    async with overlay(zookeeper_hosts, chroot, certificates=str(certificates)) as testbed:
        for name in ("r1", "r2"):
            await testbed.router(name)
        for name, lan in (("ea", "a"), ("ea2", "a"), ("eb", "b")):
            await testbed.edge(name, lan)
        options = {"certificates": certificates, "principal": "alice"}
        receiver, neighbour = await testbed.client("eb", **options), await testbed.client("ea2", **options)
        sender = await testbed.client("ea", **options)
        qos = TopicQos(retention=1024)
        subscriptions = [await client.subscribe("t", qos) for client in (receiver, neighbour)]
        publisher = await sender.publisher("t", qos)
        await testbed.wait_for_route("t", "ea", "eb")
        await eventually(lambda: testbed.edges["ea"]._links["edge:ea2"].is_up, "the LAN's edges are linked")
        await eventually(
            lambda: any(
                link.is_up and link.role is Role.ROUTER
                for router in testbed.routers.values()
                for link in router._links.values()
            ),
            "the routing brokers are linked",
        )
        for number in range(100):
            await publisher.publish(b"%d" % number)
        await sender.flush(10)
        primary = testbed.topic_at("ea", "t").primary
        for connection in list(testbed.routers[primary].hub._connections):
            connection.abort(CloseReason.LOST, "crashed")
        await testbed.routers.pop(primary).close()
        for number in range(100, 200):
            await publisher.publish(b"%d" % number)
        for subscription in subscriptions:
            got = [(await subscription.receive(10)).payload for _ in range(200)]
            assert got == [b"%d" % number for number in range(200)]
        connections = [
            connection
            for broker in (*testbed.edges.values(), *testbed.routers.values())
            for connection in broker.hub._connections
            if connection.is_open
        ]
        assert len(connections) >= 8
        assert all(connection.peer_certificate is not None for connection in connections)
