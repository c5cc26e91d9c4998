"""Outages: times in which some subscribers got nothing though something was due.

A stream (one publisher's messages at one subscriber) is silent when nothing came for three of its
periods, and for 100 ms at least, though something was published: it was lost, or came later by about that
time. A publisher may pause as long as it likes. Silences that overlap are one outage. One that
never ended belongs to the outage in which it began. What happened around an outage (who carried the
messages before and after, deliveries, their ages) makes its timeline.
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
    ended: bool
    """If not, `end_us` is the last that is known of the subscriber."""

    @property
    def joins_until_us(self) -> int:
        """What begins until then is of the same outage: a stream that died does not swallow later ones."""
        return self.end_us if self.ended else min(self.end_us, self.start_us + AROUND_US)


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
    ended: bool
    """If not, some streams got nothing any more."""
    resumed_us: int
    """When those streams went on that did, or soon after the start if none did."""

    @property
    def duration_ms(self) -> float:
        """From the last delivery before the first silence to the first one after the last, or to the end."""
        return (self.end_us - self.start_us) / 1_000


def silences(stream_rows: DataFrame, endings: DataFrame) -> DataFrame:
    """Times in which a stream got nothing though it should have, the longest first, a bounded number."""
    of_stream = Window.partitionBy("topic", "publisher", "subscriber")
    usual_ns = sf.coalesce(sf.col("period_ns"), sf.avg("gap_ns").over(of_stream))
    silent_ns = sf.greatest(sf.lit(SILENT_NS), SILENT_PERIODS * sf.col("usual_ns"))
    something_was_due = (sf.col("lost_before") > 0) | (sf.col("held_ns") > silent_ns - sf.col("usual_ns"))
    end_us = sf.unix_micros("at")
    between = (
        stream_rows.withColumn("usual_ns", usual_ns)
        .where((sf.col("gap_ns") > silent_ns) & something_was_due)
        .select(
            "topic",
            (end_us - sf.col("gap_ns") / 1_000).cast("long").alias("start_us"),
            end_us.alias("end_us"),
            sf.col("lost_before").alias("lost"),
            sf.lit(True).alias("ended"),
        )
    )
    least_us = sf.greatest(sf.lit(SILENT_NS), SILENT_PERIODS * sf.col("period_ns")) / 1_000
    at_end = endings.where((sf.col("lost") > 0) & (sf.col("alive_us") - sf.col("last_us") > least_us)).select(
        "topic",
        sf.col("last_us").alias("start_us"),
        sf.col("alive_us").alias("end_us"),
        "lost",
        sf.lit(False).alias("ended"),
    )
    return (
        between.unionByName(at_end)
        .orderBy(sf.desc(sf.col("end_us") - sf.col("start_us")))
        .limit(SILENCES_MAX)
    )


def merge(found: Iterable[Silence]) -> list[Outage]:
    """Silences that overlap become one outage; in order of time."""
    groups: list[list[Silence]] = []
    until_us = 0
    for silence in sorted(found, key=lambda silence: silence.start_us):
        if not groups or silence.start_us > until_us:
            groups.append([])
            until_us = silence.joins_until_us
        groups[-1].append(silence)
        until_us = max(until_us, silence.joins_until_us)
    return [
        Outage(
            number=number,
            start_us=group[0].start_us,
            end_us=max(silence.end_us for silence in group),
            streams=len(group),
            topics=len({silence.topic for silence in group}),
            lost=sum(silence.lost for silence in group),
            longest_loss_run=max(silence.lost for silence in group),
            ended=all(silence.ended for silence in group),
            resumed_us=max(silence.joins_until_us for silence in group),
        )
        for number, group in enumerate(groups, 1)
    ]


def longest(outages: Sequence[Outage]) -> list[Outage]:
    """Those that get a timeline, in order of time."""
    chosen = sorted(outages, key=lambda outage: outage.start_us - outage.end_us)[:OUTAGES_MAX]
    return sorted(chosen, key=lambda outage: outage.number)


def around(session: SparkSession, outages: Sequence[Outage]) -> DataFrame:
    """The outages as a small table, until they were over for most, each with the width of its bins."""
    return session.createDataFrame(
        [
            (
                outage.number,
                outage.start_us,
                outage.resumed_us,
                max(1_000, (outage.resumed_us - outage.start_us + 2 * AROUND_US) // BINS),
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
