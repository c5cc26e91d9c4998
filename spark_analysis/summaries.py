"""The tables of the report. Each is a function of DataFrames to a small DataFrame."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

from spark_analysis.histograms import bucket_of, count_buckets, percentiles

_STREAM = ("topic", "publisher", "subscriber")
"""What one subscriber gets of one publisher."""


def nodes(rows: DataFrame) -> DataFrame:
    """Every node that wrote rows, once per clock it had."""
    return rows.groupBy("node", "role", "lan", "host", "clock").agg(
        sf.count(sf.lit(1)).alias("rows"), sf.min("at").alias("first_at"), sf.max("at").alias("last_at")
    )


def streams(deliveries: DataFrame, numbered: DataFrame | None) -> DataFrame:
    """Deliveries with what was lost just before each: `lost_before`, and the silence, `gap_ns`.

    `held_ns` is how much longer it was on its way than the one before, by the calendar. If nothing
    was lost, the rest of the silence was the publisher's.

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
    way_us = at_us - sf.unix_micros("born_at")
    # A message that is there twice is no loss: steps of zero count as one.
    step = sf.greatest(sf.col("number") - sf.lag("number").over(of_stream), sf.lit(1))
    return counted.withColumns(
        {
            "lost_before": sf.coalesce(step - 1, sf.lit(0)),
            "gap_ns": (at_us - sf.lag(at_us).over(of_stream)) * 1_000,
            "held_ns": (way_us - sf.lag(way_us).over(of_stream)) * 1_000,
        }
    )


def number_messages(gathered: DataFrame) -> DataFrame:
    """Count the sampled messages of each publisher."""
    of_publisher = Window.partitionBy("publisher").orderBy("sequence")
    return gathered.where("first").select(
        "publisher", "sequence", sf.row_number().over(of_publisher).alias("number")
    )


def published(gathered: DataFrame) -> DataFrame:
    """Per topic, what is known of its messages, delivered or not."""
    is_first = sf.col("first")
    return gathered.groupBy("topic").agg(
        sf.count_if(is_first).alias("messages"),
        sf.count_if(sf.col("event") == "duplicate").alias("duplicates_dropped"),
        sf.count_if(sf.col("event") == "dropped").alias("dropped"),
        sf.count_if(is_first & (sf.col("born_after_ns") > sf.col("published_ns"))).alias("bound_violations"),
        # A claim is only checked where the time of publishing is known.
        sf.count(sf.when(sf.col("published_ns").isNotNull(), sf.col("claim_ns"))).alias("bounds_checked"),
        sf.min("loss_tolerance").alias("topic_loss_tolerance"),
        (sf.min(sf.when(is_first, sf.col("deadline_ns"))) / 1e6).alias("topic_deadline_ms"),
    )


def delivery_histogram(stream_rows: DataFrame) -> DataFrame:
    """Deliveries counted by topic, LANs and age, with all that topics and LANs are sums of."""
    keys = ("topic", "publisher_lan", "subscriber_lan")
    return stream_rows.groupBy(*keys, bucket_of(sf.col("age_ns")).alias("bucket")).agg(
        sf.count(sf.lit(1)).alias("count"),
        sf.max("age_ns").alias("max_ns"),
        sf.sum("lost_before").alias("lost"),
        sf.max("lost_before").alias("longest_loss_run"),
        sf.min("loss_tolerance").alias("loss_tolerance"),
        sf.min("deadline_ns").alias("deadline_ns"),
        sf.count_if("in_time").alias("in_time"),
        sf.count("in_time").alias("judged"),
        sf.count_if("slow").alias("slow"),
        sf.count("slow").alias("bounded"),
    )


def topics(
    messages: DataFrame, histogram: DataFrame, stream_rows: DataFrame, endings: DataFrame
) -> DataFrame:
    """Per topic: counts, age percentiles, deadline hits, losses against the tolerance.

    Losses are those between deliveries and those at the end of streams, which are runs of their own.
    Of a topic that nobody is known to have been due they are null. Whether the tolerance was kept is
    null if that depends on messages that are unaccounted.
    """
    counts = histogram.groupBy("topic").agg(
        sf.sum("count").alias("deliveries"),
        *(sf.sum(name).alias(name) for name in ("lost", "in_time", "judged", "slow", "bounded")),
        sf.max("longest_loss_run").alias("longest_loss_run"),
        sf.min("loss_tolerance").alias("loss_tolerance"),
        (sf.min("deadline_ns") / 1e6).alias("deadline_ms"),
        sf.sum(sf.when(sf.col("bucket").isNull(), sf.col("count")).otherwise(0)).alias("age_unknown"),
    )
    of_topic = ["topic"]
    found = percentiles(histogram.where("bucket IS NOT NULL"), of_topic).drop("count")
    ends = endings.groupBy("topic").agg(
        sf.sum("lost").alias("lost_at_end"),
        sf.max("lost").alias("run_at_end"),
        sf.sum("unaccounted").alias("unaccounted"),
        sf.max("unaccounted").alias("longest_unaccounted"),
    )
    errors = percentiles(count_buckets(stream_rows, of_topic, "bound_error_ns"), of_topic).select(
        "topic", sf.col("p50_ms").alias("bound_error_p50_ms")
    )
    lost, at_end = sf.col("lost"), sf.col("lost_at_end")
    joined = (
        messages.join(counts, "topic", "left")
        .join(found, "topic", "left")
        .join(errors, "topic", "left")
        .join(ends, "topic", "left")
        .na.fill(0, ["deliveries", "in_time", "judged", "slow", "bounded", "age_unknown", "unaccounted"])
        .withColumns(
            {
                "lost": sf.coalesce(lost + at_end, lost, at_end),
                "longest_loss_run": sf.greatest("longest_loss_run", "run_at_end"),
                "loss_tolerance": sf.coalesce("loss_tolerance", "topic_loss_tolerance"),
                "deadline_ms": sf.coalesce("deadline_ms", "topic_deadline_ms"),
            }
        )
    )
    run, limit = sf.col("longest_loss_run"), sf.col("loss_tolerance")
    # Losses have missed their deadline; if all ages are unknown, so is the share.
    has_share = sf.col("deadline_ms").isNotNull() & ((sf.col("judged") > 0) | (sf.col("deliveries") == 0))
    is_unknown = (run <= limit) & (sf.col("longest_unaccounted") > limit)
    return (
        joined.withColumns(
            {
                "deadline_hit_pct": share(
                    sf.col("in_time"),
                    sf.when(has_share, sf.col("judged") + sf.coalesce("lost", sf.lit(0))),
                ),
                "slow_pct": share(sf.col("slow"), sf.col("bounded")),
                "within_tolerance": sf.when(~sf.coalesce(is_unknown, sf.lit(False)), run <= limit),
            }
        )
        .drop(
            "bounded",
            "lost_at_end",
            "run_at_end",
            "longest_unaccounted",
            "topic_loss_tolerance",
            "topic_deadline_ms",
        )
        .orderBy("topic")
    )


def ages(histogram: DataFrame) -> DataFrame:
    """Ages of all deliveries together."""
    return percentiles(histogram.where("bucket IS NOT NULL").withColumn("what", sf.lit("all")), ["what"])


def leg_histogram(legs: DataFrame) -> DataFrame:
    """All that is known of legs, counted in one pass; hops, links and nodes are sums of it.

    By `kind`: `queue` and `link` are waits in a node and crossings, `bound` and `error` what was proven
    of a crossing and how much more than the truth; the others only count: `pair` if both ends saw a
    message, `never_arrived` and `never_sent` if one did not.
    """
    none = sf.lit(None).cast("long")
    zero = sf.lit(0).cast("long")
    # What is sent again after a failover had been sent before: its wait is that of a spare.
    wait_ns = sf.when(sf.coalesce("resent", sf.lit(False)), none).otherwise(sf.col("wait_ns"))
    is_sent, is_there = sf.col("sent_ns").isNotNull(), sf.col("arrived_ns").isNotNull()
    kinds = {
        "queue": wait_ns,
        "link": sf.col("link_ns"),
        "bound": sf.col("link_bound_ns"),
        "error": sf.when(sf.col("exact"), sf.col("link_bound_ns") - sf.col("link_ns")),
        "pair": sf.when(is_sent & is_there, zero),
        "never_arrived": sf.when(~is_there, zero),
        "never_sent": sf.when(~is_sent, zero),
    }
    parts = sf.array(
        *(
            sf.struct(sf.lit(kind).alias("kind"), duration_ns.alias("duration_ns"))
            for kind, duration_ns in kinds.items()
        )
    )
    places = ("from_node", "to_node", "from_role", "to_role", "exact")
    observed = legs.select(*places, sf.inline(parts))
    return count_buckets(observed, ["kind", *places], "duration_ns")


def hops(histogram: DataFrame) -> DataFrame:
    """Per kind of hop on the way from publisher to subscriber."""
    named = name_hops(histogram.where("kind IN ('queue', 'link')"))
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


def links(histogram: DataFrame) -> DataFrame:
    """Per link: crossings, bounds, and messages that only one of its ends saw."""
    ends = ["from_node", "to_node"]

    def of_kind(kind: str) -> DataFrame:
        return percentiles(histogram.where(sf.col("kind") == kind), ends)

    def count_of(kind: str) -> Column:
        return sf.sum(sf.when(sf.col("kind") == kind, sf.col("count")).otherwise(0)).alias(kind)

    inexact = (sf.col("kind") == "pair") & ~sf.col("exact")
    bounds = of_kind("bound").select(
        *ends, sf.col("p50_ms").alias("bound_p50_ms"), sf.col("p99_ms").alias("bound_p99_ms")
    )
    errors = of_kind("error").select(*ends, sf.col("p50_ms").alias("bound_error_p50_ms"))
    return (
        histogram.groupBy(*ends)
        .agg((sf.count_if(inexact) == 0).alias("exact"), count_of("never_arrived"), count_of("never_sent"))
        .join(of_kind("link"), ends, "left")
        .join(bounds, ends, "left")
        .join(errors, ends, "left")
        .withColumn("link", sf.concat_ws(" → ", *ends))
        .orderBy(*ends)
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


def lans(histogram: DataFrame) -> DataFrame:
    """From each LAN to each LAN: deliveries, ages, deadline hits."""
    keys = ["publisher_lan", "subscriber_lan"]
    found = percentiles(histogram.where("bucket IS NOT NULL"), keys)
    hits = histogram.groupBy(*keys).agg(share(sf.sum("in_time"), sf.sum("judged")).alias("in_time_pct"))
    same = [found[key].eqNullSafe(hits[key]) for key in keys]
    joined = found.join(hits, same)
    return joined.select(*(found[name] for name in found.columns), "in_time_pct").orderBy(*keys)


def trouble(rows: DataFrame, bin_us: int) -> DataFrame:
    """What was dropped or came twice, where, when and why."""
    return (
        rows.where("event IN ('dropped', 'duplicate')")
        .groupBy("node", "topic", "event", sf.coalesce("reason", "event").alias("reason"), bin_of(bin_us))
        .agg(sf.count(sf.lit(1)).alias("messages"))
    )


def drops(troubles: DataFrame) -> DataFrame:
    """What was dropped, where and why."""
    return (
        troubles.groupBy("node", "topic", "reason")
        .agg(sf.sum("messages").alias("messages"))
        .orderBy(sf.desc("messages"), "node", "topic")
    )


def blame(slow_paths: DataFrame, histogram: DataFrame) -> DataFrame:
    """Where slow deliveries lost their time: the part that took most longer than it usually does."""
    places = ["kind", "from_node", "to_node"]
    usual = percentiles(histogram.where("kind IN ('queue', 'link')"), places).select(
        *places, (sf.col("p50_ms") * 1e6).alias("usual_ns")
    )
    parts = slow_paths.select("publisher", "sequence", "subscriber", sf.explode("path").alias("leg")).select(
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
            sf.count(sf.lit(1)).alias("slow_messages"),
            (sf.percentile_approx("worst.excess_ns", 0.5, 1_000) / 1e6).alias("lost_p50_ms"),
            (sf.max("worst.excess_ns") / 1e6).alias("lost_max_ms"),
        )
        .orderBy(sf.desc("slow_messages"), "place")
    )


def timeline(stream_rows: DataFrame, troubles: DataFrame, endings: DataFrame, bin_us: int) -> DataFrame:
    """Deliveries, ages, losses, duplicates and drops in bins of time.

    What was lost at the end of a stream is where its last delivery is.
    """
    placed = stream_rows.groupBy(bin_of(bin_us), bucket_of(sf.col("age_ns")).alias("bucket")).agg(
        sf.count(sf.lit(1)).alias("count"),
        sf.max("age_ns").alias("max_ns"),
        sf.sum("lost_before").alias("lost"),
        sf.count_if(~sf.col("in_time")).alias("late"),
    )
    found = percentiles(placed.where("bucket IS NOT NULL"), ["bin_us"]).drop("count")
    flow = placed.groupBy("bin_us").agg(
        sf.sum("count").alias("deliveries"), sf.sum("lost").alias("lost"), sf.sum("late").alias("late")
    )
    counted = troubles.groupBy("bin_us").agg(
        sf.sum(sf.when(sf.col("event") == "duplicate", sf.col("messages"))).alias("duplicates"),
        sf.sum(sf.when(sf.col("event") == "dropped", sf.col("messages"))).alias("dropped"),
    )
    last_bin_us = sf.floor(sf.col("last_us") / bin_us) * bin_us
    ends = endings.groupBy(last_bin_us.alias("bin_us")).agg(sf.sum("lost").alias("lost_at_end"))
    return (
        flow.join(found, "bin_us", "full")
        .join(counted, "bin_us", "full")
        .join(ends, "bin_us", "full")
        .na.fill(0, ["lost", "lost_at_end"])
        .withColumn("lost", sf.col("lost") + sf.col("lost_at_end"))
        .drop("lost_at_end")
        .na.fill(0, TIMELINE_COUNTS)
        .orderBy("bin_us")
    )


TIMELINE_COUNTS = ["deliveries", "lost", "late", "duplicates", "dropped"]


def bin_of(bin_us: int) -> Column:
    """The beginning of a row's bin of time, in microseconds of the calendar."""
    return (sf.floor(sf.unix_micros("at") / bin_us) * bin_us).alias("bin_us")


def share(part: Column, whole: Column) -> Column:
    """A percentage; null of nothing."""
    return sf.round(sf.when(whole > 0, part * 100.0 / whole), 4)
