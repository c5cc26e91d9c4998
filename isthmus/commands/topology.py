"""`isthmus topology`: what a topology holds, whether it is sound, its picture, and its compose file."""

import importlib
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from isthmus.commands import topology_link
from isthmus.commands.up import open_console
from isthmus.errors import explain_errors
from overlay.qos import TopicQos
from topology.compose import compose_text
from topology.graph import routes, warnings
from topology.links import Link
from topology.model import Topology, library, load_topology

_SOURCE = click.argument("source", metavar="FILE_OR_NAME")
_SCENARIO = click.option("--scenario", metavar="NAME", help="Under this scenario of the topology.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def topology() -> None:
    """Look at topologies: YAML files, or those that come with Isthmus by their name."""


for _command in (topology_link.link, topology_link.cut, topology_link.heal):
    topology.add_command(_command)


@topology.command("list")
@_JSON
@explain_errors
def list_topologies(as_json: bool) -> None:
    """List the topologies that come with Isthmus."""
    found = [load_topology(name) for name in library()]
    if as_json:
        click.echo(json.dumps([_summary(item) for item in found], indent=2))
        return
    table = _table(
        "name", "LANs", "edges", "routers", "topics", "scenarios", "description", numbers=(1, 2, 3, 4, 5)
    )
    for item in found:
        numbers = (len(item.lans), _edges(item), len(item.routers), len(item.topics), len(item.scenarios))
        table.add_row(item.name, *map(str, numbers), item.description)
    open_console().print(table)


@topology.command()
@_SOURCE
@click.option("--strict", is_flag=True, help="Exit with status 1 if there are warnings.")
@_JSON
@explain_errors
def check(source: str, strict: bool, as_json: bool) -> None:
    """Check a topology and all its scenarios; tell every mistake with its line.

    Warnings tell what can be run but will hardly do what was meant: deadlines that no path can keep,
    links that are too narrow, topics without publisher or subscriber.
    """
    described = load_topology(source)
    found = {"": warnings(described)}
    for name in described.scenarios:
        found[name] = [text for text in warnings(described.under(name)) if text not in found[""]]
    if as_json:
        click.echo(json.dumps({"ok": True, **_summary(described), "warnings": found}, indent=2))
    else:
        click.echo(
            f"{described.name} is sound: {len(described.lans)} LANs, {_edges(described)} edge brokers, "
            f"{len(described.routers)} routing brokers, {len(described.all_links)} links, "
            f"{len(described.topics)} topics, {len(described.scenarios)} scenarios"
        )
        for name, texts in found.items():
            for text in texts:
                click.echo(f"warning{f' in {name}' if name else ''}: {text}")
    if strict and any(found.values()):
        raise SystemExit(1)


@topology.command()
@_SOURCE
@_SCENARIO
@_JSON
@explain_errors
def show(source: str, scenario: str | None, as_json: bool) -> None:
    """Show LANs, hosts, links, topics, routes and scenarios."""
    described = _load(source, scenario)
    if as_json:
        click.echo(json.dumps(_record(described), indent=2))
    else:
        _show(open_console(), described)


@topology.command()
@_SOURCE
@_SCENARIO
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A .png, .svg or .pdf file.  [default: NAME.png]",
)
@explain_errors
def plot(source: str, scenario: str | None, out: Path | None) -> None:
    """Draw a picture of LANs, brokers and links."""
    described = _load(source, scenario)
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("matplotlib is not installed: run pip install 'isthmus[plot]'")
    file = out or Path("-".join(filter(None, (described.name, described.scenario))) + ".png")
    # Only this command draws, and what draws takes long to import.
    importlib.import_module("topology.plot").plot(described, file)
    click.echo(f"wrote {file}")


@topology.command()
@_SOURCE
@click.option("--zookeeper-servers", type=click.Choice(["1", "3"]), default="3", show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write a file instead.")
@explain_errors
def compose(source: str, zookeeper_servers: str, out: Path | None) -> None:
    """Print a file for `docker compose` that runs the topology.

    A topology file is named in it as it is named here: relative to where the compose file will be.
    """
    text = compose_text(load_topology(source), source, zookeeper_servers=int(zookeeper_servers))
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{out} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {out}")


def _load(source: str, scenario: str | None) -> Topology:
    described = load_topology(source)
    return described if scenario is None else described.under(scenario)


def _edges(described: Topology) -> int:
    return sum(len(lan.edges) for lan in described.lans)


def _summary(described: Topology) -> dict[str, Any]:
    return {
        "name": described.name,
        "description": described.description,
        "lans": [lan.name for lan in described.lans],
        "edges": _edges(described),
        "routers": len(described.routers),
        "zookeeper_servers": described.zookeeper_servers,
        "topics": len(described.topics),
        "publishers": len(described.publishers),
        "subscribers": len(described.subscribers),
        "scenarios": list(described.scenarios),
    }


def _record(described: Topology) -> dict[str, Any]:
    return {
        **_summary(described),
        "scenario": described.scenario,
        "hosts": [{**asdict(host), "runs": list(host.runs)} for host in described.hosts],
        "links": [
            {
                "name": link.name,
                "ends": list(link.ends),
                "out": asdict(link.ways.out),
                "back": asdict(link.ways.back),
            }
            for link in described.all_links
        ],
        "topics": {name: qos.to_record() for name, qos in described.topics.items()},
        "routes": [asdict(route) for route in routes(described)],
        "warnings": warnings(described),
    }


def _show(console: Console, described: Topology) -> None:
    title = Text(described.name, style="bold")
    if described.scenario:
        title.append(f", {described.scenario}")
        title.append(f": {described.scenarios[described.scenario].description}", style="none")
    parts: list[RenderableType] = [title, Text(described.description), Text(), _hosts(described)]
    parts += [Text(), _links(described.all_links)]
    if described.topics:
        parts += [Text(), _topics(described)]
    if crossing := routes(described):
        table = _table(
            "route", "from", "to", "via router", "nearest", "direct", "deadline", numbers=(3, 5, 6)
        )
        for route in crossing:
            late = route.deadline_ms is not None and route.via_router_ms >= route.deadline_ms
            table.add_row(
                route.topic,
                route.source,
                route.target,
                Text(f"{route.via_router_ms:g} ms", style="bold red" if late else "none"),
                route.router,
                f"{route.direct_ms:g} ms",
                _milliseconds(route.deadline_ms),
            )
        parts += [Text(), table]
    if described.scenarios and not described.scenario:
        table = _table("scenario", "links", "description")
        for scenario in described.scenarios.values():
            links = "; ".join(f"{name}: {ways.describe()}" for name, ways in scenario.links.items())
            table.add_row(scenario.name, links, scenario.description)
        parts += [Text(), table]
    parts += [Text(f"warning: {text}", style="yellow") for text in warnings(described)]
    console.print(Group(*parts))


def _hosts(described: Topology) -> Table:
    table = _table("place", "host", "runs")
    for host in described.hosts:
        runs = ", ".join(_clients(described, host.lan) if item == "clients" else item for item in host.runs)
        table.add_row(f"LAN {host.lan}" if host.lan else "cloud", host.name, runs)
    return table


def _clients(described: Topology, lan: str) -> str:
    publishers = sum(item.lan == lan for item in described.publishers)
    subscribers = sum(item.lan == lan for item in described.subscribers)
    counts = ((publishers, "publisher"), (subscribers, "subscriber"))
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count)


def _links(links: Iterable[Link]) -> Table:
    table = _table("link", "between", "out", "back", "round trip", numbers=(4,))
    for link in links:
        same = link.ways.out == link.ways.back
        table.add_row(
            link.name,
            " and ".join(link.ends),
            link.ways.out.describe(),
            Text("the same", style="dim") if same else link.ways.back.describe(),
            f"{link.round_trip_ms:g} ms",
        )
    return table


def _topics(described: Topology) -> Table:
    names = ("topic", "period", "deadline", "losses", "retention", "messages/s", "from", "to")
    table = _table(*names, numbers=(1, 2, 3, 4, 5))
    for name, qos in described.topics.items():
        table.add_row(
            name,
            _milliseconds(qos.period_ms),
            _milliseconds(qos.deadline_ms),
            _losses(qos),
            str(qos.retention),
            f"{described.rate_per_s(name):g}",
            ", ".join(sorted(described.publishing_lans(name))),
            ", ".join(sorted(described.subscribing_lans(name))),
        )
    return table


def _losses(qos: TopicQos) -> str:
    return "any" if qos.loss_tolerance is None else str(qos.loss_tolerance)


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:g} ms"


def _table(*names: str, numbers: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in numbers else "left", no_wrap=index == 0)
    return table
