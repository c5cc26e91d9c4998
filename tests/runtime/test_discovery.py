"""Finding edge brokers by real multicast on the loopback interface."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from overlay.discovery import Announcement, Query, decode_datagram, encode_datagram
from runtime.discovery import Announcer, discover, multicast_interface

LOOPBACK = "127.0.0.1"
PATIENCE_S = 8.0
_groups = itertools.count(1)


@dataclass(frozen=True)
class Ether:
    """A multicast group and port no other test uses."""

    group: str
    port: int

    async def announce(self, edge: str = "edge-a", lan: str = "plant") -> Announcer:
        announcement = Announcement(edge, lan, "127.0.0.1:7400", "c1")
        return await Announcer.start(announcement, interface=LOOPBACK, group=self.group, port=self.port)

    async def discover(self, lan: str = "", timeout_s: float = PATIENCE_S) -> list[str]:
        found = await discover(
            lan=lan, interface=LOOPBACK, group=self.group, port=self.port, timeout_s=timeout_s
        )
        return [announcement.edge for announcement in found]

    def send(self, *datagrams: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOOPBACK))
            for data in datagrams:
                sock.sendto(data, (self.group, self.port))


def _why_no_multicast() -> str:
    """Empty if this machine can multicast on loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            membership = socket.inet_aton("239.255.74.255") + socket.inet_aton(LOOPBACK)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOOPBACK))
            sock.sendto(b"probe", ("239.255.74.255", 9))
    except OSError as error:
        return f"the operating system refuses multicast on loopback: {error}"
    return ""


@pytest.fixture
def ether() -> Ether:
    if reason := _why_no_multicast():
        pytest.skip(reason)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((LOOPBACK, 0))
        port = sock.getsockname()[1]
    return Ether(f"239.255.74.{next(_groups)}", port)


class Listener(asyncio.DatagramProtocol):
    """Receives what is sent to a group."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        self.received.put_nowait(data)


@pytest.fixture
async def listener(ether: Ether) -> AsyncIterator[Listener]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((ether.group, ether.port))
    membership = socket.inet_aton(ether.group) + socket.inet_aton(LOOPBACK)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(Listener, sock=sock)
    yield protocol
    transport.close()
    await asyncio.sleep(0)


@pytest.fixture
async def announcers(ether: Ether) -> AsyncIterator[Callable[..., "asyncio.Task[Announcer]"]]:
    """Starts announcers and closes them at the end."""
    started: list[asyncio.Task[Announcer]] = []

    def start(*arguments: str) -> "asyncio.Task[Announcer]":
        started.append(asyncio.get_running_loop().create_task(ether.announce(*arguments)))
        return started[-1]

    yield start
    for task in started:
        (await task).close()
    await asyncio.sleep(0)


Start = Callable[..., "asyncio.Task[Announcer]"]


async def test_a_client_finds_an_edge_without_configuration(ether: Ether, announcers: Start) -> None:
    announcer = await announcers()
    assert await ether.discover() == ["edge-a"]
    assert announcer.queries_answered >= 1


async def test_a_client_finds_only_edges_of_the_lan_it_asks_for(ether: Ether, announcers: Start) -> None:
    plant, office = await announcers("edge-a", "plant"), await announcers("edge-b", "office")
    assert await ether.discover("office") == ["edge-b"]
    assert plant.queries_answered == 0
    assert office.queries_answered >= 1


async def test_a_client_that_asks_before_there_is_an_edge_finds_it_when_it_starts(
    ether: Ether, announcers: Start, listener: Listener
) -> None:
    asking = asyncio.ensure_future(ether.discover())
    async with asyncio.timeout(PATIENCE_S):
        assert decode_datagram(await listener.received.get()) == Query("")
    await announcers()
    assert await asking == ["edge-a"]


async def test_nobody_there_is_an_empty_answer_in_time(ether: Ether) -> None:
    async with asyncio.timeout(PATIENCE_S):
        assert await ether.discover(timeout_s=0.05) == []


async def test_an_edge_announces_itself_unasked(
    ether: Ether, announcers: Start, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.discovery.ANNOUNCE_INTERVAL_S", 0.02)
    announcer = await announcers()
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            assert decode_datagram(await listener.received.get()) == announcer.announcement


async def test_garbage_on_the_group_is_ignored_and_counted(ether: Ether, announcers: Start) -> None:
    announcer = await announcers()
    ether.send(b"", b"hello", b"ISTH\xc1", bytes(2000), encode_datagram(Query("elsewhere")))
    assert await ether.discover() == ["edge-a"]
    assert announcer.datagrams_ignored == 4
    assert announcer.queries_answered >= 1


async def test_garbage_sent_to_a_client_that_asks_is_ignored(ether: Ether, announcers: Start) -> None:
    class Prankster(asyncio.DatagramProtocol):
        """Answers queries with nonsense."""

        def connection_made(self, transport: asyncio.DatagramTransport) -> None:
            self.transport = transport
            self.asked = asyncio.Event()

        def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
            for nonsense in (b"nonsense", encode_datagram(Query("x"))):
                self.transport.sendto(nonsense, addr)
            self.asked.set()

    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((ether.group, ether.port))
    membership = socket.inet_aton(ether.group) + socket.inet_aton(LOOPBACK)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    loop = asyncio.get_running_loop()
    transport, prankster = await loop.create_datagram_endpoint(Prankster, sock=sock)
    asking = asyncio.ensure_future(ether.discover())
    async with asyncio.timeout(PATIENCE_S):
        await prankster.asked.wait()
    transport.close()
    await asyncio.sleep(0)
    await announcers()
    assert await asking == ["edge-a"]


async def test_an_edge_that_closed_answers_no_more(ether: Ether) -> None:
    announcer = await ether.announce()
    announcer.close()
    await asyncio.sleep(0)
    assert await ether.discover(timeout_s=0.05) == []


@pytest.mark.parametrize("interface", ["203.0.113.7", "0.0.0.1"])
async def test_where_multicast_is_impossible_the_caller_is_told_and_nothing_stays_open(
    ether: Ether, interface: str
) -> None:
    announcement = Announcement("edge-a", "plant", "127.0.0.1:7400", "c1")
    with pytest.raises(OSError, match=r"."):
        await Announcer.start(announcement, interface=interface, group=ether.group, port=ether.port)
    with pytest.raises(OSError, match=r"."):
        await discover(interface=interface, group=ether.group, port=ether.port, timeout_s=0.05)


async def test_an_announcer_whose_sending_side_fails_closes_the_receiving_one(
    ether: Ether, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(interface: str) -> socket.socket:
        raise OSError(f"no multicast on {interface}")

    monkeypatch.setattr("runtime.discovery._sending_socket", refuse)
    with pytest.raises(OSError, match="no multicast on 127"):
        await ether.announce()


@pytest.mark.parametrize(
    ("listen_host", "interface"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.3.0.9", "127.0.0.1"),
        ("10.0.0.7", "10.0.0.7"),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "0.0.0.0"),
        ("broker.example", "0.0.0.0"),
    ],
)
def test_the_interface_follows_from_where_the_broker_listens(listen_host: str, interface: str) -> None:
    assert multicast_interface(listen_host) == interface
