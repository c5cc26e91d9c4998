"""The report on disk: JSON of the promised shape, tables, and a page that a browser shows whole."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark_analysis.analysis import Analysis
from spark_analysis.comparison import compare
from spark_analysis.errors import AnalysisError
from spark_analysis.reading import open_session, prepare, read_traces
from spark_analysis.report import check_writable, summary_of, write_report

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
    page = report.page.read_text()
    assert "Compared with yesterday" in page
    # What changed is told in words and units, what did not is only counted.
    assert re.search(r"<td>valve</td><td>p99</td><td>[\d.]+ ms</td><td>[\d.]+ ms</td><td>-50.0 %</td>", page)
    assert f"{len(changes) - 1} other measures are as they were" in page
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


def test_what_cannot_be_written_is_refused_before_any_work(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(AnalysisError, match=r"file/below \(Not a directory\): give another --out"):
        check_writable(tmp_path / "file" / "below", "--out")
    check_writable(tmp_path / "new" / "folder", "--out")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_an_address_that_spark_cannot_read_is_explained(spark: SparkSession, tmp_path: Path):
    for address in ("nonsense://traces", "hdfs://127.0.0.1:1/traces", f"file://{tmp_path}/file"):
        (tmp_path / "file").mkdir(exist_ok=True)
        if address.startswith("file:"):
            assert read_traces(spark, address).rows.isEmpty()
            continue
        with pytest.raises(AnalysisError, match="check the address") as refused:
            read_traces(spark, address)
        assert "\n" not in str(refused.value)


def test_a_master_that_is_none_or_does_not_answer_is_refused_before_java_starts():
    with pytest.raises(AnalysisError, match="master is 'nonsense': give local"):
        open_session("nonsense", "tests")
    for address in ("127.0.0.1:1", "127.0.0.1", "127.0.0.1:port,127.0.0.1:1"):
        with pytest.raises(AnalysisError, match="no master answers"):
            open_session(f"spark://{address}", "tests")


def test_the_page_names_clients_by_their_lan_and_folds_them(outage: Analysis, tmp_path: Path):
    named = {"pub-1": "0123456789abcdef", "sub-1": "fedcba9876543210"}
    text = json.dumps({name: outage.rows(name) for name in ("nodes", "links", "slowest", "blame")})
    for name, client in named.items():
        text = text.replace(name, client)
    tables = {name: pa.Table.from_pylist(rows) for name, rows in json.loads(text).items()}
    page = write_report(
        replace(outage, tables={**outage.tables, **tables}), "traces", tmp_path
    ).page.read_text()
    assert not any(client in page for client in named.values())
    links = page.partition("<h2>Links")[2]
    brokers, _, clients = links.partition("<details><summary>2 links of clients")
    assert "<td>router-1 → edge-office" in brokers
    assert "plant·012345 → edge-plant" in clients and "plant·012345" not in brokers
    assert re.search(r"valve #\d+ → office·fedcba", page)
