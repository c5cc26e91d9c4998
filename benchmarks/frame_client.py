"""A client with as little of its own work as possible: one socket to an edge broker, bytes in and out.

`clients.Client` is made for applications; a load tool sends thousands of topics from hundreds of
clients in one process, and must not become what is measured. This one speaks the same protocol,
but keeps nothing that is sent and does not come back when the connection is lost: that ends a run.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final

from overlay.codec import decode, decode_heartbeat, encode, encode_heartbeat
from overlay.errors import IsthmusError
from overlay.framing import FrameReader
from overlay.limits import ENDPOINT_ID_MAX, SECOND_NS
from overlay.liveness import Liveness
from overlay.locator import Locator
from overlay.messages import (
    Close,
    Declare,
    Declared,
    EndpointKind,
    FrameKind,
    Hello,
    Matched,
    Refused,
    Role,
    Welcome,
)
from overlay.qos import TopicQos
from runtime.hub import CLIENT_HEARTBEAT_NS, CLIENT_SILENCE_NS

ACKNOWLEDGE_EVERY_BYTES: Final = 64 * 1024

OnData = Callable[[bytes, int], None]


class LoadError(IsthmusError):
    """The load cannot go on: an edge broker refused something or went away."""


class LoadClient(asyncio.Protocol):
    """One connection to an edge broker."""

    def __init__(self, tick_ns: int, on_data: OnData | None = None) -> None:
        """With `on_data`, bodies of data frames are handed over and acknowledged at every tick."""
        self.incarnation = int.from_bytes(os.urandom(8), "little") | 1
        self.backlog_most_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._tick_s = tick_ns / SECOND_NS
        self._on_data = on_data
        self._reader = FrameReader()
        self._liveness: Liveness | None = None
        self._received = 0
        self._unacknowledged_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._welcome: asyncio.Future[None] = self._loop.create_future()
        self._declaring: dict[int, asyncio.Future[int]] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets an exception if the connection ends before `close`."""

    async def open(self, edge: Locator) -> None:
        """Connect and introduce ourselves."""
        await self._loop.create_connection(lambda: self, edge.host, edge.port)
        await self._welcome

    async def declare(self, kind: EndpointKind, topic: str, qos: TopicQos) -> tuple[int, int]:
        """Declare an endpoint; gives its id and the topic's."""
        endpoint = int.from_bytes(os.urandom(8), "little") & ENDPOINT_ID_MAX | 1
        answer = self._declaring[endpoint] = self._loop.create_future()
        self._write(encode(Declare(endpoint, kind, topic, qos.to_record())))
        await asyncio.wait({answer, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            self.failed.result()
        return endpoint, answer.result()

    def send(self, frame: bytes) -> None:
        """Send a data frame."""
        assert self._transport is not None
        self._transport.write(frame)
        waiting = self._transport.get_write_buffer_size()
        self.backlog_most_bytes = max(self.backlog_most_bytes, waiting)

    def close(self) -> None:
        """Leave at once; the edge broker takes the endpoints down."""
        if self._ticker is not None:
            self._ticker.cancel()
        if not self.failed.done():
            self.failed.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._write(
            encode(Hello(Role.CLIENT, f"{self.incarnation:016x}", self.incarnation, CLIENT_HEARTBEAT_NS))
        )

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        self._reader.feed(data)
        now_ns = time.monotonic_ns()
        for kind, body in self._reader.take_frames():
            if kind == FrameKind.DATA:
                self._received += 1
                self._unacknowledged_bytes += len(body)
                if self._on_data is not None:
                    self._on_data(body, now_ns)
            elif kind == FrameKind.HEARTBEAT:
                assert self._liveness is not None
                first = not self._liveness.has_received
                self._liveness.received(decode_heartbeat(body), now_ns)
                if first:
                    self._heartbeat(now_ns)
            else:
                self._take_control(kind, body)
        if self._unacknowledged_bytes > ACKNOWLEDGE_EVERY_BYTES:
            self._heartbeat(now_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._fail(f"the edge broker is gone: {exc or 'it closed the connection'}")

    # Details

    def _take_control(self, kind: int, body: bytes) -> None:
        message = decode(kind, body)
        if isinstance(message, Welcome):
            self._reader.open_up()
            self._liveness = Liveness(CLIENT_HEARTBEAT_NS, CLIENT_SILENCE_NS, time.monotonic_ns())
            self._heartbeat(time.monotonic_ns())
            self._ticker = self._loop.call_later(self._tick_s, self._tick)
            self._welcome.set_result(None)
        elif isinstance(message, Declared):
            self._declaring.pop(message.endpoint).set_result(message.topic_id)
        elif isinstance(message, Refused):
            self._fail(f"an endpoint was refused ({message.code}): {message.reason}")
        elif isinstance(message, Close):
            self._fail(f"the edge broker closes the connection ({message.reason}): {message.detail}")
        elif not isinstance(message, Matched):
            self._fail(f"unexpected {type(message).__name__}")

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(LoadError(reason))
        if not self._welcome.done():
            self._welcome.set_exception(LoadError(reason))

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self._tick_s, self._tick)
        now_ns = time.monotonic_ns()
        assert self._liveness is not None
        if self._unacknowledged_bytes or self._liveness.is_due(now_ns, round(self._tick_s * SECOND_NS)):
            self._heartbeat(now_ns)

    def _heartbeat(self, now_ns: int) -> None:
        assert self._liveness is not None
        self._unacknowledged_bytes = 0
        self._write(encode_heartbeat(self._liveness.heartbeat(now_ns, self._received)))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
