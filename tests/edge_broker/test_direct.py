"""Paths are chosen for many topics at once, and with care while ZooKeeper does not answer."""

import asyncio
import time
from collections.abc import Callable

from edge_broker.broker import EdgeBroker
from edge_broker.targets import TOPICS_AT_A_TIME
from overlay.limits import MILLISECOND_NS as MS
from overlay.limits import SECOND_NS
from overlay.messages import EndpointKind, Measured, Role
from overlay.outbox import Outbox
from overlay.paths import CHEAPER_AFTER_NS, Policy
from overlay.qos import TopicQos
from runtime.config import EdgeConfig
from runtime.connection import Connection
from runtime.host import Host
from runtime.hub import Hub, Identity


def broker_with(deadlines_ms: tuple[int | None, ...], clock: Callable[[], int]) -> EdgeBroker:
    """An edge with topics of these deadlines, a direct link of 30 ms and a routing broker 20 ms away."""
    broker = EdgeBroker(EdgeConfig(id="ea", lan="a", paths=Policy.ADAPTIVE), Host(clock))
    broker.hub = Hub(Identity(Role.EDGE, "ea", broker.incarnation, "a"), broker, clock=clock)
    for name, role, delay_ms in (("eb", Role.EDGE, 30), ("r1", Role.ROUTER, 20)):
        link = broker.broker_link(name, role, "b")
        link.connection = Connection(broker.hub, dialled=link)
        link.delays.add(delay_ms * MS)
    edge = broker.find_link("eb", Role.EDGE)
    core = broker.core
    client = core.client("client:p", Outbox())
    core.router_up("r1", Outbox(), 1)
    core.direct_up("eb", edge.outbox)
    for topic_id, deadline_ms in enumerate(deadlines_ms, 1):
        topic = core.ensure_topic(topic_id, f"t{topic_id}", TopicQos(deadline_ms=deadline_ms))
        core.add_endpoint(client, EndpointKind.PUBLISHER, topic_id, topic)
        core.set_interest(
            topic,
            primary="r1",
            backup=None,
            subscribers=[("b", "eb")],
            publishers=frozenset({topic_id}),
            now_ns=1,
        )
    broker.direct.on_measured(edge, Measured({"r1": [0.0, 0.0, 1, 20 * MS, 1.0]}))
    return broker


async def test_topics_with_the_same_deadline_and_way_are_decided_once():
    broker = broker_with((300, 300, 300, 10), time.monotonic_ns)
    core = broker.core
    broker.direct.decide(broker.core.topics.values())
    core.validate()
    first, second, third, hasty = (topic.choices for topic in core.topics.values())
    assert first is second is third
    assert list(first) == list(hasty) == ["eb"] and hasty is not first


async def test_only_topics_with_a_choice_of_paths_are_looked_at_closely():
    broker = broker_with((300,) * (2 * TOPICS_AT_A_TIME) + (None,), time.monotonic_ns)
    core = broker.core
    gone, *others, without_deadline = core.topics.values()
    finding = asyncio.create_task(broker.direct._find_topics())
    await asyncio.sleep(0)
    [publisher] = gone.publishers.values()
    assert publisher.client is not None
    core.remove_endpoint(publisher.client, gone.topic_id, 1)
    core.set_interest(gone, primary=None, backup=None, subscribers=[], publishers=frozenset(), now_ns=1)
    core.expire(time.monotonic_ns() + 3_600 * SECOND_NS)
    assert gone.topic_id not in core.topics
    assert await finding == others
    assert without_deadline not in others


async def test_without_an_answer_from_zookeeper_nothing_is_sent_past_the_routing_broker():
    now_ns = 1_000 * SECOND_NS
    broker = broker_with((300,), lambda: now_ns)
    (topic,) = broker.core.topics.values()

    def decide(after_ns: int, *, answered: bool) -> bool:
        nonlocal now_ns
        now_ns += after_ns
        if answered:
            broker.session._lease_sent_ns = now_ns
        broker.direct.decide(broker.core.topics.values())
        broker.core.validate()
        return topic.via_routing

    assert decide(0, answered=True)  # nothing is risked until it has been better for a while
    assert not decide(CHEAPER_AFTER_NS, answered=True)
    # Whoever subscribes at a third edge from now on is known to routing brokers, not to us.
    assert decide(60 * SECOND_NS, answered=False)
    assert decide(CHEAPER_AFTER_NS, answered=False)
    # It answers again, and what it has to say takes a moment to read.
    assert decide(SECOND_NS, answered=True)
    assert not decide(CHEAPER_AFTER_NS, answered=True)
