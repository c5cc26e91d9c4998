"""Quality of service at run time: strictest subscriber, changes under load, flags when the WAN slows down."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

from clients import BEST_EFFORT, Publisher, RefusedError, Subscription, SubscriptionQos, TopicQos
from coordinator import Coordinator
from isthmus.commands.cluster import open_cluster
from isthmus.commands.topics import collect
from routing_broker import RoutingBroker
from runtime.process import Background
from tests.integration.harness import Overlay, eventually, overlay
from tests.isthmus.run import isthmus
from topology.gateway import Gateway, Way

pytestmark = pytest.mark.integration

OFFERED = TopicQos(period_ms=10, deadline_ms=500, loss_tolerance=2, retention=20)
"""The tolerance is too small for three hops to share: nothing is shed if the machine is slow."""


@asynccontextmanager
async def two_lans(zookeeper_hosts: str, chroot: str) -> AsyncIterator[Overlay]:
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.router("r1")
        await testbed.router("r2")
        await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        yield testbed


def primary_of(testbed: Overlay, topic: str) -> RoutingBroker:
    state = testbed.topic_at("ea", topic)
    return testbed.routers[state.primary]


def served_with(testbed: Overlay, topic: str) -> dict[str, TopicQos]:
    """What each broker that serves the topic serves it with."""
    brokers = (*testbed.routers.values(), *testbed.edges.values())
    return {
        broker.id: known.qos
        for broker in brokers
        for known in broker.core.topics.values()
        if known.name == topic
    }


async def all_serve(testbed: Overlay, topic: str, qos: TopicQos) -> None:
    """All four brokers serve the topic with this, and no deadline is still settling."""

    def so() -> bool:
        return set(served_with(testbed, topic).values()) == {qos} and not any(
            broker.core.settle() for broker in (*testbed.routers.values(), *testbed.edges.values())
        )

    await eventually(so, f"all serve {topic} with {qos}, last seen {served_with(testbed, topic)}")
    assert set(served_with(testbed, topic)) == {"r1", "r2", "ea", "eb"}


async def retains(testbed: Overlay, topic: str, count: int) -> None:
    """The ingress edge keeps as many messages of the publisher as this."""
    (publisher,) = testbed.topic_at("ea", topic).publishers.values()
    await eventually(lambda: len(publisher.retention) == count, f"{count} messages are retained")


class Stream:
    """Publishes without a break and collects what arrives."""

    def __init__(self, publisher: Publisher, subscription: Subscription, pause_s: float) -> None:
        self.publisher = publisher
        self._pause_s = pause_s
        self.subscription = subscription
        self.got: list[int] = []
        self._stopping = False
        self._background = Background()
        self._publishing = self._background.spawn(self._publish(), "publish")
        self._collecting = self._background.spawn(self._collect(), "collect")

    async def _publish(self) -> None:
        while not self._stopping:
            await self.publisher.publish_many([b"%d" % (self.publisher.sequence + 1)] * 10)
            await asyncio.sleep(self._pause_s)

    async def _collect(self) -> None:
        async for message in self.subscription:
            self.got.append(message.sequence)

    async def flow(self, count: int = 200) -> None:
        """Let this many more messages arrive."""
        goal = len(self.got) + count
        await eventually(lambda: len(self.got) >= goal, f"{count} messages, at {len(self.got)}")

    async def stop(self) -> None:
        """Stop publishing; everything published must arrive, once and in order."""
        self._stopping = True
        await self._publishing
        sent = self.publisher.sequence
        await eventually(lambda: self.got[-1] == sent, f"message {sent}, last {self.got[-1:]}")
        await self._background.close()
        assert self.got == list(range(self.got[0], sent + 1))
        statistics = self.subscription.statistics()
        assert (statistics.lost, statistics.late, statistics.duplicates) == (0, 0, 0)


async def open_stream(testbed: Overlay, topic: str, qos: TopicQos, pause_s: float = 0.002) -> Stream:
    publisher = await (await testbed.client("ea")).publisher(topic, qos)
    subscription = await (await testbed.client("eb")).subscribe(topic)
    await publisher.wait_for_subscribers(1, 10)
    await testbed.wait_for_route(topic, "ea", "eb")
    stream = Stream(publisher, subscription, pause_s)
    await stream.flow()
    return stream


async def test_the_strictest_subscriber_wins_everywhere_while_it_is_there(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with two_lans(zookeeper_hosts, chroot) as testbed:
        stream = await open_stream(testbed, "t", OFFERED)
        await all_serve(testbed, "t", OFFERED)
        strict = await testbed.client("eb")
        first = await strict.subscribe("t", request=SubscriptionQos(deadline_ms=50))
        assert first.qos == replace(OFFERED, deadline_ms=50)
        await all_serve(testbed, "t", replace(OFFERED, deadline_ms=50))
        await stream.flow()
        second = await (await testbed.client("ea")).subscribe("t", request=SubscriptionQos(80, 0))
        both = replace(OFFERED, deadline_ms=50, loss_tolerance=0)
        await all_serve(testbed, "t", both)
        await eventually(lambda: stream.publisher.qos == both == first.qos, "endpoints are told")
        await stream.flow()
        await first.close()
        await all_serve(testbed, "t", replace(OFFERED, deadline_ms=80, loss_tolerance=0))
        await second.close()
        await all_serve(testbed, "t", OFFERED)
        await eventually(lambda: stream.publisher.qos == OFFERED, "the publisher is told")
        await stream.stop()


async def test_a_request_that_cannot_be_met_is_refused_with_the_remedy_and_changes_nothing(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with two_lans(zookeeper_hosts, chroot) as testbed:
        few = replace(OFFERED, retention=4)
        stream = await open_stream(testbed, "t", few)
        client = await testbed.client("eb")
        with pytest.raises(RefusedError, match=r"retention to at least 6, or loss_tolerance to at least 2"):
            await client.subscribe("t", request=SubscriptionQos(loss_tolerance=0))
        await stream.publisher.change_qos(replace(few, retention=6))
        await eventually(
            lambda: served_with(testbed, "t")["eb"].retention == 6, "the edge knows of the remedy"
        )
        again = await client.subscribe("t", request=SubscriptionQos(loss_tolerance=0))
        await all_serve(testbed, "t", replace(few, retention=6, loss_tolerance=0))
        # Now the topic may not be made worse than its subscriber can bear, and keeps what it has.
        with pytest.raises(RefusedError, match="set retention to at least 6"):
            await stream.publisher.change_qos(few)
        with pytest.raises(
            RefusedError, match="asks for a loss_tolerance of 0, but the topic is best_effort"
        ):
            await stream.publisher.change_qos(BEST_EFFORT)
        assert stream.publisher.qos == again.qos
        await all_serve(testbed, "t", replace(few, retention=6, loss_tolerance=0))
        with pytest.raises(RefusedError, match="best_effort"):
            await client.subscribe("bulk", BEST_EFFORT, request=SubscriptionQos(loss_tolerance=0))
        await stream.stop()


async def test_changes_under_load_take_effect_everywhere_and_cost_nothing(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with two_lans(zookeeper_hosts, chroot) as testbed:
        stream = await open_stream(testbed, "t", OFFERED)
        changes = [
            replace(OFFERED, deadline_ms=20),
            TopicQos(),
            replace(OFFERED, deadline_ms=100, retention=5, loss_tolerance=1),
            replace(OFFERED, deadline_ms=1000, loss_tolerance=0),
            replace(OFFERED, deadline_ms=10),
        ]
        for qos in changes:
            await stream.publisher.change_qos(qos)
            assert stream.publisher.qos == qos
            await stream.flow()
            await all_serve(testbed, "t", qos)
            await retains(testbed, "t", qos.retention)
        await stream.stop()


async def test_replication_starts_and_stops_with_a_change(zookeeper_hosts: str, chroot: str) -> None:
    async with two_lans(zookeeper_hosts, chroot) as testbed:
        stream = await open_stream(testbed, "t", replace(OFFERED, deadline_ms=50))
        primary = primary_of(testbed, "t")
        assert primary.core.statistics().messages_replicated == 0
        # So few are retained that some of the time copies must exist.
        await stream.publisher.change_qos(replace(OFFERED, deadline_ms=500, retention=6, loss_tolerance=0))
        await eventually(
            lambda: primary.core.statistics().messages_replicated > 100, "copies are made without restart"
        )
        await stream.publisher.change_qos(replace(OFFERED, deadline_ms=50))
        await all_serve(testbed, "t", replace(OFFERED, deadline_ms=50))
        copies = primary.core.statistics().messages_replicated
        await stream.flow(500)
        assert primary.core.statistics().messages_replicated == copies
        await stream.stop()


async def test_a_client_that_was_away_finds_its_topic_changed_and_goes_on(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with two_lans(zookeeper_hosts, chroot) as testbed:
        await testbed.edge("ea2", "a")
        client = await testbed.client("ea2", "ea")
        publisher = await client.publisher("t", OFFERED)
        subscription = await (await testbed.client("eb")).subscribe("t")
        await publisher.wait_for_subscribers(1, 10)
        async with open_cluster(zookeeper_hosts, chroot) as coordinator:
            await coordinator.change_qos("t", lambda qos, _: replace(qos, deadline_ms=70))
        await eventually(lambda: publisher.qos.deadline_ms == 70, "the publisher is told")
        await testbed.vanish(testbed.edges["ea2"])
        await eventually(lambda: client.edge == "ea", "the client turns to the other edge")
        await publisher.publish(b"still here")
        assert (await subscription.receive(10)).payload == b"still here"
        assert publisher.qos.deadline_ms == 70


async def test_the_command_line_changes_a_topic_within_what_its_subscribers_bear(
    zookeeper_hosts: str, chroot: str
) -> None:
    where = (f"--zookeeper={zookeeper_hosts}", f"--chroot={chroot}")
    async with two_lans(zookeeper_hosts, chroot) as testbed:
        stream = await open_stream(testbed, "t", OFFERED)
        await (await testbed.client("eb")).subscribe("t", request=SubscriptionQos(60, 0))
        done = await isthmus("topics", *where, "--set", "t", "--qos", "deadline_ms=90", "--json")
        assert done.status == 0, done.errors
        assert json.loads(done.output)["qos"]["deadline_ms"] == 90
        await all_serve(testbed, "t", replace(OFFERED, deadline_ms=60, loss_tolerance=0))
        refused = await isthmus("topics", *where, "--set", "t", "--qos", "retention=2")
        assert refused.status == 1
        assert "set retention to at least 6" in refused.errors
        wrong = await isthmus("topics", *where, "--set", "t", "--qos", "colour=red")
        assert wrong.status == 1
        assert "unknown fields colour" in wrong.errors
        assert (await isthmus("topics", *where, "--set", "t")).status == 2
        table = await isthmus("topics", *where)
        assert "deadline_ms=90" in table.output
        assert "→ deadline_ms=60" in table.output
        async with open_cluster(zookeeper_hosts, chroot) as coordinator:
            (topic,) = await collect(coordinator)
            assert (topic["qos"]["retention"], topic["served_with"]["deadline_ms"]) == (20, 60)
        await stream.stop()


@pytest.mark.slow
async def test_a_topic_is_flagged_while_the_wan_is_too_slow_for_it(zookeeper_hosts: str, chroot: str) -> None:
    gateway = Gateway(1.0)
    proxy = await gateway.start("127.0.0.1")
    try:
        async with overlay(zookeeper_hosts, chroot) as testbed:
            await testbed.router("r1")
            await testbed.router("r2")
            await testbed.edge("ea", "a")
            await testbed.edge("eb", "b", proxy=str(proxy))
            stream = await open_stream(testbed, "t", replace(OFFERED, deadline_ms=100), pause_s=0.02)
            patient = await open_stream(testbed, "patient", OFFERED, pause_s=0.02)
            primary = primary_of(testbed, "t")
            for way in Way:
                gateway.paths[way].delay_s = 0.120
            await eventually(lambda: "t" in primary.status()["flagged"], "the topic is flagged")
            reason = primary.status()["flagged"]["t"]
            assert reason.startswith("deadline_ms is 100, but ")
            assert "set deadline_ms to at least 1" in reason
            async with open_cluster(zookeeper_hosts, chroot) as coordinator:
                await flags_become(coordinator, {"t": reason})
                where = (f"--zookeeper={zookeeper_hosts}", f"--chroot={chroot}")
                assert f"topic t: {reason}" in (await isthmus("topics", *where)).output
                status = await isthmus("status", *where, "--json")
                assert status.status == 1
                assert json.loads(status.output)["flagged"] == {"t": reason}
                assert await metric(primary) == ['isthmus_topic_flagged{topic="t"} 1.0']
                # Nobody may ask for what the network cannot do, the remedy in the reason helps.
                client = await testbed.client("eb")
                await measures_ms(testbed, "eb", primary_of(testbed, "patient").id, 100)
                with pytest.raises(RefusedError, match=r"deadline_ms is 50, but .* leave nothing"):
                    await client.subscribe("patient", request=SubscriptionQos(deadline_ms=50))
                await stream.publisher.change_qos(replace(OFFERED, deadline_ms=200))
                await flags_become(coordinator, {})
                await stream.publisher.change_qos(replace(OFFERED, deadline_ms=90))
                await flags_become(coordinator, {"t": None})
                for way in Way:
                    gateway.paths[way].delay_s = 0.001
                await flags_become(coordinator, {})
            assert await metric(primary) == []
            await stream.stop()
            await patient.stop()
    finally:
        await gateway.close()


async def measures_ms(testbed: Overlay, edge: str, router: str, least_ms: float) -> None:
    """The edge has noticed how long the way to a routing broker is now."""

    def so() -> bool:
        measured = testbed.edges[edge].measured_router(router)
        return measured is not None and measured.one_way_ns >= least_ms * 1e6

    await eventually(so, f"{edge} measures {least_ms} ms to {router}")


async def flags_become(coordinator: Coordinator, expected: dict[str, str | None]) -> None:
    async def so() -> bool:
        flags = await coordinator.flags()
        return flags.keys() == expected.keys() and all(
            reason in {None, flags[topic].reason} for topic, reason in expected.items()
        )

    await eventually(so, f"flags {expected}")


async def metric(broker: RoutingBroker) -> list[str]:
    async with aiohttp.ClientSession() as http, http.get(f"http://{broker.http}/metrics") as answer:
        text = await answer.text()
    return [line for line in text.splitlines() if line.startswith("isthmus_topic_flagged{")]
