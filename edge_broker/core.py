"""The edge broker's rules: who in the LAN gets a message, and whether it leaves the LAN.

For each topic with endpoints here, the edge knows from ZooKeeper which LANs and edges have
subscribers, and which routing brokers are the topic's primary and backup. A message from a
local publisher goes to

    local subscribers           always
    other edges of this LAN     that have subscribers
    one routing broker          only if another LAN has subscribers: the primary if its link is up,
                                else the backup; the *target* of the topic

A topic without interest in another LAN never leaves this one. When the target changes, for
whatever reason, everything retained is sent to the new target, in order and before newer
messages. What the old target had already delivered arrives twice and is dropped at the egress;
nothing is lost and nothing overtakes.

A message from a routing broker or another edge of the LAN goes to local subscribers only, and
only if it is new (`overlay.history`).

The path of a data frame: `admit_from_client` or `admit_from_broker` checks the whole body,
cuts it into runs that go to the same places, and appends the runs to outboxes. The peers that
got something are returned, so that the shell writes each link once per loop turn.

Time: a client's messages are stamped with the client's clock. The ingress edge brings the stamps
to its own clock (`overlay.delay`), so that on the WAN all messages of one edge share one clock
and can share frames. Outboxes are served by deadline, which is when a message was born plus what
its topic allows.

Order: when routing brokers change, copies of messages race on two ways. For a while after such a
disturbance a message whose predecessor is missing is held back, as long as its own deadline
allows; at other times a gap is a loss and nothing waits for it.

When a topic's deadline changes, messages that wait were given the old one. Until none of them
waits any more, new ones get no earlier deadline than the latest of those (`floor_ns`), on routes
of the topic's own, so that no other topic has to wait with it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le

from edge_broker.frames import born_here_ns, on_our_clock, publishers_of
from edge_broker.model import (
    DropReason,
    EdgeStatistics,
    Held,
    Peer,
    Publisher,
    Route,
    Topic,
    topic_statistics,
)
from edge_broker.resending import Resending
from overlay.batch import (
    BATCH_HEADER_BYTES,
    BORN_OFFSET,
    LENGTH_WORD_OFFSET,
    MESSAGE_HEADER_BYTES,
    PUBLISHER_OFFSET,
    SEQUENCE_OFFSET,
    U32,
    BatchHeader,
    Passage,
    Run,
    check_messages,
    cut_run,
    decode_batch_header,
)
from overlay.bounds import Delays, retention_without_replication
from overlay.delay import add_shifts
from overlay.errors import CloseReason, ProtocolError
from overlay.history import History, Verdict
from overlay.limits import ENDPOINT_ID_MAX, MILLISECOND_NS, SECOND_NS, UNSENT_MAX_MESSAGES
from overlay.messages import UNKNOWN_CLOCK_SHIFT, EndpointKind, Role
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from overlay.retention import Retention
from overlay.schedule import BUCKET_SHIFT
from overlay.shedding import Hop
from overlay.trace import Reason
from overlay.tracer import Tracer, reason_named
from overlay.urgency import Unsure

if TYPE_CHECKING:
    from mypy_extensions import i64

_DISTURBED_FOR_NS: Final = 1 * SECOND_NS
"""How long after a change of routing brokers messages may come out of order."""
_HOLD_MOST_NS: Final = 200 * MILLISECOND_NS
"""Longest a message waits for its predecessor, however much time its topic allows."""
_HOLD_MARGIN_NS: Final = 5 * MILLISECOND_NS
"""A held message is let go this long before its deadline."""
_RETENTION_LINGER_NS: Final = 10 * SECOND_NS
"""How long the last messages of a publisher that left can still be sent again."""
_UNSENT_LINGER_NS: Final = 60 * SECOND_NS
"""How long its unsent messages wait for a routing broker."""
_TOPICS_AT_A_TIME: Final = 500
"""Topics that are looked after before messages are: a millisecond or two of work."""
_SHARED_ROUTES_MAX: Final = 4_096
"""Routes remembered for sharing; forgetting them costs memory, nothing else."""
_HISTORY_LINGER_NS: Final = 2 * _UNSENT_LINGER_NS
"""How long an egress remembers a publisher that left: its edge may still send its messages again."""


class EdgeCore:
    """The synchronous heart of an edge broker."""

    def __init__(
        self,
        edge: str,
        lan: str,
        origin: int,
        retain_more: Delays | None = None,
        delays: Delays | None = None,
        unsent_most: int = UNSENT_MAX_MESSAGES,
        tracer: Tracer | None = None,
    ) -> None:
        """With `retain_more`, keep one message more where that spares replication (FRAME+)."""
        self._tracer = tracer
        self._unsent_most = unsent_most
        self._edge = edge
        self._retain_more = retain_more
        self._delays = delays or Delays(0, 0, 0, 0)
        self._held: dict[int, dict[int, Held]] = {}
        self._held_total = 0
        self._settling: dict[Topic, None] = {}
        """Topics whose deadline has changed while messages with the old one may wait."""
        self._disturbed_until_ns = 0
        self._lan = lan
        self._origin = origin
        self._topics: dict[int, Topic] = {}
        self._clients: dict[str, Peer] = {}
        self._routers_up: dict[str, Peer] = {}
        self._lan_edges: dict[str, Peer] = {}
        self._routes: dict[object, Route] = {}
        self._unsure: dict[int, Unsure] = {}
        self._dropped: Counter[str] = Counter()
        self._accepted = 0
        self._delivered = 0
        self._resent = 0
        self._target_changes = 0

    # Control: clients and endpoints

    @property
    def topics(self) -> Mapping[int, Topic]:
        """Topics with endpoints here, by id."""
        return self._topics

    @property
    def routers_up(self) -> Collection[str]:
        """Names of the routing brokers whose link is up."""
        return self._routers_up.keys()

    def client(self, name: str, outbox: Outbox) -> Peer:
        """A client connected for the first time."""
        peer = self._clients[name] = Peer(name, outbox, Hop.EGRESS)
        self._trace_link(peer)
        return peer

    def remove_client(self, client: Peer, now_ns: int = 0) -> None:
        """A client is gone, with what waits for it. Its endpoints must be gone already."""
        assert not client.publishers and not client.subscriptions
        client.outbox.discard(now_ns, int(Reason.NO_SUBSCRIBER))
        del self._clients[client.name]

    def ensure_topic(self, topic_id: int, name: str, qos: TopicQos) -> Topic:
        """The topic, made if this edge did not have it."""
        topic = self._topics.get(topic_id)
        if topic is None:
            topic = self._topics[topic_id] = Topic(topic_id, name, qos, self._delays)
            if self._tracer is not None:
                self._tracer.define_topic(topic_id, name, qos)
        return topic

    def add_endpoint(self, client: Peer, kind: EndpointKind, endpoint: int, topic: Topic) -> None:
        """A client declares an endpoint, perhaps again after a reconnect.

        Raises ProtocolError if the id is out of range or the client uses it for another one already.
        """
        if not 0 <= endpoint <= ENDPOINT_ID_MAX:
            raise ProtocolError(
                CloseReason.BAD_MESSAGE,
                f"endpoint {endpoint:016x} is above {ENDPOINT_ID_MAX:016x}: choose ids of 63 bits",
            )
        declared = client.publishers.get(endpoint)
        before = declared.topic if declared is not None else client.subscriptions.get(endpoint)
        if before is not None and (
            before is not topic or (declared is None) is (kind is EndpointKind.PUBLISHER)
        ):
            raise ProtocolError(
                CloseReason.BAD_MESSAGE,
                f"endpoint {endpoint:016x} is declared for topic {before.name} already: give each its own id",
            )
        if kind is EndpointKind.PUBLISHER:
            publisher = topic.publishers.get(endpoint)
            if publisher is None:
                retention = Retention(self._retention_of(topic), self._unsent_most)
                publisher = Publisher(endpoint, topic, client, retention)
                topic.publishers[endpoint] = publisher
            elif publisher.client is not client:
                if publisher.client is not None:
                    del publisher.client.publishers[endpoint]
                publisher.client = client
            client.publishers[endpoint] = publisher
        elif endpoint not in client.subscriptions:
            client.subscriptions[endpoint] = topic
            if not topic.subscribers:
                topic.histories.clear()  # what passed while nobody subscribed is not a loss
            topic.subscribers[client] += 1
            self._update_routes(topic)

    def remove_endpoint(self, client: Peer, endpoint: int, now_ns: int) -> tuple[Topic, EndpointKind] | None:
        """An endpoint is gone; returns what it was, None if it was not there.

        What a publisher sent just before it left stays retained until `expire` lets go of it.
        """
        publisher = client.publishers.pop(endpoint, None)
        if publisher is not None:
            publisher.client = None
            publisher.departed_ns = now_ns
            return publisher.topic, EndpointKind.PUBLISHER
        topic = client.subscriptions.pop(endpoint, None)
        if topic is None:
            return None
        topic.subscribers[client] -= 1
        if topic.subscribers[client] == 0:
            del topic.subscribers[client]
            self._update_routes(topic)
        return topic, EndpointKind.SUBSCRIBER

    def expire(self, now_ns: int) -> list[Topic]:
        """Forget publishers that left a while ago, and topics nobody here uses; called every second.

        Returns the topics forgotten.
        """
        return [topic for topics in self.expire_in_steps(now_ns) for topic in topics]

    def expire_in_steps(self, now_ns: int) -> Iterator[list[Topic]]:
        """The same for many topics; the caller may do other things in between."""
        for peer in (*self._clients.values(), *self._routers_up.values(), *self._lan_edges.values()):
            if not peer.outbox.is_overloaded(now_ns):
                peer.shedder.calm()
        topics = list(self._topics.values())
        for start in range(0, len(topics), _TOPICS_AT_A_TIME):
            idle: list[Topic] = []
            for topic in topics[start : start + _TOPICS_AT_A_TIME]:
                self._expire_topic(topic, now_ns)
                if topic.is_idle and self._topics.get(topic.topic_id) is topic:
                    del self._topics[topic.topic_id]
                    self._settling.pop(topic, None)
                    idle.append(topic)
            yield idle

    def _expire_topic(self, topic: Topic, now_ns: int) -> None:
        for publisher in [item for item in topic.publishers.values() if item.client is None]:
            patience_ns = _UNSENT_LINGER_NS if publisher.retention.unsent else _RETENTION_LINGER_NS
            if now_ns - publisher.departed_ns > patience_ns:
                self._dropped[DropReason.NO_ROUTER] += publisher.retention.unsent
                del topic.publishers[publisher.publisher_id]
        if topic.histories:
            topic.expire_histories(now_ns, _HISTORY_LINGER_NS)

    # Control: what ZooKeeper and the links say

    def set_interest(
        self,
        topic: Topic,
        *,
        primary: str | None,
        backup: str | None,
        subscribers: Collection[tuple[str, str]],
        publishers: frozenset[int],
        now_ns: int,
    ) -> set[Peer]:
        """The topic's routing brokers, and each subscriber's (LAN, edge); returns peers with new data."""
        if topic.primary not in (None, primary):
            self._disturbed_until_ns = now_ns + _DISTURBED_FOR_NS
        topic.primary = primary
        topic.backup = backup
        topic.known_publishers = publishers
        topic.interested_edges = tuple(
            sorted({edge for lan, edge in subscribers if lan == self._lan and edge != self._edge})
        )
        was_interested = topic.interested_remotely
        topic.interested_remotely = any(lan != self._lan for lan, _ in subscribers)
        if was_interested and not topic.interested_remotely:
            for publisher in topic.publishers.values():
                publisher.retention.forget()
        touched: set[Peer] = set()
        again = Resending()
        self._retarget(topic, again)
        self._send_again(again, touched, now_ns)
        return touched

    def set_qos(self, topic: Topic, qos: TopicQos, now_ns: int) -> None:
        """What the topic is served with from now on; `settle` must be called until nothing settles."""
        if qos == topic.qos:
            return
        before_ns = topic.deadline_ns
        topic.set_qos(qos)
        if self._tracer is not None:
            self._tracer.define_topic(topic.topic_id, topic.name, qos)
        for publisher in topic.publishers.values():
            publisher.retention.resize(self._retention_of(topic))
        if topic.deadline_ns != before_ns:
            topic.floor_ns = max(topic.floor_ns, now_ns + before_ns)
            self._settling[topic] = None
        self._update_routes(topic)
        for held in self._held.values():
            for sequence, item in held.items():
                if item.topic is topic:
                    until_ns = min(item.until_ns, self._held_until(item, now_ns))
                    held[sequence] = item._replace(until_ns=until_ns)

    def settle(self) -> bool:
        """Let changed deadlines count where no older messages wait; says whether some still do.

        To be called every few milliseconds, when links have been written.
        """
        for topic in list(self._settling):
            if not any(peer.outbox.has_waiting for peer in topic.peers):
                del self._settling[topic]
                topic.floor_ns = 0
                self._update_routes(topic)
        return bool(self._settling)

    def router_up(self, name: str, outbox: Outbox, now_ns: int) -> set[Peer]:
        """The link to a routing broker is up; returns peers with new data."""
        return set().union(*self.router_up_in_steps(name, outbox, now_ns))

    def router_up_in_steps(self, name: str, outbox: Outbox, now_ns: int) -> Iterator[set[Peer]]:
        """The same for many topics; yields peers with new data, the most urgent first.

        The caller must go through to the end, and may write in between.
        """
        self._disturbed_until_ns = now_ns + _DISTURBED_FOR_NS
        self._routers_up[name] = Peer(f"{Role.ROUTER}:{name}", outbox)
        self._trace_link(self._routers_up[name])
        yield from self._retarget_all(name, now_ns)

    def router_down(self, name: str, now_ns: int) -> set[Peer]:
        """The link to a routing broker is down; returns peers with new data.

        What it never acknowledged goes to the next target together with what is retained.
        """
        return set().union(*self.router_down_in_steps(name, now_ns))

    def router_down_in_steps(self, name: str, now_ns: int) -> Iterator[set[Peer]]:
        """The same for many topics; yields peers with new data, the most urgent first.

        The caller must go through to the end, and may write in between.
        """
        router = self._routers_up.pop(name, None)
        if router is None:
            return
        self._disturbed_until_ns = now_ns + _DISTURBED_FOR_NS
        undelivered = self._by_publisher(router.outbox.withdraw())
        yield from self._retarget_all(name, now_ns, router, undelivered)

    def set_lan_edges(self, outboxes: Mapping[str, Outbox]) -> None:
        """The other edges of this LAN, by name."""
        if outboxes.keys() == self._lan_edges.keys():
            return
        self._lan_edges = {name: Peer(f"{Role.EDGE}:{name}", outbox) for name, outbox in outboxes.items()}
        for peer in self._lan_edges.values():
            self._trace_link(peer)
        for topic in self._topics.values():
            self._update_routes(topic)

    # Data

    def admit_from_client(
        self, client: Peer, body: bytes, clock_shift_ns: int, now_ns: int
    ) -> tuple[int, set[Peer]]:
        """Take a data frame from a local client: deliver, forward, retain.

        `clock_shift_ns` is the link's. Returns the number of messages and the peers that got some.
        """
        header = decode_batch_header(body)
        publishers = publishers_of(client.publishers, body, header.messages)
        data = on_our_clock(body, publishers, add_shifts(header.clock_shift_ns, clock_shift_ns), now_ns)
        self._accepted += len(publishers)
        came = self._admit_traced(data, client, now_ns) if self._tracer is not None else None
        touched: set[Peer] = set()
        run_route: Route | None = None
        run_start: i64 = 0
        run_end: i64 = 0
        run_messages: i64 = 0
        run_born: i64 = 0
        end: i64 = BATCH_HEADER_BYTES
        for publisher in publishers:
            start = end
            sequence = read_i64_le(data, start + SEQUENCE_OFFSET)
            born: i64 = read_i64_le(data, start + BORN_OFFSET) >> BUCKET_SHIFT
            length: i64 = read_i64_le(data, start + LENGTH_WORD_OFFSET) >> 32
            end = start + MESSAGE_HEADER_BYTES + (length & U32)
            if sequence <= publisher.accepted:
                self._drop(DropReason.DUPLICATE, data, start, came, now_ns)
                continue
            publisher.accepted = sequence
            topic = publisher.topic
            topic.messages += 1
            if topic.interested_remotely:
                if topic.target is None:
                    if not self._keep_unsent(publisher, topic, data[start:end]):
                        self._drop(DropReason.NO_ROUTER, data, start, came, now_ns)
                elif topic.kept_messages:
                    publisher.retention.keep_sent(data[start:end])
            route = topic.ingress
            if topic.subscribers:
                if self._is_new(topic, publisher.publisher_id, sequence, data, start, came, now_ns):
                    topic.delivered += 1
                    self._delivered += 1
                else:
                    route = topic.forward
            if route is not run_route or start != run_end or born != run_born:
                if run_route is not None:
                    run = cut_run(run_messages, data, run_start, run_end, came)
                    self._send(run_route, run, touched, now_ns)
                run_route = route
                run_start = start
                run_messages = 0
                run_born = born
            run_messages += 1
            run_end = end
        if run_route is not None:
            self._send(run_route, cut_run(run_messages, data, run_start, run_end, came), touched, now_ns)
        return len(publishers), touched

    def admit_from_broker(
        self, body: bytes, clock_shift_ns: int, now_ns: int, router: str = "", edge: str = ""
    ) -> tuple[int, set[Peer]]:
        """Take a data frame from a routing broker or another edge: deliver what is new.

        `clock_shift_ns` is the link's. `router` names a routing broker: what comes from one that is
        not the topic's primary may overtake what the primary still sends. `edge` names another edge.
        Returns the number of messages and the clients that got some.
        """
        header = decode_batch_header(body)
        check_messages(body, header.messages)
        header = header.shifted(add_shifts(header.clock_shift_ns, clock_shift_ns))
        tracer = self._tracer
        came = (
            tracer.admit(body, router or edge, header.clock_shift_ns, now_ns) if tracer is not None else None
        )
        touched: set[Peer] = set()
        run_route: Route | None = None
        run_start: i64 = 0
        run_end: i64 = 0
        run_messages: i64 = 0
        run_born: i64 = 0
        held = self._held
        in_order = now_ns >= self._disturbed_until_ns and not held
        end: i64 = BATCH_HEADER_BYTES
        for _ in range(header.messages):
            start = end
            topic_id: i64 = read_i64_le(body, start)
            publisher_id = read_i64_le(body, start + PUBLISHER_OFFSET)
            sequence = read_i64_le(body, start + SEQUENCE_OFFSET)
            born_ns = read_i64_le(body, start + BORN_OFFSET)
            length: i64 = read_i64_le(body, start + LENGTH_WORD_OFFSET) >> 32
            end = start + MESSAGE_HEADER_BYTES + (length & U32)
            topic = self._topics.get(topic_id & U32)
            if topic is None or not topic.subscribers:
                self._drop(DropReason.NO_SUBSCRIBER, body, start, came, now_ns)
                continue
            history = topic.histories.get(publisher_id)
            if history is not None and sequence == history.highest + 1 and publisher_id not in held:
                history.highest = sequence  # what `judge` would do, for the most frequent case
            elif not in_order or (router and router != topic.primary):
                if run_route is not None:
                    run = cut_run(run_messages, body, run_start, run_end, came)
                    self._append(run_route, header, run, touched, now_ns)
                    run_route = None
                alone = came.of_single(start) if came is not None else None
                item = Held(topic, header, born_ns, body[start:end], 0, alone)
                astray = bool(router) and router != topic.primary
                self._deliver_in_order(publisher_id, sequence, item, touched, now_ns, astray)
                continue
            elif not self._is_new(topic, publisher_id, sequence, body, start, came, now_ns):
                continue
            topic.delivered += 1
            self._delivered += 1
            route = topic.deliver
            if route is not run_route or start != run_end or born_ns >> BUCKET_SHIFT != run_born:
                if run_route is not None:
                    run = cut_run(run_messages, body, run_start, run_end, came)
                    self._append(run_route, header, run, touched, now_ns)
                run_route = route
                run_start = start
                run_messages = 0
                run_born = born_ns >> BUCKET_SHIFT
            run_messages += 1
            run_end = end
        if run_route is not None:
            run = cut_run(run_messages, body, run_start, run_end, came)
            self._append(run_route, header, run, touched, now_ns)
        return header.messages, touched

    def release_held(self, now_ns: int) -> set[Peer]:
        """Let go of messages that can wait for their predecessors no longer; called every few ms."""
        touched: set[Peer] = set()
        for publisher_id, held in list(self._held.items()):
            overdue = [sequence for sequence, item in held.items() if item.until_ns <= now_ns]
            if not overdue:
                continue
            last = max(overdue)
            for sequence in sorted(sequence for sequence in held if sequence <= last):
                self._deliver_now(publisher_id, sequence, held.pop(sequence), touched, now_ns)
            self._release_successors(publisher_id, touched, now_ns)
        return touched

    @property
    def has_held(self) -> bool:
        """Some messages wait for their predecessors."""
        return bool(self._held)

    def statistics(self) -> EdgeStatistics:
        """Counts since the broker started."""
        return EdgeStatistics(
            clients=len(self._clients),
            topics=tuple(topic_statistics(topic) for topic in self._topics.values()),
            messages_accepted=self._accepted,
            messages_delivered=self._delivered,
            messages_resent=self._resent,
            messages_held=self._held_total,
            target_changes=self._target_changes,
            dropped=dict(self._dropped),
        )

    def validate(self) -> None:
        """Assert the invariants; tests call this after every step."""
        for topic in self._topics.values():
            assert topic.target is self._choose_target(topic)
            assert set(topic.deliver.peers) == set(topic.subscribers)
            if not topic.interested_remotely:
                assert topic.target is None
                assert all(not publisher.retention for publisher in topic.publishers.values())
            for publisher_id, publisher in topic.publishers.items():
                publisher.retention.validate()
                assert publisher.client is None or publisher.client.publishers[publisher_id] is publisher
                assert topic.target is None or not publisher.retention.unsent
            for history in topic.histories.values():
                history.validate()
        for client in self._clients.values():
            client.outbox.validate()

    # Details

    def _by_publisher(self, bodies: Iterable[bytes]) -> dict[int, dict[int, bytes]]:
        """Messages of data frames by publisher and sequence."""
        found: dict[int, dict[int, bytes]] = {}
        for body in bodies:
            end: i64 = BATCH_HEADER_BYTES
            while end < len(body):
                start = end
                length: i64 = read_i64_le(body, start + LENGTH_WORD_OFFSET) >> 32
                end = start + MESSAGE_HEADER_BYTES + (length & U32)
                messages = found.setdefault(read_i64_le(body, start + PUBLISHER_OFFSET), {})
                messages[read_i64_le(body, start + SEQUENCE_OFFSET)] = body[start:end]
        return found

    def _trace_link(self, peer: Peer) -> None:
        if self._tracer is not None:
            peer.outbox.trace = self._tracer.link(_bare(peer.name))

    def _admit_traced(self, data: bytes, client: Peer, now_ns: int) -> Passage | None:
        """How a client's frame came, if messages of it are traced; stamps are on our clock already."""
        assert self._tracer is not None
        came = self._tracer.admit(data, _bare(client.name), 0, now_ns)
        if came is not None:
            self._tracer.remember(data, came)
        return came

    def _drop(self, reason: DropReason, data: bytes, offset: int, came: Passage | None, now_ns: int) -> None:
        self._dropped[reason] += 1
        if came is not None and self._tracer is not None:
            self._tracer.rejected(reason_named(reason.name), data, offset, came, now_ns)

    def _is_new(
        self,
        topic: Topic,
        publisher_id: int,
        sequence: int,
        data: bytes,
        offset: int,
        came: Passage | None,
        now_ns: int,
    ) -> bool:
        history = topic.histories.get(publisher_id)
        if history is None:
            history = topic.histories[publisher_id] = History()
        verdict = history.judge(sequence)
        if verdict is Verdict.NEW:
            return True
        reason = DropReason.LATE if verdict is Verdict.LATE else DropReason.DUPLICATE
        self._drop(reason, data, offset, came, now_ns)
        return False

    def _keep_unsent(self, publisher: Publisher, topic: Topic, message: bytes) -> bool:
        """No routing broker can be reached: keep a message if its topic asks for that."""
        if not topic.kept_messages:
            return False
        retention = publisher.retention
        dropped = retention.dropped
        retention.keep_unsent(message)
        self._dropped[DropReason.NO_ROUTER] += retention.dropped - dropped
        return True

    def _send(self, route: Route, run: Run, touched: set[Peer], now_ns: int) -> None:
        """Queue a run that starts its journey here; its messages are stamped with our clock."""
        self._append(route, BatchHeader(route.urgency, self._origin, 0, 0), run, touched, now_ns)

    def _append(self, route: Route, header: BatchHeader, run: Run, touched: set[Peer], now_ns: int) -> None:
        """Queue a run for all peers of a route, or less of it for those that are overloaded."""
        born_ns = read_i64_le(run.data, BORN_OFFSET)
        if not born_ns or header.clock_shift_ns == UNKNOWN_CLOCK_SHIFT:
            deadline = route.unsure.until_ns = now_ns + route.deadline_ns
        else:
            deadline = max(born_ns - header.clock_shift_ns + route.deadline_ns, route.unsure.until_ns)
        if run.came is not None and self._tracer is not None and not route.peers:
            self._tracer.received(run)
        for peer in route.peers:
            sent = run
            if peer.outbox.is_overloaded(now_ns):
                may_shed = None if route.shares is None else route.shares[peer.hop]
                sifted = peer.shedder.sift(run, may_shed)
                if sifted is not run:
                    reason = DropReason.SHED_BEST_EFFORT if may_shed is None else DropReason.SHED_TOLERATED
                    self._dropped[reason] += run.messages - (sifted.messages if sifted else 0)
                    if peer.outbox.trace is not None:
                        peer.outbox.trace.shed(run, sifted, reason_named(reason.name), now_ns)
                if sifted is None:
                    continue
                sent = sifted
            dropped = peer.outbox.append(
                deadline, header.urgency, header.origin, header.clock_shift_ns, sent, now_ns
            )
            if dropped:
                self._dropped[DropReason.OUTBOX_FULL] += dropped
            touched.add(peer)

    def _deliver_in_order(
        self, publisher_id: int, sequence: int, item: Held, touched: set[Peer], now_ns: int, astray: bool
    ) -> None:
        """Deliver a message, or hold it back if one before it is missing and may still come."""
        topic = item.topic
        history = topic.histories.get(publisher_id)
        held = self._held.get(publisher_id)
        disturbed = astray or now_ns < self._disturbed_until_ns or held is not None
        if disturbed and history is not None and history.highest and sequence > history.highest + 1:
            if held is not None and sequence in held:
                self._drop(DropReason.DUPLICATE, item.data, 0, item.came, now_ns)
                return
            until_ns = self._held_until(item, now_ns)
            if until_ns > now_ns:
                self._held.setdefault(publisher_id, {})[sequence] = item._replace(until_ns=until_ns)
                self._held_total += 1
                return
        self._deliver_now(publisher_id, sequence, item, touched, now_ns)
        self._release_successors(publisher_id, touched, now_ns)

    @staticmethod
    def _held_until(item: Held, now_ns: int) -> int:
        born_ns = born_here_ns(item.born_ns, item.header.clock_shift_ns, now_ns)
        return min(born_ns + item.topic.deadline_ns - _HOLD_MARGIN_NS, now_ns + _HOLD_MOST_NS)

    def _deliver_now(
        self, publisher_id: int, sequence: int, item: Held, touched: set[Peer], now_ns: int
    ) -> None:
        topic = item.topic
        if self._is_new(topic, publisher_id, sequence, item.data, 0, item.came, now_ns):
            topic.delivered += 1
            self._delivered += 1
            run = cut_run(1, item.data, 0, len(item.data), item.came)
            self._append(topic.deliver, item.header, run, touched, now_ns)

    def _release_successors(self, publisher_id: int, touched: set[Peer], now_ns: int) -> None:
        """Deliver held messages that have no gap before them any more."""
        held = self._held.get(publisher_id)
        if held is None:
            return
        while held:
            first = min(held)
            highest = held[first].topic.histories[publisher_id].highest
            if first > highest + 1:
                return
            self._deliver_now(publisher_id, first, held.pop(first), touched, now_ns)
        del self._held[publisher_id]

    def _retention_of(self, topic: Topic) -> int:
        if self._retain_more is None or not topic.qos.kept_messages:
            return topic.qos.kept_messages
        return retention_without_replication(topic.qos, self._retain_more)

    def _choose_target(self, topic: Topic) -> Peer | None:
        if not topic.interested_remotely:
            return None
        for name in (topic.primary, topic.backup):
            if name is not None and name in self._routers_up:
                return self._routers_up[name]
        return None

    def _retarget_all(
        self,
        name: str,
        now_ns: int,
        gone: Peer | None = None,
        undelivered: Mapping[int, Mapping[int, bytes]] = MappingProxyType({}),
    ) -> Iterator[set[Peer]]:
        """Choose anew the routing brokers of all topics that `name` serves, some topics at a time."""
        touched: set[Peer] = set()
        again = Resending()
        concerned = [topic for topic in self._topics.values() if name in (topic.primary, topic.backup)]
        concerned.sort(key=attrgetter("deadline_ns"))
        for number, topic in enumerate(concerned, 1):
            if gone is not None and topic.target is gone:
                self._recall(topic, undelivered)
            if topic.target is not self._choose_target(topic):
                self._retarget(topic, again)
            if number % _TOPICS_AT_A_TIME == 0:
                self._send_again(again, touched, now_ns)
                yield touched
        # A topic may have been given to others while its messages were still on their way.
        for topic in self._topics.values() if gone is not None else ():
            if topic.target is gone:
                self._recall(topic, undelivered)
                self._retarget(topic, again)
        self._send_again(again, touched, now_ns)
        yield touched

    def _recall(self, topic: Topic, undelivered: Mapping[int, Mapping[int, bytes]]) -> None:
        """The target of a topic is gone: what it never acknowledged is unsent again."""
        for publisher in topic.publishers.values():
            retention = publisher.retention
            dropped = retention.dropped
            retention.recall(undelivered.get(publisher.publisher_id, {}))
            self._dropped[DropReason.NO_ROUTER] += retention.dropped - dropped

    def _retarget(self, topic: Topic, again: Resending) -> None:
        """Choose the topic's routing broker anew; a new one is to get everything retained."""
        target = self._choose_target(topic)
        changed = target is not topic.target
        topic.target = target
        self._update_onward(topic)
        if not changed or target is None:
            return
        self._target_changes += 1
        route = topic.forward if len(topic.forward.peers) == 1 else self._route((target,), topic)
        for publisher in topic.publishers.values():
            for message in publisher.retention.resend():
                again.add(route, message)
                self._resent += 1

    def _send_again(self, again: Resending, touched: set[Peer], now_ns: int) -> None:
        for route, run in again.take():
            if self._tracer is not None:
                self._tracer.send_again(run)
            self._send(route, run, touched, now_ns)

    def _update_routes(self, topic: Topic) -> None:
        topic.deliver = self._route(tuple(topic.subscribers), topic)
        self._update_onward(topic)

    def _update_onward(self, topic: Topic) -> None:
        onward = [self._lan_edges[edge] for edge in topic.interested_edges if edge in self._lan_edges]
        if topic.target is not None:
            onward.append(topic.target)
        topic.forward = topic.ingress = self._route(tuple(onward), topic)
        if topic.subscribers:
            topic.ingress = self._route((*topic.subscribers, *onward), topic)

    def _route(self, peers: tuple[Peer, ...], topic: Topic) -> Route:
        # A peer is nobody's equal but its own, so peers are good keys.
        key = (peers, topic.requirements, topic if topic.floor_ns else None)
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= _SHARED_ROUTES_MAX:
                self._routes.clear()
            unsure = self._unsure.setdefault(topic.deadline_ns, Unsure())
            if topic.floor_ns:  # this route is the topic's alone
                unsure = Unsure(unsure.until_ns)
            route = self._routes[key] = Route(peers, *topic.requirements, unsure)
        if topic.floor_ns:
            route.unsure.until_ns = max(route.unsure.until_ns, topic.floor_ns)
        return route


def _bare(peer: str) -> str:
    """The name a peer gives itself, without the role before it."""
    return peer.partition(":")[2] or peer
