"""Segments become Parquet once each, whatever is killed and whatever they hold."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from overlay.qos import TopicQos
from overlay.trace import RECORD_BYTES, Event, Reason
from spark_analysis.errors import AnalysisError
from spark_analysis.schema import ARROW_ROWS, ARROW_SEGMENTS
from spark_analysis.segments import read_segment
from spark_analysis.shipper import has_segments, ship
from tests.spark_analysis.nodes import MS, WALL_NS, Node


def router() -> Node:
    node = Node("router-1", "router", offset_ns=500 * MS)
    node.log.define_topic(1, "valve", TopicQos(deadline_ms=50, period_ms=10, loss_tolerance=3))
    return node


def see(node: Node, count: int, first: int = 1) -> None:
    for sequence in range(first, first + count):
        node.saw(Event.DISPATCHED, 2**64 - 1, sequence, came="edge-1", went="edge-2", in_ns=MS, out_ns=2 * MS)


def shipped_rows(folder: Path) -> list[dict[str, object]]:
    return [
        row for path in sorted(folder.glob("parquet/rows/**/[!.]*")) if path.is_file() for row in rows(path)
    ]


def rows(path: Path) -> list[dict[str, object]]:
    return pq.ParquetFile(path).read().to_pylist()


def shipped_segments(folder: Path) -> list[dict[str, object]]:
    return [row for path in sorted(folder.glob("parquet/segments/[!.]*")) for row in rows(path)]


def test_a_row_says_what_the_record_meant():
    node = router()
    see(node, 1)
    node.saw(Event.DROPPED, 5, 9, topic=77, in_ns=3 * MS, reason=Reason.LATE, deadline_ns=4 * MS)
    segment = read_segment(node.segment())
    assert segment.rows.schema == ARROW_ROWS
    first, second = segment.rows.to_pylist()
    assert first["at"].timestamp() == (WALL_NS + MS) / 1e9
    del first["at"]
    assert first == {
        "node": "router-1",
        "role": "router",
        "lan": "",
        "host": "boot-1",
        "clock": "boot-1/router-1",
        "event": "dispatched",
        "reason": None,
        "topic": "valve",
        "publisher": -1,
        "sequence": 1,
        "peer_in": "edge-1",
        "peer_out": "edge-2",
        "in_ns": 501 * MS,
        "out_ns": 502 * MS,
        "born_ns": None,
        "age_bound_ns": None,
        "link_bound_ns": None,
        "slack_ns": None,
        "deadline_ns": 50 * MS,
        "loss_tolerance": 3,
        "period_ns": 10 * MS,
    }
    assert (second["event"], second["reason"], second["topic"]) == ("dropped", "late", "topic 77")
    assert (second["deadline_ns"], second["loss_tolerance"], second["peer_in"]) == (4 * MS, None, None)


def test_an_empty_segment_has_no_rows():
    assert read_segment(router().segment()).rows.num_rows == 0


def test_closed_segments_are_shipped_once(tmp_path: Path):
    node = router()
    for number in (1, 2):
        see(node, 10, first=number * 10)
        node.write(tmp_path, number)
    assert has_segments(tmp_path)
    shipment = ship(tmp_path)
    assert (shipment.segments, shipment.records, shipment.salvaged) == (2, 20, 0)
    assert not has_segments(tmp_path)
    assert [path.parent.name for path in tmp_path.glob("parquet/rows/*/*")] == ["date=2023-11-14"] * 2
    assert ship(tmp_path).segments == 0
    assert [row["sequence"] for row in shipped_rows(tmp_path)] == list(range(10, 30))
    facts = shipped_segments(tmp_path)
    assert [(fact["number"], fact["records"], fact["sampling"]) for fact in facts] == [(1, 10, 1), (2, 10, 1)]


def test_a_segment_that_comes_again_is_not_counted_twice(tmp_path: Path):
    """As after a kill between the renaming of the Parquet file and the deletion of the segment."""
    node = router()
    see(node, 10)
    path = node.write(tmp_path)
    data = path.read_bytes()
    ship(tmp_path)
    path.write_bytes(data)
    assert ship(tmp_path).segments == 0
    assert not path.exists()
    assert len(shipped_rows(tmp_path)) == 10


def test_a_half_written_open_segment_of_a_dead_process_is_salvaged(tmp_path: Path):
    node = router()
    see(node, 10)
    path = node.write(tmp_path, suffix=".open")
    path.write_bytes(path.read_bytes()[: -RECORD_BYTES // 2])
    shipment = ship(tmp_path)
    assert (shipment.segments, shipment.records, shipment.salvaged) == (1, 9, 1)
    assert shipment.torn_bytes == RECORD_BYTES // 2
    (fact,) = shipped_segments(tmp_path)
    assert (fact["salvaged"], fact["torn_bytes"]) == (True, RECORD_BYTES // 2)


def test_an_open_segment_of_a_living_process_is_left_alone(tmp_path: Path):
    path = router().write(tmp_path, suffix=".open")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert ship(tmp_path).segments == 0
    assert path.exists()


def test_what_cannot_be_read_is_set_aside_with_the_reason(tmp_path: Path):
    good = router()
    see(good, 3)
    good.write(tmp_path, 1)
    see(good, 3)
    good.write(tmp_path, 2, schema=9)
    (tmp_path / "router-1-1-1-000003.segment").write_bytes(b"no segment at all")
    shipment = ship(tmp_path)
    assert shipment.records == 3
    assert [text.partition(": ")[2][:16] for text in shipment.set_aside] == [
        "schema version 9",
        "segment starts w",
    ]
    assert len(list((tmp_path / "aside").iterdir())) == 2
    problems = [fact["problem"] for fact in shipped_segments(tmp_path)]
    assert problems[0] is None
    assert problems[1] == "schema version 9, this reader knows 1"
    assert pq.read_schema(next(tmp_path.glob("parquet/segments/*3.parquet"))) == ARROW_SEGMENTS
    assert ship(tmp_path).set_aside == []


def test_a_folder_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(AnalysisError, match="is no folder"):
        ship(tmp_path / "nowhere")


def test_a_shipper_killed_at_any_moment_loses_and_repeats_nothing(tmp_path: Path):
    node = router()
    for number in range(1, 31):
        see(node, 50, first=number * 50)
        node.write(tmp_path, number)
    code = "import sys; from pathlib import Path; from spark_analysis.shipper import ship\n"
    code += "print('ready', flush=True); ship(Path(sys.argv[1]))"
    kills = 0
    for turn in range(6):
        before = len(list(tmp_path.glob("*.segment")))
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
            while process.poll() is None and len(list(tmp_path.glob("*.segment"))) > before - turn % 5 - 1:
                os.sched_yield()
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
        sequences = [row["sequence"] for row in shipped_rows(tmp_path)]
        waiting = sum(read_segment(path.read_bytes()).rows.num_rows for path in tmp_path.glob("*.segment"))
        assert len(set(sequences)) == len(sequences)
        assert len(sequences) + waiting >= 1_500
        if not before:
            break
    assert kills >= 3
    ship(tmp_path)
    assert sorted(row["sequence"] for row in shipped_rows(tmp_path)) == list(range(50, 1_550))
