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
import zlib
from collections.abc import Callable
from typing import Any, Final

from overlay.limits import MILLISECOND_NS, SECOND_NS
from simulation.pipes import End, Path
from simulation.schedule import Life, Step, World
from simulation.transports import Listener, Transport, make_connection
from simulation.world import SimulatedLoop

_DIAL_AGAIN_NS: Final = (SECOND_NS, 2 * SECOND_NS, 4 * SECOND_NS, 8 * SECOND_NS)
"""When a connection attempt is repeated whose first packet was lost."""
_FIRST_PORT: Final = 40_000


class Machine:
    """Where one process runs: an address, listening ports, connections."""

    def __init__(self, network: "Network", name: str) -> None:
        self.network = network
        self.name = name
        self.listeners: dict[int, Listener] = {}
        self.ends: dict[End, None] = {}
        """Of its connections."""
        self.next_port = _FIRST_PORT

    def kill_connections(self, randomness: random.Random | None) -> None:
        """The process has been killed: its kernel ends its connections.

        What they hold is lost or not, as chance has it; without chance it is not.
        """
        self.listeners.clear()
        for end in list(self.ends):
            end.die(drop_in_flight=randomness is not None and randomness.random() < 0.5)

    def lose_connections(self) -> None:
        """The machine has lost power: nobody hears of it."""
        self.listeners.clear()
        for end in list(self.ends):
            end.vanish()


class Network:
    """All machines, and the paths between them."""

    def __init__(self, world: World, seed: str) -> None:
        self.world = world
        self.kernel = SimulatedLoop(world, "network")
        self._seed = seed
        self.machines: dict[str, Machine] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._connections: dict[tuple[str, str], int] = {}
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
            for end in list(self.machine(source).ends):
                if end.outward.path is path:
                    end.outward.release()
            for end in list(self.machine(target).ends):
                if end.outward.back is path:
                    end.outward.pump()

    def connections_between(self, one: str, other: str) -> list[End]:
        """The open connections between two machines, as the first one sees them."""
        return [end for end in self.machine(one).ends if end.peer_name == other]

    # Called by loops

    def listen(self, loop: SimulatedLoop, factory: Callable[[], asyncio.Protocol], port: int) -> Listener:
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
    ) -> tuple[Transport, asyncio.Protocol]:
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
        future: asyncio.Future[tuple[Transport, asyncio.Protocol]],
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
        self._kernel = network.kernel.actor

    def attempt(self, number: int) -> None:
        """Send the first packet."""
        network = self._network
        there, back = network.path(self._source, self._host), network.path(self._host, self._source)
        if there.is_blocked or back.is_blocked or self._host not in network.machines:
            if number < len(_DIAL_AGAIN_NS):
                self._later(_DIAL_AGAIN_NS[number], self.attempt, number + 1)
            return
        self._later(there.draw_delay_ns(self._randomness), self._reach)

    def _reach(self) -> None:
        """The first packet is there: the other kernel accepts or refuses."""
        network = self._network
        listener = network.machines[self._host].listeners.get(self._port)
        back_ns = network.path(self._host, self._source).draw_delay_ns(self._randomness)
        if listener is None or listener.loop.life is Life.DEAD:
            step = Step(self._loop.actor, self._refused, (), None)
        else:
            ours, theirs = make_connection(network, self._loop, listener.loop, self._key, self._randomness)
            listener.loop.world.at(
                network.world.now_ns, Step(listener.loop.actor, listener.accept, (theirs,), None), self._rank
            )
            step = Step(self._loop.actor, self._established, (ours,), None)
        network.world.at(network.world.now_ns + back_ns, step, self._rank)

    def _refused(self) -> None:
        if not self._future.done():
            self._future.set_exception(ConnectionRefusedError(111, f"{self._host}:{self._port} refused"))

    def _established(self, transport: Transport) -> None:
        if self._future.done():
            transport.abort()
            return
        protocol = self._factory()
        transport.open(protocol)
        self._future.set_result((transport, protocol))

    def _later(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        world = self._network.world
        world.at(world.now_ns + delay_ns, Step(self._kernel, call, args, None), self._rank)
