"""What waits for one peer, and what it has been sent but has not acknowledged.

An outbox belongs to the peer, not to a connection: when the connection breaks, the frames the
peer has not acknowledged go out again on the next one. The peer counts the data frames it has
received and says so in every heartbeat, so an acknowledgement costs nothing per message.

Order: runs leave by earliest deadline, runs of the same millisecond and class in the order they came.
When that makes them late, the most urgent class comes first (`overlay.schedule.Lanes`).
Neighbouring runs with the same batch header leave as one frame. Bytes handed to a socket are
first come, first served for good, so an outbox hands over little at a time: nothing while the
socket is full, and no more than a window of unacknowledged bytes, which grows while the peer
acknowledges promptly and shrinks when it does not. What waits here can still be overtaken. Less
urgent frames on their way do not count in the window of a frame: the peer processes it before them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from overlay.batch import FRAME_OVERHEAD_BYTES, Run, encode_batch
from overlay.errors import CloseReason, ProtocolError
from overlay.framing import FRAME_HEADER_BYTES
from overlay.limits import (
    DATAGRAM_FRAME_BYTES,
    FRAME_TARGET_BYTES,
    KIB,
    MIB,
    MILLISECOND_NS,
    OUTBOX_MAX_BYTES,
    RUN_OVERHEAD_BYTES,
    UNACKNOWLEDGED_FRAMES_MAX,
    URGENT_NS,
)
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from overlay.schedule import Calendar, Lanes
from overlay.trace import Reason
from overlay.tracer import LinkTrace
from overlay.urgency import LEVELS, class_least_ns, level_of

OVERLOADED_AFTER_NS: Final = 20 * MILLISECOND_NS
"""An outbox that has not run empty for this long takes in more than it gives out."""
WINDOW_FIRST_BYTES: Final = 128 * KIB
WINDOW_LEAST_BYTES: Final = 16 * KIB
WINDOW_MOST_BYTES: Final = 8 * MIB
PROMPT_NS: Final = 20 * MILLISECOND_NS
"""A peer that acknowledges within a round trip and this much can take more at a time."""
SLOW_NS: Final = 30 * MILLISECOND_NS
"""One that needs a round trip and more than this gets less: the rest only queues on the way."""

LEVEL_OF_CLASS: Final = -1
"""A run waits at the level of its class."""

_OUTBOX_FULL: Final = int(Reason.OUTBOX_FULL)
_EDGE_GONE: Final = int(Reason.EDGE_GONE)

assert WINDOW_LEAST_BYTES <= WINDOW_FIRST_BYTES <= WINDOW_MOST_BYTES < OUTBOX_MAX_BYTES


class Ticket:
    """Follows a run through an outbox: whoever appended it learns when the peer has it."""

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False
        """Set to have the run dropped if it still waits."""


OnSent = Callable[[int, Sequence[Ticket]], None]
"""Called with the number of a frame and the tickets of the runs in it."""


@dataclass(frozen=True, slots=True)
class OutboxStatistics:
    """Counts since the outbox was made."""

    messages_sent: int
    frames_sent: int
    bytes_sent: int
    frames_resent: int
    messages_dropped: int
    waiting_messages: int
    waiting_bytes: int
    unacknowledged_bytes: int


class _Waiting:
    __slots__ = ("clock_shift_ns", "level", "origin", "run", "ticket", "urgency")

    def __init__(
        self, level: int, urgency: int, origin: int, clock_shift_ns: int, run: Run, ticket: Ticket | None
    ) -> None:
        self.level = level
        self.urgency = urgency
        self.origin = origin
        self.clock_shift_ns = clock_shift_ns
        self.run = run
        self.ticket = ticket


class _Sent:
    __slots__ = ("data", "is_received", "level", "sent_ns", "tickets")

    def __init__(self, data: bytes, level: int, sent_ns: int, tickets: list[Ticket]) -> None:
        self.data = data
        self.level = level
        self.is_received = False
        """The peer has it, though not all that was sent before it."""
        self.sent_ns = sent_ns
        self.tickets = tickets


class Outbox:
    """Waiting runs and unacknowledged frames for one peer."""

    __slots__ = (
        "_acknowledged",
        "_busy_since_ns",
        "_bytes_sent",
        "_capacity_bytes",
        "_frames_resent",
        "_frames_sent",
        "_is_connected",
        "_last_later_ns",
        "_last_origin",
        "_last_shift_ns",
        "_least_shift_ns",
        "_lost_tickets",
        "_messages_dropped",
        "_messages_sent",
        "_sent",
        "_unacknowledged",
        "_unacknowledged_by_level",
        "_unacknowledged_bytes",
        "_waiting",
        "_waiting_bytes",
        "_waiting_messages",
        "_window_bytes",
        "is_express",
        "on_sent",
        "trace",
    )

    def __init__(self, capacity_bytes: int = OUTBOX_MAX_BYTES) -> None:
        self.is_express = False
        """Urgent frames are to be small enough for datagrams."""
        self.on_sent: OnSent | None = None
        self.trace: LinkTrace | None = None
        """Set at a node that traces messages."""
        self._capacity_bytes = capacity_bytes
        self._waiting: Lanes[_Waiting] = Lanes()
        self._waiting_bytes = 0
        self._waiting_messages = 0
        self._busy_since_ns = 0
        self._is_connected = False
        self._least_shift_ns: dict[int, int] = {}
        """By origin: the least clock shift since nothing waited; all deadlines are compared with it."""
        # Most runs have the origin and the shift of the one before: one comparison instead of a lookup.
        self._last_origin = 0
        self._last_shift_ns = UNKNOWN_CLOCK_SHIFT
        self._last_later_ns = 0
        self._window_bytes = WINDOW_FIRST_BYTES
        # Frames numbered _acknowledged+1 .. _sent, oldest first.
        self._unacknowledged: deque[_Sent] = deque()
        self._unacknowledged_bytes = 0
        self._unacknowledged_by_level = [0] * LEVELS
        self._sent = 0
        self._acknowledged = 0
        self._messages_sent = 0
        self._bytes_sent = 0
        self._frames_sent = 0
        self._frames_resent = 0
        self._messages_dropped = 0
        self._lost_tickets: list[Ticket] = []

    def append(
        self,
        deadline_ns: int,
        urgency: int,
        origin: int,
        clock_shift_ns: int,
        run: Run,
        now_ns: int,
        ticket: Ticket | None = None,
        level: int = LEVEL_OF_CLASS,
        least_ns: int = 0,
    ) -> int:
        """Queue a run. Returns how many waiting messages had to be dropped to make room.

        It is not due before `least_ns`, which keeps it behind those that were given that as a deadline,
        whatever their origin. Runs of one publisher must not be given a more urgent `level` while others of
        it wait. Without a deadline there are no levels: first come, first served.
        """
        if not self._waiting_messages:
            self._busy_since_ns = now_ns
            self._least_shift_ns.clear()
            self._last_shift_ns = UNKNOWN_CLOCK_SHIFT
        if deadline_ns and clock_shift_ns != UNKNOWN_CLOCK_SHIFT:
            if clock_shift_ns != self._last_shift_ns or origin != self._last_origin:
                self._compare_shift(origin, clock_shift_ns)
            if self._last_later_ns:
                deadline_ns += self._last_later_ns
            deadline_ns = max(deadline_ns, least_ns)
        if level < 0 or not deadline_ns:
            level = _level_of(urgency) if deadline_ns else 0
        waiting = _Waiting(level, urgency, origin, clock_shift_ns, run, ticket)
        self._waiting.push(level, deadline_ns, waiting)
        self._waiting_bytes += len(run.data)
        self._waiting_messages += run.messages
        if self.load_bytes > self._capacity_bytes:
            return self._make_room(now_ns)
        return 0

    def take_frames(self, budget_bytes: int, now_ns: int) -> list[bytes]:
        """Frames to write now, up to about `budget_bytes`; they count as sent and unacknowledged."""
        frames: list[bytes] = []
        if not self._is_connected:
            self._is_connected = True
            self._busy_since_ns = now_ns
        while self._waiting_messages and budget_bytes > 0:
            lane = self._waiting.choose(now_ns, self._open_levels())
            if lane is None:
                break
            data = self._take_frame(lane, now_ns)
            if data is not None:
                budget_bytes -= len(data)
                frames.append(data)
        return frames

    def take_numbered(self, budget_bytes: int, now_ns: int) -> list[tuple[int, bytes]]:
        """The same as `take_frames`, each frame with its number."""
        first = self._sent + 1
        return list(enumerate(self.take_frames(budget_bytes, now_ns), first))

    @property
    def next_unacknowledged(self) -> int:
        """The number of the first frame that the peer has not acknowledged."""
        return self._acknowledged + 1

    def frame(self, number: int) -> bytes | None:
        """A frame the peer has not acknowledged, by its number."""
        index = number - self._acknowledged - 1
        if not 0 <= index < len(self._unacknowledged) or self._unacknowledged[index].is_received:
            return None
        return self._unacknowledged[index].data

    def acknowledge_ahead(self, numbers: Iterable[int], now_ns: int, round_trip_ns: int) -> list[Ticket]:
        """The peer has these frames, though not all before them; returns their tickets."""
        tickets: list[Ticket] = []
        slowest_ns = 0
        for number in numbers:
            index = number - self._acknowledged - 1
            if not 0 <= index < len(self._unacknowledged):
                continue
            frame = self._unacknowledged[index]
            if frame.is_received:
                continue
            frame.is_received = True
            self._has_arrived(frame)
            slowest_ns = frame.sent_ns if not slowest_ns else min(slowest_ns, frame.sent_ns)
            tickets.extend(frame.tickets)
            frame.tickets = []
        if slowest_ns:
            self._adapt_window(now_ns - slowest_ns - round_trip_ns)
        return tickets

    def check_received(self, received: int) -> None:
        """Raise ProtocolError if the peer cannot have received so many data frames."""
        if received > self._sent:
            raise ProtocolError(
                CloseReason.BAD_MESSAGE, f"peer acknowledges {received} frames, {self._sent} were sent"
            )

    def acknowledge(self, received: int, now_ns: int = 0, round_trip_ns: int = 0) -> list[Ticket]:
        """The peer has received `received` data frames on this link; returns the tickets of those.

        With the time and the link's round trip, the window learns from how long it took.
        """
        self.check_received(received)
        tickets: list[Ticket] = []
        if now_ns and received > self._acknowledged:
            # A frame that others have overtaken was lost on the way: it says nothing of queues.
            overtaken = any(
                frame.is_received for frame in islice(self._unacknowledged, received - self._acknowledged)
            )
            if not overtaken:
                self._adapt_window(now_ns - self._unacknowledged[0].sent_ns - round_trip_ns)
        while self._acknowledged < received:
            frame = self._unacknowledged.popleft()
            if not frame.is_received:
                self._has_arrived(frame)
            self._acknowledged += 1
            if frame.tickets:
                tickets.extend(frame.tickets)
        return tickets

    def take_lost_tickets(self) -> list[Ticket]:
        """Tickets of runs that were dropped to make room since this was last asked."""
        lost, self._lost_tickets = self._lost_tickets, []
        return lost

    def resume(self, received: int) -> tuple[list[bytes], list[Ticket]]:
        """A new connection to the same incarnation.

        Returns the frames to send again, and the tickets of those it has after all.
        """
        if received < self._acknowledged:
            # Frames it never got have been withdrawn or discarded: it counts on without them.
            return self.restart(received), []
        tickets = self.acknowledge(received)
        self._frames_resent += len(self._unacknowledged)
        return [frame.data for frame in self._unacknowledged], tickets

    def restart(self, received: int = 0) -> list[bytes]:
        """A new connection to a peer that counts on from `received`. Returns what to send again."""
        self._acknowledged = received
        self._sent = received + len(self._unacknowledged)
        self._frames_resent += len(self._unacknowledged)
        return [frame.data for frame in self._unacknowledged]

    def pending(self) -> list[bytes]:
        """Everything not acknowledged: bodies of data frames, sent ones first."""
        bodies = [frame.data[FRAME_HEADER_BYTES:] for frame in self._unacknowledged]
        bodies.extend(
            encode_batch(item.urgency, item.origin, item.clock_shift_ns, (item.run,))[FRAME_HEADER_BYTES:]
            for item in self._waiting
            if item.ticket is None or not item.ticket.cancelled
        )
        return bodies

    def withdraw(self) -> list[bytes]:
        """Take back everything not acknowledged, as `pending` gives it."""
        bodies = self.pending()
        self._clear()
        return bodies

    def discard(self, now_ns: int = 0, reason: int = _EDGE_GONE) -> tuple[int, list[Ticket]]:
        """Forget everything; returns the waiting messages dropped and the tickets of all runs."""
        dropped = self._waiting_messages
        if self.trace is not None:
            for item in self._waiting:
                self.trace.dropped(item.run, reason, now_ns)
        tickets = [ticket for frame in self._unacknowledged for ticket in frame.tickets]
        tickets.extend(item.ticket for item in self._waiting if item.ticket is not None)
        self._clear()
        self._messages_dropped += dropped
        return dropped, tickets

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is unacknowledged."""
        return not self._waiting_messages and not self._unacknowledged

    @property
    def has_waiting(self) -> bool:
        """Something waits to be sent."""
        return self._waiting_messages > 0

    @property
    def load_bytes(self) -> int:
        """Memory that waiting and unacknowledged messages take."""
        waiting_bytes = self._waiting_bytes + len(self._waiting) * RUN_OVERHEAD_BYTES
        return waiting_bytes + self._unacknowledged_bytes

    @property
    def next_deadline_ns(self) -> int | None:
        """The earliest deadline that waits."""
        return self._waiting.next_deadline_ns()

    def is_overloaded(self, now_ns: int) -> bool:
        """It has not run empty for a while although somebody takes from it: shed what may be shed."""
        return (
            self._waiting_messages > 0
            and now_ns - self._busy_since_ns > OVERLOADED_AFTER_NS
            and self._is_connected
        )

    def disconnected(self) -> None:
        """Nobody takes frames any more: what waits now is kept for the peer's return, as far as it goes."""
        self._is_connected = False

    @property
    def has_room(self) -> bool:
        """The window is not full, or not for something that waits: that may be sent at once."""
        levels = self._open_levels()
        return levels == LEVELS or self._waiting.choose(0, levels) is not None

    def statistics(self) -> OutboxStatistics:
        """Counts since the outbox was made."""
        return OutboxStatistics(
            messages_sent=self._messages_sent,
            frames_sent=self._frames_sent,
            bytes_sent=self._bytes_sent,
            frames_resent=self._frames_resent,
            messages_dropped=self._messages_dropped,
            waiting_messages=self._waiting_messages,
            waiting_bytes=self._waiting_bytes,
            unacknowledged_bytes=self._unacknowledged_bytes,
        )

    def validate(self) -> None:
        """Assert the invariants; tests call this after every step."""
        self._waiting.validate()
        assert self._sent - self._acknowledged == len(self._unacknowledged)
        assert self._unacknowledged_bytes == sum(
            len(frame.data) for frame in self._unacknowledged if not frame.is_received
        )
        assert self._unacknowledged_bytes == sum(self._unacknowledged_by_level)
        assert self._waiting_bytes == sum(len(item.run.data) for item in self._waiting)
        assert self._waiting_messages == sum(item.run.messages for item in self._waiting)

    def _compare_shift(self, origin: int, clock_shift_ns: int) -> None:
        """A shift that has grown makes a later message look older than one before it: by how much."""
        least_ns = self._least_shift_ns.get(origin)
        if least_ns is None or clock_shift_ns < least_ns:
            self._least_shift_ns[origin] = least_ns = clock_shift_ns
        self._last_origin = origin
        self._last_shift_ns = clock_shift_ns
        self._last_later_ns = clock_shift_ns - least_ns

    def _open_levels(self) -> int:
        """How many levels have room in the window: each waits for the more urgent ones and for itself."""
        if len(self._unacknowledged) >= UNACKNOWLEDGED_FRAMES_MAX:
            return 0
        if self._unacknowledged_bytes < self._window_bytes:
            return LEVELS
        in_the_way = 0
        for level in range(LEVELS):
            in_the_way += self._unacknowledged_by_level[level]
            if in_the_way >= self._window_bytes:
                return level
        return LEVELS

    def _take_frame(self, lane: Calendar[_Waiting], now_ns: int) -> bytes | None:
        """The next frame; None if the run that was next has been cancelled."""
        first = self._waiting.pop(lane)
        self._waiting_bytes -= len(first.run.data)
        self._waiting_messages -= first.run.messages
        if first.ticket is not None and first.ticket.cancelled:
            return None
        runs = [first.run]
        tickets: list[Ticket] = [first.ticket] if first.ticket is not None else []
        size = FRAME_OVERHEAD_BYTES + len(first.run.data)
        messages = first.run.messages
        target_bytes = min(FRAME_TARGET_BYTES, self._window_bytes // 4)
        if self.is_express and class_least_ns(first.urgency) < URGENT_NS:
            target_bytes = DATAGRAM_FRAME_BYTES
        while (item := lane.first()) is not None:
            if (
                item.origin != first.origin
                or item.urgency != first.urgency
                or item.clock_shift_ns != first.clock_shift_ns
                or size + len(item.run.data) > target_bytes
            ):
                break
            self._waiting.pop(lane)
            self._waiting_bytes -= len(item.run.data)
            self._waiting_messages -= item.run.messages
            if item.ticket is not None:
                if item.ticket.cancelled:
                    continue
                tickets.append(item.ticket)
            runs.append(item.run)
            size += len(item.run.data)
            messages += item.run.messages
        data = encode_batch(first.urgency, first.origin, first.clock_shift_ns, runs, now_ns)
        self._unacknowledged.append(_Sent(data, first.level, now_ns, tickets))
        self._unacknowledged_bytes += len(data)
        self._unacknowledged_by_level[first.level] += len(data)
        self._sent += 1
        self._frames_sent += 1
        self._messages_sent += messages
        self._bytes_sent += len(data)
        if self.on_sent is not None:
            self.on_sent(self._sent, tickets)
        if self.trace is not None:
            for run in runs:
                if run.came is not None:
                    self.trace.sent(run, now_ns)
        return data

    def _has_arrived(self, frame: _Sent) -> None:
        self._unacknowledged_bytes -= len(frame.data)
        self._unacknowledged_by_level[frame.level] -= len(frame.data)

    def _adapt_window(self, taken_ns: int) -> None:
        if taken_ns > SLOW_NS:
            self._window_bytes = max(self._window_bytes // 2, WINDOW_LEAST_BYTES)
        elif taken_ns < PROMPT_NS and self._unacknowledged_bytes > self._window_bytes // 2:
            self._window_bytes = min(self._window_bytes * 2, WINDOW_MOST_BYTES)

    def _make_room(self, now_ns: int) -> int:
        """Drop what is due first, and so most likely late, until the outbox is within its capacity."""
        dropped = 0
        while self._waiting_messages and self.load_bytes > self._capacity_bytes:
            item = self._waiting.pop_earliest()
            self._waiting_bytes -= len(item.run.data)
            self._waiting_messages -= item.run.messages
            if item.ticket is not None:
                if item.ticket.cancelled:
                    continue
                self._lost_tickets.append(item.ticket)
            if self.trace is not None:
                self.trace.dropped(item.run, _OUTBOX_FULL, now_ns)
            dropped += item.run.messages
        self._messages_dropped += dropped
        return dropped

    def _clear(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
        self._waiting_messages = 0
        self._acknowledged = self._sent
        self._unacknowledged.clear()
        self._unacknowledged_bytes = 0
        self._unacknowledged_by_level = [0] * LEVELS


def _level_of(urgency: int) -> int:
    return min(level_of(urgency), LEVELS - 1)
