"""Paths in the edge's core: who is sent what, what happens when a direct link goes, and order."""

import random

import pytest

from overlay.framing import FRAME_HEADER_BYTES
from overlay.limits import MILLISECOND_NS as MS
from overlay.outbox import Outbox
from overlay.paths import BOTH, DIRECT, ROUTING, Choice
from overlay.qos import TopicQos
from overlay.urgency import UNORDERED
from tests.edge_broker.lan import NOW, REMOTE, Lan, a_message, sequences_in
from tests.wires import body_of

QOS = TopicQos(period_ms=10, deadline_ms=300, loss_tolerance=0, retention=8)
RESERVED = Choice(routing=False, direct=True, reserve_after_ns=100 * MS)
SECOND = ("ship", "e8")


class Paths(Lan):
    """A LAN whose edge can reach e9, an edge of another LAN, directly."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(QOS)
        self.interest(REMOTE)
        self.router_up("r1")
        self.direct = Outbox()
        self.core.direct_up("e9", self.direct)
        self.choose(e9=choice)

    def choose(self, **choices: Choice) -> None:
        self.core.set_paths(self.topic, choices, self.now_ns)
        self.core.validate()

    def directly(self) -> list[int]:
        return sequences_in(self.direct)

    def direct_down(self) -> None:
        self.core.direct_down("e9", self.now_ns)
        self.core.validate()


@pytest.mark.parametrize(
    ("choice", "routing", "direct"), [(ROUTING, [1], []), (DIRECT, [], [1]), (BOTH, [1], [1])]
)
def test_messages_take_the_chosen_paths(choice, routing, direct):
    lan = Paths(choice)
    lan.publish()
    assert (lan.sent_to("r1"), lan.directly()) == (routing, direct)


def test_one_edge_that_is_not_reached_directly_makes_the_routing_path_needed():
    lan = Paths(DIRECT)
    lan.interest(REMOTE, SECOND)
    lan.publish()
    assert (lan.sent_to("r1"), lan.directly()) == ([1], [1])
    lan.core.direct_up("e8", Outbox())
    lan.choose(e9=DIRECT, e8=DIRECT)
    lan.publish()
    assert (lan.sent_to("r1"), lan.directly()) == ([], [2])


@pytest.mark.parametrize("choice", [DIRECT, BOTH])
def test_what_waits_for_a_routing_broker_is_not_overtaken_on_a_direct_path(choice):
    lan = Paths(ROUTING)
    lan.router_down("r1")
    lan.publish(3)
    lan.choose(e9=choice)
    lan.publish()
    assert lan.directly() == [1, 2, 3, 4]
    lan.router_up("r1")
    assert lan.sent_to("r1") == [1, 2, 3, 4]


@pytest.mark.parametrize("choice", [DIRECT, BOTH])
def test_what_may_wait_at_a_routing_broker_is_not_overtaken_on_a_direct_path(choice):
    lan = Paths(ROUTING)
    lan.publish(3)
    assert lan.sent_to("r1") == [1, 2, 3]  # whether it reaches e9 nobody here knows
    lan.choose(e9=choice)
    lan.publish()
    assert lan.directly() == [1, 2, 3, 4]
    lan.choose(e9=choice)
    assert lan.directly() == []


def test_a_direct_path_gets_no_more_than_is_retained():
    lan = Paths(ROUTING)
    lan.publish(20)
    lan.choose(e9=BOTH)
    assert lan.directly() == list(range(13, 21))


def test_what_a_direct_link_had_not_delivered_goes_to_the_routing_broker_in_order():
    lan = Paths(DIRECT)
    lan.publish(3)
    lan.direct.take_frames(10**6, lan.now_ns)  # written, never acknowledged
    lan.publish(2)
    lan.direct_down()
    lan.publish()
    assert lan.sent_to("r1") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("afterwards", [{}, {"e9": ROUTING}, {"e9": BOTH}])
def test_a_link_that_breaks_after_it_was_given_up_loses_nothing(afterwards):
    lan = Paths(DIRECT)
    lan.publish(20)
    lan.direct.take_frames(10**6, lan.now_ns)  # written, never acknowledged
    lan.choose(**afterwards)
    lan.publish()
    # What waits where nothing goes any more goes by the routing broker at once.
    assert lan.sent_to("r1") == ([21] if BOTH in afterwards.values() else list(range(1, 22)))
    lan.direct_down()
    assert set(lan.sent_to("r1")) >= set(range(1, 21))
    lan.core.direct_up("e9", Outbox())
    lan.direct_down()
    assert lan.sent_to("r1") == [], "it was not relied on again"


@pytest.mark.parametrize(("choice", "marked"), [(DIRECT, True), (ROUTING, False)])
def test_what_follows_on_the_routing_path_may_not_overtake_what_a_slow_direct_link_still_holds(
    choice, marked
):
    lan = Paths(choice)
    lan.publish(3)
    lan.sent_to("r1")
    lan.choose()  # too much waits for the direct link
    lan.publish()
    [frame] = lan.outboxes["r1"].take_frames(10**6, lan.now_ns)
    assert bool(frame[FRAME_HEADER_BYTES] & UNORDERED) is marked


def test_a_link_that_breaks_when_nobody_is_interested_any_more_keeps_nothing():
    lan = Paths(DIRECT)
    lan.publish(3)
    lan.interest()
    lan.direct_down()
    lan.interest(REMOTE)
    assert lan.sent_to("r1") == []


def test_a_link_that_breaks_when_all_was_acknowledged_has_nothing_sent_again():
    lan = Paths(DIRECT)
    lan.publish(3)
    lan.direct.acknowledge(len(lan.direct.take_frames(10**6, lan.now_ns)))
    lan.direct_down()
    assert lan.sent_to("r1") == []


def test_more_than_is_retained_can_be_on_its_way_directly():
    lan = Paths(DIRECT)
    lan.publish(20)
    lan.direct_down()
    assert lan.sent_to("r1") == list(range(1, 21))


def test_on_both_paths_a_broken_direct_link_costs_nothing():
    lan = Paths(BOTH)
    lan.publish(3)
    assert lan.sent_to("r1") == [1, 2, 3]
    lan.direct_down()
    lan.publish()
    assert lan.sent_to("r1") == [4]


def test_without_a_routing_broker_messages_go_directly_and_are_kept():
    lan = Paths(DIRECT)
    lan.router_down("r1")
    lan.publish(3)
    assert lan.directly() == [1, 2, 3]
    lan.router_up("r2")
    assert lan.sent_to("r2") == [1, 2, 3]


def test_the_reserve_carries_what_is_not_acknowledged_in_time():
    lan = Paths(RESERVED)
    lan.publish(2)
    lan.core.send_reserves(NOW + 99 * MS)
    assert lan.sent_to("r1") == []
    frames = lan.direct.take_frames(10**6, lan.now_ns)
    for ticket in lan.direct.acknowledge(len(frames)):
        ticket.cancelled = True  # what the shell does
    lan.publish(1)
    assert {peer.name for peer in lan.core.send_reserves(NOW + 101 * MS)} == {"router:r1"}
    assert lan.sent_to("r1") == [3]
    assert lan.core.statistics().messages_from_reserve == 1
    assert not lan.core.has_reserves


# Order at the egress


class Egress(Lan):
    """An edge with a subscriber, to which messages come marked as racing."""

    def __init__(self, loss_tolerance: int | None = 0, age_ms: float = 250) -> None:
        super().__init__(TopicQos(deadline_ms=300, loss_tolerance=loss_tolerance))
        self.subscriber = self.subscribe()
        self.born_ns = self.now_ns - round(age_ms * MS)
        """Of the first message; another one is born every millisecond."""
        self.interest(("plant", "e1"), publishers=(300,))

    def race(self, *sequences: int) -> list[int]:
        for sequence in sequences:
            born_ns = self.born_ns + sequence * MS
            body = bytearray(body_of([a_message(sequence, publisher=300, born_ns=born_ns)]))
            body[0] |= UNORDERED
            self.core.admit_from_broker(bytes(body), 0, self.now_ns, "", "e9")
            self.core.validate()
        return sequences_in(self.subscriber.outbox)

    def after(self, milliseconds: float) -> list[int]:
        self.now_ns += round(milliseconds * MS)
        self.core.release_held(self.now_ns)
        return sequences_in(self.subscriber.outbox)


def test_a_copy_that_follows_is_waited_for_though_the_deadline_is_near():
    egress = Egress(age_ms=299)
    assert egress.race(1) == [1]
    assert egress.race(3) == []
    assert egress.after(10) == []
    assert egress.race(2) == [2, 3]


def test_within_the_tolerance_the_deadline_goes_before_a_missing_message():
    egress = Egress(loss_tolerance=1)
    egress.race(1)
    assert egress.race(3) == []
    assert egress.after(49) == [3]


def test_beyond_the_tolerance_a_repair_is_waited_for_longer_than_the_deadline():
    egress = Egress(loss_tolerance=0)
    egress.race(1)
    assert egress.race(3, 4) == []
    assert egress.after(800) == []
    assert egress.race(2) == [2, 3, 4]
    assert egress.core.statistics().topics[0].lost == 0


def test_a_repair_that_never_comes_is_not_waited_for_for_ever():
    egress = Egress(loss_tolerance=0)
    egress.race(1)
    egress.race(3)
    assert egress.after(2_001) == [3]


@pytest.mark.parametrize("seed", range(20))
def test_racing_copies_are_delivered_once_in_order(seed):
    draw = random.Random(seed)
    egress = Egress(age_ms=10)
    arrivals = sorted(
        (number + draw.uniform(0, 30), number) for number in range(1, 101) for _ in range(draw.randint(1, 3))
    )
    got = egress.race(1)
    for _, number in arrivals:
        got += egress.race(number)
        got += egress.after(1)
    assert got == list(range(1, 101)), f"seed {seed}"


def test_what_waits_on_a_direct_path_that_is_given_up_goes_by_the_routing_broker_too():
    lan = Paths(DIRECT)
    lan.publish(3)
    lan.choose()  # its link is overloaded: nothing goes there any more
    lan.publish()
    assert lan.sent_to("r1") == [1, 2, 3, 4]
    assert lan.directly() == [1, 2, 3]  # the egress drops what comes twice


def test_nothing_is_sent_again_if_nothing_waits_or_the_routing_broker_had_it():
    lan = Paths(DIRECT)
    lan.publish(3)
    assert lan.directly() == [1, 2, 3]
    lan.choose()
    assert lan.sent_to("r1") == []
    lan.choose(e9=BOTH)
    lan.publish()
    lan.choose()
    assert lan.sent_to("r1") == [4]


def test_a_reserve_goes_to_the_routing_broker_that_the_topic_has_by_then():
    lan = Paths(RESERVED)
    lan.router_up("r2")
    lan.publish(2)
    lan.router_down("r1")  # everything retained goes to its backup
    assert lan.sent_to("r2") == [1, 2]
    lan.now_ns += 150 * MS
    lan.core.send_reserves(lan.now_ns)
    assert lan.sent_to("r2") == [1, 2]  # nobody has acknowledged it
    assert lan.sent_to("r1") == []
    lan.core.validate()
