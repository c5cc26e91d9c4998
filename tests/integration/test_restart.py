"""A routing broker that comes back after a crash: it does not take messages before it knows their way."""

import pytest

from clients import TopicQos
from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration

TOPICS = tuple(f"t{number}" for number in range(40))
QOS = TopicQos(retention=64)


async def test_a_broker_that_is_back_knows_its_topics_before_it_listens(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot, session_timeout_s=4.0) as testbed:
        killed = await testbed.router_process("r1")
        await testbed.router("r2")
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        receiver, sender = await testbed.client("eb"), await testbed.client("ea")
        for topic in TOPICS:
            await receiver.subscribe(topic, QOS)
            await sender.publisher(topic, QOS)
        states = [testbed.topic_at("ea", topic) for topic in TOPICS]
        await eventually(
            lambda: all({state.primary, state.backup} == {"r1", "r2"} for state in states), "all are assigned"
        )
        await killed.kill()
        back = await testbed.router("r1")
        served = {topic.name: set(topic.subscribers) for topic in back.core.topics.values()}
        assert served == {topic: {"eb"} for topic in TOPICS}
