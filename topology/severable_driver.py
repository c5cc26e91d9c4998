"""The process testbed for drills: the lines inside the cloud can be cut too, and clocks be shifted.

Every broker reaches ZooKeeper, and every routing broker the others, through `topology.switchboard`. A
LAN that is cut off has no ZooKeeper either, as behind a real WAN link.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Final

from topology.children import Child
from topology.driver import BOTH_WAYS, DEFAULT_SETTINGS, START_TIMEOUT_S, DriverSettings
from topology.errors import DriverError
from topology.gateway import Way
from topology.local_driver import LocalNode
from topology.model import Topology
from topology.process_driver import COMMAND_TIMEOUT_S, ProcessDriver
from topology.wall_clock import WallClock

SWITCHBOARD_ADDRESS: Final = "127.0.0.1"
_CLOCK_NEAR_S: Final = 30.0
"""A busy machine may take its time to answer; a shift is much longer."""


class SeverableDriver(ProcessDriver):
    """A running topology on loopback with all its lines in reach."""

    def __init__(self, topology: Topology, settings: DriverSettings = DEFAULT_SETTINGS) -> None:
        super().__init__(topology, settings)
        self._board: Child | None = None
        self._asking = asyncio.Lock()
        self._zookeeper_lines: dict[str, list[str]] = {}
        """By broker, where each ZooKeeper server is for it."""

    # Faults

    async def cut(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Cut a LAN off from the cloud, ZooKeeper included."""
        chosen = list(ways)
        await super().cut(lan, chosen)
        for edge in self.topology.lan(lan).edges:
            await self._zookeeper_of(edge, "cut", chosen)

    async def heal(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Join a LAN to the cloud again."""
        chosen = list(ways)
        await super().heal(lan, chosen)
        for edge in self.topology.lan(lan).edges:
            await self._zookeeper_of(edge, "heal", chosen)

    async def cut_zookeeper(self, broker: str) -> None:
        """Cut a broker off from ZooKeeper."""
        await self._zookeeper_of(broker, "cut", BOTH_WAYS)

    async def heal_zookeeper(self, broker: str) -> None:
        """Join a broker to ZooKeeper again."""
        await self._zookeeper_of(broker, "heal", BOTH_WAYS)

    async def cut_routers(self, one: str, other: str) -> None:
        """Cut two routing brokers off from each other."""
        await self._between(one, other, "cut")

    async def heal_routers(self, one: str, other: str) -> None:
        """Join two routing brokers again."""
        await self._between(one, other, "heal")

    # Lines

    async def start_node(self, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start a broker; the first time it gets its lines."""
        if name not in self._zookeeper_lines:
            await self._open_lines(self._nodes[name])
        await super().start_node(name, timeout_s)

    async def _open_lines(self, node: LocalNode) -> None:
        opened = [
            await self._ask("open", f"{node.name} {server}", target=where)
            for server, where in zip(self.zookeeper_servers(), self._hosts.split(","), strict=True)
        ]
        self._zookeeper_lines[node.name] = [answer["locator"] for answer in opened]
        if node.role == "router":
            proxy = await self._ask("open", node.name)
            node.arguments += ("--proxy", proxy["locator"])

    async def _zookeeper_of(self, broker: str, command: str, ways: Iterable[Way]) -> None:
        for server in self.zookeeper_servers():
            await self._ask(command, f"{broker} {server}", ways=list(ways))

    async def _between(self, one: str, other: str, command: str) -> None:
        # Either may have dialled the other.
        await self._ask(command, one, target=self._nodes[other].locator)
        await self._ask(command, other, target=self._nodes[one].locator)

    async def _ask(self, command: str, line: str, **fields: Any) -> dict[str, Any]:
        assert self._board is not None
        async with self._asking:
            return await self._board.ask(command, COMMAND_TIMEOUT_S, line=line, **fields)

    def _hosts_for(self, broker: str) -> str:
        return ",".join(self._zookeeper_lines[broker])

    async def _start_ground(self) -> None:
        await super()._start_ground()
        self._board = Child("switchboard", "topology.switchboard", [SWITCHBOARD_ADDRESS], self.directory)
        await self._board.start()

    async def _stop_wan(self) -> None:
        await super()._stop_wan()
        if self._board is not None:
            await self._board.stop()

    def _wan_processes(self) -> list[Child]:
        return [*super()._wan_processes(), *([self._board] if self._board is not None else [])]


class ShiftableDriver(SeverableDriver):
    """The same with a wall clock that can be shifted for all brokers and applications; needs cc."""

    _clock: WallClock | None = None

    async def shift_wall_clock(self, seconds: float) -> None:
        """Let the wall clock of all brokers and applications be ahead of the machine's by so much."""
        assert self._clock is not None
        self._clock.shift(seconds)
        for name, node in self.nodes.items():
            if node.is_alive:
                ahead_s = await self.time_of_day_s(name) - time.time()
                if abs(ahead_s - seconds) > _CLOCK_NEAR_S:
                    raise DriverError(
                        f"{name} is {ahead_s:.0f} s ahead of the machine's clock, not {seconds:.0f}"
                    )

    async def _start_ground(self) -> None:
        self._clock = await WallClock.make(self.directory)
        self._environment |= self._clock.environment
        await super()._start_ground()
