"""Windows of a growing folder: final ones only, once each, also after a restart."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from overlay.trace import Event
from spark_analysis.reading import prepare
from spark_analysis.watch import WatchSettings, start
from tests.spark_analysis.nodes import MS, QOS, Delays, Overlay


def test_windows_are_told_once_when_they_are_final(spark: SparkSession, tmp_path: Path):
    traces = tmp_path / "traces of today=1%"
    told: list[tuple[str, dict[str, Any]]] = []
    so_far: list[dict[str, Any]] = []
    turn = threading.Lock()

    def tell(kind: str, rows: list[dict[str, Any]]) -> None:
        with turn:
            told.extend((kind, row) for row in rows)

    def watch_all() -> None:
        location, _ = prepare(str(traces))
        plan = WatchSettings(location, tmp_path / "out", window_s=1, late_s=1)
        queries = start(spark, plan, tell, lambda _, rows: so_far.extend(rows))
        for query in queries:
            query.processAllAvailable()
            query.stop()

    overlay = Overlay(QOS)
    for sequence in range(1, 400):
        late = 100 <= sequence < 110
        overlay.carry(sequence, sequence * 10 * MS, Delays(router=90 * MS) if late else None)
        # The router sends it to another edge, too.
        came_ns = sequence * 10 * MS + 13 * MS
        overlay.router.saw(
            *(Event.DISPATCHED, 7, sequence),
            came="edge-plant",
            went="edge-lab",
            in_ns=came_ns,
            out_ns=came_ns + 3 * MS,
            link_bound_ns=11 * MS,
        )
    for node in overlay.nodes:
        node.write(traces, 1)
    watch_all()
    topics = [row for kind, row in told if kind == "topics"]
    # The last second is not final yet: later rows could still come.
    assert [row["deliveries"] for row in topics] == [95, 100, 100]
    assert [row["missed"] for row in topics] == [0, 10, 0]
    assert topics[0]["topic"] == "valve"
    # Whoever looks on has seen all that came.
    assert [row["deliveries"] for row in so_far] == [95, 100, 100, 100, 4]
    assert so_far[1]["missed"] == 10
    assert 41 <= topics[0]["p50_ms"] <= 43
    links = [row for kind, row in told if kind == "links"]
    assert {row["link"] for row in links} >= {
        "pub-1 → edge-plant",
        "router-1 → edge-office",
        "edge-office → clients in office",
    }
    # However many peers a node sends a message to, it came once.
    crossed = [row["messages"] for row in links if row["link"] == "edge-plant → router-1"]
    assert crossed == [98, 100, 100]

    told.clear()
    for sequence in range(400, 800):
        overlay.carry(sequence, sequence * 10 * MS)
    overlay.carry(1_000, 10 * MS)  # far too late: its window has been told
    for node in overlay.nodes:
        node.write(traces, 2)
    # A file that is damaged and one that is empty are skipped.
    folder = next((traces / "parquet" / "rows").iterdir())
    whole = next(folder.glob("sub-1-*.parquet")).read_bytes()
    (folder / "edge-torn-1-1-000001.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "edge-void-1-1-000001.parquet").touch()
    watch_all()
    again = [row for kind, row in told if kind == "topics"]
    assert [row["deliveries"] for row in again] == [100, 100, 100, 100]
    assert not {row["window_start"] for row in topics} & {row["window_start"] for row in again}
    kept = spark.read.parquet(*map(str, sorted((tmp_path / "out" / "topics").iterdir())))
    assert kept.count() == len(topics) + len(again)


@pytest.mark.slow
def test_the_command_prints_final_windows_as_json_and_ends_by_itself(tmp_path: Path):
    overlay = Overlay(QOS)
    for sequence in range(1, 400):
        overlay.carry(sequence, sequence * 10 * MS)
    for node in overlay.nodes:
        node.write(tmp_path / "traces")
    # Most of the time is for Spark to start.
    command = [sys.executable, "-m", "isthmus", "watch", str(tmp_path / "traces"), "--json", "--for", "40"]
    command += ["--window", "1", "--late", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    topics = [row for row in told if row["kind"] == "topics"]
    assert [(row["topic"], row["deliveries"], row["missed"]) for row in topics] == [
        ("valve", 95, 0),
        ("valve", 100, 0),
        ("valve", 100, 0),
    ]
    assert {row["link"] for row in told if row["kind"] == "links"} >= {"router-1 → edge-office"}
    assert list((tmp_path / "out" / "topics").rglob("*.parquet"))
