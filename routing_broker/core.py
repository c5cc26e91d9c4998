"""The routing broker's rules: which edges get a message, by when, and what the backup must hold.

A routing broker serves the topics assigned to it, as primary or backup. It is liberal: whatever
an edge sends for a topic it serves, it dispatches to all interested edges of other LANs, whether
it is primary, backup or was either until a moment ago. Two routing brokers that dispatch the
same message for a moment cause duplicates, which the egress edges drop; they never cause loss.

The path of a data frame: `admit` cuts its body into runs, neighbouring messages with the same
route that were born in the same granule of time, and puts each run into the outboxes of its edges
with its deadline; the outboxes are the earliest-deadline-first queue (`overlay.outbox`), and the
shell writes them. A frame that turns out to be malformed raises before any of its messages has
had an effect.

Replication (FRAME, Table 3). Where a topic's bounds demand it, a run is also put into the outbox
of the topic's backup, with the deadline of Lemma 1, and followed by a `Copy`:

    dispatched   all its edges have acknowledged it
    replicated   it has gone out to the backup
    discard      dispatched and replicated: the backup is told to prune it
    cancelled    dispatched before it went out: it need not be replicated any more

*Dispatched* means acknowledged, not written: bytes in the socket of a process that is killed may
never arrive. A topic is spared copies because it is dispatched by its deadline (Proposition 1);
while an edge is overloaded nobody can count on that, and copies are made of everything for it but
best effort. When a primary is lost, `recover` admits what is left of its copies like new
messages; their deadlines follow from when they were born, so they are as urgent as they are old.

Messages without a route: the edges and this broker hear of assignments and subscribers at the
same time, so data may be faster than our own reading of the routes. An edge only sends what it
believes another LAN wants; if this broker does not know the topic or sees nobody who wants it,
the messages wait, bounded in bytes and time, and are admitted again when the routes are there.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le

from overlay.batch import (
    BATCH_HEADER_BYTES,
    BORN_OFFSET,
    LENGTH_WORD_OFFSET,
    MESSAGE_HEADER_BYTES,
    U32,
    BatchHeader,
    Passage,
    Run,
    check_messages,
    cut_run,
    decode_batch_header,
)
from overlay.bounds import NO_DELAYS, UNBOUNDED, Delays, needs_replication, replicate_within_ns
from overlay.delay import add_shifts
from overlay.errors import ProtocolError
from overlay.limits import (
    BACKUP_MESSAGES_PER_TOPIC,
    BACKUP_MIN_BYTES,
    UNROUTED_MAX_BYTES,
    UNROUTED_MAX_NS,
)
from overlay.outbox import Outbox, Ticket
from overlay.qos import TopicQos
from overlay.schedule import BUCKET_NS, UNKNOWN_BIRTH, Unsure, granule_born_ns
from overlay.shedding import crash_losses, keep_every, relieve
from overlay.trace import Event
from overlay.tracer import Tracer, reason_named, sampled_offsets, threshold_of
from overlay.urgency import deadline_ns, level_of, urgency
from routing_broker.backup import BackupBuffer, Kept, to_ranges
from routing_broker.mode import Mode
from routing_broker.model import (
    Copy,
    DropReason,
    Peer,
    ReplicaFrame,
    Route,
    RouterStatistics,
    Topic,
    Unrouted,
)

if TYPE_CHECKING:
    from mypy_extensions import i64

_NOBODY: Final = ""
"""The backup of a topic that has none yet."""
_SHARED_ROUTES_MAX: Final = 4_096
"""Routes remembered for sharing; forgetting them costs memory, nothing else."""


class RouterCore:
    """The synchronous heart of a routing broker."""

    def __init__(
        self, mode: Mode = Mode.FRAME, delays: Delays | None = None, tracer: Tracer | None = None
    ) -> None:
        self._tracer = tracer
        self._mode = mode
        self._by_deadline = mode.by_deadline
        self._coordinates = mode.coordinates
        self._delays = delays or NO_DELAYS
        self._least_ns: dict[str, int] = {}
        self._topics: dict[int, Topic] = {}
        self._peers: dict[str, Peer] = {}
        self._backups: dict[str, Peer] = {}
        self._routes: dict[object, Route] = {}
        self._settling: set[int] = set()
        """Topics whose deadline has changed while messages with the old one may wait."""
        self._unsure: dict[int, Unsure] = {}
        self._unrouted: dict[int, list[Unrouted]] = {}
        self._unrouted_bytes = 0
        self._undispatched: dict[Copy, None] = {}
        self._to_prune: dict[str, list[int]] = {}
        self._kept: dict[str, BackupBuffer] = {}
        self._dropped: Counter[str] = Counter()
        self._admitted = 0
        self._dispatched = 0
        self._replicated = 0
        self._recovered = 0
        self._pruned = 0
        self._cancelled = 0
        self._evicted = 0

    # Control: edges and topics

    def peer(self, edge: str, lan: str) -> Peer:
        """The peer for an edge broker; made when first heard of, from its topic or its connection."""
        peer = self._peers.get(edge)
        if peer is None:
            peer = self._peers[edge] = Peer(edge, lan, Outbox())
            if self._tracer is not None:
                peer.outbox.trace = self._tracer.link(edge)
        elif peer.lan != lan:
            peer.lan = lan
            self._forget_routes()
        return peer

    def remove_peer(self, edge: str, now_ns: int = 0) -> None:
        """The edge broker is gone for good."""
        peer = self._peers.pop(edge, None)
        if peer is not None:
            dropped, tickets = peer.outbox.discard(now_ns)
            self._dropped[DropReason.EDGE_GONE] += dropped
            self.acknowledged(tickets)
            self._forget_routes()

    @property
    def peers(self) -> Mapping[str, Peer]:
        """All edge brokers known."""
        return self._peers

    @property
    def topics(self) -> Mapping[int, Topic]:
        """All topics served, by id."""
        return self._topics

    def set_topic(
        self,
        topic_id: int,
        name: str,
        qos: TopicQos,
        subscribers: Mapping[str, str],
        now_ns: int,
        backup: str | None = None,
        primary: str | None = None,
    ) -> set[Peer]:
        """Serve a topic with these subscribing edges (and their LANs).

        `backup` is given if this broker is the topic's primary, `primary` if another one is. Returns
        the peers that got something now: messages that had waited for this, or copies for a new backup.
        """
        for edge, lan in subscribers.items():
            self.peer(edge, lan)
        old = self._topics.get(topic_id)
        if qos.loss_tolerance is None and self._mode.selective:
            backup = None
        elif backup is None and primary is None:
            # Copies wait for a backup to come: what is accepted until then must not be missing at it.
            backup = _NOBODY
        replicates = backup is not None and self._replicates(qos, subscribers)
        topic = Topic(topic_id, name, qos, dict(subscribers), backup, replicates, primary)
        if topic == old:
            return set()
        if old is not None:
            topic.floor_ns, topic.floor_level = old.floor_ns, old.floor_level
            if deadline_ns(old.qos) != deadline_ns(qos):
                # What waits was given the old deadline, and must not be overtaken by what is younger.
                topic.floor_ns = max(topic.floor_ns, now_ns + deadline_ns(old.qos))
                topic.floor_level = max(topic.floor_level, level_of(urgency(old.qos)))
                self._settling.add(topic_id)
        self._topics[topic_id] = topic
        if self._tracer is not None:
            self._tracer.define_topic(topic_id, name, qos)
        self._forget_routes_of(topic_id)
        self._resize_buffers()
        touched: set[Peer] = set()
        if old is not None and topic.backup and topic.backup != old.backup:
            self._change_backup(topic_id, topic.backup, touched, now_ns)
        if old is not None and old.primary is not None and old.primary != primary:
            # It serves the topic no longer, and may not reach all edges: copies go before what comes next.
            self._dispatch_left(old.primary, touched, now_ns)
        waiting = self._unrouted.pop(topic_id, [])
        still = [item for item in waiting if not self._release(item, topic_id, touched, now_ns)]
        if still:
            self._unrouted[topic_id] = still
        return touched

    def set_least_delays(self, least_ns: Mapping[str, int]) -> None:
        """How long messages to these edges take at least, as proven: it may spare or demand copies."""
        self._least_ns = dict(least_ns)
        for topic in self._topics.values():
            replicates = topic.backup is not None and self._replicates(topic.qos, topic.subscribers)
            if replicates != topic.replicates:
                topic.replicates = replicates
                self._forget_routes_of(topic.topic_id)

    def settle(self) -> bool:
        """Let changed deadlines count where no older messages wait; says whether some still do.

        To be called every few milliseconds, when links have been written.
        """
        for topic_id in list(self._settling):
            topic = self._topics.get(topic_id)
            if topic is not None:
                peers = (self._peers.get(edge) for edge in topic.subscribers)
                if any(peer is not None and peer.outbox.has_waiting for peer in peers):
                    continue
                topic.floor_ns = topic.floor_level = 0
                self._forget_routes_of(topic_id)
            self._settling.discard(topic_id)
        return bool(self._settling)

    def remove_topic(self, topic_id: int) -> None:
        """Serve a topic no longer."""
        if self._topics.pop(topic_id, None) is not None:
            self._forget_routes_of(topic_id)

    def expire(self, now_ns: int) -> None:
        """Give up on messages whose topic has had no routes for too long; called about every second."""
        for topic_id in list(self._unrouted):
            waiting = self._unrouted[topic_id]
            kept = [item for item in waiting if now_ns - item.since_ns <= UNROUTED_MAX_NS]
            for item in waiting[: len(waiting) - len(kept)]:
                self._unrouted_bytes -= len(item.run.data)
                self._drop_unrouted(item.run, now_ns)
            if kept:
                self._unrouted[topic_id] = kept
            else:
                del self._unrouted[topic_id]

    # Data

    def admit(
        self, source: Peer, body: bytes, clock_shift_ns: int, now_ns: int, came: Passage | None = None
    ) -> tuple[int, set[Peer]]:
        """Take the body of a data frame from an edge: cut it into runs, queue them for their edges.

        `clock_shift_ns` is the link's. `came` is of a frame that came earlier, as a copy. Returns the
        number of messages and the peers that got some.
        """
        header = decode_batch_header(body)
        sampled = check_messages(body, header.messages, threshold_of(self._tracer))
        onward = header.shifted(add_shifts(header.clock_shift_ns, clock_shift_ns))
        if sampled is not None and came is None and self._tracer is not None:
            came = self._tracer.admit(
                sampled, source.name, onward.clock_shift_ns, now_ns, header.sent_ns, clock_shift_ns
            )
        routes = source.routes
        touched: set[Peer] = set()
        run_route: Route | None = None
        run_start: i64 = BATCH_HEADER_BYTES
        run_messages: i64 = 0
        run_topic: i64 = 0
        run_born_ns: i64 = 0
        granule_start_ns: i64 = 0
        granule_end_ns: i64 = 0
        end: i64 = BATCH_HEADER_BYTES
        for _ in range(header.messages):
            start = end
            topic_id: i64 = read_i64_le(body, start)
            topic_id &= U32
            stamp_ns: i64 = read_i64_le(body, start + BORN_OFFSET)
            length: i64 = read_i64_le(body, start + LENGTH_WORD_OFFSET) >> 32
            end = start + MESSAGE_HEADER_BYTES + (length & U32)
            route = routes.get(topic_id) or self._route(source, topic_id)
            differs = route is not run_route or (route is None and topic_id != run_topic)
            if differs or stamp_ns >= granule_end_ns or stamp_ns < granule_start_ns:
                granule_ns: i64 = route.granule_ns if route is not None else BUCKET_NS
                granule_start_ns = stamp_ns & -granule_ns
                granule_end_ns = granule_start_ns + granule_ns
                born_ns: i64 = granule_born_ns(stamp_ns, onward.clock_shift_ns, granule_ns)
                if differs or born_ns != run_born_ns:
                    if run_messages:
                        run = cut_run(run_messages, body, run_start, start, came)
                        if run_route is None:
                            self._hold(Unrouted(source, header, run, clock_shift_ns, now_ns), run_topic)
                        else:
                            self._schedule(run_route, onward, run, run_born_ns, touched, now_ns)
                    run_route = route
                    run_start = start
                    run_messages = 0
                    run_topic = topic_id
                    run_born_ns = born_ns
            run_messages += 1
        if run_messages:
            run = cut_run(run_messages, body, run_start, end, came)
            if run_route is None:
                self._hold(Unrouted(source, header, run, clock_shift_ns, now_ns), run_topic)
            else:
                self._schedule(run_route, onward, run, run_born_ns, touched, now_ns)
        self._admitted += header.messages
        return header.messages, touched

    def statistics(self) -> RouterStatistics:
        """Counts since the broker started."""
        dropped = self._dropped.copy()
        return RouterStatistics(
            topics=len(self._topics),
            messages_admitted=self._admitted,
            messages_dispatched=self._dispatched,
            messages_replicated=self._replicated,
            messages_recovered=self._recovered,
            copies_pruned=self._pruned,
            copies_cancelled=self._cancelled,
            copies_undispatched=len(self._undispatched),
            copies_kept=sum(len(buffer) for buffer in self._kept.values()),
            copies_evicted=self._evicted + sum(buffer.evicted for buffer in self._kept.values()),
            messages_unrouted_waiting=sum(
                item.run.messages for waiting in self._unrouted.values() for item in waiting
            ),
            dropped=dict(dropped),
        )

    def validate(self) -> None:
        """Assert the invariants; tests call this after every step."""
        assert self._unrouted_bytes == sum(
            len(item.run.data) for waiting in self._unrouted.values() for item in waiting
        )
        assert self._unrouted_bytes <= UNROUTED_MAX_BYTES
        assert all(self._unrouted.values())
        for copy in self._undispatched:
            assert copy.pending > 0 and not copy.cancelled
            assert copy.at is None or copy.at in self._backups
            assert copy.replica is None or copy.replica.backup == copy.at
        for buffer in self._kept.values():
            buffer.validate()
        for peer in (*self._peers.values(), *self._backups.values()):
            peer.outbox.validate()
            for topic_id, route in peer.routes.items():
                expected = self._destinations(peer.lan, self._topics[topic_id])
                assert tuple(other.name for other in route.peers) == expected

    # Replication: as primary

    def backup_up(self, router: str, outbox: Outbox, now_ns: int) -> set[Peer]:
        """The link to a routing broker is up: copies may go there. Returns peers with new data."""
        outbox.on_sent = lambda number, tickets: self._replica_sent(router, number, tickets)
        self._backups[router] = Peer(router, "", outbox)
        if self._tracer is not None:
            outbox.trace = self._tracer.link(router, int(Event.REPLICATED))
        self._kept[router] = self._new_buffer()
        touched: set[Peer] = set()
        for copy in self._undispatched:
            if copy.backup == router:
                self._replicate(copy, touched, now_ns)
        return touched

    def backup_down(self, router: str) -> None:
        """The link to a routing broker is down: copies wait in the undispatched runs."""
        peer = self._backups.pop(router, None)
        if peer is not None:
            peer.outbox.discard()
            self._to_prune.pop(router, None)
            for copy in self._undispatched:
                if copy.at == router:
                    copy.at = copy.replica = None

    def acknowledged(self, tickets: Iterable[Ticket]) -> None:
        """An edge has acknowledged these runs, or will never get them."""
        for ticket in tickets:
            assert isinstance(ticket, Copy)
            ticket.pending -= 1
            if ticket.pending == 0:
                self._copy_dispatched(ticket)

    def take_prunes(self) -> dict[str, list[tuple[int, int]]]:
        """What backups may prune now, as ranges of frame numbers by backup."""
        prunes = {router: to_ranges(numbers) for router, numbers in self._to_prune.items()}
        self._to_prune.clear()
        return prunes

    # Replication: as backup

    def keep(self, router: str, number: int, body: bytes, clock_shift_ns: int, now_ns: int = 0) -> int:
        """A primary sends copies in frame `number`; returns how many."""
        header = decode_batch_header(body)
        came: Passage | None = None
        if self._tracer is not None:
            sampled = sampled_offsets(body, BATCH_HEADER_BYTES, self._tracer.threshold)
            if sampled:
                shift_ns = add_shifts(header.clock_shift_ns, clock_shift_ns)
                came = self._tracer.admit(sampled, router, shift_ns, now_ns, header.sent_ns, clock_shift_ns)
                self._tracer.frame(int(Event.RECEIVED), body, came, 0)
        self._kept[router].keep(number, Kept(body, clock_shift_ns, header.messages, came))
        return header.messages

    def prune(self, router: str, ranges: Iterable[tuple[int, int]], now_ns: int = 0) -> None:
        """A primary has dispatched these frames of copies."""
        for kept in self._kept[router].prune(ranges):
            if kept.came is not None and self._tracer is not None:
                self._tracer.frame(int(Event.DISCARDED), kept.body, kept.came, now_ns)

    def recover(self, router: str, now_ns: int) -> set[Peer]:
        """A primary is lost: dispatch what is left of its copies. Returns the peers that got some."""
        buffer = self._kept.pop(router, None)
        touched: set[Peer] = set()
        if buffer is None:
            return touched
        self._evicted += buffer.evicted
        self._dispatch_copies(buffer, touched, now_ns)
        return touched

    def _dispatch_left(self, router: str, touched: set[Peer], now_ns: int) -> None:
        left = self._kept.get(router)
        if left is not None and len(left):
            self._dispatch_copies(left, touched, now_ns)

    def _dispatch_copies(self, buffer: BackupBuffer, touched: set[Peer], now_ns: int) -> None:
        nowhere = Peer("", "", Outbox())
        for kept in buffer.recover():
            # The LAN of the ingress edge is not known: its edges get the messages too and drop them.
            with suppress(ProtocolError):  # one frame nobody can read must not cost the others
                count, reached = self.admit(nowhere, kept.body, kept.clock_shift_ns, now_ns, kept.came)
                self._recovered += count
                touched |= reached

    # Details

    def _schedule(
        self, route: Route, header: BatchHeader, run: Run, born_ns: int, touched: set[Peer], now_ns: int
    ) -> None:
        """Queue a run for its edges, and for the backup if it must be replicated.

        `born_ns` is the `granule_born_ns` of its messages: never later than they really were born.
        """
        if route.primary is not None:
            # An edge has turned to us, so the primary is lost: what it left comes first.
            self._dispatch_left(route.primary, touched, now_ns)
        known = born_ns != UNKNOWN_BIRTH
        if not known:
            born_ns = now_ns
        deadline = 0
        if self._by_deadline:
            deadline = born_ns + route.deadline_ns
            if not known:
                route.unsure.until_ns = deadline = max(deadline, route.unsure.until_ns)
        copy: Copy | None = None
        if route.backup is not None and (
            route.replicates or (route.backup != _NOBODY and _is_overloaded(route, now_ns))
        ):
            copy = Copy(header, run, len(route.peers), route.backup, born_ns + route.replicate_ns)
            self._undispatched[copy] = None
            self._replicate(copy, touched, now_ns)
        for peer in route.peers:
            sent = relieve(peer.outbox, run, route.keep_every, self._dropped, now_ns)
            if sent is None:
                if copy is not None:
                    self.acknowledged((copy,))
                continue
            dropped = peer.outbox.append(
                deadline,
                header.urgency,
                header.origin,
                header.clock_shift_ns,
                sent,
                now_ns,
                copy,
                route.level,
                route.unsure.until_ns,
            )
            if dropped:
                self._dropped[DropReason.OUTBOX_FULL] += dropped
                self.acknowledged(peer.outbox.take_lost_tickets())
            touched.add(peer)
            self._dispatched += sent.messages

    def _replicate(self, copy: Copy, touched: set[Peer], now_ns: int) -> None:
        """Put a copy into the outbox of its backup; if it is at another one, that one may prune it then."""
        backup = self._backups.get(copy.backup)
        if backup is None or copy.at == copy.backup:
            return  # when it is up, what is not dispatched by then is replicated
        self._let_go_of_replica(copy)
        copy.at = copy.backup
        header = copy.header
        deadline = copy.replicate_by_ns if self._by_deadline else 0
        dropped = backup.outbox.append(
            deadline, header.urgency, header.origin, header.clock_shift_ns, copy.run, now_ns, copy
        )
        if dropped:
            for lost in backup.outbox.take_lost_tickets():
                assert isinstance(lost, Copy)
                lost.at = None
        touched.add(backup)

    def _change_backup(self, topic_id: int, backup: str, touched: set[Peer], now_ns: int) -> None:
        """Bring a topic's new backup up to date: copies of what is not dispatched go there."""
        for copy in self._undispatched:
            # A run may hold other topics too: it goes where all of them are backed up.
            topics = _topics_of(copy.run)
            if topic_id in topics and all(
                (topic := self._topics.get(each)) is not None and topic.backup == backup for each in topics
            ):
                copy.backup = backup
                self._replicate(copy, touched, now_ns)

    def _replica_sent(self, router: str, number: int, tickets: Iterable[Ticket]) -> None:
        copies = [ticket for ticket in tickets if isinstance(ticket, Copy)]
        # What has been dispatched, or has gone to another backup meanwhile, need not be kept.
        waiting = [copy for copy in copies if copy.pending and copy.at == router]
        frame = ReplicaFrame(router, number, len(waiting))
        for copy in waiting:
            self._let_go_of_replica(copy)
            copy.replica = frame
        self._replicated += sum(copy.run.messages for copy in copies)
        if not waiting and self._coordinates:
            self._to_prune.setdefault(router, []).append(number)

    def _copy_dispatched(self, copy: Copy) -> None:
        del self._undispatched[copy]
        if not self._coordinates:
            return
        if copy.replica is None:
            copy.cancelled = True
            self._cancelled += copy.run.messages
            return
        self._pruned += copy.run.messages
        self._let_go_of_replica(copy)

    def _let_go_of_replica(self, copy: Copy) -> None:
        """The backup that has the copy need not keep it."""
        frame, copy.replica = copy.replica, None
        if frame is None:
            return
        frame.outstanding -= 1
        if frame.outstanding == 0 and self._coordinates and frame.backup in self._backups:
            self._to_prune.setdefault(frame.backup, []).append(frame.number)

    def _replicates(self, qos: TopicQos, subscribers: Iterable[str]) -> bool:
        """Copies of the topic's messages are needed also while deadlines are met (Proposition 1)."""
        delays = self._delays
        retained = self._mode.retained(qos, delays)
        proven_ns = min((self._least_ns.get(edge, 0) for edge in subscribers), default=0)
        if proven_ns > delays.primary_to_subscriber_ns:
            delays = replace(delays, primary_to_subscriber_ns=proven_ns)
        return not self._mode.selective or needs_replication(retained, delays)

    def _new_buffer(self) -> BackupBuffer:
        capacity_messages = max(1, len(self._topics)) * BACKUP_MESSAGES_PER_TOPIC
        return BackupBuffer(capacity_messages, BACKUP_MIN_BYTES if self._coordinates else 0)

    def _resize_buffers(self) -> None:
        for buffer in self._kept.values():
            buffer.capacity_messages = max(1, len(self._topics)) * BACKUP_MESSAGES_PER_TOPIC

    # Routes

    def _route(self, source: Peer, topic_id: int) -> Route | None:
        """The route of a topic's messages from this peer; None while nobody is known to want them."""
        topic = self._topics.get(topic_id)
        edges = self._destinations(source.lan, topic) if topic is not None else ()
        if topic is None or not edges:
            return None
        qos = topic.qos
        relative_ns = deadline_ns(qos)
        every = keep_every(qos, self._delays)
        replicate_ns = self._replicate_within_ns(qos) if topic.backup is not None else 0
        alone = topic_id if topic.floor_ns else None  # no other topic has to wait with it
        key = (edges, relative_ns, every, topic.backup, topic.replicates, topic.primary, replicate_ns, alone)
        route = self._routes.get(key)
        if route is None:
            peers = tuple(self.peer(edge, topic.subscribers[edge]) for edge in edges)
            unsure = self._unsure.setdefault(relative_ns, Unsure())
            if topic.floor_ns:
                unsure = Unsure(unsure.until_ns)
            route = Route(peers, relative_ns, every, topic, replicate_ns, unsure)
            if len(self._routes) >= _SHARED_ROUTES_MAX:
                self._routes.clear()
            self._routes[key] = route
        if topic.floor_ns:
            route.unsure.until_ns = max(route.unsure.until_ns, topic.floor_ns)
        source.routes[topic_id] = route
        return route

    def _replicate_within_ns(self, qos: TopicQos) -> int:
        """Lemma 1 with the part of the tolerance that is a crash's; the rest is for shedding."""
        if qos.loss_tolerance is not None:
            qos = replace(qos, loss_tolerance=crash_losses(qos, self._delays))
        return min(replicate_within_ns(qos, self._delays), UNBOUNDED)

    @staticmethod
    def _destinations(source_lan: str, topic: Topic) -> tuple[str, ...]:
        # The source delivers inside its own LAN itself.
        return tuple(sorted(edge for edge, lan in topic.subscribers.items() if lan != source_lan))

    def _forget_routes(self) -> None:
        self._routes.clear()
        for peer in self._peers.values():
            peer.routes.clear()

    def _forget_routes_of(self, topic_id: int) -> None:
        for peer in self._peers.values():
            peer.routes.pop(topic_id, None)

    def _release(self, item: Unrouted, topic_id: int, touched: set[Peer], now_ns: int) -> bool:
        """Queue what had waited for a route; False if there is still none."""
        route = self._route(item.source, topic_id)
        if route is None:
            return False
        self._unrouted_bytes -= len(item.run.data)
        onward = item.header.shifted(add_shifts(item.header.clock_shift_ns, item.clock_shift_ns))
        stamp_ns = read_i64_le(item.run.data, BORN_OFFSET)
        born_ns = granule_born_ns(stamp_ns, onward.clock_shift_ns, route.granule_ns)
        self._schedule(route, onward, item.run, born_ns, touched, now_ns)
        return True

    def _drop_unrouted(self, run: Run, now_ns: int) -> None:
        self._dropped[DropReason.UNROUTED] += run.messages
        if self._tracer is not None:
            self._tracer.run(int(Event.DROPPED), reason_named(DropReason.UNROUTED.name), run, now_ns)

    def _hold(self, item: Unrouted, topic_id: int) -> None:
        if self._unrouted_bytes + len(item.run.data) > UNROUTED_MAX_BYTES:
            self._drop_unrouted(item.run, item.since_ns)
            return
        if self._tracer is not None:
            self._tracer.received(item.run)
        self._unrouted_bytes += len(item.run.data)
        self._unrouted.setdefault(topic_id, []).append(item)


def _is_overloaded(route: Route, now_ns: int) -> bool:
    return any(peer.outbox.is_overloaded(now_ns) for peer in route.peers)


def _topics_of(run: Run) -> set[int]:
    topics: set[int] = set()
    offset: i64 = 0
    while offset < len(run.data):
        topic_id: i64 = read_i64_le(run.data, offset)
        length: i64 = read_i64_le(run.data, offset + LENGTH_WORD_OFFSET) >> 32
        topics.add(topic_id & U32)
        offset += MESSAGE_HEADER_BYTES + (length & U32)
    return topics
