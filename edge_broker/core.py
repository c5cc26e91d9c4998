"""The edge broker's rules: who in the LAN gets a message, and whether it leaves the LAN.

For each topic with endpoints here, the edge knows from ZooKeeper which LANs and edges have
subscribers, and which routing brokers are the topic's primary and backup. A message from a
local publisher goes to

    local subscribers           always
    other edges of this LAN     that have subscribers
    one routing broker          only if another LAN has subscribers: the primary if its link is up,
                                else the backup; the *target* of the topic
    edges of other LANs         instead or as well, if the topic has a deadline and `overlay.paths`
                                finds that worth it

A topic without interest in another LAN never leaves this one. How the target is chosen, and what
happens when it changes, is in `edge_broker.targets`.

A message from a routing broker or another edge of the LAN goes to local subscribers only, and
only if it is new (`overlay.history`).

The path of a data frame: `admit_from_client` or `admit_from_broker` checks the whole body,
cuts it into runs that go to the same places, and appends the runs to outboxes. The peers that
got something are returned, so that the shell writes each link once per loop turn.

Time: a client's messages are stamped with the client's clock. The ingress edge brings the stamps
to its own clock (`overlay.delay`), so that on the WAN all messages of one edge share one clock
and can share frames. Outboxes are served by deadline, which is when a message was born plus what
its topic allows.

Subscribers and publishers that come from another edge go on where they were (`edge_broker.resuming`).

Order: when copies of messages race on two ways, some are held back for their predecessors
(`edge_broker.order`).

When a topic's deadline changes, messages that wait were given the old one. Until none of them
waits any more, new ones get no earlier deadline than the latest of those (`floor_ns`), on routes
of the topic's own, so that no other topic has to wait with it.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le

from edge_broker.dispatch import Dispatch
from edge_broker.frames import on_our_clock, publishers_of
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
from edge_broker.order import Order
from edge_broker.resuming import Resuming
from edge_broker.targets import TOPICS_AT_A_TIME, Targets
from overlay.batch import (
    BATCH_HEADER_BYTES,
    BORN_OFFSET,
    LENGTH_WORD_OFFSET,
    MESSAGE_HEADER_BYTES,
    PUBLISHER_OFFSET,
    SEQUENCE_OFFSET,
    U32,
    Passage,
    check_messages,
    cut_run,
    decode_batch_header,
)
from overlay.bounds import Delays, retention_without_replication
from overlay.delay import add_shifts, put_back_ns
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import (
    ENDPOINT_ID_MAX,
    RESUME_NS,
    RETAINED_MAX_BYTES,
    SECOND_NS,
    UNSENT_MAX_MESSAGES,
)
from overlay.messages import EndpointKind
from overlay.outbox import Outbox
from overlay.paths import Choice
from overlay.qos import TopicQos
from overlay.retention import Retention, Room, make_room
from overlay.schedule import granule_born_ns
from overlay.trace import Reason
from overlay.tracer import Tracer, threshold_of
from overlay.urgency import UNORDERED, level_of

if TYPE_CHECKING:
    from mypy_extensions import i64

_RETENTION_LINGER_NS: Final = 10 * SECOND_NS
"""How long the last messages of a publisher that left can still be sent again."""
_UNSENT_LINGER_NS: Final = 60 * SECOND_NS
"""How long its unsent messages wait for a routing broker."""
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
        retained_most_bytes: int = RETAINED_MAX_BYTES,
    ) -> None:
        """With `retain_more`, keep one message more where that spares replication (FRAME+)."""
        self._room = Room(retained_most_bytes)
        self._tracer = tracer
        self._unsent_most = unsent_most
        self._edge = edge
        self._retain_more = retain_more
        self._delays = delays or Delays(0, 0, 0, 0)
        self._settling: dict[Topic, None] = {}
        """Topics whose deadline has changed while messages with the old one may wait."""
        self._lan = lan
        self._topics: dict[int, Topic] = {}
        self._clients: dict[str, Peer] = {}
        self._dispatch = Dispatch(origin, tracer)
        self._order = Order(self._dispatch)
        self._targets = Targets(self._topics, self._dispatch, tracer)
        self.resuming = Resuming(self._dispatch, self._targets)
        """Endpoints that come from another edge."""
        self._accepted = 0

    # Control: clients and endpoints

    @property
    def topics(self) -> Mapping[int, Topic]:
        """Topics with endpoints here, by id."""
        return self._topics

    @property
    def routers_up(self) -> Collection[str]:
        """Names of the routing brokers whose link is up."""
        return self._targets.routers_up.keys()

    def client(self, name: str, outbox: Outbox) -> Peer:
        """A client connected for the first time."""
        peer = self._clients[name] = Peer(name, outbox)
        self._dispatch.trace_link(peer)
        return peer

    def remove_client(self, client: Peer, now_ns: int = 0) -> None:
        """A client is gone, with what waits for it. Its endpoints must be gone already."""
        assert not client.publishers and not client.subscriptions
        dropped, _ = client.outbox.discard(now_ns, int(Reason.NO_SUBSCRIBER))
        if dropped:
            self._dispatch.dropped[DropReason.NO_SUBSCRIBER] += dropped
        self._targets.forget_peer(client)
        del self._clients[client.name]

    def ensure_topic(self, topic_id: int, name: str, qos: TopicQos) -> Topic:
        """The topic, made if this edge did not have it."""
        topic = self._topics.get(topic_id)
        if topic is None:
            topic = self._topics[topic_id] = Topic(topic_id, name, qos, self._delays)
            self._targets.update_routes(topic)
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
                retention = Retention(self._retention_of(topic), self._unsent_most, self._room)
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
            self._targets.update_routes(topic)

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
            topic.resuming.pop(client, None)
            self._targets.update_routes(topic)
        return topic, EndpointKind.SUBSCRIBER

    def expire(self, now_ns: int) -> list[Topic]:
        """Forget publishers that left a while ago, and topics nobody here uses; called every second.

        Returns the topics forgotten.
        """
        return [topic for topics in self.expire_in_steps(now_ns) for topic in topics]

    def expire_in_steps(self, now_ns: int) -> Iterator[list[Topic]]:
        """The same for many topics; the caller may do other things in between."""
        self._targets.forget_pending()
        topics = list(self._topics.values())
        for start in range(0, len(topics), TOPICS_AT_A_TIME):
            idle: list[Topic] = []
            for topic in topics[start : start + TOPICS_AT_A_TIME]:
                self._expire_topic(topic, now_ns)
                if topic.is_idle and self._topics.get(topic.topic_id) is topic:
                    del self._topics[topic.topic_id]
                    self._settling.pop(topic, None)
                    self._targets.forget(topic)
                    idle.append(topic)
            yield idle

    def _expire_topic(self, topic: Topic, now_ns: int) -> None:
        for publisher in [item for item in topic.publishers.values() if item.client is None]:
            patience_ns = _UNSENT_LINGER_NS if publisher.retention.unsent else _RETENTION_LINGER_NS
            if now_ns - publisher.departed_ns > patience_ns:
                self._dispatch.dropped[DropReason.NO_ROUTER] += publisher.retention.unsent
                publisher.retention.forget()
                del topic.publishers[publisher.publisher_id]
        self.resuming.expire(topic, now_ns)
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
        touched: set[Peer] = set()
        if topic.is_turning:
            self._targets.turn_now(topic, touched, now_ns)
        if topic.primary not in (None, primary):
            self._order.disturb(now_ns)
        topic.primary = primary
        topic.backup = backup
        topic.known_publishers = publishers
        topic.interested_edges = tuple(
            sorted({edge for lan, edge in subscribers if lan == self._lan and edge != self._edge})
        )
        topic.remote_edges = tuple(sorted({edge for lan, edge in subscribers if lan != self._lan}))
        was_interested = topic.interested_remotely
        topic.interested_remotely = any(lan != self._lan for lan, _ in subscribers)
        if was_interested is not topic.interested_remotely:
            # What was kept for others says nothing to those who are interested from now on.
            for publisher in topic.publishers.values():
                publisher.retention.forget_sent()
                if was_interested:
                    publisher.retention.forget()
        self._targets.retarget(topic, touched, now_ns)
        return touched

    def set_qos(self, topic: Topic, qos: TopicQos, now_ns: int) -> None:
        """What the topic is served with from now on; `settle` must be called until nothing settles."""
        if qos == topic.qos:
            return
        before_ns, level_before = topic.deadline_ns, level_of(topic.requirements[1])
        topic.set_qos(qos)
        if self._tracer is not None:
            self._tracer.define_topic(topic.topic_id, topic.name, qos)
        for publisher in topic.publishers.values():
            publisher.retention.resize(self._retention_of(topic))
        if topic.deadline_ns != before_ns:
            topic.floor_ns = max(topic.floor_ns, now_ns + before_ns)
            topic.floor_level = max(topic.floor_level, level_before)
            self._settling[topic] = None
        if level_of(topic.requirements[1]) < level_before:
            # A hop that is behind with its work takes the more urgent ones before those on their way.
            topic.mixed_until_ns = max(topic.mixed_until_ns, now_ns + RESUME_NS)
        self._targets.update_routes(topic)
        self._order.shorten(topic, now_ns)

    def settle(self) -> bool:
        """Let changed deadlines count where no older messages wait; says whether some still do.

        To be called every few milliseconds, when links have been written.
        """
        for topic in list(self._settling):
            if not any(peer.outbox.has_waiting for peer in topic.peers):
                del self._settling[topic]
                topic.floor_ns = topic.floor_level = 0
                self._targets.update_routes(topic)
        return bool(self._settling)

    def router_up(self, name: str, outbox: Outbox, now_ns: int) -> None:
        """The link to a routing broker is up; `turn_some` must be called until no topic is turning."""
        self._order.disturb(now_ns)
        self._order.reached(now_ns)
        self._targets.router_up(name, outbox)

    def router_restarted(self, name: str) -> None:
        """A routing broker is back as another process, its link about to come up: it may have lost topics.

        Until `router_trusted`, topics are sent to it only if they have no other.
        """
        self._targets.router_restarted(name)

    def router_trusted(self, name: str, now_ns: int) -> None:
        """What `set_interest` said last is not older than the router's restart; `turn_some` as above."""
        self._order.disturb(now_ns)
        self._targets.router_trusted(name)

    def router_down(self, name: str, now_ns: int) -> None:
        """The link to a routing broker is down; `turn_some` must be called until no topic is turning.

        What it never acknowledged goes to the next target together with what is retained.
        """
        router = self._targets.routers_up.get(name)
        if router is not None:
            self._order.disturb(now_ns)
            self._targets.router_down(router)
            if not self._targets.routers_up:
                self._order.cut_off()

    @property
    def is_turning(self) -> bool:
        """Some topics have not turned to their new routing broker yet."""
        return self._targets.is_turning

    def turn_some(self, now_ns: int) -> set[Peer]:
        """Let some topics turn to their new routing broker, the most urgent first.

        Returns peers with new data. To be called once per loop turn: messages need not wait for all
        topics, because one of a topic that is turning has it turned first.
        """
        touched: set[Peer] = set()
        self._targets.turn_some(touched, now_ns)
        return touched

    def direct_up(self, name: str, outbox: Outbox) -> None:
        """An edge of another LAN can be sent to directly. Whether it is, `set_paths` says."""
        self._targets.direct_up(name, outbox)

    def direct_down(self, name: str, now_ns: int) -> set[Peer]:
        """It cannot any more; returns peers with new data: what it had not acknowledged goes to routers."""
        self._order.disturb(now_ns)
        return self._targets.direct_down(name, now_ns)

    def set_paths(self, topic: Topic, choices: Mapping[str, Choice], now_ns: int) -> set[Peer]:
        """How messages of a topic get to edges of other LANs; to those not named by the routing broker.

        Returns peers with new data.
        """
        return self._targets.set_paths(topic, choices, now_ns)

    def send_reserves(self, now_ns: int) -> set[Peer]:
        """Send what was not acknowledged in time by the routing broker; called every few ms."""
        touched: set[Peer] = set()
        self._targets.send_reserves(touched, now_ns)
        return touched

    @property
    def has_reserves(self) -> bool:
        """Some messages may have to be sent on another path."""
        return self._dispatch.has_reserves

    def set_lan_edges(self, outboxes: Mapping[str, Outbox]) -> None:
        """The other edges of this LAN, by name."""
        self._targets.set_lan_edges(outboxes)

    # Data

    def admit_from_client(
        self, client: Peer, body: bytes, clock_shift_ns: int, now_ns: int, worse_drift_ppm: int = 0
    ) -> tuple[int, set[Peer]]:
        """Take a data frame from a local client: deliver, forward, retain.

        `clock_shift_ns` is the link's, `worse_drift_ppm` what the client's clock drifts if that is more
        than ours. Returns the number of messages and the peers that got some.
        """
        header = decode_batch_header(body)
        sampled = check_messages(body, header.messages, threshold_of(self._tracer))
        publishers = publishers_of(client.publishers, body)
        shift_ns = add_shifts(header.clock_shift_ns, clock_shift_ns)
        data = on_our_clock(body, publishers, shift_ns, now_ns, worse_drift_ppm)
        self._accepted += len(publishers)
        came: Passage | None = None
        if sampled is not None and self._tracer is not None:
            # Stamps are on our clock already.
            sent_ns = put_back_ns(header.sent_ns, clock_shift_ns, now_ns, worse_drift_ppm)
            came = self._tracer.admit(sampled, client.bare_name, 0, now_ns, sent_ns, clock_shift_ns)
            self._tracer.remember(data, came)
        touched: set[Peer] = set()
        run_route: Route | None = None
        run_start: i64 = 0
        run_end: i64 = 0
        run_messages: i64 = 0
        run_born_ns: i64 = 0
        granule_start_ns: i64 = 0
        granule_end_ns: i64 = 0
        end: i64 = BATCH_HEADER_BYTES
        for publisher in publishers:
            start = end
            sequence = read_i64_le(data, start + SEQUENCE_OFFSET)
            stamp_ns: i64 = read_i64_le(data, start + BORN_OFFSET)
            length: i64 = read_i64_le(data, start + LENGTH_WORD_OFFSET) >> 32
            end = start + MESSAGE_HEADER_BYTES + (length & U32)
            if sequence <= publisher.accepted:
                self._dispatch.drop(DropReason.DUPLICATE, data, start, came, now_ns)
                continue
            publisher.accepted = sequence
            topic = publisher.topic
            if topic.is_turning:
                self._targets.turn_now(topic, touched, now_ns)
            topic.messages += 1
            if topic.keeps_unsent:
                self._keep_unsent(publisher, data, start, end, came, now_ns)
            elif topic.keeps_sent:
                publisher.retention.keep_sent(data[start:end])
            route = topic.ingress
            if topic.subscribers:
                if self._dispatch.is_new(topic, publisher.publisher_id, sequence, data, start, came, now_ns):
                    topic.delivered += 1
                    self._dispatch.delivered += 1
                else:
                    route = topic.forward
                    if topic.resuming:
                        self._dispatch.repeat_own(topic, data[start:end], touched, now_ns)
            differs = route is not run_route or start != run_end
            if differs or stamp_ns >= granule_end_ns or stamp_ns < granule_start_ns:
                granule_ns: i64 = route.granule_ns
                granule_start_ns = stamp_ns & -granule_ns
                granule_end_ns = granule_start_ns + granule_ns
                born_ns: i64 = granule_born_ns(stamp_ns, 0, granule_ns)
                if differs or born_ns != run_born_ns:
                    if run_route is not None:
                        run = cut_run(run_messages, data, run_start, run_end, came)
                        self._dispatch.send(run_route, run, run_born_ns, touched, now_ns)
                    run_route = route
                    run_start = start
                    run_messages = 0
                    run_born_ns = born_ns
            run_messages += 1
            run_end = end
        if run_route is not None:
            run = cut_run(run_messages, data, run_start, run_end, came)
            self._dispatch.send(run_route, run, run_born_ns, touched, now_ns)
        self._keep_within_room()
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
        sampled = check_messages(body, header.messages, threshold_of(self._tracer))
        header = header.shifted(add_shifts(header.clock_shift_ns, clock_shift_ns))
        came: Passage | None = None
        if sampled is not None and self._tracer is not None:
            came = self._tracer.admit(
                sampled, router or edge, header.clock_shift_ns, now_ns, header.sent_ns, clock_shift_ns
            )
        touched: set[Peer] = set()
        run_route: Route | None = None
        run_start: i64 = 0
        run_end: i64 = 0
        run_messages: i64 = 0
        run_born_ns: i64 = 0
        granule_start_ns: i64 = 0
        granule_end_ns: i64 = 0
        if edge:
            self._order.reached(now_ns)
        held = self._order.held
        in_order = self._order.is_calm(now_ns)
        unordered = bool(header.urgency & UNORDERED)
        end: i64 = BATCH_HEADER_BYTES
        for _ in range(header.messages):
            start = end
            topic_id: i64 = read_i64_le(body, start)
            publisher_id = read_i64_le(body, start + PUBLISHER_OFFSET)
            sequence = read_i64_le(body, start + SEQUENCE_OFFSET)
            stamp_ns: i64 = read_i64_le(body, start + BORN_OFFSET)
            length: i64 = read_i64_le(body, start + LENGTH_WORD_OFFSET) >> 32
            end = start + MESSAGE_HEADER_BYTES + (length & U32)
            topic = self._topics.get(topic_id & U32)
            if topic is None or not topic.subscribers:
                self._dispatch.drop(DropReason.NO_SUBSCRIBER, body, start, came, now_ns)
                continue
            history = topic.histories.get(publisher_id)
            if history is not None and sequence == history.highest + 1 and publisher_id not in held:
                history.highest = sequence  # what `judge` would do, for the most frequent case
            elif not in_order or unordered or (router and router != topic.primary):
                if run_route is not None:
                    run = cut_run(run_messages, body, run_start, run_end, came)
                    self._dispatch.append(run_route, header, run, run_born_ns, touched, now_ns)
                    run_route = None
                alone = came.of_single(start) if came is not None else None
                item = Held(topic, header, stamp_ns, body[start:end], 0, alone)
                astray = unordered or (bool(router) and router != topic.primary)
                self._order.deliver(publisher_id, sequence, item, touched, now_ns, astray)
                continue
            elif not self._dispatch.is_new(topic, publisher_id, sequence, body, start, came, now_ns):
                if topic.resuming:
                    self._dispatch.repeat(topic, header, body[start:end], touched, now_ns)
                continue
            topic.delivered += 1
            self._dispatch.delivered += 1
            route = topic.deliver
            differs = route is not run_route or start != run_end
            if differs or stamp_ns >= granule_end_ns or stamp_ns < granule_start_ns:
                granule_ns: i64 = route.granule_ns
                granule_start_ns = stamp_ns & -granule_ns
                granule_end_ns = granule_start_ns + granule_ns
                born_ns: i64 = granule_born_ns(stamp_ns, header.clock_shift_ns, granule_ns)
                if differs or born_ns != run_born_ns:
                    if run_route is not None:
                        run = cut_run(run_messages, body, run_start, run_end, came)
                        self._dispatch.append(run_route, header, run, run_born_ns, touched, now_ns)
                    run_route = route
                    run_start = start
                    run_messages = 0
                    run_born_ns = born_ns
            run_messages += 1
            run_end = end
        if run_route is not None:
            run = cut_run(run_messages, body, run_start, run_end, came)
            self._dispatch.append(run_route, header, run, run_born_ns, touched, now_ns)
        return header.messages, touched

    def release_held(self, now_ns: int) -> set[Peer]:
        """Let go of messages that can wait for their predecessors no longer; called every few ms."""
        return self._order.release(now_ns)

    @property
    def has_held(self) -> bool:
        """Some messages wait for their predecessors."""
        return bool(self._order.held)

    def statistics(self) -> EdgeStatistics:
        """Counts since the broker started."""
        return EdgeStatistics(
            clients=len(self._clients),
            topics=tuple(topic_statistics(topic) for topic in self._topics.values()),
            messages_accepted=self._accepted,
            messages_delivered=self._dispatch.delivered,
            messages_resent=self._targets.resent,
            messages_held=self._order.held_total,
            messages_repeated=self._dispatch.repeated,
            messages_from_reserve=self._dispatch.from_reserve,
            retained_bytes=self._room.used_bytes,
            path_changes=self._targets.path_changes,
            target_changes=self._targets.changes,
            dropped=dict(self._dispatch.dropped),
        )

    def validate(self) -> None:
        """Assert the invariants; tests call this after every step."""
        for topic in self._topics.values():
            assert topic.is_turning or topic.target is self._targets.choose(topic)
            assert set(topic.deliver.peers) == set(topic.subscribers)
            if not topic.interested_remotely:
                assert topic.target is None
                kept = any(publisher.retention for publisher in topic.publishers.values())
                assert not kept or topic.keeps_sent or topic.keeps_unsent
            for publisher_id, publisher in topic.publishers.items():
                publisher.retention.validate()
                assert publisher.client is None or publisher.client.publishers[publisher_id] is publisher
                assert topic.target is None or not publisher.retention.unsent
            assert topic.via_routing or set(topic.direct) == set(topic.remote_edges)
            for history in topic.histories.values():
                history.validate()
        kept_bytes = [
            item.retention.kept_bytes for topic in self._topics.values() for item in topic.publishers.values()
        ]
        assert self._room.used_bytes == sum(kept_bytes)
        for client in self._clients.values():
            client.outbox.validate()

    # Details

    def _keep_unsent(
        self, publisher: Publisher, data: bytes, start: int, end: int, came: Passage | None, now_ns: int
    ) -> None:
        """No routing broker can be reached: keep a message if its topic asks for that, else drop it."""
        if not publisher.topic.kept_messages:
            self._dispatch.drop(DropReason.NO_ROUTER, data, start, came, now_ns)
            return
        retention = publisher.retention
        dropped = retention.dropped
        retention.keep_unsent(data[start:end])
        self._dispatch.dropped[DropReason.NO_ROUTER] += retention.dropped - dropped

    def _keep_within_room(self) -> None:
        """If too much is kept, what was never sent and has to go is lost for want of a routing broker."""
        if self._room.used_bytes <= self._room.most_bytes:
            return
        retentions = [
            publisher.retention for topic in self._topics.values() for publisher in topic.publishers.values()
        ]
        dropped = sum(retention.dropped for retention in retentions)
        make_room(self._room, retentions)
        dropped = sum(retention.dropped for retention in retentions) - dropped
        self._dispatch.dropped[DropReason.NO_ROUTER] += dropped

    def _retention_of(self, topic: Topic) -> int:
        if self._retain_more is None or not topic.qos.kept_messages:
            return topic.qos.kept_messages
        return retention_without_replication(topic.qos, self._retain_more)
