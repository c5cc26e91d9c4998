"""How streams end: messages that were published after a subscriber's last delivery and never came.

Between two deliveries a step in the sequences tells what was lost. After the last one only the other
nodes tell that something was due, and whether the subscriber still wanted it. Each such message is

    on its way     younger than its deadline and `UNDERWAY_NS` when the recording ended: not counted
    lost           the subscriber gave a sign of life after that time, and no broker that had the
                   message passed it by
    unaccounted    else: the subscriber may have left on purpose, or it was cut off, which the
                   traces cannot tell apart

A sign of life is a row of the subscriber's own, or a message that a broker sent to it. A broker passes a
subscriber by if it has the message and does not send it that way: it knows of no subscription.
"""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

UNDERWAY_NS: Final = 2_000_000_000
"""Beyond its deadline a message may be on its way for so long, for example because a router failed."""

_STREAM: Final = ("topic", "publisher", "subscriber")


def signs_of_life(rows: DataFrame) -> DataFrame:
    """Every node that recorded something or was sent something, with the last time; small."""
    sent_to = sf.when(sf.col("event") == "dispatched", sf.col("peer_out"))
    return (
        rows.groupBy("node", sent_to.alias("peer"))
        .agg(sf.max("at").alias("at"))
        .select("at", sf.explode(sf.array("node", "peer")).alias("node"))
        .where("node IS NOT NULL")
        .groupBy("node")
        .agg(sf.unix_micros(sf.max("at")).alias("alive_us"))
    )


def stream_ends(gathered: DataFrame, nodes: DataFrame) -> DataFrame:
    """Every stream (a publisher and a traced client that got or was sent something) with its last delivery.

    Of a stream without any delivery, what was sent before its first message is not asked for.
    """
    clients = nodes.where("role = 'client'").select(sf.col("node").alias("subscriber")).distinct()
    came = sf.col("event") == "delivered"
    went = (sf.col("event") == "dispatched") & sf.col("peer_out").isNotNull()
    return (
        gathered.withColumn("subscriber", sf.when(came, sf.col("node")).when(went, sf.col("peer_out")))
        .join(sf.broadcast(clients), "subscriber", "left_semi")
        .groupBy(*_STREAM)
        .agg(
            sf.coalesce(sf.max(sf.when(came, sf.col("sequence"))), sf.min("sequence") - 1).alias(
                "last_sequence"
            ),
            sf.unix_micros(sf.coalesce(sf.max(sf.when(came, sf.col("at"))), sf.min("at"))).alias("last_us"),
            sf.max_by(sf.when(came, sf.col("peer_in")).otherwise(sf.col("node")), "at").alias("edge"),
            sf.min(sf.when(came, sf.col("deadline_ns"))).alias("deadline_ns"),
            sf.max("period_ns").alias("period_ns"),
        )
    )


def unfinished(gathered: DataFrame, nodes: DataFrame, alive: DataFrame, end_us: int) -> DataFrame:
    """The streams that lack messages which are not on their way any more; mostly none."""
    is_settled = sf.col("first") & (sf.unix_micros("born_at") <= end_us - UNDERWAY_NS // 1_000)
    settled = (
        gathered.where(is_settled).groupBy("publisher").agg(sf.max("sequence").alias("settled_sequence"))
    )
    signs = alive.withColumnRenamed("node", "subscriber")
    return (
        stream_ends(gathered, nodes)
        .join(settled, "publisher")
        .where("last_sequence < settled_sequence")
        .join(sf.broadcast(signs), "subscriber", "left")
        .drop("settled_sequence")
    )


def endings(gathered: DataFrame, streams: DataFrame, end_us: int) -> DataFrame:
    """Of each unfinished stream how much was lost after its last delivery, and how much is unaccounted."""
    wanted = (
        sf.when(sf.col("is_shed") | sf.array_contains("reached", sf.col("subscriber")), sf.lit(True))
        .when(sf.array_contains("seen_by", sf.col("edge")), sf.lit(False))
        .when(sf.array_contains("routed_to", sf.col("edge")), sf.lit(True))
        .otherwise(~sf.col("at_router"))
    )
    deadline_ns = sf.coalesce("deadline_ns", "message_deadline_ns", sf.lit(0))
    allowance_us = (deadline_ns + UNDERWAY_NS) / 1_000
    is_lost = wanted & (sf.col("born_us") <= sf.col("alive_us") - allowance_us)
    is_over = sf.col("born_us") <= end_us - allowance_us
    return (
        _messages(gathered, streams)
        .join(sf.broadcast(streams), "publisher")
        .where("sequence > last_sequence")
        .withColumns({"is_lost": is_lost, "is_over": is_over})
        .groupBy(*_STREAM, "last_us", "alive_us", "period_ns")
        .agg(
            sf.count_if("is_lost").alias("lost"),
            sf.count_if(~sf.col("is_lost") & sf.col("is_over")).alias("unaccounted"),
        )
        .where("lost > 0 OR unaccounted > 0")
    )


def _messages(gathered: DataFrame, streams: DataFrame) -> DataFrame:
    """Messages that some unfinished stream may lack, with what brokers did with each.

    `reached` are those it was sent to, `routed_to` the edges that routers sent it to, `seen_by` the nodes
    it came to behind the ingress. It `is_shed` if a broker dropped it for all it was for.
    """
    least = streams.groupBy("publisher").agg(sf.min("last_sequence").alias("least_sequence"))
    reason = sf.coalesce("reason", sf.lit(""))
    is_dropped = sf.col("event") == "dropped"
    is_full = is_dropped & (reason == "queue_full")  # at the subscriber itself
    nobody_wants = reason.isin("no_subscriber", "unrouted")
    # A broker may be the edge of both: what comes from the publisher has not been to a router yet.
    behind_ingress = sf.coalesce(sf.col("peer_in") != sf.col("publisher_node"), sf.lit(True))
    return (
        gathered.join(sf.broadcast(least), "publisher")
        .where("sequence > least_sequence AND event != 'delivered'")
        .groupBy("publisher", "sequence")
        .agg(
            sf.unix_micros(sf.min("born_at")).alias("born_us"),
            sf.min("deadline_ns").alias("message_deadline_ns"),
            sf.collect_set(sf.when(is_full, sf.col("node")).when(~nobody_wants, sf.col("peer_out"))).alias(
                "reached"
            ),
            sf.collect_set(sf.when(behind_ingress, sf.col("node"))).alias("seen_by"),
            sf.collect_set(sf.when(sf.col("at_router") & ~nobody_wants, sf.col("peer_out"))).alias(
                "routed_to"
            ),
            sf.bool_or("at_router").alias("at_router"),
            sf.bool_or(is_dropped & ~is_full & ~nobody_wants & sf.col("peer_out").isNull()).alias("is_shed"),
        )
    )
