"""The benchmark of hostile peers: when it says that others notice."""

import pytest

from benchmarks.hostile import Window, _p99_ratios, judge_stalled


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.9, 1.0, 1.05] * 20, True),
        ([1.2, 1.3, 1.15] * 20, False),
        ([0.8, 1.05, 1.2, 1.4] * 20, None),
        ([1.0] * 5, None),
        ([1.0] * 6, True),
    ],
)
def test_a_stalled_subscriber_is_judged_only_where_windows_can_tell(
    ratios: list[float], verdict: bool | None
):
    assert judge_stalled(ratios) is verdict


def test_each_hostile_window_is_compared_with_the_quiet_one_before_it():
    quiet, hostile = ([Window(1, 0, 1.0, p99_ms, 100.0) for p99_ms in each] for each in ((2, 4), (1, 8)))
    assert _p99_ratios(quiet, hostile) == [0.5, 2.0]
    assert _p99_ratios(quiet, quiet[1:]) == [2.0]
    assert _p99_ratios(quiet[:1], []) == [1.0]
