"""A routing broker that comes back after a crash: it does not take messages before it knows their way."""

import asyncio

import pytest

from clients import TopicQos
from edge_broker import EdgeBroker
from routing_broker import broker as routing
from tests.integration.harness import Overlay, eventually, overlay

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


async def _primary_killed(testbed: Overlay) -> None:
    """The primary of a topic from LAN a to LAN b is gone for now; its backup serves."""
    killed = await testbed.router_process("r1")
    await testbed.edge("ea", "a")
    await testbed.edge("eb", "b")
    receiver, sender = await testbed.client("eb"), await testbed.client("ea")
    await receiver.subscribe("t", QOS)
    await sender.publisher("t", QOS)
    topic = testbed.topic_at("ea", "t")
    await eventually(lambda: topic.primary == "r1" and topic.target is not None, "r1 serves")
    await testbed.router("r2")
    await eventually(lambda: topic.backup == "r2", "r2 is the backup")
    await eventually(lambda: _linked(testbed, "ea") >= {"r2"} <= _linked(testbed, "eb"), "r2 is linked")
    await killed.kill()
    await eventually(lambda: topic.target.bare_name == "r2", "the backup serves")


def _linked(testbed: Overlay, edge: str) -> set[str]:
    """The routing brokers this edge is linked to."""
    return set(testbed.edges[edge].core.routers_up)


def _dials_only_when_let(edge: EdgeBroker, router: str, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Hold an edge's next attempts to dial a routing broker up until the event is set."""
    may_dial = asyncio.Event()
    dialer = edge.hub._dialers[f"router:{router}"]
    connect_once = dialer._connect_once

    async def later() -> bool:
        await may_dial.wait()
        return await connect_once()

    monkeypatch.setattr(dialer, "_connect_once", later)
    return may_dial


async def test_a_broker_that_is_back_is_used_when_the_edges_it_sends_to_have_come(
    zookeeper_hosts, chroot, monkeypatch
):
    monkeypatch.setattr(routing, "_GATHERING_S", 60.0)
    async with overlay(zookeeper_hosts, chroot, session_timeout_s=7.0) as testbed:
        await _primary_killed(testbed)
        may_dial = _dials_only_when_let(testbed.edges["eb"], "r1", monkeypatch)
        back = await testbed.router("r1")
        await eventually(lambda: [hello.node for hello in back.hub._held.values()] == ["ea"], "ea has come")
        assert _linked(testbed, "ea") == {"r2"}
        assert testbed.topic_at("ea", "t").target.bare_name == "r2"
        may_dial.set()
        await eventually(lambda: "r1" in _linked(testbed, "ea") & _linked(testbed, "eb"), "r1 is linked")
        await eventually(lambda: testbed.topic_at("ea", "t").target.bare_name == "r1", "r1 serves again")


async def test_a_broker_that_is_back_waits_for_edges_only_for_a_while(zookeeper_hosts, chroot, monkeypatch):
    monkeypatch.setattr(routing, "_GATHERING_S", 0.5)
    async with overlay(zookeeper_hosts, chroot, session_timeout_s=7.0) as testbed:
        await _primary_killed(testbed)
        may_dial = _dials_only_when_let(testbed.edges["eb"], "r1", monkeypatch)
        await testbed.router("r1")
        await eventually(lambda: "r1" in _linked(testbed, "ea"), "r1 is linked")
        assert "r1" not in _linked(testbed, "eb")
        may_dial.set()
        await eventually(lambda: "r1" in _linked(testbed, "eb"), "eb has come late")
