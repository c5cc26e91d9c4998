"""Frames that are acknowledged out of order: numbers, tickets, and the window of unacknowledged bytes."""

import random

import pytest

from overlay.batch import Run, encode_message
from overlay.express import Express, Report
from overlay.framing import FRAME_HEADER_BYTES
from overlay.limits import FRAMES_AHEAD_MAX, UNACKNOWLEDGED_FRAMES_MAX
from overlay.limits import MILLISECOND_NS as MS
from overlay.outbox import Outbox, Ticket


def _append(outbox: Outbox, number: int, size: int = 100, urgency: int = 4) -> Ticket:
    ticket = Ticket()
    run = Run(1, encode_message(1, 2, number, 3, bytes(size)))
    outbox.append(number * MS, urgency, 1, 0, run, 0, ticket)
    return ticket


def _sent(count: int) -> tuple[Outbox, dict[int, Ticket]]:
    """An outbox with so many frames on their way."""
    outbox = Outbox()
    tickets = {}
    for number in range(1, count + 1):
        tickets[number] = _append(outbox, number)
        assert [found for found, _ in outbox.take_numbered(10**6, 0)] == [number]
    return outbox, tickets


def test_what_is_acknowledged_ahead_gives_its_ticket_and_its_room_back_once():
    outbox, tickets = _sent(5)
    before = outbox.statistics().unacknowledged_bytes
    assert outbox.acknowledge_ahead([3, 5], MS, 0) == [tickets[3], tickets[5]]
    assert outbox.statistics().unacknowledged_bytes == before * 3 // 5
    assert outbox.acknowledge_ahead([3, 5, 99], MS, 0) == []
    outbox.validate()
    assert outbox.frame(3) is None and outbox.frame(4) is not None
    assert outbox.acknowledge(5) == [tickets[1], tickets[2], tickets[4]]
    assert outbox.is_idle
    outbox.validate()


@pytest.mark.parametrize("seed", range(10))
def test_every_ticket_comes_back_once_in_whatever_order(seed):
    draw = random.Random(seed)
    outbox, tickets = _sent(60)
    arrived: set[int] = set()
    returned = []
    received = 0
    order = list(tickets)
    draw.shuffle(order)
    for number in order:
        arrived.add(number)
        while received + 1 in arrived:
            received += 1
        if draw.random() < 0.5:
            returned += outbox.acknowledge(received, MS, 0)
            returned += outbox.acknowledge_ahead(sorted(n for n in arrived if n > received), MS, 0)
            outbox.validate()
    returned += outbox.acknowledge(60, MS, 0)
    assert sorted(map(id, returned)) == sorted(id(ticket) for ticket in tickets.values()), f"seed {seed}"
    assert outbox.is_idle


def test_after_a_reconnect_all_that_is_not_acknowledged_without_a_gap_goes_out_again():
    outbox, _ = _sent(4)
    outbox.acknowledge_ahead([3], MS, 0)
    again, _ = outbox.resume(1)
    assert len(again) == 3
    assert outbox.next_unacknowledged == 2


def test_urgent_frames_fit_into_datagrams_where_those_are_used():
    outbox = Outbox()
    outbox.is_express = True
    for number in range(1, 51):
        _append(outbox, number)
    frames = outbox.take_frames(10**6, 0)
    express = Express()
    far = Report(sent_ns=0, echo_ns=1, echo_received_ns=0, loss=0, burst=0, received=0, ahead=b"")
    assert express.round_trip_of(far, 1 + 60 * MS) == 60 * MS
    assert len(frames) > 1
    assert all(express.takes(4, len(frame) - FRAME_HEADER_BYTES) for frame in frames)
    for number in range(51, 101):
        _append(outbox, number, urgency=11)
    assert len(outbox.take_frames(10**6, 0)) == 1


def test_not_for_ever_are_frames_sent_behind_one_that_does_not_arrive():
    outbox = Outbox()
    frames = 0
    while frames < FRAMES_AHEAD_MAX:
        _append(outbox, frames + 1, size=1)
        taken = outbox.take_numbered(10**6, 0)
        if not taken:
            break
        frames += len(taken)
        if frames > 1:
            outbox.acknowledge_ahead([frames], MS, 0)
    assert frames == UNACKNOWLEDGED_FRAMES_MAX
    assert outbox.has_waiting and not outbox.has_room
    outbox.acknowledge(frames)
    assert outbox.has_room
    assert [number for number, _ in outbox.take_numbered(10**6, 0)] == [frames + 1]
    outbox.validate()
