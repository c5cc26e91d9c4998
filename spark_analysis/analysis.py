"""One run's traces in, small tables out. Everything that is collected is bounded."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from overlay.trace import SCHEMA_VERSION
from spark_analysis import endings, journeys, outages, summaries
from spark_analysis.errors import AnalysisError
from spark_analysis.histograms import middle_ns
from spark_analysis.problems import Sources, find_problems
from spark_analysis.reading import Traces
from spark_analysis.shipper import Shipment

TABLE_MAX_ROWS: Final = 100_000
"""Longest table of a report; a longer one is cut, and the report says so."""
SLOWEST: Final = 20
"""Deliveries whose whole way is shown."""
VIOLATIONS_SHOWN: Final = 100
TABLES_AT_A_TIME: Final = 4
SLOW_EXAMINED: Final = 300_000
"""Slow deliveries whose whole way is walked to see where they lost their time; a sample if there are more."""
TIMELINE_BINS: Final = 240
TIMELINE_BIN_MIN_US: Final = 100_000

Progress = Callable[[str], None]
Row = dict[str, Any]


@dataclass(frozen=True)
class Analysis:
    """What is known of a run."""

    tables: Mapping[str, pa.Table]
    summary: Row
    problems: list[str]
    timeline_bin_us: int
    outages: list[outages.Outage]
    carriers: list[Row]

    def rows(self, table: str) -> list[Row]:
        """A table as plain values."""
        return self.tables[table].to_pylist()


class _Collector:
    """Collects small tables, and remembers which of them had to be cut."""

    def __init__(self) -> None:
        self.tables: dict[str, pa.Table] = {}
        self.cut: list[str] = []

    def collect(self, name: str, frame: DataFrame) -> list[Row]:
        table = frame.limit(TABLE_MAX_ROWS + 1).toArrow()
        if table.num_rows > TABLE_MAX_ROWS:
            self.cut.append(f"table {name} is cut after its first {TABLE_MAX_ROWS} rows")
            table = table.slice(0, TABLE_MAX_ROWS)
        self.tables[name] = table
        return table.to_pylist()

    def collect_all(self, frames: Mapping[str, DataFrame]) -> dict[str, list[Row]]:
        """Several tables at once: of a small one nearly all the time is planning, which one core does."""
        with ThreadPoolExecutor(TABLES_AT_A_TIME) as pool:
            found = pool.map(self.collect, frames.keys(), frames.values())
            return dict(zip(frames, found, strict=True))


def analyse(session: SparkSession, traces: Traces, shipment: Shipment, progress: Progress) -> Analysis:
    """Read all traces of a run. Raises AnalysisError if there is nothing in them."""
    collector = _Collector()
    progress("reading traces")
    sources, rows = _sources(traces, shipment, collector)
    seen = summaries.nodes(rows).persist(StorageLevel.DISK_ONLY)
    clocks = collector.collect("clocks", seen.orderBy("node", "clock"))
    if not clocks:
        raise AnalysisError(f"the traces in {traces.location} hold no rows: was anything published?")
    kept = [seen]
    try:
        return _analyse(session, rows, seen, sources, clocks, collector, kept, progress)
    finally:
        for frame in kept:
            frame.unpersist()


def _sources(traces: Traces, shipment: Shipment, collector: _Collector) -> tuple[Sources, DataFrame]:
    """What is known of the segments, and the rows of those that this reader understands."""
    segments = collector.collect("segments", traces.segments.orderBy("segment"))
    # The version by itself: whatever else a later one has changed, that can be read.
    versions = traces.segments.where(sf.col("schema") != SCHEMA_VERSION)
    unknown = collector.collect("unknown_segments", versions.select("segment", "schema", "file"))
    read = {row["file"] for row in (*segments, *unknown)}
    sources = Sources(
        segments=[row for row in segments if row["schema"] in (None, SCHEMA_VERSION)],
        unknown=unknown,
        # Of a table that was cut it is not known which files were read.
        unread=[] if collector.cut else traces.unread_segments(read),
        set_aside=shipment.set_aside,
    )
    return sources, traces.rows_without([row["file"] for row in unknown])


def _analyse(
    session: SparkSession,
    rows: DataFrame,
    seen: DataFrame,
    sources: Sources,
    clocks: list[Row],
    collector: _Collector,
    kept: list[DataFrame],
    progress: Progress,
) -> Analysis:
    def keep(frame: DataFrame) -> DataFrame:
        # On disk, not in memory: so the size of the traces does not matter.
        kept.append(frame.persist(StorageLevel.DISK_ONLY))
        return kept[-1]

    sampling = min((row["sampling"] for row in sources.segments if row["sampling"] is not None), default=1.0)
    bin_us = timeline_bin_us(clocks)
    publishers = keep(journeys.publishers(rows))
    partitions = int(session.conf.get("spark.sql.shuffle.partitions") or 1)
    gathered = keep(journeys.gather(rows, publishers, partitions))
    numbered = None if sampling >= 1 else summaries.number_messages(gathered)
    streams = keep(summaries.streams(journeys.deliveries(gathered), numbered))
    end_us = _end_us(clocks)
    unfinished = keep(endings.unfinished(gathered, seen, endings.signs_of_life(rows), end_us))
    ends = keep(endings.endings(gathered, unfinished, end_us))
    progress("topics")
    counted = keep(summaries.delivery_histogram(streams))
    found_rows = collector.collect_all(
        {
            "topics": summaries.topics(summaries.published(gathered), counted, streams, ends),
            "endings": _show_endings(ends),
            "ages": summaries.ages(counted),
            "lans": summaries.lans(counted),
        }
    )
    topics, ages, ended = found_rows["topics"], found_rows["ages"], found_rows["endings"]
    progress("hops and links")
    histogram = keep(summaries.leg_histogram(journeys.legs(gathered, seen)))
    found_rows = collector.collect_all(
        {
            "hops": summaries.hops(histogram),
            "links": summaries.links(histogram),
            "nodes": summaries.node_waits(histogram, seen),
            "hop_histogram": _plot_histogram(histogram),
        }
    )
    hops, links = found_rows["hops"], found_rows["links"]
    progress("slow messages")
    chosen = keep(_slow_and_slowest(streams, sum(row["slow"] for row in topics), collector))
    walked = keep(journeys.paths(chosen, gathered, seen))
    troubles = keep(summaries.trouble(rows, bin_us))
    found_rows = collector.collect_all(
        {
            "blame": summaries.blame(walked.where("slow"), histogram),
            "slowest": _show_paths(walked.orderBy(sf.desc("age_ns")).limit(SLOWEST)),
            "violations": _violations(gathered),
            "drops": summaries.drops(troubles),
            "timeline": summaries.timeline(streams, troubles, ends, bin_us),
        }
    )
    progress("outages")
    found, carriers = _outages(session, rows, streams, ends, collector)
    problems = find_problems(sources, clocks, links, topics, ended) + collector.cut
    tables = {"topics": topics, "hops": hops, "links": links, "blame": found_rows["blame"]}
    return Analysis(
        tables=collector.tables,
        summary=_summarise(tables, sampling, problems, found, carriers, ages),
        problems=problems,
        timeline_bin_us=bin_us,
        outages=found,
        carriers=carriers,
    )


def _slow_and_slowest(streams: DataFrame, slow_count: int, collector: _Collector) -> DataFrame:
    """Deliveries whose whole way is walked: slow ones, to see what made them slow, and the slowest."""
    slow = streams.where("slow")
    if slow_count > SLOW_EXAMINED:
        collector.cut.append(
            f"of {slow_count:,} slow deliveries only about {SLOW_EXAMINED:,} were asked where they lost "
            "their time"
        )
        slow = slow.sample(fraction=SLOW_EXAMINED / slow_count, seed=1)
    slowest = streams.where("age_ns IS NOT NULL").orderBy(sf.desc("age_ns")).limit(SLOWEST)
    return slow.unionByName(slowest).dropDuplicates(["publisher", "sequence", "subscriber"])


def _outages(
    session: SparkSession, rows: DataFrame, streams: DataFrame, ends: DataFrame, collector: _Collector
) -> tuple[list[outages.Outage], list[Row]]:
    silences = collector.collect("silences", outages.silences(streams, ends))
    found = outages.merge(outages.Silence(**silence) for silence in silences)
    shown = outages.longest(found)
    if not shown:
        return found, []
    windows = outages.around(session, shown)
    collector.collect("outage_timeline", outages.timeline(streams, windows))
    return found, collector.collect("outage_carriers", outages.carriers(rows, windows))


def timeline_bin_us(clocks: Iterable[Row]) -> int:
    """A width of bins that shows the whole run in about `TIMELINE_BINS` of them: 1, 2 or 5 times 10^n."""
    spans = [(row["first_at"], row["last_at"]) for row in clocks if row["first_at"] is not None]
    if not spans:
        return TIMELINE_BIN_MIN_US
    span_s = (max(end for _, end in spans) - min(start for start, _ in spans)).total_seconds()
    wanted_us = max(span_s * 1e6 / TIMELINE_BINS, TIMELINE_BIN_MIN_US)
    width_us = TIMELINE_BIN_MIN_US
    while width_us < wanted_us:
        width_us *= 10
    for part in (5, 2):
        if width_us // part >= wanted_us:
            return width_us // part
    return width_us


def _end_us(clocks: Iterable[Row]) -> int:
    """When the recording ended, by the calendar: with the last row of any node."""
    last_at: datetime = max(row["last_at"] for row in clocks if row["last_at"] is not None)
    return (last_at - datetime(1970, 1, 1, tzinfo=last_at.tzinfo)) // timedelta(microseconds=1)


def _show_endings(ends: DataFrame) -> DataFrame:
    """Streams that did not get all to the end, those with most losses first."""
    return ends.select(
        "topic",
        sf.lower(sf.hex("publisher")).alias("publisher"),
        "subscriber",
        "last_us",
        "alive_us",
        "lost",
        "unaccounted",
    ).orderBy(sf.desc("lost"), sf.desc("unaccounted"), "topic", "publisher", "subscriber")


def _plot_histogram(histogram: DataFrame) -> DataFrame:
    """Per hop, counts in coarse buckets: ten to a decade."""
    decade_tenth = sf.floor(sf.log10(sf.greatest(middle_ns(sf.col("bucket")), sf.lit(1.0))) * 10)
    return (
        summaries.name_hops(histogram.where("kind IN ('queue', 'link')"))
        .groupBy("place", "hop", "kind", decade_tenth.cast("int").alias("tenth"))
        .agg(sf.sum("count").alias("count"))
        .orderBy("place", "hop", "tenth")
    )


def _show_paths(walked: DataFrame) -> DataFrame:
    """One row per leg of each delivery, the oldest delivery first, each from its publisher on."""
    return (
        walked.select(
            "topic",
            sf.lower(sf.hex("publisher")).alias("publisher"),
            "sequence",
            "subscriber",
            (sf.col("age_ns") / 1e6).alias("age_ms"),
            "exact",
            "in_time",
            sf.posexplode(sf.reverse("path")).alias("leg_number", "leg"),
        )
        .select(
            "topic",
            "publisher",
            "sequence",
            "subscriber",
            "age_ms",
            "exact",
            "in_time",
            "leg_number",
            "leg.from_node",
            "leg.to_node",
            "leg.from_role",
            "leg.to_role",
            (sf.col("leg.wait_ns") / 1e6).alias("wait_ms"),
            (sf.col("leg.link_ns") / 1e6).alias("link_ms"),
        )
        .orderBy(sf.desc("age_ms"), "publisher", "sequence", "subscriber", "leg_number")
    )


def _violations(gathered: DataFrame) -> DataFrame:
    """Messages that were older than a node believed, the worst first."""
    error_ns = sf.col("born_after_ns") - sf.col("published_ns")
    return (
        gathered.where(sf.col("first") & (error_ns > 0))
        .select(
            "topic",
            sf.lower(sf.hex("publisher")).alias("publisher"),
            "sequence",
            (error_ns / 1e6).alias("older_than_bound_ms"),
        )
        .orderBy(sf.desc("older_than_bound_ms"))
        .limit(VIOLATIONS_SHOWN)
    )


def _summarise(
    tables: Mapping[str, list[Row]],
    sampling: float,
    problems: list[str],
    found: list[outages.Outage],
    carriers: list[Row],
    ages: list[Row],
) -> Row:
    topics = tables["topics"]
    rated = [row for row in topics if row["deadline_hit_pct"] is not None]
    judged = sum(row["judged"] + (row["lost"] or 0) for row in rated)
    in_time = sum(row["in_time"] for row in rated)
    return {
        "messages": sum(row["messages"] for row in topics),
        "deliveries": sum(row["deliveries"] for row in topics),
        "lost": sum(row["lost"] or 0 for row in topics),
        "unaccounted": sum(row["unaccounted"] for row in topics),
        "slow": sum(row["slow"] for row in topics),
        "duplicates_dropped": sum(row["duplicates_dropped"] for row in topics),
        "bound_violations": sum(row["bound_violations"] for row in topics),
        "bounds_checked": sum(row["bounds_checked"] for row in topics),
        "deadline_hit_pct": round(100 * in_time / judged, 4) if judged else None,
        "age": {name: ages[0][name] if ages else None for name in ("p50_ms", "p99_ms", "max_ms")},
        "sampling": sampling,
        "topics": topics,
        "hops": [{name: value for name, value in row.items() if name != "place"} for row in tables["hops"]],
        "links": tables["links"],
        "blame": tables["blame"],
        "outages": [
            {
                "number": outage.number,
                "start_us": outage.start_us,
                "duration_ms": outage.duration_ms,
                "ended": outage.ended,
                "streams": outage.streams,
                "topics": outage.topics,
                "lost": outage.lost,
                "longest_loss_run": outage.longest_loss_run,
                "carriers": outages.describe_carriers(carriers, outage.number),
            }
            for outage in found
        ],
        "problems": problems,
    }
