"""Declarations of clients that mean no good, or that happened to draw the same id."""

import asyncio

import pytest

from clients import TopicQos
from coordinator import EdgeRecord
from edge_broker.broker import EdgeBroker
from overlay.codec import encode
from overlay.limits import (
    DECLARATIONS_MAX_PER_CLIENT,
    HANDSHAKE_FRAME_MAX_BYTES,
    NAME_MAX_CHARACTERS,
    RESUME_NS,
)
from overlay.messages import Declare, EndpointKind, Hello, Role
from runtime.config import EdgeConfig
from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration


async def test_only_so_many_declarations_of_a_client_are_worked_on_at_once(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        edge = await testbed.edge("ea", "a")
        client = await testbed.client("ea")
        await client.publisher("t")
        link = next(link for link in edge._links.values() if link.role is Role.CLIENT)
        answers = []
        link.send = lambda message: answers.append(message) or True
        before = len(asyncio.all_tasks())
        for _ in range(DECLARATIONS_MAX_PER_CLIENT + 10):
            # The same endpoint again and again: nothing else would limit these.
            edge.declarations.declare(link, Declare(1, EndpointKind.PUBLISHER, "t"))
        assert len(asyncio.all_tasks()) - before <= DECLARATIONS_MAX_PER_CLIENT
        assert [(answer.endpoint, answer.code) for answer in answers] == [(1, "busy")] * 10
        assert "wait for answers" in answers[0].reason
        del link.send
        await eventually(lambda: not edge.declarations._running, "all have been answered")


async def test_clients_that_drew_the_same_id_do_not_take_each_others_subscription_down(
    zookeeper_hosts, chroot
):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.router("r1")
        await testbed.edge("ea", "a")
        edge = await testbed.edge("eb", "b")
        sender, first, second = (
            await testbed.client("ea"),
            await testbed.client("eb"),
            await testbed.client("eb"),
        )
        second._new_endpoint_id = lambda: subscription.endpoint_id
        subscription = await first.subscribe("t", TopicQos(deadline_ms=500))
        publisher = await sender.publisher("t")
        await testbed.wait_for_route("t", "ea", "eb")
        other = await second.subscribe("t")
        assert other.endpoint_id == subscription.endpoint_id
        await other.close()
        # A third one on another topic, registered after that, shows that ZooKeeper has been told.
        await second.subscribe("u")
        view = edge.declarations._known["t"].view
        assert [endpoint.edge for endpoint in view.endpoints if endpoint.kind is EndpointKind.SUBSCRIBER] == [
            "eb"
        ]
        await publisher.publish(b"still there")
        assert (await subscription.receive(5)).payload == b"still there"


async def test_what_is_published_while_zookeeper_has_not_told_who_subscribes_is_not_lost(
    zookeeper_hosts, chroot, monkeypatch
):
    """The seed 19935: ZooKeeper goes away between the declaration of a topic and the first look at it."""
    monkeypatch.setattr("edge_broker.declarations._ANSWER_WITHIN_S", 0.05)
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.router("r1")
        edge = await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        sender, receiver = await testbed.client("ea"), await testbed.client("eb")
        subscription = await receiver.subscribe("t")
        watch_topic = edge.coordinator.watch_topic
        held = []
        told = asyncio.Event()

        def watch(name, tell):
            async def tell_later(view):
                await told.wait()
                tell(view)

            return watch_topic(name, lambda view: held.append(asyncio.ensure_future(tell_later(view))))

        monkeypatch.setattr(edge.coordinator, "watch_topic", watch)
        publisher = await sender.publisher("t")
        for number in range(10):
            await publisher.publish(b"%d" % number)
        topic = edge.declarations._known["t"].topic
        await eventually(lambda: topic.messages == 10, "the edge has them")
        edge.core.expire(edge.hub.clock() + 100 * RESUME_NS)
        told.set()
        async with asyncio.timeout(10):
            received = [(await anext(subscription)).payload for _ in range(10)]
        assert received == [b"%d" % number for number in range(10)]
        assert held


async def test_a_welcome_fits_before_the_handshake_is_over_however_many_edges_a_lan_has():
    broker = EdgeBroker(EdgeConfig(id="edge-500", lan="plant"))
    broker.coordinator._cluster = "c" * NAME_MAX_CHARACTERS
    broker.edges = {
        f"edge-{number}": EdgeRecord(
            f"edge-{number}", f"edge-{number}.{'x' * 40}.example:7400", "plant", "h", ""
        )
        for number in range(1_000)
    }
    hello = Hello(Role.CLIENT, "0" * 16, 5, 200_000_000)
    _, welcome = broker.admit(hello)
    assert len(encode(welcome)) <= HANDSHAKE_FRAME_MAX_BYTES
    assert len(welcome.edges) >= 30
    assert welcome.edges[0].startswith("edge-501."), "each edge tells of those that follow it"
    broker.edges = {name: broker.edges[name] for name in ("edge-500", "edge-7")}
    assert len(broker.admit(hello)[1].edges) == 1
