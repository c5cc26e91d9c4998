"""The seeded network: order within a connection, and every way to lose one."""

import asyncio
import random
import socket
import struct

import pytest

from overlay.limits import MILLISECOND_NS, SECOND_NS
from simulation.network import Machine, Network
from simulation.pipes import WINDOW_BYTES
from simulation.schedule import Step, World
from simulation.world import SimulatedLoop


class Recorder(asyncio.Protocol):
    """One end of a connection that remembers what happened to it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.transport: asyncio.Transport | None = None
        self.ended: list[Exception | None] = []
        self.writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.append(exc)


class Two:
    """Two machines, a connection between them."""

    def __init__(self, seed: str = "1") -> None:
        self.world = World()
        self.network = Network(self.world, seed)
        self.network.delays_of = lambda _a, _b: (10 * MILLISECOND_NS, 5 * MILLISECOND_NS)
        self.a = SimulatedLoop(self.world, "a", self.network.machine("a"))
        self.b = SimulatedLoop(self.world, "b", self.network.machine("b"))
        self.near, self.far = Recorder(), Recorder()
        self.errors: list[OSError] = []

    def connect(self) -> None:
        self.world.soon(
            Step(self.b.actor, lambda: self.network.listen(self.b, lambda: self.far, 7), (), None)
        )
        self.world.soon(Step(self.a.actor, lambda: self.a.create_task(self._dial()), (), None))
        self.wait(1)

    async def _dial(self) -> None:
        try:
            await self.a.create_connection(lambda: self.near, "b", 7)
        except OSError as error:
            self.errors.append(error)

    def wait(self, seconds: float) -> None:
        self.world.run_until(self.world.now_ns + int(seconds * SECOND_NS))

    def send(self, *data: bytes) -> None:
        assert self.near.transport is not None
        for item in data:
            self.near.transport.write(item)

    def acknowledgements(self) -> tuple[int, int]:
        assert self.near.transport is not None
        sock = self.near.transport.get_extra_info("socket")
        return struct.unpack("=24xI28xI", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60))


def _numbers(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


def test_bytes_arrive_in_order_and_later() -> None:
    two = Two()
    two.connect()
    two.send(*_numbers(50))
    assert not two.far.received
    two.wait(0.1)
    assert two.far.received == _numbers(50)


def test_connections_overtake_each_other() -> None:
    arrived = set()
    for seed in range(20):
        two, other = Two(str(seed)), Recorder()
        two.connect()
        two.world.soon(
            Step(two.b.actor, lambda t=two, o=other: t.network.listen(t.b, lambda: o, 8), (), None)
        )
        dialled = Recorder()

        async def dial(two: Two = two, dialled: Recorder = dialled) -> None:
            await two.a.create_connection(lambda: dialled, "b", 8)

        two.world.soon(Step(two.a.actor, lambda t=two, d=dial: t.a.create_task(d()), (), None))
        two.wait(1)
        two.send(b"first")
        assert dialled.transport is not None
        dialled.transport.write(b"second")
        while not (two.far.received or other.received):
            two.wait(0.0005)
        arrived.add(bool(two.far.received))
    assert arrived == {True, False}


def test_nobody_listens() -> None:
    two = Two()
    two.world.soon(Step(two.a.actor, lambda: two.a.create_task(two._dial()), (), None))
    two.wait(1)
    assert isinstance(two.errors[0], ConnectionRefusedError)


def test_what_was_sent_into_a_cut_arrives_when_it_is_healed() -> None:
    two = Two()
    two.connect()
    two.network.block("a", "b")
    two.send(*_numbers(5))
    two.wait(3)
    assert not two.far.received
    waiting, last_ms = two.acknowledgements()
    assert waiting
    assert last_ms >= 2_900
    two.network.unblock("a", "b")
    two.wait(1)
    assert two.far.received == _numbers(5)
    assert two.acknowledgements()[0] == 0


def test_acknowledgements_do_not_come_back_through_a_cut_the_other_way() -> None:
    two = Two()
    two.connect()
    two.network.block("b", "a")
    two.send(b"x")
    two.wait(1)
    assert two.far.received == [b"x"]
    assert two.acknowledgements()[0] == 1


def test_the_kernel_of_a_frozen_process_acknowledges() -> None:
    two = Two()
    two.connect()
    two.b.actor.freeze()
    two.send(b"x")
    two.wait(1)
    assert not two.far.received
    assert two.acknowledgements()[0] == 0
    two.b.actor.thaw()
    two.wait(0.1)
    assert two.far.received == [b"x"]


def test_a_writer_is_held_up_by_a_reader_who_does_not_read() -> None:
    two = Two()
    two.connect()
    assert two.far.transport is not None
    two.far.transport.pause_reading()
    piece = bytes(1024)
    count = 0
    while two.near.writable:
        two.send(piece)
        count += 1
        two.wait(0.001)
    assert count * len(piece) > WINDOW_BYTES
    two.world.soon(Step(two.b.actor, two.far.transport.resume_reading, (), None))
    two.wait(1)
    assert two.near.writable
    assert sum(map(len, two.far.received)) == count * len(piece)


def test_a_closed_connection_delivers_what_was_written() -> None:
    two = Two()
    two.connect()
    two.send(b"last words")
    assert two.near.transport is not None
    two.near.transport.close()
    two.wait(1)
    assert two.far.received == [b"last words"]
    assert (two.near.ended, two.far.ended) == ([None], [None])


def test_a_reset_ends_both_sides() -> None:
    two = Two()
    two.connect()
    two.send(b"lost")
    (transport,) = two.network.connections_between("a", "b")
    transport.reset()
    two.wait(1)
    assert not two.far.received
    assert isinstance(two.near.ended[0], ConnectionResetError)
    assert isinstance(two.far.ended[0], ConnectionResetError)


@pytest.mark.parametrize("seed", range(8))
def test_a_killed_process_is_noticed_whatever_becomes_of_its_last_bytes(seed: int) -> None:
    two = Two()
    two.connect()
    two.send(b"perhaps")
    two.a.actor.kill()
    _machine(two.a).kill_connections(random.Random(seed))
    two.wait(1)
    assert two.far.received in ([], [b"perhaps"])
    assert len(two.far.ended) == 1


def test_a_machine_without_power_says_nothing_until_it_is_back() -> None:
    two = Two()
    two.connect()
    for pair in (("a", "b"), ("b", "a")):
        two.network.block(*pair)
    two.b.actor.kill()
    _machine(two.b).lose_connections()
    two.send(b"x")
    two.wait(10)
    assert not two.near.ended
    for pair in (("a", "b"), ("b", "a")):
        two.network.unblock(*pair)
    two.wait(1)
    assert isinstance(two.near.ended[0], ConnectionResetError)


def _machine(loop: SimulatedLoop) -> Machine:
    assert loop.machine is not None
    return loop.machine
