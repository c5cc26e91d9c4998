"""One TCP connection between two nodes: frames in, frames out, heartbeats.

States of a connection, and what moves it on:

    HANDSHAKE --both sides are introduced--> OPEN --any end--> CLOSED

The handshake has steps of its own (`runtime.handshake`) and one time limit in all; nothing else is written
before OPEN. Every state has one exit on error: CLOSED, with an enumerated reason, told to the peer in a
CLOSE frame if the socket still works. Data is written at most once per loop turn, and only while the
socket's own buffer is small, so that what waits stays in the outbox where order can change.
"""

import asyncio
import logging
import socket
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
from runtime.datagrams import Channel
from runtime.garbage import let_go
from runtime.handshake import Handshake
from runtime.inbox import Waiting
from runtime.kernel import host_answers, read_rest
from runtime.link import Link
from runtime.tls import CertificateName, TlsChannel

if TYPE_CHECKING:
    from runtime.hub import Hub

log = logging.getLogger("isthmus.connection")

_LINGER_S: Final = 1.0
"""How long a closing connection may take to hand its last bytes to the kernel."""
_NOT_SENT_LOW_WATER_BYTES: Final = 32 * 1024
NUMBER: Final = Struct("<Q")


class State(Enum):
    """Where a connection is in its life."""

    HANDSHAKE = auto()
    OPEN = auto()
    CLOSED = auto()


# What is asked for with every frame: finding a member of an enum takes longer than finding a name.
_OPEN: Final[State] = State.OPEN
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
        self.tls: TlsChannel | None = None
        self.channel: Channel | None = None
        """For urgent frames, which TCP might hold up."""
        self._state = State.HANDSHAKE
        self._handshake: Handshake | None = Handshake(self, dialled, through_proxy_to)
        """Until it is over: it refers to us, which would leave both to the garbage collector."""
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
        if self.link is None:
            self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._timer = self.hub.loop.call_later(HANDSHAKE_TIMEOUT_NS / SECOND_NS, self._handshake_timed_out)
        self.hub.connection_opened(self)
        assert self._handshake is not None
        self._handshake.start()

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        try:
            if self._handshake is not None:
                data = self._handshake.take_bytes(data, is_first=not self._reader.pending_bytes)
            elif self.tls is not None:
                data = self.decrypt(self.tls, data)
            if self.liveness is not None:
                self.liveness.heard()
            self._reader.feed(data)
            self._process_frames(len(data))
        except ProtocolError as error:
            self.close(error.reason, error.detail)

    def _process_frames(self, new_bytes: int) -> None:
        while self._handshake is not None and self._handshake.awaits_frame:
            frames = self._reader.take_frames(at_most=1)
            if not frames:
                return
            self._handshake.take_frame(*frames[0])
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
            self.write(encode(message))
            self._give_up_if_unread()

    def write_again(self, frames: list[bytes]) -> None:
        """Write frames that were sent on an earlier connection and not acknowledged."""
        if self._transport is not None and self._state is _OPEN:
            if self.channel is not None:
                assert self.link is not None
                first = self.link.outbox.next_unacknowledged
                frames = [_numbered(number, frame) for number, frame in enumerate(frames, first)]
            self.write(b"".join(frames))

    def write_numbered(self, number: int) -> None:
        """Write a frame that was lost as a datagram."""
        frame = self.link.outbox.frame(number) if self.link is not None else None
        if frame is not None and self._state is _OPEN:
            self.write(_numbered(number, frame))

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
            handshake = self._handshake
            encrypting = handshake is not None and handshake.is_encrypting
            if self.tls is not None and (encrypting or reason is CloseReason.TLS_FAILED):
                self._transport.write(self.tls.take())
            elif handshake is None or handshake.has_reached_peer:
                self.write(encode(Close(reason, detail[:512])))
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

    # The handshake: called by it, or by the hub about it

    def write(self, data: bytes) -> None:
        """Write to the peer, encrypted if the connection is."""
        assert self._transport is not None
        self._transport.write(data if self.tls is None else self.tls.encrypt(data))

    def write_plain(self, data: bytes) -> None:
        """Write as it is: to a proxy, or what TLS itself has to say."""
        assert self._transport is not None
        self._transport.write(data)

    def decrypt(self, tls: TlsChannel, data: bytes) -> bytes:
        """What the peer has sent; TLS may have to answer something."""
        plain = tls.decrypt(data)
        if (answer := tls.take()) and self._transport is not None:
            self._transport.write(answer)
        return plain

    @property
    def peer_certificate(self) -> CertificateName | None:
        """Whom the peer's certificate is for; None without TLS, or if it has none."""
        return self.tls.peer if self.tls is not None else None

    @property
    def peer_host(self) -> str:
        """The address of the other end."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("peername")[0])

    def hold(self) -> None:
        """Read nothing until the peer is answered."""
        assert self._transport is not None
        self._transport.pause_reading()

    def answer(self, hello: Hello) -> None:
        """Admit a peer that was held."""
        if self._handshake is None or not self._handshake.is_held:
            return
        assert self._transport is not None
        self._transport.resume_reading()
        try:
            self._handshake.answer(hello)
            self._process_frames(0)
        except ProtocolError as error:
            self.close(error.reason, error.detail)

    def open_up(self, heartbeat_ns: int) -> None:
        """Both sides are introduced: messages may flow."""
        assert self.link is not None and self._transport is not None and self._timer is not None
        self._timer.cancel()
        self._state = _OPEN
        self._handshake = None
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

    def peer_closed(self, message: Close) -> None:
        """The peer has ended the connection and says why."""
        try:
            reason = CloseReason(message.reason)
        except ValueError:
            reason = CloseReason.GOODBYE
        self._close_reason = reason
        self._close_detail = f"the peer says: {message.detail or message.reason}"
        if self._transport is not None:
            self._close_transport(self._transport)
        self._finish()

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
                self.peer_closed(message)
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
        self.write(encode_heartbeat(self.liveness.heartbeat(now_ns, self.link.received)))
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
                self.write(frames[0] if len(frames) == 1 else b"".join(frames))
            room = WRITE_HIGH_WATER_BYTES - self._transport.get_write_buffer_size()
        # With a full window, the next acknowledgement flushes; with a full socket, its draining.

    # The end

    def _read_rest(self) -> None:
        """Take what the peer had sent before it died."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        while sock is not None and self._state is _OPEN and (data := read_rest(sock)):
            self.data_received(data)

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
        self._handshake = None
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
