"""Order at a subscriber that changes its edge, for any order in which messages come."""

from hypothesis import given
from hypothesis import strategies as st

from clients.resuming import HELD_MAX, Arrived, Resumption
from overlay.history import History, Verdict
from overlay.limits import MILLISECOND_NS, RESUME_NS
from overlay.messages import Message
from overlay.qos import TopicQos

NOW = 10**12
NOTHING_LOST = TopicQos(loss_tolerance=0)


class Subscriber:
    """What an application gets through a resumption."""

    def __init__(self, qos: TopicQos = NOTHING_LOST, highest: int = 10) -> None:
        self.qos = qos
        self.resumption = Resumption()
        self.resumption.begin(NOW)
        self.resumption.served(NOW)
        self.histories: dict[int, History] = {}
        self.got: list[int] = []
        for sequence in range(1, highest + 1):
            self.history(1).judge(sequence)

    def history(self, publisher: int) -> History:
        return self.histories.setdefault(publisher, History())

    def accept(self, item: Arrived) -> None:
        if self.history(item.message.publisher).judge(item.message.sequence) is Verdict.NEW:
            self.got.append(item.message.sequence)

    def take(self, sequence: int, at_ns: int = NOW, publisher: int = 1) -> None:
        arrived = Arrived(Message(1, publisher, sequence, 0, b""), None, at_ns)
        for item in self.resumption.take(arrived, self.history(publisher), self.qos):
            self.accept(item)

    def release(self, at_ns: int) -> None:
        for item in self.resumption.release(at_ns):
            self.accept(item)


@given(st.permutations(range(5, 25)), st.lists(st.integers(5, 24)))
def test_whatever_comes_twice_and_in_whatever_order_is_delivered_once_and_in_order(
    order: list[int], again: list[int]
) -> None:
    subscriber = Subscriber()
    for sequence in [*order[:10], *again, *order[10:]]:
        subscriber.take(sequence)
    assert subscriber.got == list(range(11, 25))
    assert subscriber.resumption.due_ns is None
    assert subscriber.resumption.is_over(NOW + RESUME_NS)


@given(st.permutations(range(11, 25)), st.sets(st.integers(11, 24), min_size=1, max_size=13))
def test_what_does_not_come_holds_nothing_up_for_longer_than_resuming_takes(
    order: list[int], missing: set[int]
) -> None:
    subscriber = Subscriber()
    arrived = [sequence for sequence in order if sequence not in missing]
    for sequence in arrived:
        subscriber.take(sequence)
    subscriber.release(NOW + RESUME_NS - 1)
    first = min(missing)
    assert subscriber.got == list(range(11, first))
    subscriber.release(NOW + RESUME_NS)
    assert subscriber.got == sorted(arrived)
    assert subscriber.resumption.is_over(NOW + RESUME_NS)


def test_what_may_be_lost_is_waited_for_only_as_long_as_the_deadline_allows() -> None:
    subscriber = Subscriber(TopicQos(loss_tolerance=2, deadline_ms=50))
    subscriber.take(13)
    assert subscriber.resumption.due_ns == NOW + 50 * MILLISECOND_NS
    subscriber.release(NOW + 50 * MILLISECOND_NS)
    assert subscriber.got == [13]
    subscriber.take(17)
    assert subscriber.resumption.due_ns == NOW + RESUME_NS


def test_nobody_waits_for_best_effort_or_for_a_publisher_never_heard_before() -> None:
    best_effort = Subscriber(TopicQos(loss_tolerance=None))
    best_effort.take(15)
    assert best_effort.got == [15]
    subscriber = Subscriber()
    subscriber.take(7, publisher=2)
    assert subscriber.got == [7]


def test_only_so_many_wait() -> None:
    subscriber = Subscriber()
    for sequence in range(12, 12 + HELD_MAX):
        subscriber.take(sequence)
    assert not subscriber.got
    subscriber.take(12 + HELD_MAX)
    assert subscriber.got == list(range(12, 13 + HELD_MAX))


def test_an_edge_that_takes_long_to_serve_is_waited_for() -> None:
    subscriber = Subscriber()
    subscriber.resumption.begin(NOW)
    served_ns = NOW + 10 * RESUME_NS
    assert not subscriber.resumption.is_over(served_ns)
    # What comes before it says so waits as well: it may be on its way to saying so.
    subscriber.take(15, served_ns - 1)
    subscriber.resumption.served(served_ns)
    for sequence in range(11, 15):
        subscriber.take(sequence, served_ns + 1)
    assert subscriber.got == [11, 12, 13, 14, 15]
    assert subscriber.resumption.is_over(served_ns + RESUME_NS)


def test_a_message_waits_for_an_edge_that_does_not_serve_no_longer_than_resuming_takes() -> None:
    subscriber = Subscriber()
    subscriber.resumption.begin(NOW)
    late_ns = NOW + 10 * RESUME_NS
    subscriber.take(15, late_ns)
    assert subscriber.resumption.due_ns == late_ns + RESUME_NS
    subscriber.release(late_ns + RESUME_NS)
    assert subscriber.got == [15]
