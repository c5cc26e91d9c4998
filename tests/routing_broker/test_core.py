"""The routing broker's rules: which edges get a message, in which order, and what is dropped."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import BATCH_HEADER_BYTES, decode_batch_header, decode_messages
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import (
    MILLISECOND_NS,
    OUTBOX_MAX_BYTES,
    UNROUTED_MAX_BYTES,
    UNROUTED_MAX_NS,
)
from overlay.messages import UNKNOWN_CLOCK_SHIFT, Message
from overlay.outbox import OVERLOADED_AFTER_NS, Outbox
from overlay.qos import BEST_EFFORT, TopicQos
from overlay.schedule import BUCKET_NS, BUCKET_SHIFT, granule_ns
from overlay.urgency import deadline_ns
from routing_broker.core import RouterCore
from routing_broker.model import DropReason, Peer
from tests.wires import bodies_of, body_of, drain

LANS = {"a1": "a", "a2": "a", "b1": "b", "c1": "c"}
QOS = TopicQos()
MS = MILLISECOND_NS
PLENTY = 2**40


def _message(topic_id: int, sequence: int, payload: bytes = b"payload") -> Message:
    return Message(topic_id, 9, sequence, 5, payload)


def _core(qos: TopicQos = QOS, **topics: Iterable[str]) -> RouterCore:
    """A core that knows all edges, and serves topics t1, t2, ... for the edges given."""
    core = RouterCore()
    for edge, lan in LANS.items():
        core.peer(edge, lan)
    for name, edges in topics.items():
        core.set_topic(int(name[1:]), name, qos, {edge: LANS[edge] for edge in edges}, 0)
    core.validate()
    return core


def _send(core: RouterCore, source: str, messages: list[Message], now_ns: int = 0) -> set[str]:
    """Admit one frame; returns the edges that got something."""
    count, touched = core.admit(core.peers[source], body_of(messages), 0, now_ns)
    core.validate()
    assert count == len(messages)
    assert touched == {peer for peer in touched if peer.outbox.has_waiting}
    return _names(touched)


def _names(peers: Iterable[Peer]) -> set[str]:
    return {peer.name for peer in peers}


def _take(core: RouterCore, edge: str) -> list[Message]:
    return drain(core.peers[edge].outbox)


# Routes


def test_a_message_goes_to_every_interested_edge_of_other_lans_and_not_back() -> None:
    core = _core(t1=["a1", "a2", "b1", "c1"])
    messages = [_message(1, 1)]
    assert _send(core, "a1", messages) == {"b1", "c1"}
    assert _take(core, "b1") == _take(core, "c1") == messages
    assert _take(core, "a1") == _take(core, "a2") == []


def test_routes_follow_the_subscribers() -> None:
    core = _core(t1=["b1"])
    _send(core, "a1", [_message(1, 1)])
    core.set_topic(1, "t1", QOS, {"c1": "c"}, 0)
    core.validate()
    _send(core, "a1", [_message(1, 2)])
    assert [message.sequence for message in _take(core, "b1")] == [1]
    assert [message.sequence for message in _take(core, "c1")] == [2]


def test_an_edge_that_moves_to_another_lan_is_routed_by_its_new_lan() -> None:
    core = _core(t1=["a2", "b1"])
    assert _send(core, "a1", [_message(1, 1)]) == {"b1"}
    core.peer("a1", "b")
    core.set_topic(1, "t1", QOS, {"a2": "a", "b1": "b"}, 0)
    core.validate()
    assert _send(core, "a1", [_message(1, 2)]) == {"a2"}


def test_an_edge_first_heard_of_as_a_subscriber_gets_its_messages_when_it_connects() -> None:
    core = RouterCore()
    source = core.peer("a1", "a")
    core.set_topic(1, "t1", QOS, {"late": "z"}, 0)
    core.admit(source, body_of([_message(1, 1)]), 0, 0)
    assert core.peer("late", "z") is core.peers["late"]
    assert _take(core, "late") == [_message(1, 1)]


def test_routes_of_sets_that_are_gone_are_forgotten() -> None:
    core = _core(t1=["b1", "c1"])
    _send(core, "a1", [_message(1, 1)])
    (route,) = core.peers["a1"].routes.values()
    assert _names(route.peers) == {"b1", "c1"}
    core.set_topic(1, "t1", QOS, {"b1": "b"}, 0)
    assert not core.peers["a1"].routes
    core.validate()


# Runs


def test_neighbours_with_the_same_destinations_travel_as_one_run() -> None:
    core = _core(t1=["b1"], t2=["b1"], t3=["b1", "c1"])
    messages = [_message(1, 1), _message(2, 1), _message(3, 1), _message(1, 2)]
    _send(core, "a1", messages)
    (frame,) = bodies_of(core.peers["b1"].outbox.take_frames(PLENTY, 0))
    assert frame == body_of(messages)
    assert _take(core, "c1") == [messages[2]]


def test_the_batch_header_is_passed_on_and_keeps_batches_of_different_origins_apart() -> None:
    core = _core(t1=["b1"])
    source = core.peers["a1"]
    bodies = [
        body_of([_message(1, 1)], urgency=3, origin=77, clock_shift_ns=-12),
        body_of([_message(1, 2)], urgency=3, origin=78, clock_shift_ns=-12),
    ]
    for body in bodies:
        core.admit(source, body, 0, 0)
    assert bodies_of(core.peers["b1"].outbox.take_frames(PLENTY, 0)) == bodies


@pytest.mark.parametrize(
    ("before_ns", "link_ns", "onward_ns"),
    [
        (-12, 40, 28),
        (UNKNOWN_CLOCK_SHIFT, 40, UNKNOWN_CLOCK_SHIFT),
        (-12, UNKNOWN_CLOCK_SHIFT, UNKNOWN_CLOCK_SHIFT),
    ],
)
def test_the_clock_shift_of_the_link_is_added_also_to_what_waited_for_a_route(
    before_ns: int, link_ns: int, onward_ns: int
) -> None:
    core = _core(t1=["b1"])
    body = body_of([_message(1, 1), _message(7, 1)], origin=77, clock_shift_ns=before_ns)
    core.admit(core.peers["a1"], body, link_ns, 0)
    core.set_topic(7, "t7", QOS, {"c1": "c"}, 5)
    for edge, message in (("b1", _message(1, 1)), ("c1", _message(7, 1))):
        (onward,) = bodies_of(core.peers[edge].outbox.take_frames(PLENTY, 0))
        assert onward == body_of([message], origin=77, clock_shift_ns=onward_ns)


def test_messages_born_in_different_milliseconds_are_runs_of_their_own() -> None:
    """So that each gets its deadline; neighbours of one millisecond share theirs."""
    core = _core(TopicQos(deadline_ms=16), t1=["b1"])
    born = [1, 2, 3 << BUCKET_SHIFT, 1 << BUCKET_SHIFT]
    messages = [Message(1, 9, at, born_ns, b"") for at, born_ns in enumerate(born)]
    _send(core, "a1", messages)
    assert _take(core, "b1") == [messages[0], messages[1], messages[3], messages[2]]


def test_the_longer_the_deadline_the_longer_the_time_in_which_births_count_as_one() -> None:
    """Neighbours of one granule stay together as they came; a message of an older granule comes first."""
    qos = TopicQos(deadline_ms=1_100)
    core = _core(qos, t1=["b1"])
    granule = granule_ns(deadline_ns(qos))
    assert granule > 8 * MS
    born = [2 * granule - 1, granule + 1, granule, 2 * granule, granule - 1]
    messages = [Message(1, at, 1, born_ns, b"") for at, born_ns in enumerate(born)]
    _send(core, "a1", messages, 3 * granule)
    assert _take(core, "b1") == [messages[4], *messages[:4]]


# Topics that are not known yet


def test_messages_of_an_unknown_topic_wait_for_its_routes_and_keep_their_order() -> None:
    core = _core(t1=["b1"])
    messages = [_message(7, 1), _message(1, 1), _message(7, 2), _message(8, 1)]
    assert _send(core, "a1", messages) == {"b1"}
    assert core.statistics().messages_unrouted_waiting == 3
    assert _take(core, "b1") == [messages[1]]
    touched = core.set_topic(7, "t7", QOS, {"b1": "b", "a2": "a"}, 1)
    core.validate()
    assert _names(touched) == {"b1"}
    assert _take(core, "b1") == [messages[0], messages[2]]
    assert core.statistics().messages_unrouted_waiting == 1
    assert not any(core.statistics().dropped.values())


def test_messages_nobody_seems_to_want_wait_for_a_subscriber_the_ingress_heard_of_first() -> None:
    core = _core(t1=["a1"], t2=[])
    assert _send(core, "a1", [_message(1, 1), _message(2, 1), _message(1, 2)]) == set()
    assert _send(core, "b1", [_message(1, 7)]) == {"a1"}
    assert core.statistics().messages_unrouted_waiting == 3
    assert _names(core.set_topic(1, "t1", QOS, {"a1": "a", "b1": "b"}, 0)) == {"b1"}
    core.validate()
    assert _take(core, "b1") == [_message(1, 1), _message(1, 2)]
    assert core.set_topic(2, "t2", QOS, {"a2": "a"}, 0) == set()
    core.validate()
    assert core.statistics().messages_unrouted_waiting == 1
    core.expire(UNROUTED_MAX_NS + 1)
    assert core.statistics().dropped == {DropReason.UNROUTED: 1}


def test_messages_wait_for_routes_only_so_long_and_are_counted_then() -> None:
    core = _core()
    _send(core, "a1", [_message(7, 1), _message(7, 2)], now_ns=0)
    _send(core, "a1", [_message(7, 3)], now_ns=10)
    core.expire(UNROUTED_MAX_NS)
    core.validate()
    assert core.statistics().messages_unrouted_waiting == 3
    core.expire(UNROUTED_MAX_NS + 1)
    core.validate()
    assert core.statistics().dropped == {DropReason.UNROUTED: 2}
    core.set_topic(7, "t7", QOS, {"b1": "b"}, UNROUTED_MAX_NS + 1)
    assert [message.sequence for message in _take(core, "b1")] == [3]
    core.expire(10 * UNROUTED_MAX_NS)
    core.validate()
    assert core.statistics().dropped == {DropReason.UNROUTED: 2}


def test_messages_wait_for_routes_only_up_to_a_size_and_are_counted_beyond() -> None:
    core = _core()
    size = 300_000
    count = 2 * UNROUTED_MAX_BYTES // size
    for sequence in range(count):
        _send(core, "a1", [_message(7, sequence, bytes(size))])
    waiting = core.statistics().messages_unrouted_waiting
    assert 0 < waiting < count
    assert core.statistics().dropped == {DropReason.UNROUTED: count - waiting}


def test_a_topic_no_longer_served_is_unknown_again() -> None:
    core = _core(t1=["b1"])
    core.remove_topic(1)
    core.remove_topic(1)
    core.validate()
    assert _send(core, "a1", [_message(1, 1)]) == set()
    assert core.statistics().messages_unrouted_waiting == 1
    assert core.statistics().topics == 0


# Malformed frames


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_frame_with_a_wrong_count_has_no_effect(extra: int) -> None:
    core = _core(t1=["b1"])
    body = body_of([_message(1, 1), _message(7, 1)])
    count = BATCH_HEADER_BYTES - 4
    wrong = body[:count] + (2 + extra).to_bytes(4, "little") + body[BATCH_HEADER_BYTES:]
    with pytest.raises(ProtocolError, match=f"announces {2 + extra} messages, 2 are whole") as caught:
        core.admit(core.peers["a1"], wrong, 0, 0)
    assert caught.value.reason is CloseReason.BAD_FRAME
    _nothing_happened(core)


@given(st.data())
def test_a_frame_cut_short_anywhere_has_no_effect(data: st.DataObject) -> None:
    core = _core(t1=["b1"])
    body = body_of([_message(1, 1), _message(1, 2), _message(7, 1), _message(1, 3)])
    with pytest.raises(ProtocolError):
        core.admit(core.peers["a1"], body[: data.draw(st.integers(0, len(body) - 1))], 0, 0)
    _nothing_happened(core)


@given(st.binary(max_size=150))
def test_arbitrary_bytes_are_a_frame_or_have_no_effect(body: bytes) -> None:
    core = _core(t1=["b1"])
    try:
        admitted, _ = core.admit(core.peers["a1"], body, 0, 0)
    except ProtocolError as error:
        assert error.reason is CloseReason.BAD_FRAME
        _nothing_happened(core)
        return
    assert admitted == decode_batch_header(body).messages == len(list(decode_messages(body)))


def _nothing_happened(core: RouterCore) -> None:
    core.validate()
    statistics = core.statistics()
    assert statistics.messages_admitted == statistics.messages_unrouted_waiting == 0
    assert not any(statistics.dropped.values())
    assert all(peer.outbox.is_idle for peer in core.peers.values())


# Full outboxes and edges that leave


def test_what_a_slow_edge_does_not_take_is_dropped_oldest_first_and_counted() -> None:
    core = _core(t1=["b1", "c1"])
    size = 400_000
    count = OUTBOX_MAX_BYTES // size + 10
    fast: list[int] = []
    for sequence in range(count):
        _send(core, "a1", [_message(1, sequence, bytes(size))])
        fast += [message.sequence for message in _take(core, "c1")]
    assert fast == list(range(count))
    slow = [message.sequence for message in _take(core, "b1")]
    assert slow == list(range(count - len(slow), count))
    assert core.statistics().dropped == {DropReason.OUTBOX_FULL: count - len(slow)}
    assert core.statistics().messages_dispatched == 2 * count


def test_an_edge_that_leaves_takes_its_waiting_messages_along_counted() -> None:
    core = _core(t1=["b1"])
    _send(core, "a1", [_message(1, 1), _message(1, 2)])
    core.remove_peer("b1")
    core.remove_peer("b1")
    core.validate()
    assert core.statistics().dropped == {DropReason.EDGE_GONE: 2}
    assert "b1" not in core.peers


def test_an_edge_that_left_and_is_back_gets_messages_again() -> None:
    core = _core(t1=["b1"])
    _send(core, "a1", [_message(1, 1)])
    before = core.peers["b1"]
    core.remove_peer("b1")
    assert _send(core, "a1", [_message(1, 2)]) == {"b1"}
    assert core.peers["b1"] is not before
    assert _take(core, "b1") == [_message(1, 2)]


def test_what_waits_longest_for_its_deadline_survives_a_full_outbox() -> None:
    core = _core()
    core.set_topic(1, "t1", TopicQos(deadline_ms=100), {"b1": "b"}, 0)
    core.set_topic(2, "t2", TopicQos(deadline_ms=500), {"b1": "b"}, 0)
    size = 400_000
    count = OUTBOX_MAX_BYTES // size // 2
    for sequence in range(1, count + 1):
        _send(core, "a1", [_message(2, sequence, bytes(size))])
    for sequence in range(1, 2 * count + 1):
        _send(core, "a1", [_message(1, sequence, bytes(size))])
    got = [(message.topic_id, message.sequence) for message in _take(core, "b1")]
    urgent = [sequence for topic_id, sequence in got if topic_id == 1]
    assert urgent == list(range(2 * count - len(urgent) + 1, 2 * count + 1))
    assert got[len(urgent) :] == [(2, sequence) for sequence in range(1, count + 1)]
    assert core.statistics().dropped == {DropReason.OUTBOX_FULL: 2 * count - len(urgent)}


def test_an_overloaded_edge_gets_only_what_it_must_and_the_others_get_everything() -> None:
    core = _core()
    for topic_id, qos in ((1, QOS), (2, TopicQos(loss_tolerance=2)), (3, BEST_EFFORT)):
        core.set_topic(topic_id, f"t{topic_id}", qos, {"b1": "b", "c1": "c"}, 0)
    now_ns = 0
    core.peers["b1"].outbox.take_frames(PLENTY, now_ns)
    for sequence in range(1, 31):
        messages = [_message(topic_id, sequence) for topic_id in (1, 2, 3)]
        _send(core, "a1", messages, now_ns)
        assert [(m.topic_id, m.sequence) for m in _take(core, "c1")] == [(i, sequence) for i in (1, 2, 3)]
        now_ns += MS
    slow: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for message in _take(core, "b1"):
        slow[message.topic_id].append(message.sequence)
    calm = OVERLOADED_AFTER_NS // MS + 1
    assert slow[1] == list(range(1, 31))
    assert slow[3] == list(range(1, calm + 1))
    assert slow[2] == [*range(1, calm + 1), *range(calm + 1 + -(calm + 1) % 3, 31, 3)]
    assert core.statistics().dropped == {
        DropReason.SHED_BEST_EFFORT: 30 - len(slow[3]),
        DropReason.SHED_TOLERATED: 30 - len(slow[2]),
    }


# Everything together, against a model


Header = tuple[int, int, int]
DEADLINES_MS = {1: None, 2: 50, 3: 50, 4: 500}
"""What the topics of the model ask for: one without a deadline, two alike, one in between."""


class Due(NamedTuple):
    """A message an edge should get, with its batch header and what orders it."""

    bucket: int
    header: Header
    message: Message


class Model(NamedTuple):
    """Who should get what, and in which order as long as nobody takes it."""

    subscribers: dict[int, frozenset[str]]
    held: dict[int, list[tuple[str, Header, Message]]]
    due: dict[str, list[Due]]
    unsure_until_ns: dict[int, int]
    """By deadline: when the last message whose age was not known is due; none after it is due before."""

    def admit(self, source: str, header: Header, message: Message, now_ns: int) -> None:
        subscribers = self.subscribers.get(message.topic_id, frozenset())
        interested = [edge for edge in subscribers if LANS[edge] != LANS[source]]
        known = header[2] != UNKNOWN_CLOCK_SHIFT
        relative_ns = deadline_ns(_qos(message.topic_id))
        granule = granule_ns(relative_ns)
        born_ns = message.born_ns // granule * granule - header[2] if known else now_ns
        due_ns = max(born_ns + relative_ns, self.unsure_until_ns.get(relative_ns, 0))
        if interested and not known:
            self.unsure_until_ns[relative_ns] = due_ns
        bucket = due_ns >> BUCKET_SHIFT
        for edge in interested:
            self.due[edge].append(Due(bucket, header, message))
        if not interested:
            self.held.setdefault(message.topic_id, []).append((source, header, message))

    def set_topic(self, topic_id: int, edges: frozenset[str], now_ns: int) -> None:
        self.subscribers[topic_id] = edges
        for source, header, message in self.held.pop(topic_id, []):
            self.admit(source, header, message, now_ns)

    def take(self, edge: str) -> list[tuple[Header, Message]]:
        """What the edge gets now: earliest deadline first, ties in the order they came."""
        taken = sorted(self.due[edge], key=lambda due: due.bucket)
        self.due[edge].clear()
        return [(due.header, due.message) for due in taken]


def _qos(topic_id: int) -> TopicQos:
    return TopicQos(deadline_ms=DEADLINES_MS[topic_id])


_edges = st.sampled_from(sorted(LANS))
_topic_ids = st.integers(1, 4)
_subscribers = st.frozensets(_edges)
_clocks = st.sampled_from([(1, 0), (2, 30 * MS), (3, UNKNOWN_CLOCK_SHIFT)])
"""Origins, and what is known of their clocks."""
_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("frame"),
            _edges,
            st.builds(lambda urgency, clock: (urgency, *clock), st.integers(0, 1), _clocks),
            st.lists(
                st.tuples(_topic_ids, st.sampled_from([0, 0, 40 * MS]), st.binary(max_size=12)),
                max_size=6,
            ),
        ),
        st.tuples(st.just("topic"), _topic_ids, _subscribers),
        st.tuples(st.just("remove topic"), _topic_ids),
        st.tuples(st.just("time passes"), st.sampled_from([1, 3 * MS])),
        st.tuples(st.just("take"), _edges),
    ),
    max_size=30,
)


@pytest.mark.parametrize("link_shift_ns", [0, 30_000_000, -(10**11)])
def test_a_message_that_arrives_old_gets_a_tighter_dispatch_deadline(link_shift_ns: int) -> None:
    """Its own age bound is the time from publisher to primary, whatever the clocks read."""
    now_ns = 10**12
    due = {}
    for age_ns in (0, 5_000_000, 40_000_000):
        core = RouterCore()
        qos = TopicQos(deadline_ms=100)
        source = core.peer("a1", LANS["a1"])
        core.set_topic(1, "t", qos, {"b1": LANS["b1"]}, now_ns)
        born_ns = now_ns - age_ns + link_shift_ns
        message = Message(1, 7, 1, born_ns, b"payload")
        core.admit(source, body_of([message]), link_shift_ns, now_ns)
        due[age_ns] = core.peers["b1"].outbox.next_deadline_ns
        assert due[age_ns] is not None
        # The birth, on the origin's clock, counts in granules, the deadline in buckets, rounded down.
        granule = granule_ns(100_000_000)
        deadline = born_ns // granule * granule - link_shift_ns + 100_000_000
        assert due[age_ns] == deadline >> BUCKET_SHIFT << BUCKET_SHIFT
        assert 0 <= now_ns + 100_000_000 - age_ns - due[age_ns] < granule + BUCKET_NS
    assert due[40_000_000] < due[5_000_000] < due[0]


@pytest.mark.parametrize("deadline_ms", [100, 1_100])
@pytest.mark.parametrize("sixteenth", range(16))
def test_a_run_that_begins_with_an_older_message_of_another_publisher_overtakes_nothing(
    deadline_ms: float, sixteenth: int
) -> None:
    """All three were born in one granule, wherever the bounds of granules fall on our clock."""
    qos = TopicQos(deadline_ms=deadline_ms)
    granule = granule_ns(deadline_ns(qos))
    core = _core(qos, t1=["b1"], t2=["b1"])
    born_ns = 1_000 * granule
    shift_ns = -(sixteenth * granule) // 16
    first = Message(1, 9, 1, born_ns + granule * 90 // 100, b"")
    other = Message(2, 8, 1, born_ns + granule // 10, b"")
    second = Message(1, 9, 2, born_ns + granule * 95 // 100, b"")
    for messages in ([first], [other, second]):
        core.admit(core.peers["a1"], body_of(messages), shift_ns, born_ns + granule)
    assert [message.sequence for message in _take(core, "b1") if message.publisher == 9] == [1, 2]


def test_a_message_known_to_be_old_does_not_overtake_those_of_unknown_age_before_it() -> None:
    core = _core(t1=["b1"])
    now_ns = 10**12
    old = now_ns - 40 * MS
    for sequence, clock_shift_ns in ((1, UNKNOWN_CLOCK_SHIFT), (2, 0), (3, 0)):
        body = body_of([Message(1, 9, sequence, old, b"")], clock_shift_ns=clock_shift_ns)
        core.admit(core.peer("a1", "a"), body, 0, now_ns)
    assert [message.sequence for message in _take(core, "b1")] == [1, 2, 3]


def test_it_does_not_overtake_them_either_if_the_routes_are_made_anew_in_between() -> None:
    core = _core(t1=["b1"])
    now_ns = 10**12
    unknown = body_of([Message(1, 9, 1, now_ns, b"")], clock_shift_ns=UNKNOWN_CLOCK_SHIFT)
    core.admit(core.peer("a1", "a"), unknown, 0, now_ns)
    core.set_topic(1, "t1", QOS, {"b1": "b", "c1": "c"}, now_ns)
    core.admit(core.peer("a1", "a"), body_of([Message(1, 9, 2, now_ns - 40 * MS, b"")]), 0, now_ns)
    assert [message.sequence for message in _take(core, "b1")] == [1, 2]


@given(st.dictionaries(_topic_ids, _subscribers), _steps)
def test_every_interested_edge_of_another_lan_gets_exactly_its_messages_by_deadline_and_verbatim(
    topics: dict[int, frozenset[str]], steps: list[tuple[object, ...]]
) -> None:
    core = RouterCore()
    for edge, lan in LANS.items():
        core.peer(edge, lan)
    model = Model({}, {}, {edge: [] for edge in LANS}, {})
    sequence = 0
    taken = 0
    now_ns = 10**12

    def set_topic(topic_id: int, edges: frozenset[str]) -> None:
        served = {edge: LANS[edge] for edge in edges}
        core.set_topic(topic_id, f"t{topic_id}", _qos(topic_id), served, now_ns)
        model.set_topic(topic_id, edges, now_ns)

    for topic_id, edges in topics.items():
        set_topic(topic_id, edges)
    for step in steps:
        match step:
            case ("frame", str(source), tuple(header), list(contents)):
                messages = []
                for topic_id, age_ns, payload in contents:
                    sequence += 1
                    messages.append(Message(topic_id, 9, sequence, now_ns - age_ns, payload))
                    model.admit(source, header, messages[-1], now_ns)
                urgency, origin, clock_shift_ns = header
                body = body_of(messages, urgency=urgency, origin=origin, clock_shift_ns=clock_shift_ns)
                count, touched = core.admit(core.peers[source], body, 0, now_ns)
                assert count == len(messages)
                assert all(peer.outbox.has_waiting for peer in touched)
            case ("topic", int(topic_id), frozenset() as edges):
                set_topic(topic_id, edges)
            case ("remove topic", int(topic_id)):
                core.remove_topic(topic_id)
                model.subscribers.pop(topic_id, None)
            case ("time passes", int(passed_ns)):
                now_ns += passed_ns
            case ("take", str(edge)):
                got = _take_with_headers(core.peers[edge])
                taken += len(got)
                assert got == model.take(edge)
        core.validate()
    for edge, peer in core.peers.items():
        got = _take_with_headers(peer)
        taken += len(got)
        assert got == model.take(edge)
    statistics = core.statistics()
    assert statistics.messages_dispatched == taken
    assert statistics.messages_unrouted_waiting == sum(map(len, model.held.values()))
    assert not any(statistics.dropped.values())


def _take_with_headers(peer: Peer) -> list[tuple[Header, Message]]:
    outbox: Outbox = peer.outbox
    return [
        ((header.urgency, header.origin, header.clock_shift_ns), message)
        for body in bodies_of(outbox.take_frames(PLENTY, 0))
        for header in [decode_batch_header(body)]
        for message in decode_messages(body)
    ]
