"""The tables of the report. Each is a function of DataFrames to a small DataFrame."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

from spark_analysis.histograms import count_buckets, percentiles

_STREAM = ("topic", "publisher", "subscriber")
"""What one subscriber gets of one publisher."""


def nodes(rows: DataFrame) -> DataFrame:
    """Every node that wrote rows, once per clock it had."""
    return rows.groupBy("node", "role", "lan", "host", "clock").agg(
        sf.count(sf.lit(1)).alias("rows"), sf.min("at").alias("first_at"), sf.max("at").alias("last_at")
    )


def streams(deliveries: DataFrame, numbered: DataFrame | None) -> DataFrame:
    """Deliveries with what was lost just before each: `lost_before`, and the silence, `gap_ns`.

    Sequences rise by one, so a step of more than one is a loss. With sampling the sequences have
    gaps of their own: then `numbered` counts the sampled messages of each publisher, and a loss
    run is one of sampled messages.
    """
    if numbered is None:
        counted = deliveries.withColumn("number", sf.col("sequence"))
    else:
        counted = deliveries.join(numbered, ["publisher", "sequence"])
    of_stream = Window.partitionBy(*_STREAM).orderBy("number")
    at_us = sf.unix_micros("at")
    # A message that is there twice is no loss: steps of zero count as one.
    step = sf.greatest(sf.col("number") - sf.lag("number").over(of_stream), sf.lit(1))
    return counted.withColumns(
        {
            "lost_before": sf.coalesce(step - 1, sf.lit(0)),
            "gap_ns": (at_us - sf.lag(at_us).over(of_stream)) * 1_000,
        }
    )


def number_messages(messages: DataFrame) -> DataFrame:
    """Count the sampled messages of each publisher."""
    of_publisher = Window.partitionBy("publisher").orderBy("sequence")
    return messages.select("publisher", "sequence", sf.row_number().over(of_publisher).alias("number"))


def topics(stream_rows: DataFrame, messages: DataFrame) -> DataFrame:
    """Per topic: counts, age percentiles, deadline hits, losses against the tolerance."""
    counts = stream_rows.groupBy("topic").agg(
        sf.count(sf.lit(1)).alias("deliveries"),
        sf.sum("lost_before").alias("lost"),
        sf.max("lost_before").alias("longest_loss_run"),
        sf.min("loss_tolerance").alias("loss_tolerance"),
        (sf.min("deadline_ns") / 1e6).alias("deadline_ms"),
        sf.count(sf.when(sf.col("in_time"), sf.lit(1))).alias("in_time"),
        sf.count("in_time").alias("judged"),
        sf.count(sf.when(sf.col("slow"), sf.lit(1))).alias("slow"),
        sf.count("slow").alias("bounded"),
        sf.count(sf.when(sf.col("age_ns").isNull(), sf.lit(1))).alias("age_unknown"),
        sf.percentile_approx("bound_error_ns", 0.5, 1_000).alias("error_ns"),
    )
    published = messages.groupBy("topic").agg(
        sf.count(sf.lit(1)).alias("messages"),
        sf.sum("duplicates").alias("duplicates_dropped"),
        sf.sum("dropped").alias("dropped"),
        sf.count(sf.when(sf.col("born_after_ns") > sf.col("published_ns"), sf.lit(1))).alias(
            "bound_violations"
        ),
        sf.sum("bounds_checked").alias("bounds_checked"),
    )
    ages = percentiles(count_buckets(stream_rows, ["topic"], "age_ns"), ["topic"]).drop("count")
    return (
        published.join(counts, "topic", "left")
        .join(ages, "topic", "left")
        .withColumns(
            {
                "deadline_hit_pct": share(
                    sf.col("in_time"), sf.col("judged") + sf.when(sf.col("judged") > 0, sf.col("lost"))
                ),
                "slow_pct": share(sf.col("slow"), sf.col("bounded")),
                "within_tolerance": sf.col("longest_loss_run") <= sf.col("loss_tolerance"),
                "bound_error_p50_ms": sf.col("error_ns") / 1e6,
            }
        )
        .drop("error_ns", "bounded", "slow")
        .orderBy("topic")
    )


def ages(stream_rows: DataFrame) -> DataFrame:
    """Ages of all deliveries together."""
    together = stream_rows.select(sf.lit("all").alias("what"), "age_ns")
    return percentiles(count_buckets(together, ["what"], "age_ns"), ["what"])


def observations(legs: DataFrame) -> DataFrame:
    """Every wait in a node and every crossing of a link, as `kind` (queue or link) and `duration_ns`."""
    # What is sent again after a failover had been sent before: its wait is that of a spare.
    wait_ns = sf.when(sf.coalesce("resent", sf.lit(False)), None).otherwise(sf.col("wait_ns"))
    both = sf.array(
        sf.struct(sf.lit("queue").alias("kind"), wait_ns.alias("duration_ns")),
        sf.struct(sf.lit("link").alias("kind"), sf.col("link_ns").alias("duration_ns")),
    )
    return legs.select(
        "from_node", "to_node", "from_role", "to_role", "exact", sf.explode(both).alias("part")
    ).select("from_node", "to_node", "from_role", "to_role", "exact", "part.kind", "part.duration_ns")


def leg_histogram(legs: DataFrame) -> DataFrame:
    """Durations of all waits and crossings, counted; hops, links and nodes are sums of it."""
    keys = ["kind", "from_node", "to_node", "from_role", "to_role", "exact"]
    return count_buckets(observations(legs), keys, "duration_ns")


def hops(histogram: DataFrame) -> DataFrame:
    """Per kind of hop on the way from publisher to subscriber."""
    named = name_hops(histogram)
    return percentiles(named, ["place", "hop", "kind"]).orderBy("place", "hop")


def name_hops(histogram: DataFrame) -> DataFrame:
    """Give each wait and crossing the name of its hop, and its place on the way."""
    known = {
        ("link", "client", "edge"): (1, "publisher → edge"),
        ("queue", "edge", "router"): (2, "in the ingress edge"),
        ("link", "edge", "router"): (3, "edge → router"),
        ("queue", "router", "router"): (4, "in the primary, for the backup"),
        ("link", "router", "router"): (5, "primary → backup"),
        ("queue", "router", "edge"): (6, "in the router"),
        ("link", "router", "edge"): (7, "router → edge"),
        ("queue", "edge", "edge"): (8, "in the edge, for another edge"),
        ("link", "edge", "edge"): (9, "edge → edge"),
        ("queue", "edge", "client"): (10, "in the egress edge"),
        ("link", "edge", "client"): (11, "edge → subscriber"),
        ("queue", "client", "edge"): (0, "in the publisher"),
    }
    kind, start, end = sf.col("kind"), sf.col("from_role"), sf.col("to_role")
    place: Column = sf.lit(12)
    hop: Column = sf.concat_ws(
        " ", kind, sf.coalesce(start, sf.lit("unknown")), sf.lit("→"), sf.coalesce(end, sf.lit("unknown"))
    )
    for (of_kind, of_start, of_end), (number, name) in known.items():
        matches = (kind == of_kind) & (start == of_start) & (end == of_end)
        place = sf.when(matches, sf.lit(number)).otherwise(place)
        hop = sf.when(matches, sf.lit(name)).otherwise(hop)
    return histogram.withColumns({"place": place, "hop": hop})


def links(histogram: DataFrame, legs: DataFrame) -> DataFrame:
    """Per link: crossings, bounds, and messages that only one of its ends saw."""
    crossings = percentiles(histogram.where("kind = 'link'"), ["from_node", "to_node"])
    bounds = percentiles(
        count_buckets(legs, ["from_node", "to_node"], "link_bound_ns"), ["from_node", "to_node"]
    ).select("from_node", "to_node", sf.col("p99_ms").alias("bound_p99_ms"))
    error_ns = sf.when(sf.col("exact"), sf.col("link_bound_ns") - sf.col("link_ns"))
    ends = legs.groupBy("from_node", "to_node").agg(
        sf.min(sf.col("exact") | sf.col("sent_ns").isNull() | sf.col("arrived_ns").isNull()).alias("exact"),
        sf.count(sf.when(sf.col("arrived_ns").isNull(), sf.lit(1))).alias("never_arrived"),
        sf.count(sf.when(sf.col("sent_ns").isNull(), sf.lit(1))).alias("never_sent"),
        (sf.percentile_approx(error_ns, 0.5, 1_000) / 1e6).alias("bound_error_p50_ms"),
    )
    return (
        ends.join(crossings, ["from_node", "to_node"], "left")
        .join(bounds, ["from_node", "to_node"], "left")
        .withColumn("link", sf.concat_ws(" → ", "from_node", "to_node"))
        .orderBy("from_node", "to_node")
    )


def node_waits(histogram: DataFrame, seen: DataFrame) -> DataFrame:
    """Per node: how long messages waited in it."""
    waits = percentiles(histogram.where("kind = 'queue'"), ["from_node"]).withColumnRenamed(
        "from_node", "node"
    )
    names = seen.groupBy("node", "role", "lan").agg(
        sf.sum("rows").alias("rows"), sf.countDistinct("host").alias("clocks")
    )
    return names.join(waits, "node", "left").orderBy("role", "node")


def lans(deliveries: DataFrame) -> DataFrame:
    """From each LAN to each LAN: deliveries, ages, deadline hits."""
    keys = ["publisher_lan", "subscriber_lan"]
    ages = percentiles(count_buckets(deliveries, keys, "age_ns"), keys)
    hits = deliveries.groupBy(*keys).agg(
        share(sf.count(sf.when(sf.col("in_time"), sf.lit(1))), sf.count("in_time")).alias("in_time_pct")
    )
    return ages.join(hits, keys).orderBy(*keys)


def drops(rows: DataFrame) -> DataFrame:
    """What was dropped, where and why."""
    return (
        rows.where("event IN ('dropped', 'duplicate')")
        .groupBy("node", "topic", sf.coalesce("reason", "event").alias("reason"))
        .agg(sf.count(sf.lit(1)).alias("messages"))
        .orderBy(sf.desc("messages"), "node", "topic")
    )


def blame(late_paths: DataFrame, histogram: DataFrame) -> DataFrame:
    """Where late deliveries lost their time: the part that took most longer than it usually does."""
    usual = percentiles(histogram, ["kind", "from_node", "to_node"]).select(
        "kind", "from_node", "to_node", (sf.col("p50_ms") * 1e6).alias("usual_ns")
    )
    parts = late_paths.select("publisher", "sequence", "subscriber", sf.explode("path").alias("leg")).select(
        "publisher", "sequence", "subscriber", "leg.*"
    )
    both = sf.array(
        sf.struct(sf.lit("queue").alias("kind"), sf.col("wait_ns").alias("duration_ns")),
        sf.struct(sf.lit("link").alias("kind"), sf.col("link_ns").alias("duration_ns")),
    )
    excess = (
        parts.select(
            "publisher", "sequence", "subscriber", "from_node", "to_node", sf.explode(both).alias("part")
        )
        .select("publisher", "sequence", "subscriber", "from_node", "to_node", "part.*")
        .where("duration_ns IS NOT NULL")
        .join(sf.broadcast(usual), ["kind", "from_node", "to_node"])
        .withColumn("excess_ns", sf.col("duration_ns") - sf.col("usual_ns"))
    )
    worst = excess.groupBy("publisher", "sequence", "subscriber").agg(
        sf.max(sf.struct("excess_ns", "kind", "from_node", "to_node")).alias("worst")
    )
    where = sf.when(
        sf.col("worst.kind") == "link", sf.concat_ws(" → ", "worst.from_node", "worst.to_node")
    ).otherwise(sf.col("worst.from_node"))
    return (
        worst.groupBy(sf.col("worst.kind").alias("kind"), where.alias("place"))
        .agg(
            sf.count(sf.lit(1)).alias("late_messages"),
            (sf.percentile_approx("worst.excess_ns", 0.5, 1_000) / 1e6).alias("lost_p50_ms"),
            (sf.max("worst.excess_ns") / 1e6).alias("lost_max_ms"),
        )
        .orderBy(sf.desc("late_messages"), "place")
    )


def timeline(stream_rows: DataFrame, rows: DataFrame, bin_us: int) -> DataFrame:
    """Deliveries, ages, losses, duplicates and drops in bins of time."""
    placed = stream_rows.withColumn("bin_us", bin_of(bin_us))
    ages = percentiles(count_buckets(placed, ["bin_us"], "age_ns"), ["bin_us"]).drop("count")
    flow = placed.groupBy("bin_us").agg(
        sf.count(sf.lit(1)).alias("deliveries"),
        sf.sum("lost_before").alias("lost"),
        sf.count(sf.when(~sf.col("in_time"), sf.lit(1))).alias("late"),
    )
    trouble = (
        rows.where("event IN ('dropped', 'duplicate')")
        .groupBy(bin_of(bin_us).alias("bin_us"))
        .agg(
            sf.count(sf.when(sf.col("event") == "duplicate", sf.lit(1))).alias("duplicates"),
            sf.count(sf.when(sf.col("event") == "dropped", sf.lit(1))).alias("dropped"),
        )
    )
    return (
        flow.join(ages, "bin_us", "full")
        .join(trouble, "bin_us", "full")
        .na.fill(0, TIMELINE_COUNTS)
        .orderBy("bin_us")
    )


TIMELINE_COUNTS = ["deliveries", "lost", "late", "duplicates", "dropped"]


def bin_of(bin_us: int) -> Column:
    """The beginning of a row's bin of time, in microseconds of the calendar."""
    return sf.floor(sf.unix_micros("at") / bin_us) * bin_us


def share(part: Column, whole: Column) -> Column:
    """A percentage; null of nothing."""
    return sf.round(sf.when(whole > 0, part * 100.0 / whole), 4)
