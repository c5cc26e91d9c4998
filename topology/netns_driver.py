"""Runs a topology in network namespaces: a namespace per broker, one per LAN, an emulated WAN between.

Where who is: `topology.network`. What the WAN does to packets: `topology.lane`. Brokers, clients and
ZooKeeper are the same processes as in the process testbed, in other places. ZooKeeper is in the cloud,
so edges reach it across the WAN too. Needs root.

Before any broker starts, the round trip of every link is measured, and a WAN that is not what was
asked for ends the start. At the end `check_wan` says whether packets were carried in time; its
figures are left in `wan-statistics.json` beside the logs.
"""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp

from overlay.limits import (
    HEARTBEAT_INTERVAL_NS,
    HEARTBEAT_SILENCE_INTERVALS,
    HEARTBEAT_SILENCE_NS,
    MILLISECOND_NS,
)
from runtime.tracing import TraceSettings
from topology.calibration import Calibration
from topology.children import Child
from topology.driver import BOTH_WAYS, SESSION_TIMEOUT_S, Say, ignore
from topology.emulation import EmulatedNetwork
from topology.errors import DriverError
from topology.gateway import GatewayStatistics, Way
from topology.local_driver import LocalDriver, LocalNode
from topology.model import Topology
from topology.namespaces import enter, open_socket
from topology.network import lan_host, read_network


class NetnsDriver(LocalDriver):
    """A running topology in namespaces. Use `running(topology, NetnsDriver)`."""

    def __init__(
        self,
        topology: Topology,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        directory: Path | None = None,
        say: Say = ignore,
        trace: TraceSettings | None = None,
    ) -> None:
        self._network_plan = read_network(topology)
        super().__init__(
            topology, session_timeout_s=session_timeout_s, directory=directory, say=say, trace=trace
        )
        # What ZooKeeper says is no frame of ours.
        self.network = EmulatedNetwork(
            self._network_plan, self.directory, untapped=[self._zookeeper_address()]
        )
        self.calibration: Calibration | None = None
        """Of the round trips, from the start."""

    # The WAN

    async def cut(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Cut a LAN off from all other sites."""
        for source, target in self._lanes(lan, ways):
            await self.network.cut(source, target, one_way=True)

    async def heal(self, lan: str, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Join a LAN to all other sites again."""
        for source, target in self._lanes(lan, ways):
            await self.network.heal(source, target, one_way=True)

    async def limit(self, lan: str, bytes_per_s: float | None, ways: Iterable[Way] = BOTH_WAYS) -> None:
        """Let each link of a LAN carry only so much in each of these directions; None: no limit."""
        rate_mbit = None if bytes_per_s is None else bytes_per_s * 8 / 1e6
        for source, target in self._lanes(lan, ways):
            await self.network.change(source, target, one_way=True, rate_mbit=rate_mbit)

    async def delay(self, lan: str, delay_ms: float | None) -> None:
        """Let each link of a LAN take so long each way; None: as the topology has it."""
        lanes = set(self._lanes(lan, BOTH_WAYS))
        for link in self.network.plan.links:
            if (link.source, link.target) in lanes:
                changed_ms = link.conditions.delay_ms if delay_ms is None else delay_ms
                await self.network.change(link.source, link.target, one_way=True, delay_ms=changed_ms)

    async def cut_zookeeper(self, broker: str) -> None:
        """Cut a broker off from ZooKeeper."""
        await self.network.cut(*self._sites(broker, self.network.plan.zookeeper))

    async def heal_zookeeper(self, broker: str) -> None:
        """Join a broker to ZooKeeper again."""
        await self.network.heal(*self._sites(broker, self.network.plan.zookeeper))

    async def cut_routers(self, one: str, other: str) -> None:
        """Cut two routing brokers off from each other."""
        await self.network.cut(*self._sites(one, other))

    async def heal_routers(self, one: str, other: str) -> None:
        """Join two routing brokers again."""
        await self.network.heal(*self._sites(one, other))

    def _sites(self, one: str, other: str) -> tuple[str, str]:
        sites = self.network.plan.host(one).site, self.network.plan.host(other).site
        if sites[0] == sites[1]:
            raise self._cannot(f"cut {one} off from {other}, both are at {sites[0]}")
        return sites

    async def wan_statistics(self, lan: str) -> GatewayStatistics:
        """What has passed between a LAN and all other sites; bytes are those of whole packets."""
        found = await self.network.statistics()
        out = [lane for lane in found["lanes"] if lane["from"] == lan]
        back = [lane for lane in found["lanes"] if lane["to"] == lan]
        return GatewayStatistics(
            connections=sum(lane["connections"] for lane in out),
            bytes_out=sum(lane["bytes"] for lane in out),
            bytes_back=sum(lane["bytes"] for lane in back),
            messages_out=_messages(out),
            messages_back=_messages(back),
            unreadable=sum(lane["unreadable"] for lane in (*out, *back)),
            late_max_ms=found["late_max_ms"],
        )

    async def check_wan(self) -> tuple[bool, str] | None:
        """Whether every packet so far was carried in time."""
        found = await self.network.statistics()
        if found["invalid"] is not None:
            return False, found["invalid"]
        return True, (
            f"{found['forwarded']} packets were carried, 99 % at most {found['late_p99_ms']:g} ms late, "
            f"the latest {found['late_max_ms']:g} ms"
        )

    # Where everything is

    def _zookeeper_address(self) -> str:
        plan = self._network_plan
        return plan.host(plan.zookeeper).address

    def _connector(self) -> aiohttp.TCPConnector:
        # A broker's HTTP is reached from its own namespace: it is local there, whatever the WAN does.
        def open_inside(info: aiohttp.AddrInfoType) -> socket.socket:
            family, kind, protocol, _, address = info
            host = self.network.plan.at(str(address[0]))
            return open_socket(self.network.path(host.name), family, kind, protocol)

        return aiohttp.TCPConnector(family=socket.AF_INET, socket_factory=open_inside)

    def _namespace(self, broker: str) -> Path | None:
        return self.network.path(broker)

    def _clients_namespace(self, lan: str) -> Path | None:
        return self.network.path(lan_host(lan))

    async def _start_ground(self) -> None:
        await self.network.start()
        for run in self.network.swept:
            self._say(f"removed what the killed testbed {run} had left")
        self._say(
            f"{len(self.network.plan.hosts)} namespaces are joined, see ip netns list; "
            f"their names begin with {self.network.namespaces.name('')}"
        )
        await self._calibrate()
        # A thread in ZooKeeper's namespace: what it starts, and the sockets it opens, are there.
        self._zookeeper_threads = ThreadPoolExecutor(
            1, initializer=enter, initargs=(self.network.path(self.network.plan.zookeeper),)
        )
        await self._start_zookeeper()

    async def _calibrate(self) -> None:
        # Loss and rate take minutes to measure: `EmulatedNetwork.calibrate` does it when asked.
        self.calibration = await self.network.calibrate(packets=0)
        if not self.calibration.ok:
            raise DriverError(
                f"the WAN is not what was asked for: {'; '.join(self.calibration.failures())}; "
                "the machine may be too busy"
            )
        measured = [
            f"{item.source} - {item.target} {item.measured:.1f} ms" for item in self.calibration.measurements
        ]
        self._say(f"round trips: {', '.join(measured)}")

    async def _stop_wan(self) -> None:
        if self._zookeeper_threads is not None:
            await asyncio.to_thread(self._zookeeper_threads.shutdown)
        if self.network.ferry is not None and self.network.ferry.is_alive:
            # Nothing to write where the run was cancelled before the ferry served.
            with contextlib.suppress(DriverError):
                found = await self.network.statistics()
                (self.directory / "wan-statistics.json").write_text(json.dumps(found, indent=1))
        await self.network.stop()

    def _wan_processes(self) -> list[Child]:
        return [self.network.ferry] if self.network.ferry is not None else []

    def _plan(self) -> list[LocalNode]:
        plan = self.network.plan
        nodes = []
        for router in self.topology.routers:
            arguments = ("--insecure", *self._patience(router.name), "--host-label", router.host)
            address = plan.host(router.name).address
            nodes.append(LocalNode(router.name, "router", "", address, arguments))
        for lan in self.topology.lans:
            for edge in lan.edges:
                arguments = ("--insecure", *self._patience(edge), "--lan", lan.name)
                nodes.append(LocalNode(edge, "edge", lan.name, plan.host(edge).address, arguments))
        return nodes

    def _patience(self, broker: str) -> tuple[str, ...]:
        """How much silence a broker has to bear, as far away as others are from it.

        Brokers measure the round trip and adapt, but on a long link the first answer comes only after
        the silence that they bear by default.
        """
        plan = self.network.plan
        others = {host.name for host in plan.hosts if not host.is_switch}
        here = plan.host(broker).site
        round_trip_ms = max(plan.round_trip_ms(here, plan.host(other).site) for other in others)
        default_ms = HEARTBEAT_SILENCE_NS / MILLISECOND_NS
        if round_trip_ms <= default_ms / 2:
            return ()
        interval_ms = HEARTBEAT_INTERVAL_NS / MILLISECOND_NS
        silence_ms = max(default_ms, 2 * round_trip_ms + HEARTBEAT_SILENCE_INTERVALS * interval_ms)
        return ("--silence-ms", f"{silence_ms:g}", "--failover-ms", f"{silence_ms:g}")

    def _lanes(self, lan: str, ways: Iterable[Way]) -> list[tuple[str, str]]:
        wanted = set(ways)
        lanes = [
            (link.source, link.target)
            for link in self.network.plan.links
            if (link.source == lan and Way.OUT in wanted) or (link.target == lan and Way.BACK in wanted)
        ]
        if not lanes:
            known = ", ".join(item.name for item in self.topology.lans)
            raise DriverError(f"there is no LAN {lan}: use one of {known}")
        return lanes


def _messages(lanes: list[dict[str, Any]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for lane in lanes:
        total.update(lane["messages"])
    return dict(total)
