"""Links outlive connections: breaking and coming back, two connections of one peer, and flow."""

import asyncio
import time
from collections import Counter

import pytest

from overlay.batch import Run, decode_messages, encode_batch, encode_message
from overlay.codec import decode, encode, encode_heartbeat
from overlay.errors import CloseReason
from overlay.limits import (
    WRITE_HIGH_WATER_BYTES,
)
from overlay.messages import (
    UNKNOWN_CLOCK_SHIFT,
    Close,
    FrameKind,
    Heartbeat,
    Hello,
    Role,
    Undeclare,
)
from overlay.outbox import WINDOW_FIRST_BYTES, Ticket
from runtime.hub import Pace
from runtime.link import Link
from tests.runtime.nodes import CLUSTER, Bystander, Node, World, data_frame

# Reconnecting


async def test_unacknowledged_frames_arrive_exactly_once_however_often_the_connection_breaks(
    world: World, server: Node
) -> None:
    node = await world.node("a")
    link = await world.connect(node, server)
    total = 400

    def break_now_and_then(peer: Link, sequence: int) -> None:
        if sequence % 60 == 0 and peer.connection is not None:
            peer.connection.abort(CloseReason.LOST, "the test cut it")

    server.on_message = break_now_and_then
    node.on_message = break_now_and_then
    for _ in range(total // 10):
        node.send("server", 10, size=3000)
        server.send("a", 10, size=3000)
        await asyncio.sleep(0)
    await server.until(lambda: len(server.got.get("a", [])) >= total)
    await node.until(lambda: len(node.got.get("server", [])) >= total)
    everything = list(range(1, total + 1))
    assert server.got["a"] == everything
    assert node.got["server"] == everything
    assert link.connects > 3
    await node.until_idle(link)
    await server.until_idle(server.links["a"])


async def test_the_count_in_the_introduction_decides_what_is_sent_again(world: World, server: Node) -> None:
    peer = await world.raw(server)
    welcome = await peer.handshake("a")
    for _ in range(3):
        server.send("a")
        assert len(await peer.sequences(1)) == 1
    await peer.close()
    await server.until(lambda: not server.links["a"].is_up)
    again = await world.raw(server)
    again.incarnation = peer.incarnation
    await again.handshake("a", peer_incarnation=welcome.incarnation, received=1)
    server.send("a")
    assert await again.sequences(3) == [2, 3, 4]


async def test_a_peer_that_claims_more_than_it_was_sent_is_refused(
    world: World, server: Node, bystander: Bystander
) -> None:
    first = await world.raw(server)
    welcome = await first.handshake("liar")
    await first.close()
    await server.until(lambda: not server.links["liar"].is_up)
    peer = await world.raw(server)
    peer.incarnation = first.incarnation
    with pytest.raises(AssertionError, match="acknowledges 9 frames, 0 were sent"):
        await peer.handshake("liar", peer_incarnation=welcome.incarnation, received=9)
    assert not server.links["liar"].is_up
    await bystander.still_works()


async def test_a_restarted_peer_gets_what_its_predecessor_never_acknowledged(
    world: World, server: Node
) -> None:
    peer = await world.raw(server)
    await peer.handshake("a")
    server.send("a", 2)
    assert await peer.sequences(2) == [1, 2]
    await peer.close()
    await server.until(lambda: not server.links["a"].is_up)
    server.send("a")
    successor = await world.raw(server)
    await successor.handshake("a")
    assert await successor.sequences(3) == [1, 2, 3]


async def test_what_a_restarted_peer_sends_is_counted_from_the_start(world: World, server: Node) -> None:
    predecessor = await world.node("a")
    link = await world.connect(predecessor, server)
    for _ in range(3):
        predecessor.send("server")
        await predecessor.until_idle(link)
    await predecessor.hub.close()
    successor = await world.node("a")
    link = await world.connect(successor, server)
    successor.send("server")
    await successor.until_idle(link)
    assert server.got["a"] == [1, 2, 3, 1]
    assert server.hub.closes == {CloseReason.GOODBYE: 1}


@pytest.mark.parametrize("forgetful", ["acceptor", "dialler"])
async def test_a_side_that_has_forgotten_the_link_can_go_on_with_one_that_has_not(
    world: World, server: Node, forgetful: str
) -> None:
    node = await world.node("a")
    link = await world.connect(node, server)
    for _ in range(3):  # several frames each way, all acknowledged
        node.send("server")
        server.send("a")
        await node.until_idle(link)
        await server.until_idle(server.links["a"])
    if forgetful == "acceptor":
        forgotten = server.links.pop("a")
        assert forgotten.connection is not None
        forgotten.connection.abort(CloseReason.LOST, "the test cut it")
        await node.until(lambda: node.events.count(("up", "server")) == 2)
    else:
        (dialer,) = node.hub._dialers.values()
        await dialer.stop()
        del node.links["server"]
        link = await world.connect(node, server)
    await server.until(lambda: server.link("a").is_up)
    node.send("server", 2)
    server.send("a", 2)
    await node.until_idle(link)
    await server.until_idle(server.links["a"])
    assert server.got["a"] == node.got["server"] == [1, 2, 3, 4, 5]
    assert [reason for reason, _ in server.closed + node.closed if reason is CloseReason.BAD_MESSAGE] == []


async def test_frames_taken_back_while_the_link_was_down_leave_the_count_right(
    world: World, server: Node
) -> None:
    peer = await world.raw(server)
    welcome = await peer.handshake("a")
    server.send("a", 2)
    assert await peer.sequences(2) == [1, 2]
    await peer.close()
    link = server.links["a"]
    await server.until(lambda: not link.is_up)
    assert len(link.withdraw()) == 1
    again = await world.raw(server)
    again.incarnation = peer.incarnation
    await again.handshake("a", peer_incarnation=welcome.incarnation, received=0)  # it never arrived
    server.send("a")
    assert await again.sequences(1) == [3]
    await again.send(encode_heartbeat(Heartbeat(1, 0, 0, 1)))
    await server.until_idle(link)


async def test_data_waits_while_the_peer_must_be_told_something_first(world: World, server: Node) -> None:
    server.holds_data = True
    server.send("a")
    peer = await world.raw(server)
    welcome = await peer.handshake("a")
    link = server.links["a"]
    assert link.send(Undeclare(1))
    assert (await peer.receive())[0] == FrameKind.UNDECLARE
    link.release_data()
    assert await peer.sequences(1) == [1]
    link.holds_data = True
    await peer.close()
    await server.until(lambda: not link.is_up)
    assert not link.send(Undeclare(1))
    link.release_data()
    link.holds_data = True
    server.send("a")
    again = await world.raw(server)
    again.incarnation = peer.incarnation
    await again.handshake("a", peer_incarnation=welcome.incarnation, received=0)
    link.send(Undeclare(2))
    assert (await again.receive())[0] == FrameKind.UNDECLARE
    link.release_data()
    assert await again.sequences(2) == [1, 2]


# Two connections of one peer


async def test_a_newer_connection_of_the_same_peer_replaces_the_older(
    world: World, server: Node, bystander: Bystander
) -> None:
    older = await world.raw(server)
    await older.handshake("twin")
    await older.send(data_frame(1))
    await server.until(lambda: server.got.get("twin") == [1])
    newer = await world.raw(server)
    newer.incarnation = older.incarnation
    welcome = await newer.handshake("twin")
    assert welcome.received == 1
    close = await older.until_closed()
    assert close == Close("replaced", "the peer connected again")
    await newer.send(data_frame(2))
    await server.until(lambda: server.got.get("twin") == [1, 2])
    assert server.events == [("up", "twin"), ("down", "twin", CloseReason.REPLACED), ("up", "twin")]
    assert server.links["twin"].is_up
    await bystander.still_works()


async def test_data_on_a_replaced_connection_is_not_taken(world: World, server: Node) -> None:
    older = await world.raw(server)
    await older.handshake("twin")
    newer = await world.raw(server)
    newer.incarnation = older.incarnation
    await newer.handshake("twin")
    await older.send(data_frame(1))
    await newer.send(data_frame(2))
    await older.until_closed()
    await server.until(lambda: bool(server.got.get("twin")))
    assert server.got["twin"] == [2]
    assert server.links["twin"].received == 1


async def test_data_from_two_peers_is_told_apart(world: World, server: Node) -> None:
    first, second = await world.raw(server), await world.raw(server)
    await first.handshake("a")
    await second.handshake("b")
    await first.send(data_frame(1, 2))
    await second.send(data_frame(7))
    await server.until(lambda: server.got == {"a": [1, 2], "b": [7]})
    assert (server.links["a"].received, server.links["b"].received) == (1, 1)


# Flow


async def test_a_peer_that_does_not_read_leaves_data_in_the_outbox_and_not_in_the_socket(
    world: World, server: Node, bystander: Bystander
) -> None:
    peer = await world.raw(server)
    await peer.handshake("slow")
    count, size = 60, 200_000
    server.send("slow", count, size)
    link = server.links["slow"]
    await server.until(lambda: link.outbox.statistics().frames_sent > 0)
    await bystander.still_works()
    connection = link.connection
    assert connection is not None
    assert connection._transport is not None
    assert connection._transport.get_write_buffer_size() <= WRITE_HIGH_WATER_BYTES + size + 1000
    assert link.outbox.has_waiting
    assert link.outbox.statistics().unacknowledged_bytes < WINDOW_FIRST_BYTES + size + 1000
    got: list[int] = []
    while len(got) < count:
        got += await peer.sequences(1)
        await peer.acknowledge()
    assert got == list(range(2, count + 2))
    await server.until_idle(link)


async def test_a_peer_that_reads_and_never_acknowledges_gets_a_window_and_the_rest_later(
    world: World, server: Node
) -> None:
    peer = await world.raw(server)
    await peer.handshake("quiet")
    count, size = 100, 10_000
    server.send("quiet", count, size)
    link = server.links["quiet"]
    await server.until(lambda: not link.outbox.has_room)
    waiting = link.outbox.statistics().waiting_messages
    assert WINDOW_FIRST_BYTES // size - 1 <= count - waiting <= WINDOW_FIRST_BYTES // size + 10
    got = await peer.sequences(count - waiting)
    server.send("quiet")
    assert link.send(Undeclare(1))  # whatever else is sent: no data before the acknowledgement
    assert (await peer.receive())[0] == FrameKind.UNDECLARE
    assert link.outbox.statistics().waiting_messages == waiting + 1
    while len(got) < count + 1:
        await peer.acknowledge()
        got += await peer.sequences(1)
    assert got == list(range(1, count + 2))


# Clocks


@pytest.mark.parametrize("ahead_ns", [0, 10**15, -(10**13)])
async def test_two_nodes_know_each_others_clock_within_a_few_heartbeats(world: World, ahead_ns: int) -> None:
    """The shift bounds the truth: what the peer's clock is ahead, and not much more than the way there."""
    base_ns = time.monotonic_ns() - 10**14  # so that both clocks read something above zero
    server = await world.node("server", listen=True, clock=lambda: time.monotonic_ns() - base_ns)
    node = await world.node("a", clock=lambda: time.monotonic_ns() - base_ns + ahead_ns)
    heartbeats: Counter[str] = Counter()
    for each, link in ((server, server.link("a")), (node, node.link("server"))):

        def count(tickets: list[Ticket], each: Node = each, link: Link = link) -> None:
            """Called for every heartbeat, before it is looked at."""
            if link.clock.shift_ns == UNKNOWN_CLOCK_SHIFT:
                heartbeats[link.peer] += 1
            each.changed.set()

        link.on_acknowledged = count
    link = await world.connect(node, server)
    known = server.links["a"]
    for each, watched in ((server, known), (node, link)):
        await each.until(lambda watched=watched: watched.clock.shift_ns != UNKNOWN_CLOCK_SHIFT)
    for peer in ("a", "server"):
        assert 1 <= heartbeats[peer] <= 3
    assert 0 <= known.clock.shift_ns - ahead_ns < 50_000_000
    assert 0 <= link.clock.shift_ns + ahead_ns < 50_000_000


async def test_what_is_known_of_a_clock_outlives_the_connection_but_not_the_process(
    world: World, server: Node
) -> None:
    node = await world.node("a")
    link = await world.connect(node, server)
    link.on_acknowledged = lambda tickets: node.changed.set()
    await node.until(lambda: link.clock.shift_ns != UNKNOWN_CLOCK_SHIFT)
    clock = link.clock
    assert link.connection is not None
    link.connection.abort(CloseReason.LOST, "the test cut it")
    await node.until(lambda: node.events.count(("up", "server")) == 2)
    assert link.clock is clock
    await node.hub.close()
    before = server.links["a"].clock
    successor = await world.node("a")
    await world.connect(successor, server)
    assert server.links["a"].clock is not before


async def test_a_link_reckons_with_the_worse_of_both_clocks(world: World) -> None:
    server = await world.node("server", listen=True, drift_ppm=30)
    for name, drift_ppm in (("better", 5), ("worse", 250)):
        node = await world.node(name, drift_ppm=drift_ppm)
        link = await world.connect(node, server)
        assert link.clock.drift_ppm == server.links[name].clock.drift_ppm == max(30, drift_ppm)


async def test_a_drift_that_cannot_be_is_refused(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.send(encode(Hello(Role.EDGE, "odd", 77, 10_000_000, cluster=CLUSTER, drift_ppm=2_000_000)))
    kind, body = await peer.receive()
    message = decode(kind, body)
    assert isinstance(message, Close)
    assert "2000000 ppm" in message.detail


async def test_backpressure_holds_a_peers_data_back_without_taking_it_for_dead(world: World) -> None:
    pace = Pace(10_000_000, 100_000_000)
    server = await world.node("server", listen=True, pace=pace)
    node = await world.node("a", pace=pace)
    link = await world.connect(node, server)
    connection = server.links["a"].connection
    assert connection is not None
    connection.pause_reading()
    connection.pause_reading()
    node.send("server", 3)
    loop = asyncio.get_running_loop()
    enough = loop.create_future()
    loop.call_later(0.3, enough.set_result, None)  # the time under test: three times the silence allowed
    await enough
    assert "a" not in server.got
    connection.resume_reading()
    await server.until(lambda: server.got.get("a") == [1, 2, 3])
    assert link.connects == 1


async def test_data_on_a_slow_link_is_acknowledged_without_waiting_for_a_heartbeat(
    world: World, server: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await world.node("c", Role.CLIENT)
    link = await world.connect(client, server)
    monkeypatch.setattr("runtime.hub.SLOW_TICK_NS", 2**62)  # slow links get no heartbeats any more
    client.send("server")
    await client.until_idle(link)


async def test_much_data_is_acknowledged_without_waiting_for_a_tick(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("bulk")
    payload = encode_message(1, 2, 1, 3, bytes(300_000))
    await peer.send(encode_batch(0, 1, 0, [Run(1, payload)]))
    await server.until(lambda: server.got.get("bulk") == [1])
    connection = server.links["bulk"].connection
    assert connection is not None
    assert connection._unacknowledged_bytes == 0


async def test_decoded_data_survives_the_socket(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("a")
    server.send("a", 1, size=400_000)
    kind, body = await peer.receive()
    assert kind == FrameKind.DATA
    (message,) = decode_messages(body)
    assert message.payload == bytes(400_000)
