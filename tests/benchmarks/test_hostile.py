"""The benchmark of hostile peers: when it says that others notice."""

import random

import pytest

from benchmarks.comparison import VALUES_LEAST, ratio_interval
from benchmarks.hostile import judge_stalled


@pytest.mark.parametrize(
    ("low", "high", "windows", "verdict"),
    [
        (0.9, 1.09, 40, True),
        (1.1, 1.3, 40, False),
        (0.9, 1.2, 40, None),
        (0.9, 1.0, VALUES_LEAST, True),
        (0.9, 1.0, VALUES_LEAST - 1, None),
    ],
)
def test_a_stalled_subscriber_is_judged_only_where_windows_can_tell(
    low: float, high: float, windows: int, verdict: bool | None
):
    assert judge_stalled(low, high, windows) is verdict


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_ratio_of_noisy_windows_is_found_as_often_as_it_says(factor: float):
    """A third of them are far off, as on a machine that stands still now and then."""
    randomness = random.Random(3)

    def windows(scale: float) -> list[float]:
        ordinary = [scale * randomness.lognormvariate(0.5, 0.1) for _ in range(27)]
        return ordinary + [randomness.lognormvariate(2.0, 0.8) for _ in range(13)]

    held = 0
    for _ in range(200):
        low, ratio, high = ratio_interval(windows(1.0), windows(factor))
        assert low <= ratio <= high
        held += low <= factor <= high
    assert held >= (185 if factor == 1.0 else 150)
