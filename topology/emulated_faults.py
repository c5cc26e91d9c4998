"""Faults of drivers whose WAN is emulated: what happens to a LAN happens to links of the ferry."""

import abc
from collections.abc import Iterable

from topology.driver import BOTH_WAYS, Driver
from topology.emulated_wan import EmulatedWan
from topology.gateway import GatewayStatistics, Way


class EmulatedFaults(Driver):
    """A driver with an emulated WAN."""

    @property
    @abc.abstractmethod
    def _wan(self) -> EmulatedWan:
        """The WAN."""

    @abc.abstractmethod
    def _site_of(self, broker: str) -> str:
        """Where a broker is."""

    @abc.abstractmethod
    def _zookeeper_site(self) -> str:
        """Where all ZooKeeper servers are."""

    async def cut(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Cut a LAN off from all other sites."""
        await self._wan.cut_site(self._lan(lan), ways)

    async def heal(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Join a LAN to all other sites again."""
        await self._wan.heal_site(self._lan(lan), ways)

    async def limit(self, lan: str, bytes_per_s: float | None, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Let each link of a LAN carry only so much in each of these directions; None: no limit."""
        await self._wan.limit_site(self._lan(lan), bytes_per_s, ways)

    async def delay(self, lan: str, delay_ms: float | None) -> None:
        """Let each link of a LAN take so long each way; None: as the topology has it."""
        await self._wan.delay_site(self._lan(lan), delay_ms)

    async def cut_zookeeper(self, broker: str) -> None:
        """Cut a broker off from ZooKeeper."""
        await self._wan.cut(*self._apart(broker, "ZooKeeper", self._zookeeper_site()))

    async def heal_zookeeper(self, broker: str) -> None:
        """Join a broker to ZooKeeper again."""
        await self._wan.heal(*self._apart(broker, "ZooKeeper", self._zookeeper_site()))

    async def cut_routers(self, one: str, other: str) -> None:
        """Cut two routing brokers off from each other."""
        await self._wan.cut(*self._apart(one, other, self._site_of(other)))

    async def heal_routers(self, one: str, other: str) -> None:
        """Join two routing brokers again."""
        await self._wan.heal(*self._apart(one, other, self._site_of(other)))

    async def wan_statistics(self, lan: str) -> GatewayStatistics:
        """What has passed between a LAN and all other sites; bytes are those of whole packets."""
        return await self._wan.site_statistics(self._lan(lan))

    async def watch_wan(self) -> None:
        """Judge the WAN by what it carries from now on."""
        await self._wan.watch()

    async def check_wan(self) -> tuple[bool, str] | None:
        """Whether every packet was carried in time since `watch_wan`, or since the start."""
        return await self._wan.check()

    def _apart(self, one: str, other: str, there: str) -> tuple[str, str]:
        here = self._site_of(one)
        if here == there:
            raise self._cannot(f"cut {one} off from {other}, both are at {here}")
        return here, there
