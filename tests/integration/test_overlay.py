"""Two LANs talk across the WAN: real brokers, sockets and ZooKeeper."""

import asyncio

import pytest

from clients import BEST_EFFORT, RefusedError, TopicQos, connect
from overlay.errors import CloseReason
from overlay.messages import Role
from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration


async def received(subscription, count, timeout_s=10.0):
    return [(await subscription.receive(timeout_s)).payload for _ in range(count)]


async def test_a_message_crosses_from_lan_to_lan(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.router("r1")
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        sender = await testbed.client("ea")
        receiver = await testbed.client("eb")
        subscription = await receiver.subscribe("plant/temperature")
        publisher = await sender.publisher("plant/temperature")
        await publisher.wait_for_subscribers(1, 10)
        await testbed.wait_for_route("plant/temperature", "ea", "eb")
        for number in range(100):
            await publisher.publish(b"%d" % number)
        assert await received(subscription, 100) == [b"%d" % number for number in range(100)]
        assert subscription.statistics().lost == 0
        assert publisher.subscribers == 1


async def test_first_messages_wait_for_the_route(zookeeper_hosts, chroot):
    """Published before any routing broker exists; delivered once one does."""
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        receiver = await testbed.client("eb")
        sender = await testbed.client("ea")
        subscription = await receiver.subscribe("alarm")
        publisher = await sender.publisher("alarm")
        await publisher.wait_for_subscribers(1, 10)
        for number in range(200):
            await publisher.publish(b"%d" % number)
        await publisher.close()
        await testbed.router("r1")
        assert await received(subscription, 200) == [b"%d" % number for number in range(200)]


async def test_a_topic_with_interest_in_one_lan_never_leaves_it(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        router = await testbed.router("r1")
        await testbed.edge("ea1", "a")
        await testbed.edge("ea2", "a")
        await testbed.edge("eb", "b")
        sender = await testbed.client("ea1")
        same_edge = await (await testbed.client("ea1")).subscribe("local")
        same_lan = await (await testbed.client("ea2")).subscribe("local")
        publisher = await sender.publisher("local")
        await publisher.wait_for_subscribers(2, 10)
        await eventually(
            lambda: testbed.topic_at("ea1", "local").interested_edges == ("ea2",), "edges of the LAN know"
        )
        for number in range(50):
            await publisher.publish(b"%d" % number)
        expected = [b"%d" % number for number in range(50)]
        assert await received(same_edge, 50) == expected
        assert await received(same_lan, 50) == expected
        for edge in testbed.edges.values():
            for link in edge.status()["links"]:
                if link.role == Role.ROUTER:
                    assert link.outbox.messages_sent == 0
                    assert link.outbox.bytes_sent == 0
                    assert link.bytes_received == 0
        assert router.core.statistics().messages_admitted == 0
        # Somebody in another LAN subscribes: now, and only now, it crosses.
        far = await (await testbed.client("eb")).subscribe("local")
        await publisher.wait_for_subscribers(3, 10)
        await testbed.wait_for_route("local", "ea1", "eb")
        await publisher.publish(b"far")
        assert await received(far, 1) == [b"far"]


async def test_publishers_on_many_edges_and_topics(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        for name in ("r1", "r2", "r3"):
            await testbed.router(name)
        lans = ("a", "b", "c", "d")
        for lan in lans:
            await testbed.edge(f"e{lan}", lan)
        clients = {lan: await testbed.client(f"e{lan}") for lan in lans}
        topics = [f"topic-{number}" for number in range(8)]
        subscriptions = {
            (lan, topic): await clients[lan].subscribe(topic) for lan in lans for topic in topics
        }
        publishers = {(lan, topic): await clients[lan].publisher(topic) for lan in lans for topic in topics}
        for (lan, topic), publisher in publishers.items():
            await publisher.wait_for_subscribers(len(lans), 10)
            for other in lans:
                if other != lan:
                    await testbed.wait_for_route(topic, f"e{lan}", f"e{other}")
        for number in range(20):
            for (lan, topic), publisher in publishers.items():
                await publisher.publish(f"{lan} {topic} {number}".encode())
        for (_, topic), subscription in subscriptions.items():
            got = await received(subscription, 20 * len(lans))
            for lan in lans:
                mine = [payload for payload in got if payload.startswith(lan.encode())]
                assert mine == [f"{lan} {topic} {number}".encode() for number in range(20)]
        primaries = {testbed.topic_at("ea", topic).primary for topic in topics}
        assert primaries == {"r1", "r2", "r3"}, "topics are spread over the routing brokers"


async def test_qos_conflicts_and_bad_names_are_refused_with_reasons(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.edge("ea", "a")
        client = await testbed.client("ea")
        await client.publisher("speed", TopicQos(deadline_ms=50, loss_tolerance=3))
        with pytest.raises(RefusedError, match=r"deadline_ms is 50.*asked for 20") as refusal:
            await client.publisher("speed", TopicQos(deadline_ms=20, loss_tolerance=3))
        assert refusal.value.code == "qos"
        other = await testbed.client("ea")
        assert (await other.subscribe("speed")).qos.deadline_ms == 50
        assert (await other.publisher("logs", BEST_EFFORT)).qos == BEST_EFFORT


async def test_a_primary_that_is_killed_costs_nothing(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        routers = {name: await testbed.router_process(name) for name in ("r1", "r2", "r3")}
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        subscription = await (await testbed.client("eb")).subscribe("alarm")
        publisher = await (await testbed.client("ea")).publisher("alarm")
        await publisher.wait_for_subscribers(1, 10)
        state = testbed.topic_at("ea", "alarm")
        await eventually(lambda: state.primary and state.backup, "primary and backup are assigned")

        async def ready(name):
            status = await routers[name].status()
            return status["routes"] == {"alarm": ["eb"]} and {"ea", "eb"} == {
                link["peer"] for link in status["links"] if link["up"] and link["role"] == "edge"
            }

        victim, successor = state.primary, state.backup
        await eventually(lambda: ready(victim), "both edges are connected to the primary")
        await eventually(lambda: ready(successor), "both edges are connected to the backup")
        sent = 0
        for _ in range(200):
            await publisher.publish(b"%d" % sent)
            sent += 1
            await asyncio.sleep(0.001)
        killing = asyncio.create_task(routers[victim].kill())
        for _ in range(200):
            await publisher.publish(b"%d" % sent)
            sent += 1
            await asyncio.sleep(0.001)
        await killing
        assert await received(subscription, sent) == [b"%d" % number for number in range(sent)]
        statistics = subscription.statistics()
        assert (statistics.lost, statistics.duplicates) == (0, 0)
        await eventually(lambda: state.primary == successor, "the leader makes the backup primary")
        await eventually(lambda: state.backup not in (None, victim, successor), "a new backup is chosen")


async def test_drain_hands_topics_over_without_loss(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        for name in ("r1", "r2", "r3"):
            await testbed.router(name)
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        subscription = await (await testbed.client("eb")).subscribe("alarm")
        publisher = await (await testbed.client("ea")).publisher("alarm")
        await publisher.wait_for_subscribers(1, 10)
        await testbed.wait_for_route("alarm", "ea", "eb")
        state = testbed.topic_at("ea", "alarm")
        victim = testbed.routers.pop(state.primary)
        stopping = asyncio.create_task(_drain_and_close(victim))
        sent = 0
        while not stopping.done() or sent < 500:
            await publisher.publish(b"%d" % sent)
            sent += 1
            await asyncio.sleep(0.001)
        await stopping
        assert await received(subscription, sent) == [b"%d" % number for number in range(sent)]
        assert subscription.statistics().duplicates == 0
        assert state.primary != victim.id


async def _drain_and_close(broker) -> None:
    await broker.drain()
    await broker.close()


async def test_a_client_moves_to_another_edge_of_its_lan(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.router("r1")
        await testbed.edge("ea1", "a")
        await testbed.edge("ea2", "a")
        await testbed.edge("eb", "b")
        await eventually(lambda: len(testbed.edges["ea1"].edges) == 3, "the edges know each other")
        subscription = await (await testbed.client("eb")).subscribe("alarm")
        client = await testbed.client("ea1")
        publisher = await client.publisher("alarm")
        await publisher.wait_for_subscribers(1, 10)
        await testbed.wait_for_route("alarm", "ea1", "eb")
        for number in range(50):
            await publisher.publish(b"%d" % number)
        await client.flush(5)
        await testbed.vanish(testbed.edges["ea1"])
        for number in range(50, 100):
            await publisher.publish(b"%d" % number)
        await eventually(lambda: client.edge == "ea2", "the client found the other edge")
        got = await received(subscription, 100)
        assert got == [b"%d" % number for number in range(100)]
        assert client.reconnects == 1


async def test_an_endpoint_that_vanishes_is_taken_down_after_its_liveliness(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.edge("ea", "a")
        watcher = await testbed.client("ea")
        publisher = await watcher.publisher("door", TopicQos(liveliness_ms=300))
        guest = await testbed.client("ea")
        await guest.subscribe("door")
        await publisher.wait_for_subscribers(1, 10)
        # The guest vanishes without a word and does not come back.
        testbed.clients.remove(guest)
        await guest._hub._dialers["edge:edge"].stop(CloseReason.LOST)
        assert publisher.subscribers == 1
        await eventually(lambda: publisher.subscribers == 0, "the endpoint is gone")
        await guest._hub.close()


async def test_discovery_finds_an_edge_without_configuration(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.edge("ea", "a", discovery=True, discovery_group="239.255.74.91", discovery_port=17491)
        async with connect(group="239.255.74.91", port=17491, interface="127.0.0.1") as client:
            assert client.edge == "ea"
            assert client.lan == "a"
