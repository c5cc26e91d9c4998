"""The WAN of the process testbed: one HTTP CONNECT proxy per LAN that delays, cuts and counts.

Edges reach routing brokers only through the gateway of their LAN. Each connection is a pair of
*delay lines*, one per direction: bytes go in when they arrive and come out in order, one way delay
later, all that is due in one write. The end of a connection travels in the line like a byte: what
was under way still arrives, then the other side is closed too. So the death of a router is seen by
its edges one delay after it happened, and nothing that had left the router is lost.

A cut behaves like a dead path under TCP, which repeats until it gets through: nothing comes out of
the lines, not even an end, new connections are not answered, and after `heal` everything that is
late comes out at once. Directions are cut one by one: `OUT` towards the cloud, `BACK` into the LAN.

A direction can have a rate, shared by all its connections. Then little is under way at a time, so
that what the link has not carried yet is still in the sender's hands, as with a modem and a small
buffer.

A gateway listens on an address of its LAN and dials loopback addresses only. One that is made with a
target takes no requests and relays everything there; `topology.switchboard` has many of both kinds.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

from overlay.errors import InvalidNameError
from overlay.locator import Locator
from topology.lines import read_commands, say
from topology.tap import Tap

CONNECTIONS_MAX: Final = 1_024
REQUEST_MAX_BYTES: Final = 4 * 1024
REQUEST_TIMEOUT_S: Final = 5.0
DIAL_TIMEOUT_S: Final = 5.0
LINE_MAX_BYTES: Final = 4 * 1024 * 1024
"""Bytes under way in one direction of one connection before its sender has to wait."""
RATED_LINE_S: Final = 0.01
"""With a rate: so much may be under way in one connection, ..."""
RATED_PIECE_S: Final = 0.002
"""... and bytes travel in pieces that take this long."""
TIMER_STEP_S: Final = 0.001
"""The event loop sleeps in whole milliseconds, rounded up: timers aim half a step early."""
LINGER_S: Final = 1.0
"""How long a closed side may take to accept its last bytes."""


class Way(StrEnum):
    """The two directions through a gateway."""

    OUT = "out"
    """From the LAN to the cloud."""
    BACK = "back"
    """From the cloud into the LAN."""


class Path:
    """One direction of the WAN link, shared by all connections: its delay, and whether it is cut."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.is_cut = False
        self.bytes_per_s: float | None = None
        """What the path carries; None: everything."""
        self.late_max_s = 0.0
        """The longest a batch of bytes came out after its time, cuts not counted."""
        self.tap = Tap()
        self.lines: set[DelayLine] = set()
        self._free_s = 0.0
        self._healed = asyncio.Event()
        self._healed.set()

    def cut(self) -> None:
        """Let nothing through."""
        self.is_cut = True
        self._healed.clear()

    def heal(self) -> None:
        """Let everything through again, what is late at once."""
        self.is_cut = False
        self._healed.set()
        for line in list(self.lines):
            line.release(after_cut=True)

    @property
    def line_max_bytes(self) -> int:
        """Bytes that may be under way in one connection."""
        return LINE_MAX_BYTES if self.bytes_per_s is None else round(self.bytes_per_s * RATED_LINE_S)

    def carry(self, data: bytes, now_s: float) -> Iterator[tuple[float, bytes]]:
        """When these bytes come out, piece by piece."""
        if self.bytes_per_s is None:
            yield now_s + self.delay_s, data
            return
        size = max(1, round(self.bytes_per_s * RATED_PIECE_S))
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            self._free_s = max(self._free_s, now_s) + len(piece) / self.bytes_per_s
            yield self._free_s + self.delay_s, piece

    async def pass_through(self) -> None:
        """Wait as long as something small takes to get through."""
        await asyncio.sleep(self.delay_s)
        await self._healed.wait()


class DelayLine:
    """One direction of one connection: bytes in, the same bytes out one delay later."""

    def __init__(self, path: Path, on_room: Callable[[bool], None]) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._on_room = on_room
        self._items: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._end_s: float | None = None
        self._target: asyncio.Transport | None = None
        self._writable = True
        self._full = False
        self._blocked = False
        self._timer: asyncio.TimerHandle | None = None
        path.lines.add(self)

    def block(self) -> None:
        """Let nothing out of this line, as if its path were cut."""
        self._blocked = True

    def unblock(self) -> None:
        """Let everything out again, what is late at once."""
        self._blocked = False
        self.release(after_cut=True)

    @property
    def _is_stuck(self) -> bool:
        return self._target is None or not self._writable or self._path.is_cut or self._blocked

    def attach(self, target: asyncio.Transport) -> None:
        """Bytes come out here from now on."""
        self._target = target
        self.release()

    def push(self, data: bytes) -> None:
        """Bytes enter the line."""
        self._items.extend(self._path.carry(data, self._loop.time()))
        self._bytes += len(data)
        if self._bytes > self._path.line_max_bytes and not self._full:
            self._full = True
            self._on_room(False)
        self._arm()

    def push_end(self) -> None:
        """The sender is gone: so will the receiver be, once everything before this is out."""
        if self._end_s is None:
            last_s = self._items[-1][0] if self._items else 0.0
            self._end_s = max(self._loop.time() + self._path.delay_s, last_s)
            self._arm()

    def set_writable(self, writable: bool) -> None:
        """Whether the receiver takes bytes."""
        self._writable = writable
        if writable:
            self.release()

    def discard(self) -> None:
        """The receiver is gone: drop what is under way."""
        self._items.clear()
        self._bytes = 0
        self._end_s = None
        self._target = None
        self._path.lines.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def release(self, *, after_cut: bool = False) -> None:
        """Let out what is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_stuck:
            return
        assert self._target is not None
        now_s = self._loop.time() + TIMER_STEP_S / 2
        due: list[bytes] = []
        items = self._items
        if items and items[0][0] <= now_s and not after_cut:
            self._path.late_max_s = max(self._path.late_max_s, self._loop.time() - items[0][0])
        while items and items[0][0] <= now_s:
            due.append(items.popleft()[1])
        if due:
            data = b"".join(due)
            self._bytes -= len(data)
            self._target.write(data)
            if self._full and self._bytes < self._path.line_max_bytes // 2:
                self._full = False
                self._on_room(True)
        if not items and self._end_s is not None and self._end_s <= now_s:
            target = self._target
            self.discard()
            target.close()
            self._loop.call_later(LINGER_S, target.abort)
            return
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None or self._is_stuck:
            return
        if self._items:
            self._timer = self._loop.call_at(self._items[0][0] - TIMER_STEP_S / 2, self.release)
        elif self._end_s is not None:
            self._timer = self._loop.call_at(self._end_s - TIMER_STEP_S / 2, self.release)


class _Side(asyncio.Protocol):
    """One of the two sockets of a relay."""

    def __init__(self, relay: "Relay", way: Way) -> None:
        self._relay = relay
        self._way = way
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._relay.opened(self._way, transport)

    def data_received(self, data: bytes) -> None:
        self._relay.received(self._way, data)

    def pause_writing(self) -> None:
        self._relay.incoming(self._way).set_writable(False)

    def resume_writing(self) -> None:
        self._relay.incoming(self._way).set_writable(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.lost(self._way)


class Relay:
    """One connection through the gateway: the edge's socket, the router's socket, a line each way."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._sides: dict[Way, asyncio.Transport | None] = {Way.OUT: None, Way.BACK: None}
        """By the way their bytes go: OUT is the edge's socket, BACK the router's."""
        self._lines = {way: DelayLine(gateway.paths[way], partial(self._reading, way)) for way in Way}
        self._taps = {way: gateway.paths[way].tap.stream() for way in Way}
        self._request = b""
        self.target: Locator | None = None
        self._connected = False
        self._dial: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def incoming(self, way: Way) -> DelayLine:
        """The line whose bytes come out at this side."""
        return self._lines[Way.BACK if way is Way.OUT else Way.OUT]

    def opened(self, way: Way, transport: asyncio.Transport) -> None:
        """A side is connected."""
        self._sides[way] = transport
        self.incoming(way).attach(transport)
        if way is Way.OUT and self._gateway.target is not None:
            self._connected = True
            self._dial_target(self._gateway.target)
        elif way is Way.OUT:
            self._timer = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, transport.abort)

    def received(self, way: Way, data: bytes) -> None:
        """Bytes arrived at a side."""
        if way is Way.OUT and not self._connected:
            data = self._read_request(data)
        if data:
            self._taps[way].feed(data)
            self._lines[way].push(data)

    def lost(self, way: Way) -> None:
        """A side is gone: the other one learns it at the end of its line."""
        self._sides[way] = None
        self.incoming(way).discard()
        if self._timer is not None:
            self._timer.cancel()
        if self._dial is not None and way is Way.OUT:
            self._dial.cancel()
        self._lines[way].push_end()
        if not any(self._sides.values()):
            self.close()

    def block(self) -> None:
        """Let nothing through this connection, not even its end."""
        for line in self._lines.values():
            line.block()

    def unblock(self) -> None:
        """Let everything through again."""
        for line in self._lines.values():
            line.unblock()

    def close(self) -> None:
        """End both sides now."""
        for line in self._lines.values():
            line.discard()
        for transport in self._sides.values():
            if transport is not None:
                transport.abort()
        self._gateway.relays.discard(self)

    def _reading(self, way: Way, room: bool) -> None:
        transport = self._sides[way]
        if transport is not None and not transport.is_closing():
            if room:
                transport.resume_reading()
            else:
                transport.pause_reading()

    def _read_request(self, data: bytes) -> bytes:
        """Collect the CONNECT request; gives the bytes after it, which belong to the connection."""
        self._request += data
        head, separator, rest = self._request.partition(b"\r\n\r\n")
        if not separator:
            if len(self._request) > REQUEST_MAX_BYTES:
                self._answer("431 Request Header Fields Too Large", end=True)
            return b""
        self._connected = True
        if self._timer is not None:
            self._timer.cancel()
        words = head.split(b"\r\n", 1)[0].split(b" ")
        try:
            if len(words) != 3 or words[0] != b"CONNECT":
                raise InvalidNameError("not CONNECT")
            target = Locator.parse(words[1].decode("ascii", "replace"))
        except InvalidNameError:
            self._answer("400 Bad Request", end=True)
            return b""
        if not _is_loopback(target.host):
            self._answer("403 Forbidden", end=True)
            return b""
        self._dial_target(target)
        return rest

    def _dial_target(self, target: Locator) -> None:
        self.target = target
        if target in self._gateway.unreachable:
            self.block()
        self._dial = asyncio.get_running_loop().create_task(self._connect(target), name=f"dial {target}")
        self._dial.add_done_callback(self._dialled)

    async def _connect(self, target: Locator) -> None:
        await self._gateway.paths[Way.OUT].pass_through()
        if (healed := self._gateway.unreachable.get(target)) is not None:
            await healed.wait()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: _Side(self, Way.BACK), target.host, target.port
                )
        except (OSError, TimeoutError):
            self._answer("502 Bad Gateway", end=True)
            return
        if self._sides[Way.OUT] is None:
            self.close()
        else:
            self._answer("200 Connection established", end=False)

    def _dialled(self, task: asyncio.Task[None]) -> None:
        self._dial = None
        if not task.cancelled() and task.exception() is not None:
            self.close()

    def _answer(self, status: str, *, end: bool) -> None:
        if self._gateway.target is None:
            self._lines[Way.BACK].push(f"HTTP/1.1 {status}\r\n\r\n".encode())
        if end:
            self._lines[Way.BACK].push_end()


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """What has passed a gateway."""

    connections: int
    bytes_out: int
    bytes_back: int
    messages_out: dict[str, int]
    """By topic id, as text, because that is what JSON keys are."""
    messages_back: dict[str, int]
    unreadable: int
    late_max_ms: float


class Gateway:
    """The way from one LAN to the cloud and back."""

    def __init__(
        self, delay_ms: float = 0.0, back_delay_ms: float | None = None, target: Locator | None = None
    ) -> None:
        """With `target` everything goes there and nobody is asked where to."""
        back_ms = delay_ms if back_delay_ms is None else back_delay_ms
        self.target = target
        self.unreachable: dict[Locator, asyncio.Event] = {}
        """Targets that are cut off, each with what tells that it is not any more."""
        self.paths = {Way.OUT: Path(delay_ms / 1e3), Way.BACK: Path(back_ms / 1e3)}
        self.relays: set[Relay] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int = 0) -> Locator:
        """Accept connections; returns where."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port)
        bound_host, bound_port = self._server.sockets[0].getsockname()[:2]
        return Locator(bound_host, bound_port)

    async def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        for relay in list(self.relays):
            relay.close()
        if self._server is not None:
            await self._server.wait_closed()
        # Transports call connection_lost in a later turn; give them that turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def cut(self, ways: Iterable[Way] = tuple(Way)) -> None:
        """Let nothing through in these directions."""
        for way in ways:
            self.paths[way].cut()

    def heal(self, ways: Iterable[Way] = tuple(Way)) -> None:
        """Let everything through again."""
        for way in ways:
            self.paths[way].heal()

    def cut_target(self, target: Locator) -> None:
        """Let nothing through to or from one of those who are dialled."""
        self.unreachable.setdefault(target, asyncio.Event())
        for relay in self.relays:
            if relay.target == target:
                relay.block()

    def heal_target(self, target: Locator) -> None:
        """Let everything through again."""
        healed = self.unreachable.pop(target, None)
        if healed is not None:
            healed.set()
        for relay in list(self.relays):
            if relay.target == target:
                relay.unblock()

    def set_delay(self, delay_ms: float, back_delay_ms: float | None = None) -> None:
        """Change the delay of what enters from now on; order is kept."""
        self.paths[Way.OUT].delay_s = delay_ms / 1e3
        self.paths[Way.BACK].delay_s = (delay_ms if back_delay_ms is None else back_delay_ms) / 1e3

    def set_rate(self, bytes_per_s: float | None, ways: Iterable[Way] = tuple(Way)) -> None:
        """Carry no more than this in each of these directions from now on; None: no limit."""
        for way in ways:
            self.paths[way].bytes_per_s = bytes_per_s

    def statistics(self) -> GatewayStatistics:
        """What has passed."""
        out, back = self.paths[Way.OUT], self.paths[Way.BACK]
        return GatewayStatistics(
            connections=len(self.relays),
            bytes_out=out.tap.bytes,
            bytes_back=back.tap.bytes,
            messages_out={str(topic): count for topic, count in out.tap.messages.items()},
            messages_back={str(topic): count for topic, count in back.tap.messages.items()},
            unreadable=out.tap.unreadable + back.tap.unreadable,
            late_max_ms=round(1e3 * max(out.late_max_s, back.late_max_s), 3),
        )

    def _accept(self) -> asyncio.Protocol:
        if len(self.relays) >= CONNECTIONS_MAX:
            return _Refuse()
        relay = Relay(self)
        self.relays.add(relay)
        return _Side(relay, Way.OUT)


class _Refuse(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


async def _serve(host: str, delay_ms: float, back_delay_ms: float | None) -> None:
    gateway = Gateway(delay_ms, back_delay_ms)
    locator = await gateway.start(host)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    say("serving", locator=str(locator))
    try:
        async for command in read_commands():
            _obey(gateway, command)
    finally:
        await gateway.close()


def _obey(gateway: Gateway, command: dict[str, Any]) -> None:
    name = command["command"]
    ways = [Way(way) for way in command.get("ways", tuple(Way))]
    answer: dict[str, Any] = {}
    if name == "cut":
        gateway.cut(ways)
    elif name == "heal":
        gateway.heal(ways)
    elif name == "delay":
        gateway.set_delay(command["delay_ms"], command.get("back_delay_ms"))
    elif name == "rate":
        gateway.set_rate(command["bytes_per_s"], ways)
    elif name == "statistics":
        statistics = gateway.statistics()
        answer = {field: getattr(statistics, field) for field in statistics.__slots__}
    else:
        raise AssertionError(f"unknown command {name}")
    say(name, **answer)


def main() -> None:
    """Be a gateway until the testbed is done."""
    parser = argparse.ArgumentParser(prog="gateway")
    parser.add_argument("host")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--back-delay-ms", type=float, help="Into the LAN, if that differs.")
    arguments = parser.parse_args()
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(_serve(arguments.host, arguments.delay_ms, arguments.back_delay_ms))


if __name__ == "__main__":
    main()
