"""The report on disk: JSON of the promised shape, tables, and a page that a browser shows whole."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from spark_analysis.analysis import Analysis
from spark_analysis.errors import AnalysisError
from spark_analysis.reading import prepare
from spark_analysis.report import compare, summary_of, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARTEFACTS = Path(__file__).parents[2] / "results"
"""Kept for people to look at; git ignores it."""
PLOTS = {"plot-hops", "plot-waterfall", "plot-timeline", "plot-lans", "plot-outage-1"}


def test_the_summary_has_the_promised_shape(outage: Analysis, tmp_path: Path):
    write_report(outage, "traces", tmp_path)
    summary = json.loads((tmp_path / "report.json").read_text())
    assert {"messages", "bound_violations", "deadline_hit_pct", "topics", "hops", "links"} <= summary.keys()
    (topic,) = summary["topics"]
    wanted = {"topic", "messages", "p50_ms", "p99_ms", "longest_loss_run", "deadline_hit_pct"}
    assert wanted <= topic.keys()
    for part in ("hops", "links"):
        assert all(
            {"count", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms"} <= row.keys()
            for row in summary[part]
        )


def test_every_table_is_there_as_parquet_and_csv(outage: Analysis, tmp_path: Path):
    write_report(outage, "traces", tmp_path)
    for name in ("topics", "hops", "links", "nodes", "lans", "blame", "drops", "timeline", "segments"):
        rows = pq.ParquetFile(tmp_path / "tables" / f"{name}.parquet").read().num_rows
        lines = (tmp_path / "tables" / f"{name}.csv").read_text().strip().splitlines()
        assert rows == len(lines) - 1 > 0


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(outage: Analysis, tmp_path: Path):
    summary = outage.summary | {"problems": []}
    spiteful = replace(outage, summary=summary, problems=["<img onerror=alert(1)>"])
    page = write_report(spiteful, "<b>traces</b>", tmp_path).page.read_text()
    assert "<img" not in page and "<b>traces" not in page
    assert not re.search(r"<script|<link|@import|(?:src|href)=|https?://", page)
    assert set(re.findall(r'<svg id="([\w-]+)"', page)) == PLOTS
    assert "router-1 → router-2" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_a_browser_shows_every_plot_without_complaint(outage: Analysis, tmp_path: Path):
    page = write_report(outage, "traces", tmp_path).page
    picture = tmp_path / "report.png"
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1100,3600",
        "--hide-scrollbars",
        f"--screenshot={picture}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ":CONSOLE" not in done.stderr
    assert set(re.findall(r'<svg id="([\w-]+)"', done.stdout)) == PLOTS
    assert picture.stat().st_size > 50_000
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(picture, ARTEFACTS / "report.png")


def test_two_runs_are_compared(outage: Analysis, tmp_path: Path):
    before = json.loads(json.dumps(outage.summary))
    before["topics"][0]["p99_ms"] = outage.summary["topics"][0]["p99_ms"] * 2
    changes = compare(before, outage.summary)
    changed = [row for row in changes if row["change_pct"]]
    assert [(row["what"], row["measure"], row["change_pct"]) for row in changed] == [
        ("valve", "p99_ms", -50.0)
    ]
    report = write_report(outage, "traces", tmp_path, before, "yesterday")
    assert "Compared with yesterday" in report.page.read_text()
    assert report.summary["comparison"] == changes


def test_what_is_no_run_is_refused(tmp_path: Path, outage: Analysis):
    with pytest.raises(AnalysisError, match="is no folder"):
        prepare(str(tmp_path / "nowhere"))
    with pytest.raises(AnalysisError, match="has no traces"):
        prepare(str(tmp_path))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(AnalysisError, match="no summary of a report"):
        summary_of(None, str(tmp_path), lambda _: None)
    (tmp_path / "file").touch()
    with pytest.raises(AnalysisError, match="give another --out"):
        write_report(outage, "traces", tmp_path / "file")
