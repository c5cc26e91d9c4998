"""Writing a report: tables as Parquet and CSV, a summary as JSON, one HTML page."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.csv
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from spark_analysis.analysis import Analysis, Progress, analyse
from spark_analysis.charts import milliseconds
from spark_analysis.comparison import COMPARED, compare
from spark_analysis.errors import AnalysisError
from spark_analysis.page import render
from spark_analysis.problems import named
from spark_analysis.reading import is_url, prepare, read_traces

SUMMARY_NAME: Final = "report.json"
PAGE_NAME: Final = "report.html"
TABLES_FOLDER: Final = "tables"

Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """What was written."""

    summary: Row
    page: Path


def check_writable(folder: Path, option: str) -> None:
    """Make a folder for results; raises AnalysisError before hours of work rather than after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise AnalysisError(
            f"nothing can be written to {folder} ({error.strerror}): give another {option}"
        ) from error


def make_report(
    session: SparkSession, location: str, out: Path, against: str | None, progress: Progress
) -> Report:
    """Analyse a run and write its report. Raises AnalysisError."""
    before = None if against is None else summary_of(session, against, progress)
    url, shipment = prepare(location)
    if shipment.segments:
        progress(f"shipped {shipment.records} records of {shipment.segments} segments")
    analysis = analyse(session, read_traces(session, url), shipment, progress)
    progress("writing")
    return write_report(analysis, location, out, before, against or "")


def write_report(
    analysis: Analysis, source: str, out: Path, before: Mapping[str, Any] | None = None, other: str = ""
) -> Report:
    """Write the report of an analysis, compared with the summary of another run if there is one."""
    comparison = [] if before is None else compare(before, analysis.summary)
    summary = analysis.summary if before is None else analysis.summary | {"comparison": comparison}
    page = out / PAGE_NAME
    try:
        _write_tables(out / TABLES_FOLDER, analysis)
        write_summary(out / SUMMARY_NAME, summary)
        page.write_text(render(analysis, source, comparison, other), encoding="utf-8")
    except OSError as error:
        raise AnalysisError(f"the report cannot be written to {out} ({error}): give another --out") from error
    return Report(summary, page)


def summary_of(session: SparkSession, location: str, progress: Progress) -> Row:
    """The summary of another run: from its report if it has one, else from its traces."""
    if not is_url(location):
        for path in (Path(location), Path(location) / SUMMARY_NAME):
            if path.is_file():
                return _read_summary(path)
    url, shipment = prepare(location)
    progress(f"reading {location} to compare with")
    return analyse(session, read_traces(session, url), shipment, progress).summary


def _read_summary(path: Path) -> Row:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AnalysisError(f"{path} cannot be read as the summary of a report: {error}") from error
    if not isinstance(summary, dict) or not all(isinstance(summary.get(part), list) for part in COMPARED):
        raise AnalysisError(
            f"{path} is no summary of a report: give a folder with traces or a {SUMMARY_NAME}"
        )
    return summary


def headlines(summary: Mapping[str, Any]) -> list[str]:
    """A report in a few lines for people."""
    hit = summary["deadline_hit_pct"]
    in_time = "" if hit is None else f", {hit:.2f} % in time"
    ages = summary["age"]
    lines = [
        f"{summary['messages']:,} messages traced: end to end p50 {milliseconds(ages['p50_ms'])}, "
        f"p99 {milliseconds(ages['p99_ms'])}{in_time}",
        f"{summary['bound_violations']:,} of {summary['bounds_checked']:,} age bounds broken",
    ]
    losing = [row for row in summary["topics"] if row["longest_loss_run"]]
    if losing:
        worst = max(losing, key=_loss_excess)
        limit = worst["loss_tolerance"]
        lines.append(
            f"longest loss run {worst['longest_loss_run']} ({worst['topic']}, tolerated "
            f"{'any' if limit is None else limit})"
        )
    else:
        doubt = summary["unaccounted"] or any(row["lost"] is None for row in summary["topics"])
        lines.append("no message known to be lost" if doubt else "no message lost")
    if summary["unaccounted"]:
        lines.append(
            f"{summary['unaccounted']:,} messages unaccounted for: their subscribers left or were cut off"
        )
    silent = [row["topic"] for row in summary["topics"] if not row["deliveries"]]
    if silent:
        lines.append(f"nothing delivered of {named(silent)}")
    if summary["outages"]:
        longest = max(summary["outages"], key=lambda outage: outage["duration_ms"])
        lines.append(
            f"longest silence {longest['duration_ms']:.0f} ms"
            f"{'' if longest['ended'] else ' without end'}, in {longest['streams']} streams of "
            f"{longest['topics']} topics; routers: {longest['carriers']}"
        )
    return lines


def _loss_excess(row: Mapping[str, Any]) -> tuple[float, int]:
    """How bad a topic's losses are: those beyond the tolerance first."""
    run = row["longest_loss_run"] or 0
    limit = row["loss_tolerance"]
    return (float("-inf") if limit is None else run - limit), run


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """The JSON form of a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")


def _write_tables(folder: Path, analysis: Analysis) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in analysis.tables.items():
        pq.write_table(rows, folder / f"{name}.parquet")
        pyarrow.csv.write_csv(rows, folder / f"{name}.csv")
