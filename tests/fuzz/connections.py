"""Whole connections fed with hostile bytes: the real hub and connection, only the socket is left out."""

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from overlay.errors import CloseReason
from overlay.messages import ControlMessage, Hello, Role, Welcome
from runtime.connection import Connection
from runtime.hub import Hub, Identity
from runtime.link import Link
from runtime.tls import Tls, TlsChannel
from tests.fuzz.mutation import cuts

NOW_NS = 10**12
Event = tuple[Any, ...]


class _Wire(asyncio.Transport):
    """Takes what a connection writes."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self._protocol = protocol
        self.written = bytearray()
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self.closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Handler:
    """Writes down what a hub tells it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def admit(self, hello: Hello) -> tuple[Link, Welcome]:
        self.events.append(("admit", hello))
        return Link(hello.node, hello.role), Welcome(Role.EDGE, "e", 1, cluster="c1")

    def on_welcome(self, link: Link, welcome: Welcome) -> None:
        raise AssertionError("nobody was dialled")

    def on_link_up(self, link: Link) -> None:
        self.events.append(("up", link.peer))

    def on_link_down(self, link: Link, reason: CloseReason, detail: str) -> None:
        self.events.append(("down", link.peer, reason))

    def on_data(self, link: Link, body: bytes, now_ns: int) -> None:
        self.events.append(("data", body))

    def on_control(self, link: Link, message: ControlMessage) -> None:
        self.events.append(("control", message))


class ConnectionFuzzer:
    """Feeds the same bytes to two connections, at once and in pieces, and compares what comes of it."""

    def __init__(self, certificates: Path | None) -> None:
        self._runner = asyncio.Runner()
        self._broker = Tls.of_broker(certificates, Role.EDGE, "server") if certificates else None
        self._peer = Tls.of_broker(certificates, Role.EDGE, "ea") if certificates else None
        self.opened = 0
        self.refused = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    def check(self, data: bytes, rng: random.Random) -> None:
        """Raise AssertionError if the pieces mean something else than the whole."""
        if self._peer is not None:
            whole = self._runner.run(self._feed_raw([data]))
            pieces = self._runner.run(self._feed_raw(cuts(data, rng)))
            assert whole[0] == pieces[0] == []  # nothing gets through without a handshake
        whole = self._runner.run(self._feed([data]))
        pieces = self._runner.run(self._feed(cuts(data, rng)))
        assert whole == pieces
        self.opened += any(event[0] == "up" for event in whole[0])
        self.refused += whole[1] not in {"", CloseReason.GOODBYE}

    async def _feed_raw(self, pieces: Iterable[bytes]) -> tuple[list[Event], str]:
        hub, connection, _ = self._accept()
        for piece in pieces:
            connection.data_received(piece)
        return await self._finish(hub, connection)

    async def _feed(self, pieces: Iterable[bytes]) -> tuple[list[Event], str]:
        hub, connection, wire = self._accept()
        channel = self._peer.dial() if self._peer is not None else None
        if channel is not None:
            _shake_hands(channel, connection, wire)
        for piece in pieces:
            connection.data_received(piece if channel is None else channel.encrypt(piece))
        return await self._finish(hub, connection)

    def _accept(self) -> tuple[Hub, Connection, _Wire]:
        hub = Hub(
            Identity(Role.EDGE, "e", 1, "plant", "c1"), _Handler(), clock=lambda: NOW_NS, tls=self._broker
        )
        connection = Connection(hub)
        wire = _Wire(connection)
        connection.connection_made(wire)
        return hub, connection, wire

    async def _finish(self, hub: Hub, connection: Connection) -> tuple[list[Event], str]:
        assert isinstance(hub.handler, _Handler)
        reason = connection.closed.result()[0] if connection.closed.done() else ""
        events = list(hub.handler.events)
        await hub.close()
        return events, reason


def _shake_hands(channel: TlsChannel, connection: Connection, wire: _Wire) -> None:
    waiting = channel.start()
    while waiting:
        connection.data_received(waiting)
        answer, wire.written = bytes(wire.written), bytearray()
        channel.decrypt(answer)
        waiting = channel.take()
