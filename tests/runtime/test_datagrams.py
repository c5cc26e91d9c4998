"""Urgent frames as datagrams between real sockets: exactly once, sealed, and by TCP where UDP fails."""

import random

import pytest

from overlay.errors import CloseReason
from overlay.messages import Role
from runtime.datagrams import DatagramPort, Seal
from runtime.link import Link
from tests.runtime.nodes import Node, World


@pytest.fixture(autouse=True)
def every_link_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback TCP would be good enough."""
    monkeypatch.setattr("overlay.express.LONG_ROUND_TRIP_NS", 1)


async def _pair(world: World) -> tuple[Node, Node, Link]:
    server = await world.node("server", Role.ROUTER, listen=True)
    node = await world.node("a", listen=True)
    link = await world.connect(node, server)
    await node.until(lambda: _usable(node, link))
    return node, server, link


def _usable(node: Node, link: Link) -> bool:
    node.hub.loop.call_later(0.01, node.changed.set)  # reports are no events of the node
    channel = link.connection.channel if link.connection is not None else None
    return channel is not None and channel.express.round_trip_ns > 0


def _lose(port: DatagramPort, share: float, seed: int) -> list[tuple[bytes, tuple[str, int]]]:
    """Let a share of what is sent get lost; returns a list in which all that is sent appears."""
    draw = random.Random(seed)
    send = port.send
    sent: list[tuple[bytes, tuple[str, int]]] = []

    def send_or_lose(data: bytes, address: tuple[str, int]) -> None:
        sent.append((data, address))
        if draw.random() >= share:
            send(data, address)

    port.send = send_or_lose  # type: ignore[method-assign]
    return sent


def _port(node: Node, link: Link) -> DatagramPort:
    port = node.hub.datagrams_for(link)
    assert port is not None
    return port


async def test_urgent_frames_travel_as_datagrams(world: World) -> None:
    node, server, link = await _pair(world)
    for _ in range(50):
        node.send("server", 1, size=100)
        await node.until_idle(link)
    assert server.got["a"] == list(range(1, 51))
    assert link.express is not None and link.express.statistics().frames_sent == 50
    assert server.links["a"].statistics().datagrams is not None


async def test_large_frames_go_by_tcp(world: World) -> None:
    node, server, link = await _pair(world)
    node.send("server", 20, size=5_000)
    await node.until_idle(link)
    assert sorted(server.got["a"]) == list(range(1, 21))
    assert link.express is not None and link.express.statistics().frames_sent == 0


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_frame_arrives_once_though_a_fifth_is_lost(world: World, seed: int) -> None:
    node, server, link = await _pair(world)
    _lose(_port(node, link), 0.2, seed)
    _lose(_port(server, server.links["a"]), 0.2, seed + 100)
    for _ in range(40):
        node.send("server", 5, size=300)
        server.send("a", 5, size=300)
        await node.until_idle(link)
    await server.until(lambda: len(server.got["a"]) >= 200)
    await node.until(lambda: len(node.got["server"]) >= 200)
    assert sorted(server.got["a"]) == sorted(node.got["server"]) == list(range(1, 201))
    assert link.express is not None
    statistics = link.express.statistics()
    assert statistics.copies_sent + statistics.frames_sent_again > 0
    await server.until_idle(server.links["a"])


async def test_nothing_is_lost_when_connections_break_as_well(world: World) -> None:
    node, server, link = await _pair(world)
    _lose(_port(node, link), 0.2, 3)
    for number in range(10):
        node.send("server", 10, size=300)
        if number % 3 == 1 and link.connection is not None:
            link.connection.abort(CloseReason.LOST, "the test cut it")
            await node.until(lambda: link.is_up)
        await node.until_idle(link)
    # What was ahead of a gap when the connection broke comes again; the node above drops it.
    assert set(server.got["a"]) == set(range(1, 101))
    assert link.connects == 4


async def test_without_udp_everything_goes_by_tcp(world: World) -> None:
    node, server, link = await _pair(world)
    _lose(_port(node, link), 1.0, 0)
    node.send("server", 30, size=300)
    await node.until_idle(link)
    assert server.got["a"] == list(range(1, 31))
    assert link.express is not None and link.express.statistics().frames_left_to_tcp > 0


async def test_forged_replayed_and_strange_datagrams_are_rejected(world: World) -> None:
    node, server, link = await _pair(world)
    sent = _lose(_port(node, link), 0.0, 0)
    node.send("server", 5, size=100)
    await node.until_idle(link)
    data, address = sent[0]
    port = _port(server, server.links["a"])
    before, got = port.rejected, list(server.got["a"])
    forged = bytearray(data)
    forged[-1] ^= 1
    for bad in (data, bytes(forged), b"x" * 8 + data[8:], b"", data[:10]):
        port.datagram_received(bad, address)
    assert port.rejected == before + 5
    assert server.got["a"] == got


async def test_answers_go_to_where_the_newest_datagram_came_from(world: World) -> None:
    node, server, link = await _pair(world)
    sent = _lose(_port(node, link), 1.0, 0)
    node.send("server", 2, size=100)
    await node.until_idle(link)
    (older, address), (newer, _) = sent[:2]
    connection = server.links["a"].connection
    assert connection is not None and connection.channel is not None
    port = _port(server, server.links["a"])
    port.datagram_received(newer, address)
    port.datagram_received(older, ("127.0.0.9", 9))
    assert connection.channel._address == address
    assert port.rejected == 0


async def test_a_channel_that_is_not_offered_is_not_used(world: World) -> None:
    server = await world.node("server", Role.ROUTER, listen=True)
    node = await world.node("a")  # it does not listen and so has no port
    link = await world.connect(node, server)
    node.send("server", 5)
    await node.until_idle(link)
    assert link.express is None
    assert server.got["a"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("text", ["", "xyz", "00" * 39, "00" * 41])
def test_a_bad_seal_is_none(text: str) -> None:
    assert Seal.parse(text) is None


def test_a_seal_is_read_back() -> None:
    seal = Seal(2**63 + 5, bytes(range(32)))
    assert Seal.parse(str(seal)) == seal


async def test_nobody_who_knows_a_node_can_guess_its_seals(world: World) -> None:
    node, _, link = await _pair(world)
    port = _port(node, link)
    known = random.Random(node.hub.identity.incarnation)  # as told in the handshake and in every frame
    node.hub.randomness.seed(node.hub.identity.incarnation)
    guess = Seal(known.getrandbits(64), known.getrandbits(256).to_bytes(32, "big"))
    assert port.new_seal() != guess
    node.hub.randomness.seed(1)
    first = port.new_seal()
    node.hub.randomness.seed(1)
    assert port.new_seal() != first
