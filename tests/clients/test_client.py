"""The client against a real edge broker."""

import asyncio
import threading

import pytest

from clients import (
    BacklogFullError,
    ClosedError,
    EdgeNotFoundError,
    Overflow,
    PayloadTooLargeError,
    TopicQos,
    connect,
    connect_synchronously,
)
from clients.client import BACKLOG_MAX_BYTES
from clients.subscription import QUEUE_MAX_MESSAGES
from overlay.errors import CloseReason, InvalidNameError
from overlay.limits import PAYLOAD_MAX_BYTES
from overlay.messages import Declared, QosChanged, Role
from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration


@pytest.fixture
async def lan(zookeeper_hosts, chroot):
    """A LAN with one edge broker."""
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.edge("ea", "a")
        yield testbed


async def test_context_managers_and_iteration_read_naturally(lan):
    async with connect(lan.edges["ea"].locator) as client:
        async with await client.subscribe("door") as door, await client.publisher("door") as publisher:
            for number in range(3):
                assert await publisher.publish(b"%d" % number) == number + 1
            seen = []
            async for message in door:
                seen.append((message.topic, message.payload, message.sequence))
                if len(seen) == 3:
                    break
        assert seen == [("door", b"0", 1), ("door", b"1", 2), ("door", b"2", 3)]
        with pytest.raises(ClosedError):
            await publisher.publish(b"too late")
    assert not client.is_connected


async def test_no_edge_says_where_it_looked_and_what_to_do():
    with pytest.raises(EdgeNotFoundError, match=r"127\.0\.0\.1:1 .*isthmus edge"):
        async with connect("127.0.0.1:1", timeout_s=0.3):
            pass
    with pytest.raises(EdgeNotFoundError, match=r"multicast group 239\.255\.74\.250:17999 for LAN nowhere"):
        async with connect(
            timeout_s=0.3, lan="nowhere", group="239.255.74.250", port=17999, interface="127.0.0.1"
        ):
            pass
    with pytest.raises(InvalidNameError, match="host:port"):
        async with connect("localhost"):
            pass


async def test_bad_topics_and_payloads_are_refused_and_nothing_is_lost(lan):
    client = await lan.client("ea")
    with pytest.raises(InvalidNameError, match="printable"):
        await client.publisher("")
    subscription = await client.subscribe("door")
    publisher = await client.publisher("door")
    with pytest.raises(PayloadTooLargeError, match=str(PAYLOAD_MAX_BYTES)):
        await publisher.publish(bytes(PAYLOAD_MAX_BYTES + 1))
    await publisher.publish(bytes(PAYLOAD_MAX_BYTES))
    assert len((await subscription.receive(5)).payload) == PAYLOAD_MAX_BYTES


async def test_publishing_waits_when_the_edge_does_not_keep_up(lan):
    client = await lan.client("ea")
    publisher = await client.publisher("bulk")
    payload = bytes(PAYLOAD_MAX_BYTES)
    with pytest.raises(BacklogFullError):
        for _ in range(2 * BACKLOG_MAX_BYTES // PAYLOAD_MAX_BYTES):
            publisher.publish_nowait(payload)
    refused_at = publisher.sequence
    for _ in range(50):
        await publisher.publish(payload)
        assert client._link.outbox.load_bytes < BACKLOG_MAX_BYTES + 2 * PAYLOAD_MAX_BYTES
    await client.flush(10)
    assert publisher.sequence == refused_at + 50
    topic = lan.topic_at("ea", "bulk")
    assert topic.messages == refused_at + 50


async def test_a_subscriber_that_waits_loses_nothing(lan):
    sender, receiver = await lan.client("ea"), await lan.client("ea")
    subscription = await receiver.subscribe("fast")
    publisher = await sender.publisher("fast")
    total = QUEUE_MAX_MESSAGES + 20_000
    payloads = [b"%d" % number for number in range(total)]
    for start in range(0, total, 1000):
        await publisher.publish_many(payloads[start : start + 1000])
    await eventually(lambda: subscription.is_full, "the queue is full")
    for number in range(total):
        assert (await subscription.receive(10)).payload == payloads[number]
    assert subscription.statistics().lost == 0


async def test_a_full_subscription_that_is_closed_holds_up_no_other(lan):
    sender, receiver = await lan.client("ea"), await lan.client("ea")
    full, other = await receiver.subscribe("fast"), await receiver.subscribe("calm")
    fast, calm = await sender.publisher("fast"), await sender.publisher("calm")
    for _ in range(QUEUE_MAX_MESSAGES // 1000 + 20):
        await fast.publish_many([b"x"] * 1000)
    await eventually(lambda: full.is_full, "the queue is full")
    await calm.publish(b"behind it")
    await full.close()
    assert (await other.receive(10)).payload == b"behind it"


async def test_a_subscriber_may_drop_the_oldest_instead(lan):
    client = await lan.client("ea")
    subscription = await client.subscribe("fast", overflow=Overflow.DROP_OLDEST)
    publisher = await client.publisher("fast")
    total = QUEUE_MAX_MESSAGES + 500
    for start in range(0, total, 500):
        await publisher.publish_many([b"%d" % number for number in range(start, min(start + 500, total))])
    await eventually(lambda: subscription.statistics().delivered == total, "everything arrived")
    statistics = subscription.statistics()
    assert statistics.dropped == total - len(await subscription.receive_many())
    assert statistics.dropped >= 500


async def test_a_stalled_subscriber_does_not_stall_the_others(lan):
    sender, stalled, healthy = [await lan.client("ea") for _ in range(3)]
    await stalled.subscribe("fast")
    subscription = await healthy.subscribe("fast")
    publisher = await sender.publisher("fast")
    stalled.pause_reading()
    payload = bytes(10_000)
    for _ in range(6_000):  # 60 MB: more than the stalled client's outbox may hold
        await publisher.publish(payload)
        while subscription._queue:
            await subscription.receive()
    await eventually(lambda: subscription.statistics().delivered == 6_000, "the healthy one got everything")
    dropped = lan.edges["ea"].core.statistics().dropped
    assert dropped["outbox_full"] > 0


async def test_receive_times_out(lan):
    client = await lan.client("ea")
    subscription = await client.subscribe("quiet")
    with pytest.raises(TimeoutError):
        await subscription.receive(timeout_s=0.05)


async def test_closing_the_client_ends_iteration(lan):
    client = await lan.client("ea")
    subscription = await client.subscribe("door")

    async def iterate():
        return [message async for message in subscription]

    iterating = asyncio.create_task(iterate())
    await asyncio.sleep(0)
    await client.close()
    assert await iterating == []


async def test_the_synchronous_client_works_without_a_loop(lan):
    locator = lan.edges["ea"].locator

    def script():
        with connect_synchronously(locator) as client:
            door = client.subscribe("door")
            for number in range(5):
                client.publish("door", b"%d" % number)
            client.flush(5)
            got = [door.receive(5).payload for _ in range(5)]
            with pytest.raises(TimeoutError):
                door.receive(0.05)
            door.close()
        with pytest.raises(ClosedError):
            client.publish("door", b"late")
        return got

    threads = {thread for thread in threading.enumerate() if "isthmus client" in thread.name}
    assert await asyncio.to_thread(script) == [b"%d" % number for number in range(5)]
    assert {thread for thread in threading.enumerate() if "isthmus client" in thread.name} == threads


async def test_a_subscription_that_is_given_up_while_being_declared_leaves_nothing_behind(lan):
    client = await lan.client("ea")
    publisher = await client.publisher("door")
    declaring = asyncio.create_task(client.subscribe("door"))
    await asyncio.sleep(0)
    declaring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await declaring
    subscription = await client.subscribe("door")
    await publisher.wait_for_subscribers(1, 10)
    await eventually(lambda: len(client._endpoints) == 2, "only the publisher and one subscription are left")
    topic = lan.topic_at("ea", "door")
    await eventually(lambda: sum(topic.subscribers.values()) == 1, "the edge has forgotten the other")
    await publisher.publish(b"open")
    assert (await subscription.receive(5)).payload == b"open"


@pytest.mark.parametrize("frame", [QosChanged, Declared], ids=["changed", "declared"])
async def test_an_edge_that_talks_nonsense_is_left_for_a_reason(lan, frame):
    client = await lan.client("ea")
    subscription = await client.subscribe("door")
    (link,) = (link for link in lan.edges["ea"]._links.values() if link.role is Role.CLIENT)
    arguments = (subscription.endpoint_id, 1) if frame is Declared else (subscription.endpoint_id,)
    link.send(frame(*arguments, {"retention": "many"}))
    await eventually(lambda: client._hub.closes[CloseReason.BAD_MESSAGE] == 1, "the client closes")
    await eventually(lambda: client.is_connected, "it tries again")
    assert subscription.qos == TopicQos()
