"""Small nodes and hand-made peers on loopback sockets, and a world that checks they leave nothing behind."""

import asyncio
import gc
import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from overlay.batch import Run, decode_messages, encode_batch, encode_message
from overlay.codec import decode, encode, encode_heartbeat
from overlay.errors import CloseReason
from overlay.framing import FrameReader
from overlay.limits import DRIFT_PPM
from overlay.locator import Locator
from overlay.messages import Close, ControlMessage, FrameKind, Heartbeat, Hello, Role, Welcome
from runtime.connection import Connection
from runtime.hub import Hub, Identity, Pace
from runtime.link import Link

PATIENCE_S = 8.0
"""Longest any single wait may take; nothing waits this long unless it is broken."""
CLUSTER = "c1"
_incarnations = itertools.count(1001)


class _ObservedHub(Hub):
    """A hub whose node hears of every connection that ends, also of those that never opened."""

    def connection_closed(
        self, connection: Connection, link: Link | None, reason: CloseReason, detail: str
    ) -> None:
        super().connection_closed(connection, link, reason, detail)
        assert isinstance(self.handler, Node)
        self.handler.closed.append((reason, detail))
        self.handler.changed.set()


class _ObservedBackOff(random.Random):
    """Tells the node when a dialer has failed and backs off, which it does at random."""

    def __init__(self, node: "Node") -> None:
        super().__init__(0)
        self._node = node

    def random(self) -> float:
        self._node.changed.set()
        return super().random()


class Node:
    """A hub with a handler that writes down what happens."""

    def __init__(
        self,
        name: str,
        role: Role = Role.EDGE,
        *,
        cluster: str = CLUSTER,
        pace: Pace | None = None,
        drift_ppm: int = DRIFT_PPM,
        **options: Any,
    ) -> None:
        self.changed = asyncio.Event()
        identity = Identity(role, name, next(_incarnations), "plant", cluster, drift_ppm)
        # The pace of the tests is slow, so that a busy machine is not mistaken for a dead peer.
        self.hub = _ObservedHub(
            identity,
            self,
            pace=pace or Pace(10_000_000, 5_000_000_000),
            randomness=_ObservedBackOff(self),
            **options,
        )
        self.links: dict[str, Link] = {}
        self.events: list[tuple[str, ...]] = []
        """What the handler was told: ("up", peer), ("down", peer, reason), ("control", peer, type)."""
        self.closed: list[tuple[CloseReason, str]] = []
        self.got: dict[str, list[int]] = {}
        """Sequences of the messages received, by peer."""
        self.on_message: Callable[[Link, int], None] = lambda link, sequence: None
        self.holds_data = False
        self._sent = 0

    # What tests do with it

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something this node notices."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_idle(self, link: Link) -> None:
        """Wait until the peer has acknowledged everything."""
        link.on_acknowledged = lambda tickets: self.changed.set()
        await self.until(lambda: link.outbox.is_idle)

    def link(self, peer: str, role: Role = Role.EDGE) -> Link:
        """The link to a peer, made when first asked for."""
        if peer not in self.links:
            self.links[peer] = Link(peer, role)
            self.links[peer].holds_data = self.holds_data
        return self.links[peer]

    def send(self, peer: str, count: int = 1, size: int = 1) -> None:
        """Send numbered messages."""
        link = self.link(peer)
        for _ in range(count):
            self._sent += 1
            run = Run(1, encode_message(1, 2, self._sent, 3, bytes(size)))
            link.outbox.append(0, 0, 1, 0, run, self.hub.clock())
        link.flush_soon()
        self.hub.loop.call_soon(self.changed.set)  # comes after the flush

    # What the hub does with it

    def admit(self, hello: Hello) -> tuple[Link, Welcome]:
        link = self.link(hello.node, hello.role)
        identity = self.hub.identity
        return link, Welcome(identity.role, identity.node, identity.incarnation, cluster=identity.cluster)

    def on_welcome(self, link: Link, welcome: Welcome) -> None:
        self._note("welcome", link.peer)

    def on_link_up(self, link: Link) -> None:
        self._note("up", link.peer)

    def on_link_down(self, link: Link, reason: CloseReason, detail: str) -> None:
        self._note("down", link.peer, reason)

    def on_data(self, link: Link, body: bytes, now_ns: int) -> None:
        for message in list(decode_messages(body)):
            self.got.setdefault(link.peer, []).append(message.sequence)
            self.on_message(link, message.sequence)
        self.changed.set()

    def on_control(self, link: Link, message: ControlMessage) -> None:
        self._note("control", link.peer, type(message).__name__)

    def _note(self, *event: str) -> None:
        self.events.append(event)
        self.changed.set()


def data_frame(*sequences: int) -> bytes:
    """A data frame with small messages of these sequences."""
    return encode_batch(0, 1, 0, [Run(1, encode_message(1, 2, each, 3, b"x")) for each in sequences])


class Bystander:
    """A connection to the same server that must not notice anything."""

    def __init__(self, server: Node, node: Node, link: Link) -> None:
        self._server = server
        self._node = node
        self._link = link

    async def still_works(self) -> None:
        expected = len(self._server.got.get("bystander", [])) + 1
        self._node.send("server")
        await self._server.until(lambda: len(self._server.got.get("bystander", [])) == expected)
        self._server.send("bystander")
        await self._node.until(lambda: len(self._node.got.get("server", [])) == expected)
        assert self._link.connects == 1
        assert self._server.got["bystander"] == list(range(1, expected + 1))


class RawPeer:
    """A socket that speaks the protocol only as far as the test makes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.incarnation = next(_incarnations)
        self.received = 0
        self._reader = reader
        self._frames = FrameReader()
        self._frames.open_up()
        self._waiting: list[tuple[int, bytes]] = []

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """The next frame but heartbeats; EOFError at the end of the stream."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while self._waiting:
                    kind, body = self._waiting.pop(0)
                    if kind != FrameKind.HEARTBEAT:
                        return kind, body
                data = await self._reader.read(2**20)
                if not data:
                    raise EOFError
                self._frames.feed(data)
                self._waiting += self._frames.take_frames()

    async def handshake(self, name: str = "raw", **fields: Any) -> Welcome:
        """Introduce ourselves by hand; returns the answer."""
        hello: dict[str, Any] = {
            "role": Role.EDGE,
            "node": name,
            "incarnation": self.incarnation,
            "heartbeat_ns": 10_000_000,
            "cluster": CLUSTER,
        }
        await self.send(encode(Hello(**hello | fields)))
        message = decode(*await self.receive())
        assert isinstance(message, Welcome), message
        return message

    async def sequences(self, count: int) -> list[int]:
        """The sequences of the next messages."""
        got: list[int] = []
        while len(got) < count:
            kind, body = await self.receive()
            assert kind == FrameKind.DATA
            self.received += 1
            got += [message.sequence for message in decode_messages(body)]
        return got

    async def acknowledge(self) -> None:
        """Tell the other side how many data frames `sequences` has taken."""
        await self.send(encode_heartbeat(Heartbeat(1, 0, 0, self.received)))

    async def until_closed(self) -> Close | None:
        """Read to the end; returns the CLOSE frame if there was one, which must be the last."""
        close: Close | None = None
        with suppress(EOFError, ConnectionResetError):
            while True:
                kind, body = await self.receive()
                assert close is None, "a frame behind CLOSE"
                if kind == FrameKind.CLOSE:
                    message = decode(kind, body)
                    assert isinstance(message, Close)
                    close = message
        return close

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


class World:
    """Makes nodes and raw peers, and closes and checks them at the end."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.locators: dict[str, Locator] = {}
        self._raw: list[RawPeer] = []
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[Any]] = set()
        self._errors: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._errors.append(context))
        self._tasks_before = asyncio.all_tasks()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()
        for peer in self._raw:
            await peer.close()
        for node in self.nodes:
            await node.hub.close()
        for server in self._servers:
            await server.wait_closed()
        if self._serving:
            await asyncio.wait(self._serving, timeout=PATIENCE_S)
        if kind is None:
            self._assert_nothing_is_left()

    def _assert_nothing_is_left(self) -> None:
        gc.collect(1)  # a transport or socket left open warns now, and warnings are errors
        assert [node.hub.connection_count for node in self.nodes] == [0] * len(self.nodes)
        left = asyncio.all_tasks() - self._tasks_before - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        assert not self._errors, f"errors nobody handled: {self._errors}"

    async def node(self, name: str, role: Role = Role.EDGE, *, listen: bool = False, **options: Any) -> Node:
        node = Node(name, role, **options)
        self.nodes.append(node)
        if listen:
            self.locators[name] = await node.hub.listen("127.0.0.1", 0)
        return node

    async def connect(self, node: Node, server: Node) -> Link:
        """Dial a listening node and wait until both sides are up."""
        name = server.hub.identity.node
        link = node.link(name, server.hub.identity.role)
        node.hub.dial(link, self.locators[name])
        await node.until(lambda: link.is_up)
        await server.until(lambda: server.link(node.hub.identity.node).is_up)
        return link

    async def raw(self, server: Node) -> RawPeer:
        """A bare socket to a listening node."""
        locator = self.locators[server.hub.identity.node]
        peer = RawPeer(*await asyncio.open_connection(locator.host, locator.port))
        self._raw.append(peer)
        return peer

    async def raw_server(self, serve: Callable[[RawPeer], Any]) -> Locator:
        """A listening socket; `serve` is run with each peer that connects."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = RawPeer(reader, writer)
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            try:
                await serve(peer)
            finally:
                await peer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        host, port = server.sockets[0].getsockname()
        return Locator(host, port)
