"""An edge with very many topics turns to the backup in steps, the most urgent topics first."""

from collections.abc import Iterator

from edge_broker.core import EdgeCore
from edge_broker.model import Peer
from overlay.messages import EndpointKind, Message
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from tests.wires import body_of, drain

NOW = 10**12
TOPICS = 1_600
URGENT = 400


def _edge() -> tuple[EdgeCore, Outbox]:
    """All topics have one message each, sent to r1 and retained; r2 is up too."""
    core = EdgeCore("e1", "plant", 1)
    client = core.client("client:p", Outbox())
    outboxes = {name: Outbox() for name in ("r1", "r2")}
    for name, outbox in outboxes.items():
        core.router_up(name, outbox, NOW)
    for topic_id in range(1, TOPICS + 1):
        # The urgent ones are declared last, so that the order of declaration does not help.
        urgent = topic_id > TOPICS - URGENT
        topic = core.ensure_topic(topic_id, f"t{topic_id}", TopicQos(deadline_ms=50 if urgent else 500))
        core.add_endpoint(client, EndpointKind.PUBLISHER, topic_id, topic)
        core.set_interest(
            topic,
            primary="r1",
            backup="r2",
            subscribers=[("office", "e2")],
            publishers=frozenset({topic_id}),
            now_ns=NOW,
        )
    messages = [Message(topic_id, topic_id, 1, NOW, b"x") for topic_id in range(1, TOPICS + 1)]
    core.admit_from_client(client, body_of(messages), 0, NOW)
    assert len(drain(outboxes["r1"], NOW)) == TOPICS
    return core, outboxes["r2"]


def _resent_by_step(steps: Iterator[set[Peer]], outbox: Outbox) -> list[list[int]]:
    """What the caller could write after each step, if it takes the chance."""
    return [[message.topic_id for message in drain(outbox, NOW)] for _ in steps]


def test_the_most_urgent_topics_are_sent_again_before_the_others_are_looked_at() -> None:
    core, backup = _edge()
    resent = _resent_by_step(core.router_down_in_steps("r1", NOW), backup)
    assert len(resent) > 2
    assert max(map(len, resent)) <= TOPICS // 3
    everything = [topic_id for step in resent for topic_id in step]
    assert sorted(everything) == list(range(1, TOPICS + 1))
    assert set(everything[:URGENT]) == set(range(TOPICS - URGENT + 1, TOPICS + 1))
    core.validate()


def test_when_the_primary_is_back_its_topics_return_in_steps_too() -> None:
    core, _ = _edge()
    core.router_down("r1", NOW)
    again = Outbox()
    resent = _resent_by_step(core.router_up_in_steps("r1", again, NOW), again)
    assert len(resent) > 2
    assert sum(map(len, resent)) == TOPICS
    core.validate()
