"""The ends of simulated connections, as asyncio's code and ours see them: transports, sockets, listeners."""

import asyncio
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from overlay.limits import KIB
from simulation.pipes import Pipe
from simulation.schedule import Step
from simulation.world import SimulatedLoop

if TYPE_CHECKING:
    from simulation.network import Network

_TCP_INFO: Final = struct.Struct("=24xI28xI")


def make_connection(
    network: "Network", dialler: SimulatedLoop, listener: SimulatedLoop, key: str, randomness: random.Random
) -> tuple["Transport", "Transport"]:
    """Both ends of a new connection."""
    assert dialler.machine is not None and listener.machine is not None
    there = network.path(dialler.machine.name, listener.machine.name)
    back = network.path(listener.machine.name, dialler.machine.name)
    world = network.world
    outward = Pipe(world, there, back, f"{key}+", random.Random(randomness.getrandbits(64)), listener.actor)
    inward = Pipe(world, back, there, f"{key}-", random.Random(randomness.getrandbits(64)), dialler.actor)
    ours = Transport(network, dialler, listener.machine.name, outward, inward)
    theirs = Transport(network, listener, dialler.machine.name, inward, outward)
    outward.sender = inward.receiver = ours
    inward.sender = outward.receiver = theirs
    return ours, theirs


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self, network: "Network", loop: SimulatedLoop, peer_name: str, outward: Pipe, inward: Pipe
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
        if data is not None and self._reading and not self._received and self._protocol is not None:
            self._take(data)
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
                end.network.world.now_ns, Step(end.loop.actor, end.broken, (), None), end.outward.rank
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
                Step(peer.loop.actor, peer.broken, (), None),
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
            self._take(data)

    def _take(self, data: bytes) -> None:
        assert self._protocol is not None
        self._inward.note(data)
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
