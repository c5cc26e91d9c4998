"""Traces as a stream: percentiles and deadline misses in windows of time, while the nodes run.

New Parquet files of the shipper are read as they come. A window is told once it is final: when
rows that are later than the window and the allowed delay have been read. Rows that come later
still are left out. What was read and told is kept in a checkpoint, so that a watch that is
stopped goes on where it was. Whoever looks on can also be told of topics *so far*, with every batch.

Within a stream the age bound is the age: to know the true one would mean to keep all messages. Only the
names of those that crossed a link are kept, for as long as rows may be late, to count each once.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Row as SparkRow
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from spark_analysis.errors import AnalysisError
from spark_analysis.reading import FILE_OPTIONS, ROWS_SCHEMA, local_url
from spark_analysis.schema import ROWS_FOLDER

WINDOW_S: Final = 10
LATE_S: Final = 20
"""A segment is open for up to 10 s and shipped within seconds: rows this late still count."""
SO_FAR: Final = "topics so far"
FILES_PER_BATCH: Final = 200
BATCH_END_S: Final = 5.0
"""A batch that runs when the watch is ended may take so long to end by itself."""
SHOWN_ROWS: Final = 1_000
"""Rows of one batch that are told."""
ACCURACY: Final = 1_000
"""Of a percentile: its rank is off by at most one in this many."""

_CLIENT_ID: Final = "^[0-9a-f]{16}$"

Row = dict[str, Any]
Tell = Callable[[str, list[Row]], None]


@dataclass(frozen=True)
class WatchSettings:
    """Where to read, where to write, how to cut time."""

    location: str
    out: Path
    window_s: int = WINDOW_S
    late_s: int = LATE_S


def open_rows(session: SparkSession, settings: WatchSettings) -> DataFrame:
    """The growing rows of a folder, or URL, of shipped traces; what is damaged or gone is skipped."""
    return (
        session.readStream.schema(ROWS_SCHEMA)
        .options(**FILE_OPTIONS)
        .option("maxFilesPerTrigger", str(FILES_PER_BATCH))
        .parquet(f"{settings.location}/{ROWS_FOLDER}")
        .withWatermark("at", f"{settings.late_s} seconds")
    )


def topic_windows(rows: DataFrame, window_s: int) -> DataFrame:
    """Per window and topic: deliveries, percentiles of the age bound, deadline misses."""
    return (
        rows.where("event = 'delivered'")
        .groupBy(sf.window("at", f"{window_s} seconds"), "topic")
        .agg(
            sf.count(sf.lit(1)).alias("deliveries"),
            _percentiles(sf.col("age_bound_ns")),
            sf.count(sf.when(sf.col("age_bound_ns") > sf.col("deadline_ns"), sf.lit(1))).alias("missed"),
            sf.count(sf.when(sf.col("age_bound_ns").isNull(), sf.lit(1))).alias("age_unknown"),
        )
        .select(*_times(), "topic", "deliveries", *_milliseconds(), "missed", "age_unknown")
    )


def link_windows(rows: DataFrame, window_s: int) -> DataFrame:
    """Per window and link: crossings, percentiles of the link bound, messages that were late already.

    Those of an edge's clients are one link each way: a client's id says nothing to an operator.
    """
    here = sf.concat(sf.lit("clients in "), "lan")
    sender = sf.when(sf.col("peer_in").rlike(_CLIENT_ID), here).otherwise(sf.col("peer_in"))
    receiver = sf.when(sf.col("role") == "client", here).otherwise(sf.col("node"))
    return (
        rows.where("peer_in IS NOT NULL AND in_ns IS NOT NULL")
        # A node records what it sends on once for each link; all of that came once.
        .dropDuplicates(["at", "node", "peer_in", "publisher", "sequence"])
        .groupBy(sf.window("at", f"{window_s} seconds"), sf.concat_ws(" → ", sender, receiver).alias("link"))
        .agg(
            sf.count(sf.lit(1)).alias("messages"),
            _percentiles(sf.col("link_bound_ns")),
            sf.count(sf.when(sf.col("slack_ns") < 0, sf.lit(1))).alias("missed"),
            sf.count(sf.when(sf.col("link_bound_ns").isNull(), sf.lit(1))).alias("bound_unknown"),
        )
        .select(*_times(), "link", "messages", *_milliseconds(), "missed", "bound_unknown")
    )


def start(
    session: SparkSession, settings: WatchSettings, tell: Tell, tell_so_far: Tell | None = None
) -> list[StreamingQuery]:
    """Begin to watch; `tell` gets final windows, `tell_so_far` those of topics as they grow."""
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnalysisError(
            f"windows cannot be written to {settings.out} ({error.strerror}): give another --out"
        ) from error
    rows = open_rows(session, settings)
    windows = {
        "topics": topic_windows(rows, settings.window_s),
        "links": link_windows(rows, settings.window_s),
    }
    queries = [_start(name, frame, settings.out, tell) for name, frame in windows.items()]
    if tell_so_far is not None:
        queries.append(_start_so_far(windows["topics"], settings.out, tell_so_far))
    return queries


def wait(queries: Sequence[StreamingQuery], seconds: int) -> None:
    """Let the watch go on for a while; raises AnalysisError if it has failed."""
    with contextlib.suppress(StreamingQueryException):
        queries[0].awaitTermination(seconds)
    for query in queries:
        error = query.exception()
        if error is not None:
            raise AnalysisError(
                f"the watch of {query.name} failed ({str(error).splitlines()[0]}): if its checkpoint does "
                "not fit any more, give another --out"
            ) from error


def stop(session: SparkSession, queries: Sequence[StreamingQuery]) -> None:
    """End the watch where it is; its checkpoint stays. A session must not be stopped before its queries."""
    # Whatever is interrupted says so at length, which is no failure of the watch: it is waited for a little.
    session.sparkContext.setLogLevel("OFF")
    ends_s = time.monotonic() + BATCH_END_S
    for query in queries:
        with contextlib.suppress(Exception):
            while query.status["isTriggerActive"] and time.monotonic() < ends_s:
                time.sleep(0.1)
            query.stop()


def _start(name: str, frame: DataFrame, out: Path, tell: Tell) -> StreamingQuery:
    def write(batch: DataFrame, number: int) -> None:
        # The number makes it idempotent: a batch that is done again after a crash replaces itself.
        kept = batch.persist()
        try:
            found = _shown(kept, name)
            if found:
                kept.write.mode("overwrite").parquet(local_url(out / name / f"batch={number:06}"))
                tell(name, [row.asDict() for row in found])
        finally:
            kept.unpersist()

    return (
        frame.writeStream.queryName(name)
        .outputMode("append")
        .option("checkpointLocation", local_url(out / "checkpoints" / name))
        .foreachBatch(write)
        .start()
    )


def _start_so_far(topics: DataFrame, out: Path, tell: Tell) -> StreamingQuery:
    def show(batch: DataFrame, number: int) -> None:
        found = _shown(batch, "topics")
        if found:
            tell("topics", [row.asDict() for row in found])

    return (
        topics.writeStream.queryName(SO_FAR)
        .outputMode("update")
        .option("checkpointLocation", local_url(out / "checkpoints" / "so-far"))
        .foreachBatch(show)
        .start()
    )


def _shown(batch: DataFrame, name: str) -> list[SparkRow]:
    """What of a batch is told: the latest windows, in the order of time."""
    key = name.removesuffix("s")
    found = batch.orderBy(sf.desc("window_start"), key).limit(SHOWN_ROWS).collect()
    return sorted(found, key=lambda row: (row["window_start"], row[key]))


def _percentiles(duration_ns: Column) -> Column:
    return sf.percentile_approx(duration_ns, [0.5, 0.99], ACCURACY).alias("percentiles")


def _milliseconds() -> tuple[Column, Column]:
    found = sf.col("percentiles")
    return (found[0] / 1e6).alias("p50_ms"), (found[1] / 1e6).alias("p99_ms")


def _times() -> tuple[Column, Column]:
    return sf.col("window.start").alias("window_start"), sf.col("window.end").alias("window_end")
