"""`isthmus demo`: a testbed under load loses its leader and a primary, and every promise is checked."""

import asyncio
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.errors import CoordinationError
from isthmus.commands.runs import narrated, run_options
from isthmus.commands.up import open_console
from isthmus.latency import tell_latency, trace_everything
from runtime.tracing import TraceSettings
from topology.demo import DemoResult, run_demo
from topology.driver import Driver
from topology.drivers import driver_kind
from topology.errors import TopologyError
from topology.model import Topology, load_topology
from topology.wan_kind import WanKind

_SECONDS = 15.0
_TOPOLOGY = "two-lans"


@click.command()
@click.argument("topology", required=False)
@click.option(
    "--topology", "named", metavar="TOPOLOGY", help="The same as the argument, as `isthmus drill` has it."
)
@click.option(
    "--seconds",
    type=click.FloatRange(3, 600),
    default=_SECONDS,
    show_default=True,
    help="How long messages flow, at least; longer if recovery takes longer.",
)
@run_options(
    "results/demo", "Folder for the traces and the report; what an earlier run left there is replaced."
)
def demo(
    topology: str | None,
    named: str | None,
    seconds: float,
    json_file: Path | None,
    keep: bool,
    driver: str,
    wan: str,
    report: bool,
    report_dir: Path,
) -> None:
    """Watch TOPOLOGY survive the death of its leader and of a primary.

    TOPOLOGY is a YAML file or the name of one that comes with Isthmus, see `isthmus topology list`; two-lans
    if none is given.

    Starts ZooKeeper, brokers, publishers and subscribers as processes on this machine, kills the leader
    and the primary of the busiest topic while messages flow, and compares what arrived with what was
    sent. Ends with a report of where every message spent its time, made by Spark. Exit status 0 only
    if every promise held; a report that cannot be made is no failure.
    """
    if topology is not None and named is not None:
        raise click.UsageError(f"{topology} and --topology {named}: give one of them")
    console = open_console()
    # Whatever ends this process, nobody must take an old result for the one of this run.
    _write(json_file, {"ok": False, "error": "the demonstration did not come to its end", "topics": []})
    try:
        described = load_topology(topology or named or _TOPOLOGY)
        trace = trace_everything(report_dir) if report else None
        _introduce(console, described)
        result = asyncio.run(
            _play(console, described, seconds, keep, driver_kind(driver), trace, WanKind(wan))
        )
    except (TopologyError, CoordinationError) as error:
        _write(json_file, {"ok": False, "error": str(error), "topics": []})
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        _write(json_file, {"ok": False, "error": "interrupted", "topics": []})
        raise click.Abort from None
    console.print(_report(result))
    _write(json_file, result.to_record())
    if trace is not None:
        tell_latency(console, trace.folder, report_dir)
    if not result.ok:
        raise SystemExit(1)


async def _play(
    console: Console,
    topology: Topology,
    seconds: float,
    keep: bool,
    kind: type[Driver],
    trace: TraceSettings | None,
    wan: WanKind,
) -> DemoResult:
    return await narrated(
        console,
        lambda narrator: run_demo(
            topology, seconds=seconds, observer=narrator, keep=keep, kind=kind, trace=trace, wan=wan
        ),
    )


def _introduce(console: Console, topology: Topology) -> None:
    lans = ", ".join(f"{lan.name} ({len(lan.edges)} edges, {lan.wan.delay_ms:g} ms)" for lan in topology.lans)
    console.print(Text(f"{topology.name}: ", style="bold").append(topology.description or lans, style="none"))


def _report(result: DemoResult) -> RenderableType:
    summary = Text(
        f"Leader change {result.leader_change_ms:.0f} ms, failover gap {result.failover_gap_ms:.0f} ms: "
    ).append(
        "every promise held." if result.ok else "a promise was broken.",
        style="bold green" if result.ok else "bold red",
    )
    explanation = Text(
        "Times in ms. run: most messages lost in a row; limit: how many the topic bears; twice: duplicates; "
        "gap: longest silence after its primary was killed, beyond the period.",
        style="dim",
    )
    return Group(Text(), _topics_table(result), explanation, Text(), _promises(result), Text(), summary)


def _topics_table(result: DemoResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold underline")
    table.add_column("topic", no_wrap=True, overflow="ellipsis")
    for name in ("sent", "delivered", "lost", "run", "limit", "twice", "p50", "p99", "max", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for topic in result.topics:
        alarming = "none" if topic.within_tolerance else "bold red"
        table.add_row(
            topic.topic,
            f"{topic.sent}",
            f"{topic.delivered}",
            Text(f"{topic.lost}", style=alarming),
            Text(f"{topic.longest_loss_run}", style=alarming),
            "any" if topic.loss_tolerance is None else f"{topic.loss_tolerance}",
            Text(f"{topic.duplicates}", style="bold red" if topic.duplicates else "none"),
            f"{topic.p50_ms:.1f}",
            f"{topic.p99_ms:.1f}",
            f"{topic.max_ms:.1f}",
            "" if topic.failover_gap_ms is None else f"{topic.failover_gap_ms:.0f}",
        )
    return table


def _promises(result: DemoResult) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for promise in result.promises:
        mark = Text("kept", style="green") if promise.held else Text("BROKEN", style="bold red")
        grid.add_row(mark, Text(promise.name, style="bold"), promise.detail)
    return grid


def _write(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        try:
            file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{file} cannot be written: {error.strerror}") from error
