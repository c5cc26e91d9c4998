"""The ends of simulated connections, as asyncio's code and ours see them: transports, sockets, listeners."""

import asyncio
import random
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from simulation.pipes import End, Pipe
from simulation.world import SimulatedLoop

if TYPE_CHECKING:
    from simulation.network import Network

_TCP_INFO: Final = struct.Struct("=24xI28xI")


def make_connection(
    network: "Network", dialler: SimulatedLoop, listener: SimulatedLoop, key: str, randomness: random.Random
) -> tuple["Transport", "Transport"]:
    """Both ends of a new connection."""
    here, there = dialler.machine, listener.machine
    assert here is not None and there is not None
    out, back = network.path(here.name, there.name), network.path(there.name, here.name)
    world = network.world
    outward = Pipe(world, out, back, f"{key}+", random.Random(randomness.getrandbits(64)), listener.actor)
    inward = Pipe(world, back, out, f"{key}-", random.Random(randomness.getrandbits(64)), dialler.actor)
    ours = End(world, dialler.actor, there.name, outward, inward, here.ends)
    theirs = End(world, listener.actor, here.name, inward, outward, there.ends)
    return Transport(here.name, ours), Transport(there.name, theirs)


class Transport(asyncio.Transport):
    """One end of a connection, as asyncio's code expects it."""

    def __init__(self, name: str, end: End) -> None:
        super().__init__()
        self._name = name
        self._end = end
        self._protocol: asyncio.Protocol | None = None
        self._socket = _Socket(end, name, 0)
        # Called with every segment, hence without a detour.
        self.write = end.write  # type: ignore[method-assign]
        self.get_write_buffer_size = end.unsent_bytes  # type: ignore[method-assign]

    def open(self, protocol: asyncio.Protocol) -> None:
        """The process has the connection now."""
        self._protocol = protocol
        self._end.open(protocol, self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._end.limit_unsent(high)

    def is_closing(self) -> bool:
        return self._end.is_closing()

    def close(self) -> None:
        self._end.close()

    def abort(self) -> None:
        self._end.abort()

    def pause_reading(self) -> None:
        self._end.pause_reading()

    def resume_reading(self) -> None:
        self._end.resume_reading()

    def is_reading(self) -> bool:
        return self._end.is_reading

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self._socket
        if name == "peername":
            return (self._end.peer_name, 1)
        if name == "sockname":
            return (self._name, 1)
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol
        self._end.change_protocol(protocol)


class _Socket:
    """What a transport's socket is asked for."""

    family = socket.AF_INET

    def __init__(self, end: End | None, name: str, port: int) -> None:
        self._end = end
        self._name = name
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        """Where it listens, or is bound to."""
        return self._name, self._port

    def setsockopt(self, *_: object) -> None:
        """Nothing changes."""

    def getsockopt(self, level: int, option: int, length: int = 0) -> bytes:
        """TCP_INFO, as far as the failure detector reads it."""
        assert self._end is not None and option == socket.TCP_INFO
        unacknowledged, last_ms = self._end.outward.acknowledgements()
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
