"""Datagrams beside the TCP connections of brokers: sockets, seals and timers around `overlay.express`.

A broker has one UDP socket, on the port on which it accepts connections. In the handshake of a
connection each side tells the other a random name for the channel and a key; both travel as well
protected as the link itself. Every datagram is sealed with that key (ChaCha20-Poly1305), so it can be
neither read nor forged nor, because each number is used once, replayed:

    channel u64 | number u64 | sealed payload, with a tag of 16 bytes

The side that dialled knows where the other is and speaks first; the other answers to where the last
authentic datagram came from, so it works through NAT. While no report has come for a while, or
without a channel at all (a proxy, a firewall, an older peer), every frame goes by TCP.
"""

import asyncio
import logging
import secrets
import socket
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from overlay.delay import said_at_ns
from overlay.errors import ProtocolError
from overlay.express import COPY_EVERY_NS, Express, Report
from overlay.framing import FRAME_HEADER_BYTES
from overlay.limits import MIB, SECOND_NS

if TYPE_CHECKING:
    from runtime.connection import Connection
    from runtime.hub import Hub
    from runtime.link import Link

log = logging.getLogger("isthmus.datagrams")

Address = tuple[str, int]

HEADER: Final = Struct("<QQ")
_NONCE: Final = Struct("<xxxxQ")
_CHANNEL_BYTES: Final = 8
_KEY_BYTES: Final = 32
_HEARD_WITHIN_NS: Final = 1 * SECOND_NS
"""Without a report for this long and two round trips, datagrams are not relied on."""
_REPLAY_WINDOW: Final = 1_024
_RECEIVE_BUFFER_BYTES: Final = 4 * MIB
"""A datagram that comes while we do something else should not be lost for it."""


class Seal(NamedTuple):
    """What one side tells the other in the handshake: how to send datagrams to it."""

    channel: int
    key: bytes

    def open(self, number: int, data: bytes) -> bytes:
        """The payload of a datagram sealed with it; raises InvalidTag for any other."""
        sealed, header = data[HEADER.size :], data[: HEADER.size]
        return ChaCha20Poly1305(self.key).decrypt(_NONCE.pack(number), sealed, header)

    def __str__(self) -> str:
        return f"{self.channel:016x}{self.key.hex()}"

    @classmethod
    def parse(cls, text: str) -> "Seal | None":
        """Read it back; None if it is nothing of the kind."""
        try:
            data = bytes.fromhex(text)
        except ValueError:
            return None
        if len(data) != _CHANNEL_BYTES + _KEY_BYTES:
            return None
        return cls(int.from_bytes(data[:_CHANNEL_BYTES], "big"), data[_CHANNEL_BYTES:])


class DatagramPort(asyncio.DatagramProtocol):
    """The UDP socket of a broker."""

    def __init__(self, hub: "Hub") -> None:
        self._hub = hub
        self._transport: asyncio.DatagramTransport | None = None
        self._gone = hub.loop.create_future()
        self._channels: dict[int, Channel] = {}
        self.port = 0
        self.rejected = 0
        """Datagrams of unknown channels, forged or replayed."""

    @classmethod
    async def open(cls, hub: "Hub", host: str, port: int) -> "DatagramPort | None":
        """Take datagrams at this address; None where that cannot be."""
        try:
            _, made = await hub.loop.create_datagram_endpoint(lambda: cls(hub), local_addr=(host, port))
        except (OSError, NotImplementedError) as error:
            log.warning("no datagrams here: urgent messages go by TCP", extra={"error": str(error)})
            return None
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there."""
        # asyncio's own is no DatagramTransport by its class.
        self._transport = cast(asyncio.DatagramTransport, transport)
        self.port = transport.get_extra_info("sockname")[1]
        sock = transport.get_extra_info("socket")
        if sock is not None:  # as much as the system allows
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._transport = None
        if not self._gone.done():
            self._gone.set_result(None)

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """A datagram arrived, from anybody."""
        if len(data) > HEADER.size:
            channel_id, number = HEADER.unpack_from(data)
            channel = self._channels.get(channel_id)
            if channel is not None and channel.receive(number, data, addr):
                return
        self.rejected += 1

    def error_received(self, exc: Exception) -> None:
        """A host is not reachable: the channel will notice that nothing comes."""

    def new_seal(self) -> Seal:
        """For a handshake; never of the hub's randomness, whose seed everybody is told."""
        return Seal(secrets.randbits(8 * _CHANNEL_BYTES), secrets.token_bytes(_KEY_BYTES))

    def open_channel(
        self, connection: "Connection", ours: Seal, theirs: Seal, address: Address | None
    ) -> "Channel":
        """Both sides have told each other how; `address` is where the peer is, if we dialled it."""
        channel = self._channels[ours.channel] = Channel(self, self._hub, connection, ours, theirs, address)
        return channel

    def forget(self, channel: "Channel") -> None:
        """The channel's connection is gone."""
        self._channels.pop(channel.id, None)

    def send(self, data: bytes, address: Address) -> None:
        """Hand a datagram to the kernel."""
        if self._transport is not None:
            self._transport.sendto(data, address)

    async def close(self) -> None:
        """Take no more; returns when the socket is gone."""
        if self._transport is not None:
            self._transport.close()
            await self._gone


class Channel:
    """The datagrams of one connection."""

    def __init__(
        self,
        port: DatagramPort,
        hub: "Hub",
        connection: "Connection",
        ours: Seal,
        theirs: Seal,
        address: Address | None,
    ) -> None:
        self.id = ours.channel
        self.express = Express()
        self.bytes_sent = 0
        self._port = port
        self._hub = hub
        self._connection = connection
        self._theirs = theirs.channel
        self._sealing = ChaCha20Poly1305(theirs.key)
        self._opening = ChaCha20Poly1305(ours.key)
        self._address = address
        self._number = 0
        self._highest = 0
        self._seen: set[int] = set()
        self._heard_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """The connection is gone."""
        self._port.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def is_usable(self, now_ns: int) -> bool:
        """The peer reports what it gets."""
        return now_ns - self._heard_ns < _HEARD_WITHIN_NS + 2 * self.express.round_trip_ns

    def offer(self, number: int, frame: bytes, now_ns: int) -> bool:
        """Send a data frame as a datagram if that is better for it; says whether it was."""
        urgency = frame[FRAME_HEADER_BYTES]
        if not self.express.takes(urgency, len(frame) - FRAME_HEADER_BYTES) or not self.is_usable(now_ns):
            return False
        self._send(self.express.send(number, frame[FRAME_HEADER_BYTES:], urgency, now_ns))
        self._pump_later()
        return True

    def tick(self, now_ns: int, *, data_came: bool) -> None:
        """Report if it is time, send again what has not been reported for too long."""
        if self._address is None:
            return
        if data_came or self.express.report_due(now_ns):
            numbers = self._link.numbers
            self._send(self.express.report(numbers.received, numbers.ahead, now_ns))
        self._send_again(*self.express.overdue(now_ns))

    def receive(self, number: int, data: bytes, address: Address) -> bool:
        """Take a datagram; False if it is not the peer's or was taken before."""
        if number <= self._highest - _REPLAY_WINDOW or number in self._seen:
            return False
        try:
            payload = self._opening.decrypt(_NONCE.pack(number), data[HEADER.size :], data[: HEADER.size])
        except InvalidTag:
            return False
        if number > self._highest:  # an older one may have been held back to lead us where the peer is not
            self._address = address
        self._remember(number)
        now_ns = self._hub.clock()
        self.express.meter.note(number)
        self._connection.heard()
        try:
            content = self.express.read(payload, now_ns)
            if isinstance(content, Report):
                self._heard_ns = now_ns
                self._take_report(content, now_ns)
            else:
                frame_number, body = content
                self._connection.take_numbered(frame_number, body)
        except ProtocolError as error:
            self._connection.close(error.reason, error.detail)
        return True

    def _take_report(self, report: Report, now_ns: int) -> None:
        link = self._link
        round_trip_ns = self.express.round_trip_of(report, now_ns)
        if round_trip_ns:
            link.clock.helper(report.echo_ns, report.echo_received_ns, now_ns)
            if link.delays is not None:
                link.delays.add(round_trip_ns // 2)
        outbox = link.outbox
        outbox.is_express = self.express.is_worth_it
        # Not the usual round trip: that of a peer which is behind with its work holds its queue.
        way_ns = self.express.least_round_trip_ns
        said_ns = said_at_ns(report.sent_ns, link.clock.shift_at(now_ns), way_ns, now_ns)
        if report.received >= outbox.next_unacknowledged:
            link.acknowledged(outbox.acknowledge(report.received, said_ns, way_ns))
        if report.ahead:
            link.acknowledged(outbox.acknowledge_ahead(report.numbers(), said_ns, way_ns))
        self._send_again(*self.express.reported(report, now_ns))
        if outbox.has_waiting:
            self._connection.flush_soon()

    def _send_again(self, payloads: list[bytes], to_tcp: list[int]) -> None:
        for payload in payloads:
            self._send(payload)
        for number in to_tcp:
            self._connection.write_numbered(number)
        if payloads:
            self._pump_later()

    def _send(self, payload: bytes) -> None:
        if self._address is None:
            return
        self._number += 1
        header = HEADER.pack(self._theirs, self._number)
        data = header + self._sealing.encrypt(_NONCE.pack(self._number), payload, header)
        self.bytes_sent += len(data)
        self._port.send(data, self._address)

    def _pump_later(self) -> None:
        if self.express.has_copies and self._timer is None:
            self._timer = self._hub.loop.call_later(COPY_EVERY_NS / SECOND_NS, self._pump)

    def _pump(self) -> None:
        self._timer = None
        for payload in self.express.due(self._hub.clock()):
            self._send(payload)
        self._pump_later()

    def _remember(self, number: int) -> None:
        self._highest = max(self._highest, number)
        self._seen.add(number)
        if len(self._seen) > 2 * _REPLAY_WINDOW:
            self._seen = {seen for seen in self._seen if seen > self._highest - _REPLAY_WINDOW}

    @property
    def _link(self) -> "Link":
        assert self._connection.link is not None
        return self._connection.link
