"""`isthmus watch`: latency and deadline misses while the brokers run."""

import json
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from pyspark.sql.streaming.query import StreamingQuery
from rich.live import Live

from coordinator.java import find_java
from isthmus.board import Board
from isthmus.commands.cluster import add_row, open_console, open_table
from isthmus.commands.report import spark_settings
from isthmus.errors import explain_errors
from spark_analysis import watch as watching
from spark_analysis.charts import milliseconds, number
from spark_analysis.reading import SMALL_JOB, is_url, local_url, open_session
from spark_analysis.schema import ROWS_FOLDER
from spark_analysis.shipped import FOLLOW_QUOTA_BYTES, Quota
from spark_analysis.shipper import PARQUET_FOLDER, ship

SHIP_EVERY_S = 1


@click.command()
@click.argument("traces")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for windows as Parquet and for checkpoints.  [default: TRACES/watch]",
)
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
@spark_settings
@click.option("--window", "window_s", type=click.IntRange(1), default=watching.WINDOW_S, show_default=True)
@click.option(
    "--late",
    "late_s",
    type=click.IntRange(0),
    default=watching.LATE_S,
    show_default=True,
    help="Seconds that rows may be late.",
)
@click.option("--for", "for_s", type=click.FloatRange(0), help="Stop after this many seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per window.")
@explain_errors
def watch(
    traces: str,
    out: Path | None,
    master: str,
    settings: Mapping[str, str],
    window_s: int,
    late_s: int,
    for_s: float | None,
    as_json: bool,
) -> None:
    """Watch percentiles and deadline misses per topic and link, window by window.

    TRACES is the folder that brokers write their traces to; segments in it are shipped as they
    close. With a URL of shipped traces, shipping is left to `isthmus trace ship`.
    """
    folder = None if is_url(traces) else Path(traces).absolute()
    if folder is None and out is None:
        raise click.UsageError("give --out: windows and checkpoints need a folder of this machine")
    location = traces.rstrip("/")
    quota = Quota(FOLLOW_QUOTA_BYTES)
    if folder is not None:
        ship(folder, quota=quota)
        (folder / PARQUET_FOLDER / ROWS_FOLDER).mkdir(parents=True, exist_ok=True)
        location = local_url(folder / PARQUET_FOLDER)
    plan = watching.WatchSettings(location, out or Path(traces) / "watch", window_s, late_s)
    ends = None if for_s is None else time.monotonic() + for_s
    console = open_console()
    if console.is_terminal and not as_json:
        click.echo(f"watching {traces}; Spark takes some seconds to start, Ctrl-C ends the watch", err=True)
    quick = SMALL_JOB if folder is not None and master.startswith("local") else {}
    session = open_session(master, "isthmus watch", find_java().home, {**quick, **settings})
    queries: list[StreamingQuery] = []
    stopped = threading.Event()
    # Spark's own handler cancels jobs and interrupts what is being asked of Java: both are told at length.
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())

    def go_on() -> None:
        while not stopped.is_set() and (ends is None or time.monotonic() < ends):
            if folder is not None:
                ship(folder, quota=quota)
            watching.wait(queries, SHIP_EVERY_S)

    try:
        if console.is_terminal and not as_json:
            title = f"isthmus watch {traces}, windows of {window_s} s; Ctrl-C ends the watch"
            board = Board(title, window_s, late_s)
            with Live(board.render(), console=console, auto_refresh=False) as live:
                live.refresh()
                tell, tell_so_far = _tellers(board, live)
                queries = watching.start(session, plan, tell, tell_so_far)
                go_on()
        else:
            click.echo(
                f"watching {traces}: windows of {window_s} s, told when final, {late_s} s after they end "
                "and when nodes have closed the next segments (10 s); Ctrl-C ends the watch",
                err=True,
            )
            queries = watching.start(session, plan, _printer(as_json))
            go_on()
        if stopped.is_set():
            click.echo("stopped; the next watch goes on from here", err=True)
    finally:
        watching.stop(session, queries)
        session.stop()
        signal.signal(signal.SIGINT, before)


def _tellers(board: Board, live: Live) -> tuple[watching.Tell, watching.Tell]:
    """Who shows final windows, and who shows windows so far."""
    turn = threading.Lock()  # each query has a thread of its own

    def add(kind: str, rows: list[dict[str, Any]], final: bool) -> None:
        with turn:
            board.add(kind, rows, final=final)
            live.update(board.render(), refresh=True)

    return (lambda kind, rows: add(kind, rows, True)), (lambda kind, rows: add(kind, rows, False))


def _printer(as_json: bool) -> watching.Tell:
    turn = threading.Lock()  # rows of both kinds come from threads of their own: one table at a time

    def tell(kind: str, rows: list[dict[str, Any]]) -> None:
        with turn:
            _print_json(kind, rows) if as_json else _print_table(kind, rows)

    return tell


def _print_json(kind: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        click.echo(json.dumps({"kind": kind, **row}, default=str))


def _print_table(kind: str, rows: list[dict[str, Any]]) -> None:
    name = kind.removesuffix("s")
    table = open_table("", ("window, UTC", name, "messages", "median", "p99", "missed"))
    shown = None
    for row in rows:
        add_row(
            table,
            # A window is named once, above its topics or links.
            "" if row["window_start"] == shown else f"{row['window_start']:%H:%M:%S}",
            row[name],
            number(row["deliveries" if kind == "topics" else "messages"]),
            milliseconds(row["p50_ms"]),
            milliseconds(row["p99_ms"]),
            number(row["missed"]),
        )
        shown = row["window_start"]
    open_console().print(table)
