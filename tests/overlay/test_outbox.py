"""The outbox: whatever happens to connections, the peer gets everything once, by deadline and in order.

Exactly once and, among equal deadlines, in the order of the appends; a run with an earlier deadline
leaves first among those that wait. The window limits what is on its way, and every ticket comes back
exactly once.
"""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from overlay.batch import (
    MESSAGE_HEADER_BYTES,
    Run,
    decode_batch_header,
    decode_messages,
    encode_message,
)
from overlay.limits import FRAME_TARGET_BYTES
from overlay.outbox import (
    WINDOW_MOST_BYTES,
    Outbox,
    Ticket,
)
from overlay.schedule import BUCKET_SHIFT
from tests.overlay.outboxes import (
    HEADER,
    MS,
    NOW,
    PLENTY,
    Header,
    Numbered,
    Queue,
    Waiting,
    deadlines,
    headers,
    numbers_of,
    sizes_of_messages,
)
from tests.wires import Wire, bodies_of


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
        self.got += numbers_of(body)
        self.after_frame.append(len(self.got))

    @rule(header=headers, sizes=sizes_of_messages, deadline_ns=deadlines, follow=st.booleans())
    def append(self, header: Header, sizes: list[int], deadline_ns: int, follow: bool) -> None:
        first = self.numbered.last + 1
        run = self.numbered.run(header, sizes)
        ticket = Ticket() if follow else None
        if ticket is not None:
            self.tickets.add(ticket)
        assert self.outbox.append(deadline_ns, *header, run, self.now_ns, ticket) == 0
        numbers = list(range(first, self.numbered.last + 1))
        self.waiting.push(Waiting(deadline_ns, numbers, ticket, len(run.data), header[0]))

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
        numbers = [number for body in bodies for number in numbers_of(body)]
        self.sent += numbers
        for run in self.waiting.pop_sent(numbers, self.outbox.statistics().waiting_messages, self.now_ns):
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
        taken = [number for body in bodies for number in numbers_of(body)]
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
            self.waiting.push(Waiting(0, numbers_of(body), None, len(run.data)))
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
        first = self.waiting.earliest().deadline_ns if self.waiting.runs else None
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
    st.lists(st.tuples(headers, sizes_of_messages, deadlines, st.booleans()), max_size=12),
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
                number for body in bodies_of(outbox.take_frames(PLENTY, NOW)) for number in numbers_of(body)
            ]
            sent_messages += len(numbers)
            waiting.pop_sent(numbers, outbox.statistics().waiting_messages, NOW)
        first = numbered.last + 1
        run = numbered.run(header, sizes)
        ticket = Ticket()
        numbers = list(range(first, numbered.last + 1))
        waiting.push(Waiting(deadline_ns, numbers, ticket, len(run.data), header[0]))
        load_bytes = outbox.statistics().unacknowledged_bytes
        over = 0
        while waiting.runs and load_bytes + waiting.memory_bytes() > capacity_bytes:
            gone = waiting.earliest()
            waiting.runs.remove(gone)
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
    wire = Wire(outbox, lambda body: kept.extend(numbers_of(body)))
    wire.received = outbox.statistics().frames_sent
    wire.run()
    waiting.pop_sent(kept, 0)
    assert not waiting.runs


def test_a_run_too_large_for_the_capacity_is_dropped_and_its_ticket_is_lost() -> None:
    outbox = Outbox(capacity_bytes=1000)
    numbered = Numbered()
    first, second = Ticket(), Ticket()
    assert outbox.append(0, *HEADER, numbered.run(HEADER, [10]), NOW, first) == 0
    assert outbox.append(1 << BUCKET_SHIFT, *HEADER, numbered.run(HEADER, [990, 1]), NOW, second) == 3
    assert outbox.take_lost_tickets() == [first, second]
    assert outbox.is_idle
    outbox.validate()


def test_runs_that_may_not_be_due_earlier_keep_their_order_whatever_their_origins() -> None:
    """A publisher that has changed its edge has messages of two origins, each with its own clock shift."""
    outbox = Outbox()
    least_ns = 1_000 << BUCKET_SHIFT
    shifts = [(7, 1 << BUCKET_SHIFT), (7, 4 << BUCKET_SHIFT), (8, 9 << BUCKET_SHIFT), (7, 2 << BUCKET_SHIFT)]
    for sequence, (origin, shift_ns) in enumerate(shifts, 1):
        run = Run(1, encode_message(1, 100, sequence, 0, b""))
        outbox.append(least_ns // 2, 0, origin, shift_ns, run, 0, None, 0, least_ns)
    bodies = bodies_of(outbox.take_frames(10**9, 0))
    assert [message.sequence for body in bodies for message in decode_messages(body)] == [1, 2, 3, 4]
