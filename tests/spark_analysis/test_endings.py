"""Streams that end too soon, pauses, damaged files: one run that has them all, compared with another."""

import json
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from overlay.trace import Event, Reason
from spark_analysis.analysis import Analysis
from spark_analysis.charts import NOTHING
from spark_analysis.outages import Silence, merge
from spark_analysis.report import headlines, make_report, write_report
from spark_analysis.shipper import ship
from tests.spark_analysis.nodes import MS, QOS, WALL_NS, Delays, Node, Overlay

TOPICS: Final = ("valve", "pulse", "lamp", "horn", "gate", "siren", "tank", "bell")
VALVE, PULSE, LAMP, HORN, GATE, SIREN, TANK, BELL = range(1, 9)
S: Final = 1_000 * MS


def play(overlay: Overlay) -> None:
    """What becomes of each topic; all take 41 ms if nothing else is said."""

    def carry(topic: int, sequences: range, start_ns: int, **rest: Any) -> None:
        for sequence in sequences:
            at_ns = start_ns + sequence * 10 * MS
            overlay.carry(sequence, at_ns, topic=topic, publisher=10 + topic, **rest)

    leaver = Node("sub-2", "client", "office")
    overlay.others.append(leaver)
    for number, name in enumerate(TOPICS, 1):
        for node in overlay.nodes:
            node.log.define_topic(number, name, QOS)
    # Its stream dies on the way to the edge; the last is on its way when the recording ends.
    carry(VALVE, range(1, 61), 0)
    carry(VALVE, range(61, 101), 0, lost_at="router-1")
    carry(VALVE, range(101, 102), 8 * S, lost_at="edge-plant")
    # Pauses longer than its period, which is a least one. All is delivered: the subscriber lives.
    for sequence in range(1, 11):
        overlay.carry(sequence, sequence * S, topic=PULSE, publisher=10 + PULSE)
    # Its subscriber leaves, or is cut off.
    carry(LAMP, range(1, 51), S, subscriber=leaver)
    carry(LAMP, range(51, 81), S, lost_at="edge-plant")
    # Its subscriber lives, but the edge knows of no subscription any more.
    carry(HORN, range(1, 21), 2 * S)
    carry(HORN, range(21, 31), 2 * S, lost_at="router-1")
    for sequence in range(21, 31):
        came_ns = 2 * S + sequence * 10 * MS + 36 * MS
        overlay.egress.saw(
            *(Event.DROPPED, 10 + HORN, sequence),
            topic=HORN,
            came="router-1",
            in_ns=came_ns,
            reason=Reason.NO_SUBSCRIBER,
        )
    # Nobody is known to have been due to get it.
    carry(GATE, range(1, 11), 3 * S, lost_at="edge-plant")
    # The edge sends it and nothing ever comes.
    carry(SIREN, range(1, 11), 7 * S, lost_at="edge-office")
    # Held for 300 ms once, all later ones with it; nothing is lost.
    carry(TANK, range(1, 20), 5 * S)
    for sequence in range(20, 50):
        held_ns = max(0, 300 - (sequence - 20) * 10) * MS
        at_ns = 5 * S + sequence * 10 * MS
        overlay.carry(sequence, at_ns, Delays(ingress=2 * MS + held_ns), topic=TANK, publisher=10 + TANK)
    # In time, though nobody could prove it.
    carry(BELL, range(1, 6), 4 * S, delays=Delays(to_router=15 * MS), bound_error_ns=30 * MS)
    # A message whose publishing is not in the traces: its bound cannot be checked.
    overlay.ingress.saw(
        *(Event.RECEIVED, 10 + PULSE, 11), topic=PULSE, came="pub-1", in_ns=10 * S, age_bound_ns=MS
    )


def damage(folder: Path) -> None:
    """Nodes whose files are truncated, empty, or of a later version, once they are shipped."""
    for name in ("edge-torn", "edge-void", "edge-bare", "edge-next"):
        node = Node(name, "edge")
        node.log.define_topic(VALVE, "valve", QOS)
        for sequence in range(1, 4):
            node.saw(Event.RECEIVED, 11, sequence, came="pub-1", in_ns=sequence * 10 * MS + 5 * MS)
        node.write(folder)
    ship(folder)
    rows = next((folder / "parquet" / "rows").iterdir())
    segments = folder / "parquet" / "segments"
    torn = rows / "edge-torn-1-1-000001.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    (rows / "edge-void-1-1-000001.parquet").write_bytes(b"")
    bare = segments / "edge-bare-1-1-000001.parquet"
    bare.write_bytes(bare.read_bytes()[:100])
    later = pq.ParquetFile(segments / "edge-next-1-1-000001.parquet").read().to_pylist()
    facts = pa.Table.from_pylist([{**later[0], "schema": 2, "novelty": 1.5}])
    pq.write_table(facts, segments / "edge-next-1-1-000001.parquet")
    # A later version may give a column another type and another meaning.
    pq.write_table(
        pa.table({"node": ["edge-next"], "in_ns": ["soon"], "sequence": [1.5]}),
        rows / "edge-next-1-1-000001.parquet",
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession, outage: Analysis) -> Path:
    """The folder of a report that is compared with that of the outage."""
    folder = tmp_path_factory.mktemp("endings")
    overlay = Overlay(QOS)
    play(overlay)
    overlay.write(folder / "traces")
    damage(folder / "traces")
    write_report(outage, "traces", folder / "before")
    make_report(spark, str(folder / "traces"), folder / "report", str(folder / "before"), lambda _: None)
    return folder / "report"


@pytest.fixture(scope="module")
def summary(made: Path) -> dict[str, Any]:
    return dict(json.loads((made / "report.json").read_text()))


@pytest.fixture(scope="module")
def topics(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["topic"]: row for row in summary["topics"]}


def test_what_a_living_subscriber_misses_to_the_end_is_lost(topics: dict[str, dict[str, Any]]):
    valve = topics["valve"]
    assert (valve["messages"], valve["deliveries"]) == (101, 60)
    assert (valve["lost"], valve["longest_loss_run"], valve["unaccounted"]) == (40, 40, 0)
    assert valve["within_tolerance"] is False
    assert valve["deadline_hit_pct"] == 60.0


def test_a_topic_that_was_sent_and_never_came_is_lost(topics: dict[str, dict[str, Any]]):
    siren = topics["siren"]
    assert (siren["messages"], siren["deliveries"], siren["lost"], siren["deadline_hit_pct"]) == (
        10,
        0,
        10,
        0,
    )
    assert siren["within_tolerance"] is False


def test_what_a_subscriber_misses_that_may_have_left_is_a_question(
    topics: dict[str, dict[str, Any]], summary: dict[str, Any]
):
    for name, count in (("lamp", 30), ("horn", 10)):
        row = topics[name]
        assert (row["lost"], row["unaccounted"], row["within_tolerance"]) == (0, count, None)
        assert row["deadline_hit_pct"] == 100.0
    gate = topics["gate"]
    assert (gate["deliveries"], gate["lost"], gate["deadline_hit_pct"]) == (0, None, None)
    assert summary["unaccounted"] == 40
    assert (
        "40 messages were published after the last delivery to 2 subscribers (sub-2, sub-1), which left or "
        "were cut off: the traces do not tell which, and these are not counted as lost"
    ) in summary["problems"]
    assert (
        "10 messages of 1 topics have no delivery in the traces (gate): nobody subscribed, no subscriber was "
        "traced, or all were lost"
    ) in summary["problems"]


def test_totals_count_all_that_was_due(summary: dict[str, Any]):
    assert summary["lost"] == 50
    delivered = 60 + 10 + 50 + 20 + 49 + 5
    assert summary["deliveries"] == delivered
    # The tank was held for up to 300 ms: with 41 ms on the way, 30 were late.
    late = sum(held + 41 > 50 for held in range(300, 0, -10))
    assert summary["deadline_hit_pct"] == round(100 * (delivered - late) / (delivered + 50), 4)
    text = headlines(summary)
    assert "longest loss run 40 (valve, tolerated 2)" in text
    assert "40 messages unaccounted for: their subscribers left or were cut off" in text
    assert "nothing delivered of gate, siren" in text
    assert "no message lost" not in "\n".join(text)
    unsure = summary | {"topics": [row for row in summary["topics"] if row["topic"] in ("pulse", "lamp")]}
    assert "no message known to be lost" in headlines(unsure)


def test_an_outage_is_one_if_something_was_due(summary: dict[str, Any], made: Path):
    outages = [
        (row["start_us"] - WALL_NS // 1_000, row["duration_ms"], row["lost"], row["ended"])
        for row in summary["outages"]
    ]
    end_ms = 10_041
    assert outages == [
        (641_000, end_ms - 641, 40, False),
        (5_231_000, 310, 0, True),
        (7_046_000, pytest.approx(end_ms - 7_046, abs=1), 10, False),
    ]
    page = (made / "report.html").read_text()
    assert "Outage 1: 9.40 s without end" in page
    timeline = pq.ParquetFile(made / "tables" / "timeline.parquet").read().to_pylist()
    assert sum(row["lost"] for row in timeline) == 50
    assert any("without end" in line for line in headlines(summary))


def test_an_outage_without_end_does_not_swallow_later_ones():
    def silence(start_us: int, end_us: int, ended: bool) -> Silence:
        return Silence("valve", start_us, end_us, 1, ended)

    second = 1_000_000
    dead, short, later = (
        silence(0, 60 * second, False),
        silence(100, second // 2, True),
        silence(30 * second, 31 * second, True),
    )
    first, second_one = merge([later, short, dead])
    assert (first.streams, first.ended, first.duration_ms, first.resumed_us) == (2, False, 60_000, second)
    assert (second_one.streams, second_one.ended, second_one.duration_ms) == (1, True, 1_000)


def test_only_bounds_with_a_known_truth_are_checked(summary: dict[str, Any], topics: dict[str, Any]):
    assert topics["pulse"]["messages"] == 11
    assert topics["pulse"]["bounds_checked"] == 10 * 4
    assert summary["bound_violations"] == 0


def test_slow_messages_blame_a_link_or_a_queue(summary: dict[str, Any], topics: dict[str, Any]):
    assert (topics["bell"]["slow_pct"], topics["bell"]["deadline_hit_pct"]) == (100.0, 100.0)
    blamed = {(row["kind"], row["place"]): row for row in summary["blame"]}
    assert blamed.keys() == {("queue", "edge-plant"), ("link", "edge-plant → router-1")}
    queue, link = blamed["queue", "edge-plant"], blamed["link", "edge-plant → router-1"]
    assert (queue["slow_messages"], link["slow_messages"]) == (30, 5)
    assert queue["lost_max_ms"] == pytest.approx(300, abs=0.1)
    assert link["lost_max_ms"] == pytest.approx(5, abs=0.1)


def test_files_that_cannot_be_read_or_understood_are_told(summary: dict[str, Any]):
    problems = summary["problems"]
    assert (
        "1 segments have schema version 2, this reader knows 1: their rows are left out "
        "(edge-next-1-1-000001.segment)"
    ) in problems
    assert "1 files that tell of segments are damaged or empty (edge-bare-1-1-000001.parquet)" in problems
    (unread,) = [text for text in problems if "rows could not be read" in text]
    assert unread.startswith("6 of ") and unread.endswith(": a Parquet file is damaged or gone")
    (unknown,) = [text for text in problems if "nothing is known of" in text]
    assert unknown.startswith("3 of ")


def test_another_run_is_compared_with_what_is_new_and_gone(summary: dict[str, Any], made: Path):
    changes = {(row["what"], row["measure"]): row for row in summary["comparison"]}

    def told(what: str, measure: str) -> tuple[Any, Any, str]:
        row = changes[what, measure]
        return row["before"], row["now"], row["status"]

    assert told("all topics", "messages") == (100, summary["messages"], "changed")
    assert told("all topics", "bound_violations") == (0, 0, "same")
    assert told("all topics", "deadline_hit_pct") == (86.0, summary["deadline_hit_pct"], "changed")
    assert told("valve", "longest_loss_run") == (3, 40, "changed")
    assert changes["valve", "lost"]["change_pct"] == 900.0
    assert told("siren", "messages") == (None, 10, "new")
    assert told("edge-office → sub-2", "count") == (None, 50, "new")
    assert told("router-2 → edge-office", "count") == (50, None, "gone")
    page = (made / "report.html").read_text()
    shown = page.partition("Compared with")[2]
    assert f"<tr><td>siren</td><td>messages</td><td>{NOTHING}</td><td>10</td><td>new</td></tr>" in shown
    assert "<td>gone</td>" in shown
    # The totals come before everything else.
    assert shown.index("all topics") < shown.index("<td>siren")
