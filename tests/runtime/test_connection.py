"""Connections over real sockets: handshakes, garbage, silence and ends, and what is left afterwards."""

import asyncio
import contextlib
import gc
import re
import socket
import time
import weakref
from struct import pack

import pytest

from overlay.batch import Run, encode_batch, encode_message
from overlay.codec import decode, encode, encode_heartbeat
from overlay.errors import CloseReason
from overlay.framing import FRAME_HEADER_BYTES, frame
from overlay.limits import (
    FRAME_MAX_BYTES,
    HANDSHAKE_FRAME_MAX_BYTES,
    HEARTBEAT_INTERVAL_MAX_NS,
)
from overlay.messages import (
    PROTOCOL_VERSION,
    Close,
    Declare,
    EndpointKind,
    FrameKind,
    Heartbeat,
    Hello,
    Role,
    Undeclare,
    Welcome,
)
from runtime.connection import Connection
from runtime.hub import Pace
from tests.runtime.nodes import CLUSTER, PATIENCE_S, Bystander, Node, RawPeer, World, data_frame

# Handshake


async def test_a_handshake_opens_the_link_on_both_sides(world: World, server: Node) -> None:
    node = await world.node("a")
    link = await world.connect(node, server)
    assert node.events == [("welcome", "server"), ("up", "server")]
    assert server.events == [("up", "a")]
    assert link.peer_incarnation == server.hub.identity.incarnation
    assert server.links["a"].peer_incarnation == node.hub.identity.incarnation
    assert (node.hub.connection_count, server.hub.connection_count) == (1, 1)


async def test_data_and_control_flow_both_ways(world: World, server: Node) -> None:
    node = await world.node("a")
    link = await world.connect(node, server)
    node.send("server", 3)
    server.send("a", 2)
    assert link.send(Undeclare(7))
    await server.until(lambda: server.got.get("a") == [1, 2, 3])
    await node.until(lambda: node.got.get("server") == [1, 2])
    await server.until(lambda: ("control", "a", "Undeclare") in server.events)
    await node.until_idle(link)
    statistics = link.statistics()
    assert statistics.up
    assert statistics.outbox.messages_sent == 3
    assert statistics.frames_received >= 1


async def test_the_introduction_may_arrive_byte_by_byte(world: World, server: Node) -> None:
    peer = await world.raw(server)
    hello = encode(Hello(Role.EDGE, "slow", 5, 10_000_000, cluster=CLUSTER))
    for at in range(len(hello)):
        await peer.send(hello[at : at + 1])
        await asyncio.sleep(0)
    welcome = decode(*await peer.receive())
    assert isinstance(welcome, Welcome)
    assert (welcome.node, welcome.cluster) == ("server", CLUSTER)


async def test_edges_that_are_held_are_answered_later_and_nothing_of_them_is_lost(
    world: World, server: Node
) -> None:
    held: list[str] = []

    def hold(name: str) -> None:
        held.append(name)
        server.changed.set()

    server.hub.hold_edges(hold)
    early, gone = await world.raw(server), await world.raw(server)
    await early.send(encode(Hello(Role.EDGE, "early", 5, 10_000_000, cluster=CLUSTER)) + data_frame(7))
    await gone.send(encode(Hello(Role.EDGE, "gone", 5, 10_000_000, cluster=CLUSTER)))
    await server.until(lambda: sorted(held) == ["early", "gone"])
    await gone.close()
    router = await world.node("router", Role.ROUTER)
    await world.connect(router, server)
    assert server.events == [("up", "router")], "only edges are held"
    server.hub.answer_edges()
    await server.until(lambda: server.got.get("early") == [7])
    assert isinstance(decode(*await early.receive()), Welcome)
    await early.send(data_frame(8))
    await server.until(lambda: server.got["early"] == [7, 8])
    await server.until(lambda: ("down", "gone", CloseReason.LOST) in server.events)
    late = await world.raw(server)
    assert (await late.handshake("late")).node == "server"


async def test_an_edge_that_is_held_for_too_long_is_let_go(
    world: World, server: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.connection.HANDSHAKE_TIMEOUT_NS", 100_000_000)
    server.hub.hold_edges(lambda name: None)
    peer = await world.raw(server)
    await peer.send(encode(Hello(Role.EDGE, "early", 5, 10_000_000, cluster=CLUSTER)))
    close = await peer.until_closed()
    assert close is not None and close.reason == CloseReason.HANDSHAKE_TIMEOUT
    server.hub.answer_edges()
    assert server.events == []


async def test_a_connection_that_is_gone_leaves_nothing_to_the_garbage_collector(
    world: World, server: Node
) -> None:
    node = await world.node("a")
    link = await world.connect(node, server)
    ends = [link.connection, server.links["a"].connection]
    left = [weakref.ref(thing) for end in ends if end is not None for thing in (end, end._transport)]
    assert len(left) == 4
    gc.disable()
    try:
        await node.hub.close()
        await server.until(lambda: ("down", "a", CloseReason.GOODBYE) in server.events)
        del ends
        await server.until(lambda: not server.hub._sockets)
        await asyncio.sleep(0)
        assert [thing() for thing in left] == [None] * 4
    finally:
        gc.enable()


async def test_data_right_behind_the_introduction_is_taken(world: World, server: Node) -> None:
    peer = await world.raw(server)
    large = encode_batch(0, 1, 0, [Run(1, encode_message(1, 2, 8, 3, bytes(2 * HANDSHAKE_FRAME_MAX_BYTES)))])
    await peer.send(encode(Hello(Role.EDGE, "eager", 5, 10_000_000, cluster=CLUSTER)) + data_frame(7) + large)
    await server.until(lambda: server.got.get("eager") == [7, 8])


async def test_a_client_needs_no_cluster_and_learns_it(world: World, server: Node) -> None:
    peer = await world.raw(server)
    welcome = await peer.handshake("c", role=Role.CLIENT, cluster="", heartbeat_ns=200_000_000)
    assert welcome.cluster == CLUSTER


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        (
            {"protocol": 99},
            CloseReason.WRONG_PROTOCOL,
            f"speaks protocol 99, this node {PROTOCOL_VERSION}: upgrade the older",
        ),
        (
            {"cluster": "other"},
            CloseReason.WRONG_CLUSTER,
            "cluster c1, the peer belongs to other: check which",
        ),
        ({"cluster": ""}, CloseReason.WRONG_CLUSTER, "the peer belongs to none"),
        ({"incarnation": 0}, CloseReason.BAD_MESSAGE, "incarnation 0: it must be above 0"),
        ({"heartbeat_ns": 999_999}, CloseReason.BAD_MESSAGE, "heartbeat every 999999 ns"),
        (
            {"heartbeat_ns": HEARTBEAT_INTERVAL_MAX_NS + 1},
            CloseReason.BAD_MESSAGE,
            f"between 1000000 and {HEARTBEAT_INTERVAL_MAX_NS}",
        ),
    ],
)
async def test_an_introduction_that_does_not_fit_is_refused_with_the_reason(
    world: World,
    server: Node,
    bystander: Bystander,
    fields: dict[str, object],
    reason: CloseReason,
    words: str,
) -> None:
    peer = await world.raw(server)
    with pytest.raises(AssertionError, match=reason):
        await peer.handshake("misfit", **fields)
    assert await peer.until_closed() is None
    assert [(each, words in detail) for each, detail in server.closed] == [(reason, True)]
    assert server.events == []
    assert "misfit" not in server.links
    await bystander.still_works()


async def test_a_peer_that_comes_back_with_more_than_was_sent_changes_nothing(
    world: World, server: Node
) -> None:
    peer, liar = await world.raw(server), await world.raw(server)
    welcome = await peer.handshake("a")
    connection = server.links["a"].connection
    with pytest.raises(AssertionError, match="peer acknowledges 99 frames, 0 were sent"):
        await liar.handshake(
            "a", incarnation=peer.incarnation, peer_incarnation=welcome.incarnation, received=99
        )
    assert await liar.until_closed() is None
    assert server.links["a"].connection is connection
    assert server.events == [("up", "a")]


async def test_a_dialled_peer_whose_answer_does_not_fit_is_refused(world: World) -> None:
    answers = iter(
        [
            Welcome(Role.ROUTER, "r", 5, cluster=CLUSTER, protocol=99),
            Welcome(Role.ROUTER, "r", 5, cluster="other"),
            Welcome(Role.ROUTER, "r", 5, cluster=CLUSTER, datagram_port=65_536),
        ]
    )
    closes: list[Close | None] = []

    async def serve(peer: RawPeer) -> None:
        await peer.receive()
        await peer.send(encode(next(answers, Welcome(Role.ROUTER, "r", 5, cluster=CLUSTER))))
        closes.append(await peer.until_closed())

    locator = await world.raw_server(serve)
    node = await world.node("a")
    link = node.link("r", Role.ROUTER)
    dialer = node.hub.dial(link, locator)
    await node.until(lambda: link.is_up)
    assert [close.reason for close in closes if close] == ["wrong_protocol", "wrong_cluster", "bad_message"]
    assert "bad_message: datagrams to port 65536" in dialer.last_error
    assert node.events == [("welcome", "r"), ("up", "r")]


async def test_beyond_the_most_connections_a_peer_is_refused_with_the_limit(world: World) -> None:
    server = await world.node("server", listen=True, connections_max=1)
    first = await world.node("a")
    await world.connect(first, server)
    peer = await world.raw(server)
    await peer.send(encode(Hello(Role.EDGE, "b", 5, 10_000_000, cluster=CLUSTER)))
    close = await peer.until_closed()
    assert close is not None
    assert close.reason == "too_many_connections"
    assert "1 connections are open, no more are allowed: use another broker" in close.detail
    assert server.links["a"].is_up


# Garbage


_HELLO = encode(Hello(Role.EDGE, "bad", 5, 10_000_000, cluster=CLUSTER))


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n", CloseReason.FRAME_TOO_LARGE),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", CloseReason.TLS_FAILED),
        (bytes(64), CloseReason.BAD_FRAME),
        (b"\xff" * 64, CloseReason.FRAME_TOO_LARGE),
        (pack("<IB", HANDSHAKE_FRAME_MAX_BYTES + 1, FrameKind.HELLO), CloseReason.FRAME_TOO_LARGE),
        (frame(FrameKind.HELLO, b""), CloseReason.BAD_FRAME),
        (frame(FrameKind.HELLO, b"\xc1"), CloseReason.BAD_FRAME),
        (frame(FrameKind.HELLO, b"\x80"), CloseReason.BAD_FRAME),
        (frame(FrameKind.HELLO, b"\x81\xa4role" + b"\x91" * 1000), CloseReason.BAD_FRAME),
        (frame(FrameKind.HELLO, b"\x81\xa4role" + b"\x91" * 1000 + b"\xc0"), CloseReason.BAD_FRAME),
        (frame(99, b"\x80"), CloseReason.BAD_FRAME),
        (encode_heartbeat(Heartbeat(1, 2, 3, 4)), CloseReason.BAD_FRAME),
        (data_frame(1), CloseReason.UNEXPECTED_FRAME),
        (encode(Welcome(Role.EDGE, "bad", 5)), CloseReason.UNEXPECTED_FRAME),
        (encode(Declare(1, EndpointKind.PUBLISHER, "t")), CloseReason.UNEXPECTED_FRAME),
    ],
    ids=[
        "HTTP",
        "TLS",
        "zeros",
        "ones",
        "oversized",
        "empty hello",
        "reserved byte",
        "hello without fields",
        "unfinished nesting",
        "deep nesting",
        "unknown kind",
        "heartbeat first",
        "data first",
        "welcome first",
        "declare first",
    ],
)
async def test_garbage_instead_of_a_handshake_closes_that_connection_and_nothing_else_happens(
    world: World, server: Node, bystander: Bystander, garbage: bytes, reason: CloseReason
) -> None:
    peer = await world.raw(server)
    await peer.send(garbage)
    close = await peer.until_closed()
    assert close is not None
    assert close.reason == reason
    assert close.detail
    assert server.hub.closes == {reason: 1}
    assert server.events == []
    assert set(server.links) == {"bystander"}
    assert server.hub.connection_count == 1
    await bystander.still_works()


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (bytes(64), CloseReason.BAD_FRAME),
        (b"\xff" * 64, CloseReason.FRAME_TOO_LARGE),
        (pack("<IB", FRAME_MAX_BYTES + 1, FrameKind.DATA), CloseReason.FRAME_TOO_LARGE),
        (frame(99, b"\x80"), CloseReason.BAD_FRAME),
        (frame(FrameKind.DECLARE, b"\xc1"), CloseReason.BAD_FRAME),
        (frame(FrameKind.HEARTBEAT, bytes(31)), CloseReason.BAD_FRAME),
        (encode_heartbeat(Heartbeat(1, 2, 3, 4)), CloseReason.BAD_MESSAGE),
        (_HELLO, CloseReason.UNEXPECTED_FRAME),
        (encode(Welcome(Role.EDGE, "bad", 5)), CloseReason.UNEXPECTED_FRAME),
        (frame(FrameKind.DATA, b"short"), CloseReason.BAD_FRAME),
        (frame(FrameKind.DATA, data_frame(1)[5:-1]), CloseReason.BAD_FRAME),
    ],
    ids=[
        "zeros",
        "ones",
        "oversized",
        "unknown kind",
        "not msgpack",
        "short heartbeat",
        "acknowledges what was never sent",
        "hello twice",
        "welcome",
        "short data",
        "truncated data",
    ],
)
async def test_garbage_after_the_handshake_closes_that_connection_and_nothing_else_happens(
    world: World, server: Node, bystander: Bystander, garbage: bytes, reason: CloseReason
) -> None:
    peer = await world.raw(server)
    await peer.handshake("bad")
    await peer.send(garbage)
    close = await peer.until_closed()
    assert close is not None
    assert close.reason == reason
    assert server.hub.closes == {reason: 1}
    assert server.events == [("up", "bad"), ("down", "bad", reason)]
    assert "bad" not in server.got
    assert server.links["bad"].bytes_received == 0
    assert server.hub.connection_count == 1
    await bystander.still_works()


async def test_frames_behind_a_bad_one_are_not_looked_at(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("bad")
    await peer.send(data_frame(1) + frame(99, b"") + data_frame(2))
    await peer.until_closed()
    assert server.got["bad"] == [1]


async def test_a_truncated_frame_and_then_silence_ends_with_the_handshake_timeout(
    world: World, server: Node, bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.connection.HANDSHAKE_TIMEOUT_NS", 50_000_000)
    peer = await world.raw(server)
    await peer.send(_HELLO[:-1])
    close = await peer.until_closed()
    assert close is not None
    assert close.reason == "handshake_timeout"
    assert server.hub.closes == {CloseReason.HANDSHAKE_TIMEOUT: 1}
    assert server.events == []
    await bystander.still_works()


async def test_a_dialled_peer_that_never_answers_ends_with_the_handshake_timeout(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.connection.HANDSHAKE_TIMEOUT_NS", 50_000_000)

    async def serve(peer: RawPeer) -> None:
        await peer.until_closed()

    node = await world.node("a")
    node.hub.dial(node.link("mute"), await world.raw_server(serve))
    await node.until(lambda: CloseReason.HANDSHAKE_TIMEOUT in node.hub.closes)
    assert node.events == []


@pytest.mark.parametrize("opened", [False, True])
async def test_a_truncated_frame_and_then_the_end_is_a_lost_connection(
    world: World, server: Node, bystander: Bystander, opened: bool
) -> None:
    peer = await world.raw(server)
    if opened:
        await peer.handshake("cut")
    await peer.send((data_frame(1) if opened else _HELLO)[:-1])
    await peer.close()
    await server.until(lambda: bool(server.closed))
    assert server.hub.closes == {CloseReason.LOST: 1}
    assert server.events == ([("up", "cut"), ("down", "cut", CloseReason.LOST)] if opened else [])
    await bystander.still_works()


# The end of a connection


@pytest.mark.parametrize(
    ("said", "understood"),
    [
        ("draining", CloseReason.DRAINING),
        ("goodbye", CloseReason.GOODBYE),
        ("a reason of the future", CloseReason.GOODBYE),
    ],
)
async def test_the_reason_a_peer_gives_reaches_the_handler(
    world: World, server: Node, bystander: Bystander, said: str, understood: CloseReason
) -> None:
    peer = await world.raw(server)
    await peer.handshake("leaver")
    await peer.send(encode(Close(said, "see you")) + data_frame(1))
    assert await peer.until_closed() is None
    assert server.closed == [(understood, "the peer says: see you")]
    assert server.events == [("up", "leaver"), ("down", "leaver", understood)]
    assert "leaver" not in server.got
    await bystander.still_works()


async def test_a_peer_may_close_during_the_handshake(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.send(encode(Close("goodbye")))
    assert await peer.until_closed() is None
    assert server.closed == [(CloseReason.GOODBYE, "the peer says: goodbye")]


async def test_a_hub_that_closes_tells_everyone_why(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("a")
    node = await world.node("b")
    await world.connect(node, server)
    await server.hub.close(CloseReason.DRAINING, "going home")
    close = await peer.until_closed()
    assert close == Close("draining", "going home")
    await node.until(lambda: ("down", "server", CloseReason.DRAINING) in node.events)
    assert server.hub.connection_count == 0


async def test_a_hub_closes_although_a_peer_takes_nothing(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("stuck")
    server.send("stuck", count=40, size=400_000)
    await server.until(lambda: server.links["stuck"].outbox.statistics().frames_sent > 0)
    async with asyncio.timeout(PATIENCE_S):
        await server.hub.close()
    assert server.hub.connection_count == 0


async def test_a_peer_that_reads_no_control_frames_is_given_up(
    world: World, server: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.connection.UNREAD_MAX_BYTES", 256 * 1024)
    peer = await world.raw(server)
    await peer.handshake("stuck")
    connection = server.links["stuck"].connection
    assert connection is not None
    message = Close(CloseReason.GOODBYE, "x" * 400)
    for _ in range(40_000):
        connection.send_control(message)
        if not connection.is_open:
            break
        await asyncio.sleep(0)
    assert list(server.hub.closes) == [CloseReason.TOO_SLOW]
    [(reason, detail)] = server.closed
    assert reason is CloseReason.TOO_SLOW and "the limit is 262144" in detail


async def test_a_peer_that_says_goodbye_and_takes_nothing_is_let_go(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("stuck")
    connection = server.links["stuck"].connection
    assert connection is not None
    lost = asyncio.Event()
    was_lost = connection.connection_lost

    def connection_lost(error: Exception | None) -> None:
        was_lost(error)
        lost.set()

    connection.connection_lost = connection_lost
    server.send("stuck", count=40, size=400_000)
    await server.until(lambda: server.links["stuck"].outbox.statistics().frames_sent > 0)
    await peer.send(encode(Close("goodbye")))
    async with asyncio.timeout(PATIENCE_S):
        await lost.wait()
    assert server.hub.closes == {CloseReason.GOODBYE: 1}


async def test_a_hub_that_closes_while_somebody_connects_leaves_nothing_open(
    world: World, server: Node
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        late = socket.create_connection(listening.getsockname(), timeout=PATIENCE_S)
        accepted, _ = listening.accept()
    accepted.setblocking(False)
    with late:
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(
            loop.connect_accepted_socket(lambda: Connection(server.hub), sock=accepted)
        )
        await server.hub.close()
        assert server.hub.connection_count == 0
        said = b""
        while data := late.recv(4096):  # the socket is gone, so this ends though the loop stands still
            said += data
        await accepting
    close = decode(FrameKind.CLOSE, said[FRAME_HEADER_BYTES:])
    assert isinstance(close, Close)
    assert close.reason == "draining"
    assert server.events == []


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_accepted_just_before_the_hub_closes_is_closed_too(
    world: World, server: Node, turns: int
) -> None:
    """Wherever asyncio is with it: the socket waits, is accepted, has a transport, is the hub's."""
    locator = world.locators["server"]
    with socket.create_connection((locator.host, locator.port), timeout=PATIENCE_S) as late:
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.hub.close()
        assert server.hub.connection_count == 0
        with contextlib.suppress(ConnectionResetError):
            while late.recv(4096):  # the socket is gone, so this ends though the loop stands still
                pass


async def test_closing_a_connection_twice_is_closing_it_once(world: World, server: Node) -> None:
    node = await world.node("a")
    await world.connect(node, server)
    connection = server.links["a"].connection
    assert connection is not None
    connection.close(CloseReason.GOODBYE, "first")
    connection.close(CloseReason.DRAINING, "second")
    connection.abort(CloseReason.SILENT, "third")
    assert await connection.closed == (CloseReason.GOODBYE, "first")
    assert server.hub.closes == {CloseReason.GOODBYE: 1}


# Silence


@pytest.mark.parametrize(
    ("echoes", "host_answers", "silent_ms"),
    [(True, False, 50), (True, True, 500), (False, False, 1000), (False, True, 1000)],
)
async def test_a_peer_that_completes_the_handshake_and_then_says_nothing_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch, echoes: bool, host_answers: bool, silent_ms: int
) -> None:
    """Soon if its host is silent too, which on loopback no host is; else only when it is frozen.

    One that has not even echoed a heartbeat may be as far away as any, and gets a second.
    """
    if not host_answers:
        monkeypatch.setattr(Connection, "_host_answers", lambda connection, liveness: False)
    server = await world.node("server", listen=True, pace=Pace(10_000_000, 50_000_000))
    peer = await world.raw(server)
    await peer.handshake("mute")
    if echoes:
        now_ns = time.monotonic_ns()
        await peer.send(encode_heartbeat(Heartbeat(now_ns, now_ns, now_ns, 0)))
    await server.until(lambda: ("down", "mute", CloseReason.SILENT) in server.events)
    reason, detail = server.closed[0]
    said = re.fullmatch(r"nothing heard for (\d+) ms", detail)
    assert reason is CloseReason.SILENT and said is not None
    assert silent_ms <= int(said[1]) <= silent_ms + 20
    assert await peer.until_closed() is None


async def test_two_idle_nodes_keep_each_other_alive(world: World) -> None:
    pace = Pace(10_000_000, 200_000_000)
    server = await world.node("server", listen=True, pace=pace)
    node = await world.node("a", pace=pace)
    link = await world.connect(node, server)
    assert link.connection is not None
    liveness = link.connection.liveness
    assert liveness is not None
    loop = asyncio.get_running_loop()
    enough = loop.create_future()
    loop.call_later(3 * 0.2, enough.set_result, None)  # the time under test: three times the silence allowed
    await enough
    assert link.connects == 1
    assert link.is_up
    assert liveness.round_trip_ns > 0
    assert link.statistics().round_trip_ms > 0
