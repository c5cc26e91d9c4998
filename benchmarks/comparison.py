"""What many comparisons of two ways to do the same come to, on a machine that is never quite quiet."""

import math
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
