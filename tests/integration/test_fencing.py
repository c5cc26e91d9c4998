"""A routing broker that was frozen comes back: it leads no more, and what it still does harms nobody."""

import asyncio

import pytest

from clients import TopicQos
from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration

TOPICS = ("a", "b", "c", "d", "e", "f")
QOS = TopicQos(retention=2048)
"""Nothing may be lost; retained is more than is published while the frozen broker goes unnoticed."""


async def test_a_leader_and_primary_that_was_frozen_is_fenced_when_it_comes_back(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        routers = {name: await testbed.router_process(name) for name in ("r1", "r2", "r3")}
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        receiver, sender = await testbed.client("eb"), await testbed.client("ea")
        subscriptions = {topic: await receiver.subscribe(topic, QOS) for topic in TOPICS}
        publishers = {topic: await sender.publisher(topic, QOS) for topic in TOPICS}
        states = {topic: testbed.topic_at("ea", topic) for topic in TOPICS}
        await eventually(
            lambda: all(state.target and state.backup for state in states.values()), "all topics are assigned"
        )

        async def leaders(names):
            statuses = {name: await routers[name].status() for name in names}
            return {name: status["epoch"] for name, status in statuses.items() if status["leader"]}

        def served_by(name):
            return [topic for topic, state in states.items() if name in (state.primary, state.backup)]

        async def publish():
            while True:
                for publisher in publishers.values():
                    await publisher.publish(b"%d" % publisher.sequence)
                await asyncio.sleep(0.004)

        ((victim, epoch),) = (await leaders(routers)).items()
        others = routers.keys() - {victim}
        before = {topic for topic, state in states.items() if state.primary == victim}
        assert before, "the leader shares out topics evenly, itself included"
        publishing = asyncio.create_task(publish())
        try:
            await eventually(
                lambda: all(item.statistics().delivered > 20 for item in subscriptions.values()), "it flows"
            )
            routers[victim].freeze()

            async def replaced():
                return len(await leaders(others)) == 1 and not served_by(victim)

            await eventually(replaced, "another one leads, and the frozen one serves nothing any more")
            ((successor, next_epoch),) = (await leaders(others)).items()
            assert next_epoch > epoch
            delivered = {topic: item.statistics().delivered for topic, item in subscriptions.items()}
            routers[victim].thaw()

            async def back():
                status = await routers[victim].status()
                return status["ready"] and not status["leader"] and bool(served_by(victim))

            await eventually(back, "the frozen one is registered anew and has been given topics")
            await eventually(
                lambda: all(
                    item.statistics().delivered > delivered[topic] + 100
                    for topic, item in subscriptions.items()
                ),
                "everything still flows",
            )
        finally:
            publishing.cancel()
        assert await leaders(routers) == {successor: next_epoch}
        await sender.flush(10)
        for topic, subscription in subscriptions.items():
            sent = publishers[topic].sequence
            payloads = [(await subscription.receive(10)).payload for _ in range(sent)]
            assert payloads == [b"%d" % number for number in range(sent)], topic
            statistics = subscription.statistics()
            assert (statistics.lost, statistics.duplicates, statistics.late) == (0, 0, 0)
