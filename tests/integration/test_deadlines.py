"""Earliest deadline first, through real sockets and a slow link."""

import asyncio

import pytest

from clients import BEST_EFFORT, TopicQos
from tests.integration.harness import eventually, overlay
from tests.integration.slow_link import slow_link

pytestmark = pytest.mark.integration

BULK = 10_000


async def test_an_urgent_message_overtakes_ten_thousand_queued_ones(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed, slow_link(1_000_000) as proxy:
        await testbed.router("r1")
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b", proxy=proxy)
        receiver, sender = await testbed.client("eb"), await testbed.client("ea")
        arrivals = []

        async def receive(subscription):
            while True:
                message = await subscription.receive()
                arrivals.append((message.topic, message.sequence))

        bulk = await sender.publisher("bulk", TopicQos(period_ms=500, deadline_ms=500, retention=1))
        alarm = await sender.publisher("alarm", TopicQos(period_ms=50, deadline_ms=50, retention=2))
        tasks = [asyncio.create_task(receive(await receiver.subscribe(topic))) for topic in ("bulk", "alarm")]
        for publisher in (bulk, alarm):
            await publisher.wait_for_subscribers(1, 10)
            await testbed.wait_for_route(publisher.topic, "ea", "eb")
            await publisher.publish(b"warm-up")
        await eventually(lambda: len(arrivals) == 2, "the route works")
        await bulk.publish_many([b"0123456789abcdef"] * BULK)
        outbox = testbed.routers["r1"].core.peers["eb"].outbox
        await eventually(
            lambda: outbox.statistics().waiting_messages > BULK // 2, "the link is the bottleneck"
        )
        await alarm.publish(b"fire")
        await eventually(lambda: len(arrivals) == BULK + 3, "everything arrived")
        for task in tasks:
            task.cancel()
        place = arrivals.index(("alarm", 2))
        assert place < BULK // 2, f"the alarm came after {place} of {BULK} messages"
        assert [sequence for topic, sequence in arrivals if topic == "bulk"] == list(range(1, BULK + 2))


async def test_under_overload_best_effort_goes_first_and_tolerances_hold(zookeeper_hosts, chroot):
    """Offered about twice what the link takes: urgent and intolerant topics get through whole."""
    async with overlay(zookeeper_hosts, chroot) as testbed, slow_link(200_000) as proxy:
        await testbed.router("r1")
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b", proxy=proxy)
        receiver, sender = await testbed.client("eb"), await testbed.client("ea")
        qualities = {
            "alarm": TopicQos(period_ms=50, deadline_ms=50, loss_tolerance=0, retention=2),
            "telemetry": TopicQos(period_ms=50, deadline_ms=100, loss_tolerance=3, retention=0),
            "log": BEST_EFFORT,
        }
        subscriptions = {topic: await receiver.subscribe(topic, qos) for topic, qos in qualities.items()}
        publishers = {topic: await sender.publisher(topic) for topic in qualities}
        for topic, publisher in publishers.items():
            await publisher.wait_for_subscribers(1, 10)
            await testbed.wait_for_route(topic, "ea", "eb")
            await publisher.publish(b"warm-up")
            await subscriptions[topic].receive(10)
        payload = bytes(400)
        for _ in range(300):
            await publishers["alarm"].publish(b"ok")
            for _ in range(4):
                await publishers["telemetry"].publish(payload)
            for _ in range(8):
                await publishers["log"].publish(payload)
            await asyncio.sleep(0.01)
        await sender.flush(10)
        last = {topic: publisher.sequence for topic, publisher in publishers.items()}
        await eventually(
            lambda: subscriptions["alarm"].statistics().delivered == last["alarm"], "all alarms arrived"
        )
        telemetry = subscriptions["telemetry"].statistics()
        assert subscriptions["alarm"].statistics().lost == 0
        assert telemetry.longest_loss_run <= 3
        assert subscriptions["log"].statistics().lost > 0, "the link was not overloaded"
        dropped = testbed.routers["r1"].core.statistics().dropped
        assert dropped["shed_best_effort"] > 0
        assert dropped.get("outbox_full", 0) == 0
