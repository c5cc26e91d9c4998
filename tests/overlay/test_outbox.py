"""The outbox: whatever happens to connections, the peer gets everything once, by deadline and in order.

Exactly once and, among equal deadlines, in the order of the appends; a run with an earlier deadline
leaves first among those that wait. The window limits what is on its way, and every ticket comes back
exactly once.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from overlay.batch import (
    FRAME_OVERHEAD_BYTES,
    MESSAGE_HEADER_BYTES,
    Run,
    decode_batch_header,
    decode_messages,
    encode_message,
)
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import FRAME_TARGET_BYTES, MILLISECOND_NS
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
from overlay.schedule import BUCKET_SHIFT
from tests.wires import Wire, bodies_of

Header = tuple[int, int, int]
HEADER: Header = (0, 7, 0)
NOW = 10**12
MS = MILLISECOND_NS
PLENTY = 2**40

_headers = st.tuples(st.integers(0, 1), st.integers(7, 8), st.sampled_from([0, -5]))
_sizes = st.lists(st.sampled_from([0, 1, 100, 20_000, FRAME_TARGET_BYTES]), min_size=1, max_size=3)
_deadlines = st.integers(0, 3).map(lambda bucket: bucket << BUCKET_SHIFT)


@dataclass
class Numbered:
    """Makes runs whose messages are numbered on and carry their batch header, to be checked at the end."""

    last: int = 0

    def run(self, header: Header, sizes: list[int]) -> Run:
        data = b""
        for size in sizes:
            self.last += 1
            urgency, origin, clock_shift_ns = header
            data += encode_message(urgency, origin, self.last, clock_shift_ns % 2**64, bytes(size))
        return Run(len(sizes), data)


def _numbers(body: bytes) -> list[int]:
    """The numbers of the messages in a frame, which must all belong under its header."""
    header = decode_batch_header(body)
    numbers = []
    for message in decode_messages(body):
        carried = (message.topic_id, message.publisher, message.born_ns)
        assert carried == (header.urgency, header.origin, header.clock_shift_ns % 2**64)
        numbers.append(message.sequence)
    return numbers


class Waiting(NamedTuple):
    """A run in the model of what waits."""

    deadline_ns: int
    numbers: list[int]
    ticket: Ticket | None
    data_bytes: int

    @property
    def is_cancelled(self) -> bool:
        return self.ticket is not None and self.ticket.cancelled


@dataclass
class Queue:
    """The model of what waits: a plain list that is sorted again and again."""

    runs: list[Waiting] = field(default_factory=list)

    def push(self, run: Waiting) -> None:
        self.runs.append(run)
        self.runs.sort(key=lambda each: each.deadline_ns)  # stable: ties stay in order

    def pop_sent(self, numbers: list[int], waiting_messages: int) -> list[Waiting]:
        """These numbers have left and that many still wait; returns the runs that are gone.

        Whole runs leave from the front. A cancelled one vanishes when it is met, at the latest
        when something behind it leaves.
        """
        gone = []
        left = list(numbers)
        while left or self.messages() > waiting_messages:
            first = self.runs.pop(0)
            gone.append(first)
            if not first.is_cancelled:
                assert left[: len(first.numbers)] == first.numbers
                del left[: len(first.numbers)]
        return gone

    def messages(self) -> int:
        return sum(len(run.numbers) for run in self.runs)

    def numbers(self) -> list[int]:
        return [number for run in self.runs if not run.is_cancelled for number in run.numbers]


class OutboxMachine(RuleBasedStateMachine):
    """An outbox, a connection that may break at any time, and a receiver that counts frames."""

    def __init__(self) -> None:
        super().__init__()
        self.numbered = Numbered()
        self.outbox = Outbox()
        self.now_ns = NOW
        self.waiting = Queue()
        # What has been sent to this receiver, in the order it left; what it got is the beginning of it.
        self.sent: list[int] = []
        self.got: list[int] = []
        # Messages the receiver had after each frame it counted; index 0 is before the first.
        self.after_frame = [0]
        self.acknowledged_messages = 0
        self.ticket_of: dict[int, Ticket] = {}
        """Tickets of runs that have left, by the number of their first message."""
        self.returned: list[Ticket] = []
        self.tickets: set[Ticket] = set()
        """All tickets there ever were, but for those that a withdrawal took out."""

    @initialize()
    def connect(self) -> None:
        self.wire = Wire(
            self.outbox, self._receive, clock=lambda: self.now_ns, on_acknowledged=self.returned.extend
        )

    def _receive(self, body: bytes) -> None:
        self.got += _numbers(body)
        self.after_frame.append(len(self.got))

    @rule(header=_headers, sizes=_sizes, deadline_ns=_deadlines, follow=st.booleans())
    def append(self, header: Header, sizes: list[int], deadline_ns: int, follow: bool) -> None:
        first = self.numbered.last + 1
        run = self.numbered.run(header, sizes)
        ticket = Ticket() if follow else None
        if ticket is not None:
            self.tickets.add(ticket)
        assert self.outbox.append(deadline_ns, *header, run, self.now_ns, ticket) == 0
        numbers = list(range(first, self.numbered.last + 1))
        self.waiting.push(Waiting(deadline_ns, numbers, ticket, len(run.data)))

    @rule(data=st.data())
    def cancel_something_that_waits(self, data: st.DataObject) -> None:
        tickets = [run.ticket for run in self.waiting.runs if run.ticket is not None]
        if tickets:
            data.draw(st.sampled_from(tickets)).cancelled = True

    @rule(budget_bytes=st.sampled_from([1, 30_000, PLENTY]))
    def send(self, budget_bytes: int) -> None:
        had_room = self.outbox.has_room
        bodies = self.wire.send(budget_bytes)
        assert had_room or not bodies, "the window was full"
        self._left(bodies)

    def _left(self, bodies: list[bytes]) -> None:
        numbers = [number for body in bodies for number in _numbers(body)]
        self.sent += numbers
        for run in self.waiting.pop_sent(numbers, self.outbox.statistics().waiting_messages):
            if run.ticket is not None and run.is_cancelled:
                self.tickets.discard(run.ticket)  # it has gone silently
            elif run.ticket is not None:
                self.ticket_of[run.numbers[0]] = run.ticket

    @rule(most=st.integers(1, 4))
    def arrive(self, most: int) -> None:
        self.wire.arrive(most)

    @rule(passed_ns=st.sampled_from([1, 5 * MS, 50 * MS]))
    def time_passes(self, passed_ns: int) -> None:
        self.now_ns += passed_ns

    @precondition(lambda self: self.wire.is_up)
    @rule(behind=st.integers(0, 3), round_trip_ns=st.sampled_from([0, 10 * MS]))
    def acknowledge(self, behind: int, round_trip_ns: int) -> None:
        count = max(0, self.wire.received - behind)  # heartbeats tell of the past
        tickets = self.outbox.acknowledge(count, self.now_ns, round_trip_ns)
        assert tickets == self._tickets_up_to(self.after_frame[count])
        self.returned += tickets

    def _tickets_up_to(self, messages: int) -> list[Ticket]:
        """The tickets an acknowledgement of so many messages must return."""
        first, self.acknowledged_messages = (
            self.acknowledged_messages,
            max(self.acknowledged_messages, messages),
        )
        newly = self.sent[first : self.acknowledged_messages]
        return [self.ticket_of[number] for number in newly if number in self.ticket_of]

    @rule()
    def lose_connection(self) -> None:
        self.wire.cut()

    @rule()
    def connect_again(self) -> None:
        self.wire.cut()
        returned = len(self.returned)
        self.wire.reconnect()
        assert self.returned[returned:] == self._tickets_up_to(self.after_frame[self.wire.received])

    @rule()
    def peer_restarts(self) -> None:
        self.wire.cut()
        self._receiver_begins_anew()
        self.wire.reconnect_to_another(self._receive)

    @rule()
    def peer_forgets_the_link(self) -> None:
        """The same process, but it has dropped what it knew of us: it counts from zero again."""
        self.wire.cut()
        self._receiver_begins_anew()
        self.wire.received = 0
        self.wire.reconnect()

    @rule()
    def we_forget_the_link(self) -> None:
        """We start a fresh outbox; the peer goes on counting where it was."""
        self.wire.cut()
        dropped, tickets = self.outbox.discard()
        assert dropped == self.waiting.messages()
        unacknowledged = self._tickets_up_to(len(self.sent))
        assert tickets == unacknowledged + [run.ticket for run in self.waiting.runs if run.ticket is not None]
        assert self.outbox.is_idle
        self.returned += tickets
        self.waiting = Queue()
        self.outbox = Outbox()
        self.sent = list(self.got)
        self.acknowledged_messages = len(self.got)
        assert self.outbox.restart(self.wire.received) == []
        self.wire.outbox = self.outbox
        self.wire.is_up = True

    @rule()
    def withdraw_after_losing_the_connection(self) -> None:
        """Everything unacknowledged is taken back, and here: appended again at the end."""
        self.wire.cut()
        bodies = self.outbox.withdraw()
        taken = [number for body in bodies for number in _numbers(body)]
        assert taken == self.sent[self.acknowledged_messages :] + self.waiting.numbers()
        self.tickets -= {run.ticket for run in self.waiting.runs if run.ticket is not None}
        self.tickets -= set(self._tickets_up_to(len(self.sent)))
        self.waiting = Queue()
        self.sent = list(self.got)
        self.ticket_of = {}
        for body in bodies:
            header = decode_batch_header(body)
            run = Run(header.messages, body[-_payload_bytes(body) :])
            self.outbox.append(0, header.urgency, header.origin, header.clock_shift_ns, run, self.now_ns)
            self.waiting.push(Waiting(0, _numbers(body), None, len(run.data)))
        self.wire.reconnect()
        self.acknowledged_messages = len(self.got)

    @invariant()
    def receiver_has_the_beginning_of_what_was_sent(self) -> None:
        assert self.got == self.sent[: len(self.got)]

    @invariant()
    def outbox_is_sound(self) -> None:
        self.outbox.validate()
        statistics = self.outbox.statistics()
        assert statistics.messages_dropped == 0
        assert statistics.waiting_messages == self.waiting.messages()
        assert statistics.waiting_bytes == sum(run.data_bytes for run in self.waiting.runs)
        assert statistics.unacknowledged_bytes < WINDOW_MOST_BYTES + 4 * FRAME_TARGET_BYTES
        first = self.waiting.runs[0].deadline_ns if self.waiting.runs else None
        assert self.outbox.next_deadline_ns == first

    @invariant()
    def no_ticket_comes_back_twice(self) -> None:
        assert len(set(self.returned)) == len(self.returned)
        assert self.outbox.take_lost_tickets() == []

    def teardown(self) -> None:
        if hasattr(self, "wire"):
            self.wire.cut()
            self.wire.reconnect()
            while self.wire.in_flight or self.outbox.has_waiting:
                self.wire.arrive()
                self.wire.acknowledge()
                self._left(self.wire.send())
            self.wire.acknowledge()
            assert self.got == self.sent
            assert self.waiting.numbers() == []
            assert self.outbox.is_idle
            assert self.outbox.load_bytes == 0
            assert set(self.returned) == self.tickets

    def _receiver_begins_anew(self) -> None:
        self.sent = self.sent[self.acknowledged_messages :]
        self.got = []
        self.after_frame = [0]
        self.acknowledged_messages = 0


def _payload_bytes(body: bytes) -> int:
    return sum(MESSAGE_HEADER_BYTES + len(message.payload) for message in decode_messages(body))


TestOutboxMachine = OutboxMachine.TestCase


# Capacity


@given(
    st.lists(st.tuples(_headers, _sizes, _deadlines, st.booleans()), max_size=12),
    st.integers(100, 150_000),
    st.data(),
)
def test_beyond_capacity_what_is_due_first_falls_off_and_is_counted(
    appends: list[tuple[Header, list[int], int, bool]], capacity_bytes: int, data: st.DataObject
) -> None:
    outbox = Outbox(capacity_bytes)
    numbered = Numbered()
    waiting = Queue()
    sent_messages = dropped = 0
    lost: list[Ticket] = []
    for header, sizes, deadline_ns, cancelled in appends:
        if waiting.runs and data.draw(st.booleans()):
            numbers = [
                number for body in bodies_of(outbox.take_frames(PLENTY, NOW)) for number in _numbers(body)
            ]
            sent_messages += len(numbers)
            waiting.pop_sent(numbers, outbox.statistics().waiting_messages)
        first = numbered.last + 1
        run = numbered.run(header, sizes)
        ticket = Ticket()
        numbers = list(range(first, numbered.last + 1))
        waiting.push(Waiting(deadline_ns, numbers, ticket, len(run.data)))
        load_bytes = outbox.statistics().unacknowledged_bytes
        over = 0
        while waiting.runs and load_bytes + sum(other.data_bytes for other in waiting.runs) > capacity_bytes:
            gone = waiting.runs.pop(0)
            assert gone.ticket is not None
            if not gone.is_cancelled:
                lost.append(gone.ticket)
                over += len(gone.numbers)
        assert outbox.append(deadline_ns, *header, run, NOW, ticket) == over
        dropped += over
        outbox.validate()
        statistics = outbox.statistics()
        assert statistics.messages_dropped == dropped
        assert statistics.waiting_messages == waiting.messages()
        assert statistics.messages_sent == sent_messages
        if data.draw(st.booleans()):
            assert outbox.take_lost_tickets() == lost
            lost = []
        ticket.cancelled = cancelled
    assert outbox.take_lost_tickets() == lost
    assert outbox.take_lost_tickets() == []
    kept: list[int] = []
    wire = Wire(outbox, lambda body: kept.extend(_numbers(body)))
    wire.received = outbox.statistics().frames_sent
    wire.run()
    assert kept == waiting.numbers()


def test_a_run_too_large_for_the_capacity_is_dropped_and_its_ticket_is_lost() -> None:
    outbox = Outbox(capacity_bytes=1000)
    numbered = Numbered()
    first, second = Ticket(), Ticket()
    assert outbox.append(0, *HEADER, numbered.run(HEADER, [10]), NOW, first) == 0
    assert outbox.append(1 << BUCKET_SHIFT, *HEADER, numbered.run(HEADER, [990, 1]), NOW, second) == 3
    assert outbox.take_lost_tickets() == [first, second]
    assert outbox.is_idle
    outbox.validate()


# Frames and order


@given(st.lists(st.tuples(_headers, _sizes), max_size=12))
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
    assert [_numbers(body) for body in frames] == [[1, 2], [3], [4], [5], [6]]


def test_a_run_with_an_earlier_deadline_leaves_first_among_those_that_wait() -> None:
    outbox = Outbox()
    numbered = Numbered()
    for deadline_ms in (500, 100, 500, 50, 100):
        outbox.append(NOW + deadline_ms * MS, *HEADER, numbered.run(HEADER, [1]), NOW)
    assert outbox.next_deadline_ns is not None
    assert NOW + 49 * MS < outbox.next_deadline_ns <= NOW + 50 * MS
    frames = bodies_of(outbox.take_frames(PLENTY, NOW))
    assert [_numbers(body) for body in frames] == [[4, 2, 5, 1, 3]]
    outbox.append(NOW, *HEADER, numbered.run(HEADER, [1]), NOW)
    frames = bodies_of(outbox.take_frames(PLENTY, NOW))
    assert [_numbers(body) for body in frames] == [[6]], "what has left is not overtaken"
    assert outbox.next_deadline_ns is None


def _numbers_by_deadline(appends: list[tuple[int, int, int]], relative_ns: int) -> list[int]:
    """Append messages of (origin, clock shift, born on the origin's clock), as hops do; take them all."""
    outbox = Outbox()
    numbered = Numbered()
    for origin, clock_shift_ns, born_ns in appends:
        run = numbered.run((0, origin, clock_shift_ns), [1])
        outbox.append(born_ns - clock_shift_ns + relative_ns, 0, origin, clock_shift_ns, run, NOW)
    return [number for body in bodies_of(outbox.take_frames(PLENTY, NOW)) for number in _numbers(body)]


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
    assert [number for body in frames for number in _numbers(body)] == [1, 2, 3, 4]


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
    assert [_numbers(body) for body in bodies_of(outbox.take_frames(PLENTY, NOW))] == [[2, 4]]
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
        assert [_numbers(body) for body in bodies_of(outbox.take_frames(PLENTY, NOW))] == [[number]]
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
    assert outbox.load_bytes == len(data) + MESSAGE_HEADER_BYTES + 30


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
