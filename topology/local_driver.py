"""Brokers as processes of this machine, with an embedded ZooKeeper: what process and netns testbeds share.

Drivers say where everything is: which address and arguments a broker gets, which network namespace it
and the clients of a LAN live in, and what the WAN is. Each process has a log in the run directory. No
process outlives the testbed, see `topology.launcher`.
"""

import abc
import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coordinator import EmbeddedZooKeeper
from topology.children import Child, child_environment
from topology.driver import (
    DEFAULT_SETTINGS,
    EXECUTE_TIMEOUT_S,
    START_TIMEOUT_S,
    Driver,
    DriverSettings,
    together,
)
from topology.errors import DriverError
from topology.model import Topology

DRAIN_TIMEOUT_S: Final = 20.0
"""A broker that is asked to end gives up handing over after ten seconds by itself."""


@dataclass(slots=True)
class LocalNode:
    """A broker of the testbed."""

    name: str
    role: str
    lan: str
    """Empty for routing brokers."""
    host: str
    """The address it listens on."""
    arguments: tuple[str, ...]
    child: Child | None = None
    locator: str = ""
    http: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.child is not None and self.child.is_alive


class LocalDriver(Driver):
    """A running topology whose brokers are our own processes."""

    def __init__(self, topology: Topology, settings: DriverSettings = DEFAULT_SETTINGS) -> None:
        super().__init__(topology, settings)
        self._nodes: dict[str, LocalNode] = {}
        self._zookeeper = EmbeddedZooKeeper(
            topology.zookeeper_servers,
            self.directory / "zookeeper",
            host=self._zookeeper_address(),
            force_sync=False,
        )
        self._zookeeper_threads: Executor | None = None
        """Where calls that start a server run; None: any thread."""
        self._hosts = ""
        self._helpers: list[Child] = []
        self._environment: dict[str, str] = {}
        """What all brokers and applications find in their environment besides ours."""
        self._zookeeper_killed: set[int] = set()
        self._crashed: list[str] = []
        """Brokers that had ended by themselves when they were started again."""

    # What a driver says

    @abc.abstractmethod
    def _zookeeper_address(self) -> str:
        """Where all ZooKeeper servers listen."""

    @abc.abstractmethod
    def _namespace(self, broker: str) -> Path | None:
        """The network namespace of a broker; None: the machine's."""

    @abc.abstractmethod
    def _clients_namespace(self, lan: str) -> Path | None:
        """The network namespace of a LAN's clients; None: the machine's."""

    @abc.abstractmethod
    async def _start_ground(self) -> None:
        """Start what brokers stand on: ZooKeeper and the WAN."""

    @abc.abstractmethod
    async def _stop_wan(self) -> None:
        """End the WAN; nothing uses it any more."""

    @abc.abstractmethod
    def _wan_processes(self) -> list[Child]:
        """What the WAN runs on."""

    @abc.abstractmethod
    def _plan(self) -> list[LocalNode]:
        """All brokers with their addresses and arguments, once the ground is there."""

    # Life

    async def start(self) -> None:
        """Start everything; returns when all processes serve. Raises DriverError or CoordinationError."""
        (self.directory / "topology.yaml").write_text(self.topology.text, encoding="utf-8")
        await self._start_ground()
        self._nodes = {node.name: node for node in self._plan()}
        await together(*(self.start_node(name) for name in self._nodes))

    async def stop(self) -> None:
        """End everything; returns when nothing runs any more."""
        children = [*self._helpers, *(node.child for node in self._nodes.values() if node.child is not None)]
        await asyncio.gather(*(child.stop() for child in children))
        await self._close_http()
        await asyncio.to_thread(self._zookeeper.stop)
        await self._stop_wan()

    async def collect(self) -> None:
        """Nothing to do: processes write where they are asked to."""

    # Faults and repairs

    async def start_node(self, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start a broker, perhaps again after it was killed; returns when it serves."""
        node = self._nodes[name]
        if node.is_alive:
            raise DriverError(f"{name} runs already: kill it before it is started again")
        if node.child is not None:
            if node.child.died_unasked:
                self._crashed.append(name)
            await node.child.stop()
        # A broker that comes back is found where it was.
        listen = node.locator or f"{node.host}:0"
        child = node.child = Child(
            name,
            "isthmus",
            [
                *(node.role, "--id", name, "--json"),
                *("--listen", listen, "--http", node.http or f"{node.host}:0"),
                *("--zookeeper", self._hosts_for(name), "--session-timeout-s", str(self.session_timeout_s)),
                *self.trace_arguments,
                *node.arguments,
            ],
            self.directory,
            self._namespace(name),
            self._environment,
        )
        await child.start()
        where = await child.next_event(timeout_s)
        node.locator, node.http = where["locator"], where["http"]
        self._say(f"{name} serves at {node.locator}")

    async def kill(self, name: str) -> None:
        """End a broker as a crash would, with SIGKILL; returns when it is gone."""
        await self._child(name).kill()

    def kill_nowait(self, name: str) -> None:
        """Send SIGKILL to a broker and go on."""
        self._child(name).signal(signal.SIGKILL)

    async def freeze(self, name: str) -> None:
        """Stop a broker in its tracks (SIGSTOP); its connections stay open."""
        self._child(name).signal(signal.SIGSTOP)

    async def thaw(self, name: str) -> None:
        """Let a frozen broker go on."""
        self._child(name).signal(signal.SIGCONT)

    async def drain(self, name: str) -> None:
        """Ask a broker to hand over and end (SIGTERM)."""
        await self._child(name).drain(DRAIN_TIMEOUT_S)

    async def add_router(self, name: str, host: str) -> None:
        """Start another routing broker."""
        if name in self._nodes:
            raise DriverError(f"there is a broker {name} already: give the new one another name")
        self._nodes[name] = self._place_router(name, host, len(self._nodes) + 1)
        await self.start_node(name)

    async def remove_router(self, name: str) -> None:
        """Drain a routing broker and forget it."""
        await self.drain(name)
        await self._child(name).stop()
        del self._nodes[name]

    async def zookeeper_leader(self) -> str:
        """The server that leads the ensemble."""
        for member in self._zookeeper.members:
            if member.alive and await asyncio.to_thread(self._zookeeper.leads, member.index):
                return f"zookeeper-{member.index + 1}"
        raise DriverError(f"no ZooKeeper server leads: see the logs in {self.directory / 'zookeeper'}")

    async def kill_zookeeper(self, server: str) -> None:
        """End a ZooKeeper server with SIGKILL."""
        index = self.zookeeper_servers().index(server)
        self._zookeeper_killed.add(index)
        await asyncio.to_thread(self._zookeeper.kill_member, index)

    async def start_zookeeper(self, server: str) -> None:
        """Start a killed ZooKeeper server on its data."""
        index = self.zookeeper_servers().index(server)
        starting = asyncio.get_running_loop().run_in_executor(
            self._zookeeper_threads, self._zookeeper.launch_member, index
        )
        await asyncio.shield(starting)
        self._zookeeper_killed.discard(index)

    # Programs

    async def start_load(self, lan: str) -> Child:
        """Start the publishers and subscribers of a LAN."""
        edges = [f"{node.name}={node.locator}" for node in self._nodes.values() if node.lan == lan]
        files = [str(self.directory / "topology.yaml"), lan, str(self._results(lan))]
        return await self.start_helper(
            f"load-{lan}", "topology.load", [*self.trace_arguments, *files, *edges], lan
        )

    async def load_results(self, lan: str) -> dict[str, Any]:
        """What the subscribers of a LAN recorded."""
        content = json.loads(self._results(lan).read_text())
        assert isinstance(content, dict)
        return content

    async def start_helper(self, name: str, module: str, arguments: list[str], lan: str) -> Child:
        """Start another process of ours, among the clients of a LAN, that ends with the testbed."""
        place = self._clients_namespace(lan)
        child = Child(name, module, arguments, self.directory, place, self._environment)
        self._helpers.append(child)
        await child.start()
        return child

    async def execute(
        self, place: str, *command: str, timeout_s: float = EXECUTE_TIMEOUT_S
    ) -> tuple[int, str]:
        """Run a program where a broker is, or where the clients of a LAN are; gives its status and output."""
        self._check_place(place)
        namespace = self._namespace(place) if place in self._nodes else self._clients_namespace(place)
        where = ("--namespace", str(namespace)) if namespace is not None else ()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "topology.launcher", str(os.getpid()), *where, "--command", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self.directory,
            env=child_environment(),
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            raise DriverError(f"{' '.join(command)} at {place} took longer than {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace")

    # Looking

    @property
    def nodes(self) -> Mapping[str, LocalNode]:
        """All brokers by name."""
        return self._nodes

    @property
    def zookeeper_hosts(self) -> str:
        """Where ZooKeeper serves."""
        return self._hosts

    def broker_pids(self) -> dict[str, int]:
        """Process ids of all brokers that run."""
        return {n.name: n.child.pid for n in self._nodes.values() if n.child is not None and n.is_alive}

    def died_unasked(self) -> list[str]:
        """Processes that ended although nobody made them."""
        children = [*self._helpers, *self._wan_processes()]
        children += [node.child for node in self._nodes.values() if node.child is not None]
        dead = self._crashed + [child.name for child in children if child.died_unasked]
        members = [m for m in self._zookeeper.members if m.index not in self._zookeeper_killed]
        dead += [f"zookeeper-{m.index + 1}" for m in members if not m.alive]
        return dead

    # Details

    @property
    def trace_arguments(self) -> tuple[str, ...]:
        """What makes a process of the testbed trace."""
        if self.trace is None:
            return ()
        return "--trace-dir", str(self.trace.folder), "--trace-sample", str(self.trace.sampling)

    def _hosts_for(self, broker: str) -> str:
        """Where this broker finds ZooKeeper."""
        return self._hosts

    def _place_router(self, name: str, host: str, number: int) -> LocalNode:
        """Where a routing broker goes that the topology does not have."""
        raise self._cannot(f"add {name} on {host}")

    def _results(self, lan: str) -> Path:
        return self.directory / f"results-{lan}.json"

    def pid_of(self, name: str) -> int:
        """The process of a broker."""
        return self._child(name).pid

    def _child(self, name: str) -> Child:
        node = self._nodes.get(name)
        if node is None or node.child is None:
            raise self._unknown(name)
        return node.child

    async def _start_zookeeper(self) -> None:
        starting = asyncio.get_running_loop().run_in_executor(
            self._zookeeper_threads, self._zookeeper.start, START_TIMEOUT_S
        )
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: let it come to its end, so that `stop` finds what it started.
            await asyncio.wait({starting})
            raise
        self._hosts = self._zookeeper.hosts
        self._say(f"ZooKeeper serves at {self._hosts}")
