"""Keeping a publisher's order at the egress when copies of its messages race on several ways.

When routing brokers change, some messages come twice and some overtake. For a while after such a
*disturbance* a message whose predecessor is missing is held back, as long as its own deadline
allows; at other times a gap is a loss and nothing waits for it. A gap that is wider than the topic's
loss tolerance is waited for even beyond the deadline, as long as a failover may take: tolerance goes
before deadline, order before both.

Messages marked UNORDERED travel on several ways, or as datagrams, all the time: for them a gap always
may be closed. And as every link repairs its losses, it will be, so they are waited for longer.
"""

from typing import Final

from edge_broker.dispatch import Dispatch
from edge_broker.frames import born_here_ns
from edge_broker.model import DropReason, Held, Peer, Topic
from overlay.batch import cut_run
from overlay.limits import MILLISECOND_NS, SECOND_NS
from overlay.urgency import UNORDERED

_DISTURBED_FOR_NS: Final = 1 * SECOND_NS
"""How long after a change of routing brokers messages may come out of order."""
_HOLD_MOST_NS: Final = 200 * MILLISECOND_NS
"""Longest a message waits for its predecessor, whatever its topic allows: some failover times."""
_HOLD_MARGIN_NS: Final = 5 * MILLISECOND_NS
"""A held message is let go this long before its deadline."""
_REORDERED_NS: Final = 15 * MILLISECOND_NS
"""Copies follow each other within this time, so it is waited for even if the deadline is near."""
_REPAIRED_NS: Final = 2 * SECOND_NS
"""A message lost on a link is sent again within this time."""


class Order:
    """Messages that wait for their predecessors."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._disturbed_until_ns = 0
        self.held: dict[int, dict[int, Held]] = {}
        """By publisher and sequence."""
        self.held_total = 0
        """Messages ever held back."""

    def disturb(self, now_ns: int) -> None:
        """Messages may come out of order for a while."""
        self._disturbed_until_ns = now_ns + _DISTURBED_FOR_NS

    def is_calm(self, now_ns: int) -> bool:
        """No message waits, and none need wait unless it comes from an unexpected side."""
        return now_ns >= self._disturbed_until_ns and not self.held

    def deliver(
        self, publisher_id: int, sequence: int, item: Held, touched: set[Peer], now_ns: int, astray: bool
    ) -> None:
        """Deliver a message, or hold it back if one before it is missing and may still come.

        `astray`: it came from an unexpected side, so others may still come from the expected one.
        """
        topic = item.topic
        history = topic.histories.get(publisher_id)
        held = self.held.get(publisher_id)
        disturbed = astray or now_ns < self._disturbed_until_ns or held is not None
        if disturbed and history is not None and history.highest and sequence > history.highest + 1:
            if held is not None and sequence in held:
                self._dispatch.drop(DropReason.DUPLICATE, item.data, 0, item.came, now_ns)
                return
            until_ns = _held_until(item, now_ns)
            patient_until_ns = now_ns + _HOLD_MOST_NS
            if item.header.urgency & UNORDERED:
                until_ns = max(until_ns, now_ns + _REORDERED_NS)
                patient_until_ns = now_ns + _REPAIRED_NS
            first = min(*held, sequence) if held else sequence
            if until_ns > now_ns or first - history.highest - 1 > topic.tolerated:
                self.held.setdefault(publisher_id, {})[sequence] = item._replace(
                    until_ns=until_ns, patient_until_ns=patient_until_ns
                )
                self.held_total += 1
                return
        self._deliver_now(publisher_id, sequence, item, touched, now_ns)
        self._release_successors(publisher_id, touched, now_ns)

    def release(self, now_ns: int) -> set[Peer]:
        """Let go of messages that can wait for their predecessors no longer; called every few ms."""
        touched: set[Peer] = set()
        for publisher_id, held in list(self.held.items()):
            overdue = [sequence for sequence, item in held.items() if item.until_ns <= now_ns]
            if not overdue:
                continue
            last = max(overdue)
            for sequence in sorted(sequence for sequence in held if sequence <= last):
                item = held[sequence]
                missing = sequence - item.topic.histories[publisher_id].highest - 1
                if missing > item.topic.tolerated and now_ns < item.patient_until_ns:
                    break
                self._deliver_now(publisher_id, sequence, held.pop(sequence), touched, now_ns)
            self._release_successors(publisher_id, touched, now_ns)
        return touched

    def shorten(self, topic: Topic, now_ns: int) -> None:
        """The topic's deadline has changed: nothing waits longer than it would have, nor than it may."""
        for held in self.held.values():
            for sequence, item in held.items():
                if item.topic is topic:
                    until_ns = min(item.until_ns, _held_until(item, now_ns))
                    held[sequence] = item._replace(until_ns=until_ns)

    def _deliver_now(
        self, publisher_id: int, sequence: int, item: Held, touched: set[Peer], now_ns: int
    ) -> None:
        topic = item.topic
        dispatch = self._dispatch
        if dispatch.is_new(topic, publisher_id, sequence, item.data, 0, item.came, now_ns):
            topic.delivered += 1
            dispatch.delivered += 1
            run = cut_run(1, item.data, 0, len(item.data), item.came)
            dispatch.append(topic.deliver, item.header, run, touched, now_ns)

    def _release_successors(self, publisher_id: int, touched: set[Peer], now_ns: int) -> None:
        """Deliver held messages that have no gap before them any more."""
        held = self.held.get(publisher_id)
        if held is None:
            return
        while held:
            first = min(held)
            highest = held[first].topic.histories[publisher_id].highest
            if first > highest + 1:
                return
            self._deliver_now(publisher_id, first, held.pop(first), touched, now_ns)
        del self.held[publisher_id]


def _held_until(item: Held, now_ns: int) -> int:
    deadline_ns = item.topic.deadline_ns
    # Nobody sends best effort again: what is missing is lost, or only a little late.
    is_best_effort = item.topic.qos.loss_tolerance is None
    allowed_ns = deadline_ns // 2 if is_best_effort else deadline_ns - _HOLD_MARGIN_NS
    born_ns = born_here_ns(item.born_ns, item.header.clock_shift_ns, now_ns)
    return min(born_ns + allowed_ns, now_ns + _HOLD_MOST_NS)
