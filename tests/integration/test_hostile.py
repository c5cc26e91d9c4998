"""Hostile peers against a real broker: each is stopped, and others do not notice."""

import asyncio
import logging
import resource
import socket
from contextlib import asynccontextmanager
from struct import pack

import pytest

from clients import TopicQos
from overlay.codec import encode, encode_heartbeat
from overlay.errors import CloseReason
from overlay.framing import FrameReader
from overlay.limits import HANDSHAKES_MAX_PER_ADDRESS, MIB, RESUME_PUBLISHERS_MAX
from overlay.locator import Locator
from overlay.messages import Declare, EndpointKind, FrameKind, Heartbeat, Hello, Role
from tests.integration.harness import DEADLINE_S, eventually, overlay

pytestmark = pytest.mark.integration

HELLO = encode(Hello(Role.CLIENT, "00000000000000aa", 170, 200_000_000))


class Hostile:
    """Bare sockets to a broker."""

    def __init__(self, locator: str) -> None:
        self._target = tuple(Locator.parse(locator))
        self.sockets: list[socket.socket] = []

    async def connect(self, source: str = "127.0.0.1") -> socket.socket:
        sock = socket.socket()
        self.sockets.append(sock)
        sock.setblocking(False)
        sock.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(sock, self._target)
        return sock

    async def until_closed(self, sock: socket.socket) -> None:
        """Read until the broker has had enough."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                while await asyncio.get_running_loop().sock_recv(sock, 65536):
                    pass
            except ConnectionError:
                return

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


@asynccontextmanager
async def scene(zookeeper_hosts, chroot, **settings):
    """An edge broker with a publisher and a subscriber, and somebody who means it no good."""
    async with overlay(zookeeper_hosts, chroot) as testbed:
        edge = await testbed.edge("ea", "a", **settings)
        publisher = await (await testbed.client("ea")).publisher("t")
        receiver = await testbed.client("ea")
        subscription = await receiver.subscribe("t")
        hostile = Hostile(edge.locator)

        async def others_go_on():
            for _ in range(20):
                payload = b"%d" % await publisher.publish(b"x")
                assert (await subscription.receive(DEADLINE_S)).payload == b"x", payload

        await others_go_on()
        try:
            yield edge, hostile, others_go_on
            await others_go_on()
            assert receiver.reconnects == 0
            assert subscription.statistics().lost == 0
        finally:
            hostile.close()


async def test_connections_that_say_nothing_or_half_of_it_are_closed(zookeeper_hosts, chroot):
    async with scene(zookeeper_hosts, chroot) as (edge, hostile, others_go_on):
        loop = asyncio.get_running_loop()
        before = edge.hub.connection_count
        for number in range(200):
            sock = await hostile.connect()
            await loop.sock_sendall(sock, HELLO[: number % len(HELLO)])
        await eventually(lambda: edge.hub.connection_count == before + 200, "all are accepted")
        await others_go_on()
        await asyncio.gather(*map(hostile.until_closed, hostile.sockets))
        assert edge.hub.connection_count == before
        assert edge.hub.closes[CloseReason.HANDSHAKE_TIMEOUT] == 200


async def test_an_introduction_a_byte_at_a_time_does_not_buy_time(zookeeper_hosts, chroot):
    async with scene(zookeeper_hosts, chroot) as (edge, hostile, _):
        loop = asyncio.get_running_loop()
        sock = await hostile.connect()

        async def drip():
            for byte in HELLO:
                await loop.sock_sendall(sock, bytes([byte]))
                await asyncio.sleep(0.1)

        dripping = asyncio.create_task(drip())
        began_s = loop.time()
        await hostile.until_closed(sock)
        assert loop.time() - began_s < 4
        with pytest.raises(ConnectionError):
            await dripping
        assert edge.hub.closes[CloseReason.HANDSHAKE_TIMEOUT] == 1


async def test_a_length_of_four_gigabytes_is_refused_at_once(zookeeper_hosts, chroot):
    async with scene(zookeeper_hosts, chroot) as (edge, hostile, _):
        loop = asyncio.get_running_loop()
        for first in (b"", HELLO):
            sock = await hostile.connect()
            await loop.sock_sendall(sock, first + pack("<IB", 2**32 - 1, FrameKind.DATA))
            await hostile.until_closed(sock)
        assert edge.hub.closes[CloseReason.FRAME_TOO_LARGE] == 2


@pytest.mark.parametrize("numbers", [3, 2 * RESUME_PUBLISHERS_MAX + 2], ids=["no pairs", "too many"])
async def test_positions_that_no_client_would_name_end_the_connection_and_go_no_further(
    zookeeper_hosts, chroot, caplog, numbers
):
    """An edge passes them on to others, who would end its links if the frame became too large for them."""
    async with scene(zookeeper_hosts, chroot) as (edge, hostile, _):
        sock = await hostile.connect()
        declare = Declare(1, EndpointKind.SUBSCRIBER, "t", resume=tuple(range(numbers)))
        await asyncio.get_running_loop().sock_sendall(sock, HELLO + encode(declare))
        await hostile.until_closed(sock)
        assert edge.hub.closes[CloseReason.BAD_MESSAGE] == 1
        assert not edge.arrivals._arrivals
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_one_address_cannot_crowd_out_its_own_newcomers(zookeeper_hosts, chroot):
    """Of those that say nothing the oldest go first, so an honest client of the same address gets in."""
    async with scene(zookeeper_hosts, chroot) as (edge, hostile, _):
        await asyncio.gather(*(hostile.connect() for _ in range(HANDSHAKES_MAX_PER_ADDRESS + 50)))
        await eventually(
            lambda: edge.hub.closes[CloseReason.TOO_MANY_CONNECTIONS] == 50, "the oldest are closed"
        )
        newcomer = await hostile.connect()
        await asyncio.get_running_loop().sock_sendall(newcomer, HELLO)
        assert await asyncio.get_running_loop().sock_recv(newcomer, 100)


async def test_an_address_has_a_limit_of_connections(zookeeper_hosts, chroot):
    async with scene(zookeeper_hosts, chroot, connections_per_address=5) as (edge, hostile, _):
        for _ in range(3):
            await hostile.connect("127.0.0.9")
        refused = [await hostile.connect() for _ in range(8)]
        await eventually(
            lambda: edge.hub.closes[CloseReason.TOO_MANY_CONNECTIONS] >= 5, "those above it are closed"
        )
        await hostile.until_closed(refused[-1])


@pytest.mark.parametrize(("policy", "reason"), [("drop-oldest", None), ("disconnect", CloseReason.TOO_SLOW)])
async def test_a_stalled_subscriber_costs_its_own_messages_only(zookeeper_hosts, chroot, policy, reason):
    limits = {"subscriber_pending_bytes": MIB, "slow_subscriber": policy}
    async with overlay(zookeeper_hosts, chroot) as testbed:
        edge = await testbed.edge("ea", "a", **limits)
        client, receiver = await testbed.client("ea"), await testbed.client("ea")
        qos = TopicQos()
        publisher, subscription = await client.publisher("t", qos), await receiver.subscribe("t", qos)
        hostile = Hostile(edge.locator)
        loop = asyncio.get_running_loop()
        try:
            sock = await hostile.connect()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_sendall(sock, HELLO + encode(Declare(1, EndpointKind.SUBSCRIBER, "t")))
            reader = FrameReader()
            reader.open_up()
            while not any(kind == FrameKind.DECLARED for kind, _ in reader.take_frames()):
                reader.feed(await loop.sock_recv(sock, 4096))
            for number in range(200):  # 10 MB, of which it takes nothing
                await publisher.publish(b"%06d" % number + bytes(50_000))
                assert (await subscription.receive(DEADLINE_S)).payload.startswith(b"%06d" % number)
                if reason is None:
                    await loop.sock_sendall(sock, encode_heartbeat(Heartbeat(1, 0, 0, 0)))
            dropped = edge.core.statistics().dropped
            if reason is None:
                assert dropped["outbox_full"] > 100
                stalled = next(link for link in edge._links.values() if link.peer == "00000000000000aa")
                assert stalled.outbox.load_bytes <= MIB
            else:
                assert edge.hub.closes[reason] == 1
            assert subscription.statistics().lost == 0
        finally:
            hostile.close()


async def test_thousands_of_silent_connections(zookeeper_hosts, chroot):
    """From many addresses, so that no limit of one address helps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, (hard - 500) // 2)  # both ends are in this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        async with scene(zookeeper_hosts, chroot) as (edge, hostile, others_go_on):
            most = 0
            for start in range(0, count, 200):
                await asyncio.gather(
                    *(hostile.connect(f"127.0.1.{1 + number % 40}") for number in range(start, start + 200))
                )
                most = max(most, edge.hub.connection_count)
                await others_go_on()
            assert most > 1_000
            await eventually(lambda: edge.hub.connection_count < 10, "all are gone")
            closed = (
                edge.hub.closes[CloseReason.HANDSHAKE_TIMEOUT]
                + edge.hub.closes[CloseReason.TOO_MANY_CONNECTIONS]
            )
            assert closed >= count - 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
