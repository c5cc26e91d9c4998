"""The asynchronous client: one connection to an edge broker, any number of endpoints on it.

    async with connect("10.0.0.7:7400") as client:
        publisher = await client.publisher("plant/temperature")
        await publisher.publish(b"21.5")
        async with await client.subscribe("plant/alarm") as alarms:
            async for message in alarms:
                print(message.payload)

Without an address, `connect()` finds an edge broker of the LAN by multicast. If the edge dies,
the client turns to another one of the LAN, declares its endpoints again, sends what the old one may
not have passed on, and says what its subscribers got last, so that the rest is sent again; duplicates
are dropped on the way and here. If the edge is about to leave, the client goes over while it still serves:
it listens to both for a while, and publishes through the new one once the old one has taken everything.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from clients.errors import ClientError, ClosedError, EdgeNotFoundError, RefusedError
from clients.publisher import Publisher
from clients.subscription import Overflow, Subscription
from clients.tracing import ClientTracing
from overlay.batch import Run, decode_batch_header, decode_messages, encode_message
from overlay.delay import add_shifts, age_bound_ns, link_bound_ns
from overlay.discovery import DISCOVERY_GROUP, DISCOVERY_PORT
from overlay.errors import CloseReason, InvalidNameError, ProtocolError
from overlay.history import Verdict
from overlay.limits import DRIFT_MAX_PPM, DRIFT_PPM, ENDPOINT_ID_MAX, MIB, MOVED_OVERLAP_NS, SECOND_NS
from overlay.locator import Locator
from overlay.messages import (
    UNKNOWN_CLOCK_SHIFT,
    ControlMessage,
    Declare,
    Declared,
    Draining,
    Hello,
    Matched,
    Message,
    Publishers,
    QosChanged,
    Refused,
    Role,
    Undeclare,
    Welcome,
)
from overlay.outbox import Outbox, Ticket
from overlay.qos import SubscriptionQos, TopicQos
from runtime.discovery import discover
from runtime.host import Host
from runtime.hub import Dialer, Hub, Identity
from runtime.link import Link, LinkStatistics
from runtime.tls import Tls
from runtime.tracing import TraceSettings

BACKLOG_MAX_BYTES: Final = 4 * MIB
"""Bytes that may wait for the edge broker before `publish` waits."""
CONNECT_TIMEOUT_S: Final = 5.0

_Endpoint = Publisher | Subscription


class _Edge(NamedTuple):
    """Who answers on a link."""

    name: str
    traced: int
    """Its number in the trace."""


class Client:
    """A connection to the overlay. Use `connect()` to get one."""

    def __init__(
        self,
        edges: Sequence[str] = (),
        *,
        lan: str = "",
        group: str = DISCOVERY_GROUP,
        port: int = DISCOVERY_PORT,
        interface: str = "0.0.0.0",
        host: Host | None = None,
        drift_ppm: int = DRIFT_PPM,
        trace: TraceSettings | None = None,
        certificates: Path | str | None = None,
        principal: str = "",
        token: str = "",
    ) -> None:
        """`drift_ppm` is the most that this host's clock drifts; age bounds reckon with it, also those of
        what this client publishes, whatever other nodes say of theirs.

        `certificates` is a folder with authority.pem: the connection is encrypted, and only edge brokers
        with a certificate are talked to. `principal` names the certificate in it that proves who we are;
        a `token` does so without.
        """
        tls = Tls.of_client(Path(certificates), principal) if certificates is not None else None
        if tls is None and (principal or token):
            raise ClientError(
                f"{'a certificate' if principal else 'a token'} needs an encrypted connection: "
                "give the folder of certificates with authority.pem"
            )
        if not 1 <= drift_ppm <= DRIFT_MAX_PPM:
            raise ValueError(
                f"drift_ppm is {drift_ppm}: it must be from 1 to {DRIFT_MAX_PPM}; "
                "`isthmus doctor --clock` measures it"
            )
        self.edge = ""
        """Name of the edge broker we are connected to."""
        self.lan = lan
        self.reconnects = 0
        self._host = host or Host()
        self.clock = self._host.clock
        self.incarnation = self._host.new_incarnation()
        self._given = [Locator.parse(edge) for edge in edges]
        self._candidates: list[Locator] = list(self._given)
        self._next_candidate = 0
        self._group = group
        self._port = port
        self._interface = interface
        self._cluster = ""
        self._endpoints: dict[int, _Endpoint] = {}
        self._topics: dict[int, list[Subscription]] = {}
        self._undeclared: set[int] = set()
        self._room = asyncio.Event()
        self._connected = asyncio.Event()
        self._last_error = ""
        self._closed = False
        self._hub = Hub(
            Identity(Role.CLIENT, f"{self.incarnation:016x}", self.incarnation, lan, drift_ppm=drift_ppm),
            self,
            clock=self.clock,
            tls=tls,
            token=token,
        )
        self._links_made = 0
        self._link = self._make_link()
        """The edge broker we publish through."""
        self._dialer: Dialer | None = None
        self._next: tuple[Link, Dialer] | None = None
        """The one we are going over to, until it knows all our endpoints."""
        self._old: list[Link] = []
        """Those we have gone over from, as long as we listen to them."""
        self._handing_over = False
        """The one we have just gone over from has not taken yet all that it was sent."""
        self._tried: Locator | None = None
        self._served_by = 0
        """The incarnation of the edge broker that knows our endpoints."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._tracing = None if trace is None else ClientTracing(trace, self._hub.identity.node)

    # Life

    async def start(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect to an edge broker. Raises EdgeNotFoundError if none can be reached in time."""
        self._dialer = self._hub.dial(self._link, self._choose_edge)
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            looked = ", ".join(map(str, self._given)) or (
                f"multicast group {self._group}:{self._port}" + (f" for LAN {self.lan}" if self.lan else "")
            )
            last = self._dialer.last_error or "nobody answered"
            await self.close()
            raise EdgeNotFoundError(
                f"no edge broker reached within {timeout_s:g} s at {looked} ({last}): "
                "is one running? give its address, or start one with `isthmus edge`"
            ) from None

    async def close(self, flush_timeout_s: float = 5.0) -> None:
        """Send what waits, then leave. Endpoints end at once, not after their liveliness."""
        if self._closed:
            return
        if self._link.is_up:
            with contextlib.suppress(TimeoutError):
                await self.flush(flush_timeout_s)
        self._closed = True
        self._room.set()
        for endpoint in list(self._endpoints.values()):
            endpoint.end(ClosedError("the client has been closed"))
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._hub.close(CloseReason.GOODBYE)
        if self._tracing is not None:
            await self._tracing.close()

    @property
    def is_connected(self) -> bool:
        """An edge broker is connected right now; if not, the client is looking for one."""
        return self._link.is_up

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the edge broker has acknowledged everything published. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self._is_idle and not self._closed:
                self._room.clear()
                await self._room.wait()

    # Endpoints

    async def publisher(self, topic: str, qos: TopicQos | None = None) -> Publisher:
        """Declare a publisher. Raises RefusedError with the edge broker's reason."""
        publisher = Publisher(self, self._new_endpoint_id(), topic, qos)
        await self._declare(publisher)
        return publisher

    async def subscribe(
        self,
        topic: str,
        qos: TopicQos | None = None,
        *,
        request: SubscriptionQos | None = None,
        overflow: Overflow = Overflow.WAIT,
        limit_ms: float | None = None,
        allowance_ms: float | None = None,
        aware: bool = False,
    ) -> Subscription:
        """Declare a subscription; messages arrive from now on. Raises RefusedError.

        `qos` is for a new topic. `request` is what this subscriber needs: as long as it is there,
        the topic is served with that if it is stricter than what the topic and others ask for.

        A message is `slow` if it may be older than `limit_ms`, by default the topic's deadline. With
        `aware`, `subscription.next_event()` tells of slow messages, of gaps, and of live publishers
        that were not heard for the topic's period and `allowance_ms`, by default the limit. A publisher
        that was never heard counts from when the edge broker names it: whoever declares a publisher on a
        topic with a period and does not publish is told of, too.
        """
        subscription = Subscription(
            self, self._new_endpoint_id(), topic, qos, overflow, request, limit_ms, allowance_ms, aware
        )
        await self._declare(subscription)
        return subscription

    async def undeclare(self, endpoint_id: int) -> None:
        """Take an endpoint back; publishers send what waits first."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return
        if isinstance(endpoint, Publisher) and self._link.is_up:
            await self.flush()
        self._forget(endpoint)
        for link in self._links:
            link.send(Undeclare(endpoint.endpoint_id))
        endpoint.end(ClosedError(f"the endpoint on {endpoint.topic} has been closed"))

    # For endpoints

    def link_statistics(self) -> LinkStatistics:
        """The link to the edge broker: round trip, what is known of its clock, counts."""
        return self._link.statistics()

    @property
    def has_room(self) -> bool:
        """Another message may be queued."""
        return self._link.outbox.load_bytes < BACKLOG_MAX_BYTES

    async def wait_for_room(self) -> None:
        """Wait until the edge broker has taken enough of what waits."""
        while not self.has_room and not self._closed:
            self._room.clear()
            await self._room.wait()

    def send(self, run: Run) -> None:
        """Queue messages; they leave in this loop turn if the link is up."""
        if self._tracing is not None:
            self._tracing.publish(run)
        self._link.outbox.append(0, 0, self.incarnation, 0, run, self.clock())
        self._link.flush_soon()

    def send_again(self, run: Run) -> None:
        """The same for messages that have been sent before."""
        self._link.outbox.append(0, 0, self.incarnation, 0, run, self.clock())
        self._link.flush_soon()

    def trace(
        self,
        message: Message,
        verdict: Verdict,
        age_ns: int | None,
        bound_ns: int,
        now_ns: int,
        edge: int,
    ) -> None:
        """Record what became of a message that came for a subscription."""
        if self._tracing is not None:
            self._tracing.deliver(message, verdict, age_ns, bound_ns, now_ns, edge)

    def change_qos(self, message: Declare) -> None:
        """Ask the edge broker for another quality of service of a topic."""
        if not self._link.send(message):
            raise ClosedError(f"no edge broker is connected to change topic {message.topic}: try again")

    def pause_reading(self) -> None:
        """A subscription is full: let messages wait at the edge broker."""
        for link in self._links:
            if link.connection is not None:
                link.connection.pause_reading()

    def resume_reading(self) -> None:
        """No subscription is full any more."""
        if not any(subscription.is_full for subscription in self._subscriptions):
            for link in self._links:
                if link.connection is not None:
                    link.connection.resume_reading()

    # Called by the hub

    def admit(self, hello: Hello) -> tuple[Link, Welcome]:
        """Clients accept no connections."""
        raise AssertionError(f"unexpected hello from {hello.node}")

    def on_welcome(self, link: Link, welcome: Welcome) -> None:
        """The edge broker answers."""
        if welcome.role is not Role.EDGE:
            raise ProtocolError(CloseReason.UNEXPECTED_FRAME, f"a {welcome.role} answers, expected an edge")
        if self._cluster and welcome.cluster != self._cluster:
            raise ProtocolError(CloseReason.WRONG_CLUSTER, "this edge belongs to another cluster than before")
        self._learn(welcome.edges)
        self._cluster = welcome.cluster
        self.lan = welcome.lan
        traced = 0 if self._tracing is None else self._tracing.welcome(link, welcome.node, welcome.lan)
        link.context = _Edge(welcome.node, traced)

    def on_link_up(self, link: Link) -> None:
        """Connected: declare everything, then let data flow."""
        link.holds_data = True
        if self._served_by:
            for subscription in self._subscriptions:
                subscription.resume()
        if link is self._link:
            self.edge = link.context.name
            if self._connected.is_set():
                self.reconnects += 1
            self._connected.set()
            if self._served_by not in (0, link.peer_incarnation):
                self._publish_again(link.withdraw())
            self._served_by = link.peer_incarnation
        self._undeclared = set(self._endpoints)
        for endpoint in self._endpoints.values():
            link.send(endpoint.declaration())
        self._release_when_declared()

    def on_link_down(self, link: Link, reason: CloseReason, detail: str) -> None:
        """Disconnected: the dialer tries the next edge broker."""
        link.holds_data = True
        self._room.set()  # whoever waits for the old edge broker to take something waits in vain
        if link is not self._link:
            return
        self.edge = ""
        for endpoint in self._endpoints.values():
            endpoint.connection_lost()
        if self._next is not None:
            self._go_over(*self._next)

    def on_data(self, link: Link, body: bytes, now_ns: int) -> None:
        """Messages for our subscriptions."""
        header = decode_batch_header(body)
        link.messages_received += header.messages
        shift_ns = add_shifts(header.clock_shift_ns, link.clock.shift_at(now_ns))
        drift_ppm = link.clock.drift_ppm
        bound_ns = link_bound_ns(header.sent_ns, link.clock.shift_ns, now_ns, drift_ppm)
        edge: int = link.context.traced
        for message in decode_messages(body):
            age_ns: int | None = None
            if message.born_ns and shift_ns != UNKNOWN_CLOCK_SHIFT:
                age_ns = age_bound_ns(max(0, now_ns - message.born_ns + shift_ns), drift_ppm)
            for subscription in self._topics.get(message.topic_id, ()):
                verdict = subscription.deliver(message, age_ns, now_ns, bound_ns, edge)
                if self._tracing is not None and verdict is not None:
                    self._tracing.deliver(message, verdict, age_ns, bound_ns, now_ns, edge)

    def on_control(self, link: Link, message: ControlMessage) -> None:
        """The edge broker answers a declaration, or tells of subscribers."""
        if isinstance(message, Declared):
            self._on_declared(link, message)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, Matched):
            endpoint = self._endpoints.get(message.endpoint)
            if isinstance(endpoint, Publisher):
                endpoint.set_subscribers(message.subscribers)
        elif isinstance(message, QosChanged):
            if (changed := self._endpoints.get(message.endpoint)) is not None:
                changed.set_served(message.qos)
                if self._tracing is not None:
                    self._tracing.define_topic(changed)
        elif isinstance(message, Publishers):
            watching = self._endpoints.get(message.endpoint)
            if isinstance(watching, Subscription) and message.complete:
                watching.set_publishers(frozenset(message.publishers))
        elif isinstance(message, Draining):
            self._begin_going_over(link, message)
        else:
            raise ProtocolError(CloseReason.UNEXPECTED_FRAME, f"{type(message).__name__} to a client")

    # Going over to another edge broker

    def _begin_going_over(self, link: Link, message: Draining) -> None:
        """Our edge broker is about to leave: look for another one while it still serves us."""
        if link is not self._link or self._next is not None or self._closed:
            return
        self._learn(message.edges)
        others = [candidate for candidate in self._candidates if candidate != self._tried]
        if not others:
            return  # ours will be back, or another one is found when it has gone
        self._candidates, self._next_candidate = others, 0
        following = self._make_link()
        self._next = following, self._hub.dial(following, self._choose_edge)

    def _go_over(self, following: Link, dialer: Dialer) -> None:
        """The other edge broker knows all our endpoints, or ours is gone already."""
        assert self._dialer is not None
        old, old_dialer = self._link, self._dialer
        self._link, self._dialer, self._next = following, dialer, None
        self._old.append(old)
        self._handing_over = True
        leaving = self._hub.loop.create_task(self._leave(old, old_dialer), name=f"leave {old.peer}")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        if following.is_up:
            self.edge = following.context.name
            self.reconnects += 1
            self._served_by = following.peer_incarnation

    async def _leave(self, old: Link, dialer: Dialer) -> None:
        """Leave an edge broker once it has all we sent it and has sent us all it had."""
        dialer.locator = _nowhere
        try:
            while old.is_up and not old.outbox.is_idle:
                self._room.clear()
                await self._room.wait()
            if undelivered := old.withdraw():
                self._publish_again([*undelivered, *self._link.withdraw()])
            self._handing_over = False
            self._release_when_declared()
            if old.is_up and any(self._subscriptions):
                await asyncio.sleep(MOVED_OVERLAP_NS / SECOND_NS)
        finally:
            self._old.remove(old)
            await dialer.stop()

    def _publish_again(self, bodies: Iterable[bytes]) -> None:
        """Another edge broker has taken over: it gets these, and what the old one may not have passed on."""
        undelivered: dict[int, dict[int, bytes]] = {}
        for body in bodies:
            for item in decode_messages(body):
                undelivered.setdefault(item.publisher, {})[item.sequence] = encode_message(
                    item.topic_id, item.publisher, item.sequence, item.born_ns, item.payload
                )
        for endpoint in self._endpoints.values():
            if isinstance(endpoint, Publisher):
                endpoint.publish_again(undelivered.get(endpoint.endpoint_id, {}))

    # Details

    @property
    def _links(self) -> list[Link]:
        following = [self._next[0]] if self._next is not None else []
        return [self._link, *following, *self._old]

    @property
    def _subscriptions(self) -> Iterator[Subscription]:
        return (endpoint for endpoint in self._endpoints.values() if isinstance(endpoint, Subscription))

    @property
    def _is_idle(self) -> bool:
        return self._link.outbox.is_idle and not self._handing_over

    @property
    def _declaring(self) -> Link:
        """The link on which endpoints are to be declared."""
        return self._next[0] if self._next is not None and self._next[0].is_up else self._link

    def _make_link(self) -> Link:
        self._links_made += 1
        name = "edge" if self._links_made == 1 else f"edge-{self._links_made}"
        link = Link(name, Role.EDGE, self.lan, Outbox())
        link.holds_data = True
        link.on_acknowledged = self._make_room
        return link

    def _learn(self, edges: Iterable[str]) -> None:
        """These are edge brokers of the LAN."""
        try:
            others = [Locator.parse(edge) for edge in edges]
        except InvalidNameError as error:
            raise ProtocolError(CloseReason.BAD_MESSAGE, str(error)) from error
        self._candidates = list(dict.fromkeys([*self._given, *self._candidates, *others]))

    async def _choose_edge(self) -> Locator:
        """The next edge broker to try; asks the LAN again when all known ones have been tried."""
        while True:
            if self._next_candidate < len(self._candidates):
                self._next_candidate += 1
                self._tried = self._candidates[self._next_candidate - 1]
                return self._tried
            self._next_candidate = 0
            if self._candidates and self._given:
                continue
            found = await discover(
                lan=self._hub.identity.lan,
                interface=self._interface,
                group=self._group,
                port=self._port,
                timeout_s=1.0,
            )
            for announcement in found:
                locator = Locator.parse(announcement.locator)
                if locator not in self._candidates:
                    self._candidates.append(locator)

    def _new_endpoint_id(self) -> int:
        return self._host.new_incarnation() & ENDPOINT_ID_MAX

    async def _declare(self, endpoint: _Endpoint) -> None:
        if self._closed:
            raise ClosedError("the client has been closed")
        self._endpoints[endpoint.endpoint_id] = endpoint
        self._undeclared.add(endpoint.endpoint_id)
        for link in dict.fromkeys((self._link, self._declaring)):
            link.send(endpoint.declaration())
        try:
            await endpoint.wait_declared()
        except BaseException:
            if endpoint.endpoint_id in self._endpoints:
                self._forget(endpoint)
                for link in self._links:
                    link.send(Undeclare(endpoint.endpoint_id))
            self._undeclared.discard(endpoint.endpoint_id)
            self._release_when_declared()
            raise

    def _on_declared(self, link: Link, message: Declared) -> None:
        endpoint = self._endpoints.get(message.endpoint)
        if endpoint is not None:
            endpoint.set_declared(message)
            if self._tracing is not None:
                self._tracing.define_topic(endpoint)
            if isinstance(endpoint, Subscription):
                subscriptions = self._topics.setdefault(message.topic_id, [])
                if endpoint not in subscriptions:
                    subscriptions.append(endpoint)
        if link is self._declaring:
            self._undeclared.discard(message.endpoint)
            self._release_when_declared()

    def _on_refused(self, message: Refused) -> None:
        endpoint = self._endpoints.get(message.endpoint)
        if endpoint is not None:
            if not endpoint.refuse(RefusedError(message.code, message.reason)):
                return
            self._forget(endpoint)
        self._undeclared.discard(message.endpoint)
        if isinstance(endpoint, Publisher) and endpoint.sequence:
            self._drop_messages_of(message.endpoint)
        self._release_when_declared()

    def _forget(self, endpoint: _Endpoint) -> None:
        """No message goes to the endpoint any more."""
        self._endpoints.pop(endpoint.endpoint_id, None)
        if isinstance(endpoint, Subscription):
            if endpoint in self._topics.get(endpoint.topic_id, ()):
                self._topics[endpoint.topic_id].remove(endpoint)
            self.resume_reading()  # the others need not wait for it any more

    def _drop_messages_of(self, publisher: int) -> None:
        """An edge refused, after a reconnect, a publisher whose messages still wait."""
        for body in self._link.withdraw():
            for item in decode_messages(body):
                if item.publisher != publisher:
                    data = encode_message(
                        item.topic_id, item.publisher, item.sequence, item.born_ns, item.payload
                    )
                    self.send(Run(1, data))

    def _release_when_declared(self) -> None:
        if self._handing_over:
            return  # what the old edge broker was sent comes before what the new one is sent
        if self._next is not None and self._next[0].is_up and not self._undeclared:
            self._go_over(*self._next)
            return
        waiting = any(isinstance(self._endpoints.get(endpoint), Publisher) for endpoint in self._undeclared)
        if self._link.is_up and self._link.holds_data and not waiting:
            self._link.release_data()

    def _make_room(self, tickets: list[Ticket]) -> None:
        if not self._room.is_set() and (self.has_room or self._is_idle):
            self._room.set()


async def _nowhere() -> Locator:
    """An edge broker that was left is not dialled again."""
    raise OSError("this edge broker has been left")


@contextlib.asynccontextmanager
async def connect(*edges: str, timeout_s: float = CONNECT_TIMEOUT_S, **options: Any) -> AsyncIterator[Client]:
    """Connect to one of the edge brokers given as host:port, or to one found in the LAN."""
    client = Client(edges, **options)
    await client.start(timeout_s)
    try:
        yield client
    finally:
        await client.close()
