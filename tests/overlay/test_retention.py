"""Retention of one publisher's messages, against a model of two lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import encode_message
from overlay.retention import Retention, Room, make_room

UNSENT_MAX = 6
_OPERATIONS = ("router up", "router down", "acknowledge", "forget", "forget sent", "nobody waits")
_operations = st.lists(
    st.sampled_from(["publish", "publish", "publish", *_OPERATIONS]),
    min_size=10,
    max_size=60,
)


def _message(sequence: int) -> bytes:
    return encode_message(1, 2, sequence, 0, b"x")


class Model:
    """A publisher's messages at its edge: sent ones first, then those that could not be sent."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sent: list[int] = []
        self.unsent: list[int] = []
        self.dropped: list[int] = []

    @property
    def kept(self) -> list[int]:
        return [*self.sent, *self.unsent]

    def trim(self) -> None:
        """The newest `capacity` messages are kept, and unsent ones beyond it, up to their own limit."""
        while len(self.unsent) > UNSENT_MAX:
            self.dropped.append(self.unsent.pop(0))
        surplus = len(self.kept) - max(self.capacity, len(self.unsent))
        if surplus > 0:
            del self.sent[:surplus]


@given(st.integers(0, UNSENT_MAX), _operations, st.data())
def test_retention_keeps_what_a_model_of_two_lists_keeps(
    capacity: int, operations: list[str], data: st.DataObject
) -> None:
    retention = Retention(capacity, UNSENT_MAX)
    model = Model(capacity)
    last = 0
    router = False
    unacknowledged: list[int] = []
    for operation in operations:
        if operation == "publish":
            last += 1
            if router:
                retention.keep_sent(_message(last))
                model.sent.append(last)
                unacknowledged.append(last)
            else:
                retention.keep_unsent(_message(last))
                model.unsent.append(last)
        elif operation == "router up" and not router:
            router = True
            assert retention.resend() == [_message(sequence) for sequence in model.kept]
            unacknowledged = model.kept
            model.sent, model.unsent = model.kept, []
        elif operation == "router down" and router:
            router = False
            retention.recall({sequence: _message(sequence) for sequence in unacknowledged})
            model.unsent = sorted({*model.sent, *unacknowledged})
            model.sent = []
        elif operation == "acknowledge":
            del unacknowledged[: data.draw(st.integers(0, len(unacknowledged)))]
        elif operation == "forget sent":
            retention.forget_sent()
            model.sent = []
        elif operation == "nobody waits":
            retention.count_as_sent()
            model.sent, model.unsent = model.kept, []
        elif operation == "forget":
            retention.forget()
            model.sent, model.unsent, unacknowledged = [], [], []
        model.trim()
        retention.validate()
        assert len(retention) == len(model.kept)
        assert retention.unsent == len(model.unsent)
        assert retention.dropped == len(model.dropped)
    assert retention.resend() == [_message(sequence) for sequence in model.kept]


@given(st.integers(1, UNSENT_MAX), st.integers(0, 20))
def test_sent_messages_are_kept_up_to_the_capacity(capacity: int, count: int) -> None:
    retention = Retention(capacity, UNSENT_MAX)
    for sequence in range(1, count + 1):
        retention.keep_sent(_message(sequence))
    assert retention.resend() == [_message(s) for s in range(max(1, count - capacity + 1), count + 1)]
    assert retention.dropped == 0


def test_unsent_messages_are_kept_beyond_the_capacity_and_the_oldest_fall_off_counted() -> None:
    retention = Retention(2, UNSENT_MAX)
    for sequence in range(1, UNSENT_MAX + 4):
        retention.keep_unsent(_message(sequence))
    assert (retention.unsent, retention.dropped) == (UNSENT_MAX, 3)
    assert retention.resend() == [_message(sequence) for sequence in range(4, UNSENT_MAX + 4)]
    assert (retention.unsent, len(retention)) == (0, 2)


def test_a_newer_message_cannot_overtake_unsent_ones() -> None:
    retention = Retention(2, UNSENT_MAX)
    retention.keep_unsent(_message(1))
    with pytest.raises(AssertionError, match="unsent messages must go out before newer ones"):
        retention.keep_sent(_message(2))


def test_recalled_messages_are_merged_in_order_without_doubles() -> None:
    retention = Retention(2, UNSENT_MAX)
    for sequence in range(1, 6):
        retention.keep_sent(_message(sequence))
    retention.recall({sequence: _message(sequence) for sequence in (2, 4, 5)})
    assert retention.unsent == 3
    assert retention.resend() == [_message(sequence) for sequence in (2, 4, 5)]


def test_what_was_acknowledged_and_is_still_retained_is_sent_again_too() -> None:
    retention = Retention(3)
    for sequence in range(1, 6):
        retention.keep_sent(_message(sequence))
    retention.recall({5: _message(5)})
    assert retention.resend() == [_message(sequence) for sequence in (3, 4, 5)]


@given(st.integers(0, UNSENT_MAX), st.integers(0, UNSENT_MAX), st.integers(0, 10), st.integers(0, 5))
def test_a_new_size_counts_at_once_but_never_for_what_was_not_sent(
    before: int, after: int, sent: int, unsent: int
) -> None:
    retention = Retention(before)
    for sequence in range(1, sent + 1):
        retention.keep_sent(_message(sequence))
    for sequence in range(sent + 1, sent + unsent + 1):
        retention.keep_unsent(_message(sequence))
    kept = len(retention)
    retention.resize(after)
    retention.validate()
    assert retention.unsent == unsent
    assert len(retention) == min(kept, max(after, unsent))
    retention.resend()
    for sequence in range(sent + unsent + 1, sent + unsent + 1 + UNSENT_MAX):
        retention.keep_sent(_message(sequence))
    assert len(retention) == after


@given(st.integers(1, 8), st.integers(0, 20), st.none() | st.integers(0, 25))
def test_a_subscriber_resumes_with_what_is_kept_beyond_its_position(
    capacity: int, published: int, position: int | None
) -> None:
    retention = Retention(capacity)
    for sequence in range(1, published + 1):
        retention.keep_sent(_message(sequence))
    kept = list(range(max(1, published - capacity + 1), published + 1))
    if position is None:  # never heard: all or nothing
        expected = kept if kept[:1] == [1] else []
    else:
        expected = [sequence for sequence in kept if sequence > position]
    assert retention.after(position) == [_message(sequence) for sequence in expected]
    assert len(retention) == len(kept)


def test_room_is_counted_however_messages_come_and_go() -> None:
    room = Room(10**9)
    one, other = Retention(2, UNSENT_MAX, room), Retention(3, UNSENT_MAX, room)

    def check() -> None:
        one.validate()
        other.validate()
        assert room.used_bytes == one.kept_bytes + other.kept_bytes

    for sequence in range(1, 6):
        one.keep_sent(_message(sequence))
        other.keep_unsent(_message(sequence))
        check()
    one.recall({sequence: _message(sequence) for sequence in range(1, 12)})
    check()
    assert one.dropped
    other.resend()
    other.resize(1)
    other.forget_sent()
    check()
    one.forget()
    check()
    assert room.used_bytes == 0


def test_who_keeps_most_makes_room_with_its_oldest() -> None:
    room = Room(20_000)
    small, large = Retention(10, room=room), Retention(10, room=room)
    for sequence in range(1, 11):
        small.keep_unsent(_message(sequence))
        large.keep_unsent(encode_message(1, 3, sequence, 0, bytes(3_000)))
    make_room(room, [small, large])
    small.validate()
    large.validate()
    assert room.used_bytes <= 20_000 * 15 // 16
    assert (len(small), small.dropped) == (10, 0)
    assert len(large) == large.unsent == 10 - large.dropped
    assert large.messages[-1] == encode_message(1, 3, 10, 0, bytes(3_000)), "the newest stay"
    large.keep_unsent(_message(11))
    assert large.resend()[-1] == _message(11)


def test_what_was_sent_makes_room_before_what_was_not() -> None:
    room = Room(1)
    retention = Retention(4, room=room)
    for sequence in (1, 2):
        retention.keep_sent(_message(sequence))
    for sequence in (3, 4):
        retention.keep_unsent(_message(sequence))
    retention.make_room(1)
    assert (len(retention), retention.unsent, retention.dropped) == (3, 2, 0)
    make_room(room, [retention])
    assert (len(retention), retention.unsent, retention.dropped) == (0, 0, 2)
    assert room.used_bytes == 0
