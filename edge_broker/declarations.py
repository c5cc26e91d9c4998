"""What clients declare: endpoints come and go, in the core and in ZooKeeper.

A declaration of a topic this edge serves already takes effect at once; a new topic needs
ZooKeeper first. The client is answered when its endpoint is registered, or, if ZooKeeper is
away but the topic is known, after a short wait: data flows without ZooKeeper. Where ZooKeeper went away
before it could tell who subscribes, it flows within the edge, and waits for the others.

What a subscriber asks for beyond what the topic was declared with is part of its endpoint's name in
ZooKeeper. From the topic's record and the names of its endpoints every broker works out for itself
what the topic is served with: the strictest of all. A request that cannot be met is refused before
it is registered, so nobody else ever hears of it.

An endpoint outlives its client's connection by its liveliness period. A client that comes back
in time finds everything as it was; one that says goodbye is taken at its word.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from coordinator import CoordinationError, Endpoint, TopicExistsError, TopicView, UnknownTopicError, Watch
from edge_broker.model import Peer, Topic
from edge_broker.targets import TOPICS_AT_A_TIME
from overlay.bounds import Delays, admit, admit_request, check_admission
from overlay.errors import AccessDeniedError, InvalidNameError, OverlayError, QosError
from overlay.limits import (
    DECLARATIONS_MAX_PER_CLIENT,
    ENDPOINTS_MAX_PER_CLIENT,
    PUBLISHERS_TOLD_MAX,
    ROUTE_LINGER_NS,
    SECOND_NS,
)
from overlay.lingering import Lingering
from overlay.messages import (
    Declare,
    Declared,
    EndpointKind,
    Matched,
    Publishers,
    QosChanged,
    QosIntent,
    Refused,
    Resume,
    Role,
)
from overlay.names import check_topic
from overlay.qos import NO_REQUEST, SubscriptionQos, TopicQos, explain_difference, strictest
from overlay.resume import check_sender, positions_of, read_resume
from runtime.access import Action
from runtime.link import Link

if TYPE_CHECKING:
    from edge_broker.broker import EdgeBroker

log = logging.getLogger("isthmus.edge")

_ANSWER_WITHIN_S: Final = 2.0
"""How long a declaration of a known topic waits for ZooKeeper before it is answered anyway."""


class _Known:
    """A topic this edge mirrors."""

    def __init__(self, topic: Topic, watch: Watch, declared: TopicQos) -> None:
        self.topic = topic
        self.watch = watch
        self.declared = declared
        """What the topic offers; `topic.qos` is that, or stricter if a subscriber asks for it."""
        self.subscriptions: dict[tuple[Peer, int], SubscriptionQos] = {}
        """Of local clients: whose they are and what they ask for. Two clients may have drawn the same id."""
        self.registered: Counter[tuple[int, SubscriptionQos]] = Counter()
        """How many of those have the same name in ZooKeeper."""
        self.watchers: dict[tuple[Peer, int], None] = {}
        """Subscriptions of local clients that want to know who publishes."""
        self.view: TopicView | None = None
        self.subscribers: Lingering[Endpoint] = Lingering(ROUTE_LINGER_NS)
        self.viewed = asyncio.Event()
        """The topic's znode has been read at least once."""


class Declarations:
    """The endpoints of all clients of one edge broker."""

    def __init__(self, broker: "EdgeBroker") -> None:
        self._broker = broker
        self._known: dict[str, _Known] = {}
        self._expiries: dict[Link, list[asyncio.TimerHandle]] = {}
        self._pending: set[tuple[Link, int]] = set()
        """Endpoints whose declaration is being worked on."""
        self._running: Counter[Link] = Counter()
        """Declarations that are being worked on."""

    def close(self) -> None:
        """Stop mirroring and forget all timers."""
        for timers in self._expiries.values():
            for timer in timers:
                timer.cancel()
        self._expiries.clear()
        for known in self._known.values():
            known.watch.cancel()
        self._known.clear()

    # From clients

    def declare(self, link: Link, message: Declare) -> None:
        """A client declares an endpoint. Raises ProtocolError on what no client of ours would say."""
        if message.resume is not None:
            positions_of(message.resume)
        try:
            check_topic(message.topic)  # before anybody keeps the name, writes it down or looks for rules
        except InvalidNameError as error:
            link.send(Refused(message.endpoint, _refusal_code(error), str(error)))
            return
        if self._running[link] >= DECLARATIONS_MAX_PER_CLIENT:
            reason = (
                f"{DECLARATIONS_MAX_PER_CLIENT} declarations of this client are being worked on, no more are "
                "allowed at once: wait for answers"
            )
            link.send(Refused(message.endpoint, "busy", reason))
            return
        self._running[link] += 1
        self._pending.add((link, message.endpoint))
        task = self._broker.background.spawn(self._declare(link, message), f"declare {message.topic}")
        task.add_done_callback(lambda _: self._declared(link))

    def _declared(self, link: Link) -> None:
        self._running[link] -= 1
        if not self._running[link]:
            del self._running[link]

    def undeclare(self, link: Link, endpoint: int) -> None:
        """A client takes an endpoint back, perhaps before its declaration has been answered."""
        self._pending.discard((link, endpoint))
        self._remove(link, endpoint)

    def client_is_back(self, link: Link) -> None:
        """A client connected, perhaps again: its endpoints live on."""
        for timer in self._expiries.pop(link, ()):
            timer.cancel()

    def client_is_away(self, link: Link, *, for_good: bool) -> None:
        """A client's connection is gone: its endpoints last as long as their liveliness says."""
        client: Peer = link.context
        endpoints = [
            *((endpoint, publisher.topic) for endpoint, publisher in client.publishers.items()),
            *client.subscriptions.items(),
        ]
        if for_good or not endpoints:
            for endpoint, _ in endpoints:
                self._remove(link, endpoint)
            self._broker.forget_client(link)
            return
        by_liveliness: dict[int, list[int]] = {}
        for endpoint, topic in endpoints:
            by_liveliness.setdefault(topic.qos.liveliness_ns, []).append(endpoint)
        loop = self._broker.hub.loop
        self._expiries[link] = [
            loop.call_later(liveliness_ns / SECOND_NS, self._expire, link, expired)
            for liveliness_ns, expired in by_liveliness.items()
        ]

    def apply_rules(self, link: Link) -> None:
        """Other rules of access are in force: take down what they do not allow any more."""
        access, client = self._broker.access, link.context
        assert access is not None and link.principal is not None
        endpoints = [
            *((item, publisher.topic, Action.PUBLISH) for item, publisher in client.publishers.items()),
            *((item, topic, Action.SUBSCRIBE) for item, topic in client.subscriptions.items()),
        ]
        for endpoint, topic, action in endpoints:
            try:
                access.check(link.principal, action, topic.name)
            except AccessDeniedError as error:
                log.info("endpoint revoked", extra={"topic": topic.name, "reason": str(error)})
                self._revoke(link, endpoint)
                link.send(Refused(endpoint, "access", str(error)))

    def revoke(self, link: Link) -> None:
        """The client is not let in any more: take down all it has."""
        self.client_is_back(link)  # nothing of it expires later
        for endpoint in [*link.context.publishers, *link.context.subscriptions]:
            self._revoke(link, endpoint)

    def _revoke(self, link: Link, endpoint: int) -> None:
        publisher = link.context.publishers.get(endpoint)
        if publisher is not None:
            publisher.retention.forget()  # nothing of it is sent again
        self._remove(link, endpoint)

    def forget_topic(self, topic: Topic) -> None:
        """No client here uses the topic any more."""
        known = self._known.pop(topic.name, None)
        if known is not None:
            known.watch.cancel()
            self._broker.partners.forget_topic(topic.name)

    # Details

    async def _declare(self, link: Link, message: Declare) -> None:
        broker = self._broker
        client: Peer = link.context
        try:
            request = _request_of(message)
            self._check_access(link, message)
            known = await self._known_topic(link, message)
            changed = await self._change_qos(known, message) if message.intent is QosIntent.CHANGE else None
            if request is not NO_REQUEST:
                admit_request(known.declared, request, self._delays(known, message.kind))
            if not link.is_up or (link, message.endpoint) not in self._pending:
                return  # it will declare again when it is back, or has changed its mind
            topic = known.topic
            self._check_access(link, message)  # rules may have changed meanwhile
            is_known = message.endpoint in client.subscriptions or message.endpoint in topic.publishers
            broker.core.add_endpoint(client, message.kind, message.endpoint, topic)
            if link.principal is not None and message.kind is EndpointKind.PUBLISHER:
                client.publishers[message.endpoint].principal = link.principal.name
        except (OverlayError, CoordinationError) as error:
            code = _refusal_code(error)
            log.info("endpoint refused", extra={"topic": message.topic, "code": code, "reason": str(error)})
            link.send(Refused(message.endpoint, code, str(error)))
            return
        finally:
            self._pending.discard((link, message.endpoint))
        if message.kind is EndpointKind.SUBSCRIBER:
            self._note_subscription(known, message.endpoint, client, request)
        endpoint = Endpoint(message.kind, broker.lan, broker.id, message.endpoint, request)
        registered = broker.background.spawn(
            self._register(topic.name, endpoint), f"register {endpoint.name}"
        )
        if not is_known:
            self._resume(topic, client, message)
        viewed = asyncio.ensure_future(known.viewed.wait())
        try:
            await asyncio.wait({registered, viewed}, timeout=_ANSWER_WITHIN_S)
            await asyncio.wait({registered}, timeout=_ANSWER_WITHIN_S)
        finally:
            viewed.cancel()  # also if the broker closes meanwhile
        # What was declared or asked for just now may not have come back from ZooKeeper yet.
        asked = {endpoint.request for endpoint in known.subscribers}
        qos = strictest(changed or topic.qos, asked | {request})
        if message.kind is EndpointKind.PUBLISHER and known.view is None:
            broker.core.resuming.publisher_untold(topic)
        link.send(Declared(message.endpoint, topic.topic_id, qos.to_record()))
        if message.kind is EndpointKind.PUBLISHER:
            link.send(Matched(message.endpoint, topic.subscribers_everywhere))
        elif message.watches:
            known.watchers[client, message.endpoint] = None
            link.send(_publishers(message.endpoint, topic))

    def _resume(self, topic: Topic, client: Peer, message: Declare) -> None:
        """An endpoint that is new here goes on where it was, if it was at another edge."""
        broker = self._broker
        if message.kind is EndpointKind.PUBLISHER:
            if message.intent is QosIntent.NEW:
                broker.core.resuming.publisher_here(topic, broker.hub.clock())
        elif message.resume is not None:
            frame = Resume(
                topic.name, message.endpoint, broker.lan, broker.id, message.request, message.resume
            )
            broker.arrivals.begin(topic, client, frame)

    def resume_elsewhere(self, link: Link, message: Resume) -> None:
        """A subscriber has come to another edge: send there from now on, and what it has missed."""
        broker = self._broker
        if link.role is Role.EDGE:
            check_sender(message, link.peer, broker.lan)
        positions, request = read_resume(message)
        known = self._known.get(message.topic)
        if known is None or known.view is None or message.edge == broker.id:
            return
        now_ns = broker.hub.clock()
        endpoint = Endpoint(EndpointKind.SUBSCRIBER, message.lan, message.edge, message.endpoint, request)
        known.subscribers.expect(endpoint, now_ns)
        self._set_interest(known)
        router, edge = ("", link.peer) if link.role is Role.EDGE else (link.peer, "")
        broker.flush(broker.core.resuming.elsewhere(known.topic, positions, now_ns, router, edge))

    def _note_subscription(
        self, known: _Known, endpoint: int, client: Peer, request: SubscriptionQos
    ) -> None:
        before = known.subscriptions.get((client, endpoint))
        if before == request:
            return
        known.subscriptions[client, endpoint] = request
        known.registered[endpoint, request] += 1
        if before is not None:
            self._forget_subscription(known, endpoint, before)

    async def _change_qos(self, known: _Known, message: Declare) -> TopicQos:
        """A publisher wants its topic to have another quality of service. Raises if it cannot be.

        The change takes effect when it comes back from ZooKeeper, here as at all other brokers.
        """
        if message.qos is None or message.kind is not EndpointKind.PUBLISHER:
            raise QosError(
                "a change of the topic's quality of service needs a publisher and all fields: "
                "declare a publisher with them"
            )
        asked = TopicQos.from_record(message.qos)
        delays = self._delays(known, message.kind)

        def decide(current: TopicQos, requests: frozenset[SubscriptionQos]) -> TopicQos:
            if asked != current:
                admit(asked, requests, delays)
            return asked

        record = await self._broker.coordinator.change_qos(known.topic.name, decide)
        log.info("quality of service changed", extra={"topic": record.name, "qos": record.qos.to_record()})
        return record.qos

    def _delays(self, known: _Known, kind: EndpointKind) -> Delays:
        """What a declaration is checked against: what is configured, and what is measured if it is longer.

        The network counts only for topics that cross it: with endpoints of the other kind elsewhere.
        """
        configured = self._broker.config.delays
        if known.view is None or not any(
            endpoint.kind is not kind and endpoint.lan != self._broker.lan
            for endpoint in known.view.endpoints
        ):
            return configured
        link = self._broker.measured_router(known.topic.primary)
        if link is None:
            return configured
        publishes = kind is EndpointKind.PUBLISHER
        return configured.at_least(
            Delays(
                publisher_to_primary_ns=link.one_way_ns if publishes else 0,
                primary_to_subscriber_ns=0 if publishes else link.one_way_ns,
                primary_to_backup_ns=0,
                failover_ns=configured.failover_ns + link.noticed_late_ns,
            )
        )

    async def _register(self, topic: str, endpoint: Endpoint) -> None:
        try:
            await self._broker.coordinator.add_endpoint(topic, endpoint, {})
        except CoordinationError as error:
            log.warning("endpoint not registered yet", extra={"topic": topic, "error": str(error)})

    async def _known_topic(self, link: Link, message: Declare) -> _Known:
        """The mirrored topic of a declaration. Raises if it cannot be."""
        client: Peer = link.context
        endpoints = len(client.publishers) + len(client.subscriptions)
        is_known = message.endpoint in client.publishers or message.endpoint in client.subscriptions
        if endpoints >= ENDPOINTS_MAX_PER_CLIENT and not is_known:
            raise QosError(
                f"this client has {ENDPOINTS_MAX_PER_CLIENT} endpoints, no more are allowed: "
                "close some, or use a second client"
            )
        name = message.topic
        qos = TopicQos.from_record(message.qos) if message.qos is not None else None
        must_match = message.intent is QosIntent.MATCH
        if qos is not None and must_match:
            check_admission(qos, self._broker.config.delays)
        known = self._known.get(name)
        if known is None:
            await self._check_new_topic(link, name)
            record = await self._broker.coordinator.declare_topic(name, qos, must_match=must_match)
            known = self._known.get(name)
            if known is None:
                topic = self._broker.core.ensure_topic(record.id, name, record.qos)
                watch = self._broker.coordinator.watch_topic(name, self._on_topic)
                known = self._known[name] = _Known(topic, watch, record.qos)
        if qos is not None and must_match and qos != known.declared:
            raise TopicExistsError(
                f"topic {name} exists with another quality of service: "
                f"{explain_difference(known.declared, qos)}; leave it out, change the topic, "
                "or use another one"
            )
        return known

    def _check_access(self, link: Link, message: Declare) -> None:
        """Raise AccessDeniedError if the client may not have this endpoint."""
        access, principal = self._broker.access, link.principal
        if access is None or principal is None:
            return
        publishes = message.kind is EndpointKind.PUBLISHER
        access.check(principal, Action.PUBLISH if publishes else Action.SUBSCRIBE, message.topic)
        if message.intent is QosIntent.CHANGE:
            access.check(principal, Action.DECLARE, message.topic)
        known = self._known.get(message.topic)
        owner = known.topic.publishers.get(message.endpoint) if known is not None else None
        if owner is not None and owner.principal not in {"", principal.name}:
            raise access.denial(
                Action.PUBLISH,
                f"publisher {message.endpoint:016x} belongs to another principal: choose another id",
            )

    async def _check_new_topic(self, link: Link, name: str) -> None:
        """Raise AccessDeniedError if the topic does not exist and the client may not make it."""
        access, principal = self._broker.access, link.principal
        if access is None or principal is None or access.may(principal, Action.DECLARE, name):
            return
        try:
            await self._broker.coordinator.topic(name)
        except UnknownTopicError:
            access.check(principal, Action.DECLARE, name)

    def _on_topic(self, view: TopicView) -> None:
        """The topic's znode or endpoints changed."""
        known = self._known.get(view.record.name)
        if known is None:
            return
        if known.view is None and known.topic.mixed_until_ns:
            # Who is missing from our first view may be about to register again.
            self._broker.core.resuming.publisher_here(known.topic, self._broker.hub.clock())
        known.view = view
        known.declared = view.record.qos
        known.subscribers.update(
            (endpoint for endpoint in view.endpoints if endpoint.kind is EndpointKind.SUBSCRIBER),
            self._broker.hub.clock(),
        )
        publishers_before = known.topic.known_publishers
        self._set_interest(known)
        if known.topic.known_publishers != publishers_before:
            for client, endpoint_id in known.watchers:
                self._broker.tell_client(client, _publishers(endpoint_id, known.topic))
        self._broker.partners.set_topic(view.record.name, view.record.primary, view.record.backup)
        self._broker.dial_routers((view.record.primary, view.record.backup))
        self._broker.arrivals.tell()
        known.viewed.set()
        subscribers = sum(endpoint.kind is EndpointKind.SUBSCRIBER for endpoint in view.endpoints)
        if subscribers != known.topic.subscribers_everywhere:
            known.topic.subscribers_everywhere = subscribers
            for endpoint_id, publisher in known.topic.publishers.items():
                self._broker.tell_client(publisher.client, Matched(endpoint_id, subscribers))

    def _set_interest(self, known: _Known) -> None:
        assert known.view is not None
        record = known.view.record
        self._set_qos(known, strictest(record.qos, (endpoint.request for endpoint in known.subscribers)))
        touched = self._broker.core.set_interest(
            known.topic,
            primary=record.primary,
            backup=record.backup,
            subscribers={(endpoint.lan, endpoint.edge) for endpoint in known.subscribers},
            publishers=frozenset(
                endpoint.endpoint_id
                for endpoint in known.view.endpoints
                if endpoint.kind is EndpointKind.PUBLISHER
            ),
            now_ns=self._broker.hub.clock(),
        )
        self._broker.flush(touched)

    def _set_qos(self, known: _Known, qos: TopicQos) -> None:
        """Serve a topic with this from now on, and tell its local endpoints."""
        topic = known.topic
        if qos == topic.qos:
            return
        self._broker.core.set_qos(topic, qos, self._broker.hub.clock())
        self._broker.settle_soon()
        record = qos.to_record()
        for endpoint_id, publisher in topic.publishers.items():
            self._broker.tell_client(publisher.client, QosChanged(endpoint_id, record))
        for client, endpoint_id in known.subscriptions:
            self._broker.tell_client(client, QosChanged(endpoint_id, record))

    def expire_interest(self) -> Iterator[None]:
        """Stop sending where nobody has subscribed for a while; called every second, in steps."""
        since_ns, until_ns = self._broker.session.answering_ns
        for number, known in enumerate(list(self._known.values()), 1):
            if known.subscribers.expire(until_ns, since_ns):
                self._set_interest(known)
            if number % TOPICS_AT_A_TIME == 0:
                yield

    def _expire(self, link: Link, endpoints: list[int]) -> None:
        log.info("client did not come back", extra={"client": link.peer, "endpoints": len(endpoints)})
        for endpoint in endpoints:
            self._remove(link, endpoint)
        client: Peer = link.context
        if not client.publishers and not client.subscriptions:
            self._expiries.pop(link, None)
            self._broker.forget_client(link)

    def _remove(self, link: Link, endpoint: int) -> None:
        broker = self._broker
        removed = broker.core.remove_endpoint(link.context, endpoint, broker.hub.clock())
        if removed is not None:
            topic, kind = removed
            known = self._known.get(topic.name)
            if kind is EndpointKind.PUBLISHER or known is None:
                self._unregister_soon(topic.name, kind, endpoint, NO_REQUEST)
                return
            known.watchers.pop((link.context, endpoint), None)
            request = known.subscriptions.pop((link.context, endpoint), None)
            if request is not None:
                self._forget_subscription(known, endpoint, request)

    def _forget_subscription(self, known: _Known, endpoint: int, request: SubscriptionQos) -> None:
        known.registered[endpoint, request] -= 1
        if not known.registered[endpoint, request]:  # else another client drew the same id
            del known.registered[endpoint, request]
            self._unregister_soon(known.topic.name, EndpointKind.SUBSCRIBER, endpoint, request)

    def _unregister_soon(
        self, topic: str, kind: EndpointKind, endpoint_id: int, request: SubscriptionQos
    ) -> None:
        broker = self._broker
        endpoint = Endpoint(kind, broker.lan, broker.id, endpoint_id, request)
        broker.background.spawn(self._unregister(topic, endpoint), f"unregister from {topic}")

    async def _unregister(self, topic: str, endpoint: Endpoint) -> None:
        try:
            await self._broker.coordinator.remove_endpoint(topic, endpoint)
        except CoordinationError as error:
            log.warning("endpoint not unregistered yet", extra={"topic": topic, "error": str(error)})


def _publishers(endpoint: int, topic: Topic) -> Publishers:
    """Who publishes on a topic, as far as one frame should tell."""
    told = tuple(islice(topic.known_publishers, PUBLISHERS_TOLD_MAX))
    return Publishers(endpoint, told, len(told) == len(topic.known_publishers))


def _request_of(message: Declare) -> SubscriptionQos:
    """What a declaration asks for. Raises QosError if it may not."""
    if message.request is None:
        return NO_REQUEST
    request = SubscriptionQos.from_record(message.request)
    if request == NO_REQUEST:
        return NO_REQUEST
    if message.kind is EndpointKind.PUBLISHER:
        raise QosError("a publisher asks for nothing: declare what the topic offers")
    return request


def _refusal_code(error: Exception) -> str:
    if isinstance(error, InvalidNameError):
        return "invalid_name"
    if isinstance(error, AccessDeniedError):
        return "access"
    if isinstance(error, QosError | TopicExistsError):
        return "qos"
    return "coordination"
