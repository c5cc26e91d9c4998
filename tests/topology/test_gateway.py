"""The gateway: delay, order, cut and heal, the end of a connection, what it refuses, what it counts."""

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from overlay.batch import Run, encode_batch, encode_message
from overlay.framing import frame
from overlay.messages import FrameKind
from runtime.process import wait_until
from topology.gateway import LINE_MAX_BYTES, Gateway, Way

TIMEOUT_S = 10.0
SHORT_S = 0.15
"""Long enough for something that must not come to come."""


class Far:
    """A server on the cloud side and a client that reaches it through a gateway."""

    def __init__(self, gateway: Gateway, proxy: Any, server: asyncio.Server) -> None:
        self.gateway = gateway
        self.proxy = proxy
        self.port = server.sockets[0].getsockname()[1]
        self.accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []

    async def request(self, text: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        reader, writer = await asyncio.open_connection(self.proxy.host, self.proxy.port)
        self.writers.append(writer)
        writer.write(text.encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        return reader, writer, head.decode().splitlines()[0]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer, status = await self.request(f"CONNECT 127.0.0.1:{self.port} HTTP/1.1\r\n\r\n")
        assert " 200 " in status
        return reader, writer

    async def connect_both(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any, Any]:
        reader, writer = await self.connect()
        far_reader, far_writer = await asyncio.wait_for(self.accepted.get(), TIMEOUT_S)
        return reader, writer, far_reader, far_writer


MakeFar = Callable[[float], Awaitable[Far]]


@pytest.fixture
async def make_far() -> AsyncIterator[MakeFar]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(delay_ms: float) -> Far:
            gateway = Gateway(delay_ms)
            proxy = await gateway.start("127.0.0.1")
            stack.push_async_callback(gateway.close)

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                far.writers.append(writer)
                await far.accepted.put((reader, writer))

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            far = Far(gateway, proxy, server)

            async def close() -> None:
                server.close()
                for writer in far.writers:
                    writer.transport.abort()
                await server.wait_closed()
                await asyncio.sleep(0)

            stack.push_async_callback(close)
            return far

        yield make


async def test_carries_no_more_than_its_rate_and_everything_in_the_end(make_far: MakeFar) -> None:
    far = await make_far(0)
    reader, _, _, far_writer = await far.connect_both()
    rate, data = 200_000, random.Random(1).randbytes(60_000)
    far.gateway.set_rate(rate, [Way.BACK])
    started_s = time.monotonic()
    assert await exchange(reader, far_writer, data) == data
    assert time.monotonic() - started_s >= len(data) / rate - 0.01
    far.gateway.set_rate(None)
    assert await exchange(reader, far_writer, data * 20) == data * 20


async def test_a_connection_with_a_rate_ends_after_its_last_bytes(make_far: MakeFar) -> None:
    far = await make_far(0)
    reader, _, _, far_writer = await far.connect_both()
    far.gateway.set_rate(200_000)
    data = bytes(30_000)
    far_writer.write(data)
    far_writer.close()
    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == data


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), TIMEOUT_S)


async def nothing_comes(reader: asyncio.StreamReader) -> bool:
    try:
        return not await asyncio.wait_for(reader.read(1), SHORT_S)
    except TimeoutError:
        return True


async def test_delays_each_way(make_far: MakeFar) -> None:
    far = await make_far(20)
    reader, writer, far_reader, far_writer = await far.connect_both()
    for near, other in ((writer, far_reader), (far_writer, reader)):
        times_ms = []
        for _ in range(15):
            started_s = time.monotonic()
            await exchange(other, near, b"x")
            times_ms.append(1e3 * (time.monotonic() - started_s))
        assert min(times_ms) >= 19, "faster than the delay"
        # The machine may be busy; the gateway itself must be able to do better than that.
        assert min(times_ms) <= 22.5, times_ms


async def test_connecting_takes_a_round_trip(make_far: MakeFar) -> None:
    far = await make_far(20)
    started_s = time.monotonic()
    await far.connect()
    assert time.monotonic() - started_s >= 0.039


async def test_bytes_arrive_whole_and_in_order(make_far: MakeFar) -> None:
    far = await make_far(3)
    reader, writer, far_reader, far_writer = await far.connect_both()
    randomness = random.Random(7)
    data = randomness.randbytes(2_000_000)

    async def send(to: asyncio.StreamWriter) -> None:
        offset = 0
        while offset < len(data):
            size = randomness.randrange(1, 30_000)
            to.write(data[offset : offset + size])
            offset += size
            await to.drain()

    _, _, got, far_got = await asyncio.wait_for(
        asyncio.gather(
            send(writer), send(far_writer), reader.readexactly(len(data)), far_reader.readexactly(len(data))
        ),
        TIMEOUT_S,
    )
    assert got == data
    assert far_got == data


@pytest.mark.parametrize("ways", [[Way.OUT, Way.BACK], [Way.OUT], [Way.BACK]])
async def test_cut_holds_and_heal_releases(make_far: MakeFar, ways: list[Way]) -> None:
    far = await make_far(1)
    reader, writer, far_reader, far_writer = await far.connect_both()
    far.gateway.cut(ways)
    writer.write(b"out")
    far_writer.write(b"back")
    for way, receiver, text in ((Way.OUT, far_reader, b"out"), (Way.BACK, reader, b"back")):
        if way in ways:
            assert await nothing_comes(receiver)
        else:
            assert await asyncio.wait_for(receiver.readexactly(len(text)), TIMEOUT_S) == text
    far.gateway.heal()
    for way, receiver, text in ((Way.OUT, far_reader, b"out"), (Way.BACK, reader, b"back")):
        if way in ways:
            assert await asyncio.wait_for(receiver.readexactly(len(text)), TIMEOUT_S) == text


async def test_new_connections_wait_for_the_heal(make_far: MakeFar) -> None:
    far = await make_far(1)
    far.gateway.cut()
    connecting = asyncio.create_task(far.connect())
    done, _ = await asyncio.wait({connecting}, timeout=SHORT_S)
    assert not done
    far.gateway.heal()
    await asyncio.wait_for(connecting, TIMEOUT_S)


async def test_the_end_does_not_pass_a_cut(make_far: MakeFar) -> None:
    far = await make_far(1)
    reader, _, _, far_writer = await far.connect_both()
    far.gateway.cut([Way.BACK])
    far_writer.write(b"last words")
    far_writer.close()
    assert await nothing_comes(reader)
    assert not reader.at_eof()
    far.gateway.heal()
    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b"last words"


@pytest.mark.parametrize("abrupt", [False, True])
@pytest.mark.parametrize("from_cloud", [False, True])
async def test_one_end_closes_the_other_after_the_delay(
    make_far: MakeFar, abrupt: bool, from_cloud: bool
) -> None:
    far = await make_far(30)
    reader, writer, far_reader, far_writer = await far.connect_both()
    closing, watching = (far_writer, reader) if from_cloud else (writer, far_reader)
    if abrupt:
        # As when a process is killed with unread bytes: the kernel answers with RST.
        sock = closing.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        closing.transport.abort()
        expected = b""
    else:
        closing.write(b"under way")
        closing.close()
        expected = b"under way"
    started_s = time.monotonic()
    assert await asyncio.wait_for(watching.read(), TIMEOUT_S) == expected
    assert 0.025 <= time.monotonic() - started_s < 1.0
    assert await wait_until(lambda: not far.gateway.relays, TIMEOUT_S)


async def test_a_receiver_that_does_not_read_stops_its_sender(make_far: MakeFar) -> None:
    far = await make_far(1)
    _, writer, _, far_writer = await far.connect_both()
    far_writer.transport.pause_reading()
    chunk = bytes(1024 * 1024)
    for _ in range(64):
        writer.write(chunk)
        try:
            await asyncio.wait_for(writer.drain(), SHORT_S)
        except TimeoutError:
            break
    else:
        pytest.fail("64 MiB went in and nobody read them")
    assert far.gateway.statistics().bytes_out < LINE_MAX_BYTES + 24 * len(chunk)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("CONNECT 192.0.2.1:80 HTTP/1.1\r\n\r\n", "403"),
        ("CONNECT example.org:80 HTTP/1.1\r\n\r\n", "403"),
        ("CONNECT nonsense HTTP/1.1\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\n\r\n", "400"),
        ("CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n", "502"),
        ("x" * 5000, "431"),
    ],
)
async def test_refuses(make_far: MakeFar, text: str, status: str) -> None:
    far = await make_far(0)
    reader, _, line = await far.request(text)
    assert line.split()[1] == status
    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""


async def test_counts_messages_by_topic(make_far: MakeFar) -> None:
    far = await make_far(0)
    _, writer, far_reader, _ = await far.connect_both()
    runs = [Run(1, encode_message(topic, 1, n, 0, b"payload")) for n, topic in enumerate((5, 5, 9), 1)]
    data = frame(FrameKind.HELLO, b"hello") + encode_batch(0, 1, 0, runs)
    for byte in data:
        await exchange(far_reader, writer, bytes([byte]))
    statistics = far.gateway.statistics()
    assert statistics.messages_out == {"5": 2, "9": 1}
    assert statistics.messages_back == {}
    assert (statistics.bytes_out, statistics.unreadable) == (len(data), 0)


async def test_says_when_it_cannot_read_what_passes(make_far: MakeFar) -> None:
    far = await make_far(0)
    _, writer, far_reader, _ = await far.connect_both()
    await exchange(far_reader, writer, b"\xff" * 100)
    assert far.gateway.statistics().unreadable == 1
