"""A topic's quality of service changes while an edge broker serves it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import decode_messages
from overlay.limits import MILLISECOND_NS, RESUME_NS
from overlay.outbox import Outbox
from overlay.qos import BEST_EFFORT, TopicQos
from overlay.urgency import UNORDERED
from tests.edge_broker.lan import PUB, RELIABLE, REMOTE, RETENTION, Lan, sequences_in
from tests.wires import Wire, drain

MS = MILLISECOND_NS
SLOW, URGENT = replace(RELIABLE, deadline_ms=500), replace(RELIABLE, deadline_ms=20)


@pytest.fixture
def lan() -> Lan:
    lan = Lan(SLOW)
    lan.interest(REMOTE)
    lan.router_up("r1")
    return lan


def change(lan: Lan, qos: TopicQos) -> None:
    lan.core.set_qos(lan.topic, qos, lan.now_ns)
    lan.core.validate()


def test_a_tighter_deadline_lets_no_message_overtake_those_before_it(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.publish(2)
    change(lan, URGENT)
    assert lan.core.settle(), "older messages wait"
    lan.now_ns += MS
    lan.publish(2)
    assert lan.sent_to("r1") == [1, 2, 3, 4]
    assert lan.core.settle(), "not everyone has got them"
    assert sequences_in(subscriber.outbox) == [1, 2, 3, 4]
    assert not lan.core.settle()


def test_once_nothing_waits_the_new_deadline_counts_and_other_topics_never_wait_with_it(lan: Lan) -> None:
    other = lan.core.ensure_topic(2, "urgent", URGENT)
    lan.core.add_endpoint(lan.publisher, PUB, 101, other)
    lan.interest(REMOTE, topic=other)
    lan.publish(1)
    change(lan, URGENT)
    assert lan.topic.forward is not other.forward
    assert lan.topic.forward.unsure.until_ns == lan.now_ns + 500 * MS
    assert other.forward.unsure.until_ns == 0
    lan.sent_to("r1")
    assert not lan.core.settle()
    assert lan.topic.forward.unsure is other.forward.unsure
    # A hop that is behind with its work may let these overtake earlier ones, which were less urgent.
    assert lan.topic.forward.urgency == other.forward.urgency | UNORDERED
    lan.now_ns += RESUME_NS
    lan.core.expire(lan.now_ns)
    assert lan.topic.forward is other.forward, "routes are shared again"


def test_retention_follows_at_once(lan: Lan) -> None:
    lan.publish(RETENTION + 3)
    change(lan, replace(SLOW, retention=2))
    assert lan.router_up("r2") == set()
    lan.router_down("r1")
    assert lan.sent_to("r2")[-2:] == [RETENTION + 2, RETENTION + 3]
    change(lan, replace(SLOW, retention=6))
    lan.publish(6)
    lan.sent_to("r2")
    lan.outboxes["r1"] = Outbox()
    lan.router_up("r1")
    assert lan.sent_to("r1") == list(range(RETENTION + 4, RETENTION + 10))


def test_what_was_never_sent_outlives_a_change_to_best_effort(lan: Lan) -> None:
    lan.router_down("r1")
    lan.publish(5)
    change(lan, BEST_EFFORT)
    lan.outboxes["r1"] = Outbox()
    lan.router_up("r1")
    assert lan.sent_to("r1") == [1, 2, 3, 4, 5]
    change(lan, SLOW)
    lan.publish(1)
    assert lan.sent_to("r1") == [6]


def test_what_is_held_back_is_let_go_by_the_new_deadline(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.arrive(1)
    lan.arrive(3)  # the primary has just come up: this may be a race
    assert lan.core.has_held
    change(lan, replace(URGENT, loss_tolerance=1))
    lan.now_ns += 10 * MS
    lan.core.release_held(lan.now_ns)
    assert lan.core.has_held
    lan.now_ns += 10 * MS
    lan.core.release_held(lan.now_ns)
    assert not lan.core.has_held
    assert sequences_in(subscriber.outbox) == [1, 3]


def test_the_same_again_changes_nothing(lan: Lan) -> None:
    route = lan.topic.forward
    change(lan, SLOW)
    assert lan.topic.forward is route
    assert not lan.core.settle()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 3)),
        st.tuples(st.just("change"), st.sampled_from([None, 1, 20, 100, 500, 2000])),
        st.tuples(st.just("retention"), st.sampled_from([0, 1, RETENTION, 9])),
        st.tuples(st.just("take"), st.integers(1, 200)),
        st.tuples(st.just("wait"), st.integers(1, 300)),
        st.tuples(st.just("settle"), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_whatever_happens_messages_leave_once_and_in_order(actions: list[tuple[str, int | None]]) -> None:
    lan = Lan(SLOW)
    lan.interest(REMOTE)
    lan.router_up("r1")
    subscriber = lan.subscribe()
    got: list[int] = []

    def receive(body: bytes) -> None:
        got.extend(message.sequence for message in decode_messages(body))

    wire = Wire(lan.outboxes["r1"], receive)
    for action, value in actions:
        if action == "publish":
            lan.publish(value or 0)
        elif action == "change":
            change(lan, replace(lan.topic.qos, deadline_ms=value))
        elif action == "retention":
            change(lan, replace(lan.topic.qos, retention=value or 0))
        elif action == "take":
            wire.send(value or 0)
            wire.arrive()
            wire.acknowledge()
        elif action == "wait":
            lan.now_ns += (value or 0) * MS
        else:
            lan.core.settle()
        lan.core.validate()
    wire.run()
    everything = list(range(1, lan.sequence + 1))
    assert got == everything
    assert [message.sequence for message in drain(subscriber.outbox)] == everything
    assert not lan.core.settle()
