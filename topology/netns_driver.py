"""Runs a topology in network namespaces: a namespace per broker, one per LAN, an emulated WAN between.

Where who is: `topology.network`. What the WAN does to packets: `topology.lane`. Brokers, clients and
ZooKeeper are the same processes as in the process testbed, in other places. ZooKeeper is in the cloud,
so edges reach it across the WAN too. Needs root.

Before any broker starts, the round trip of every link is measured, and a WAN that is not what was
asked for ends the start. At the end `check_wan` says whether packets were carried in time; its
figures are left in `wan-statistics.json` beside the logs.
"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp

from topology.calibration import Calibration
from topology.children import Child
from topology.driver import DEFAULT_SETTINGS, DriverSettings
from topology.emulated_faults import EmulatedFaults
from topology.emulated_wan import EmulatedWan
from topology.emulation import EmulatedNetwork
from topology.errors import DriverError
from topology.local_driver import LocalDriver, LocalNode
from topology.model import Topology
from topology.namespaces import enter, open_socket
from topology.network import lan_host, read_network


class NetnsDriver(EmulatedFaults, LocalDriver):
    """A running topology in namespaces. Use `running(topology, NetnsDriver)`."""

    def __init__(self, topology: Topology, settings: DriverSettings = DEFAULT_SETTINGS) -> None:
        self._network_plan = read_network(topology)
        super().__init__(topology, settings)
        # What ZooKeeper says is no frame of ours.
        self.network = EmulatedNetwork(
            self._network_plan, self.directory, untapped=[self._zookeeper_address()], wan=settings.wan
        )
        self.calibration: Calibration | None = None
        """Of the round trips, from the start."""

    # Where everything is

    @property
    def _wan(self) -> EmulatedWan:
        return self.network

    def _site_of(self, broker: str) -> str:
        return self.network.plan.host(broker).site

    def _zookeeper_site(self) -> str:
        return self._site_of(self.network.plan.zookeeper)

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
        await self.network.stop()

    def _wan_processes(self) -> list[Child]:
        return [self.network.process] if self.network.process is not None else []

    def _plan(self) -> list[LocalNode]:
        plan = self.network.plan
        nodes = []
        for router in self.topology.routers:
            arguments = ("--insecure", "--host-label", router.host)
            address = plan.host(router.name).address
            nodes.append(LocalNode(router.name, "router", "", address, arguments))
        for lan in self.topology.lans:
            for edge in lan.edges:
                arguments = ("--insecure", "--lan", lan.name)
                nodes.append(LocalNode(edge, "edge", lan.name, plan.host(edge).address, arguments))
        return nodes
