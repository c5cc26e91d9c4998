"""Keeping a publisher's order at the egress when copies of its messages race on several ways.

When routing brokers change, some messages come twice and some overtake. For a while after such a
*disturbance* a message whose predecessor is missing is held back, as long as its own deadline
allows; at other times a gap is a loss and nothing waits for it. A gap that is wider than the topic's
loss tolerance is waited for even beyond the deadline, as long as a failover may take: tolerance goes
before deadline, order before both. If the LAN is cut off meanwhile, what is missing may wait at a routing
broker that serves the topic no longer: it is waited for until the LAN is joined again, and a little more.

Messages marked UNORDERED travel on several ways, or as datagrams, all the time: for them a gap always
may be closed. And as every link repairs its losses, it will be, so they are waited for longer.
"""

from heapq import heappop, heappush
from typing import Final

from edge_broker.dispatch import Dispatch
from edge_broker.frames import born_here_ns
from edge_broker.model import DropReason, Held, Peer, Topic
from overlay.batch import cut_run
from overlay.limits import HELD_MAX_BYTES, MILLISECOND_NS, RUN_OVERHEAD_BYTES, SECOND_NS
from overlay.schedule import granule_born_ns
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


class _Waiting:
    """The messages of one publisher that wait, by sequence; they go from the lowest."""

    __slots__ = ("_sequences", "items")

    def __init__(self) -> None:
        self.items: dict[int, Held] = {}
        self._sequences: list[int] = []
        """A heap of the same sequences: thousands may wait when one message has been lost."""

    @property
    def first(self) -> int:
        """The lowest sequence that waits."""
        return self._sequences[0]

    def add(self, sequence: int, item: Held) -> None:
        """One more that waits."""
        self.items[sequence] = item
        heappush(self._sequences, sequence)

    def pop(self) -> Held:
        """The one with the lowest sequence, which waits no longer."""
        return self.items.pop(heappop(self._sequences))


class Order:
    """Messages that wait for their predecessors."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._disturbed_until_ns = 0
        self._is_cut_off = False
        self._rejoining_until_ns = 0
        self.held: dict[int, _Waiting] = {}
        """By publisher."""
        self.held_total = 0
        """Messages ever held back."""
        self.held_bytes = 0
        """Memory of those held back now."""
        self.held_most_bytes = HELD_MAX_BYTES

    def disturb(self, now_ns: int) -> None:
        """Messages may come out of order for a while."""
        self._disturbed_until_ns = now_ns + _DISTURBED_FOR_NS

    def cut_off(self) -> None:
        """The last way on which messages came is gone."""
        self._is_cut_off = True

    def reached(self, now_ns: int) -> None:
        """Messages can come again, or do."""
        if self._is_cut_off:
            self._is_cut_off = False
            self._rejoining_until_ns = now_ns + _DISTURBED_FOR_NS

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
            if held is not None and sequence in held.items:
                self._dispatch.drop(DropReason.DUPLICATE, item.data, 0, item.came, now_ns)
                return
            until_ns = _held_until(item, now_ns)
            patient_until_ns = now_ns + _HOLD_MOST_NS
            if item.header.urgency & UNORDERED:
                until_ns = max(until_ns, now_ns + _REORDERED_NS)
                patient_until_ns = now_ns + _REPAIRED_NS
            # Where others wait, it takes its place among them: it may not overtake them either.
            if held is not None or until_ns > now_ns or sequence - history.highest - 1 > topic.tolerated:
                if held is None:
                    held = self.held[publisher_id] = _Waiting()
                held.add(sequence, item._replace(until_ns=until_ns, patient_until_ns=patient_until_ns))
                self.held_total += 1
                self.held_bytes += _size(item)
                if self.held_bytes > self.held_most_bytes:
                    self._release_all(publisher_id, touched, now_ns)
                elif until_ns <= now_ns:
                    self._release_overdue(publisher_id, touched, now_ns)
                return
        self._deliver_now(publisher_id, sequence, item, touched, now_ns)
        self._release_successors(publisher_id, touched, now_ns)

    def release(self, now_ns: int) -> set[Peer]:
        """Let go of messages that can wait for their predecessors no longer; called every few ms."""
        touched: set[Peer] = set()
        for publisher_id in list(self.held):
            self._release_overdue(publisher_id, touched, now_ns)
        return touched

    def shorten(self, topic: Topic, now_ns: int) -> None:
        """The topic's deadline has changed: nothing waits longer than it would have, nor than it may."""
        for held in self.held.values():
            for sequence, item in held.items.items():
                if item.topic is topic:
                    until_ns = min(item.until_ns, _held_until(item, now_ns))
                    held.items[sequence] = item._replace(until_ns=until_ns)

    def _deliver_now(
        self, publisher_id: int, sequence: int, item: Held, touched: set[Peer], now_ns: int
    ) -> None:
        topic = item.topic
        dispatch = self._dispatch
        if dispatch.is_new(topic, publisher_id, sequence, item.data, 0, item.came, now_ns):
            topic.delivered += 1
            dispatch.delivered += 1
            run = cut_run(1, item.data, 0, len(item.data), item.came)
            route = topic.deliver
            born_ns = granule_born_ns(item.born_ns, item.header.clock_shift_ns, route.granule_ns)
            dispatch.append(route, item.header, run, born_ns, touched, now_ns)
        elif topic.resuming:
            dispatch.repeat(topic, item.header, item.data, touched, now_ns)

    def _release_overdue(self, publisher_id: int, touched: set[Peer], now_ns: int) -> None:
        """Deliver what can wait no longer, and what waits before it."""
        held = self.held[publisher_id]
        if self._is_patient(publisher_id, held, now_ns):
            return
        last = max((sequence for sequence, item in held.items.items() if item.until_ns <= now_ns), default=0)
        while held.items and held.first <= last and not self._is_patient(publisher_id, held, now_ns):
            self._deliver_held(publisher_id, held, touched, now_ns)
        self._release_successors(publisher_id, touched, now_ns)

    def _is_patient(self, publisher_id: int, held: _Waiting, now_ns: int) -> bool:
        """The first that waits does so whatever its deadline: too many before it have not come."""
        item = held.items[held.first]
        if _missing(publisher_id, held.first, item) <= item.topic.tolerated:
            return False
        return self._is_cut_off or now_ns < max(item.patient_until_ns, self._rejoining_until_ns)

    def _release_all(self, publisher_id: int, touched: set[Peer], now_ns: int) -> None:
        """Too much waits: let go of a publisher's messages, whatever is missing before them."""
        held = self.held.pop(publisher_id)
        while held.items:
            self._deliver_held(publisher_id, held, touched, now_ns)

    def _deliver_held(self, publisher_id: int, held: _Waiting, touched: set[Peer], now_ns: int) -> None:
        sequence = held.first
        item = held.pop()
        self.held_bytes -= _size(item)
        self._deliver_now(publisher_id, sequence, item, touched, now_ns)

    def _release_successors(self, publisher_id: int, touched: set[Peer], now_ns: int) -> None:
        """Deliver held messages that have no gap before them any more."""
        held = self.held.get(publisher_id)
        if held is None:
            return
        while held.items:
            first = held.first
            if _missing(publisher_id, first, held.items[first]) > 0:
                return
            self._deliver_held(publisher_id, held, touched, now_ns)
        del self.held[publisher_id]


def _size(item: Held) -> int:
    return len(item.data) + RUN_OVERHEAD_BYTES


def _missing(publisher_id: int, sequence: int, item: Held) -> int:
    """How many messages before this one have not come."""
    history = item.topic.histories.get(publisher_id)
    # Forgotten if the topic's last subscriber left meanwhile and another one came.
    return 0 if history is None else sequence - history.highest - 1


def _held_until(item: Held, now_ns: int) -> int:
    deadline_ns = item.topic.deadline_ns
    # Nobody sends best effort again: what is missing is lost, or only a little late.
    is_best_effort = item.topic.qos.loss_tolerance is None
    allowed_ns = deadline_ns // 2 if is_best_effort else deadline_ns - _HOLD_MARGIN_NS
    born_ns = born_here_ns(item.born_ns, item.header.clock_shift_ns, now_ns)
    return min(born_ns + allowed_ns, now_ns + _HOLD_MOST_NS)
