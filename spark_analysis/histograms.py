"""Percentiles from logarithmic histograms: exact in rank, within half a percent in value.

Durations are counted in buckets that grow by one percent. Counting needs one pass and a fixed
amount of memory per key, histograms of different keys can be added up, and plots need them anyway.
"""

import math
from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

GROWTH: Final = 1.01
RELATIVE_ERROR: Final = math.sqrt(GROWTH) - 1
"""Most that a percentile differs from the true one: it is reported as the middle of its bucket."""
PERCENTILES: Final = {"p50_ms": 0.50, "p90_ms": 0.90, "p99_ms": 0.99, "p999_ms": 0.999}
_ZERO_BUCKET: Final = -1
"""Holds durations of zero, and negative ones, which only rounding of clocks makes."""
_NS_PER_MS: Final = 1e6


def bucket_of(duration_ns: Column) -> Column:
    """The bucket of a duration; null for null."""
    logarithm = sf.floor(sf.log(duration_ns.cast("double")) / sf.lit(math.log(GROWTH))).cast("int")
    return sf.when(duration_ns <= 0, sf.lit(_ZERO_BUCKET)).otherwise(logarithm)


def middle_ns(bucket: Column) -> Column:
    """The duration a bucket stands for."""
    return sf.when(bucket == _ZERO_BUCKET, sf.lit(0.0)).otherwise(
        sf.pow(sf.lit(GROWTH), bucket.cast("double") + 0.5)
    )


def count_buckets(observations: DataFrame, keys: Sequence[str], duration: str) -> DataFrame:
    """Count durations by keys and bucket: `count` and the largest, `max_ns`. Nulls are left out."""
    return (
        observations.where(sf.col(duration).isNotNull())
        .groupBy(*keys, bucket_of(sf.col(duration)).alias("bucket"))
        .agg(sf.count(sf.lit(1)).alias("count"), sf.max(duration).alias("max_ns"))
    )


def percentiles(histogram: DataFrame, keys: Sequence[str]) -> DataFrame:
    """`count`, percentiles and `max_ms` for each value of the keys, which may be fewer than counted by."""
    merged = histogram.groupBy(*keys, "bucket").agg(
        sf.sum("count").alias("count"), sf.max("max_ns").alias("max_ns")
    )
    of_key = Window.partitionBy(*keys)
    ranked = merged.withColumns(
        {
            "total": sf.sum("count").over(of_key),
            "up_to": sf.sum("count").over(of_key.orderBy("bucket")),
            "duration_ns": sf.least(middle_ns(sf.col("bucket")), sf.col("max_ns").cast("double")),
        }
    )
    found = {
        name: _to_ms(
            sf.min(sf.when(sf.col("up_to") >= sf.ceil(sf.col("total") * share), sf.col("duration_ns")))
        )
        for name, share in PERCENTILES.items()
    }
    return ranked.groupBy(*keys).agg(
        sf.sum("count").alias("count"),
        *(column.alias(name) for name, column in found.items()),
        _to_ms(sf.max("max_ns")).alias("max_ms"),
    )


def _to_ms(duration_ns: Column) -> Column:
    return sf.round(duration_ns / _NS_PER_MS, 6)
