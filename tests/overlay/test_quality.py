"""Links are described by what was measured: delays, losses, losses in a row."""

import random

import pytest

from overlay.limits import MILLISECOND_NS as MS
from overlay.quality import (
    DelayHistogram,
    LossMeter,
    copies_for,
    in_series,
    loss_of_all,
    quantile_ns,
)


def _meter(losses) -> LossMeter:
    meter = LossMeter()
    for number, lost in enumerate(losses, 1):
        if not lost:
            meter.note(number)
    return meter


def test_quantiles_are_within_a_bucket_of_the_truth():
    histogram = DelayHistogram()
    for delay_ms in range(1, 1_001):
        histogram.add(delay_ms * MS)
    delays = histogram.distribution()
    assert sum(share for _, share in delays) == pytest.approx(1)
    for share in (0.1, 0.5, 0.9, 0.999):
        assert 1_000 * share * MS <= quantile_ns(delays, share) <= 1_000 * share * MS * 1.1


def test_a_histogram_forgets_what_was():
    histogram = DelayHistogram()
    for _ in range(5_000):
        histogram.add(30 * MS)
    for _ in range(5_000):
        histogram.add(250 * MS)
    assert quantile_ns(histogram.distribution(), 0.1) >= 250 * MS


def test_delays_add_up_over_links():
    assert in_series([((10, 0.5), (20, 0.5)), ((1, 1.0),)]) == ((11, 0.5), (21, 0.5))
    assert in_series([((10, 1.0),), ()]) == ()


@pytest.mark.parametrize("seed", range(5))
def test_independent_losses_are_found_and_do_not_pass_for_bursts(seed):
    draw = random.Random(seed)
    meter = _meter(draw.random() < 0.01 for _ in range(20_000))
    assert meter.loss == pytest.approx(0.01, abs=0.005)
    assert meter.burst < 0.1


def test_losses_in_bursts_are_told_apart():
    # Two in a row, every two hundred: one per cent, and after a loss another one half the time.
    meter = _meter(number % 200 < 2 for number in range(20_000))
    assert meter.loss == pytest.approx(0.01, abs=0.001)
    assert meter.burst == pytest.approx(0.5, abs=0.05)


def test_reordered_datagrams_are_not_lost():
    meter = LossMeter()
    numbers = list(range(1, 5_001))
    for start in range(0, 5_000, 10):
        numbers[start : start + 10] = reversed(numbers[start : start + 10])
    for number in numbers:
        meter.note(number)
    assert meter.loss < 0.001


def test_a_lossless_link_has_to_prove_itself():
    assert LossMeter().loss == pytest.approx(0.005)
    assert _meter(False for _ in range(300)).loss > 0.001
    assert 0 < _meter(False for _ in range(600)).loss < 0.001
    assert _meter(False for _ in range(1_100)).loss == 0
    # One loss is remembered for long.
    assert _meter(number == 500 for number in range(10_000)).loss > 0
    assert _meter(number == 500 for number in range(40_000)).loss == 0


def test_copies_are_as_many_as_the_losses_demand():
    assert copies_for(0.0005, 0.0005, 0.001) == 1
    assert copies_for(0.01, 0.01, 0.001) == 2
    assert copies_for(0.01, 0.01, 0.000_01) == 3
    assert copies_for(0.01, 0.2, 0.001) == 3
    # Where bursts would eat most copies, none are sent.
    assert copies_for(0.01, 0.5, 0.001) == 1
    assert loss_of_all(0.01, 0.01, 2) == pytest.approx(0.0001)
    assert loss_of_all(0.01, 0.5, 2) == pytest.approx(0.005)
