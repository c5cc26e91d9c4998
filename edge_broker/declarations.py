"""What clients declare: endpoints come and go, in the core and in ZooKeeper.

A declaration of a topic this edge serves already takes effect at once; a new topic needs
ZooKeeper first. The client is answered when its endpoint is registered, or, if ZooKeeper is
away but the topic is known, after a short wait: data flows without ZooKeeper.

An endpoint outlives its client's connection by its liveliness period. A client that comes back
in time finds everything as it was; one that says goodbye is taken at its word.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from coordinator import CoordinationError, Endpoint, TopicExistsError, TopicView, Watch
from edge_broker.model import Peer, Topic
from overlay.bounds import check_admission
from overlay.errors import InvalidNameError, OverlayError, QosError
from overlay.limits import ENDPOINTS_MAX_PER_CLIENT, ROUTE_LINGER_NS, SECOND_NS
from overlay.lingering import Lingering
from overlay.messages import Declare, Declared, EndpointKind, Matched, Refused
from overlay.names import check_topic
from overlay.qos import TopicQos, explain_difference
from runtime.link import Link

if TYPE_CHECKING:
    from edge_broker.broker import EdgeBroker

log = logging.getLogger("isthmus.edge")

_ANSWER_WITHIN_S: Final = 2.0
"""How long a declaration of a known topic waits for ZooKeeper before it is answered anyway."""


class _Known:
    """A topic this edge mirrors."""

    def __init__(self, topic: Topic, watch: Watch) -> None:
        self.topic = topic
        self.watch = watch
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
        """A client declares an endpoint."""
        self._pending.add((link, message.endpoint))
        self._broker.background.spawn(self._declare(link, message), f"declare {message.topic}")

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

    def forget_topic(self, topic: Topic) -> None:
        """No client here uses the topic any more."""
        known = self._known.pop(topic.name, None)
        if known is not None:
            known.watch.cancel()

    # Details

    async def _declare(self, link: Link, message: Declare) -> None:
        broker = self._broker
        client: Peer = link.context
        try:
            known = await self._known_topic(link, message)
            if not link.is_up or (link, message.endpoint) not in self._pending:
                return  # it will declare again when it is back, or has changed its mind
            topic = known.topic
            broker.core.add_endpoint(client, message.kind, message.endpoint, topic)
        except (OverlayError, CoordinationError) as error:
            code = _refusal_code(error)
            log.info("endpoint refused", extra={"topic": message.topic, "code": code, "reason": str(error)})
            link.send(Refused(message.endpoint, code, str(error)))
            return
        finally:
            self._pending.discard((link, message.endpoint))
        endpoint = Endpoint(message.kind, broker.lan, broker.id, message.endpoint)
        registered = broker.background.spawn(
            self._register(topic.name, endpoint), f"register {endpoint.name}"
        )
        viewed = asyncio.ensure_future(known.viewed.wait())
        await asyncio.wait({registered, viewed}, timeout=_ANSWER_WITHIN_S)
        await asyncio.wait({registered}, timeout=_ANSWER_WITHIN_S)
        viewed.cancel()
        link.send(Declared(message.endpoint, topic.topic_id, topic.qos.to_record()))
        if message.kind is EndpointKind.PUBLISHER:
            link.send(Matched(message.endpoint, topic.subscribers_everywhere))

    async def _register(self, topic: str, endpoint: Endpoint) -> None:
        try:
            await self._broker.coordinator.add_endpoint(topic, endpoint, {})
        except CoordinationError as error:
            log.warning("endpoint not registered yet", extra={"topic": topic, "error": str(error)})

    async def _known_topic(self, link: Link, message: Declare) -> _Known:
        """The mirrored topic of a declaration. Raises if it cannot be."""
        client: Peer = link.context
        if len(client.publishers) + len(client.subscriptions) >= ENDPOINTS_MAX_PER_CLIENT:
            raise QosError(
                f"this client has {ENDPOINTS_MAX_PER_CLIENT} endpoints, no more are allowed: "
                "close some, or use a second client"
            )
        name = check_topic(message.topic)
        qos = TopicQos.from_record(message.qos) if message.qos is not None else None
        if qos is not None:
            check_admission(qos, self._broker.config.delays)
        known = self._known.get(name)
        if known is None:
            record = await self._broker.coordinator.declare_topic(name, qos)
            known = self._known.get(name)
            if known is None:
                topic = self._broker.core.ensure_topic(record.id, name, record.qos)
                watch = self._broker.coordinator.watch_topic(name, self._on_topic)
                known = self._known[name] = _Known(topic, watch)
        if qos is not None and qos != known.topic.qos:
            raise TopicExistsError(
                f"topic {name} exists with another quality of service: "
                f"{explain_difference(known.topic.qos, qos)}; leave it out, or use another topic"
            )
        return known

    def _on_topic(self, view: TopicView) -> None:
        """The topic's znode or endpoints changed."""
        known = self._known.get(view.record.name)
        if known is None:
            return
        known.view = view
        known.subscribers.update(
            (endpoint for endpoint in view.endpoints if endpoint.kind is EndpointKind.SUBSCRIBER),
            self._broker.hub.clock(),
        )
        self._set_interest(known)
        self._broker.dial_routers((view.record.primary, view.record.backup))
        known.viewed.set()
        subscribers = sum(endpoint.kind is EndpointKind.SUBSCRIBER for endpoint in view.endpoints)
        if subscribers != known.topic.subscribers_everywhere:
            known.topic.subscribers_everywhere = subscribers
            for endpoint_id, publisher in known.topic.publishers.items():
                self._broker.tell_client(publisher.client, Matched(endpoint_id, subscribers))

    def _set_interest(self, known: _Known) -> None:
        assert known.view is not None
        record = known.view.record
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

    def expire_interest(self, now_ns: int) -> None:
        """Stop sending where nobody has subscribed for a while; called every second."""
        for known in self._known.values():
            if known.subscribers.expire(now_ns):
                self._set_interest(known)

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
            broker.background.spawn(
                self._unregister(topic.name, Endpoint(kind, broker.lan, broker.id, endpoint)),
                f"unregister from {topic.name}",
            )

    async def _unregister(self, topic: str, endpoint: Endpoint) -> None:
        try:
            await self._broker.coordinator.remove_endpoint(topic, endpoint)
        except CoordinationError as error:
            log.warning("endpoint not unregistered yet", extra={"topic": topic, "error": str(error)})


def _refusal_code(error: Exception) -> str:
    if isinstance(error, InvalidNameError):
        return "invalid_name"
    if isinstance(error, QosError | TopicExistsError):
        return "qos"
    return "coordination"
