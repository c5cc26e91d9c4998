"""Frames as datagrams on a link that delays, loses and reorders: virtual time, seeded loss."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from overlay.errors import ProtocolError
from overlay.express import REPORT_EVERY_NS, Express, Numbers, Report
from overlay.limits import DATAGRAM_MAX_BYTES
from overlay.limits import MILLISECOND_NS as MS
from overlay.qos import BEST_EFFORT, TopicQos
from overlay.urgency import urgency

URGENT = urgency(TopicQos(deadline_ms=300))
PATIENT = urgency(TopicQos(deadline_ms=5_000))


@dataclass
class Side:
    """One end of a link: what `runtime.datagrams` does, with numbers instead of seals."""

    express: Express = field(default_factory=Express)
    numbers: Numbers = field(default_factory=Numbers)
    sequence: int = 0
    arrived_ns: dict[int, int] = field(default_factory=dict)
    by_tcp: list[int] = field(default_factory=list)
    datagrams: int = 0


class Net:
    """Two sides and a way between them; a datagram is lost, or comes late and out of order."""

    def __init__(self, delay_ms: float, loss: float, seed: int = 0, jitter_ms: float = 0.0) -> None:
        self.now_ns = 0
        self.sides = (Side(), Side())
        self._delay_ns = round(delay_ms * MS)
        self._jitter_ns = round(jitter_ms * MS)
        self.loss = loss
        self._draw = random.Random(seed)
        self._events: list[tuple[int, int, int, int, bytes]] = []
        self._number = 0

    def send(self, side: int, payload: bytes) -> None:
        here = self.sides[side]
        here.sequence += 1
        here.datagrams += 1
        if self._draw.random() < self.loss:
            return
        due_ns = self.now_ns + self._delay_ns + round(self._draw.random() * self._jitter_ns)
        self._number += 1
        heapq.heappush(self._events, (due_ns, self._number, 1 - side, here.sequence, payload))

    def offer(self, number: int, urgency_: int = URGENT) -> None:
        express = self.sides[0].express
        self.send(0, express.send(number, b"x" * 100, urgency_, self.now_ns))

    def run(self, until_ns: int) -> None:
        """Millisecond by millisecond: what comes, copies that are due, reports, timeouts."""
        while self.now_ns < until_ns:
            self.now_ns += MS
            while self._events and self._events[0][0] <= self.now_ns:
                _, _, side, sequence, payload = heapq.heappop(self._events)
                self._receive(side, sequence, payload)
            for side, here in enumerate(self.sides):
                for payload in here.express.due(self.now_ns):
                    self.send(side, payload)
                if self.now_ns % (10 * MS) == 0:
                    self._again(side, *here.express.overdue(self.now_ns))
                    if here.express.report_due(self.now_ns):
                        numbers = here.numbers
                        self.send(side, here.express.report(numbers.received, numbers.ahead, self.now_ns))

    def warm_up(self) -> None:
        self.run(self.now_ns + 30_000 * MS)

    def _receive(self, side: int, sequence: int, payload: bytes) -> None:
        here = self.sides[side]
        here.express.meter.note(sequence)
        content = here.express.read(payload, self.now_ns)
        if isinstance(content, Report):
            here.express.round_trip_of(content, self.now_ns)
            self._again(side, *here.express.reported(content, self.now_ns))
        elif here.numbers.take(content[0]):
            here.arrived_ns[content[0]] = self.now_ns

    def _again(self, side: int, payloads: list[bytes], to_tcp: list[int]) -> None:
        for payload in payloads:
            self.send(side, payload)
        for number in to_tcp:  # TCP does not lose
            self.sides[side].by_tcp.append(number)
            if self.sides[1 - side].numbers.take(number):
                self.sides[1 - side].arrived_ns[number] = self.now_ns + 2 * self._delay_ns


@pytest.mark.parametrize("seed", range(3))
def test_a_link_is_measured(seed):
    net = Net(250, 0.01, seed)
    net.warm_up()
    express = net.sides[0].express
    assert express.round_trip_ns == pytest.approx(500 * MS, rel=0.02)
    assert express.loss_there == pytest.approx(0.01, abs=0.01)
    # Two copies would leave one in ten thousand, and each of those holds up its successors.
    assert express.copies(URGENT) in {3, 4}
    assert express.copies(PATIENT) == 1


@pytest.mark.parametrize("seed", range(3))
def test_urgent_frames_are_in_time_on_a_lossy_link_that_leaves_no_time_for_repair(seed):
    net = Net(250, 0.01, seed)
    net.warm_up()
    sent_ns = {}
    for number in range(1, 2_001):
        sent_ns[number] = net.now_ns
        net.offer(number)
        net.run(net.now_ns + 10 * MS)
    net.run(net.now_ns + 5_000 * MS)
    arrived = net.sides[1].arrived_ns
    late = [number for number in sent_ns if arrived[number] - sent_ns[number] > 270 * MS]
    assert len(late) <= 1, f"seed {seed}: {len(late)} of {len(sent_ns)} late"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss", [0.0, 0.05, 0.4])
def test_every_frame_arrives_whatever_is_lost_and_reordered(loss, seed):
    net = Net(40, 0.0, seed, jitter_ms=30)
    net.run(1_000 * MS)
    net.loss = loss
    for number in range(1, 501):
        net.offer(number, PATIENT)
        net.run(net.now_ns + 2 * MS)
    net.run(net.now_ns + 20_000 * MS)
    assert net.sides[1].numbers.received == 500
    assert not net.sides[1].numbers.ahead
    assert not net.sides[0].express.overdue(net.now_ns + 10**12)[0], "nothing waits for a report"


def test_a_dead_way_leaves_everything_to_tcp():
    net = Net(40, 0.0)
    net.run(1_000 * MS)
    net.loss = 1.0
    for number in range(1, 11):
        net.offer(number)
    net.run(net.now_ns + 10_000 * MS)
    assert net.sides[0].by_tcp == list(range(1, 11))
    assert net.sides[0].express.statistics().frames_left_to_tcp == 10


def test_reordering_alone_makes_nothing_be_sent_again():
    net = Net(100, 0.0, jitter_ms=10)
    net.run(1_000 * MS)
    for number in range(1, 301):
        net.offer(number, PATIENT)
        net.run(net.now_ns + 5 * MS)
    net.run(net.now_ns + 2_000 * MS)
    assert net.sides[0].express.statistics().frames_sent_again == 0


def test_what_does_not_fit_or_is_not_urgent_or_goes_near_is_left_to_tcp():
    net = Net(40, 0.0)
    net.run(1_000 * MS)
    express = net.sides[0].express
    assert express.takes(URGENT, 1_000)
    assert not express.takes(URGENT, DATAGRAM_MAX_BYTES)
    assert not express.takes(urgency(TopicQos()), 100)
    near = Net(1, 0.0)
    near.run(1_000 * MS)
    assert not near.sides[0].express.takes(URGENT, 100)
    assert not Express().takes(URGENT, 100)


def test_best_effort_gets_fewer_copies():
    express = Express()
    express.round_trip_ns = 500 * MS
    express.loss_there = express.burst_there = 0.01
    assert express.copies(URGENT) == 3
    best_effort = urgency(TopicQos(**{**BEST_EFFORT.to_record(), "deadline_ms": 300}))
    assert express.copies(best_effort) == 2


def test_numbers_come_in_any_order():
    numbers = Numbers()
    order = list(range(1, 101))
    random.Random(3).shuffle(order)
    assert all(numbers.take(number) for number in order)
    assert not any(numbers.take(number) for number in order)
    assert (numbers.received, numbers.ahead) == (100, set())
    with pytest.raises(ProtocolError):
        numbers.take(10**9)


def test_a_report_tells_what_is_ahead():
    express = Express()
    numbers = Numbers()
    for number in (1, 2, 5, 6, 9, 40):
        numbers.take(number)
    report = express.read(express.report(numbers.received, numbers.ahead, REPORT_EVERY_NS), 0)
    assert isinstance(report, Report)
    assert report.received == 2
    assert set(report.numbers()) == {5, 6, 9, 40}


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x02" * 10, b"\x07" * 60, b"\x02" + b"\xff" * 60])
def test_garbage_is_refused(payload):
    with pytest.raises(ProtocolError):
        Express().read(payload, 0)
