"""The edge broker's rules: who in the LAN gets a message, and whether, where and how it leaves."""

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_broker.model import DropReason
from overlay.batch import decode_batch_header, decode_messages
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import MILLISECOND_NS, OUTBOX_MAX_BYTES, SECOND_NS
from overlay.messages import UNKNOWN_CLOCK_SHIFT, Message
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from overlay.schedule import granule_ns
from overlay.urgency import NO_DEADLINE_NS, deadline_ns, urgency
from tests.edge_broker.lan import (
    HERE,
    NEIGHBOUR,
    NOW,
    ORIGIN,
    PUB,
    RELIABLE,
    REMOTE,
    RETENTION,
    SUB,
    Lan,
    a_message,
    sequences_in,
)
from tests.wires import bodies_of, body_of, drain

PLENTY = 2**40
MS = MILLISECOND_NS


@pytest.fixture
def lan() -> Lan:
    return Lan()


# Local delivery, and what stays in the LAN


def test_a_local_only_topic_never_leaves_the_lan(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.outboxes["e2"] = Outbox()
    lan.core.set_lan_edges({"e2": lan.outboxes["e2"]})
    lan.interest(HERE)
    lan.router_up("r1")
    lan.router_up("r2")
    assert lan.publish(3) == {"client:s"}
    assert sequences_in(subscriber.outbox) == [1, 2, 3]
    assert all(outbox.is_idle for outbox in lan.outboxes.values())
    assert lan.topic.target is None
    lan.router_down("r1")
    lan.router_up("r1")
    assert all(outbox.is_idle for outbox in lan.outboxes.values())


def test_local_subscribers_get_messages_at_once_even_if_nobody_told_of_interest(lan: Lan) -> None:
    first, second = lan.subscribe("s1", 201), lan.subscribe("s2", 202)
    lan.publish(2)
    assert sequences_in(first.outbox) == sequences_in(second.outbox) == [1, 2]


def test_a_client_with_two_endpoints_gets_each_message_once(lan: Lan) -> None:
    client = lan.subscribe()
    lan.core.add_endpoint(client, SUB, 201, lan.topic)
    lan.publish()
    assert sequences_in(client.outbox) == [1]
    assert lan.core.remove_endpoint(client, 201, 0) == (lan.topic, SUB)
    lan.publish()
    assert sequences_in(client.outbox) == [2]
    assert lan.core.remove_endpoint(client, 200, 0) == (lan.topic, SUB)
    assert lan.core.remove_endpoint(client, 200, 0) is None
    lan.publish()
    assert sequences_in(client.outbox) == []


def test_a_client_that_publishes_and_subscribes_hears_itself(lan: Lan) -> None:
    lan.core.add_endpoint(lan.publisher, SUB, 200, lan.topic)
    lan.publish()
    assert sequences_in(lan.publisher.outbox) == [1]


def test_messages_leave_as_this_edges_own_stamped_with_its_clock(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.clock_shift_ns = 40 * MS  # the client's clock is ahead, or its messages took long: both look alike
    lan.publish(2)
    (body,) = bodies_of(lan.outboxes["r1"].take_frames(PLENTY, NOW))
    header = decode_batch_header(body)
    assert (header.urgency, header.origin) == (urgency(RELIABLE), ORIGIN)
    assert (header.clock_shift_ns, header.messages) == (0, 2)
    assert list(decode_messages(body)) == [a_message(each, born_ns=NOW - 40 * MS) for each in (1, 2)]


@pytest.mark.parametrize(
    ("before_ns", "link_ns", "born_ns", "stamp_ns"),
    [
        (0, UNKNOWN_CLOCK_SHIFT, NOW, 0),
        (UNKNOWN_CLOCK_SHIFT, 0, NOW, 0),
        (0, 0, 0, 0),
        (3 * MS, 4 * MS, NOW, NOW - 7 * MS),
        (0, -NOW, 5 * MS, NOW),
        (0, 10, 5, 1),
    ],
    ids=["unknown link", "unknown before", "not stamped", "two hops", "from the future", "before our time"],
)
def test_the_ingress_brings_stamps_to_its_clock_as_far_as_they_can_be_proven(
    lan: Lan, before_ns: int, link_ns: int, born_ns: int, stamp_ns: int
) -> None:
    """A stamp says that the message was not born before it; 0 says that nothing is known."""
    subscriber = lan.subscribe()
    lan.interest(REMOTE)
    lan.router_up("r1")
    body = body_of([a_message(1, born_ns=born_ns)], clock_shift_ns=before_ns)
    lan.core.admit_from_client(lan.publisher, body, link_ns, NOW)
    for outbox in (subscriber.outbox, lan.outboxes["r1"]):
        (body,) = bodies_of(outbox.take_frames(PLENTY, NOW))
        assert decode_batch_header(body).clock_shift_ns == 0
        assert list(decode_messages(body)) == [a_message(1, born_ns=stamp_ns)]
    lan.router_up("r2")
    lan.router_down("r1")
    assert drain(lan.outboxes["r2"]) == [a_message(1, born_ns=stamp_ns)], "what is kept is stamped too"


@given(
    st.lists(
        st.tuples(st.integers(-50 * MS, 50 * MS) | st.just(UNKNOWN_CLOCK_SHIFT), st.integers(0, 3 * MS)),
        max_size=20,
    )
)
def test_what_is_learnt_of_a_clients_clock_changes_neither_order_nor_bound(
    learnt: list[tuple[int, int]],
) -> None:
    """The stamps of a publisher never step back, and never get later than what was proven."""
    lan = Lan()
    subscriber = lan.subscribe()
    lan.interest(REMOTE)
    lan.router_up("r1")
    proven_ns = 0
    expected: list[Message] = []
    for lan.clock_shift_ns, pause_ns in [(0, 0), *learnt]:
        lan.now_ns += pause_ns
        if lan.clock_shift_ns != UNKNOWN_CLOCK_SHIFT:
            proven_ns = max(proven_ns, min(lan.now_ns - lan.clock_shift_ns, lan.now_ns))
        lan.sequence += 1
        born = a_message(lan.sequence, born_ns=lan.now_ns)
        lan.core.admit_from_client(lan.publisher, body_of([born]), lan.clock_shift_ns, lan.now_ns)
        expected.append(a_message(lan.sequence, born_ns=proven_ns))
    assert drain(lan.outboxes["r1"]) == drain(subscriber.outbox) == expected


def test_the_clock_shift_of_the_link_is_added_on_delivery(lan: Lan) -> None:
    subscriber = lan.subscribe()
    for before_ns, link_ns, after_ns in [
        (-5, 30, 25),
        (UNKNOWN_CLOCK_SHIFT, 30, UNKNOWN_CLOCK_SHIFT),
        (-5, UNKNOWN_CLOCK_SHIFT, UNKNOWN_CLOCK_SHIFT),
    ]:
        lan.sequence += 1
        message = a_message(lan.sequence, publisher=300)
        lan.core.admit_from_broker(body_of([message], clock_shift_ns=before_ns), link_ns, NOW)
        (body,) = bodies_of(subscriber.outbox.take_frames(PLENTY, NOW))
        assert body == body_of([message], clock_shift_ns=after_ns, sent_ns=NOW)


def test_an_urgent_topic_overtakes_what_waits_and_an_older_message_a_younger_one(lan: Lan) -> None:
    alarm = lan.core.ensure_topic(2, "alarm", TopicQos(deadline_ms=50))
    lan.core.add_endpoint(lan.publisher, PUB, 101, alarm)
    subscriber = lan.subscribe()
    lan.core.add_endpoint(subscriber, SUB, 201, alarm)
    lan.interest(REMOTE)
    lan.interest(REMOTE, topic=alarm)
    lan.router_up("r1")
    lan.publish(2)
    for message in (
        a_message(1, publisher=101, topic_id=2),
        a_message(2, publisher=101, topic_id=2),
        a_message(3),
    ):
        lan.core.admit_from_client(lan.publisher, body_of([message]), 0, NOW)
    expected = [(101, 1), (101, 2), (100, 1), (100, 2), (100, 3)]
    for outbox in (subscriber.outbox, lan.outboxes["r1"]):
        assert [(m.publisher, m.sequence) for m in drain(outbox)] == expected
    young = a_message(1, publisher=300, born_ns=NOW)
    old = a_message(1, publisher=301, born_ns=NOW - granule_ns(NO_DEADLINE_NS))
    lan.core.admit_from_broker(body_of([young, old]), 0, NOW)
    assert drain(subscriber.outbox) == [old, young]


@pytest.mark.parametrize("deadline_ms", [100, 1_100])
@pytest.mark.parametrize("sixteenth", range(16))
def test_a_run_that_begins_with_an_older_message_of_another_publisher_overtakes_nothing(
    deadline_ms: float, sixteenth: int
) -> None:
    """All were born in one granule, wherever the bounds of granules fall on our clock."""
    qos = TopicQos(deadline_ms=deadline_ms, retention=RETENTION)
    granule = granule_ns(deadline_ns(qos))
    lan = Lan(qos)
    lan.core.add_endpoint(lan.publisher, PUB, 101, lan.topic)
    subscriber = lan.subscribe()
    lan.interest(REMOTE)
    lan.router_up("r1")
    born_ns = NOW // granule * granule + sixteenth * granule // 16
    now_ns = born_ns + 2 * granule
    for here in (True, False):
        ours, others = (100, 101) if here else (300, 301)
        first = a_message(1, publisher=ours, born_ns=born_ns + granule * 90 // 100)
        other = a_message(1, publisher=others, born_ns=born_ns + granule // 10)
        second = a_message(2, publisher=ours, born_ns=born_ns + granule * 95 // 100)
        for messages in ([first], [other, second]):
            if here:
                lan.core.admit_from_client(lan.publisher, body_of(messages), 0, now_ns)
            else:
                lan.core.admit_from_broker(body_of(messages), born_ns - NOW, now_ns)
        for outbox in (subscriber.outbox, lan.outboxes["r1"]) if here else (subscriber.outbox,):
            assert [m.sequence for m in drain(outbox) if m.publisher == ours] == [1, 2]


def test_messages_from_brokers_are_delivered_with_their_header_and_bytes_unchanged(lan: Lan) -> None:
    subscriber = lan.subscribe()
    messages = [a_message(1, publisher=300), a_message(2, publisher=300)]
    body = body_of(messages, urgency=2, origin=9, sent_ns=NOW)
    lan.core.admit_from_broker(body, 0, NOW)
    # But for when it left.
    expected = body_of(messages, urgency=2, origin=9, sent_ns=NOW + 5)
    assert bodies_of(subscriber.outbox.take_frames(PLENTY, NOW + 5)) == [expected]


def test_messages_of_topics_with_the_same_subscribers_stay_together_and_others_apart(lan: Lan) -> None:
    both = lan.subscribe()
    other_topic = lan.core.ensure_topic(2, "u", RELIABLE)
    lan.core.add_endpoint(both, SUB, 210, other_topic)
    only_first = lan.subscribe("s2", 211)
    messages = [
        a_message(1, publisher=300),
        a_message(1, publisher=301, topic_id=2),
        a_message(2, publisher=300),
        a_message(2, publisher=300),
        a_message(3, publisher=300),
    ]
    _, touched = lan.core.admit_from_broker(body_of(messages), 0, NOW)
    assert touched == {both, only_first}
    assert drain(both.outbox) == [*messages[:3], messages[4]]
    assert drain(only_first.outbox) == [messages[0], messages[2], messages[4]]


# Duplicates and late messages


def test_duplicates_from_brokers_are_dropped_and_counted(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.arrive(1, 2)
    assert lan.arrive(1, 2) == set()
    lan.arrive(2, 3)
    assert sequences_in(subscriber.outbox) == [1, 2, 3]
    assert lan.dropped == {DropReason.DUPLICATE: 3}


def test_a_message_behind_its_successor_is_counted_as_late_and_not_delivered(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.arrive(1, 3, 2, 2)
    assert sequences_in(subscriber.outbox) == [1, 3]
    assert lan.dropped == {DropReason.LATE: 1, DropReason.DUPLICATE: 1}
    (statistics,) = lan.core.statistics().topics
    assert (statistics.delivered, statistics.lost, statistics.longest_loss_run) == (2, 1, 1)


def test_publishers_are_told_apart(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.arrive(1, 2, publisher=300)
    lan.arrive(1, publisher=301)
    assert sequences_in(subscriber.outbox) == [1, 2, 1]


def test_messages_nobody_here_wants_are_dropped_and_counted(lan: Lan) -> None:
    lan.arrive(1)
    lan.arrive(1, topic_id=77)
    assert lan.dropped == {DropReason.NO_SUBSCRIBER: 2}


def test_what_passed_while_nobody_subscribed_is_no_loss(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.arrive(1)
    lan.core.remove_endpoint(subscriber, 200, 0)
    lan.arrive(2, 3)
    lan.core.add_endpoint(subscriber, SUB, 200, lan.topic)
    lan.arrive(4)
    assert sequences_in(subscriber.outbox) == [1, 4]
    assert lan.core.statistics().topics[0].lost == 0


def test_messages_of_a_remote_publisher_that_left_are_still_known_when_they_come_again(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.interest(HERE, publishers=[100, 300])
    lan.arrive(1, 2)
    lan.interest(HERE, publishers=[100])
    for second in range(60):
        lan.core.expire(second * SECOND_NS)
    lan.arrive(1, 2)
    assert sequences_in(subscriber.outbox) == [1, 2]
    assert lan.dropped == {DropReason.DUPLICATE: 2}
    lan.core.expire(121 * SECOND_NS)
    assert lan.topic.histories == {}


def test_a_publisher_known_again_is_not_forgotten(lan: Lan) -> None:
    lan.subscribe()
    lan.interest(HERE, publishers=[])
    lan.arrive(1)
    lan.core.expire(0)
    lan.interest(HERE, publishers=[300])
    lan.core.expire(100 * SECOND_NS)
    lan.interest(HERE, publishers=[])
    lan.core.expire(130 * SECOND_NS)
    lan.core.expire(200 * SECOND_NS)
    assert 300 in lan.topic.histories


# Clients


def test_a_frame_of_an_undeclared_publisher_is_refused_without_effects(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.interest(REMOTE)
    lan.router_up("r1")
    before = lan.core.statistics()
    for stranger in (a_message(1, publisher=999), a_message(1, topic_id=2)):
        with pytest.raises(ProtocolError, match="has not declared topic") as caught:
            lan.core.admit_from_client(lan.publisher, body_of([a_message(1), stranger]), 0, NOW)
        assert caught.value.reason is CloseReason.UNKNOWN_PUBLISHER
        lan.core.validate()
    assert lan.core.statistics() == before
    assert subscriber.outbox.is_idle
    assert lan.outboxes["r1"].is_idle
    lan.publish(1)
    assert sequences_in(subscriber.outbox) == lan.sent_to("r1") == [1]


def test_a_publisher_cannot_use_another_clients_endpoint(lan: Lan) -> None:
    other = lan.core.client("client:x", Outbox())
    with pytest.raises(ProtocolError):
        lan.core.admit_from_client(other, body_of([a_message(1)]), 0, NOW)


@given(st.data())
def test_a_frame_cut_short_anywhere_has_no_effect(data: st.DataObject) -> None:
    lan = Lan()
    subscriber = lan.subscribe()
    lan.interest(REMOTE)
    lan.router_up("r1")
    before = lan.core.statistics()
    body = body_of([a_message(1), a_message(2), a_message(3)])
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    for admit in (
        lambda: lan.core.admit_from_client(lan.publisher, cut, 0, NOW),
        lambda: lan.core.admit_from_broker(cut, 0, NOW),
    ):
        with pytest.raises(ProtocolError) as caught:
            admit()
        assert caught.value.reason is CloseReason.BAD_FRAME
    lan.core.validate()
    assert lan.core.statistics() == before
    assert subscriber.outbox.is_idle
    assert lan.outboxes["r1"].is_idle


@given(st.binary(max_size=150))
def test_arbitrary_bytes_from_a_client_or_broker_raise_only_protocol_errors(body: bytes) -> None:
    lan = Lan()
    lan.subscribe()
    for admit in (
        lambda: lan.core.admit_from_client(lan.publisher, body, 0, NOW),
        lambda: lan.core.admit_from_broker(body, 0, NOW),
    ):
        try:
            count, _ = admit()
        except ProtocolError:
            continue
        assert count == decode_batch_header(body).messages
    lan.core.validate()


def test_what_a_reconnecting_client_sends_again_is_taken_once(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.publish_sequences([1, 2, 3])
    lan.core.add_endpoint(lan.publisher, PUB, 100, lan.topic)  # it declares again
    lan.publish_sequences([2, 3, 4])
    assert sequences_in(subscriber.outbox) == lan.sent_to("r1") == [1, 2, 3, 4]
    assert lan.dropped == {DropReason.DUPLICATE: 2}
    assert lan.topic.publishers[100].accepted == 4


def test_a_client_that_was_given_up_and_comes_back_goes_on_where_it_was(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.publish(2)
    lan.core.remove_endpoint(lan.publisher, 100, 0)
    lan.core.remove_client(lan.publisher)
    lan.publisher = lan.core.client("client:p", Outbox())
    lan.core.add_endpoint(lan.publisher, PUB, 100, lan.topic)
    lan.publish_sequences([2, 3])
    assert sequences_in(subscriber.outbox) == lan.sent_to("r1") == [1, 2, 3]
    assert lan.core.expire(100 * SECOND_NS) == []


def test_a_publisher_declared_by_another_client_moves_there(lan: Lan) -> None:
    other = lan.core.client("client:p2", Outbox())
    lan.core.add_endpoint(other, PUB, 100, lan.topic)
    lan.core.validate()
    with pytest.raises(ProtocolError):
        lan.core.admit_from_client(lan.publisher, body_of([a_message(1)]), 0, NOW)
    assert lan.core.admit_from_client(other, body_of([a_message(1)]), 0, NOW)[0] == 1


def test_one_endpoint_id_cannot_stand_for_two_endpoints(lan: Lan) -> None:
    other = lan.core.ensure_topic(2, "u", RELIABLE)
    subscriber = lan.subscribe()
    for client, kind, endpoint, topic in [
        (lan.publisher, PUB, 100, other),
        (lan.publisher, SUB, 100, lan.topic),
        (subscriber, SUB, 200, other),
        (subscriber, PUB, 200, lan.topic),
    ]:
        with pytest.raises(ProtocolError, match="declared for topic t already: give each its own id"):
            lan.core.add_endpoint(client, kind, endpoint, topic)
        lan.core.validate()
    assert not other.publishers
    assert not other.subscribers


def test_a_client_that_leaves_takes_its_endpoints_and_what_waits_along(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.publish()
    lan.core.remove_endpoint(subscriber, 200, 0)
    lan.core.remove_client(subscriber)
    lan.core.validate()
    assert subscriber.outbox.is_idle
    assert lan.publish() == set()
    assert lan.core.statistics().clients == 1


class Mark:
    """Hangs on an outbox, which like all compiled classes cannot be referred to weakly itself."""

    def __call__(self, number: int, tickets: object) -> None:
        """Nothing to do."""


def test_a_client_that_left_is_not_kept_in_memory(lan: Lan) -> None:
    lan.interest(REMOTE)
    gone = []
    for number in range(3):
        client = lan.subscribe(f"visitor-{number}", endpoint=300 + number)
        lan.publish()
        lan.core.remove_endpoint(client, 300 + number, lan.now_ns)
        lan.core.remove_client(client)
        mark = Mark()
        gone.append(weakref.ref(mark))
        client.outbox.on_sent = mark
        del client, mark
        gc.collect()
    assert [mark() for mark in gone] == [None] * 3


def test_a_slow_subscriber_loses_the_oldest_messages_counted_and_hinders_nobody(lan: Lan) -> None:
    slow, fast = lan.subscribe("slow", 201), lan.subscribe("fast", 202)
    size = 500_000
    count = OUTBOX_MAX_BYTES // size + 5
    got = []
    for _ in range(count):
        lan.publish(1, size)
        got += sequences_in(fast.outbox)
    assert got == list(range(1, count + 1))
    late = sequences_in(slow.outbox)
    assert late == list(range(count - len(late) + 1, count + 1))
    assert lan.dropped == {DropReason.OUTBOX_FULL: count - len(late)}


def test_a_topic_in_use_is_not_forgotten(lan: Lan) -> None:
    assert lan.core.expire(10**15) == []
    assert lan.core.ensure_topic(1, "t", RELIABLE) is lan.topic


# Other edges of the LAN


def test_interested_edges_of_the_lan_get_messages_without_a_router(lan: Lan) -> None:
    for edge in ("e2", "e3"):
        lan.outboxes[edge] = Outbox()
    lan.core.set_lan_edges({edge: lan.outboxes[edge] for edge in ("e2", "e3")})
    lan.interest(HERE, NEIGHBOUR)
    lan.router_up("r1")
    assert lan.publish(2) == {"edge:e2"}
    assert lan.sent_to("e2") == [1, 2]
    assert lan.sent_to("e3") == lan.sent_to("r1") == []


def test_messages_go_to_lan_edges_and_the_target_both_if_both_are_interested(lan: Lan) -> None:
    lan.outboxes["e2"] = Outbox()
    lan.core.set_lan_edges({"e2": lan.outboxes["e2"]})
    lan.interest(NEIGHBOUR, REMOTE)
    lan.router_up("r1")
    assert lan.publish() == {"edge:e2", "router:r1"}


def test_messages_from_brokers_are_never_passed_on_to_other_brokers(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.outboxes["e2"] = Outbox()
    lan.core.set_lan_edges({"e2": lan.outboxes["e2"]})
    lan.interest(HERE, NEIGHBOUR, REMOTE)
    lan.router_up("r1")
    assert lan.arrive(1) == {"client:s"}
    assert sequences_in(subscriber.outbox) == [1]
    assert lan.sent_to("e2") == lan.sent_to("r1") == []


def test_an_edge_that_joins_the_lan_later_gets_what_comes_then(lan: Lan) -> None:
    lan.interest(NEIGHBOUR)
    assert lan.publish() == set()
    lan.outboxes["e2"] = Outbox()
    lan.core.set_lan_edges({"e2": lan.outboxes["e2"]})
    lan.core.set_lan_edges({"e2": lan.outboxes["e2"]})
    lan.core.validate()
    lan.publish()
    assert lan.sent_to("e2") == [2]
    lan.core.set_lan_edges({})
    assert lan.publish() == set()


def test_a_publisher_that_moved_to_another_edge_of_the_lan_is_not_delivered_twice(lan: Lan) -> None:
    subscriber = lan.subscribe()
    lan.arrive(1, 2, publisher=100)  # it published through the neighbour before
    lan.interest(HERE, REMOTE)
    lan.router_up("r1")
    lan.publish_sequences([2, 3])
    assert sequences_in(subscriber.outbox) == [1, 2, 3]
    assert lan.sent_to("r1") == [2, 3]


def test_statistics_of_a_topic(lan: Lan) -> None:
    lan.subscribe()
    lan.interest(HERE, REMOTE)
    lan.router_up("r2")
    lan.publish(2)
    lan.arrive(1)
    (topic,) = lan.core.statistics().topics
    assert (topic.topic, topic.messages, topic.delivered) == ("t", 2, 3)
    assert (topic.publishers, topic.subscribers) == (1, 1)
    assert (topic.primary, topic.backup, topic.target) == ("r1", "r2", "r2")
    assert lan.core.statistics().messages_accepted == 2
    assert list(lan.core.routers_up) == ["r2"]
