"""Outages: times in which some subscribers got nothing though something was due.

A stream (one publisher's messages at one subscriber) is silent when nothing came for three of its
periods, and for 100 ms at least. Silences that overlap are one outage. What happened around it
(who carried the messages before and after, deliveries, their ages) makes its timeline.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession, Window, types
from pyspark.sql import functions as sf

SILENT_PERIODS: Final = 3
SILENT_NS: Final = 100_000_000
SILENCES_MAX: Final = 20_000
"""The longest are taken if there are more."""
OUTAGES_MAX: Final = 20
"""The longest get a timeline."""
AROUND_US: Final = 1_000_000
BINS: Final = 60
_OUTAGE_SCHEMA: Final = types.StructType(
    [types.StructField(name, types.LongType()) for name in ("outage", "start_us", "end_us", "bin_us")]
)


@dataclass(frozen=True, slots=True)
class Silence:
    """One stream got nothing."""

    topic: str
    start_us: int
    end_us: int
    lost: int


@dataclass(frozen=True, slots=True)
class Outage:
    """Silences that overlap."""

    number: int
    start_us: int
    end_us: int
    streams: int
    topics: int
    lost: int
    longest_loss_run: int

    @property
    def duration_ms(self) -> float:
        """From the last delivery before the first silence to the first one after the last."""
        return (self.end_us - self.start_us) / 1_000


def silences(stream_rows: DataFrame) -> DataFrame:
    """Gaps between deliveries of a stream that are too long, the longest first, a bounded number."""
    of_stream = Window.partitionBy("topic", "publisher", "subscriber")
    usual_ns = sf.coalesce(sf.col("period_ns"), sf.avg("gap_ns").over(of_stream))
    end_us = sf.unix_micros("at")
    return (
        stream_rows.withColumn("silent_ns", sf.greatest(sf.lit(SILENT_NS), SILENT_PERIODS * usual_ns))
        .where("gap_ns > silent_ns")
        .select(
            "topic",
            (end_us - sf.col("gap_ns") / 1_000).cast("long").alias("start_us"),
            end_us.alias("end_us"),
            sf.col("lost_before").alias("lost"),
        )
        .orderBy(sf.desc(sf.col("end_us") - sf.col("start_us")))
        .limit(SILENCES_MAX)
    )


def merge(found: Iterable[Silence]) -> list[Outage]:
    """Silences that overlap become one outage; in order of time."""
    groups: list[list[Silence]] = []
    end_us = 0
    for silence in sorted(found, key=lambda silence: silence.start_us):
        if not groups or silence.start_us > end_us:
            groups.append([])
            end_us = silence.end_us
        groups[-1].append(silence)
        end_us = max(end_us, silence.end_us)
    return [
        Outage(
            number=number,
            start_us=group[0].start_us,
            end_us=max(silence.end_us for silence in group),
            streams=len(group),
            topics=len({silence.topic for silence in group}),
            lost=sum(silence.lost for silence in group),
            longest_loss_run=max(silence.lost for silence in group),
        )
        for number, group in enumerate(groups, 1)
    ]


def longest(outages: Sequence[Outage]) -> list[Outage]:
    """Those that get a timeline, in order of time."""
    chosen = sorted(outages, key=lambda outage: outage.start_us - outage.end_us)[:OUTAGES_MAX]
    return sorted(chosen, key=lambda outage: outage.number)


def around(session: SparkSession, outages: Sequence[Outage]) -> DataFrame:
    """The outages as a small table, each with the width of its timeline's bins."""
    return session.createDataFrame(
        [
            (
                outage.number,
                outage.start_us,
                outage.end_us,
                max(1_000, (outage.end_us - outage.start_us + 2 * AROUND_US) // BINS),
            )
            for outage in outages
        ],
        _OUTAGE_SCHEMA,
    )


def _within(rows: DataFrame, windows: DataFrame) -> DataFrame:
    at_us = sf.unix_micros("at")
    near = (at_us >= sf.col("start_us") - AROUND_US) & (at_us < sf.col("end_us") + AROUND_US)
    return rows.withColumn("at_us", at_us).join(sf.broadcast(windows), near)


def timeline(stream_rows: DataFrame, windows: DataFrame) -> DataFrame:
    """Per outage and bin, in ms from its start: deliveries, losses, the oldest message."""
    offset_us = sf.floor((sf.col("at_us") - sf.col("start_us")) / sf.col("bin_us")) * sf.col("bin_us")
    return (
        _within(stream_rows.select("at", "lost_before", "age_ns"), windows)
        .groupBy("outage", (offset_us / 1_000).alias("offset_ms"))
        .agg(
            sf.count(sf.lit(1)).alias("deliveries"),
            sf.sum("lost_before").alias("lost"),
            (sf.max("age_ns") / 1e6).alias("oldest_ms"),
        )
        .orderBy("outage", "offset_ms")
    )


def carriers(rows: DataFrame, windows: DataFrame) -> DataFrame:
    """Per outage, which routing brokers dispatched before it began and after it ended."""
    dispatched = rows.where("role = 'router' AND event = 'dispatched'").select("at", "node")
    side = (
        sf.when(sf.col("at_us") <= sf.col("start_us"), sf.lit("before"))
        .when(sf.col("at_us") >= sf.col("end_us"), sf.lit("after"))
        .otherwise(sf.lit("during"))
    )
    return (
        _within(dispatched, windows)
        .groupBy("outage", side.alias("side"), sf.col("node").alias("router"))
        .agg(sf.count(sf.lit(1)).alias("messages"))
        .orderBy("outage", "side", "router")
    )


def describe_carriers(found: Iterable[dict[str, Any]], outage: int) -> str:
    """Who stopped carrying messages and who went on, in words."""
    sides: dict[str, set[str]] = {"before": set(), "after": set(), "during": set()}
    for row in found:
        if row["outage"] == outage:
            sides[row["side"]].add(row["router"])
    gone, came = sides["before"] - sides["after"], sides["after"] - sides["before"]
    if gone and came:
        return f"{', '.join(sorted(gone))} → {', '.join(sorted(came))}"
    if gone:
        return f"without {', '.join(sorted(gone))} afterwards"
    return f"{', '.join(sorted(came))} joined" if came else "same routers"
