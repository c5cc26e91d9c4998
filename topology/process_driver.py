"""Runs a topology as processes on this machine: ZooKeeper, gateways, brokers, all on loopback.

Every LAN has an address range of its own, and so has the cloud:

    127.<lan>.0.1    gateway of LAN number <lan>, the only way from its edges to the cloud
    127.<lan>.0.10   and on: its edge brokers           239.255.75.<lan> is its discovery group
    127.100.<n>.1    routing broker number <n>
    127.0.0.1        ZooKeeper

Edges reach routing brokers through the gateway, which delays, limits the rate and can be cut;
ZooKeeper is reached directly. Gateways relay TCP and see no packets, so jitter and loss are left out,
and so are links to single hosts and between LANs: `unemulated` names what a run leaves out.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from topology.children import Child
from topology.driver import BOTH_WAYS, DEFAULT_SETTINGS, START_TIMEOUT_S, DriverSettings, together
from topology.errors import DriverError
from topology.gateway import GatewayStatistics, Way
from topology.local_driver import LocalDriver, LocalNode
from topology.model import Topology
from topology.wan_kind import WanKind

COMMAND_TIMEOUT_S: Final = 5.0

MBIT_BYTES: Final = 125_000
"""A megabit in bytes."""


class ProcessDriver(LocalDriver):
    """A running topology on loopback. Use `running(topology, ProcessDriver)`."""

    def __init__(self, topology: Topology, settings: DriverSettings = DEFAULT_SETTINGS) -> None:
        if settings.wan is not WanKind.AUTO:
            raise DriverError(
                f"the process testbed has relays and no packets for {settings.wan}: use netns or compose"
            )
        super().__init__(topology, settings)
        self._gateways: dict[str, Child] = {}
        self._proxies: dict[str, str] = {}

    # The WAN

    async def cut(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Cut a LAN off from the cloud."""
        await self._gateways[self._lan(lan)].ask("cut", COMMAND_TIMEOUT_S, ways=list(ways))

    async def heal(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Join a LAN to the cloud again."""
        await self._gateways[self._lan(lan)].ask("heal", COMMAND_TIMEOUT_S, ways=list(ways))

    async def limit(self, lan: str, bytes_per_s: float | None, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Let a LAN's link carry only so much in each of these directions; None: no limit."""
        await self._gateways[self._lan(lan)].ask(
            "rate", COMMAND_TIMEOUT_S, bytes_per_s=bytes_per_s, ways=list(ways)
        )

    async def delay(self, lan: str, delay_ms: float | None) -> None:
        """Let a LAN's link to the cloud take so long each way; None: as the topology has it."""
        ways = self.topology.lan(lan).wan.ways
        out_ms = ways.out.delay_ms if delay_ms is None else delay_ms
        back_ms = ways.back.delay_ms if delay_ms is None else delay_ms
        await self._gateways[lan].ask("delay", COMMAND_TIMEOUT_S, delay_ms=out_ms, back_delay_ms=back_ms)

    async def wan_statistics(self, lan: str) -> GatewayStatistics:
        """What has passed between a LAN and the cloud."""
        answer = await self._gateways[self._lan(lan)].ask("statistics", COMMAND_TIMEOUT_S)
        answer.pop("event")
        return GatewayStatistics(**answer)

    async def watch_wan(self) -> None:
        """Nothing: delays on loopback are not watched."""

    async def check_wan(self) -> tuple[bool, str] | None:
        """None: delays on loopback are not watched."""
        return None

    # Where everything is

    def _zookeeper_address(self) -> str:
        return "127.0.0.1"

    def _namespace(self, broker: str) -> Path | None:
        return None

    def _clients_namespace(self, lan: str) -> Path | None:
        return None

    async def _start_ground(self) -> None:
        """Start what brokers stand on: ZooKeeper and the WAN."""
        if left_out := unemulated(self.topology):
            self._say(f"left out, because this testbed has no packets to lose: {'; '.join(left_out)}")
        await together(self._start_zookeeper(), *(self.start_gateway(lan.name) for lan in self.topology.lans))

    async def _stop_wan(self) -> None:
        await asyncio.gather(*(gateway.stop() for gateway in self._gateways.values()))

    def _wan_processes(self) -> list[Child]:
        return list(self._gateways.values())

    async def start_gateway(self, lan: str) -> None:
        """Start the gateway of a LAN with the conditions of its link; returns when it serves."""
        number = 1 + [item.name for item in self.topology.lans].index(lan)
        link = self.topology.lan(lan).wan
        ways = link.ways
        child = self._gateways[lan] = Child(
            f"gateway-{lan}",
            "topology.gateway",
            [
                f"127.{number}.0.1",
                *("--delay-ms", str(ways.out.delay_ms), "--back-delay-ms", str(ways.back.delay_ms)),
            ],
            self.directory,
        )
        await child.start()
        self._proxies[lan] = (await child.wait_for("serving", START_TIMEOUT_S))["locator"]
        for way, conditions in ((Way.OUT, ways.out), (Way.BACK, ways.back)):
            if conditions.rate_mbit is not None:
                await self.limit(lan, conditions.rate_mbit * MBIT_BYTES, [way])
        self._say(f"gateway of {lan} serves at {self._proxies[lan]}, {link.delay_ms:g} ms to the cloud")

    def _plan(self) -> list[LocalNode]:
        nodes = []
        for number, router in enumerate(self.topology.routers, 1):
            nodes.append(self._place_router(router.name, router.host, number))
        for number, lan in enumerate(self.topology.lans, 1):
            arguments = (
                *("--lan", lan.name, "--proxy", self._proxies[lan.name]),
                *("--discovery-group", f"239.255.75.{number}"),
            )
            nodes += [
                LocalNode(edge, "edge", lan.name, f"127.{number}.0.{10 + index}", arguments)
                for index, edge in enumerate(lan.edges)
            ]
        return nodes

    def _place_router(self, name: str, host: str, number: int) -> LocalNode:
        return LocalNode(name, "router", "", f"127.100.{number}.1", ("--host-label", host))


def unemulated(topology: Topology) -> list[str]:
    """What the topology says about its links and this testbed leaves out, for people."""
    left_out = []
    for link in (lan.wan for lan in topology.lans):
        both = (link.ways.out, link.ways.back)
        names = [name for name in ("jitter_ms", "loss") if any(getattr(one, name) for one in both)]
        if names:
            left_out.append(f"{' and '.join(names)} of {link.name}")
    if topology.links:
        left_out.append(f"{len(topology.links)} links to single hosts or between LANs")
    if not topology.cloud.is_perfect:
        left_out.append("the conditions between hosts of the cloud")
    return left_out
