"""The asynchronous client: one connection to an edge broker, any number of endpoints on it.

    async with connect("10.0.0.7:7400") as client:
        publisher = await client.publisher("plant/temperature")
        await publisher.publish(b"21.5")
        async with await client.subscribe("plant/alarm") as alarms:
            async for message in alarms:
                print(message.payload)

Without an address, `connect()` finds an edge broker of the LAN by multicast. If the edge dies,
the client turns to another one of the LAN, declares its endpoints again and sends what the old
one had not acknowledged; duplicates are dropped on the way and here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

from clients.errors import ClientError, ClosedError, EdgeNotFoundError, RefusedError
from clients.publisher import Publisher
from clients.subscription import Overflow, Subscription
from clients.tracing import ClientTracing
from overlay.batch import Run, decode_batch_header, decode_messages, encode_message
from overlay.delay import add_shifts, age_bound_ns, link_bound_ns
from overlay.discovery import DISCOVERY_GROUP, DISCOVERY_PORT
from overlay.errors import CloseReason, InvalidNameError, ProtocolError
from overlay.limits import DRIFT_MAX_PPM, DRIFT_PPM, ENDPOINT_ID_MAX, MIB
from overlay.locator import Locator
from overlay.messages import (
    UNKNOWN_CLOCK_SHIFT,
    ControlMessage,
    Declare,
    Declared,
    Hello,
    Matched,
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
        """`drift_ppm` is the most that this host's clock drifts; age bounds reckon with it.

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
        self._link = Link("edge", Role.EDGE, lan, Outbox())
        self._link.holds_data = True
        self._link.on_acknowledged = self._make_room
        self._dialer: Dialer | None = None
        self._tracing = None if trace is None else ClientTracing(trace, self._hub.identity.node, self._link)

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
            while not self._link.outbox.is_idle and not self._closed:
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
        that were not heard for the topic's period and `allowance_ms`, by default the limit.
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
        self._link.send(Undeclare(endpoint.endpoint_id))
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

    def change_qos(self, message: Declare) -> None:
        """Ask the edge broker for another quality of service of a topic."""
        if not self._link.send(message):
            raise ClosedError(f"no edge broker is connected to change topic {message.topic}: try again")

    def pause_reading(self) -> None:
        """A subscription is full: let messages wait at the edge broker."""
        if self._link.connection is not None:
            self._link.connection.pause_reading()

    def resume_reading(self) -> None:
        """No subscription is full any more."""
        if self._link.connection is not None and not any(
            isinstance(endpoint, Subscription) and endpoint.is_full for endpoint in self._endpoints.values()
        ):
            self._link.connection.resume_reading()

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
        try:
            others = [Locator.parse(edge) for edge in welcome.edges]
        except InvalidNameError as error:
            raise ProtocolError(CloseReason.BAD_MESSAGE, str(error)) from error
        self._cluster = welcome.cluster
        self.edge = welcome.node
        self.lan = welcome.lan
        if self._tracing is not None:
            self._tracing.welcome(welcome.node, welcome.lan)
        self._candidates = list(dict.fromkeys([*self._given, *self._candidates, *others]))

    def on_link_up(self, link: Link) -> None:
        """Connected: declare everything, then let data flow."""
        link.holds_data = True
        if self._connected.is_set():
            self.reconnects += 1
        self._connected.set()
        self._undeclared = set(self._endpoints)
        for endpoint in self._endpoints.values():
            link.send(endpoint.declaration())
        self._release_when_declared()

    def on_link_down(self, link: Link, reason: CloseReason, detail: str) -> None:
        """Disconnected: the dialer tries the next edge broker."""
        link.holds_data = True
        self.edge = ""
        for endpoint in self._endpoints.values():
            endpoint.connection_lost()

    def on_data(self, link: Link, body: bytes, now_ns: int) -> None:
        """Messages for our subscriptions."""
        header = decode_batch_header(body)
        link.messages_received += header.messages
        shift_ns = add_shifts(header.clock_shift_ns, link.clock.shift_at(now_ns))
        drift_ppm = link.clock.drift_ppm
        bound_ns = link_bound_ns(header.sent_ns, link.clock.shift_ns, now_ns, drift_ppm)
        for message in decode_messages(body):
            age_ns: int | None = None
            if message.born_ns and shift_ns != UNKNOWN_CLOCK_SHIFT:
                age_ns = age_bound_ns(max(0, now_ns - message.born_ns + shift_ns), drift_ppm)
            for subscription in self._topics.get(message.topic_id, ()):
                verdict = subscription.deliver(message, age_ns, now_ns)
                if self._tracing is not None:
                    self._tracing.deliver(message, verdict, age_ns, bound_ns, now_ns)

    def on_control(self, link: Link, message: ControlMessage) -> None:
        """The edge broker answers a declaration, or tells of subscribers."""
        if isinstance(message, Declared):
            self._on_declared(message)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, Matched):
            endpoint = self._endpoints.get(message.endpoint)
            if isinstance(endpoint, Publisher):
                endpoint.set_subscribers(message.subscribers)
        elif isinstance(message, QosChanged):
            if (changed := self._endpoints.get(message.endpoint)) is not None:
                changed.set_qos(TopicQos.from_record(message.qos))
                if self._tracing is not None:
                    self._tracing.define_topic(changed)
        elif isinstance(message, Publishers):
            watching = self._endpoints.get(message.endpoint)
            if isinstance(watching, Subscription) and message.complete:
                watching.set_publishers(frozenset(message.publishers))
        else:
            raise ProtocolError(CloseReason.UNEXPECTED_FRAME, f"{type(message).__name__} to a client")

    # Details

    async def _choose_edge(self) -> Locator:
        """The next edge broker to try; asks the LAN again when all known ones have been tried."""
        while True:
            if self._next_candidate < len(self._candidates):
                self._next_candidate += 1
                return self._candidates[self._next_candidate - 1]
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
        self._link.send(endpoint.declaration())
        try:
            await endpoint.wait_declared()
        except BaseException:
            if endpoint.endpoint_id in self._endpoints:
                self._forget(endpoint)
                self._link.send(Undeclare(endpoint.endpoint_id))
            self._undeclared.discard(endpoint.endpoint_id)
            self._release_when_declared()
            raise

    def _on_declared(self, message: Declared) -> None:
        endpoint = self._endpoints.get(message.endpoint)
        if endpoint is not None:
            endpoint.set_declared(message)
            if self._tracing is not None:
                self._tracing.define_topic(endpoint)
            if isinstance(endpoint, Subscription):
                subscriptions = self._topics.setdefault(message.topic_id, [])
                if endpoint not in subscriptions:
                    subscriptions.append(endpoint)
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
        waiting = any(isinstance(self._endpoints.get(endpoint), Publisher) for endpoint in self._undeclared)
        if self._link.is_up and self._link.holds_data and not waiting:
            self._link.release_data()

    def _make_room(self, tickets: list[Ticket]) -> None:
        if not self._room.is_set() and (self.has_room or self._link.outbox.is_idle):
            self._room.set()


@contextlib.asynccontextmanager
async def connect(*edges: str, timeout_s: float = CONNECT_TIMEOUT_S, **options: Any) -> AsyncIterator[Client]:
    """Connect to one of the edge brokers given as host:port, or to one found in the LAN."""
    client = Client(edges, **options)
    await client.start(timeout_s)
    try:
        yield client
    finally:
        await client.close()
