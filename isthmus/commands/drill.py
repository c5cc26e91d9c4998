"""`isthmus drill`: faults on a testbed under load, with a verdict on every promise."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from isthmus.commands.runs import narrated, run_options
from isthmus.commands.up import open_console
from isthmus.latency import tell_latency, trace_everything
from topology.drills.campaign import campaign, totals
from topology.drills.catalogue import CATALOGUE
from topology.drills.engine import PLAYS_MAX, Plan, run_drill
from topology.drills.script import Drill
from topology.drills.soak import soak
from topology.drills.testbeds import testbed_for
from topology.drills.verdict import DrillResult, Verdict, unknown, worst
from topology.errors import TopologyError
from topology.model import load_topology
from topology.wan_kind import WanKind

DRILL_TOPOLOGY: Final = "wind-farm"
CAMPAIGN_TOPOLOGY: Final = "wind-farm-storm"
CAMPAIGN_S: Final = 300.0
SOAK_S: Final = 3600.0
_STYLES: Final = {Verdict.HELD: "bold green", Verdict.BROKEN: "bold red", Verdict.UNKNOWN: "bold yellow"}


@click.command()
@click.argument("name", metavar="NAME|all|campaign|soak|list")
@click.option(
    "--topology",
    help="A YAML file or a name, see `topology list`.  "
    f"[default: {DRILL_TOPOLOGY}; of a campaign {CAMPAIGN_TOPOLOGY}]",
)
@click.option("--seconds", type=click.FloatRange(5, 7 * 86_400), help="How long messages flow, at least.")
@click.option("--seed", type=int, default=1, show_default=True, help="Decides whom a fault hits.")
@run_options("results/drills", "Folder for traces and reports, one for each drill.")
def drill(
    name: str,
    topology: str | None,
    driver: str,
    wan: str,
    seconds: float | None,
    seed: int,
    json_file: Path | None,
    keep: bool,
    report: bool,
    report_dir: Path,
) -> None:
    """Break something on a testbed under load and see whether every promise holds.

    NAME is a drill of `isthmus drill list`; `all` plays every one, once more if nothing could be said,
    `campaign` random ones for as long as `--seconds` says, on another topology unless told otherwise.
    `soak` lets clients, topics and brokers come and go for an hour and watches what the other brokers
    use. Exit status 0: every promise held; 1: one was broken; 2: nothing can be said, because the testbed
    or the checker failed.
    """
    console = open_console()
    if name == "list":
        _show_list(console)
        return
    chosen = _chosen(name, seconds, seed)
    topology = topology or (CAMPAIGN_TOPOLOGY if name == "campaign" else DRILL_TOPOLOGY)
    # Whatever ends this process, nobody must take an old result for the one of this run.
    results = [unknown(item.name, driver, seed, "the drill did not come to its end") for item in chosen]
    began_s = time.monotonic()
    plays = dict.fromkeys((item.name for item in chosen), 0)
    _write(json_file, name, results)
    for number, item in enumerate(chosen):
        folder = report_dir / item.name
        for _ in range(PLAYS_MAX if name == "all" else 1):
            plays[item.name] += 1
            results[number] = _run_one(
                console,
                item,
                topology,
                (driver, WanKind(wan)),
                seconds,
                seed,
                keep,
                folder if report else None,
            )
            _write(json_file, name, results, time.monotonic() - began_s, plays)
            if results[number].verdict is not Verdict.UNKNOWN:
                break
    if name == "all":
        console.print(Group(Text(), _drills_table(results)))
    elif name == "campaign":
        console.print(", ".join(f"{key} {value}" for key, value in totals(results[0]).items()))
    raise SystemExit(worst(result.verdict for result in results).exit_status)


def _chosen(name: str, seconds: float | None, seed: int) -> list[Drill]:
    if name == "campaign":
        return [campaign(seconds or CAMPAIGN_S, seed)]
    if name == "soak":
        return [soak(seconds or SOAK_S)]
    if name == "all":
        return list(CATALOGUE.values())
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        raise click.UsageError(f"there is no drill {name}: use all, campaign, soak or one of {known}")
    return [CATALOGUE[name]]


def _run_one(
    console: Console,
    item: Drill,
    topology: str,
    testbed: tuple[str, WanKind],
    seconds: float | None,
    seed: int,
    keep: bool,
    report_dir: Path | None,
) -> DrillResult:
    driver, wan = testbed
    console.print(Text(f"{item.name}: ", style="bold").append(item.summary, style="none"))
    try:
        trace = trace_everything(report_dir) if report_dir is not None else None
        plan = Plan(
            item, load_topology(topology), driver, testbed_for(item, driver), seed, seconds, keep, trace, wan
        )
        result = asyncio.run(narrated(console, lambda narrator: run_drill(plan, narrator)))
    except TopologyError as error:
        result = unknown(item.name, driver, seed, str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise click.Abort from None
    console.print(_told(result))
    if trace is not None and report_dir is not None:
        tell_latency(console, trace.folder, report_dir)
    return result


def _show_list(console: Console) -> None:
    table = _table("drill", "what happens", "what is promised beside what all drills check")
    for item in CATALOGUE.values():
        table.add_row(Text(item.name, style="bold"), item.summary, item.promise)
    console.print(table)
    console.print(
        "\nAll drills check that no topic loses more messages in a row than it tolerates, that none comes "
        "twice, out of order or altered, that no age is understated, and that everything flows again at "
        "the end.",
        style="dim",
    )


def _told(result: DrillResult) -> RenderableType:
    parts: list[RenderableType] = []
    if result.topics:
        parts += [
            Text(),
            _topics_table(result),
            Text(
                "run: most messages lost in a row; limit: how many the topic bears; in time: % of the "
                "messages published before, during and after the fault that came within the deadline.",
                style="dim",
            ),
        ]
    parts.append(Text())
    for promise in result.promises:
        mark = Text("kept    " if promise.held else "BROKEN  ", style="green" if promise.held else "bold red")
        parts.append(
            mark.append(f"{promise.name}: ", style="not bold default").append(promise.detail, style="dim")
        )
    if result.reason:
        parts.append(Text(result.reason, style="yellow"))
    gap = "" if result.failover_ms is None else f", longest silence of a stream {result.failover_ms:.0f} ms"
    parts += [
        Text(),
        Text(f"{result.drill}: ")
        .append(str(result.verdict), style=_STYLES[result.verdict])
        .append(gap, style="none"),
    ]
    return Group(*parts, Text())


def _topics_table(result: DrillResult) -> Table:
    table = _table("topic")
    for name in (
        "sent",
        "delivered",
        "lost",
        "run",
        "limit",
        "twice",
        "back",
        "p99 ms",
        "in time before",
        "during",
        "after",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for topic in result.topics:
        verdict, hits = topic.verdict, topic.deadline_hits
        alarming = "none" if verdict.within_tolerance else "bold red"
        table.add_row(
            verdict.topic,
            f"{verdict.sent}",
            f"{verdict.delivered}",
            Text(f"{verdict.lost}", style=alarming),
            Text(f"{verdict.longest_loss_run}", style=alarming),
            "any" if verdict.loss_tolerance is None else f"{verdict.loss_tolerance}",
            Text(f"{verdict.duplicates}", style="bold red" if verdict.duplicates else "none"),
            Text(f"{verdict.reordered}", style="bold red" if verdict.reordered else "none"),
            f"{verdict.p99_ms:.0f}",
            *("" if share is None else f"{share:.1f}" for share in (hits.before, hits.during, hits.after)),
        )
    return table


def _drills_table(results: Sequence[DrillResult]) -> Table:
    table = _table("drill", "verdict")
    for name in ("silence ms", "sent", "delivered", "longest run lost", "twice", "back"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        verdicts = [topic.verdict for topic in result.topics]
        table.add_row(
            result.drill,
            Text(str(result.verdict), style=_STYLES[result.verdict]),
            "" if result.failover_ms is None else f"{result.failover_ms:.0f}",
            f"{sum(verdict.sent for verdict in verdicts)}",
            f"{result.delivered}",
            f"{max((v.longest_loss_run for v in verdicts if v.loss_tolerance is not None), default=0)}",
            f"{sum(verdict.duplicates for verdict in verdicts)}",
            f"{sum(verdict.reordered for verdict in verdicts)}",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold underline")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _write(
    file: Path | None,
    name: str,
    results: Sequence[DrillResult],
    elapsed_s: float = 0.0,
    plays: Mapping[str, int] | None = None,
) -> None:
    if file is not None:
        records = [result.to_record() for result in results]
        content: dict[str, Any] = records[0]
        if name == "all":
            again = [drill for drill, count in (plays or {}).items() if count > 1]
            content = {"drills": records, "elapsed_s": round(elapsed_s, 1), "played_again": again}
        elif name == "campaign":
            content["totals"] = totals(results[0])
        elif name == "soak":
            content["promises"] = [dataclasses.asdict(promise) for promise in results[0].promises]
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
