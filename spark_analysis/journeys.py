"""From rows of single nodes to messages, legs and deliveries.

    message    what is known of one (publisher, sequence) at all nodes together (`gather`)
    leg        one message between two nodes: how long it waited at `from_node` before it was sent
               to `to_node`, and how long it was on the way
    delivery   one message at one subscriber, with its age
    path       the legs a delivery came by, walked back from the subscriber

Two times are only compared if both were read on the clock of one host. Where the publisher's host
is the subscriber's, the true age is known; elsewhere the age bound stands for it.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

PATH_LEGS_MAX: Final = 5
"""Publisher, edge, router, perhaps another router after a failover, edge, subscriber."""

_IS_PUBLISHED: Final = "role = 'client' AND event = 'dispatched' AND peer_in IS NULL"

_AT_ROUTER: Final = "role = 'router' AND event IN ('received', 'dispatched', 'dropped')"
"""It came to be sent on, not as a copy for the backup."""


def publishers(rows: DataFrame) -> DataFrame:
    """The node, LAN and host of every publisher that was traced; small."""
    return (
        rows.where(_IS_PUBLISHED)
        .groupBy("publisher")
        .agg(
            sf.max("node").alias("publisher_node"),
            sf.max("lan").alias("publisher_lan"),
            sf.max("host").alias("publisher_host"),
        )
    )


def gather(rows: DataFrame, known_publishers: DataFrame, partitions: int) -> DataFrame:
    """All rows of a publisher in one partition, those of a message side by side: the one great shuffle.

    Whatever is asked of messages, legs, deliveries or streams afterwards finds its rows together. Each
    row knows of its message `published_ns`, and what the nodes on its publisher's host proved: a bound
    says that the message was born no earlier than `in_ns - age_bound_ns`; on one clock the latest of
    these claims, `born_after_ns`, must not be after the time it was published. One row of each
    message is its `first`, and `born_at` is when it was seen first, by the calendar.
    """
    same_host = sf.col("host") == sf.col("publisher_host")
    bounded = same_host & sf.col("age_bound_ns").isNotNull() & sf.col("in_ns").isNotNull()
    of_message = Window.partitionBy("publisher", "sequence").orderBy("in_ns")
    whole = of_message.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    return (
        rows.select(*_GATHERED)
        .withColumn("is_published", sf.expr(_IS_PUBLISHED))
        .withColumn("at_router", sf.expr(_AT_ROUTER))
        .drop("role")
        .repartition(partitions, "publisher")
        .sortWithinPartitions("publisher", "sequence", "in_ns")
        .join(sf.broadcast(known_publishers), "publisher", "left")
        .withColumn("claim_ns", sf.when(bounded, sf.col("in_ns") - sf.col("age_bound_ns")))
        .withColumn("published_ns", sf.min(sf.when(sf.col("is_published"), sf.col("in_ns"))).over(whole))
        .withColumn("born_after_ns", sf.max("claim_ns").over(whole))
        .withColumn("born_at", sf.min("at").over(whole))
        .withColumn("first", sf.row_number().over(of_message) == 1)
        .drop("is_published")
    )


_GATHERED: Final = (
    "publisher",
    "sequence",
    "topic",
    "node",
    "role",
    "lan",
    "host",
    "event",
    "reason",
    "peer_in",
    "peer_out",
    "at",
    "in_ns",
    "out_ns",
    "age_bound_ns",
    "link_bound_ns",
    "deadline_ns",
    "loss_tolerance",
    "period_ns",
)


def legs(gathered: DataFrame, nodes: DataFrame) -> DataFrame:
    """One row per message and pair of nodes it went between.

    The sender's row tells when it left, the receiver's when it came. `link_ns` is exact on one
    clock; elsewhere it is the link's bound, and `exact` is false. `resent` legs are those of messages
    that an edge sent once more after a failover.
    """
    no_time = sf.lit(None).cast("long")
    host = sf.xxhash64("host")
    sent = sf.struct(
        sf.col("node").alias("from_node"),
        sf.col("peer_out").alias("to_node"),
        (sf.col("out_ns") - sf.col("in_ns")).alias("wait_ns"),
        sf.col("out_ns").alias("sent_ns"),
        host.alias("sent_host"),
        (sf.coalesce("reason", sf.lit("")) == "resent").alias("resent"),
        no_time.alias("arrived_ns"),
        no_time.alias("arrived_host"),
        no_time.alias("link_bound_ns"),
    )
    arrived = sf.struct(
        sf.col("peer_in").alias("from_node"),
        sf.col("node").alias("to_node"),
        no_time.alias("wait_ns"),
        no_time.alias("sent_ns"),
        no_time.alias("sent_host"),
        sf.lit(None).cast("boolean").alias("resent"),
        sf.col("in_ns").alias("arrived_ns"),
        host.alias("arrived_host"),
        sf.col("link_bound_ns"),
    )
    has_left = (
        sf.col("event").isin("dispatched", "replicated")
        & sf.col("peer_out").isNotNull()
        & sf.col("out_ns").isNotNull()
    )
    has_come = sf.col("peer_in").isNotNull() & sf.col("in_ns").isNotNull()
    sides = sf.array(sf.when(has_left, sent), sf.when(has_come, arrived))
    paired = (
        gathered.select("publisher", "sequence", sf.explode(sides).alias("side"))
        .where(sf.col("side").isNotNull())
        .select("publisher", "sequence", "side.*")
        .groupBy("publisher", "sequence", "from_node", "to_node")
        .agg(
            *(
                sf.min(name).alias(name)
                for name in (
                    "wait_ns",
                    "sent_ns",
                    "sent_host",
                    "resent",
                    "arrived_ns",
                    "arrived_host",
                    "link_bound_ns",
                )
            )
        )
    )
    exact = sf.coalesce(sf.col("sent_host") == sf.col("arrived_host"), sf.lit(False))
    crossed_ns = sf.col("arrived_ns") - sf.col("sent_ns")
    return (
        paired.withColumn("exact", exact)
        .withColumn("link_ns", sf.when(sf.col("exact"), crossed_ns).otherwise(sf.col("link_bound_ns")))
        .join(_roles(nodes, "from"), "from_node", "left")
        .join(_roles(nodes, "to"), "to_node", "left")
        .drop("sent_host", "arrived_host")
    )


def _roles(nodes: DataFrame, side: str) -> DataFrame:
    return sf.broadcast(
        nodes.groupBy(sf.col("node").alias(f"{side}_node")).agg(sf.max("role").alias(f"{side}_role"))
    )


def deliveries(gathered: DataFrame) -> DataFrame:
    """One row per message and subscriber. `age_ns` is true if `exact`, else the bound, else null.

    A message is `slow` if its bound is beyond the deadline, and `in_time` if its age is not.
    """
    true_ns = sf.when(sf.col("host") == sf.col("publisher_host"), sf.col("in_ns") - sf.col("published_ns"))
    return (
        gathered.where("event = 'delivered'")
        .withColumn("true_ns", true_ns)
        .select(
            "topic",
            "publisher",
            "sequence",
            sf.col("node").alias("subscriber"),
            sf.col("lan").alias("subscriber_lan"),
            "publisher_lan",
            "at",
            "born_at",
            "deadline_ns",
            "loss_tolerance",
            "period_ns",
            "age_bound_ns",
            sf.col("true_ns").isNotNull().alias("exact"),
            sf.coalesce("true_ns", "age_bound_ns").alias("age_ns"),
            (sf.col("age_bound_ns") - sf.col("true_ns")).alias("bound_error_ns"),
            # Where only one of the two is known, that decides; what is late is always slow.
            (sf.greatest("age_bound_ns", "true_ns") > sf.col("deadline_ns")).alias("slow"),
        )
        .withColumn("in_time", sf.col("age_ns") <= sf.col("deadline_ns"))
    )


def paths(some_deliveries: DataFrame, gathered: DataFrame, nodes: DataFrame) -> DataFrame:
    """The legs each of these deliveries came by, in an array `path` from the subscriber backwards.

    There may be many messages, but only some deliveries: few enough to be sent to every worker.
    """
    of_message = ["publisher", "sequence"]
    theirs = gathered.join(
        sf.broadcast(some_deliveries.select(*of_message).distinct()), of_message, "left_semi"
    )
    collected = (
        legs(theirs, nodes)
        .where("arrived_ns IS NOT NULL")
        .groupBy(*of_message)
        .agg(
            sf.collect_list(
                sf.struct("arrived_ns", "from_node", "to_node", "from_role", "to_role", "wait_ns", "link_ns")
            ).alias("legs")
        )
    )
    steps = sf.sequence(sf.lit(2), sf.lit(PATH_LEGS_MAX))
    # One expression for all steps: a column per step would copy each into the next, twice as long every time.
    path = sf.aggregate(steps, sf.array(_leg_to(sf.col("subscriber"))), _walk_back)
    return some_deliveries.join(collected, of_message).withColumn("path", sf.array_compact(path)).drop("legs")


def _walk_back(path: Column, _step: Column) -> Column:
    """Add the leg by which a message came to where its last known leg began."""
    last = sf.get(path, sf.size(path) - 1)
    # A client is where a message starts, also if the same client subscribes to it.
    begins = last.isNull() | (sf.coalesce(last["from_role"], sf.lit("")) == "client")
    return sf.when(begins, path).otherwise(sf.concat(path, sf.array(_leg_to(last["from_node"]))))


def _leg_to(node: Column) -> Column:
    """The first leg of the message that reached a node; null if it is missing in the traces."""
    return sf.array_min(sf.filter("legs", lambda leg: leg["to_node"] == node))
