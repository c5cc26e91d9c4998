"""`isthmus status`: the whole overlay at a glance, and in words what is wrong with it."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from coordinator import (
    Coordinator,
    EdgeRecord,
    Placement,
    RouterRecord,
    TopicRecord,
    Watch,
    check_placements,
)
from isthmus.commands.cluster import (
    add_row,
    https,
    open_cluster,
    open_console,
    open_table,
    quiet_logs,
    read_once,
    zookeeper_options,
)
from isthmus.errors import explain_errors, run_async
from overlay.messages import Role

BROKER_TIMEOUT_S = 2.0
PROBLEMS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link of an edge broker to another broker."""

    peer: str
    role: str
    up: bool
    round_trip_ms: float


@dataclass(frozen=True, slots=True)
class RouterView:
    """A routing broker: what ZooKeeper says of it, and what it says itself."""

    id: str
    locator: str
    host: str
    http: str
    draining: bool
    messages_per_s: float
    primary_of: tuple[str, ...]
    backup_of: tuple[str, ...]
    reachable: bool
    ready: bool
    problem: str


@dataclass(frozen=True, slots=True)
class EdgeView:
    """An edge broker: what ZooKeeper says of it, and what it says itself."""

    id: str
    lan: str
    locator: str
    http: str
    clients: int
    links: tuple[LinkView, ...]
    reachable: bool
    ready: bool
    problem: str


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The overlay as it is now."""

    cluster: str
    leader: str | None
    epoch: int
    topics: int
    routers: tuple[RouterView, ...]
    edges: tuple[EdgeView, ...]
    flagged: Mapping[str, str]
    """Topics whose promise does not hold as the network is, and why."""
    problems: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Nothing is wrong."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a broker says over HTTP."""

    status: Mapping[str, Any] | None
    problem: str


async def collect(coordinator: Coordinator) -> StatusReport:
    """Read ZooKeeper, ask every broker, and judge."""
    routers = await read_once(coordinator.watch_routers)
    edges = await read_once(coordinator.watch_edges)
    leader, epoch = await _leader(coordinator)
    topics = await coordinator.topics()
    flags = await coordinator.flags()
    connector = aiohttp.TCPConnector(ssl=https() or True)
    timeout = aiohttp.ClientTimeout(total=BROKER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        addresses = [record.http for record in routers.values()] + [record.http for record in edges.values()]
        answers = await asyncio.gather(*(_ask(http, address) for address in addresses))
    router_views = tuple(
        _router_view(record, answer, topics)
        for record, answer in zip(routers.values(), answers[: len(routers)], strict=True)
    )
    edge_views = tuple(
        _edge_view(record, answer)
        for record, answer in zip(edges.values(), answers[len(routers) :], strict=True)
    )
    return StatusReport(
        cluster=coordinator.cluster,
        leader=leader,
        epoch=epoch,
        topics=len(topics),
        routers=router_views,
        edges=edge_views,
        flagged={name: flag.reason for name, flag in flags.items() if name in topics},
        problems=(
            *_problems(leader, routers, topics, router_views, edge_views),
            *(f"topic {name!r}: {flag.reason}" for name, flag in flags.items() if name in topics),
        ),
    )


async def _leader(coordinator: Coordinator) -> tuple[str | None, int]:
    def watch(deliver: Callable[[tuple[str | None, int]], None]) -> Watch:
        return coordinator.watch_leader(lambda leader, epoch: deliver((leader, epoch)))

    return await read_once(watch)


async def _ask(http: aiohttp.ClientSession, address: str) -> _Answer:
    if not address:
        return _Answer(None, "it has registered no HTTP address")
    try:
        base = address if address.startswith("https://") else f"http://{address}"
        async with http.get(f"{base}/status") as response:
            if response.status != 200:
                return _Answer(None, f"/status answers {response.status}")
            status: Any = await response.json()
        if not isinstance(status, dict):
            return _Answer(None, "/status is no JSON object: is this a broker?")
        if status.get("ready"):
            return _Answer(status, "")
        async with http.get(f"{base}/readyz") as response:
            reason = (await response.text()).strip()
        return _Answer(status, f"not ready: {reason}" if response.status != 200 else "")
    except TimeoutError:
        return _Answer(None, f"no answer from {address} within {BROKER_TIMEOUT_S:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return _Answer(None, f"{address} cannot be asked: {str(error) or type(error).__name__}")


def _router_view(record: RouterRecord, answer: _Answer, topics: Mapping[str, TopicRecord]) -> RouterView:
    return RouterView(
        id=record.id,
        locator=record.locator,
        host=record.host,
        http=record.http,
        draining=record.draining,
        messages_per_s=record.messages_per_s,
        primary_of=tuple(name for name, topic in topics.items() if topic.primary == record.id),
        backup_of=tuple(name for name, topic in topics.items() if topic.backup == record.id),
        reachable=answer.status is not None,
        ready=answer.status is not None and not answer.problem,
        problem=answer.problem,
    )


def _edge_view(record: EdgeRecord, answer: _Answer) -> EdgeView:
    status = answer.status or {}
    return EdgeView(
        id=record.id,
        lan=record.lan,
        locator=record.locator,
        http=record.http,
        clients=len(status.get("clients", ())),
        links=tuple(
            LinkView(link["peer"], link["role"], link["up"], round(link["round_trip_ms"], 3))
            for link in sorted(status.get("links", ()), key=lambda link: str(link["peer"]))
        ),
        reachable=answer.status is not None,
        ready=answer.status is not None and not answer.problem,
        problem=answer.problem,
    )


def _problems(
    leader: str | None,
    routers: Mapping[str, RouterRecord],
    topics: Mapping[str, TopicRecord],
    router_views: tuple[RouterView, ...],
    edge_views: tuple[EdgeView, ...],
) -> list[str]:
    problems: list[str] = []
    if not routers:
        problems.append("there is no routing broker: start one with `isthmus router`")
    elif leader is None:
        problems.append("there is no leader: if this stays, look at the logs of the routing brokers")
    elif leader not in routers:
        problems.append(f"the leader {leader} is not registered as a routing broker")
    problems += [
        f"routing broker {view.id}: {view.problem}"
        for view in router_views
        if view.problem and not view.draining
    ]
    problems += [f"edge broker {view.id}: {view.problem}" for view in edge_views if view.problem]
    if not routers:
        problems += [f"topic {name!r}: nobody is there to serve it" for name in topics]
    problems += check_placements(
        {name: Placement(topic.primary, topic.backup) for name, topic in topics.items()}, routers
    )
    # A link to a broker that is gone is kept for a while in case it comes back: no problem.
    alive = {(Role.ROUTER.value, name) for name in routers}
    alive |= {(Role.EDGE.value, view.id) for view in edge_views}
    problems += [
        f"edge broker {view.id}: the link to {link.role} {link.peer} is down"
        for view in edge_views
        for link in view.links
        if not link.up and (link.role, link.peer) in alive
    ]
    return problems


# Output


@click.command()
@zookeeper_options
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@explain_errors
@run_async
async def status(zookeeper: str, chroot: str, as_json: bool) -> None:
    """Show leader, brokers and links. Exit status 1 if something is wrong, with the reasons."""
    quiet_logs()
    async with open_cluster(zookeeper, chroot) as coordinator:
        report = await collect(coordinator)
    if as_json:
        click.echo(json.dumps({"healthy": report.healthy, **asdict(report)}, indent=2))
    else:
        _print(open_console(), report)
    if not report.healthy:
        raise click.exceptions.Exit(1)


def _print(console: Console, report: StatusReport) -> None:
    leader = f"{report.leader}, epoch {report.epoch}" if report.leader else "none"
    console.print(f"cluster {report.cluster}   leader {leader}   topics {report.topics}")
    console.print(_router_table(report))
    console.print(_edge_table(report))
    if report.healthy:
        console.print("healthy", style="green")
        return
    console.print(f"{len(report.problems)} problems:", style="bold red")
    for problem in report.problems[:PROBLEMS_SHOWN]:
        console.print(f"  {problem}", markup=False, soft_wrap=True)
    if len(report.problems) > PROBLEMS_SHOWN:
        console.print(f"  and {len(report.problems) - PROBLEMS_SHOWN} more: see --json")


def _router_table(report: StatusReport) -> Table:
    table = open_table(
        "routing brokers", ("id", "locator", "host", "primary of", "backup of", "msg/s", "state")
    )
    for view in report.routers:
        add_row(
            table,
            f"{view.id} (leader)" if view.id == report.leader else view.id,
            view.locator,
            view.host,
            f"{len(view.primary_of)} topics",
            f"{len(view.backup_of)} topics",
            f"{view.messages_per_s:g}",
            "draining" if view.draining else view.problem or "ready",
        )
    return table


def _edge_table(report: StatusReport) -> Table:
    table = open_table("edge brokers", ("id", "lan", "locator", "clients", "links", "state"))
    for view in report.edges:
        links = ", ".join(
            f"{link.peer} {link.round_trip_ms:.1f} ms" if link.up else f"{link.peer} down"
            for link in view.links
        )
        add_row(
            table,
            view.id,
            view.lan,
            view.locator,
            str(view.clients) if view.reachable else "?",
            links or ("none" if view.reachable else "?"),
            view.problem or "ready",
        )
    return table
