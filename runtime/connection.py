"""One TCP connection between two nodes: handshake, frames in, frames out, heartbeats.

States of a connection, and what moves it on:

    dialled:   PROXY --200--> TLS --established--> HELLO_SENT --WELCOME--> OPEN --any end--> CLOSED
    accepted:                 TLS --established--> AWAIT_HELLO --HELLO---> OPEN --any end--> CLOSED
                                                   AWAIT_HELLO --HELLO--> HELD --answer--> OPEN

PROXY is skipped without a proxy, TLS where the node has no certificates; a node may hold peers before it
answers them (`Hub.hold_edges`). Every state has one exit
on error: CLOSED, with an enumerated reason, told to the peer in a CLOSE frame if the socket still
works. Nothing is written outside OPEN but the handshake itself, which has one time limit in all.
Data is written at most once per loop turn, and only while the socket's own buffer is small, so that
what waits stays in the outbox where order can change.
"""

import asyncio
import logging
import socket
from dataclasses import replace
from enum import Enum, auto
from struct import Struct
from typing import TYPE_CHECKING, Final

from overlay.batch import BATCH_HEADER_BYTES
from overlay.codec import decode, decode_heartbeat, encode, encode_heartbeat
from overlay.delay import said_at_ns
from overlay.errors import CloseReason, ProtocolError
from overlay.framing import FRAME_HEADER_BYTES, FrameReader, frame
from overlay.limits import (
    ACKNOWLEDGE_EVERY_BYTES,
    DRIFT_MAX_PPM,
    HANDSHAKE_FRAME_MAX_BYTES,
    HANDSHAKE_TIMEOUT_NS,
    READ_AT_ONCE_BYTES,
    SECOND_NS,
    UNREAD_MAX_BYTES,
    URGENT_NS,
    WRITE_HIGH_WATER_BYTES,
)
from overlay.liveness import Liveness
from overlay.locator import Locator
from overlay.messages import Close, ControlMessage, FrameKind, Heartbeat, Hello, Role, Welcome
from overlay.urgency import UNORDERED, class_least_ns
from runtime.datagrams import Channel, Seal
from runtime.garbage import let_go
from runtime.inbox import Waiting
from runtime.kernel import host_answers, read_rest
from runtime.link import Link
from runtime.tls import CertificateName, TlsChannel, speaks_tls

if TYPE_CHECKING:
    from runtime.hub import Hub

log = logging.getLogger("isthmus.connection")

_LINGER_S: Final = 1.0
"""How long a closing connection may take to hand its last bytes to the kernel."""
_NOT_SENT_LOW_WATER_BYTES: Final = 32 * 1024
NUMBER: Final = Struct("<Q")


class State(Enum):
    """Where a connection is in its life."""

    PROXY = auto()
    TLS = auto()
    HELLO_SENT = auto()
    AWAIT_HELLO = auto()
    HELD = auto()
    OPEN = auto()
    CLOSED = auto()


# What is asked for with every frame: finding a member of an enum takes longer than finding a name.
_HELLO_SENT: Final[State] = State.HELLO_SENT
_AWAIT_HELLO: Final[State] = State.AWAIT_HELLO
_OPEN: Final[State] = State.OPEN
_PROXY: Final[State] = State.PROXY
_DATA: Final = int(FrameKind.DATA)
_NUMBERED: Final = int(FrameKind.NUMBERED)
_HEARTBEAT: Final = int(FrameKind.HEARTBEAT)


class Connection(asyncio.Protocol):
    """One TCP connection; the hub makes one per accepted socket and per dial."""

    def __init__(
        self, hub: "Hub", *, dialled: Link | None = None, through_proxy_to: Locator | None = None
    ) -> None:
        self.hub = hub
        self.link: Link | None = dialled
        self.liveness: Liveness | None = None
        self.closed: asyncio.Future[tuple[CloseReason, str]] = hub.loop.create_future()
        self._dialled = dialled is not None
        self._proxied = through_proxy_to
        self._proxy_answer = b""
        self._tls: TlsChannel | None = None
        self._seal: Seal | None = None
        self.channel: Channel | None = None
        """For urgent frames, which TCP might hold up."""
        self._state = _AWAIT_HELLO
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._writable = True
        self._flush_scheduled = False
        self._reading_paused = False
        self._waiting: Waiting | None = None
        """What of it waits in the inbox; None if nothing ever does."""
        self._arrived = 0
        """The number of the last data frame that came by this connection without saying its own."""
        self._unacknowledged_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._close_reason = CloseReason.LOST
        self._close_detail = "the connection broke"
        self.address = ""
        """Of an accepted connection: where it comes from."""

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOT_SENT_LOW_WATER_BYTES)
        if not self._dialled:
            self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._timer = self.hub.loop.call_later(HANDSHAKE_TIMEOUT_NS / SECOND_NS, self._handshake_timed_out)
        self.hub.connection_opened(self)
        if self._dialled and self._proxied is not None:
            self._state = _PROXY
            transport.write(f"CONNECT {self._proxied} HTTP/1.1\r\nHost: {self._proxied}\r\n\r\n".encode())
        else:
            self._begin()

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        try:
            if self._state is _PROXY:
                data = self._read_proxy_answer(data)
            if self._tls is not None:
                data = self._decrypt(self._tls, data)
            if self.liveness is not None:
                self.liveness.heard()
            elif self._tls is None and not self._reader.pending_bytes and speaks_tls(data):
                raise ProtocolError(CloseReason.TLS_FAILED, "the peer speaks TLS: give us certificates")
            self._reader.feed(data)
            self._process_frames(len(data))
        except ProtocolError as error:
            self.close(error.reason, error.detail)

    def _process_frames(self, new_bytes: int) -> None:
        while self._state is _HELLO_SENT or self._state is _AWAIT_HELLO:
            frames = self._reader.take_frames(at_most=1)
            if not frames:
                return
            self._handle_handshake(*frames[0])
        at_once = self._waiting is None or (new_bytes <= READ_AT_ONCE_BYTES and self.hub.inbox.is_empty)
        while self._state is _OPEN and (taken := self._reader.take_frames()):
            for kind, body in taken:
                self._handle_frame(kind, body, at_once)
                if self._state is not _OPEN:
                    return

    def pause_writing(self) -> None:
        """The socket's buffer is full enough: keep the rest in the outbox."""
        self._writable = False

    def resume_writing(self) -> None:
        """The socket wants bytes again."""
        self._writable = True
        self.flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if exc is not None and self._close_reason is CloseReason.LOST:
            self._close_detail = str(exc) or type(exc).__name__
            self._read_rest()
        self._take_all_waiting()
        self._finish()
        if self._timer is not None:
            self._timer.cancel()
        self.hub.connection_gone(self)
        if self._transport is not None:
            let_go(self._transport)

    # Called by the hub, links and brokers

    @property
    def is_open(self) -> bool:
        """The handshake is done and the connection not closed."""
        return self._state is _OPEN

    def send_control(self, message: ControlMessage) -> None:
        """Write a control frame at once; it may overtake waiting data."""
        if self._transport is not None and self._state is not State.CLOSED:
            self._write(encode(message))
            self._give_up_if_unread()

    def write_again(self, frames: list[bytes]) -> None:
        """Write frames that were sent on an earlier connection and not acknowledged."""
        if self._transport is not None and self._state is _OPEN:
            if self.channel is not None:
                assert self.link is not None
                first = self.link.outbox.next_unacknowledged
                frames = [_numbered(number, frame) for number, frame in enumerate(frames, first)]
            self._write(b"".join(frames))

    def write_numbered(self, number: int) -> None:
        """Write a frame that was lost as a datagram."""
        frame = self.link.outbox.frame(number) if self.link is not None else None
        if frame is not None and self._state is _OPEN:
            self._write(_numbered(number, frame))

    def take_numbered(self, number: int, body: bytes, *, has_waited: bool = False) -> None:
        """Process a data frame, by whichever way it came; what has come before is passed over.

        Those that may have overtaken others on the way say so from now on. In the inbox frames are only
        overtaken by those of other classes, and so of other topics.
        """
        link = self.link
        assert link is not None
        if self._state is not _OPEN:
            return
        express = self.channel.express if self.channel is not None else None
        overtakes = number != link.received + 1 and not has_waited
        if not link.numbers.take(number):
            return
        if (
            (overtakes or (express is not None and (express.is_worth_it or express.frames_received)))
            and len(body) >= BATCH_HEADER_BYTES
            and class_least_ns(body[0]) < URGENT_NS
        ):
            body = bytes([body[0] | UNORDERED]) + body[1:]
        self._take_data(link, body)

    def take_waiting(self, number: int, body: bytes) -> None:
        """Process a data frame that has waited in the inbox."""
        assert self._waiting is not None
        was_full = self._waiting.is_full
        self._waiting.take(body)
        if self.liveness is not None:
            self.liveness.heard()  # what it has sent since may be unread
        try:
            self.take_numbered(number, body, has_waited=True)
        except ProtocolError as error:
            self.close(error.reason, error.detail)
        if self._waiting.is_full != was_full:
            self._choose_reading()

    def heard(self) -> None:
        """A datagram has come: the peer is alive."""
        if self.liveness is not None:
            self.liveness.heard()

    def flush_soon(self) -> None:
        """Write waiting data in this loop turn; however often it is asked for, it happens once."""
        if not self._flush_scheduled and self._state is _OPEN:
            self._flush_scheduled = True
            self.hub.loop.call_soon(self._flush)

    def flush_now(self) -> None:
        """Write waiting data at once: this loop turn will take long."""
        scheduled = self._flush_scheduled
        self._flush()
        self._flush_scheduled = scheduled

    def close(self, reason: CloseReason, detail: str = "") -> None:
        """End the connection, telling the peer why."""
        self._take_all_waiting()
        if self._state is State.CLOSED:
            return
        self._close_reason = reason
        self._close_detail = detail
        if self._transport is not None:
            if self._tls is not None and (self._state is State.TLS or reason is CloseReason.TLS_FAILED):
                self._transport.write(self._tls.take())
            elif self._state is not _PROXY:
                self._write(encode(Close(reason, detail[:512])))
            self._close_transport(self._transport)
        self._finish()

    def abort(self, reason: CloseReason, detail: str) -> None:
        """End the connection at once: the peer is not listening any more."""
        self._take_all_waiting()
        if self._state is State.CLOSED:
            return
        self._close_reason = reason
        self._close_detail = detail
        if self._transport is not None:
            self._transport.abort()
        self._finish()

    def pause_reading(self) -> None:
        """Let the peer's bytes pile up at the peer: backpressure."""
        if not self._reading_paused and self._state is _OPEN:
            self._reading_paused = True
            self._choose_reading()

    def resume_reading(self) -> None:
        """Take the peer's bytes again."""
        if self._reading_paused and self._state is _OPEN:
            self._reading_paused = False
            if self.liveness is not None:
                self.liveness.heard()
            self._choose_reading()

    def _take_all_waiting(self) -> None:
        """Process what waits in the inbox; that may end the connection.

        Not while a frame is being processed: what waits then is not acknowledged and comes again.
        """
        if self._waiting is not None and self._waiting.frames and not self.hub.inbox.is_processing:
            self.hub.inbox.drain(self)

    @property
    def _is_held_up(self) -> bool:
        """We do not read what the peer sends: it may seem silent."""
        return self._reading_paused or (self._waiting is not None and self._waiting.is_full)

    def _choose_reading(self) -> None:
        if self._transport is None or self._state is not _OPEN:
            return
        if self._is_held_up:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def tick(self, now_ns: int, tick_ns: int) -> None:
        """Send a heartbeat if one is due or data waits for its acknowledgement; notice silence."""
        liveness = self.liveness
        if liveness is None or self._state is not _OPEN:
            return
        if self.channel is not None:
            self._tick_datagrams(self.channel, now_ns)
        if self._unacknowledged_bytes or liveness.is_due(now_ns, tick_ns):
            self._send_heartbeat(now_ns)
        if self._is_held_up:
            liveness.heard()
        elif liveness.tick(now_ns, tick_ns) and (liveness.is_frozen or not self._host_answers(liveness)):
            self.abort(CloseReason.SILENT, f"nothing heard for {liveness.silent_ns / 1e6:.0f} ms")

    def send_due_heartbeat(self, now_ns: int) -> None:
        """Send a heartbeat if one is due."""
        if self.liveness is not None and self._state is _OPEN and self.liveness.is_due(now_ns, 0):
            self._send_heartbeat(now_ns)

    def acknowledge(self, now_ns: int) -> None:
        """Acknowledge data now if some waits for it."""
        if self._unacknowledged_bytes and self._state is _OPEN and self.channel is not None:
            self._tick_datagrams(self.channel, now_ns)
        if self._unacknowledged_bytes and self._state is _OPEN:
            self._send_heartbeat(now_ns)

    def _tick_datagrams(self, channel: Channel, now_ns: int) -> None:
        """Report what has come as a datagram: that TCP does not hold up."""
        channel.tick(now_ns, data_came=self._unacknowledged_bytes > 0)
        if channel.is_usable(now_ns):
            self._unacknowledged_bytes = 0

    # Handshake

    @property
    def peer_certificate(self) -> CertificateName | None:
        """Whom the peer's certificate is for; None without TLS, or if it has none."""
        return self._tls.peer if self._tls is not None else None

    def _begin(self) -> None:
        """The peer can be talked to: encrypt if we have certificates, then introduce ourselves."""
        if self.hub.tls is not None and self._tls is None:
            assert self._transport is not None
            self._state = State.TLS
            self._tls = self.hub.tls.dial() if self._dialled else self.hub.tls.accept()
            if self._dialled:
                self._transport.write(self._tls.start())
        elif self._dialled:
            assert self.link is not None
            self._state = _HELLO_SENT
            hello = self.hub.hello_for(self.link)
            port = self.hub.datagrams_for(self.link)
            if port is not None and self._proxied is None:
                self._seal = port.new_seal()
                hello = replace(hello, datagrams=str(self._seal))
            self._write(encode(hello))
        else:
            self._state = _AWAIT_HELLO

    def _decrypt(self, tls: TlsChannel, data: bytes) -> bytes:
        if tls.is_fresh and len(data) > 2 and not speaks_tls(data):
            self._tls, self._state = None, _AWAIT_HELLO  # so that the peer can read the answer
            raise ProtocolError(CloseReason.TLS_FAILED, "only TLS is spoken here: give certificates")
        plain = tls.decrypt(data)
        if (answer := tls.take()) and self._transport is not None:
            self._transport.write(answer)
        if self._state is State.TLS and tls.is_established:
            self._begin()
        return plain

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data if self._tls is None else self._tls.encrypt(data))

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

    def _handle_handshake(self, kind: int, body: bytes) -> None:
        message = decode(kind, body) if kind != _DATA else None
        if isinstance(message, Close):
            self._peer_closed(message)
        elif self._state is _AWAIT_HELLO and isinstance(message, Hello):
            if self.hub.holds(message, self.peer_certificate):
                self._hold(message)
            else:
                self._welcome(message)
        elif self._state is _HELLO_SENT and isinstance(message, Welcome):
            assert self.link is not None
            _check_drift(message.drift_ppm)
            self.hub.admit_welcome(self.link, message, self.peer_certificate)
            self._replace_connection_of(self.link)
            self._attach(self.link, message.incarnation, message.received, message.drift_ppm)
            self._open_datagrams(message)
            self._open(self.hub.heartbeat_ns_for(self.link))
        else:
            raise ProtocolError(CloseReason.UNEXPECTED_FRAME, f"kind {kind} during the handshake")

    def _hold(self, hello: Hello) -> None:
        """Answer later, and read nothing until then."""
        assert self._transport is not None
        self._state = State.HELD
        self._transport.pause_reading()
        self.hub.hold(self, hello)

    def answer(self, hello: Hello) -> None:
        """Admit a peer that was held."""
        if self._state is not State.HELD:
            return
        assert self._transport is not None
        self._state = _AWAIT_HELLO
        self._transport.resume_reading()
        try:
            self._welcome(hello)
            self._process_frames(0)
        except ProtocolError as error:
            self.close(error.reason, error.detail)

    def _welcome(self, hello: Hello) -> None:
        _check_drift(hello.drift_ppm)
        link, welcome = self.hub.admit_hello(hello, self.peer_certificate)
        received = hello.received if hello.peer_incarnation == self.hub.identity.incarnation else 0
        link.check_resume(hello.incarnation, received)
        self._replace_connection_of(link)
        self.link = link
        # What the connection before this one had brought counts by now.
        goes_on = hello.incarnation == link.peer_incarnation
        welcome = replace(welcome, received=link.received if goes_on else 0)
        self._attach(link, hello.incarnation, received, hello.drift_ppm)
        self._write(encode(self._with_datagrams(link, hello, welcome)))
        self._open(hello.heartbeat_ns)

    def _with_datagrams(self, link: Link, hello: Hello, welcome: Welcome) -> Welcome:
        """Our answer, with a channel for datagrams if both sides take them."""
        port = self.hub.datagrams_for(link)
        theirs = Seal.parse(hello.datagrams)
        if port is None or theirs is None:
            return welcome
        ours = port.new_seal()
        self.channel = port.open_channel(self, ours, theirs, None)
        return replace(welcome, datagrams=str(ours), datagram_port=port.port)

    def _open_datagrams(self, welcome: Welcome) -> None:
        assert self.link is not None and self._transport is not None
        port = self.hub.datagrams_for(self.link)
        theirs = Seal.parse(welcome.datagrams)
        if port is not None and theirs is not None and self._seal is not None:
            host = self._transport.get_extra_info("peername")[0]
            self.channel = port.open_channel(self, self._seal, theirs, (host, welcome.datagram_port))

    def _attach(self, link: Link, incarnation: int, received: int, theirs_ppm: int) -> None:
        """Give the link this connection; it reckons with the worse of both clocks, as each side says.

        What a broker passes on has been measured by its clock, and nobody after us knows of that clock:
        if it is worse than ours, ages are unknown. Births at a client are put back instead.
        """
        ours_ppm = self.hub.identity.drift_ppm
        worse_ppm = theirs_ppm if theirs_ppm > ours_ppm else 0
        link.attach(self, incarnation, received, max(ours_ppm, theirs_ppm), worse_ppm)
        if worse_ppm and Role.CLIENT not in (link.role, self.hub.identity.role):
            link.clock.stay_unknown()
            log.warning(
                "a broker's clock may drift more than ours, so the ages of messages from it are unknown: "
                "give all brokers the same clock_drift_ppm, that of the worst clock",
                extra={"peer": link.peer, "theirs_ppm": theirs_ppm, "ours_ppm": ours_ppm},
            )

    def _replace_connection_of(self, link: Link) -> None:
        if link.connection is not None:
            link.connection.close(CloseReason.REPLACED, "the peer connected again")

    def _open(self, heartbeat_ns: int) -> None:
        assert self.link is not None and self._transport is not None and self._timer is not None
        self._timer.cancel()
        self._state = _OPEN
        self._reader.open_up()
        self._arrived = self.link.received
        roles = {self.hub.identity.role, self.link.role}
        # Copies for a backup are named by their number, and a client's own work is not ours to delay.
        if self.hub.identity.role is not Role.CLIENT and roles != {Role.ROUTER}:
            self._waiting = Waiting(self.link.role)
        now_ns = self.hub.clock()
        self.liveness = Liveness(heartbeat_ns, self.hub.silence_floor_ns_for(heartbeat_ns), now_ns)
        self._send_heartbeat(now_ns)
        self.hub.connection_ready(self)
        if not self.link.holds_data:
            self.link.release_data()

    def _handshake_timed_out(self) -> None:
        self.close(
            CloseReason.HANDSHAKE_TIMEOUT, f"no handshake within {HANDSHAKE_TIMEOUT_NS / SECOND_NS:.0f} s"
        )

    # Open

    def _handle_frame(self, kind: int, body: bytes, at_once: bool) -> None:
        link = self.link
        assert link is not None
        if kind == _HEARTBEAT:
            self._take_heartbeat(link, decode_heartbeat(body))
        elif kind in (_DATA, _NUMBERED):
            if kind == _DATA:
                self._arrived = number = self._arrived + 1
            elif self.channel is None or len(body) < NUMBER.size:
                raise ProtocolError(CloseReason.UNEXPECTED_FRAME, "a numbered frame without datagrams")
            else:
                number, body = NUMBER.unpack_from(body)[0], body[NUMBER.size :]
            if at_once:
                self.take_numbered(number, body)
            else:
                assert self._waiting is not None
                self.hub.inbox.push(self, self._waiting.add(body), number, body)
                self._choose_reading()
        else:
            message = decode(kind, body)
            self._take_all_waiting()  # it may be about what was sent before it
            if not self.is_open:
                return
            if isinstance(message, Close):
                self._peer_closed(message)
            elif isinstance(message, Hello | Welcome):
                raise ProtocolError(CloseReason.UNEXPECTED_FRAME, f"{type(message).__name__} twice")
            else:
                self.hub.handler.on_control(link, message)

    def _take_data(self, link: Link, body: bytes) -> None:
        now_ns = self.hub.clock()
        if now_ns > self.hub.heartbeats_due_ns:
            self.hub.send_late_heartbeats(now_ns)
        self.hub.handler.on_data(link, body, now_ns)
        link.bytes_received += len(body) - BATCH_HEADER_BYTES
        self._unacknowledged_bytes += len(body)
        if self._unacknowledged_bytes >= ACKNOWLEDGE_EVERY_BYTES:
            self._send_heartbeat(now_ns)
        else:
            self.hub.acknowledge_soon(self)

    def _take_heartbeat(self, link: Link, heartbeat: Heartbeat) -> None:
        """Learn what has arrived, how far away the peer is and how its clock stands to ours."""
        liveness = self.liveness
        assert liveness is not None
        now_ns = self.hub.clock()
        outbox = link.outbox
        way_ns = liveness.lowest_round_trip_ns
        said_ns = said_at_ns(heartbeat.sent_ns, link.clock.shift_at(now_ns), way_ns, now_ns)
        link.acknowledged(outbox.acknowledge(heartbeat.received, said_ns, way_ns))
        first = not liveness.has_received
        liveness.received(heartbeat, now_ns, calm=outbox.is_idle)
        if heartbeat.echo_ns:
            link.clock.helper(heartbeat.echo_ns, heartbeat.echo_received_ns, now_ns)
            if link.delays is not None and (self.channel is None or not self.channel.is_usable(now_ns)):
                link.delays.add(liveness.round_trip_ns // 2)
        if first:
            # Echo it at once, so that the peer need not wait an interval to know our clock.
            self._send_heartbeat(now_ns)
        if outbox.has_waiting:
            self.flush_soon()

    def _send_heartbeat(self, now_ns: int) -> None:
        assert self.liveness is not None and self.link is not None and self._transport is not None
        self._unacknowledged_bytes = 0
        self._write(encode_heartbeat(self.liveness.heartbeat(now_ns, self.link.received)))
        self._give_up_if_unread()

    def _give_up_if_unread(self) -> None:
        assert self._transport is not None
        unread = self._transport.get_write_buffer_size()
        if unread > UNREAD_MAX_BYTES:
            # In a turn of its own: whoever sends does not expect the link to go down meanwhile.
            detail = f"{unread} bytes are not read: the limit is {UNREAD_MAX_BYTES}"
            self.hub.loop.call_soon(self.abort, CloseReason.TOO_SLOW, detail)

    def _host_answers(self, liveness: Liveness) -> bool:
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        return sock is not None and host_answers(sock, liveness.silence_limit_ns)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._state is not _OPEN or not self._writable:
            return
        assert self.link is not None and self._transport is not None
        if self.link.holds_data:
            return
        room = WRITE_HIGH_WATER_BYTES - self._transport.get_write_buffer_size()
        outbox = self.link.outbox
        now_ns = self.hub.clock()
        while room > 0 and outbox.has_waiting and outbox.has_room and self._writable:
            if self.channel is None:
                frames = outbox.take_frames(room, now_ns)
            else:
                frames = [
                    _numbered(number, frame)
                    for number, frame in outbox.take_numbered(room, now_ns)
                    if not self.channel.offer(number, frame, now_ns)
                ]
            if frames:
                self._write(frames[0] if len(frames) == 1 else b"".join(frames))
            room = WRITE_HIGH_WATER_BYTES - self._transport.get_write_buffer_size()
        # With a full window, the next acknowledgement flushes; with a full socket, its draining.

    # The end

    def _read_rest(self) -> None:
        """Take what the peer had sent before it died."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        while sock is not None and self._state is _OPEN and (data := read_rest(sock)):
            self.data_received(data)

    def _peer_closed(self, message: Close) -> None:
        try:
            reason = CloseReason(message.reason)
        except ValueError:
            reason = CloseReason.GOODBYE
        self._close_reason = reason
        self._close_detail = f"the peer says: {message.detail or message.reason}"
        if self._transport is not None:
            self._close_transport(self._transport)
        self._finish()

    def _close_transport(self, transport: asyncio.Transport) -> None:
        """Let the last bytes out, but not for ever: a peer may have stopped reading."""
        if self._timer is not None:
            self._timer.cancel()
        transport.close()
        self._timer = self.hub.loop.call_later(_LINGER_S, transport.abort)

    def _finish(self) -> None:
        """Enter CLOSED once, whichever way it came."""
        if self._state is State.CLOSED:
            return
        was_open = self._state is _OPEN
        self._state = State.CLOSED
        if self.channel is not None:
            self.channel.close()
            self.channel = None  # it refers to us, which would leave both to the garbage collector
        if not self.closed.done():
            self.closed.set_result((self._close_reason, self._close_detail))
        link = self.link
        current = link is not None and was_open and link.detach(self)
        self.hub.connection_closed(self, link if current else None, self._close_reason, self._close_detail)


def _numbered(number: int, data: bytes) -> bytes:
    """A data frame with its number, as it travels on a connection with a channel for datagrams."""
    return frame(_NUMBERED, NUMBER.pack(number) + data[FRAME_HEADER_BYTES:])


def _check_drift(ppm: int) -> None:
    """No peer may say that its clock is good for nothing, or perfect."""
    if not 0 < ppm <= DRIFT_MAX_PPM:
        raise ProtocolError(
            CloseReason.BAD_MESSAGE, f"a clock drift of {ppm} ppm: it must be 1 to {DRIFT_MAX_PPM}"
        )
