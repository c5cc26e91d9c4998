"""Queueing runs of messages for peers, and counting what goes no further.

The last step of every message at an edge, whichever way it came: a run is appended to the outboxes
of its route, less of it for those that are overloaded, and what is dropped is counted by reason.
"""

from collections import Counter
from heapq import heappop, heappush

from librt.strings import read_i64_le

from edge_broker.model import DropReason, Peer, Route, Topic
from overlay.batch import BORN_OFFSET, BatchHeader, Passage, Run
from overlay.history import History, Verdict
from overlay.outbox import Ticket
from overlay.schedule import UNKNOWN_BIRTH, granule_born_ns
from overlay.shedding import relieve
from overlay.tracer import Tracer, reason_named


class Reserve:
    """A run sent to edges directly, which a routing broker gets if they do not acknowledge it in time."""

    __slots__ = ("deadline_ns", "router", "run", "tickets", "urgency")

    def __init__(self, deadline_ns: int, urgency: int, run: Run, router: Peer, tickets: list[Ticket]) -> None:
        self.deadline_ns = deadline_ns
        self.urgency = urgency
        self.run = run
        self.router = router
        self.tickets = tickets
        """One for each edge; cancelled once it has acknowledged."""


class Dispatch:
    """What an edge sends and drops."""

    def __init__(self, origin: int, tracer: Tracer | None) -> None:
        self.origin = origin
        self._tracer = tracer
        self.dropped: Counter[str] = Counter()
        """Messages by reason."""
        self.from_reserve = 0
        """Messages sent to a routing broker because edges had not acknowledged them in time."""
        self._reserves: list[tuple[int, int, Reserve]] = []
        """A heap by due time; the number in between keeps the order of those due at once."""
        self._reserved = 0
        self.repeated = 0
        """Messages given again to subscribers that came from another edge."""
        self.delivered = 0
        """Messages given to local subscribers, each once however many there are."""

    def trace_link(self, peer: Peer) -> None:
        """What is sent to this peer is to be traced, if anything is."""
        if self._tracer is not None:
            peer.outbox.trace = self._tracer.link(peer.bare_name)

    def drop(self, reason: DropReason, data: bytes, offset: int, came: Passage | None, now_ns: int) -> None:
        """Count the message at this offset, which goes no further."""
        self.dropped[reason] += 1
        if came is not None and self._tracer is not None:
            self._tracer.rejected(reason_named(reason.name), data, offset, came, now_ns)

    def is_new(
        self,
        topic: Topic,
        publisher_id: int,
        sequence: int,
        data: bytes,
        offset: int,
        came: Passage | None,
        now_ns: int,
    ) -> bool:
        """Local subscribers should get this message; if not, it is counted."""
        history = topic.histories.get(publisher_id)
        if history is None:
            history = topic.histories[publisher_id] = History()
        verdict = history.judge(sequence)
        if verdict is Verdict.NEW:
            return True
        reason = DropReason.LATE if verdict is Verdict.LATE else DropReason.DUPLICATE
        self.drop(reason, data, offset, came, now_ns)
        return False

    def send(self, route: Route, run: Run, born_ns: int, touched: set[Peer], now_ns: int) -> None:
        """Queue a run that starts its journey here; its messages are stamped with our clock."""
        self.append(route, BatchHeader(route.urgency, self.origin, 0, 0), run, born_ns, touched, now_ns)

    @property
    def has_reserves(self) -> bool:
        """Some messages may have to be sent on another path."""
        return bool(self._reserves)

    def take_overdue(self, now_ns: int) -> list[Reserve]:
        """What edges should have acknowledged by now."""
        reserves = self._reserves
        overdue: list[Reserve] = []
        while reserves and reserves[0][0] <= now_ns:
            late = heappop(reserves)[2]
            if not all(ticket.cancelled for ticket in late.tickets):
                self.from_reserve += late.run.messages
                overdue.append(late)
        return overdue

    def repeat(
        self, topic: Topic, header: BatchHeader, message: bytes, touched: set[Peer], now_ns: int
    ) -> None:
        """Give a message that was delivered here before to those who came later and resume."""
        stamp_ns = read_i64_le(message, BORN_OFFSET)
        born_ns = granule_born_ns(stamp_ns, header.clock_shift_ns, topic.deliver.granule_ns)
        deadline = (now_ns if born_ns == UNKNOWN_BIRTH else born_ns) + topic.deadline_ns
        for client, until_ns in topic.resuming.items():
            if now_ns < until_ns:
                dropped = client.outbox.append(
                    deadline, header.urgency, header.origin, header.clock_shift_ns, Run(1, message), now_ns
                )
                self.dropped[DropReason.OUTBOX_FULL] += dropped
                self.repeated += 1
                touched.add(client)

    def repeat_own(self, topic: Topic, message: bytes, touched: set[Peer], now_ns: int) -> None:
        """The same for a message of a local publisher, stamped with our clock."""
        self.repeat(topic, BatchHeader(topic.requirements[1], self.origin, 0, 0), message, touched, now_ns)

    def append(
        self, route: Route, header: BatchHeader, run: Run, born_ns: int, touched: set[Peer], now_ns: int
    ) -> None:
        """Queue a run for all peers of a route, or less of it for those that are overloaded.

        `born_ns` is the `granule_born_ns` of its messages.
        """
        if born_ns == UNKNOWN_BIRTH:
            deadline = route.unsure.until_ns = now_ns + route.deadline_ns
        else:
            deadline = born_ns + route.deadline_ns
        least_ns = route.unsure.until_ns
        if run.came is not None and self._tracer is not None and not route.peers:
            self._tracer.received(run)
        tickets: list[Ticket] = []
        for peer in route.peers:
            sent = relieve(peer.outbox, run, route.keep_every, self.dropped, now_ns)
            if sent is None:
                continue
            ticket = None
            if route.reserve is not None and peer.is_direct:
                ticket = Ticket()
                tickets.append(ticket)
            dropped = peer.outbox.append(
                deadline,
                header.urgency,
                header.origin,
                header.clock_shift_ns,
                sent,
                now_ns,
                ticket,
                route.level,
                least_ns,
            )
            if dropped:
                self.dropped[DropReason.OUTBOX_FULL] += dropped
            touched.add(peer)
        if tickets and route.reserve is not None:
            due_ns = (read_i64_le(run.data, BORN_OFFSET) or now_ns) + route.reserve_after_ns
            self._reserved += 1
            reserve = Reserve(max(deadline, least_ns), header.urgency, run, route.reserve, tickets)
            heappush(self._reserves, (due_ns, self._reserved, reserve))
