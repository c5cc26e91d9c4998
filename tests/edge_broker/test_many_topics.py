"""An edge with very many topics turns to the backup in steps, the most urgent topics first."""

from edge_broker.core import EdgeCore
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
    assert not core.is_turning
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
    core.validate()
    assert len(drain(outboxes["r1"], NOW)) == TOPICS
    return core, outboxes["r2"]


def _publish(core: EdgeCore, topic_id: int, sequence: int) -> None:
    client = core.topics[topic_id].publishers[topic_id].client
    assert client is not None
    core.admit_from_client(client, body_of([Message(topic_id, topic_id, sequence, NOW, b"x")]), 0, NOW)
    core.validate()


def _resent_by_step(core: EdgeCore, outbox: Outbox) -> list[list[int]]:
    """What the caller could write after each step, if it takes the chance."""
    resent = []
    while core.is_turning:
        core.turn_some(NOW)
        core.validate()
        resent.append([message.topic_id for message in drain(outbox, NOW)])
    return resent


def test_the_most_urgent_topics_are_sent_again_before_the_others_are_looked_at() -> None:
    core, backup = _edge()
    core.router_down("r1", NOW)
    resent = _resent_by_step(core, backup)
    assert len(resent) > 2
    assert max(map(len, resent)) <= TOPICS // 3
    everything = [topic_id for step in resent for topic_id in step]
    assert sorted(everything) == list(range(1, TOPICS + 1))
    assert set(everything[:URGENT]) == set(range(TOPICS - URGENT + 1, TOPICS + 1))


def test_what_the_primary_did_not_acknowledge_comes_before_all() -> None:
    core, backup = _edge()
    for patient in (1, 700):
        _publish(core, patient, 2)
    core.router_down("r1", NOW)
    first = _resent_by_step(core, backup)[0]
    assert first.count(1) == first.count(700) == 2


def test_when_the_primary_is_back_its_topics_return_in_steps_too() -> None:
    core, backup = _edge()
    core.router_down("r1", NOW)
    _resent_by_step(core, backup)
    again = Outbox()
    core.router_up("r1", again, NOW)
    resent = _resent_by_step(core, again)
    assert len(resent) > 2
    assert sum(map(len, resent)) == TOPICS


def test_a_message_does_not_wait_until_it_is_its_topics_turn() -> None:
    core, backup = _edge()
    core.router_down("r1", NOW)
    patient = 1  # the last that would be looked at
    _publish(core, patient, 2)
    got = [(message.topic_id, message.sequence) for message in drain(backup, NOW)]
    assert got == [(patient, 1), (patient, 2)], "what is retained comes first, then the new message"
    resent = _resent_by_step(core, backup)
    assert sorted(topic_id for step in resent for topic_id in step) == list(range(2, TOPICS + 1))


def test_routers_that_fall_one_after_the_other_in_mid_turn_lose_nothing() -> None:
    core, backup = _edge()
    core.router_down("r1", NOW)
    core.turn_some(NOW)
    unacknowledged = [message.topic_id for message in drain(backup, NOW)]
    assert 0 < len(unacknowledged) < TOPICS
    core.router_down("r2", NOW)
    _publish(core, TOPICS, 2)  # nobody to send it to
    last = Outbox()
    core.router_up("r1", last, NOW)
    resent = _resent_by_step(core, last)
    assert sorted(topic_id for step in resent for topic_id in step) == [*range(1, TOPICS + 1), TOPICS]
