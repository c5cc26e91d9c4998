"""More has been read than can be processed: urgent frames go first, nothing is lost, nobody steps back."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import Run, encode_batch, encode_message
from overlay.codec import encode
from overlay.errors import CloseReason
from overlay.limits import INBOX_CLIENT_BYTES, INBOX_TURN_NS, READ_AT_ONCE_BYTES
from overlay.messages import Close, Role, Undeclare
from overlay.urgency import SHEDDABLE
from runtime.inbox import Inbox, rank_of
from tests.runtime.nodes import Node, World

URGENT, BULK = 3, 6


def frame(urgency: int, *sequences: int, size: int = 1) -> bytes:
    runs = [Run(1, encode_message(1, 2, each, 3, bytes(size))) for each in sequences]
    return encode_batch(urgency, 1, 0, runs)


def bulk(first: int, last: int) -> bytes:
    """Frames of a kilobyte, more than are processed where they are read."""
    return b"".join(frame(BULK, each, size=1_000) for each in range(first, last + 1))


async def test_an_urgent_frame_overtakes_what_was_read_before_it(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("a")
    await peer.send(bulk(1, 60) + frame(URGENT, 61))
    await server.until(lambda: len(server.got.get("a", [])) == 61)
    got = server.got["a"]
    assert got.index(61) < 60, "it has not waited for all of them"
    assert [each for each in got if each != 61] == list(range(1, 61))


async def test_acknowledgements_follow_processing_without_a_gap(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("a")
    acknowledged: list[int] = []
    server.on_message = lambda link, sequence: acknowledged.append(link.received)
    await peer.send(bulk(1, 60) + frame(URGENT, 61))
    await server.until(lambda: len(server.got.get("a", [])) == 61)
    assert acknowledged == sorted(acknowledged)
    at = server.got["a"].index(61)
    assert acknowledged[at] == at, "what it has overtaken is not acknowledged yet"
    assert server.links["a"].received == 61


async def test_a_client_is_processed_in_order_and_not_read_while_much_of_it_waits(
    world: World, server: Node
) -> None:
    client = await world.raw(server)
    await client.handshake("c", role=Role.CLIENT)
    most = 0

    def look(link: object, sequence: int) -> None:
        nonlocal most
        connection = server.links["c"].connection
        assert connection is not None and connection._waiting is not None
        most = max(most, connection._waiting.waiting_bytes)

    server.on_message = look
    await client.send(bulk(1, 1_000) + frame(URGENT, 1_001))
    await server.until(lambda: len(server.got.get("c", [])) == 1_001)
    assert server.got["c"] == list(range(1, 1_002))
    assert READ_AT_ONCE_BYTES < most < INBOX_CLIENT_BYTES + 2 * 256 * 1024


async def test_control_frames_and_the_end_do_not_overtake_data(world: World, server: Node) -> None:
    peer = await world.raw(server)
    await peer.handshake("a")
    seen: list[object] = []
    server.on_message = lambda link, sequence: seen.append(sequence)
    note = server._note
    server._note = lambda *event: (seen.append(event[0]), note(*event))[1]  # type: ignore[method-assign]
    await peer.send(bulk(1, 40) + encode(Undeclare(1)) + bulk(41, 80) + encode(Close(CloseReason.GOODBYE)))
    await server.until(lambda: any(event[0] == "down" for event in server.events))
    assert seen == [*range(1, 41), "control", *range(41, 81), "down"]


async def test_a_bad_frame_among_waiting_ones_ends_only_its_own_connection(
    world: World, server: Node
) -> None:
    peer, other = await world.raw(server), await world.raw(server)
    await peer.handshake("bad")
    await other.handshake("good")
    announces_too_many = bytearray(frame(BULK, 30, size=1_000))
    announces_too_many[32] = 7
    await peer.send(bulk(1, 29) + bytes(announces_too_many) + bulk(31, 60))
    await other.send(bulk(1, 60))
    await server.until(lambda: len(server.got.get("good", [])) == 60)
    close = await peer.until_closed()
    assert close is not None and close.reason == CloseReason.BAD_FRAME
    assert server.got["bad"] == list(range(1, 30))


class _Connection:
    """Takes a while for every frame."""

    def __init__(self, name: str, clock: "_Time", taken: list[tuple[str, int]], cost_ns: int) -> None:
        self.name, self._clock, self._taken, self._cost_ns = name, clock, taken, cost_ns

    def take_waiting(self, number: int, body: bytes) -> None:
        self._clock.now_ns += self._cost_ns
        self._taken.append((self.name, number))


class _Time:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@given(st.integers(0, 2**32))
def test_turns_are_short_and_within_a_class_frames_keep_their_order(seed: int) -> None:
    rng = random.Random(seed)
    loop = asyncio.new_event_loop()
    try:
        clock = _Time()
        inbox = Inbox(loop, clock)
        taken: list[tuple[str, int]] = []
        pushed: dict[tuple[str, int], int] = {}
        connections = [_Connection(name, clock, taken, INBOX_TURN_NS // 2) for name in "ab"]
        for number in range(rng.randrange(1, 40)):
            connection = rng.choice(connections)
            rank = rank_of(bytes([rng.choice((URGENT, BULK, BULK | SHEDDABLE))]))
            pushed[connection.name, number] = rank
            inbox.push(connection, rank, number, b"")  # type: ignore[arg-type]
            if rng.random() < 0.3:
                before = len(taken)
                loop.call_soon(loop.stop)
                loop.run_forever()
                assert len(taken) - before <= 2
        drained = connections[0]
        inbox.drain(drained)  # type: ignore[arg-type]
        assert all(key in taken for key in pushed if key[0] == drained.name)
        while not inbox.is_empty:
            loop.call_soon(loop.stop)
            loop.run_forever()
        assert sorted(taken) == sorted(pushed)
        for name in "ab":
            for rank in set(pushed.values()):
                mine = [number for who, number in taken if who == name and pushed[who, number] == rank]
                assert mine == sorted(mine)
    finally:
        loop.close()


def test_best_effort_ranks_last() -> None:
    ranks = [rank_of(bytes([each])) for each in (1, URGENT, BULK, 1 | SHEDDABLE, BULK | SHEDDABLE)]
    assert ranks == sorted(ranks)
    assert rank_of(b"") == 0
