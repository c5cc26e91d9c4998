"""Runs a topology as containers of a compose file, on the Docker engine of this machine.

The file is the one that `isthmus topology compose` makes, with the topology beside it; the compose tool
starts it, the engine is asked for everything else. Containers are killed, paused and taken off networks
by the engine. Applications are the clients' containers of the file: we start them and hold their standard
input and output.

**The WAN.** Containers share a bridge, which neither delays nor loses. So the ferry of the netns testbed
(`topology.ferry`) joins in: every broker and ZooKeeper server gets a TUN device in its container's
network namespace, and a route over it to each host of another site. Hosts of one site reach each other
over the bridge. A container that is started again has a new namespace and is attached again. That needs
root on the engine's machine; containers themselves need no rights.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from docker import DockerClient

from coordinator.member import CLIENT_PORT
from topology.calibration import Calibration, End, calibrate
from topology.children import Child
from topology.claims import Claim, control_path, sweep_dead
from topology.compose import CLIENT_RESULTS, HTTP_PORT, LISTEN_PORT, TRACES, WAN, compose_text
from topology.containers import Project, View, image, open_engine, remove_project
from topology.driver import (
    DEFAULT_SETTINGS,
    EXECUTE_TIMEOUT_S,
    READY_POLL_S,
    START_TIMEOUT_S,
    DriverSettings,
)
from topology.emulated_faults import EmulatedFaults
from topology.emulated_wan import EmulatedWan
from topology.emulation import SEED
from topology.errors import DriverError
from topology.model import Topology
from topology.namespaces import require_available
from topology.network import NetworkPlan, ferry_specification, read_network
from topology.tun import set_up_device
from topology.wan_kind import WanKind

KIND: Final = "compose"
KEEPERS: Final = 3
END_TIMEOUT_S: Final = 10.0
HEALTHY_TIMEOUT_S: Final = 120.0
HEALTHY_POLL_S: Final = 0.2
DRAIN_TIMEOUT_S: Final = 20.0
"""A broker that is asked to end gives up handing over after ten seconds by itself."""
HURRY_AFTER_S: Final = 0.3
"""A broker drains on the first SIGTERM; after this long a second one tells it that all others end too."""


@dataclass(slots=True)
class ContainerNode:
    """A broker of the testbed."""

    name: str
    role: str
    lan: str
    """Empty for routing brokers."""
    locator: str
    """As other containers know it."""
    http: str = ""
    """As this machine reaches it."""
    view: View | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its container ran when we last looked."""
        return self.view is not None and self.view.is_alive


class ComposeDriver(EmulatedFaults):
    """A running topology in containers. Use `running(topology, ComposeDriver)`."""

    def __init__(self, topology: Topology, settings: DriverSettings = DEFAULT_SETTINGS) -> None:
        if settings.wan is WanKind.NETEM:
            raise DriverError(
                "containers are joined by the ferry on every kernel: leave --wan out, or run the topology in "
                "namespaces with --driver netns"
            )
        super().__init__(topology, settings)
        self.plan = _with_keepers(read_network(topology))
        self._emulated = EmulatedWan(self.plan.links, self.directory, WanKind.FERRY)
        self.calibration: Calibration | None = None
        """Of the round trips, from the start."""
        roles = [(router.name, "router", "") for router in topology.routers]
        roles += [(edge, "edge", lan.name) for lan in topology.lans for edge in lan.edges]
        self._nodes = {
            name: ContainerNode(name, role, lan, f"{name}:{LISTEN_PORT}") for name, role, lan in roles
        }
        self._keepers = [f"zookeeper-{number}" for number in range(1, KEEPERS + 1)]
        self._views: dict[str, View] = {}
        self._namespaces: dict[str, Path] = {}
        """Of the containers that are on the emulated WAN."""
        self._ended_by_us: set[str] = set()
        self._loads: dict[str, Child] = {}
        self._crashed: list[str] = []
        """Brokers that had ended by themselves when they were started again."""
        self._killing: set[asyncio.Future[None]] = set()
        self._kill_failures: list[str] = []
        """What came of kills that nobody waited for."""
        self._engine: DockerClient | None = None
        self._claim: Claim | None = None
        self._project: Project | None = None

    # Life

    async def start(self) -> None:
        """Start everything; returns when all brokers serve. Raises DriverError."""
        require_available()
        self._engine = await asyncio.to_thread(open_engine)
        for run in await asyncio.to_thread(sweep, self._engine):
            self._say(f"removed what the killed testbed {run} had left")
        self._claim = Claim(KIND, directory=str(self.directory))
        (self.directory / "topology.yaml").write_text(self.topology.text, encoding="utf-8")
        file = self.directory / "docker-compose.yml"
        sampling = 1.0 if self.trace is None else self.trace.sampling
        file.write_text(
            compose_text(
                self.topology,
                "topology.yaml",
                zookeeper_servers=KEEPERS,
                trace_sample=sampling,
                session_timeout_s=self.session_timeout_s,
            ),
            encoding="utf-8",
        )
        self._project = Project(self._engine, f"isthmus-{self._claim.run}", file)
        self._say(f"containers of project {self._project.name}, see docker ps")
        await _uncancelled(asyncio.to_thread(self._project.up, self._keepers))
        clients = [lan.client_host for lan in self.topology.lans if self._has_clients(lan.name)]
        await _uncancelled(asyncio.to_thread(self._project.create, [*self._nodes, *clients]))
        await self._wait_healthy(self._keepers)
        self._say(f"{KEEPERS} ZooKeeper servers are healthy")
        await self._start_wan()
        for name, node in self._nodes.items():
            networks = [WAN, f"lan-{node.lan}"] if node.lan else [WAN]
            await asyncio.to_thread(self._project.join, name, networks)
            # Attached before it has found its peers: the WAN carries, and sees, all that it says.
            await asyncio.to_thread(self._project.start, name)
            await self._attach([name])
        await asyncio.gather(*(self._wait_serving(name, START_TIMEOUT_S) for name in self._nodes))
        await self._calibrate()

    async def stop(self) -> None:
        """Collect, then end and remove everything."""
        await asyncio.gather(*(load.stop() for load in self._loads.values()))
        if self._killing:
            await asyncio.wait(self._killing)
        await self._close_http()
        if self._project is not None:
            try:
                await self._end_brokers()
                await self.collect()
            finally:
                await self._emulated.end()
                await asyncio.to_thread(self._project.remove)
        if self._claim is not None:
            self._claim.release()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def collect(self) -> None:
        """Logs of all containers into `directory`, traces to where they were asked for."""
        project = self._running_project()
        await asyncio.to_thread(project.write_logs, self.directory)
        # Every broker has the volume; none is there if the start failed early.
        source = next(iter(self._nodes))
        if self.trace is not None and source in self._views:
            await asyncio.to_thread(project.copy_folder, source, TRACES, self.trace.folder)

    # Faults and repairs

    async def start_node(self, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start a broker's container again after it was killed; returns when it serves."""
        await self._refresh()
        if self._node(name).is_alive:
            raise DriverError(f"{name} runs already: kill it before it is started again")
        if name not in self._ended_by_us:
            self._crashed.append(name)
        self._ended_by_us.discard(name)
        await asyncio.to_thread(self._running_project().start, name)
        await self._attach([name])
        await self._wait_serving(name, timeout_s)

    async def kill(self, name: str) -> None:
        """End a broker with SIGKILL; returns when its container has ended."""
        self._node(name)
        self._ended_by_us.add(name)
        project = self._running_project()
        await asyncio.to_thread(project.signal, name)
        await asyncio.to_thread(project.wait_ended, name, END_TIMEOUT_S)
        await self._refresh()

    def kill_nowait(self, name: str) -> None:
        """Have a broker killed and go on."""
        self._node(name)
        self._ended_by_us.add(name)
        project = self._running_project()
        killing = asyncio.ensure_future(asyncio.to_thread(project.signal, name))
        self._killing.add(killing)
        killing.add_done_callback(self._killed)

    def _killed(self, killing: "asyncio.Future[None]") -> None:
        self._killing.discard(killing)
        if not killing.cancelled() and (error := killing.exception()) is not None:
            self._kill_failures.append(str(error))

    async def freeze(self, name: str) -> None:
        """Pause a broker's container; its connections stay open."""
        self._node(name)
        await asyncio.to_thread(self._running_project().pause, name)

    async def thaw(self, name: str) -> None:
        """Let a paused broker go on."""
        self._node(name)
        await asyncio.to_thread(self._running_project().unpause, name)

    async def disconnect(self, name: str, network: str = WAN) -> None:
        """Take a broker off one of its networks, `wan` or `lan-<name>`, as pulling a cable would."""
        self._node(name)
        await asyncio.to_thread(self._running_project().disconnect, name, network)
        await self._refresh()

    async def connect(self, name: str, network: str = WAN) -> None:
        """Put a broker on a network again; its address there may be another one."""
        self._node(name)
        await asyncio.to_thread(self._running_project().connect, name, network)
        await self._attach([name])

    async def drain(self, name: str) -> None:
        """Ask a broker to hand over and end (SIGTERM); returns when it has."""
        self._node(name)
        self._ended_by_us.add(name)
        project = self._running_project()
        await asyncio.to_thread(project.signal, name, "SIGTERM")
        await asyncio.to_thread(project.wait_ended, name, DRAIN_TIMEOUT_S)
        await self._refresh()

    def zookeeper_servers(self) -> list[str]:
        """Names of all ZooKeeper servers: three, whatever the topology says."""
        return list(self._keepers)

    async def zookeeper_leader(self) -> str:
        """The server that leads the ensemble."""
        await self._refresh()
        for keeper in self._keepers:
            if self._views[keeper].is_alive:
                line = f"exec 3<>/dev/tcp/{keeper}/{CLIENT_PORT} && echo srvr >&3 && grep ^Mode: <&3"
                said = await self._run_program(
                    ["docker", "exec", self._views[keeper].identifier], "bash", "-c", line
                )
                if "leader" in said[1]:
                    return keeper
        raise DriverError("no ZooKeeper server leads: see docker logs of them")

    async def kill_zookeeper(self, server: str) -> None:
        """End a ZooKeeper server with SIGKILL."""
        self._ended_by_us.add(server)
        project = self._running_project()
        await asyncio.to_thread(project.signal, server)
        await asyncio.to_thread(project.wait_ended, server, END_TIMEOUT_S)

    async def start_zookeeper(self, server: str) -> None:
        """Start a killed ZooKeeper server on its data."""
        await asyncio.to_thread(self._running_project().start, server)
        await self._attach([server])
        self._ended_by_us.discard(server)

    # Programs

    async def start_load(self, lan: str) -> Child:
        """Start the container of a LAN's clients; it was made with the others."""
        service = self.topology.lan(lan).client_host
        await self._refresh()
        identifier = self._views[service].identifier
        # Attached before it starts, so nothing it says is missed.
        command = ["docker", "start", "--attach", "--interactive", identifier]
        load = self._loads[lan] = Child(f"load-{lan}", "--command", command, self.directory)
        await load.start()
        return load

    async def load_results(self, lan: str) -> dict[str, Any]:
        """What the subscribers of a LAN recorded."""
        service = self.topology.lan(lan).client_host
        content = json.loads(await asyncio.to_thread(self._running_project().read, service, CLIENT_RESULTS))
        assert isinstance(content, dict)
        return content

    async def execute(
        self, place: str, *command: str, timeout_s: float = EXECUTE_TIMEOUT_S
    ) -> tuple[int, str]:
        """Run a program in a broker's container, or in one of its own in a LAN; gives status and output."""
        self._check_place(place)
        project = self._running_project()
        if place in self._nodes:
            await self._refresh()
            words = ["docker", "exec", self._views[place].identifier]
        else:
            label = f"com.docker.compose.project={project.name}"
            network = f"{project.name}_lan-{place}"
            words = ["docker", "run", "--rm", "--network", network, "--label", label, image()]
        return await self._run_program(words, *command, timeout_s=timeout_s)

    # Looking

    @property
    def nodes(self) -> Mapping[str, ContainerNode]:
        """All brokers by name."""
        return self._nodes

    @property
    def project(self) -> str:
        """The name that all containers, networks and volumes of this run carry."""
        return self._running_project().name

    @property
    def zookeeper_hosts(self) -> str:
        """Where ZooKeeper serves, for containers."""
        return ",".join(f"{keeper}:{CLIENT_PORT}" for keeper in self._keepers)

    async def statuses(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """The status of every broker that is alive and answers. Raises DriverError if a kill failed."""
        if self._kill_failures:
            raise DriverError(f"a broker was not killed: {'; '.join(self._kill_failures)}")
        await self._refresh()
        return await super().statuses(names)

    def died_unasked(self) -> list[str]:
        """Containers that ended although nobody made them."""
        self._take(self._running_project().views())
        loads = [child for child in (*self._loads.values(), self._emulated.process) if child is not None]
        dead = [name for name in (*self._keepers, *self._nodes) if not self._views[name].is_alive]
        return [
            *self._crashed,
            *(name for name in dead if name not in self._ended_by_us),
            *(child.name for child in loads if child.died_unasked),
        ]

    # The WAN

    @property
    def _wan(self) -> EmulatedWan:
        return self._emulated

    def _site_of(self, broker: str) -> str:
        return self.plan.host(broker).site

    def _zookeeper_site(self) -> str:
        return self._site_of(self._keepers[0])

    async def _start_wan(self) -> None:
        assert self._claim is not None
        await self._refresh()
        keepers = [self._views[keeper].addresses[WAN] for keeper in self._keepers]
        # What ZooKeeper says is no frame of ours.
        await self._emulated.launch(
            ferry_specification(self.plan.links, control_path(self._claim.run), SEED, keepers)
        )
        await self._attach(self._keepers)

    async def _calibrate(self) -> None:
        ends = {
            site: End(self._namespaces[name], self._views[name].addresses[WAN])
            for name, site in self._sites().items()
        }
        self.calibration = await calibrate(self.plan, ends, packets=0)
        if not self.calibration.ok:
            raise DriverError(
                f"the WAN is not what was asked for: {'; '.join(self.calibration.failures())}; "
                "the machine may be too busy"
            )
        measured = [
            f"{item.source} - {item.target} {item.measured:.1f} ms" for item in self.calibration.measurements
        ]
        self._say(f"round trips: {', '.join(measured)}")

    async def _attach(self, names: Iterable[str]) -> None:
        """Give containers their device to the WAN, and all the routes to where they are now."""
        await self._refresh()
        sites = self._sites()
        on_wan = {
            name: self._views[name]
            for name in sites
            if self._views[name].is_alive and WAN in self._views[name].addresses
        }
        for name in names:
            if name in on_wan:
                self._namespaces[name] = await asyncio.to_thread(self._running_project().namespace, name)
                address = on_wan[name].addresses[WAN]
                await self._emulated.attach(name, sites[name], address, self._namespaces[name])
        await asyncio.to_thread(self._route, on_wan, sites)

    def _sites(self) -> dict[str, str]:
        """Where every container that is on the WAN stands."""
        return {host.name: host.site for host in self.plan.hosts if host.name in self._views}

    def _route(self, views: Mapping[str, View], sites: Mapping[str, str]) -> None:
        for name, view in views.items():
            others = [
                f"{other.addresses[WAN]}/32" for far, other in views.items() if sites[far] != sites[name]
            ]
            set_up_device(self._namespaces[name], view.addresses[WAN], others)

    # Details

    def _has_clients(self, lan: str) -> bool:
        topology = self.topology
        return lan in {item.lan for item in topology.publishers} | {item.lan for item in topology.subscribers}

    def _running_project(self) -> Project:
        if self._project is None:
            raise DriverError("the testbed has not been started")
        return self._project

    def _node(self, name: str) -> ContainerNode:
        if name not in self._nodes:
            raise self._unknown(name)
        return self._nodes[name]

    async def _refresh(self) -> None:
        self._take(await asyncio.to_thread(self._running_project().views))

    def _take(self, views: dict[str, View]) -> None:
        self._views = views
        for node in self._nodes.values():
            node.view = views.get(node.name)
            if node.view is not None and node.view.addresses:
                # By the WAN, or by its LAN if it was taken off the WAN.
                address = node.view.addresses.get(WAN) or next(iter(node.view.addresses.values()))
                node.http = f"{address}:{HTTP_PORT}"

    async def _run_program(
        self, words: list[str], *command: str, timeout_s: float = EXECUTE_TIMEOUT_S
    ) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *words,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            raise DriverError(f"{' '.join(command)} took longer than {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace")

    async def _wait_serving(self, name: str, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            try:
                await self.status(name)
            except DriverError as error:
                if loop.time() > deadline_s:
                    raise DriverError(f"{name} does not serve after {timeout_s:g} s: {error}") from error
                await asyncio.sleep(READY_POLL_S)
            else:
                self._say(f"{name} serves at {self._nodes[name].http}")
                return

    async def _wait_healthy(self, services: Iterable[str]) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + HEALTHY_TIMEOUT_S
        while True:
            await self._refresh()
            ailing = [name for name in services if not self._views[name].is_healthy]
            if not ailing:
                return
            if loop.time() > deadline_s:
                raise DriverError(
                    f"{', '.join(ailing)} not healthy after {HEALTHY_TIMEOUT_S:g} s: see docker logs"
                )
            await asyncio.sleep(HEALTHY_POLL_S)

    async def _end_brokers(self) -> None:
        """Let brokers close what they record; all at once, and not longer than that takes."""
        project = self._running_project()
        await self._refresh()
        alive = [name for name, node in self._nodes.items() if node.is_alive]
        self._ended_by_us.update(alive)

        async def end(name: str) -> None:
            if self._views[name].state == "paused":
                await asyncio.to_thread(project.unpause, name)
            await asyncio.to_thread(project.signal, name, "SIGTERM")
            await asyncio.sleep(HURRY_AFTER_S)
            await asyncio.to_thread(project.signal, name, "SIGTERM")
            await asyncio.to_thread(project.wait_ended, name, END_TIMEOUT_S)

        await asyncio.gather(*(end(name) for name in alive))


def sweep(engine: DockerClient) -> list[str]:
    """Remove what killed runners left; gives the names of their runs."""
    return sweep_dead(KIND, lambda run: remove_project(engine, f"isthmus-{run}"))


def _with_keepers(plan: NetworkPlan) -> NetworkPlan:
    """The plan with a host per ZooKeeper server, and without switches: containers have none."""
    keeper = plan.host(plan.zookeeper)
    keepers = tuple(
        replace(keeper, name=f"zookeeper-{number}", is_switch=False, has_wan=True)
        for number in range(1, KEEPERS + 1)
    )
    return replace(plan, hosts=(*keepers, *(host for host in plan.hosts if not host.is_switch)))


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """A thread cannot be cancelled: let it come to its end, so that `stop` finds what it started."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
