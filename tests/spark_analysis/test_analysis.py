"""Traces with known answers: the analysis finds them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from overlay.trace import Event
from spark_analysis import journeys, summaries
from spark_analysis.analysis import Analysis
from spark_analysis.histograms import RELATIVE_ERROR
from spark_analysis.reading import prepare, read_traces
from tests.spark_analysis.nodes import MS, QOS, Node, Overlay

Analyse = Callable[[Path], Analysis]


def test_counts_are_exact(outage: Analysis):
    summary = outage.summary
    assert summary["messages"] == 100
    assert summary["deliveries"] == 96
    assert (summary["lost"], summary["unaccounted"]) == (4, 0)
    assert summary["duplicates_dropped"] == 2
    assert summary["bounds_checked"] == 4 * 96 + 2 * 3 + 1
    assert summary["bound_violations"] == 0
    (topic,) = outage.rows("topics")
    assert topic["topic"] == "valve"
    assert (topic["longest_loss_run"], topic["loss_tolerance"], topic["within_tolerance"]) == (3, 2, False)
    assert (topic["in_time"], topic["judged"]) == (86, 96)
    assert summary["deadline_hit_pct"] == topic["deadline_hit_pct"] == 86.0
    assert topic["slow_pct"] == pytest.approx(100 * 10 / 96, abs=1e-3)
    assert topic["dropped"] == 1
    assert topic["bound_error_p50_ms"] == pytest.approx(1.0, rel=RELATIVE_ERROR)


def test_percentiles_are_within_the_stated_error(outage: Analysis):
    (topic,) = outage.rows("topics")
    assert topic["p50_ms"] == pytest.approx(41, rel=RELATIVE_ERROR)
    assert topic["p99_ms"] == pytest.approx(81, rel=RELATIVE_ERROR)
    assert topic["max_ms"] == 81


def test_hops_are_in_the_order_of_the_way(outage: Analysis):
    hops = outage.rows("hops")
    assert [(hop["hop"], hop["count"]) for hop in hops] == [
        ("in the publisher", 100),
        ("publisher → edge", 100),
        ("in the ingress edge", 100),
        ("edge → router", 99),
        ("in the router", 99),
        ("router → edge", 96),
        ("in the egress edge", 96),
        ("edge → subscriber", 96),
    ]
    medians = [hop["p50_ms"] for hop in hops]
    assert medians == [pytest.approx(ms, rel=RELATIVE_ERROR) for ms in (0, 1, 2, 10, 3, 20, 4, 1)]


def test_links_and_nodes(outage: Analysis):
    links = {row["link"]: row for row in outage.rows("links")}
    broken = links["router-1 → edge-office"]
    assert (broken["count"], broken["never_arrived"], broken["never_sent"], broken["exact"]) == (
        46,
        3,
        0,
        True,
    )
    assert broken["bound_error_p50_ms"] == pytest.approx(1.0, rel=RELATIVE_ERROR)
    assert broken["bound_p50_ms"] == pytest.approx(21, rel=RELATIVE_ERROR)
    assert links["router-2 → edge-office"]["max_ms"] == 60
    waits = {row["node"]: row for row in outage.rows("nodes")}
    assert waits["edge-plant"]["count"] == 100
    assert waits["router-2"]["p50_ms"] == pytest.approx(3, rel=RELATIVE_ERROR)
    assert waits["sub-1"]["count"] is None


def test_slow_messages_blame_the_link_that_was_slower_than_usual(outage: Analysis):
    (blamed,) = outage.rows("blame")
    assert outage.summary["blame"] == [blamed]
    assert (blamed["kind"], blamed["place"]) == ("link", "router-2 → edge-office")
    assert blamed["slow_messages"] == outage.summary["slow"] == 10
    assert blamed["lost_max_ms"] == pytest.approx(40, abs=0.2)


def test_the_way_of_the_slowest_is_complete(outage: Analysis):
    slowest = outage.rows("slowest")
    first = slowest[:4]
    assert [(leg["from_node"], leg["to_node"]) for leg in first] == [
        ("pub-1", "edge-plant"),
        ("edge-plant", "router-2"),
        ("router-2", "edge-office"),
        ("edge-office", "sub-1"),
    ]
    assert {leg["age_ms"] for leg in first} == {81}
    assert sum(leg["wait_ms"] + leg["link_ms"] for leg in first) == 81


def test_the_outage_is_found_with_who_took_over(outage: Analysis):
    (found,) = outage.outages
    assert found.duration_ms == 420
    assert (found.streams, found.topics, found.lost, found.ended) == (1, 1, 1, True)
    before = {row["router"] for row in outage.carriers if row["side"] == "before"}
    after = {row["router"] for row in outage.carriers if row["side"] == "after"}
    assert (before, after) == ({"router-1"}, {"router-2"})
    offsets = [row["offset_ms"] for row in outage.rows("outage_timeline")]
    assert min(offsets) < 0 < max(offsets)


def test_the_time_line_holds_everything_once(outage: Analysis):
    timeline = outage.rows("timeline")
    totals = {
        name: sum(row[name] for row in timeline)
        for name in ("deliveries", "lost", "late", "duplicates", "dropped")
    }
    assert totals == {"deliveries": 96, "lost": 4, "late": 10, "duplicates": 2, "dropped": 1}


def test_lans_and_drops(outage: Analysis):
    (pair,) = outage.rows("lans")
    assert (pair["publisher_lan"], pair["subscriber_lan"], pair["count"]) == ("plant", "office", 96)
    assert [(row["node"], row["reason"], row["messages"]) for row in outage.rows("drops")] == [
        ("edge-office", "duplicate", 2),
        ("edge-plant", "shed_tolerated", 1),
    ]


def test_what_is_wrong_with_the_traces_is_told(outage: Analysis):
    assert outage.problems == [
        "4 messages were sent but their arrival is not in the traces: lost, or still on their way "
        "(edge-plant → router-1, router-1 → edge-office)",
        "2 messages arrived but their sending is not in the traces (router-2 → edge-office)",
    ]


def test_trouble_with_the_traces_never_stops_the_report(tmp_path: Path, analyse_folder: Analyse):
    """Two hosts, one rebooted in between; a node without traces; bad segments; lost records; sampling."""
    tmp_path /= "a name=with% signs"
    overlay = Overlay(QOS, sampling=0.5)
    overlay.subscriber.host = overlay.egress.host = "boot-2"
    overlay.subscriber.offset_ns = overlay.egress.offset_ns = 10**15
    for sequence in range(2, 81, 2):  # as if every second one were sampled
        # A bound that is too small by 1 ms: a violation where it can be proven, on the publisher's host.
        overlay.carry(sequence, sequence * 10 * MS, bound_error_ns=-MS // 2 if sequence == 40 else MS)
        if sequence == 60:
            overlay.egress.write(tmp_path, number=1, lost_records=5)
            overlay.egress.host = overlay.subscriber.host = "boot-3"
    overlay.egress.write(tmp_path, number=2, lost_records=8, deleted_segments=1)
    for node in (overlay.publisher, overlay.ingress, overlay.subscriber):
        node.write(tmp_path)
    stray = Node("edge-plant", "edge", "plant", sampling=0.5)
    stray.saw(Event.RECEIVED, 7, 82, came="pub-1", in_ns=830 * MS)
    torn = stray.write(tmp_path, number=7, suffix=".open")
    torn.write_bytes(torn.read_bytes()[:-10])
    stray.write(tmp_path, number=8, schema=2)
    found = analyse_folder(tmp_path)
    text = "\n".join(found.problems)
    assert "edge-plant-1-1-000008.segment was set aside: schema version 2, this reader knows 1" in text
    assert "1 segments end with a half-written or damaged part, 72 bytes were skipped" in text
    assert "1 open segments of processes that died were salvaged" in text
    assert "13 records were lost" in text  # 5 before the restart, 8 after it
    assert "1 segments were deleted" in text
    assert "the clock of edge-office restarted" in text
    assert "1 nodes were named by others but have no traces (router-1)" in text
    assert "50.00% of the messages were traced" in text
    assert found.summary["messages"] == 40
    assert found.summary["lost"] == 0
    # Only the edge of the plant shares a clock with the publisher.
    assert (found.summary["bounds_checked"], found.summary["bound_violations"]) == (40, 1)
    assert [row["sequence"] for row in found.rows("violations")] == [40]
    (topic,) = found.rows("topics")
    assert topic["p50_ms"] == pytest.approx(42, rel=RELATIVE_ERROR)  # the bound: no true age across hosts
    links = {row["link"]: row for row in found.rows("links")}
    unseen = links["router-1 → edge-office"]
    assert (unseen["count"], unseen["never_sent"]) == (40, 40)
    assert unseen["p50_ms"] == pytest.approx(21, rel=RELATIVE_ERROR)  # the link's bound
    assert not links["edge-plant → router-1"]["count"]


def test_losses_of_sampled_messages(tmp_path: Path, spark: SparkSession):
    overlay = Overlay(QOS, sampling=0.5)
    for sequence in range(2, 81, 2):
        overlay.carry(sequence, sequence * 10 * MS, lost_at="router-1" if sequence in {20, 22, 50} else "")
    overlay.write(tmp_path)
    rows = read_traces(spark, prepare(str(tmp_path))[0]).rows
    publishers = journeys.publishers(rows)
    gathered = journeys.gather(rows, publishers, partitions=2)
    streams = summaries.streams(journeys.deliveries(gathered), summaries.number_messages(gathered))
    losses = [row.lost_before for row in streams.collect() if row.lost_before]
    assert sorted(losses) == [1, 2]
