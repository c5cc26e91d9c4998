"""The outbox: which runs share a frame and in which order they leave, the window, overload, statistics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import (
    FRAME_OVERHEAD_BYTES,
    MESSAGE_HEADER_BYTES,
    decode_batch_header,
)
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import FRAME_TARGET_BYTES, RUN_OVERHEAD_BYTES
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from overlay.outbox import (
    OVERLOADED_AFTER_NS,
    PROMPT_NS,
    SLOW_NS,
    WINDOW_FIRST_BYTES,
    WINDOW_LEAST_BYTES,
    WINDOW_MOST_BYTES,
    Outbox,
    Ticket,
)
from tests.overlay.outboxes import (
    HEADER,
    MS,
    NOW,
    PLENTY,
    Header,
    Numbered,
    headers,
    numbers_of,
    sizes_of_messages,
)
from tests.wires import bodies_of

# Frames and order


@given(st.lists(st.tuples(headers, sizes_of_messages), max_size=12))
def test_runs_share_a_frame_only_up_to_the_target_size(appends: list[tuple[Header, list[int]]]) -> None:
    outbox = Outbox()
    numbered = Numbered()
    largest = 0
    for header, sizes in appends:
        run = numbered.run(header, sizes)
        largest = max(largest, len(run.data))
        outbox.append(0, *header, run, NOW)
    while outbox.has_waiting:
        for data in outbox.take_frames(PLENTY, NOW):
            assert len(data) <= max(FRAME_TARGET_BYTES, FRAME_OVERHEAD_BYTES + largest)
        outbox.acknowledge(outbox.statistics().frames_sent)


def test_runs_under_one_header_leave_as_one_frame() -> None:
    outbox = Outbox()
    numbered = Numbered()
    for header in [(0, 7, 0), (0, 7, 0), (1, 7, 0), (0, 7, 0), (0, 7, -1), (0, 8, -1)]:
        outbox.append(0, *header, numbered.run(header, [1]), NOW)
    frames = bodies_of(outbox.take_frames(PLENTY, NOW))
    assert [numbers_of(body) for body in frames] == [[1, 2], [3], [4], [5], [6]]


def test_a_run_with_an_earlier_deadline_leaves_first_among_those_that_wait() -> None:
    outbox = Outbox()
    numbered = Numbered()
    for deadline_ms in (500, 100, 500, 50, 100):
        outbox.append(NOW + deadline_ms * MS, *HEADER, numbered.run(HEADER, [1]), NOW)
    assert outbox.next_deadline_ns is not None
    assert NOW + 49 * MS < outbox.next_deadline_ns <= NOW + 50 * MS
    frames = bodies_of(outbox.take_frames(PLENTY, NOW))
    assert [numbers_of(body) for body in frames] == [[4, 2, 5, 1, 3]]
    outbox.append(NOW, *HEADER, numbered.run(HEADER, [1]), NOW)
    frames = bodies_of(outbox.take_frames(PLENTY, NOW))
    assert [numbers_of(body) for body in frames] == [[6]], "what has left is not overtaken"
    assert outbox.next_deadline_ns is None


def _numbers_by_deadline(appends: list[tuple[int, int, int]], relative_ns: int) -> list[int]:
    """Append messages of (origin, clock shift, born on the origin's clock), as hops do; take them all."""
    outbox = Outbox()
    numbered = Numbered()
    for origin, clock_shift_ns, born_ns in appends:
        run = numbered.run((0, origin, clock_shift_ns), [1])
        outbox.append(born_ns - clock_shift_ns + relative_ns, 0, origin, clock_shift_ns, run, NOW)
    return [number for body in bodies_of(outbox.take_frames(PLENTY, NOW)) for number in numbers_of(body)]


@given(
    st.lists(
        st.tuples(st.integers(7, 8), st.integers(-50 * MS, 50 * MS), st.integers(0, 3 * MS)), max_size=20
    )
)
def test_what_is_learnt_of_a_clock_does_not_change_the_order_of_what_it_stamped(
    appends: list[tuple[int, int, int]],
) -> None:
    """Clock shifts grow with the drift and fall with every better helper; births only rise."""
    now_ns = NOW
    rising = []
    for origin, clock_shift_ns, pause_ns in appends:
        now_ns += pause_ns
        rising.append((origin, clock_shift_ns, now_ns))
    order = _numbers_by_deadline(rising, 100 * MS)
    for origin in (7, 8):
        numbers = [number for number in order if rising[number - 1][0] == origin]
        assert numbers == sorted(numbers)


def test_a_clock_shift_counts_in_full_again_when_nothing_waits() -> None:
    outbox = Outbox()
    numbered = Numbered()
    outbox.append(NOW + 100 * MS, 0, 7, 0, numbered.run((0, 7, 0), [1]), NOW)
    outbox.take_frames(PLENTY, NOW)
    outbox.append(NOW + 50 * MS, 0, 8, 0, numbered.run((0, 8, 0), [1]), NOW)
    outbox.take_frames(PLENTY, NOW)
    outbox.append(NOW + 50 * MS, 0, 8, 0, numbered.run((0, 8, 0), [1]), NOW)
    outbox.append(NOW + 40 * MS, 0, 7, 60 * MS, numbered.run((0, 7, 60 * MS), [1]), NOW)
    frames = bodies_of(outbox.take_frames(PLENTY, NOW))
    assert [decode_batch_header(body).origin for body in frames] == [7, 8]


def test_first_come_first_served_stays_so_whatever_the_clocks() -> None:
    outbox = Outbox()
    numbered = Numbered()
    for clock_shift_ns in (0, 50 * MS, UNKNOWN_CLOCK_SHIFT, -50 * MS):
        run = numbered.run((0, 7, clock_shift_ns), [1])
        outbox.append(0, 0, 7, clock_shift_ns, run, NOW)
    frames = bodies_of(outbox.take_frames(PLENTY, NOW))
    assert [number for body in frames for number in numbers_of(body)] == [1, 2, 3, 4]


def test_a_budget_is_passed_by_one_frame_at_most() -> None:
    outbox = Outbox()
    numbered = Numbered()
    for urgency in (0, 1, 0, 1):
        outbox.append(0, urgency, 7, 0, numbered.run((urgency, 7, 0), [1000]), NOW)
    assert len(outbox.take_frames(1500, NOW)) == 2
    assert outbox.take_frames(0, NOW) == []
    assert outbox.has_waiting


def test_a_cancelled_run_does_not_leave_and_makes_no_empty_frame() -> None:
    outbox = Outbox()
    numbered = Numbered()
    tickets = [Ticket() for _ in range(4)]
    for ticket in tickets:
        outbox.append(0, *HEADER, numbered.run(HEADER, [1]), NOW, ticket)
    tickets[0].cancelled = tickets[2].cancelled = True
    assert [numbers_of(body) for body in bodies_of(outbox.take_frames(PLENTY, NOW))] == [[2, 4]]
    assert outbox.acknowledge(1) == [tickets[1], tickets[3]]
    outbox.append(0, *HEADER, numbered.run(HEADER, [1]), NOW, tickets[0])
    assert outbox.take_frames(PLENTY, NOW) == []
    assert outbox.is_idle
    outbox.validate()


def test_whoever_asks_hears_of_every_frame_with_its_number_and_tickets() -> None:
    outbox = Outbox()
    heard: list[tuple[int, list[Ticket]]] = []
    outbox.on_sent = lambda number, tickets: heard.append((number, list(tickets)))
    numbered = Numbered()
    tickets = [Ticket() for _ in range(3)]
    for urgency, ticket in zip((0, 0, 1), tickets, strict=True):
        outbox.append(0, urgency, 7, 0, numbered.run((urgency, 7, 0), [1]), NOW, ticket)
    outbox.append(0, 2, 7, 0, numbered.run((2, 7, 0), [1]), NOW)
    outbox.take_frames(PLENTY, NOW)
    assert heard == [(1, tickets[:2]), (2, tickets[2:]), (3, [])]


# The window


def _window_bytes(outbox: Outbox, now_ns: int) -> int:
    """How much an outbox with plenty to send and nothing on its way hands over at once."""
    numbered = Numbered()
    while outbox.statistics().waiting_bytes < 2 * WINDOW_MOST_BYTES:
        outbox.append(0, *HEADER, numbered.run(HEADER, [1000] * 8), now_ns)
    assert outbox.statistics().unacknowledged_bytes == 0
    taken = sum(map(len, outbox.take_frames(PLENTY, now_ns)))
    assert not outbox.has_room
    assert outbox.take_frames(PLENTY, now_ns) == []
    return taken


def _acknowledge_all(outbox: Outbox, now_ns: int, round_trip_ns: int = 0) -> None:
    outbox.acknowledge(outbox.statistics().frames_sent, now_ns, round_trip_ns)
    assert outbox.has_room


def _is_about(taken_bytes: int, window_bytes: int) -> bool:
    """The window, passed by less than one frame."""
    return window_bytes <= taken_bytes < window_bytes + min(FRAME_TARGET_BYTES, max(window_bytes // 2, 8300))


def test_no_more_than_the_window_is_on_its_way() -> None:
    outbox = Outbox()
    assert _is_about(_window_bytes(outbox, NOW), WINDOW_FIRST_BYTES)
    unacknowledged = outbox.statistics().unacknowledged_bytes
    outbox.acknowledge(1)
    assert outbox.has_room
    outbox.take_frames(PLENTY, NOW)
    assert outbox.statistics().unacknowledged_bytes <= unacknowledged + FRAME_TARGET_BYTES
    assert not outbox.has_room


@pytest.mark.parametrize("round_trip_ns", [0, 80 * MS])
def test_the_window_shrinks_while_acknowledgements_are_slow_and_grows_while_they_are_prompt(
    round_trip_ns: int,
) -> None:
    outbox = Outbox()
    now_ns = NOW
    expected = WINDOW_FIRST_BYTES
    for _ in range(6):
        assert _is_about(_window_bytes(outbox, now_ns), expected)
        now_ns += round_trip_ns + SLOW_NS + 1
        _acknowledge_all(outbox, now_ns, round_trip_ns)
        expected = max(expected // 2, WINDOW_LEAST_BYTES)
    assert expected == WINDOW_LEAST_BYTES
    for _ in range(12):
        assert _is_about(_window_bytes(outbox, now_ns), expected)
        now_ns += round_trip_ns + PROMPT_NS - 1
        _acknowledge_all(outbox, now_ns, round_trip_ns)
        expected = min(2 * expected, WINDOW_MOST_BYTES)
    assert expected == WINDOW_MOST_BYTES
    assert _is_about(_window_bytes(outbox, now_ns), WINDOW_MOST_BYTES)


def test_between_prompt_and_slow_and_without_a_clock_the_window_stays() -> None:
    outbox = Outbox()
    _window_bytes(outbox, NOW)
    _acknowledge_all(outbox, NOW + (PROMPT_NS + SLOW_NS) // 2)
    assert _is_about(_window_bytes(outbox, NOW), WINDOW_FIRST_BYTES)
    outbox.acknowledge(outbox.statistics().frames_sent)
    assert _is_about(_window_bytes(outbox, NOW), WINDOW_FIRST_BYTES)


def test_prompt_acknowledgements_of_little_do_not_grow_the_window() -> None:
    """A window nobody fills says nothing about how much the peer could take."""
    outbox = Outbox()
    numbered = Numbered()
    for _ in range(20):
        outbox.append(0, *HEADER, numbered.run(HEADER, [1000]), NOW)
        outbox.take_frames(PLENTY, NOW)
        _acknowledge_all(outbox, NOW + 1)
    assert _is_about(_window_bytes(outbox, NOW), WINDOW_FIRST_BYTES)


def test_a_message_larger_than_the_window_leaves_when_nothing_else_is_on_its_way() -> None:
    outbox = Outbox()
    numbered = Numbered()
    for _ in range(2):
        outbox.append(0, *HEADER, numbered.run(HEADER, [4 * WINDOW_FIRST_BYTES]), NOW)
    for number in (1, 2):
        assert [numbers_of(body) for body in bodies_of(outbox.take_frames(PLENTY, NOW))] == [[number]]
        assert outbox.take_frames(PLENTY, NOW) == []
        outbox.acknowledge(number)
    assert outbox.is_idle


# Overload


def test_an_outbox_that_has_not_run_empty_for_a_while_is_overloaded() -> None:
    outbox = Outbox()
    numbered = Numbered()
    outbox.take_frames(PLENTY, NOW)
    assert not outbox.is_overloaded(NOW)
    outbox.append(0, 0, 7, 0, numbered.run((0, 7, 0), [1]), NOW)
    outbox.append(0, 1, 7, 0, numbered.run((1, 7, 0), [1]), NOW + 10 * MS)
    assert not outbox.is_overloaded(NOW + OVERLOADED_AFTER_NS)
    assert outbox.is_overloaded(NOW + OVERLOADED_AFTER_NS + 1)
    outbox.take_frames(1, NOW + OVERLOADED_AFTER_NS + 1)
    assert outbox.is_overloaded(NOW + OVERLOADED_AFTER_NS + 1), "something still waits"
    outbox.take_frames(1, NOW + OVERLOADED_AFTER_NS + 1)
    assert not outbox.is_overloaded(NOW + OVERLOADED_AFTER_NS + 1), "what is on its way does not count"
    outbox.append(0, *HEADER, numbered.run(HEADER, [1]), NOW + 30 * MS)
    assert not outbox.is_overloaded(NOW + 30 * MS + OVERLOADED_AFTER_NS)


def test_what_waits_for_a_peer_that_is_away_is_no_overload() -> None:
    """That is the business of retention and recovery; shedding would only lose messages for nobody."""
    outbox = Outbox()
    numbered = Numbered()
    outbox.append(0, *HEADER, numbered.run(HEADER, [1]), NOW)
    later_ns = NOW + 10 * OVERLOADED_AFTER_NS
    assert not outbox.is_overloaded(later_ns), "it has never been connected"
    outbox.append(0, 1, 7, 0, numbered.run((1, 7, 0), [1]), later_ns)
    outbox.take_frames(1, later_ns)
    assert not outbox.is_overloaded(later_ns + OVERLOADED_AFTER_NS), "it has only just connected"
    assert outbox.is_overloaded(later_ns + OVERLOADED_AFTER_NS + 1)
    outbox.disconnected()
    assert not outbox.is_overloaded(later_ns + OVERLOADED_AFTER_NS + 1)


# Acknowledgements, statistics, the end


def test_a_peer_cannot_acknowledge_what_was_never_sent() -> None:
    outbox = Outbox()
    outbox.append(0, *HEADER, Numbered().run(HEADER, [1]), NOW)
    with pytest.raises(ProtocolError, match="acknowledges 1 frames, 0 were sent") as caught:
        outbox.acknowledge(1)
    assert caught.value.reason is CloseReason.BAD_MESSAGE
    outbox.take_frames(PLENTY, NOW)
    with pytest.raises(ProtocolError, match="acknowledges 2 frames, 1 were sent"):
        outbox.resume(2)
    outbox.validate()
    assert not outbox.is_idle


def test_statistics_tell_what_was_sent_sent_again_and_waits() -> None:
    outbox = Outbox()
    numbered = Numbered()
    outbox.append(0, *HEADER, numbered.run(HEADER, [10, 20]), NOW)
    (data,) = outbox.take_frames(PLENTY, NOW)
    outbox.append(0, *HEADER, numbered.run(HEADER, [30]), NOW)
    assert outbox.resume(0) == ([data], [])
    statistics = outbox.statistics()
    assert (statistics.messages_sent, statistics.frames_sent, statistics.bytes_sent) == (2, 1, len(data))
    assert (statistics.frames_resent, statistics.unacknowledged_bytes) == (1, len(data))
    assert (statistics.waiting_messages, statistics.waiting_bytes) == (1, MESSAGE_HEADER_BYTES + 30)
    assert outbox.load_bytes == len(data) + MESSAGE_HEADER_BYTES + 30 + RUN_OVERHEAD_BYTES


def test_discarding_counts_what_waited_and_leaves_nothing() -> None:
    outbox = Outbox()
    numbered = Numbered()
    sent, waiting = Ticket(), Ticket()
    outbox.append(0, *HEADER, numbered.run(HEADER, [1]), NOW, sent)
    outbox.take_frames(PLENTY, NOW)
    outbox.append(0, *HEADER, numbered.run(HEADER, [1, 1]), NOW, waiting)
    assert outbox.discard() == (2, [sent, waiting])
    assert outbox.discard() == (0, [])
    outbox.validate()
    assert outbox.is_idle
    assert outbox.statistics().messages_dropped == 2
