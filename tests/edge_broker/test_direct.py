"""Paths are chosen for many topics at once."""

from edge_broker.broker import EdgeBroker
from overlay.limits import MILLISECOND_NS as MS
from overlay.messages import EndpointKind, Measured, Role
from overlay.outbox import Outbox
from overlay.paths import Policy
from overlay.qos import TopicQos
from runtime.config import EdgeConfig
from runtime.connection import Connection
from runtime.hub import Hub, Identity


async def test_topics_with_the_same_deadline_and_way_are_decided_once():
    broker = EdgeBroker(EdgeConfig(id="ea", lan="a", paths=Policy.ADAPTIVE))
    broker.hub = Hub(Identity(Role.EDGE, "ea", broker.incarnation, "a"), broker)
    for name, role, delay_ms in (("eb", Role.EDGE, 30), ("r1", Role.ROUTER, 20)):
        link = broker.broker_link(name, role, "b")
        link.connection = Connection(broker.hub, dialled=link)
        link.delays.add(delay_ms * MS)
    edge = broker.find_link("eb", Role.EDGE)
    core = broker.core
    client = core.client("client:p", Outbox())
    core.router_up("r1", Outbox(), 1)
    core.direct_up("eb", edge.outbox)
    for topic_id, deadline_ms in enumerate((300, 300, 300, 10), 1):
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
    broker.direct.decide()
    core.validate()
    first, second, third, hasty = (topic.choices for topic in core.topics.values())
    assert first is second is third
    assert list(first) == list(hasty) == ["eb"] and hasty is not first
