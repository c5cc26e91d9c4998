"""Order at the egress when copies race after a change of routing brokers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_broker.core import EdgeCore
from overlay.batch import Run, decode_messages, encode_batch, encode_message
from overlay.limits import MILLISECOND_NS, SECOND_NS
from overlay.messages import UNKNOWN_CLOCK_SHIFT, EndpointKind
from overlay.outbox import Outbox
from overlay.qos import Reliability, TopicQos

MS = MILLISECOND_NS
NOW = 10**12


class Egress:
    """An edge with one subscriber, fed by hand."""

    def __init__(self, deadline_ms=100, **qos):
        self.core = EdgeCore("eb", "b", 9)
        self.client = self.core.client("client:1", Outbox())
        self.topic = self.core.ensure_topic(1, "t", TopicQos(deadline_ms=deadline_ms, **qos))
        self.core.add_endpoint(self.client, EndpointKind.SUBSCRIBER, 5, self.topic)
        self.core.set_interest(
            self.topic,
            primary="r1",
            backup="r2",
            subscribers={("b", "eb")},
            publishers=frozenset({77}),
            now_ns=NOW - 10 * SECOND_NS,
        )
        # One that stays: an edge without any is cut off.
        self.core.router_up("r2", Outbox(), NOW - 10 * SECOND_NS)

    def receive(self, *sequences, now_ns=NOW, born_ns=None, publisher=77, router="", edge=""):
        born_ns = NOW - MS if born_ns is None else born_ns
        runs = [Run(1, encode_message(1, publisher, sequence, born_ns, b"x")) for sequence in sequences]
        self.core.admit_from_broker(encode_batch(3, 5, 0, runs)[5:], 0, now_ns, router, edge)
        self.core.validate()
        return self.delivered(now_ns)

    def delivered(self, now_ns=NOW):
        frames = self.client.outbox.take_frames(10**9, now_ns)
        self.client.outbox.acknowledge(self.client.outbox._sent)
        return [message.sequence for data in frames for message in decode_messages(data[5:])]


def test_after_a_disturbance_a_message_waits_for_its_predecessor():
    egress = Egress()
    assert egress.receive(1) == [1]
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    assert egress.receive(3, 4) == []
    assert egress.core.has_held
    assert egress.receive(4) == [], "a duplicate of a held one"
    assert egress.receive(2) == [2, 3, 4]
    assert not egress.core.has_held
    assert egress.core.statistics().topics[0].lost == 0


def test_it_waits_no_longer_than_its_deadline_allows():
    egress = Egress(deadline_ms=100, loss_tolerance=1)
    egress.receive(1)
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    assert egress.receive(3, born_ns=NOW - 20 * MS) == []
    assert egress.core.release_held(NOW + 70 * MS) == set()
    assert egress.core.release_held(NOW + 76 * MS)
    assert egress.delivered() == [3]
    assert egress.receive(2, now_ns=NOW + 80 * MS) == [], "its predecessor is late now"
    statistics = egress.core.statistics()
    assert statistics.dropped["late"] == 1
    assert statistics.topics[0].lost == 1


def test_it_waits_beyond_its_deadline_rather_than_lose_more_than_its_topic_tolerates():
    egress = Egress(deadline_ms=50, loss_tolerance=1)
    egress.receive(1)
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    assert egress.receive(4, born_ns=NOW - 60 * MS) == [], "2 and 3 are missing"
    assert egress.core.release_held(NOW + 190 * MS) == set()
    assert egress.receive(3, now_ns=NOW + 191 * MS, born_ns=NOW - 60 * MS) == [3, 4], "only 2 is missing now"
    assert egress.receive(7, now_ns=NOW + 200 * MS, born_ns=NOW) == []
    assert egress.core.release_held(NOW + 401 * MS), "a failover does not take that long: they are lost"
    assert egress.delivered() == [7]


def _cut_off_with_a_gap():
    """1 was delivered; 4 waits for 2 and 3 as the last routing broker goes."""
    egress = Egress(deadline_ms=50, loss_tolerance=1)
    egress.core.router_up("r1", Outbox(), NOW - SECOND_NS // 2)
    assert egress.receive(1, router="r2") == [1]
    assert egress.receive(4, router="r1") == []
    egress.core.router_down("r1", NOW + 10 * MS)
    egress.core.router_down("r2", NOW + 10 * MS)
    return egress


def test_while_cut_off_it_waits_rather_than_lose_more_than_its_topic_tolerates():
    egress = _cut_off_with_a_gap()
    assert egress.core.release_held(NOW + 5 * SECOND_NS) == set(), "2 and 3 wait at a routing broker"
    back_ns = NOW + 6 * SECOND_NS
    egress.core.router_up("r1", Outbox(), back_ns)
    assert egress.receive(5, now_ns=back_ns, router="r1") == []
    assert egress.core.release_held(back_ns + 900 * MS) == set()
    egress.core.router_up("r2", Outbox(), back_ns + 910 * MS)
    assert egress.receive(2, 3, now_ns=back_ns + 920 * MS, router="r2") == [2, 3, 4, 5]
    assert egress.core.statistics().topics[0].lost == 0


def test_what_has_not_come_a_second_after_a_cut_is_lost():
    egress = _cut_off_with_a_gap()
    back_ns = NOW + 6 * SECOND_NS
    egress.core.router_up("r1", Outbox(), back_ns)
    assert egress.core.release_held(back_ns + 999 * MS) == set()
    assert egress.core.release_held(back_ns + SECOND_NS)
    assert egress.delivered() == [4]


def test_an_edge_that_others_reach_directly_is_not_cut_off():
    egress = _cut_off_with_a_gap()
    assert egress.receive(5, now_ns=NOW + 20 * MS, edge="ea") == []
    assert egress.core.release_held(NOW + 20 * MS + SECOND_NS)
    assert egress.delivered() == [4, 5]


def test_best_effort_waits_half_as_long_because_nobody_sends_it_again():
    egress = Egress(deadline_ms=100, loss_tolerance=None, reliability=Reliability.BEST_EFFORT)
    egress.receive(1)
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    assert egress.receive(3, born_ns=NOW - 20 * MS) == []
    assert egress.core.release_held(NOW + 29 * MS) == set()
    assert egress.core.release_held(NOW + 31 * MS)
    assert egress.delivered() == [3]


def test_a_message_that_is_due_does_not_wait():
    egress = Egress(deadline_ms=50, loss_tolerance=1)
    egress.receive(1)
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    assert egress.receive(3, born_ns=NOW - 60 * MS) == [3]


def test_what_comes_from_another_router_than_the_primary_waits_for_its_predecessor():
    """The link between primary and backup broke: the backup dispatches what the primary still sends too."""
    egress = Egress()
    egress.receive(1, router="r1")
    assert egress.receive(4, 5, router="r2") == []
    assert egress.receive(2, 3, router="r1") == [2, 3, 4, 5]
    assert not egress.core.has_held


def test_without_a_disturbance_a_gap_is_a_loss_and_nothing_waits():
    egress = Egress()
    egress.receive(1)
    assert egress.receive(5) == [5]
    assert not egress.core.has_held


@given(
    st.permutations(range(2, 12)),
    st.lists(st.integers(2, 11), max_size=10),
    st.integers(0, 9),
)
def test_any_order_of_arrival_is_put_right(order, repeats, split):
    """Two ways deliver all messages, some twice, in any order: each is delivered once, in order."""
    egress = Egress()
    egress.receive(1)
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    arrivals = list(order)
    arrivals[split:split] = repeats
    seen = []
    for sequence in arrivals:
        seen += egress.receive(sequence)
    assert seen == list(range(2, 12))
    assert not egress.core.has_held


@pytest.mark.parametrize("resubscribes", [False, True])
def test_a_message_known_to_be_old_does_not_overtake_one_of_unknown_age_before_it(resubscribes):
    """Also if somebody subscribes in between and the routes are made anew."""
    egress = Egress()
    for sequence, clock_shift_ns in ((1, UNKNOWN_CLOCK_SHIFT), (2, 0)):
        run = Run(1, encode_message(1, 77, sequence, NOW - 40 * MS, b"x"))
        egress.core.admit_from_broker(encode_batch(3, 5, clock_shift_ns, [run])[5:], 0, NOW)
        if resubscribes:
            other = egress.core.client("client:2", Outbox())
            egress.core.add_endpoint(other, EndpointKind.SUBSCRIBER, 6, egress.topic)
            resubscribes = False
    assert egress.delivered() == [1, 2]


def test_what_comes_too_late_to_wait_does_not_overtake_those_that_wait():
    egress = Egress(deadline_ms=50, loss_tolerance=1)
    egress.receive(1)
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    late_ns = NOW - 100 * MS
    assert egress.receive(5, 7, born_ns=late_ns) == [], "too many before them are missing"
    assert egress.receive(3, 9, born_ns=late_ns) == [3, 5, 7, 9]
    assert "late" not in egress.core.statistics().dropped
    assert not egress.core.has_held


def test_messages_that_wait_while_the_subscribers_change_do_no_harm():
    egress = Egress(deadline_ms=100)
    egress.receive(1)
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    assert egress.receive(3, 5) == []
    egress.core.remove_endpoint(egress.client, 5, NOW)
    egress.core.add_endpoint(egress.client, EndpointKind.SUBSCRIBER, 6, egress.topic)
    egress.core.release_held(NOW + SECOND_NS)
    assert not egress.core.has_held
    assert egress.receive(6, now_ns=NOW + SECOND_NS) == [3, 5, 6]


def test_thousands_may_wait_for_one():
    egress = Egress(deadline_ms=100)
    egress.receive(1)
    egress.core.router_up("r1", Outbox(), NOW)
    egress.core.router_down("r1", NOW)
    sequences = list(range(3, 3_003))
    random.Random(1).shuffle(sequences)
    assert egress.receive(*sequences) == []
    assert egress.receive(2) == list(range(2, 3_003))


def test_only_so_much_waits_for_a_predecessor():
    egress = Egress(deadline_ms=10_000)
    egress.core._order.held_most_bytes = 10 * 300
    assert egress.receive(1) == [1]
    assert egress.receive(1, publisher=78) == [1]
    egress.core.router_up("r1", Outbox(), NOW)
    assert egress.receive(*range(3, 11)) == []
    assert egress.receive(3, publisher=78) == []
    held = egress.core._order.held_bytes
    assert 0 < held <= 10 * 300
    # One more of a publisher is one too many: it gets all of its own, with the gap, nobody else's.
    assert egress.receive(11, 12, 13, 14) == list(range(3, 15))
    assert egress.core._order.held_bytes == held // 9
    assert egress.core.statistics().topics[0].lost == 1
    assert egress.receive(2, publisher=78) == [2, 3]
    assert egress.core._order.held_bytes == 0
