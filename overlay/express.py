"""Urgent frames as datagrams beside a link: what is sent when, what is lost, what is sent again.

TCP delivers everything in order: on a long link that loses packets, one loss holds up everything
behind it for a round trip or more. So urgent frames that fit go as datagrams. Every data frame of a
link has a number, however it travels, and the receiver counts what it has: all up to some number, and
single ones ahead of it. It says so in *reports*, which also carry what heartbeats do (clock readings)
and how much it has lost, some forty times a second and soon after every frame.

    frame:   u8 1 | number u64 | body of the data frame
    report:  u8 2 | sent u64 | echo u64 | echo received u64 | loss u32 | burst u32 | received u64 | ahead ...

`ahead` is a bitmap: bit i of byte j says that frame `received + 2 + 8j + i` is there.

*Lost* is a frame if one that was sent a while after it has been reported and it has not, or if it has not
been reported for much longer than a round trip. It goes out again as a datagram twice; after that by TCP,
which does not give up. Where sending again would come too late for frames of its class, more copies go
out at once, a few milliseconds apart: as many as the measured losses demand (`copies_for`).

Time is an argument and no socket is known here; `runtime.datagrams` does the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct, error
from typing import Final

from overlay.errors import CloseReason, ProtocolError
from overlay.limits import DATAGRAM_MAX_BYTES, FRAMES_AHEAD_MAX, MILLISECOND_NS, SECOND_NS, URGENT_NS
from overlay.quality import LossMeter, copies_for
from overlay.urgency import SHEDDABLE, class_least_ns

FRAME: Final = 1
REPORT: Final = 2

COPY_EVERY_NS: Final = 4 * MILLISECOND_NS
"""Between two copies of a frame: losses tend to come together."""
REPORT_EVERY_NS: Final = 25 * MILLISECOND_NS
ATTEMPTS_MAX: Final = 3
"""Times a frame is sent as a datagram before TCP gets it."""
LONG_ROUND_TRIP_NS: Final = 5 * MILLISECOND_NS
"""On shorter links TCP repairs a loss soon enough."""
LEAST_WITHIN_NS: Final = 15 * SECOND_NS
"""A way counts as long if no round trip of the last fifteen to thirty seconds was short: a peer that gets too
little of its processor answers late too, and a thousand small frames instead of a few would finish it off."""
RESIDUAL: Final = 0.000_01
"""Share of frames that may be lost in all copies: one that is holds up its successors for a round trip."""
RESIDUAL_BEST_EFFORT: Final = 0.001

_REORDERED_NS: Final = 30 * MILLISECOND_NS
"""A frame may be reported this much later than one sent after it and not be lost."""
_TIMEOUT_NS: Final = 80 * MILLISECOND_NS
FRAME_HEADER: Final = Struct("<BQ")
_REPORT: Final = Struct("<BQQQIIQ")
_AHEAD_MAX_BYTES: Final = 256
_MILLION: Final = 1_000_000
_SMOOTHING: Final = 8


@dataclass(frozen=True, slots=True)
class Report:
    """What the receiver of frames says."""

    sent_ns: int
    echo_ns: int
    echo_received_ns: int
    loss: float
    burst: float
    received: int
    ahead: bytes

    def numbers(self) -> Iterator[int]:
        """The single frames it has beyond `received`."""
        for index, byte in enumerate(self.ahead):
            for bit in range(8):
                if byte >> bit & 1:
                    yield self.received + 2 + 8 * index + bit


@dataclass(frozen=True, slots=True)
class ExpressStatistics:
    """Counts since the channel was opened."""

    frames_sent: int
    copies_sent: int
    frames_sent_again: int
    frames_left_to_tcp: int
    frames_received: int
    loss_there: float
    burst_there: float
    loss_here: float
    burst_here: float


class _Flight:
    __slots__ = ("attempts", "payload", "sent_ns", "urgency")

    def __init__(self, payload: bytes, sent_ns: int, urgency: int) -> None:
        self.payload = payload
        self.sent_ns = sent_ns
        self.urgency = urgency
        self.attempts = 1


class Express:
    """The datagrams of one link, both directions."""

    def __init__(self) -> None:
        self.round_trip_ns = 0
        """Smoothed; 0 before the first report."""
        self.loss_there = 0.0
        """Share of our datagrams that the peer does not get, as it says."""
        self.burst_there = 0.0
        self.meter = LossMeter()
        """Of the peer's datagrams."""
        self._round_trip_most_ns = 0
        self._least_ns = 0
        """The shortest round trip of this stretch of time; 0 before the first."""
        self._least_before_ns = 0
        """Of the stretch before it."""
        self._least_until_ns = 0
        self._flights: dict[int, _Flight] = {}
        """By number, in the order in which they were last sent."""
        self._copies: list[tuple[int, bytes]] = []
        self._report_sent_ns = 0
        self._echo_ns = 0
        self._echo_received_ns = 0
        self._frames_sent = 0
        self._copies_sent = 0
        self._sent_again = 0
        self._left_to_tcp = 0
        self.frames_received = 0

    # Sending

    def takes(self, urgency: int, size_bytes: int) -> bool:
        """Whether a frame of this class and size should be a datagram."""
        return (
            self.is_worth_it
            and size_bytes + FRAME_HEADER.size <= DATAGRAM_MAX_BYTES
            and class_least_ns(urgency) < URGENT_NS
        )

    @property
    def is_worth_it(self) -> bool:
        """The way is so long that TCP would not repair a loss soon enough."""
        return self.least_round_trip_ns >= LONG_ROUND_TRIP_NS

    @property
    def least_round_trip_ns(self) -> int:
        """The shortest of the last fifteen to thirty seconds; 0 before the first."""
        return min(self._least_ns, self._least_before_ns or self._least_ns)

    def send(self, number: int, body: bytes, urgency: int, now_ns: int) -> bytes:
        """The payload to send now; copies follow in `due`."""
        payload = FRAME_HEADER.pack(FRAME, number) + body
        self._flights[number] = _Flight(payload, now_ns, urgency)
        self._frames_sent += 1
        self._plan_copies(payload, urgency, now_ns)
        return payload

    def copies(self, urgency: int) -> int:
        """How often a frame of this class is sent at once."""
        # One way, a round trip until the loss is noticed, and the way once more.
        if class_least_ns(urgency) >= 2 * self.round_trip_ns + _TIMEOUT_NS:
            return 1
        residual = RESIDUAL_BEST_EFFORT if urgency & SHEDDABLE else RESIDUAL
        return copies_for(self.loss_there, self.burst_there, residual)

    def due(self, now_ns: int) -> list[bytes]:
        """Copies whose time has come."""
        ready = [payload for due_ns, payload in self._copies if due_ns <= now_ns]
        if ready:
            self._copies = [item for item in self._copies if item[0] > now_ns]
        return ready

    @property
    def has_copies(self) -> bool:
        """Copies wait to be sent."""
        return bool(self._copies)

    def overdue(self, now_ns: int) -> tuple[list[bytes], list[int]]:
        """Frames not reported for too long: payloads to send again, numbers to leave to TCP."""
        limit_ns = now_ns - self._round_trip_most_ns - _TIMEOUT_NS
        return self._again([n for n, flight in self._flights.items() if flight.sent_ns < limit_ns], now_ns)

    # Reports

    def report_due(self, now_ns: int) -> bool:
        """A report should be sent even if nothing has come."""
        return now_ns - self._report_sent_ns >= REPORT_EVERY_NS

    def report(self, received: int, ahead: set[int], now_ns: int) -> bytes:
        """What we have, as a payload."""
        self._report_sent_ns = now_ns
        bits = bytearray()
        if ahead:
            bits = bytearray(min(_AHEAD_MAX_BYTES, (max(ahead) - received - 2) // 8 + 1))
            for number in ahead:
                index, bit = divmod(number - received - 2, 8)
                if index < len(bits):
                    bits[index] |= 1 << bit
        loss, burst = (round(share * _MILLION) for share in (self.meter.loss, self.meter.burst))
        echo = (self._echo_ns, self._echo_received_ns)
        return _REPORT.pack(REPORT, now_ns, *echo, loss, burst, received) + bytes(bits)

    def read(self, payload: bytes, now_ns: int) -> Report | tuple[int, bytes]:
        """A report, or the number and body of a frame. Raises ProtocolError."""
        try:
            if payload[:1] == bytes([FRAME]):
                _, number = FRAME_HEADER.unpack_from(payload)
                self.frames_received += 1
                return number, payload[FRAME_HEADER.size :]
            kind, sent_ns, echo_ns, echo_received_ns, loss, burst, received = _REPORT.unpack_from(payload)
        except error as problem:
            raise ProtocolError(CloseReason.BAD_FRAME, f"datagram of {len(payload)} bytes") from problem
        if kind != REPORT or max(loss, burst) > _MILLION:
            raise ProtocolError(CloseReason.BAD_FRAME, f"datagram of kind {kind}")
        if sent_ns > self._echo_ns:
            self._echo_ns, self._echo_received_ns = sent_ns, now_ns
        ahead = payload[_REPORT.size :]
        return Report(sent_ns, echo_ns, echo_received_ns, loss / _MILLION, burst / _MILLION, received, ahead)

    def round_trip_of(self, report: Report, now_ns: int) -> int:
        """The round trip that a report shows; 0 if it shows none."""
        if not report.echo_ns:
            return 0
        round_trip_ns = (now_ns - report.echo_ns) - (report.sent_ns - report.echo_received_ns)
        if round_trip_ns <= 0:
            return 0
        if now_ns >= self._least_until_ns:
            self._least_until_ns = now_ns + LEAST_WITHIN_NS
            self._least_before_ns, self._least_ns = self._least_ns, 0
        self._least_ns = min(self._least_ns or round_trip_ns, round_trip_ns)
        smoothed = self.round_trip_ns or round_trip_ns
        self.round_trip_ns = smoothed + (round_trip_ns - smoothed) // _SMOOTHING
        most = self._round_trip_most_ns
        self._round_trip_most_ns = max(round_trip_ns, most - most // 64)
        return round_trip_ns

    def reported(self, report: Report, now_ns: int) -> tuple[list[bytes], list[int]]:
        """Learn from a report what has arrived: payloads to send again, numbers to leave to TCP."""
        self.loss_there, self.burst_there = report.loss, report.burst
        flights = self._flights
        arrived = [number for number in flights if number <= report.received]
        arrived += [number for number in report.numbers() if number in flights]
        latest_ns = max((flights.pop(number).sent_ns for number in arrived), default=0)
        limit_ns = latest_ns - _REORDERED_NS
        return self._again([n for n, flight in flights.items() if flight.sent_ns < limit_ns], now_ns)

    def statistics(self) -> ExpressStatistics:
        """Counts since the channel was opened."""
        return ExpressStatistics(
            frames_sent=self._frames_sent,
            copies_sent=self._copies_sent,
            frames_sent_again=self._sent_again,
            frames_left_to_tcp=self._left_to_tcp,
            frames_received=self.frames_received,
            loss_there=self.loss_there,
            burst_there=self.burst_there,
            loss_here=self.meter.loss,
            burst_here=self.meter.burst,
        )

    def _plan_copies(self, payload: bytes, urgency: int, now_ns: int) -> None:
        for number in range(1, self.copies(urgency)):
            self._copies.append((now_ns + number * COPY_EVERY_NS, payload))
            self._copies_sent += 1

    def _again(self, lost: list[int], now_ns: int) -> tuple[list[bytes], list[int]]:
        payloads: list[bytes] = []
        to_tcp: list[int] = []
        for number in lost:
            flight = self._flights.pop(number)
            if flight.attempts >= ATTEMPTS_MAX:
                to_tcp.append(number)
                self._left_to_tcp += 1
                continue
            flight.attempts += 1
            flight.sent_ns = now_ns
            self._flights[number] = flight
            self._sent_again += 1
            payloads.append(flight.payload)
            self._plan_copies(flight.payload, flight.urgency, now_ns)
        return payloads, to_tcp


class Numbers:
    """Which numbered frames of a peer are here: all up to `received`, and some ahead of it."""

    __slots__ = ("ahead", "received")

    def __init__(self) -> None:
        self.received = 0
        self.ahead: set[int] = set()

    def take(self, number: int) -> bool:
        """Frame `number` has come; False if it was here already. Raises ProtocolError if it cannot be."""
        if number == self.received + 1 and not self.ahead:
            self.received = number
            return True
        if number <= self.received or number in self.ahead:
            return False
        if number > self.received + FRAMES_AHEAD_MAX:
            raise ProtocolError(
                CloseReason.BAD_FRAME, f"frame {number} comes when {self.received} were received"
            )
        self.ahead.add(number)
        while self.received + 1 in self.ahead:
            self.received += 1
            self.ahead.remove(self.received)
        return True
