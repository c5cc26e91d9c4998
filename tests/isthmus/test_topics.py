"""`isthmus topics` against real brokers and a real ZooKeeper."""

import json

import pytest

from isthmus.commands.qos import describe_qos
from overlay.qos import TopicQos
from tests.integration.harness import eventually, overlay
from tests.isthmus.run import isthmus


@pytest.mark.integration
async def test_topics_are_listed_with_routers_and_users_and_can_be_deleted(
    zookeeper_hosts: str, chroot: str
) -> None:
    where = (f"--zookeeper={zookeeper_hosts}", f"--chroot={chroot}")
    async with overlay(zookeeper_hosts, chroot) as brokers:
        await brokers.router("r1")
        await brokers.router("r2")
        await brokers.edge("ea", "a")
        await brokers.edge("eb", "b")
        publisher, subscriber = await brokers.client("ea"), await brokers.client("eb")
        await publisher.publisher("door [1]", TopicQos(deadline_ms=50))
        await subscriber.subscribe("door [1]")
        await brokers.wait_for_route("door [1]", "ea", "eb")

        done = await isthmus("topics", *where, "--json")
        assert done.status == 0, done.errors
        (topic,) = json.loads(done.output)["topics"]
        assert topic["topic"] == "door [1]"
        assert {topic["primary"], topic["backup"]} == {"r1", "r2"}
        assert (topic["publishers"], topic["subscribers"]) == ({"a": 1}, {"b": 1})
        assert topic["epoch"] >= 1
        table = await isthmus("topics", *where)
        assert "door [1]" in table.output
        assert "deadline_ms=50" in table.output

        refused = await isthmus("topics", *where, "--delete", "door [1]")
        assert refused.status == 1
        assert "still has 2 endpoints" in refused.errors
        await publisher.close()
        await subscriber.close()

        async def deleted() -> bool:
            return (await isthmus("topics", *where, "--delete", "door [1]")).status == 0

        await eventually(deleted, "the topic without endpoints is deleted")
        assert json.loads((await isthmus("topics", *where, "--json")).output) == {"topics": []}


def test_only_what_differs_from_the_default_is_described() -> None:
    assert describe_qos(TopicQos().to_record()) == "default"
    assert describe_qos(TopicQos(deadline_ms=50, retention=3).to_record()) == "deadline_ms=50 retention=3"
