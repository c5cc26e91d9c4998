"""Clients that change their edge, because it dies or is drained, go on where they were."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from clients import Publisher, Subscription, TopicQos
from tests.integration.harness import Overlay, eventually, overlay

pytestmark = pytest.mark.integration

GAP_S = 0.002


@pytest.fixture
async def testbed(zookeeper_hosts, chroot):
    """Two LANs; that of the subscribers has two edges."""
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.router("r1")
        await testbed.router("r2")
        for name, lan in (("ea", "a"), ("eb1", "b"), ("eb2", "b")):
            await testbed.edge(name, lan)
        yield testbed


@contextlib.asynccontextmanager
async def publishing(*publishers: Publisher) -> AsyncIterator[None]:
    """All of them publish as long as this lasts."""

    async def publish(publisher: Publisher) -> None:
        while True:
            await publisher.publish(b"%d" % (publisher.sequence + 1))
            await asyncio.sleep(GAP_S)

    tasks = [asyncio.create_task(publish(publisher)) for publisher in publishers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def hears(subscription: Subscription, publishers: Sequence[Publisher], least: int) -> None:
    """Wait until the subscription has heard all publishers up to now, and this much in all."""
    marks = {publisher.endpoint_id: publisher.sequence for publisher in publishers}

    def heard() -> bool:
        return subscription.statistics().delivered >= least and all(
            subscription._histories.of(publisher).highest >= mark for publisher, mark in marks.items()
        )

    await eventually(heard, "all publishers are heard")


async def received(subscription: Subscription) -> dict[int, list[int]]:
    """All sequences received so far, by publisher."""
    found: dict[int, list[int]] = {}
    for message in await subscription.receive_many(5):
        assert message.payload == b"%d" % message.sequence
        found.setdefault(message.publisher, []).append(message.sequence)
    return found


async def start(testbed: Overlay, qos: TopicQos, *, neighbour: bool):
    """A subscriber at eb1 and publishers everywhere; one of them shares the subscriber's client."""
    moving = await testbed.client("eb1", "eb2")
    subscription = await moving.subscribe("t", qos)
    far, near = await testbed.client("ea"), await testbed.client("eb2")
    publishers = [await client.publisher("t", qos) for client in (far, near, moving)]
    others = [await near.subscribe("t", qos)] if neighbour else []
    await testbed.wait_for_route("t", "ea", "eb1")
    await eventually(
        lambda: testbed.topic_at("eb2", "t").interested_edges == ("eb1",), "edges know each other"
    )
    if neighbour:
        await testbed.wait_for_route("t", "ea", "eb2")
    return moving, subscription, publishers, others


@pytest.mark.parametrize("neighbour", [False, True], ids=["alone", "beside another subscriber"])
async def test_a_subscriber_whose_edge_dies_misses_nothing(testbed, neighbour):
    qos = TopicQos(retention=1_000, loss_tolerance=0)
    moving, subscription, publishers, others = await start(testbed, qos, neighbour=neighbour)
    async with publishing(*publishers):
        await hears(subscription, publishers, 300)
        await testbed.vanish(testbed.edges["eb1"])
        await eventually(lambda: moving.edge == "eb2", "the client has turned to the other edge")
        await hears(subscription, publishers, 1_500)
    await hears(subscription, publishers, 0)
    for item in (subscription, *others):
        got = await received(item)
        assert {publisher.endpoint_id for publisher in publishers} == set(got)
        assert all(sequences == list(range(sequences[0], sequences[-1] + 1)) for sequences in got.values())
        assert item.statistics().lost == 0


async def test_a_gap_beyond_what_is_retained_is_told(testbed):
    qos = TopicQos(retention=1, loss_tolerance=0)
    moving, subscription, publishers, _ = await start(testbed, qos, neighbour=False)
    far = publishers[0]
    await far.publish(b"1")
    await hears(subscription, [far], 1)
    edge = testbed.edges["eb1"]
    for connection in [link.connection for link in edge._links.values() if link.role == "client"]:
        connection.pause_reading()
        connection.pause_writing()
    for number in range(2, 11):
        await far.publish(b"%d" % number)
    await eventually(lambda: testbed.topic_at("eb1", "t").delivered >= 10, "the edge has them")
    await testbed.vanish(edge)
    await eventually(lambda: moving.edge == "eb2", "the client has turned to the other edge")
    await hears(subscription, [far], 2)
    await far.publish(b"11")
    await hears(subscription, [far], 3)
    assert (await received(subscription))[far.endpoint_id] == [1, 10, 11]
    assert subscription.statistics().longest_loss_run == 8


@pytest.mark.parametrize("neighbour", [False, True], ids=["alone", "beside another subscriber"])
async def test_nothing_is_lost_when_an_edge_is_drained_whatever_is_retained(testbed, neighbour):
    qos = TopicQos(retention=1, loss_tolerance=0)
    moving, subscription, publishers, others = await start(testbed, qos, neighbour=neighbour)
    async with publishing(*publishers):
        await hears(subscription, publishers, 300)
        edge = testbed.edges.pop("eb1")
        await edge.drain()
        assert moving.edge == "eb2"
        await edge.close()
        await hears(subscription, publishers, 1_500)
    await hears(subscription, publishers, 0)
    for item in (subscription, *others):
        got = await received(item)
        assert all(sequences == list(range(sequences[0], sequences[-1] + 1)) for sequences in got.values())
        assert item.statistics().lost == 0
    assert moving.reconnects == 1
