"""Busy nodes and dead ones: a long loop turn is no death, and what a dead peer had sent still counts."""

import asyncio
import socket
import struct
import threading
import time

import pytest

from overlay.codec import decode_heartbeat, encode, encode_heartbeat
from overlay.errors import CloseReason
from overlay.framing import FrameReader
from overlay.messages import FrameKind, Heartbeat, Hello, Role, Undeclare
from runtime.connection import Connection
from runtime.hub import LATE_TICK_NS, Pace
from tests.runtime.nodes import CLUSTER, PATIENCE_S, Node, World, data_frame

MS = 1_000_000
FAST = Pace(10 * MS, 50 * MS)


def _plain_socket(world: World, server: Node, name: str) -> socket.socket:
    """A peer that is not in the event loop: it works while the loop is busy, and can die at once."""
    locator = world.locators[server.hub.identity.node]
    plain = socket.create_connection((locator.host, locator.port), timeout=PATIENCE_S)
    plain.sendall(encode(Hello(Role.EDGE, name, 5, 10 * MS, cluster=CLUSTER)))
    return plain


async def test_what_a_peer_had_sent_before_it_died_is_still_taken(world: World, server: Node) -> None:
    """A write to the dead peer fails first, and asyncio would forget what waits to be read."""
    plain = _plain_socket(world, server, "dead")
    await server.until(lambda: ("up", "dead") in server.events)
    connection = server.links["dead"].connection
    assert connection is not None
    # From here to the failing write the loop does not turn, so nothing can have been read.
    plain.sendall(data_frame(1, 2) + data_frame(3))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    plain.close()
    connection.send_control(Undeclare(1))
    await server.until(lambda: ("down", "dead", CloseReason.LOST) in server.events)
    assert server.got["dead"] == [1, 2, 3]


def _work(seconds: float) -> None:
    """Keep the loop from turning."""
    time.sleep(seconds)


class _Beating(threading.Thread):
    """Sends heartbeats all the time, whatever the event loop does."""

    def __init__(self, plain: socket.socket) -> None:
        super().__init__(daemon=True)
        self._plain = plain
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.005):
            self._plain.sendall(encode_heartbeat(Heartbeat(time.monotonic_ns(), 0, 0, 0)))

    def stop(self) -> None:
        self._stopped.set()
        self.join(PATIENCE_S)


async def test_the_time_a_loop_was_busy_is_not_the_silence_of_its_peers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "_host_answers", lambda connection, liveness: False)
    server = await world.node("server", listen=True, pace=FAST)
    plain = _plain_socket(world, server, "lively")
    beating = _Beating(plain)
    try:
        await server.until(lambda: ("up", "lively") in server.events)
        beating.start()
        for _ in range(5):
            _work(0.15)  # three times as long as a peer may be silent
            for _ in range(10):
                await asyncio.sleep(0.002)
        assert server.links["lively"].is_up
        beating.stop()
        await server.until(lambda: ("down", "lively", CloseReason.SILENT) in server.events)
    finally:
        beating.stop()
        plain.close()


async def test_during_a_long_loop_turn_heartbeats_go_out(world: World) -> None:
    """Peers would take us for dead if they had to wait for the end of the turn."""
    server = await world.node("server", listen=True)
    bulk, waiting = await world.raw(server), _plain_socket(world, server, "waiting")
    try:
        await bulk.handshake("bulk")
        await server.until(lambda: ("up", "waiting") in server.events)
        busy_ns: list[int] = []

        def work(link: object, sequence: int) -> None:
            busy_ns.append(server.hub.clock())
            _work(0.004)

        server.on_message = work
        await bulk.send(b"".join(data_frame(sequence) for sequence in range(1, 51)))
        await server.until(lambda: len(busy_ns) == 50)
        sent_ns = [at_ns for at_ns in _heartbeats(waiting) if busy_ns[0] < at_ns < busy_ns[-1]]
        assert len(sent_ns) > (busy_ns[-1] - busy_ns[0]) // (3 * LATE_TICK_NS)
    finally:
        waiting.close()


def _heartbeats(plain: socket.socket) -> list[int]:
    """When the heartbeats that have arrived were sent."""
    plain.setblocking(False)
    reader = FrameReader()
    reader.open_up()
    while True:
        try:
            reader.feed(plain.recv(2**20))
        except BlockingIOError:
            break
    frames = reader.take_frames()
    return [decode_heartbeat(body).sent_ns for kind, body in frames if kind == FrameKind.HEARTBEAT]
