"""A topic's quality of service changes while its messages wait: nothing is overtaken, lost or doubled."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import decode_messages
from overlay.limits import MILLISECOND_NS
from overlay.messages import Message
from overlay.qos import TopicQos
from routing_broker.core import RouterCore
from tests.routing_broker.test_replication import CATEGORY_2, NOW, Pair, body_of
from tests.wires import Wire, drain
from tests.wires import body_of as body_of_messages

MS = MILLISECOND_NS
SLOW, URGENT = TopicQos(deadline_ms=500), TopicQos(deadline_ms=20)


def core_with(*topics):
    core = RouterCore()
    core.peer("ea", "a")
    for topic_id, qos in enumerate(topics, 1):
        core.set_topic(topic_id, f"t{topic_id}", qos, {"eb": "b"}, NOW)
    return core


def send(core, topic_id, sequence, now_ns):
    body = body_of_messages([Message(topic_id, topic_id, sequence, now_ns, b"p")])
    core.admit(core.peers["ea"], body, 0, now_ns)
    core.validate()


def order(core):
    return [(message.topic_id, message.sequence) for message in drain(core.peers["eb"].outbox)]


def test_a_tighter_deadline_lets_no_message_overtake_those_before_it():
    core = core_with(SLOW)
    send(core, 1, 1, NOW)
    core.set_topic(1, "t1", URGENT, {"eb": "b"}, NOW)
    assert core.settle(), "an older message waits"
    send(core, 1, 2, NOW + MS)
    assert order(core) == [(1, 1), (1, 2)]
    assert not core.settle()


def test_once_nothing_waits_the_new_deadline_counts():
    core = core_with(SLOW, TopicQos(deadline_ms=50))
    send(core, 1, 1, NOW)
    core.set_topic(1, "t1", URGENT, {"eb": "b"}, NOW)
    assert order(core) == [(1, 1)]
    assert not core.settle()
    send(core, 2, 1, NOW + MS)
    send(core, 1, 2, NOW + 2 * MS)
    assert order(core) == [(1, 2), (2, 1)]


def test_other_topics_with_the_same_deadline_do_not_wait_with_it():
    core = core_with(SLOW, URGENT)
    send(core, 1, 1, NOW)
    core.set_topic(1, "t1", URGENT, {"eb": "b"}, NOW)
    send(core, 1, 2, NOW + MS)
    send(core, 2, 1, NOW + MS)
    assert order(core) == [(2, 1), (1, 1), (1, 2)]


def test_an_edge_that_is_gone_does_not_keep_a_topic_from_settling():
    core = core_with(SLOW)
    send(core, 1, 1, NOW)
    core.set_topic(1, "t1", URGENT, {"eb": "b"}, NOW)
    assert core.settle()
    core.remove_peer("eb")
    assert not core.settle()
    core.set_topic(1, "t1", SLOW, {"eb": "b"}, NOW)
    core.remove_topic(1)
    assert not core.settle()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 3)),
        st.tuples(st.just("change"), st.sampled_from([None, 1, 20, 100, 500, 2000])),
        st.tuples(st.just("take"), st.integers(1, 200)),
        st.tuples(st.just("wait"), st.integers(1, 300)),
        st.tuples(st.just("settle"), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_whatever_happens_each_publishers_messages_leave_once_and_in_order(actions):
    core = core_with(SLOW)
    got = []
    wire = Wire(core.peers["eb"].outbox, lambda body: got.extend(_sequences(body)))
    now_ns, sequence = NOW, 0
    for action, value in actions:
        if action == "send":
            for _ in range(value):
                sequence += 1
                send(core, 1, sequence, now_ns)
        elif action == "change":
            core.set_topic(1, "t1", TopicQos(deadline_ms=value), {"eb": "b"}, now_ns)
        elif action == "take":
            wire.send(value)
            wire.arrive()
            wire.acknowledge()
        elif action == "wait":
            now_ns += value * MS
        else:
            core.settle()
        core.validate()
    wire.run()
    assert got == list(range(1, sequence + 1))
    assert not core.settle()


def _sequences(body):
    return [message.sequence for message in decode_messages(body)]


# Replication


def test_replication_begins_and_ends_with_the_need_for_it():
    relaxed = replace(CATEGORY_2, retention=2)
    pair = Pair(qos=relaxed)
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    assert pair.replicate() == [], "two retained messages outlast a failover"
    pair.primary.set_topic(1, "t", CATEGORY_2, {"eb": "b"}, NOW, backup="r2")
    pair.primary.admit(pair.source, body_of(1, 2), 0, NOW)
    assert pair.replicate() == [2]
    pair.primary.set_topic(1, "t", relaxed, {"eb": "b"}, NOW, backup="r2")
    pair.primary.admit(pair.source, body_of(1, 3), 0, NOW)
    assert pair.replicate() == []
    pair.primary.validate()


def test_a_stricter_loss_tolerance_makes_copies_due_sooner():
    pair = Pair(qos=replace(CATEGORY_2, loss_tolerance=1, deadline_ms=1000))
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    lax_due = pair.link.next_deadline_ns
    pair.replicate()
    pair.primary.set_topic(1, "t", replace(CATEGORY_2, deadline_ms=1000), {"eb": "b"}, NOW, backup="r2")
    pair.primary.admit(pair.source, body_of(1, 2), 0, NOW)
    assert lax_due is not None and pair.link.next_deadline_ns is not None
    assert 99 * MS < lax_due - pair.link.next_deadline_ns < 101 * MS
