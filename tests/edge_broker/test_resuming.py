"""Endpoints that come from another edge, as an edge core sees it."""

import pytest

from overlay.limits import RESUME_NS
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from overlay.urgency import UNORDERED
from tests.edge_broker.lan import HERE, NEIGHBOUR, REMOTE, RETENTION, SUB, Lan, a_message
from tests.wires import body_of, drain


def sequences(outbox: Outbox) -> list[int]:
    return [message.sequence for message in drain(outbox)]


def test_a_routing_broker_that_asks_gets_what_is_retained_beyond_the_positions() -> None:
    lan = Lan()
    lan.router_up("r1")
    lan.router_up("r2")
    lan.interest(REMOTE)
    lan.publish(6)
    drain(lan.outboxes["r1"])
    lan.core.resuming.elsewhere(lan.topic, {100: 4}, lan.now_ns, router="r1")
    assert sequences(lan.outboxes["r1"]) == [5, 6]
    # Never heard, and its first message is not retained any more: as for a new subscriber.
    lan.core.resuming.elsewhere(lan.topic, {}, lan.now_ns, router="r1")
    # The topic's messages do not go through this one.
    lan.core.resuming.elsewhere(lan.topic, {100: 4}, lan.now_ns, router="r2")
    assert sequences(lan.outboxes["r1"]) == sequences(lan.outboxes["r2"]) == []


def test_within_a_lan_messages_are_kept_for_subscribers_that_change_their_edge() -> None:
    lan = Lan()
    neighbour = Outbox()
    lan.publish(1)
    assert not len(lan.topic.publishers[100].retention)  # nobody can go anywhere
    lan.core.set_lan_edges({"e2": neighbour})
    lan.interest(HERE)
    lan.publish(5)
    lan.core.resuming.elsewhere(lan.topic, {100: 3}, lan.now_ns, edge="e2")
    assert sequences(neighbour) == [4, 5, 6]
    lan.core.set_lan_edges({})  # it has gone, and its clients may come here
    lan.core.validate()
    lan.publish(1)
    client = lan.subscribe()
    lan.core.resuming.here(lan.topic, client, {100: 4}, lan.now_ns)
    assert sequences(client.outbox) == [5, 6, 7]


def test_who_resumes_gets_what_others_had_and_only_for_a_while() -> None:
    lan = Lan()
    lan.core.set_lan_edges({"e2": Outbox()})
    lan.interest(HERE, NEIGHBOUR, REMOTE)
    lan.router_up("r1")
    before = lan.subscribe("before")
    body = body_of([a_message(sequence, publisher=500) for sequence in (7, 8, 9)])
    lan.core.admit_from_broker(body, 0, lan.now_ns, "r1")
    lan.publish(3)
    drain(before.outbox)
    client = lan.core.client("client:late", Outbox())
    lan.core.add_endpoint(client, SUB, 201, lan.topic)
    lan.core.resuming.here(lan.topic, client, {100: 1, 500: 7}, lan.now_ns)
    assert sequences(client.outbox) == [2, 3]  # published here, and retained
    lan.core.admit_from_broker(body, 0, lan.now_ns, "r1")
    assert sequences(client.outbox) == [7, 8, 9]
    assert sequences(before.outbox) == []
    assert lan.core.statistics().messages_repeated == 5
    lan.now_ns += RESUME_NS
    lan.core.expire(lan.now_ns)
    lan.core.admit_from_broker(body, 0, lan.now_ns, "r1")
    assert sequences(client.outbox) == []
    lan.core.validate()


def test_messages_of_a_publisher_that_came_from_another_edge_are_marked_for_a_while() -> None:
    lan = Lan()
    lan.router_up("r1")
    lan.interest(REMOTE)
    assert not lan.topic.forward.urgency & UNORDERED
    lan.core.resuming.publisher_here(lan.topic, lan.now_ns)
    assert lan.topic.forward.urgency & UNORDERED
    lan.now_ns += RESUME_NS
    lan.core.expire(lan.now_ns)
    assert not lan.topic.forward.urgency & UNORDERED


def test_what_was_kept_within_a_lan_is_not_sent_to_those_who_come_later_from_others() -> None:
    lan = Lan()
    lan.core.set_lan_edges({"e2": Outbox()})
    lan.interest(HERE)
    lan.router_up("r1")
    lan.publish(3)
    lan.interest(HERE, REMOTE)
    assert sequences(lan.outboxes["r1"]) == []
    lan.publish(1)
    assert sequences(lan.outboxes["r1"]) == [4]


def test_a_publisher_that_comes_is_heard_by_subscribers_that_register_again_a_moment_later() -> None:
    lan = Lan()
    lan.router_up("r1")
    lan.interest()  # this edge has just heard of the topic, and the subscriber's session has just ended
    lan.core.resuming.publisher_here(lan.topic, lan.now_ns)
    lan.publish(2 * RETENTION)
    assert sequences(lan.outboxes["r1"]) == []  # no byte leaves the LAN unless another one wants it
    lan.now_ns += RESUME_NS // 2
    lan.interest(REMOTE)
    lan.publish(1)
    assert sequences(lan.outboxes["r1"]) == [*range(1, 2 * RETENTION + 2)]


def test_what_is_published_before_zookeeper_told_who_subscribes_waits_as_long_as_that_takes() -> None:
    lan = Lan()
    lan.router_up("r1")
    lan.core.resuming.publisher_untold(lan.topic)
    lan.publish(2 * RETENTION)
    lan.now_ns += 100 * RESUME_NS
    lan.core.expire(lan.now_ns)
    lan.core.validate()
    lan.core.resuming.publisher_here(lan.topic, lan.now_ns)
    lan.interest(REMOTE)
    assert sequences(lan.outboxes["r1"]) == [*range(1, 2 * RETENTION + 1)]
    lan.now_ns += RESUME_NS
    lan.core.expire(lan.now_ns)
    assert not lan.topic.forward.urgency & UNORDERED


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_if_nobody_registers_again_nothing_waits_any_longer(has_neighbour: bool) -> None:
    lan = Lan()
    if has_neighbour:
        lan.core.set_lan_edges({"e2": Outbox()})
    lan.router_up("r1")
    lan.core.resuming.publisher_here(lan.topic, lan.now_ns)
    lan.publish(2 * RETENTION)
    lan.now_ns += RESUME_NS
    lan.core.expire(lan.now_ns)
    lan.core.validate()
    # What the neighbour's clients may need if they come here is kept as ever.
    assert len(lan.topic.publishers[100].retention) == (RETENTION if has_neighbour else 0)
    lan.publish(1)
    lan.interest(REMOTE)
    lan.publish(1)
    assert sequences(lan.outboxes["r1"]) == [2 * RETENTION + 2]
    assert not any(lan.core.statistics().dropped.values())


def test_what_was_sent_within_the_lan_before_a_publisher_came_is_not_sent_to_others() -> None:
    lan = Lan()
    lan.core.set_lan_edges({"e2": Outbox()})
    lan.interest(HERE)
    lan.router_up("r1")
    lan.publish(2)
    lan.core.resuming.publisher_here(lan.topic, lan.now_ns)
    lan.publish(1)
    lan.interest(HERE, REMOTE)
    assert sequences(lan.outboxes["r1"]) == [3]


def test_best_effort_does_not_wait_for_subscribers_that_register_again() -> None:
    lan = Lan(TopicQos(loss_tolerance=None, retention=0))
    lan.core.resuming.publisher_here(lan.topic, lan.now_ns)
    lan.publish(1)
    assert not any(lan.core.statistics().dropped.values())
    assert not len(lan.topic.publishers[100].retention)
