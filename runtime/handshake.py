"""How two nodes are introduced before messages flow: through a proxy, encrypted, by HELLO and WELCOME.

Steps, and what moves a connection on:

    dialled:   PROXY --200--> TLS --established--> HELLO_SENT --WELCOME--> open
    accepted:                 TLS --established--> AWAIT_HELLO --HELLO---> open
                                                   AWAIT_HELLO --HELLO--> HELD --answer--> open

PROXY is skipped without a proxy, TLS where the node has no certificates; a node may hold peers before it
answers them (`Hub.hold_edges`).
"""

import logging
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from overlay.codec import decode, encode
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import DRIFT_MAX_PPM, HANDSHAKE_FRAME_MAX_BYTES
from overlay.locator import Locator
from overlay.messages import Close, FrameKind, Hello, Role, Welcome
from runtime.datagrams import Seal
from runtime.link import Link
from runtime.tls import speaks_tls

if TYPE_CHECKING:
    from runtime.connection import Connection

log = logging.getLogger("isthmus.connection")


class _Step(Enum):
    PROXY = auto()
    TLS = auto()
    HELLO_SENT = auto()
    AWAIT_HELLO = auto()
    HELD = auto()


class Handshake:
    """That of one connection. Whatever raises ProtocolError ends the connection."""

    def __init__(self, connection: "Connection", dialled: Link | None, proxied: Locator | None) -> None:
        self._connection = connection
        self._hub = connection.hub
        self._dialled = dialled
        self._proxied = proxied
        self._proxy_answer = b""
        self._seal: Seal | None = None
        self._step = _Step.AWAIT_HELLO

    def start(self) -> None:
        """The socket is connected."""
        if self._proxied is None:
            self._begin()
            return
        self._step = _Step.PROXY
        request = f"CONNECT {self._proxied} HTTP/1.1\r\nHost: {self._proxied}\r\n\r\n"
        self._connection.write_plain(request.encode())

    @property
    def awaits_frame(self) -> bool:
        """The peer is to introduce itself."""
        return self._step is _Step.HELLO_SENT or self._step is _Step.AWAIT_HELLO

    @property
    def is_held(self) -> bool:
        """The peer has introduced itself and is answered later."""
        return self._step is _Step.HELD

    @property
    def is_encrypting(self) -> bool:
        """TLS is not established yet."""
        return self._step is _Step.TLS

    @property
    def has_reached_peer(self) -> bool:
        """What is written gets to the peer, and not to a proxy."""
        return self._step is not _Step.PROXY

    def take_bytes(self, data: bytes, *, is_first: bool) -> bytes:
        """Bytes arrived; returns what of them belongs to frames, of which they may be the first."""
        connection = self._connection
        if self._step is _Step.PROXY:
            data = self._read_proxy_answer(data)
        tls = connection.tls
        if tls is None:
            if is_first and speaks_tls(data):
                raise ProtocolError(CloseReason.TLS_FAILED, "the peer speaks TLS: give us certificates")
            return data
        if tls.is_fresh and len(data) > 2 and not speaks_tls(data):
            connection.tls, self._step = None, _Step.AWAIT_HELLO  # so that the peer can read the answer
            raise ProtocolError(CloseReason.TLS_FAILED, "only TLS is spoken here: give certificates")
        plain = connection.decrypt(tls, data)
        if self._step is _Step.TLS and tls.is_established:
            self._begin()
        return plain

    def take_frame(self, kind: int, body: bytes) -> None:
        """The peer introduces itself."""
        message = decode(kind, body) if kind != FrameKind.DATA else None
        if isinstance(message, Close):
            self._connection.peer_closed(message)
        elif self._step is _Step.AWAIT_HELLO and isinstance(message, Hello):
            if self._hub.holds(message, self._connection.peer_certificate):
                self._step = _Step.HELD
                self._connection.hold()
                self._hub.hold(self._connection, message)
            else:
                self._welcome(message)
        elif self._step is _Step.HELLO_SENT and isinstance(message, Welcome):
            self._be_welcomed(message)
        else:
            raise ProtocolError(CloseReason.UNEXPECTED_FRAME, f"kind {kind} during the handshake")

    def answer(self, hello: Hello) -> None:
        """Admit a peer that was held."""
        self._step = _Step.AWAIT_HELLO
        self._welcome(hello)

    # Details

    def _begin(self) -> None:
        """The peer can be talked to: encrypt if we have certificates, then introduce ourselves."""
        connection, hub = self._connection, self._hub
        if hub.tls is not None and connection.tls is None:
            self._step = _Step.TLS
            connection.tls = hub.tls.dial() if self._dialled is not None else hub.tls.accept()
            if self._dialled is not None:
                connection.write_plain(connection.tls.start())
        elif self._dialled is not None:
            self._step = _Step.HELLO_SENT
            hello = hub.hello_for(self._dialled)
            port = hub.datagrams_for(self._dialled)
            if port is not None and self._proxied is None:
                self._seal = port.new_seal()
                hello = replace(hello, datagrams=str(self._seal))
            connection.write(encode(hello))
        else:
            self._step = _Step.AWAIT_HELLO

    def _read_proxy_answer(self, data: bytes) -> bytes:
        """Consume the proxy's answer to CONNECT; returns the bytes after it."""
        self._proxy_answer += data
        head, separator, rest = self._proxy_answer.partition(b"\r\n\r\n")
        if len(head) > HANDSHAKE_FRAME_MAX_BYTES:
            raise ProtocolError(
                CloseReason.BAD_FRAME,
                f"the proxy's answer does not end within {HANDSHAKE_FRAME_MAX_BYTES} bytes",
            )
        if not separator:
            return b""
        status = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if len(status) < 2 or status[1] != b"200":
            raise ProtocolError(CloseReason.LOST, f"the proxy answered {head[:80]!r}")
        self._proxy_answer = b""
        self._begin()
        return rest

    def _welcome(self, hello: Hello) -> None:
        """Let in a peer that has dialled us, and answer."""
        connection, hub = self._connection, self._hub
        _check_drift(hello.drift_ppm)
        link, welcome = hub.admit_hello(hello, self._connection.peer_certificate)
        received = hello.received if hello.peer_incarnation == hub.identity.incarnation else 0
        link.check_resume(hello.incarnation, received)
        _replace_connection_of(link)
        connection.link = link
        # What the connection before this one had brought counts by now.
        goes_on = hello.incarnation == link.peer_incarnation
        welcome = replace(welcome, received=link.received if goes_on else 0)
        self._attach(link, hello.incarnation, received, hello.drift_ppm)
        connection.write(encode(self._with_datagrams(link, hello, welcome)))
        connection.open_up(hello.heartbeat_ns)

    def _be_welcomed(self, welcome: Welcome) -> None:
        """The peer that we have dialled lets us in."""
        connection, hub, link = self._connection, self._hub, self._dialled
        assert link is not None
        _check_drift(welcome.drift_ppm)
        hub.admit_welcome(link, welcome, self._connection.peer_certificate)
        _replace_connection_of(link)
        self._attach(link, welcome.incarnation, welcome.received, welcome.drift_ppm)
        port = hub.datagrams_for(link)
        theirs = Seal.parse(welcome.datagrams)
        if port is not None and theirs is not None and self._seal is not None:
            address = (connection.peer_host, welcome.datagram_port)
            connection.channel = port.open_channel(connection, self._seal, theirs, address)
        connection.open_up(hub.heartbeat_ns_for(link))

    def _with_datagrams(self, link: Link, hello: Hello, welcome: Welcome) -> Welcome:
        """Our answer, with a channel for datagrams if both sides take them."""
        port = self._hub.datagrams_for(link)
        theirs = Seal.parse(hello.datagrams)
        if port is None or theirs is None:
            return welcome
        ours = port.new_seal()
        self._connection.channel = port.open_channel(self._connection, ours, theirs, None)
        return replace(welcome, datagrams=str(ours), datagram_port=port.port)

    def _attach(self, link: Link, incarnation: int, received: int, theirs_ppm: int) -> None:
        """Give the link this connection; it reckons with the worse of both clocks, as each side says.

        What a broker passes on has been measured by its clock, and nobody after us knows of that clock:
        if it is worse than ours, ages are unknown. Births at a client are put back instead.
        """
        ours_ppm = self._hub.identity.drift_ppm
        worse_ppm = theirs_ppm if theirs_ppm > ours_ppm else 0
        link.attach(self._connection, incarnation, received, max(ours_ppm, theirs_ppm), worse_ppm)
        if worse_ppm and Role.CLIENT not in (link.role, self._hub.identity.role):
            link.clock.stay_unknown()
            log.warning(
                "a broker's clock may drift more than ours, so the ages of messages from it are unknown: "
                "give all brokers the same clock_drift_ppm, that of the worst clock",
                extra={"peer": link.peer, "theirs_ppm": theirs_ppm, "ours_ppm": ours_ppm},
            )


def _replace_connection_of(link: Link) -> None:
    if link.connection is not None:
        link.connection.close(CloseReason.REPLACED, "the peer connected again")


def _check_drift(ppm: int) -> None:
    """No peer may say that its clock is good for nothing, or perfect."""
    if not 0 < ppm <= DRIFT_MAX_PPM:
        raise ProtocolError(
            CloseReason.BAD_MESSAGE, f"a clock drift of {ppm} ppm: it must be 1 to {DRIFT_MAX_PPM}"
        )
