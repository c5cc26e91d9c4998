"""How a run on the testbed ends: every message traced, and a report of where they spent their time.

Before the run `trace_everything` makes the settings to hand to its driver; after it `tell_latency`
makes the report and tells it in a few lines.
"""

import shutil
import time
from pathlib import Path

import click
from rich.console import Console

from coordinator.java import find_java
from overlay.errors import IsthmusError
from runtime.tracing import TraceSettings
from spark_analysis.reading import open_session, prepare, settings_for
from spark_analysis.report import Report, headlines, make_report


def trace_everything(report_dir: Path) -> TraceSettings:
    """Trace every message, to a folder without traces of earlier runs."""
    folder = report_dir / "traces"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise click.ClickException(
            f"{folder} cannot be used for traces ({error.strerror}): give another --report-dir"
        ) from error
    return TraceSettings(folder.absolute(), sampling=1.0)


def tell_latency(console: Console, traces: Path, out: Path, against: str | None = None) -> Report | None:
    """Make the report of a run and tell it in a few lines; says why if there is none.

    `against` is another run's traces or report to compare with.
    """
    started_s = time.monotonic()
    try:
        with console.status("Spark reads the traces"):
            url, _ = prepare(str(traces))
            session = open_session("local[*]", "isthmus", find_java().home, settings_for(url))
            try:
                made = make_report(session, str(traces), out, against, lambda _: None)
            finally:
                session.stop()
    except IsthmusError as error:
        console.print(f"no report: {error}", markup=False)
        return None
    console.print()
    for line in headlines(made.summary):
        console.print(line, markup=False)
    console.print(f"report: {made.page} (took {time.monotonic() - started_s:.0f} s)", markup=False)
    return made
