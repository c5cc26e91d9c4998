"""`isthmus report`: where the latency went, from traces."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from coordinator.java import find_java
from isthmus.commands.cluster import add_row, open_console, open_table
from isthmus.errors import explain_errors
from spark_analysis.charts import NOTHING, milliseconds, number
from spark_analysis.reading import open_session, prepare, settings_for
from spark_analysis.report import check_writable, make_report, write_summary


def _read_settings(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    wrong = [value for value in values if "=" not in value]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is no setting, for example spark.executor.memory=4g")
    return dict(value.split("=", 1) for value in values)


spark_settings = click.option(
    "--conf",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_read_settings,
    help="A setting of Spark, as for spark-submit; may be repeated.",
)


@click.command()
@click.argument("traces")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the page, the tables and the summary.",
)
@click.option("--master", default="local[*]", show_default=True, help="Where Spark runs.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the summary here too."
)
@spark_settings
@click.option("--against", metavar="OTHER", help="Compare with other traces, or with an earlier report.")
@explain_errors
def report(
    traces: str,
    out: Path,
    master: str,
    file: Path | None,
    settings: Mapping[str, str],
    against: str | None,
) -> None:
    """Report per topic, hop, link and node where messages spent their time.

    TRACES is the folder that brokers write their traces to, a folder of shipped traces, or a URL of
    one that Spark can read.
    """
    # What cannot be read or written is refused before Spark starts.
    check_writable(out, "--out")
    if file is not None:
        check_writable(file.absolute().parent, "--json")
    url, _ = prepare(traces)
    suited = settings_for(url) if master.startswith("local") else {}
    session = open_session(master, "isthmus report", find_java().home, suited | dict(settings))
    try:
        made = make_report(session, traces, out, against, lambda text: click.echo(text, err=True))
    finally:
        session.stop()
    if file is not None:
        write_summary(file, made.summary)
    _show(made.summary)
    click.echo(f"page: {made.page}")


def _show(summary: dict[str, Any]) -> None:
    console = open_console()
    hit = summary["deadline_hit_pct"]
    doubtful = f"{summary['unaccounted']:,} unaccounted, " if summary["unaccounted"] else ""
    console.print(
        f"{summary['messages']:,} messages, {summary['deliveries']:,} deliveries, {summary['lost']:,} lost, "
        f"{doubtful}"
        f"{NOTHING if hit is None else f'{hit:.2f} %'} in time, "
        f"{summary['bound_violations']:,} of {summary['bounds_checked']:,} age bounds broken"
    )
    table = open_table(
        "", ("topic", "messages", "median", "p99", "in time", "lost", "longest run", "tolerated")
    )
    most = max(10, shutil.get_terminal_size().lines - 12)
    worst = sorted(summary["topics"], key=lambda row: -(row["p99_ms"] or 0))
    for row in worst[:most]:
        in_time = row["deadline_hit_pct"]
        add_row(
            table,
            row["topic"],
            number(row["messages"]),
            milliseconds(row["p50_ms"]),
            milliseconds(row["p99_ms"]),
            NOTHING if in_time is None else f"{in_time:.2f} %",
            number(row["lost"]),
            number(row["longest_loss_run"]),
            number(row["loss_tolerance"]),
        )
    console.print(table)
    if len(worst) > most:
        console.print(f"{len(worst) - most} more topics are on the page")
    for problem in summary["problems"]:
        console.print(f"note: {problem}", markup=False)
