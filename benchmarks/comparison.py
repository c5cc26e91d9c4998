"""What many comparisons of two ways to do the same come to, on a machine that is never quite quiet."""

import math
import statistics
from collections.abc import Sequence
from typing import Final

VALUES_LEAST: Final = 6
"""The median of fewer lies outside all of them in more than 5 of 100 cases."""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which of the values the median lies in at least 95 of 100 cases; all if they are few.

    Each value lies below the true median with probability one half, so how many do is binomial.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside = left_out = 0
    while 40 * (outside := outside + math.comb(count, left_out)) <= 2**count:
        left_out += 1
    low = max(0, left_out - 1)
    return ordered[low], ordered[count - 1 - low]


def ratio_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """By which factor values have grown: a lower end, an estimate and an upper end.

    Hodges and Lehmann's estimate is the median of all ratios of one value to another; the ends belong to the
    rank-sum test of Mann and Whitney at 95 of 100 cases. A few values that are far off move neither.
    """
    ratios = sorted(later / earlier for earlier in before for later in after)
    count = len(ratios)
    spread = 1.96 * math.sqrt(count * (len(before) + len(after) + 1) / 12)
    left_out = max(0, math.floor(count / 2 - spread))
    return ratios[left_out], statistics.median(ratios), ratios[count - 1 - left_out]
