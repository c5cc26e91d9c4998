"""All connections of one node: listening, dialling, heartbeats.

A broker or client owns one hub and is its handler. The hub has one timer for all heartbeats;
links with slow heartbeats (clients) are looked at less often, so that thousands of idle clients
cost little, and a node that has no others wakes up less often.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from overlay.errors import CloseReason, ProtocolError
from overlay.limits import (
    CONNECTIONS_MAX_PER_ADDRESS,
    CONNECTIONS_MAX_PER_BROKER,
    DRIFT_PPM,
    HANDSHAKE_TIMEOUT_NS,
    HANDSHAKES_MAX_PER_ADDRESS,
    HEARTBEAT_INTERVAL_MAX_NS,
    HEARTBEAT_INTERVAL_NS,
    HEARTBEAT_SILENCE_NS,
    MILLISECOND_NS,
    SECOND_NS,
)
from overlay.locator import Locator
from overlay.messages import PROTOCOL_VERSION, ControlMessage, Hello, Role, Welcome
from runtime.connection import Connection
from runtime.datagrams import DatagramPort
from runtime.door import Door
from runtime.host import Clock
from runtime.inbox import Inbox
from runtime.link import Link, Principal
from runtime.tls import CertificateName, Tls

log = logging.getLogger("isthmus.hub")

TICK_NS: Final = 10 * MILLISECOND_NS
LATE_TICK_NS: Final = 2 * TICK_NS
"""A loop turn that has taken this long sends heartbeats in between, or peers would take us for dead."""
SLOW_TICK_NS: Final = 10 * TICK_NS
"""How often slow links are looked at."""
SLOW_HEARTBEAT_NS: Final = 100 * MILLISECOND_NS
CLIENT_HEARTBEAT_NS: Final = 200 * MILLISECOND_NS
"""Heartbeat interval between a client and its edge broker."""
CLIENT_SILENCE_NS: Final = 2 * SECOND_NS
_BACK_OFF_FIRST_S: Final = 0.02
BACK_OFF_MOST_S: Final = 1.0
_ABSENT: Final = object()

ChooseLocator = Callable[[], Awaitable[Locator]]
Authenticate = Callable[[Hello, CertificateName | None], Principal]
"""Who a client is, by its certificate or token; raises ProtocolError for a stranger."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is on the wire."""

    role: Role
    node: str
    incarnation: int
    lan: str = ""
    cluster: str = ""
    drift_ppm: int = DRIFT_PPM
    """Most that the clock of this node drifts against real time."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to send heartbeats between brokers, and how much silence means death."""

    heartbeat_ns: int = HEARTBEAT_INTERVAL_NS
    silence_ns: int = HEARTBEAT_SILENCE_NS


class Handler(Protocol):
    """What a broker or client does with its links."""

    def admit(self, hello: Hello) -> tuple[Link, Welcome]:
        """A peer introduces itself: its link, and the answer. Raises ProtocolError to refuse."""
        ...

    def on_welcome(self, link: Link, welcome: Welcome) -> None:
        """A dialled peer has answered. Raises ProtocolError to refuse it."""
        ...

    def on_link_up(self, link: Link) -> None:
        """The link has an open connection."""
        ...

    def on_link_down(self, link: Link, reason: CloseReason, detail: str) -> None:
        """The link's connection is gone."""
        ...

    def on_data(self, link: Link, body: bytes, now_ns: int) -> None:
        """A data frame arrived."""
        ...

    def on_control(self, link: Link, message: ControlMessage) -> None:
        """A control frame arrived, other than those of the connection itself."""
        ...


class Hub:
    """All connections of one node."""

    def __init__(
        self,
        identity: Identity,
        handler: Handler,
        *,
        pace: Pace | None = None,
        clock: Clock = time.monotonic_ns,
        randomness: random.Random | None = None,
        connections_max: int = CONNECTIONS_MAX_PER_BROKER,
        connections_per_address: int = CONNECTIONS_MAX_PER_ADDRESS,
        tls: Tls | None = None,
        authenticate: Authenticate | None = None,
        token: str = "",
    ) -> None:
        """With `tls` every connection is encrypted and every broker must prove its name.

        With `authenticate` every client must prove who it is; `token` proves who we are.
        """
        self.identity = identity
        self.handler = handler
        self.pace = pace or Pace()
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.inbox = Inbox(self.loop, clock)
        self.randomness = randomness or random.Random(identity.incarnation)
        self.closes: Counter[CloseReason] = Counter()
        """Connections that ended, by reason."""
        self.tls = tls
        self._authenticate = authenticate
        self._token = token
        self._connections_max = connections_max
        self._connections_per_address = connections_per_address
        self._addresses: Counter[str] = Counter()
        self._handshakes: dict[str, dict[Connection, None]] = {}
        """By address: accepted connections whose peer has not introduced itself yet, oldest first."""
        self._on_held: Callable[[str], None] | None = None
        self._held: dict[Connection, Hello] = {}
        """Edge brokers that have introduced themselves and are answered later."""
        # Dictionaries keep their order: what a node does must not depend on where its objects are.
        self._connections: dict[Connection, None] = {}
        self._sockets: dict[Connection, None] = {}
        """Connections whose socket is open; a closed one may still hand over its last bytes."""
        self._all_gone: asyncio.Future[None] | None = None
        self._fast: dict[Connection, None] = {}
        self._slow: dict[Connection, None] = {}
        self._to_acknowledge: dict[Connection, None] = {}
        self._dialers: dict[str, Dialer] = {}
        self._server: asyncio.Server | None = None
        self._doors: list[Door] = []
        self._datagrams: DatagramPort | None = None
        self._resting = False
        """The timer is set for slow links only."""
        self._slow_due_ns = 0
        self.heartbeats_due_ns = 0
        """When heartbeats go out even if the loop has not come round to its timers."""
        self._ticker: asyncio.TimerHandle | None = None
        self._closing = False

    # Opening and closing

    async def listen(self, host: str, port: int) -> Locator:
        """Accept connections; returns where."""
        make = partial(Connection, self)
        self._server = await self.loop.create_server(make, host, port, start_serving=False)
        self._doors = [
            Door(self.loop, bound.dup(), make) for bound in self._server.sockets if bound.fileno() >= 0
        ]
        bound_host, bound_port = self._server.sockets[0].getsockname()[:2]
        if self.identity.role is not Role.CLIENT:
            self._datagrams = await DatagramPort.open(self, bound_host, bound_port)
        return Locator(bound_host, bound_port)

    def dial(
        self,
        link: Link,
        locator: "Locator | ChooseLocator",
        proxy: Locator | None = None,
        back_off_most_s: float = BACK_OFF_MOST_S,
    ) -> "Dialer":
        """Keep a connection to this peer open until the dialer is stopped.

        `locator` is where the peer is, or a function that is asked before every attempt.
        """
        assert link.key not in self._dialers
        dialer = Dialer(self, link, locator, proxy, back_off_most_s)
        self._dialers[link.key] = dialer
        return dialer

    def forget_dialer(self, dialer: "Dialer") -> None:
        """The dialer has stopped; its peer may be dialled anew."""
        if self._dialers.get(dialer.link.key) is dialer:
            del self._dialers[dialer.link.key]

    async def stop_accepting(self) -> None:
        """Refuse new connections; the open ones go on."""
        if self._server is None:
            return
        for door in self._doors:
            await door.close()
        self._doors.clear()
        self._server.close()

    async def close(self, reason: CloseReason = CloseReason.GOODBYE, detail: str = "") -> None:
        """Close everything; returns when all sockets are gone."""
        self._closing = True
        await self.stop_accepting()
        await asyncio.gather(*(dialer.stop(reason, detail) for dialer in list(self._dialers.values())))
        for connection in list(self._connections):
            connection.close(reason, detail)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if self._datagrams is not None:
            await self._datagrams.close()
        if self._server is not None:
            await self._server.wait_closed()
        if self._sockets:
            self._all_gone = self.loop.create_future()
            await self._all_gone

    @property
    def connection_count(self) -> int:
        """Connections in any state."""
        return len(self._connections)

    @property
    def links(self) -> list[Link]:
        """Links with a connection that has introduced itself."""
        return [connection.link for connection in self._connections if connection.link is not None]

    @property
    def datagrams_rejected(self) -> int:
        """Datagrams of unknown channels, forged or replayed."""
        return self._datagrams.rejected if self._datagrams is not None else 0

    # Called by connections

    def hello_for(self, link: Link) -> Hello:
        """How we introduce ourselves to this peer."""
        return Hello(
            role=self.identity.role,
            node=self.identity.node,
            incarnation=self.identity.incarnation,
            heartbeat_ns=self.heartbeat_ns_for(link),
            lan=self.identity.lan,
            cluster=self.identity.cluster,
            peer_incarnation=link.peer_incarnation,
            received=link.received,
            drift_ppm=self.identity.drift_ppm,
            token=self._token,
        )

    def datagrams_for(self, link: Link) -> DatagramPort | None:
        """Where datagrams beside this link are sent and taken; None if there are to be none.

        Only ways to and between LANs are long: not within a LAN, not between routing brokers.
        """
        roles = {self.identity.role, link.role}
        if Role.CLIENT in roles or roles == {Role.ROUTER}:
            return None
        if roles == {Role.EDGE} and link.lan == self.identity.lan:
            return None
        return self._datagrams

    def heartbeat_ns_for(self, link: Link) -> int:
        """Heartbeat interval towards this peer."""
        if Role.CLIENT in (link.role, self.identity.role):
            return CLIENT_HEARTBEAT_NS
        return self.pace.heartbeat_ns

    def silence_floor_ns_for(self, heartbeat_ns: int) -> int:
        """Least silence that counts as death at this heartbeat interval."""
        if heartbeat_ns <= self.pace.heartbeat_ns:
            return self.pace.silence_ns
        return max(self.pace.silence_ns, CLIENT_SILENCE_NS)

    def admit_hello(self, hello: Hello, certificate: CertificateName | None = None) -> tuple[Link, Welcome]:
        """Check an introduction, let the handler find the link."""
        principal = self._check_hello(hello, certificate)
        link, welcome = self.handler.admit(hello)
        if link.principal is not None and link.principal.name != principal.name:
            # Whoever takes a client's name would get what waits for it.
            raise ProtocolError(CloseReason.WRONG_IDENTITY, f"{hello.node} is another principal's client")
        link.principal = principal
        return link, replace(welcome, drift_ppm=self.identity.drift_ppm)

    def _check_hello(self, hello: Hello, certificate: CertificateName | None) -> Principal:
        """Who introduces itself so; raises ProtocolError if it is not let in."""
        if self._closing:
            raise ProtocolError(CloseReason.DRAINING, "this broker is shutting down: use another one")
        if len(self._connections) > self._connections_max:
            raise ProtocolError(
                CloseReason.TOO_MANY_CONNECTIONS,
                f"{self._connections_max} connections are open, no more are allowed: use another broker",
            )
        _check_protocol(hello.protocol)
        if hello.role is not Role.CLIENT:
            self._check_cluster(hello.cluster)
        if not MILLISECOND_NS <= hello.heartbeat_ns <= HEARTBEAT_INTERVAL_MAX_NS:
            raise ProtocolError(
                CloseReason.BAD_MESSAGE,
                f"heartbeat every {hello.heartbeat_ns} ns: "
                f"it must be between {MILLISECOND_NS} and {HEARTBEAT_INTERVAL_MAX_NS}",
            )
        if hello.incarnation < 1:  # a link to a peer that is not known yet has 0
            raise ProtocolError(
                CloseReason.BAD_MESSAGE, f"incarnation {hello.incarnation}: it must be above 0"
            )
        return self._check_identity(hello, certificate)

    def hold_edges(self, on_held: Callable[[str], None]) -> None:
        """Answer no edge broker until `answer_edges`; `on_held` is told the names of those that wait."""
        self._on_held = on_held

    def holds(self, hello: Hello, certificate: CertificateName | None) -> bool:
        """Whether a peer is answered later. Raises ProtocolError for one that is not let in at all."""
        if self._on_held is None or hello.role is not Role.EDGE:
            return False
        self._check_hello(hello, certificate)
        return True

    def hold(self, connection: Connection, hello: Hello) -> None:
        """One more that waits for its answer."""
        assert self._on_held is not None
        self._forget_handshake(connection)
        self._held[connection] = hello
        self._on_held(hello.node)

    def answer_edges(self) -> None:
        """Answer those that wait, and from now on everybody at once."""
        self._on_held = None
        held, self._held = self._held, {}
        for connection, hello in held.items():
            connection.answer(hello)

    def admit_welcome(self, link: Link, welcome: Welcome, certificate: CertificateName | None = None) -> None:
        """Check the answer of a dialled peer."""
        _check_protocol(welcome.protocol)
        if self.tls is not None:
            _check_certificate(welcome.role, welcome.node, certificate)
        if self.identity.role is not Role.CLIENT:
            self._check_cluster(welcome.cluster)
        if not 0 <= welcome.datagram_port < 65536:
            # The socket for datagrams, which all links share, would end with the attempt to send there.
            raise ProtocolError(
                CloseReason.BAD_MESSAGE,
                f"datagrams to port {welcome.datagram_port}: it must be at most 65535",
            )
        self.handler.on_welcome(link, welcome)

    def _check_identity(self, hello: Hello, certificate: CertificateName | None) -> Principal:
        """Who the peer is; nobody in particular where nobody asks."""
        if hello.role is Role.CLIENT:
            return self._authenticate(hello, certificate) if self._authenticate is not None else Principal()
        if self.tls is not None:
            _check_certificate(hello.role, hello.node, certificate)
        return Principal(hello.node)

    def connection_opened(self, connection: Connection) -> None:
        """A socket is connected; the handshake follows."""
        self._connections[connection] = None
        self._sockets[connection] = None
        if connection.address:
            self._count_address(connection)
        if self._closing:  # it was accepted just before
            self.loop.call_soon(connection.close, CloseReason.DRAINING, "this node is shutting down")
        if self._ticker is None and not self._closing:
            self._start_ticker(TICK_NS)

    def connection_ready(self, connection: Connection) -> None:
        """The handshake is done."""
        assert connection.link is not None and connection.liveness is not None
        self._forget_handshake(connection)
        slow = connection.liveness.interval_ns >= SLOW_HEARTBEAT_NS
        (self._slow if slow else self._fast)[connection] = None
        if not slow:
            self._hurry_ticker()
        log.debug("link up", extra={"peer": connection.link.peer})
        self.handler.on_link_up(connection.link)

    def connection_closed(
        self, connection: Connection, link: Link | None, reason: CloseReason, detail: str
    ) -> None:
        """A connection is gone; `link` is set if it was that link's current one."""
        for group in (self._connections, self._fast, self._slow, self._to_acknowledge):
            group.pop(connection, None)
        self._forget_handshake(connection)
        self._held.pop(connection, None)
        self.closes[reason] += 1
        if link is not None:
            log.debug("link down", extra={"peer": link.peer, "reason": str(reason), "detail": detail})
            self.handler.on_link_down(link, reason, detail)

    def connection_gone(self, connection: Connection) -> None:
        """The connection's socket is closed."""
        self._sockets.pop(connection, None)
        if connection.address:
            self._addresses[connection.address] -= 1
            if not self._addresses[connection.address]:
                del self._addresses[connection.address]
        if self._all_gone is not None and not self._sockets and not self._all_gone.done():
            self._all_gone.set_result(None)

    def acknowledge_soon(self, connection: Connection) -> None:
        """Data came in: acknowledge it with the next tick."""
        self._to_acknowledge[connection] = None
        if self._resting:
            self._hurry_ticker()

    # Limits

    def _count_address(self, connection: Connection) -> None:
        """Refuse an address that has too many connections; make room among those that say nothing."""
        address = connection.address
        self._addresses[address] += 1
        if self._addresses[address] > self._connections_per_address:
            self.loop.call_soon(
                connection.close,
                CloseReason.TOO_MANY_CONNECTIONS,
                f"{self._connections_per_address} connections come from {address}, no more are allowed: "
                "close some, or raise connections_per_address",
            )
            return
        handshakes = self._handshakes.setdefault(address, {})
        handshakes[connection] = None
        if len(handshakes) > HANDSHAKES_MAX_PER_ADDRESS:
            # Honest peers are through in a round trip or two: the oldest is the least likely to be one.
            next(iter(handshakes)).close(
                CloseReason.TOO_MANY_CONNECTIONS,
                f"{HANDSHAKES_MAX_PER_ADDRESS} connections from {address} have not introduced themselves",
            )

    def _forget_handshake(self, connection: Connection) -> None:
        handshakes = self._handshakes.get(connection.address)
        if handshakes is not None and handshakes.pop(connection, _ABSENT) is None and not handshakes:
            del self._handshakes[connection.address]

    # Heartbeats

    def send_late_heartbeats(self, now_ns: int) -> None:
        """This loop turn takes long: say that we are alive before it ends."""
        self.heartbeats_due_ns = now_ns + LATE_TICK_NS
        for connection in self._fast:
            connection.send_due_heartbeat(now_ns)

    def _tick(self) -> None:
        self._ticker = None
        if not self._connections:
            return  # the next connection starts the timer again
        now_ns = self.clock()
        self.heartbeats_due_ns = now_ns + LATE_TICK_NS
        for connection in list(self._fast):
            connection.tick(now_ns, TICK_NS)
        if self._to_acknowledge:
            waiting, self._to_acknowledge = self._to_acknowledge, {}
            for connection in waiting:
                if connection not in self._fast:
                    connection.acknowledge(now_ns)
        if now_ns >= self._slow_due_ns - TICK_NS // 2:
            self._slow_due_ns = now_ns + SLOW_TICK_NS
            for connection in list(self._slow):
                connection.tick(now_ns, SLOW_TICK_NS)
        if self._connections:
            self._start_ticker(TICK_NS if self._fast or self._to_acknowledge else self._slow_due_ns - now_ns)

    def _start_ticker(self, delay_ns: int) -> None:
        self._resting = delay_ns > TICK_NS
        self._ticker = self.loop.call_later(delay_ns / SECOND_NS, self._tick)

    def _hurry_ticker(self) -> None:
        """Something fast is to be done, and the timer may be set for slow links only."""
        if self._resting and self._ticker is not None:
            self._ticker.cancel()
            self._start_ticker(TICK_NS)

    def _check_cluster(self, cluster: str) -> None:
        if cluster != self.identity.cluster:
            raise ProtocolError(
                CloseReason.WRONG_CLUSTER,
                f"this is cluster {self.identity.cluster}, the peer belongs to {cluster or 'none'}: "
                "check which ZooKeeper and chroot both use",
            )


class Dialer:
    """Keeps one link connected: connect, wait for the end, back off, again."""

    def __init__(
        self,
        hub: Hub,
        link: Link,
        locator: Locator | ChooseLocator,
        proxy: Locator | None,
        back_off_most_s: float,
    ) -> None:
        self.link = link
        self._back_off_most_s = back_off_most_s
        self.locator = locator
        """May be changed; the next attempt goes there."""
        self.last_error = ""
        self._hub = hub
        self._proxy = proxy
        self._connection: Connection | None = None
        self._hurry = asyncio.Event()
        self._task = hub.loop.create_task(self._run(), name=f"dial {link.peer}")

    def hurry(self) -> None:
        """The peer is there again: dial now rather than when the back-off ends."""
        self._hurry.set()

    async def stop(self, reason: CloseReason = CloseReason.GOODBYE, detail: str = "") -> None:
        """Close the connection and dial no more."""
        self._hub.forget_dialer(self)
        if self._connection is not None:
            self._connection.close(reason, detail)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        back_off_s = _BACK_OFF_FIRST_S
        while True:
            connected = await self._connect_once()
            if connected:
                back_off_s = _BACK_OFF_FIRST_S
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(back_off_s * (0.5 + self._hub.randomness.random())):
                    await self._hurry.wait()
            back_off_s = min(2 * back_off_s, self._back_off_most_s)

    async def _connect_once(self) -> bool:
        """One connection from dial to end; says whether the handshake succeeded."""
        try:
            address = self.locator if isinstance(self.locator, Locator) else await self.locator()
        except OSError as error:  # for example a network interface that is gone, perhaps not for good
            self.last_error = f"no address to dial: {error}"
            return False
        target = self._proxy or address
        link = self.link
        connects_before = link.connects
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_NS / SECOND_NS):
                _, connection = await self._hub.loop.create_connection(
                    lambda: Connection(
                        self._hub, dialled=link, through_proxy_to=address if self._proxy else None
                    ),
                    target.host,
                    target.port,
                )
        except (OSError, TimeoutError, UnicodeError) as error:  # the last for a host no name can be
            self.last_error = f"{target}: {str(error) or type(error).__name__}"
            return False
        self._connection = connection
        try:
            reason, detail = await asyncio.shield(connection.closed)
        finally:
            self._connection = None
        self.last_error = f"{target}: {reason}: {detail}"
        return link.connects > connects_before


def _check_certificate(role: Role, node: str, certificate: CertificateName | None) -> None:
    if certificate != (role, node):
        raise ProtocolError(
            CloseReason.WRONG_IDENTITY,
            f"the peer says it is {role} {node}, its certificate is for {certificate or 'nobody'}: "
            f"give it one with `isthmus certs`",
        )


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            CloseReason.WRONG_PROTOCOL,
            f"the peer speaks protocol {protocol}, this node {PROTOCOL_VERSION}: upgrade the older one",
        )
