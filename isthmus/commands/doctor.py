"""`isthmus doctor`: can this machine run Isthmus, and if not, what to do about it.

Every check tries the real thing where that is possible: it starts ZooKeeper, binds addresses, sends
datagrams. A *problem* keeps the process testbed (`isthmus up`, `isthmus demo`) from working; a
*warning* costs comfort or a later feature.
"""

import asyncio
import json
import math
import os
import platform
import resource
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from benchmarks import machine
from coordinator import CoordinationError, EmbeddedZooKeeper, Session
from coordinator.embedded import class_path, free_ports
from coordinator.errors import JavaNotFoundError, ZooKeeperStartError
from coordinator.java import find_java
from isthmus.commands.cluster import open_console, open_table, quiet_logs
from isthmus.commands.doctor_security import check_security
from isthmus.commands.findings import Finding, Level
from isthmus.errors import explain_errors, run_async
from overlay.discovery import DISCOVERY_GROUP, Announcement
from overlay.limits import DRIFT_MAX_PPM, DRIFT_PPM
from runtime.clock import ClockReading, measure_drift, read_clocks
from runtime.compiled import compiled_modules, stale_modules
from runtime.discovery import Announcer, discover

PYTHON_MINIMUM: Final = (3, 11)
PORTS_NEEDED: Final = 20
FILES_NEEDED: Final = 256
FILES_COMFORTABLE: Final = 4_096
CORES_COMFORTABLE: Final = 2
MEMORY_COMFORTABLE_GIB: Final = 2.0
TIMER_LATE_MS: Final = 5.0
"""Heartbeats are 10 ms apart and 50 ms of silence count as death."""
CLOCK_STEP_NS: Final = 1_000_000
MULTICAST_TIMEOUT_S: Final = 2.0
ZOOKEEPER_TIMEOUT_S: Final = 5.0
COMMAND_TIMEOUT_S: Final = 5.0
TESTBED_ADDRESSES: Final = ("127.0.0.1", "127.1.0.10", "127.100.1.1")
"""ZooKeeper, an edge broker and a routing broker of the process testbed."""
DOCKER_SOCKET: Final = "/var/run/docker.sock"


def check_python() -> Finding:
    """The version of Python."""
    found = f"Python {platform.python_version()}"
    if sys.version_info[:2] >= PYTHON_MINIMUM:
        return Finding("Python", Level.OK, found)
    wanted = ".".join(map(str, PYTHON_MINIMUM))
    return Finding(
        "Python", Level.PROBLEM, found, f"install Python {wanted} or newer, run make PYTHON=python3"
    )


def check_compiled() -> Finding:
    """Whether the modules every message passes run as machine code."""
    check = "Hot modules"
    if stale := stale_modules():
        found = f"{', '.join(stale)} compiled before the source was changed"
        return Finding(check, Level.WARNING, found, "make compile, or make interpret")
    if compiled := compiled_modules():
        return Finding(check, Level.OK, f"{len(compiled)} compiled")
    return Finding(check, Level.OK, "interpreted: several times slower than after make compile")


def check_java(needed: bool) -> Finding:
    """A Java runtime, for ZooKeeper and Spark."""
    try:
        java = find_java()
    except JavaNotFoundError as error:
        found, _, remedy = str(error).partition(" Remedy: ")
        return Finding("Java", Level.PROBLEM if needed else Level.WARNING, found, remedy)
    return Finding("Java", Level.OK, f"Java {java.version} from {java.source}: {java.executable}")


def check_jars(needed: bool) -> Finding:
    """The jars of the ZooKeeper server."""
    check = "ZooKeeper jars"
    try:
        jars = class_path().split(os.pathsep)
    except ZooKeeperStartError as error:
        found, _, remedy = str(error).partition(": ")
        return Finding(check, Level.PROBLEM if needed else Level.WARNING, found, remedy)
    return Finding(check, Level.OK, f"{Path(jars[0]).name} and {len(jars) - 1} more, from pyspark")


async def check_zookeeper(hosts: str | None) -> Finding:
    """ZooKeeper at `hosts`, or one of our own."""
    check = "ZooKeeper"
    began_s = time.monotonic()
    if hosts is None:
        try:
            with EmbeddedZooKeeper() as server:
                await _connect(server.hosts)
        except CoordinationError as error:
            return Finding(
                check,
                Level.PROBLEM,
                f"the embedded server does not start: {error}",
                "see Java and ZooKeeper jars above, or use an existing ensemble: --zookeeper host:port",
            )
        return Finding(
            check, Level.OK, f"the embedded server starts, answers and ends in {_seconds(began_s)}"
        )
    try:
        await _connect(hosts)
    except CoordinationError as error:
        return Finding(check, Level.PROBLEM, str(error), "start it: isthmus zookeeper --port 2181")
    return Finding(check, Level.OK, f"{hosts} answers after {_seconds(began_s)}")


async def _connect(hosts: str) -> None:
    # The root, because a session below a chroot would create it.
    session = Session(hosts, "/")
    await session.start(ZOOKEEPER_TIMEOUT_S)
    try:
        await session.exists("/")
    finally:
        await session.close()


def check_addresses() -> Finding:
    """The loopback addresses of the process testbed."""
    check = "loopback addresses"
    for address in TESTBED_ADDRESSES:
        try:
            _talk_to(address)
        except OSError as error:
            return Finding(
                check,
                Level.PROBLEM,
                f"{address} cannot be used: {error}",
                f"give it to the loopback interface (macOS: sudo ifconfig lo0 alias {address}) "
                "and let no firewall block 127.0.0.0/8",
            )
    return Finding(check, Level.OK, f"{', '.join(TESTBED_ADDRESSES)} can be bound and reached")


def _talk_to(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        server.settimeout(1.0)
        with socket.create_connection(server.getsockname(), timeout=1.0):
            connection, _ = server.accept()
            connection.close()


def check_ports() -> Finding:
    """Free TCP ports."""
    check = "ports"
    try:
        ports = free_ports("127.0.0.1", PORTS_NEEDED)
    except ZooKeeperStartError as error:
        return Finding(check, Level.PROBLEM, str(error), "end programs that hold many ports")
    return Finding(check, Level.OK, f"{len(ports)} free ones found at once, for example {ports[0]}")


async def check_multicast(check: str, interface: str) -> Finding:
    """Whether a client would find an edge broker by multicast on this interface."""
    remedy = "give clients the address of their edge broker: isthmus pub --edge host:port"
    name = f"doctor-{secrets.token_hex(4)}"
    port = _free_datagram_port()
    try:
        announcer = await Announcer.start(
            Announcement(name, "doctor", "127.0.0.1:1", ""),
            interface=interface,
            group=DISCOVERY_GROUP,
            port=port,
        )
    except OSError as error:
        return Finding(check, Level.WARNING, f"group {DISCOVERY_GROUP} cannot be joined: {error}", remedy)
    began_s = time.monotonic()
    try:
        found = await discover(lan="doctor", interface=interface, port=port, timeout_s=MULTICAST_TIMEOUT_S)
    except OSError as error:
        return Finding(check, Level.WARNING, f"no datagram can be sent on {interface}: {error}", remedy)
    finally:
        announcer.close()
    if not any(announcement.edge == name for announcement in found):
        return Finding(check, Level.WARNING, f"datagrams sent on {interface} do not come back", remedy)
    return Finding(check, Level.OK, f"an edge broker is found on {interface} after {_seconds(began_s)}")


def _free_datagram_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def check_default_multicast() -> Finding:
    """Multicast on the interface that leads out of this machine."""
    check = "multicast, default interface"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the kernel only chooses the interface. The address is for documentation.
            probe.connect(("192.0.2.1", 9))
            interface = probe.getsockname()[0]
    except OSError:
        return Finding(check, Level.OK, "there is no way out of this machine; nothing to check")
    return await check_multicast(check, interface)


def check_privileges() -> Finding:
    """Root and network namespaces: only the netns testbed needs them."""
    who = "root" if os.geteuid() == 0 else "not root"
    possible = _runs("unshare", "--net", "true")
    spaces = "network namespaces can be made" if possible else "no network namespaces"
    remedy = "" if possible else "run as root on Linux if you want the netns testbed; nothing else needs it"
    return Finding("privileges", Level.OK, f"{who}, {spaces}", remedy)


def check_docker() -> Finding:
    """A Docker engine: only the compose testbed needs it."""
    check = "Docker"
    remedy = "install and start a Docker engine if you want the compose testbed; nothing else needs it"
    if shutil.which("docker") is None:
        return Finding(check, Level.OK, "no docker command", remedy)
    if not _runs("docker", "version"):
        return Finding(check, Level.OK, f"a docker command, but no engine answers at {DOCKER_SOCKET}", remedy)
    return Finding(check, Level.OK, "a Docker engine answers")


def _runs(*command: str) -> bool:
    try:
        done = subprocess.run(command, check=False, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def check_clock() -> Finding:
    """The monotonic clock's step, and how late timers are."""
    step_ns = min(_clock_step_ns() for _ in range(100))
    late_ms = statistics.median(_timer_late_ms() for _ in range(20))
    found = f"steps of {step_ns} ns, timers {late_ms:.2f} ms late"
    if step_ns > CLOCK_STEP_NS or late_ms > TIMER_LATE_MS:
        return Finding(
            "clock",
            Level.WARNING,
            found,
            "raise --heartbeat-ms and --silence-ms, or brokers will take each other for dead",
        )
    return Finding("clock", Level.OK, found)


def _clock_step_ns() -> int:
    start_ns = time.monotonic_ns()
    while (now_ns := time.monotonic_ns()) == start_ns:
        pass
    return now_ns - start_ns


def _timer_late_ms() -> float:
    start_s = time.monotonic()
    time.sleep(0.001)
    return (time.monotonic() - start_s) * 1e3 - 1


def check_files() -> Finding:
    """The limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files, {hard} if asked for"
    remedy = f"run ulimit -n {FILES_COMFORTABLE}, or raise the limit for this user"
    if soft < FILES_NEEDED:
        return Finding("open files", Level.PROBLEM, found, remedy)
    if hard != resource.RLIM_INFINITY and hard < FILES_COMFORTABLE:
        return Finding("open files", Level.WARNING, found, remedy)
    return Finding("open files", Level.OK, found)


def check_size() -> Finding:
    """Cores and memory."""
    cores, memory_gib = machine.available_cores(), machine.memory_gib()
    found = f"{cores} cores, {memory_gib:g} GiB of memory, {machine.processor()}"
    if cores < CORES_COMFORTABLE or memory_gib < MEMORY_COMFORTABLE_GIB:
        return Finding(
            "size",
            Level.WARNING,
            found,
            f"all works, but slowly: {CORES_COMFORTABLE} cores, {MEMORY_COMFORTABLE_GIB:g} GiB are better",
        )
    return Finding("size", Level.OK, found)


def _seconds(began_s: float) -> str:
    return f"{time.monotonic() - began_s:.2f} s"


def check_drift(seconds: float, read: Callable[[], ClockReading] = read_clocks) -> Finding:
    """How fast the monotonic clock runs against the wall clock, which somebody may be steering."""
    drift = measure_drift(seconds, read)
    found = (
        f"{drift.ppm:+.1f} ppm against the wall clock, {drift.raw_ppm:+.1f} if nobody steered it, "
        f"give or take {drift.uncertainty_ppm:.1f}, in {drift.seconds:.1f} s"
    )
    if drift.stepped:
        return Finding("clock drift", Level.WARNING, f"{found}: it was set meanwhile", "measure again")
    apart_ppm = max(abs(drift.ppm), abs(drift.raw_ppm))
    worst_ppm = math.ceil(apart_ppm + drift.uncertainty_ppm)
    if worst_ppm <= DRIFT_PPM:
        return Finding("clock drift", Level.OK, f"{found}: within the {DRIFT_PPM} ppm that brokers assume")
    if apart_ppm <= DRIFT_PPM:
        remedy = "measure longer with --clock-seconds to be sure"
        return Finding("clock drift", Level.WARNING, found, remedy)
    if worst_ppm > DRIFT_MAX_PPM:
        remedy = f"repair it: age bounds reckon with at most {DRIFT_MAX_PPM} ppm"
        return Finding("clock drift", Level.WARNING, found, remedy)
    remedy = (
        f"if brokers run here, give all brokers of the cluster --clock-drift-ppm {worst_ppm}, also those "
        "elsewhere: ages of messages from a broker that states more than the next one are unknown. Clients "
        f"here need connect(..., drift_ppm={worst_ppm}), or ages may be understated"
    )
    return Finding("clock drift", Level.WARNING, found, remedy)


async def examine(zookeeper: str | None, clock_seconds: float | None = None) -> list[Finding]:
    """Do all checks, one after the other so that none disturbs the next."""
    embedded = zookeeper is None
    checks: list[Callable[[], Finding | Coroutine[Any, Any, Finding]]] = [
        check_python,
        check_compiled,
        lambda: check_java(embedded),
        lambda: check_jars(embedded),
        lambda: check_zookeeper(zookeeper),
        check_addresses,
        check_ports,
        lambda: check_multicast("multicast, loopback", "127.0.0.1"),
        check_default_multicast,
        check_privileges,
        check_docker,
        check_clock,
        check_files,
        check_size,
    ]
    if clock_seconds is not None:
        # Nothing else runs in this process, so it may block.
        checks = [check_clock, lambda: check_drift(clock_seconds)]
    findings = []
    for check in checks:
        finding = check()
        findings.append(await finding if asyncio.iscoroutine(finding) else finding)
    return findings


@click.command()
@click.option(
    "--zookeeper",
    envvar="ISTHMUS_ZOOKEEPER",
    metavar="HOST:PORT,...",
    help="Check this ensemble. Without it, the embedded server is tried.",
)
@click.option("--clock", "only_clock", is_flag=True, help="Only the clock, and estimate how far it drifts.")
@click.option(
    "--clock-seconds",
    type=click.FloatRange(0.1, 3_600),
    default=10.0,
    show_default=True,
    help="With --clock: how long to measure; ten times longer is ten times more exact.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Only this file of a broker: what of it is secured, and what is not.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@explain_errors
@run_async
async def doctor(
    zookeeper: str | None, only_clock: bool, clock_seconds: float, file: Path | None, as_json: bool
) -> None:
    """Check whether this machine can run Isthmus. Exit status 1 if the process testbed cannot work."""
    quiet_logs()
    if file is not None:
        findings = check_security(file)
    else:
        findings = await examine(zookeeper, clock_seconds if only_clock else None)
    healthy = all(finding.level is not Level.PROBLEM for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": healthy, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        styles = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
        table = open_table("", ("check", "", "found", "what to do"))
        for finding in findings:
            table.add_row(
                finding.check,
                Text(finding.level, styles[finding.level]),
                Text(finding.found),
                Text(finding.remedy),
            )
        open_console().print(table)
    if not healthy:
        raise click.exceptions.Exit(1)
