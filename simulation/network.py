"""A seeded network of streams: what TCP between machines can do to two processes.

Bytes of one direction of a connection arrive in order, or not at all. Everything else may happen: each
segment has its own delay, so connections overtake each other; paths between machines are blocked, in
one direction or both, and what was sent then arrives after they are open again; connections are reset;
machines die without a word. A window limits what is on its way, so that writers are held up when
readers are (`pause_writing`).

Each connection draws its delays from a generator of its own, seeded by who connects to whom for the
how-many-th time. The order in which one process writes to several connections in the same moment then
makes no difference to any of them.
"""

import asyncio
import random
import socket
import struct
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from overlay.limits import KIB, MILLISECOND_NS, SECOND_NS
from simulation.world import Life, SimulatedLoop, Step, World

WINDOW_BYTES: Final = 256 * KIB
"""Bytes on their way or in the receiver's kernel, per direction."""
_RETRANSMISSION_NS: Final = 200 * MILLISECOND_NS
"""How long after a path has opened again the first bytes arrive, at most."""
_DIAL_AGAIN_NS: Final = (SECOND_NS, 2 * SECOND_NS, 4 * SECOND_NS, 8 * SECOND_NS)
"""When a connection attempt is repeated whose first packet was lost."""
_FIRST_PORT: Final = 40_000
_TCP_INFO: Final = struct.Struct("=24xI28xI")


@dataclass(slots=True)
class Path:
    """The way from one machine to another, in one direction."""

    delay_ns: int
    jitter_ns: int
    blocks: int = 0
    """How many faults block it now."""
    slow_ns: int = 0
    """Delay on top while it is congested."""
    blocked_since_ns: int = 0

    @property
    def is_blocked(self) -> bool:
        """Nothing gets through now."""
        return self.blocks > 0


class Machine:
    """Where one process runs: an address, listening ports, connections."""

    def __init__(self, network: "Network", name: str) -> None:
        self.network = network
        self.name = name
        self.listeners: dict[int, Listener] = {}
        self.transports: dict[Transport, None] = {}
        self.next_port = _FIRST_PORT

    def kill_connections(self, randomness: random.Random | None) -> None:
        """The process has been killed: its kernel ends its connections.

        What they hold is lost or not, as chance has it; without chance it is not.
        """
        self.listeners.clear()
        for transport in list(self.transports):
            transport.die(drop_in_flight=randomness is not None and randomness.random() < 0.5)

    def lose_connections(self) -> None:
        """The machine has lost power: nobody hears of it."""
        self.listeners.clear()
        for transport in list(self.transports):
            transport.vanish()


class Network:
    """All machines, and the paths between them."""

    def __init__(self, world: World, seed: str) -> None:
        self.world = world
        self.kernel = SimulatedLoop(world, "network")
        self._seed = seed
        self.machines: dict[str, Machine] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._connections: dict[tuple[str, str], int] = {}
        self.digest = 0
        """Checksum of everything that has arrived, where and when."""
        self.log: list[str] | None = None
        self.delays_of: Callable[[str, str], tuple[int, int]] = lambda _a, _b: (MILLISECOND_NS, 0)

    def machine(self, name: str) -> Machine:
        """The machine of this name, made when first asked for."""
        return self.machines.setdefault(name, Machine(self, name))

    def path(self, source: str, target: str) -> Path:
        """The way from one machine to another."""
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = Path(*self.delays_of(source, target))
        return path

    def block(self, source: str, target: str) -> None:
        """Let nothing through in this direction."""
        path = self.path(source, target)
        if not path.blocks:
            path.blocked_since_ns = self.world.now_ns
        path.blocks += 1

    def unblock(self, source: str, target: str) -> None:
        """Take a block away; what was held up goes on its way."""
        path = self.path(source, target)
        path.blocks -= 1
        if not path.blocks:
            for transport in list(self.machine(source).transports):
                if transport.outward.path is path:
                    transport.outward.release()
            for transport in list(self.machine(target).transports):
                if transport.outward.back is path:
                    transport.outward.pump()

    def connections_between(self, one: str, other: str) -> list["Transport"]:
        """The open connections between two machines, as the first one sees them."""
        return [item for item in self.machine(one).transports if item.peer_name == other]

    def note(self, what: str, where: str, data: bytes = b"") -> None:
        """Enter something that happened into the history; `data` is for who reads it."""
        entry = f"{self.world.now_ns} {where} {what}"
        self.digest = zlib.crc32(entry.encode(), self.digest)
        if self.log is not None:
            self.log.append(f"{entry} {data[:200]!r}")

    # Called by loops

    def listen(self, loop: SimulatedLoop, factory: Callable[[], asyncio.Protocol], port: int) -> "Listener":
        """Accept connections on a port, a free one if it is 0."""
        machine = loop.machine
        assert machine is not None
        if not port:
            port = machine.next_port
            machine.next_port += 1
        if port in machine.listeners:
            raise OSError(98, f"{machine.name}:{port} is in use")
        listener = Listener(loop, factory, port)
        machine.listeners[port] = listener
        return listener

    async def connect(
        self, loop: SimulatedLoop, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple["Transport", asyncio.Protocol]:
        """Connect to a port of another machine; raises OSError if nobody listens there."""
        assert loop.machine is not None
        future: asyncio.Future[tuple[Transport, asyncio.Protocol]] = loop.create_future()
        pair = (loop.machine.name, host)
        number = self._connections[pair] = self._connections.get(pair, 0) + 1
        dial = _Dial(self, loop, factory, host, port, number, future)
        dial.attempt(0)
        return await future


class _Dial:
    """One attempt to connect, as the kernels of both machines see it."""

    def __init__(
        self,
        network: Network,
        loop: SimulatedLoop,
        factory: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        number: int,
        future: "asyncio.Future[tuple[Transport, asyncio.Protocol]]",
    ) -> None:
        assert loop.machine is not None
        self._network = network
        self._loop = loop
        self._factory = factory
        self._host = host
        self._port = port
        self._future = future
        self._source = loop.machine.name
        self._key = f"{self._source}>{host}#{number}"
        self._rank = zlib.crc32(self._key.encode())
        self._randomness = random.Random(f"{network._seed}/{self._key}")
        self._kernel = network.kernel

    def attempt(self, number: int) -> None:
        """Send the first packet."""
        network = self._network
        there, back = network.path(self._source, self._host), network.path(self._host, self._source)
        if there.is_blocked or back.is_blocked or self._host not in network.machines:
            if number < len(_DIAL_AGAIN_NS):
                self._later(_DIAL_AGAIN_NS[number], self.attempt, number + 1)
            return
        self._later(self._delay_ns(there), self._reach)

    def _reach(self) -> None:
        """The first packet is there: the other kernel accepts or refuses."""
        network = self._network
        listener = network.machines[self._host].listeners.get(self._port)
        back_ns = self._delay_ns(network.path(self._host, self._source))
        if listener is None or listener.loop.life is Life.DEAD:
            step = Step(self._loop, self._refused, (), None)
        else:
            ours, theirs = make_connection(network, self._loop, listener.loop, self._key, self._randomness)
            listener.loop.world.at(
                network.world.now_ns, Step(listener.loop, listener.accept, (theirs,), None), self._rank
            )
            step = Step(self._loop, self._established, (ours,), None)
        network.world.at(network.world.now_ns + back_ns, step, self._rank)

    def _refused(self) -> None:
        if not self._future.done():
            self._future.set_exception(ConnectionRefusedError(111, f"{self._host}:{self._port} refused"))

    def _established(self, transport: "Transport") -> None:
        if self._future.done():
            transport.abort()
            return
        protocol = self._factory()
        transport.open(protocol)
        self._future.set_result((transport, protocol))

    def _delay_ns(self, path: Path) -> int:
        return path.delay_ns + path.slow_ns + int(self._randomness.random() * path.jitter_ns)

    def _later(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        world = self._network.world
        world.at(world.now_ns + delay_ns, Step(self._kernel, call, args, None), self._rank)


class Pipe:
    """One direction of a connection."""

    def __init__(self, path: Path, back: Path, key: str, randomness: random.Random) -> None:
        self.path = path
        self.back = back
        """The other direction of the way, on which acknowledgements come."""
        self.rank = zlib.crc32(key.encode())
        self.key = key
        self.sender: Transport
        self.receiver: Transport
        self._randomness = randomness
        self._unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        self._stalled: deque[bytes | None] = deque()
        """What the kernel repeats until the path is open; None for the end."""
        self.outstanding_bytes = 0
        self._last_arrival_ns = 0
        self._arrivals: deque[int] = deque()
        self._acknowledged_ns = 0
        self._held = False
        self._cut_ns: int | None = None
        """Nothing arrives after this: the sender has died."""

    def write(self, data: bytes) -> None:
        """The sender hands over bytes."""
        if self._unsent or self.outstanding_bytes >= WINDOW_BYTES:
            self._unsent.append(data)
            self.unsent_bytes += len(data)
        else:
            self._transmit(data)

    def end(self) -> None:
        """Nothing follows what has been handed over."""
        if self.is_held_up:
            self._stalled.append(None)
        else:
            self._schedule(None)

    def discard_unsent(self) -> None:
        """Forget what has not left the sender's process."""
        self._unsent.clear()
        self.unsent_bytes = 0

    def cut(self) -> None:
        """What has not arrived yet never will."""
        self._stalled.clear()
        self._cut_ns = self.sender.network.world.now_ns

    @property
    def is_held_up(self) -> bool:
        """What is sent now does not arrive before the path opens."""
        return self.path.is_blocked or self._held or bool(self._stalled)

    def hold(self) -> None:
        """Keep back what is written from now on, however open the path is, until `release`."""
        self._held = True

    def release(self) -> None:
        """The path is open again."""
        held, self._held = self._held, False
        if self._stalled:
            pause_ns = 0 if held else int(self._randomness.random() * _RETRANSMISSION_NS)
            self._last_arrival_ns = max(self._last_arrival_ns, self.sender.network.world.now_ns + pause_ns)
            stalled, self._stalled = self._stalled, deque()
            for data in stalled:
                self._schedule(data)
        self.pump()

    def consumed(self, count: int) -> None:
        """The receiver's process has read bytes."""
        self.outstanding_bytes -= count
        if self._unsent:
            self.pump()

    def pump(self) -> None:
        """Send what waits, as far as the window allows and the sender hears of it."""
        if self.back.is_blocked:
            return
        while self._unsent and self.outstanding_bytes < WINDOW_BYTES:
            data = self._unsent.popleft()
            self.unsent_bytes -= len(data)
            self._transmit(data)
        self.sender.sent()

    def acknowledgements(self) -> tuple[int, int]:
        """What the sender's kernel knows: segments not acknowledged, milliseconds since the last one was."""
        now_ns = self.sender.network.world.now_ns
        until_ns = min(now_ns, self.back.blocked_since_ns) if self.back.is_blocked else now_ns
        arrivals = self._arrivals
        while arrivals and arrivals[0] + self.back.delay_ns <= until_ns:
            self._acknowledged_ns = arrivals.popleft() + self.back.delay_ns
        waiting = len(arrivals) + len(self._stalled)
        return waiting, (now_ns - self._acknowledged_ns) // MILLISECOND_NS

    def _transmit(self, data: bytes) -> None:
        self.outstanding_bytes += len(data)
        if self.is_held_up:
            self._stalled.append(data)
        else:
            self._schedule(data)

    def _schedule(self, data: bytes | None) -> None:
        world = self.sender.network.world
        path = self.path
        delay_ns = path.delay_ns + path.slow_ns + int(self._randomness.random() * path.jitter_ns)
        when_ns = max(self._last_arrival_ns, world.now_ns + delay_ns)
        self._last_arrival_ns = when_ns
        arrivals = self._arrivals
        arrivals.append(when_ns)
        if len(arrivals) > 64:
            self.acknowledgements()
        world.at(when_ns, _Arrival(self, data, when_ns), self.rank)

    def arrive(self, data: bytes | None, when_ns: int) -> None:
        if self._cut_ns is not None and when_ns > self._cut_ns and data is not None:
            return
        self.receiver.arrived(data)


class _Arrival(Step):
    """A segment reaches the receiver's machine."""

    __slots__ = ()

    def __init__(self, pipe: Pipe, data: bytes | None, when_ns: int) -> None:
        super().__init__(pipe.receiver.loop, pipe.arrive, (data, when_ns), None)

    def orphaned(self) -> None:
        assert self._callback is not None
        self._callback(*self._args)


def make_connection(
    network: Network, dialler: SimulatedLoop, listener: SimulatedLoop, key: str, randomness: random.Random
) -> tuple["Transport", "Transport"]:
    """Both ends of a new connection."""
    assert dialler.machine is not None and listener.machine is not None
    there = network.path(dialler.machine.name, listener.machine.name)
    back = network.path(listener.machine.name, dialler.machine.name)
    outward = Pipe(there, back, f"{key}+", random.Random(randomness.getrandbits(64)))
    inward = Pipe(back, there, f"{key}-", random.Random(randomness.getrandbits(64)))
    ours = Transport(network, dialler, listener.machine.name, outward, inward)
    theirs = Transport(network, listener, dialler.machine.name, inward, outward)
    outward.sender = inward.receiver = ours
    inward.sender = outward.receiver = theirs
    return ours, theirs


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self, network: Network, loop: SimulatedLoop, peer_name: str, outward: Pipe, inward: Pipe
    ) -> None:
        super().__init__()
        assert loop.machine is not None
        self.network = network
        self.loop = loop
        self.peer_name = peer_name
        self.outward = outward
        self._inward = inward
        self._machine = loop.machine
        self._machine.transports[self] = None
        self._protocol: asyncio.Protocol | None = None
        self._received: deque[bytes | None] = deque()
        self._reading = True
        self._closing = False
        self._gone = False
        self._broken = False
        """The peer is known to be gone, or the connection was reset."""
        self._high = 64 * KIB
        self._paused = False
        self._socket = _Socket(self, loop.machine.name, 0)

    def open(self, protocol: asyncio.Protocol) -> None:
        """The process has the connection now."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._read()

    # Called by the process

    def write(self, data: Any) -> None:
        if self._closing or self._gone:
            return
        self.outward.write(data if isinstance(data, bytes) else bytes(data))
        if self.outward.unsent_bytes > self._high and not self._paused:
            self._paused = True
            assert self._protocol is not None
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.outward.unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * KIB if high is None else high

    def is_closing(self) -> bool:
        return self._closing or self._gone

    def close(self) -> None:
        if not self._closing and not self._gone:
            self._closing = True
            self._reading = False
            self._end_when_sent()

    def abort(self) -> None:
        if not self._gone:
            self._closing = True
            self.outward.discard_unsent()
            self.outward.end()
            self._lose(None)

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._closing:
            self._reading = True
            self.loop.call_soon(self._read)

    def is_reading(self) -> bool:
        return self._reading

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self._socket
        if name == "peername":
            return (self.peer_name, 1)
        if name == "sockname":
            return (self._machine.name, 1)
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    # Called by the network

    def arrived(self, data: bytes | None) -> None:
        """Bytes are in our kernel, or the news that the peer has ended the connection."""
        if self._gone:
            if data is not None:
                self.reset_peer()
            return
        self._received.append(data)
        if self._reading or data is None:
            self._read()

    def reset(self) -> None:
        """Something on the way has ended the connection, for both sides."""
        self.outward.cut()
        self._inward.cut()
        for end in (self, self.outward.receiver):
            end.network.world.at(
                end.network.world.now_ns, Step(end.loop, end.broken, (), None), end.outward.rank
            )

    def broken(self) -> None:
        """The connection has been reset."""
        if not self._gone:
            self._lose(ConnectionResetError(104, "connection reset by peer"))

    def reset_peer(self) -> None:
        """Tell a peer that still sends that nobody listens any more."""
        peer = self.outward.receiver
        # What is held up comes first; the end of the connection follows it anyway.
        if not self.outward.is_held_up:
            world = self.network.world
            world.at(
                world.now_ns + self.outward.path.delay_ns,
                Step(peer.loop, peer.broken, (), None),
                peer.outward.rank,
            )

    def sent(self) -> None:
        """Bytes have left the process."""
        if self._gone:
            return
        if self._paused and self.outward.unsent_bytes <= self._high // 4:
            self._paused = False
            assert self._protocol is not None
            self.loop.call_soon(self._protocol.resume_writing)
        self._end_when_sent()

    def die(self, *, drop_in_flight: bool) -> None:
        """The process was killed: its kernel ends the connection."""
        self._gone = True
        self._machine.transports.pop(self, None)
        self.outward.discard_unsent()
        if drop_in_flight:
            self.outward.cut()
        self.outward.end()

    def vanish(self) -> None:
        """The machine has lost power: the peer hears nothing, until the machine is back."""
        self._gone = True
        self._machine.transports.pop(self, None)
        self.outward.discard_unsent()
        self.outward.cut()

    # Details

    def _read(self) -> None:
        if self._protocol is None:
            return
        while self._received and not self._gone:
            if self._received[0] is not None and not self._reading:
                return
            data = self._received.popleft()
            if data is None:
                self._closing = True
                self.outward.discard_unsent()
                self._lose(None)
                return
            self.network.note(str(zlib.crc32(data)), self._inward.key, data)
            self._protocol.data_received(data)
            self._inward.consumed(len(data))

    def _end_when_sent(self) -> None:
        if self._closing and not self._gone and not self.outward.unsent_bytes:
            self.outward.end()
            self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        self._gone = True
        self._machine.transports.pop(self, None)
        if self._protocol is not None:
            self.loop.call_soon(self._protocol.connection_lost, error)


class _Socket:
    """What a transport's socket is asked for."""

    family = socket.AF_INET

    def __init__(self, transport: Transport | None, name: str, port: int) -> None:
        self._transport = transport
        self._name = name
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        """Where it listens, or is bound to."""
        return self._name, self._port

    def setsockopt(self, *_: object) -> None:
        """Nothing changes."""

    def getsockopt(self, level: int, option: int, length: int = 0) -> bytes:
        """TCP_INFO, as far as the failure detector reads it."""
        assert self._transport is not None and option == socket.TCP_INFO
        unacknowledged, last_ms = self._transport.outward.acknowledgements()
        return _TCP_INFO.pack(unacknowledged, last_ms)

    def fileno(self) -> int:
        """There is no file behind it: reading from it is an OSError."""
        return -1


class Listener(asyncio.Server):
    """A listening port."""

    def __init__(self, loop: SimulatedLoop, factory: Callable[[], asyncio.Protocol], port: int) -> None:
        assert loop.machine is not None
        self.loop = loop
        self._machine = loop.machine
        self._make = factory
        self._port = port
        self._listening = _Socket(None, loop.machine.name, port)

    @property
    def sockets(self) -> tuple[Any, ...]:
        return (self._listening,)

    def accept(self, transport: Transport) -> None:
        """A connection has been established."""
        if self._machine.listeners.get(self._port) is self and not transport.is_closing():
            transport.open(self._make())
        else:
            transport.abort()

    def close(self) -> None:
        if self._machine.listeners.get(self._port) is self:
            del self._machine.listeners[self._port]

    async def wait_closed(self) -> None:
        return

    def is_serving(self) -> bool:
        return self._machine.listeners.get(self._port) is self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    async def start_serving(self) -> None:
        return
