"""The tracing benchmark: its statistics, its verdicts, and a short run of the real thing."""

import random
import statistics
from typing import Any

import pytest

from benchmarks import switching, tracing
from benchmarks.comparison import VALUES_LEAST, median_interval
from benchmarks.switching import PLACES
from benchmarks.tracing import JUDGED, Settings, judge


def test_the_interval_holds_the_median_as_often_as_it_says():
    randomness = random.Random(5)
    for count in (30, 301):
        held = 0
        for _ in range(400):
            low, high = median_interval([randomness.expovariate(1) for _ in range(count)])
            held += low <= 0.6931 <= high
        assert 0.93 <= held / 400 <= 0.99


def test_the_interval_of_many_values_is_narrow_and_of_few_is_all():
    many = list(range(2_001))
    low, high = median_interval(many)
    assert low < statistics.median(many) < high and high - low < 100
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def cost(
    interval: tuple[float, float], control: tuple[float, float] = (-0.5, 0.5), beds: int = VALUES_LEAST
) -> dict[str, Any]:
    place = {"interval_pct": interval, "control_pct": control, "beds_pct": [interval[0]] * beds}
    return {"sampling": JUDGED, "places": [place]}


@pytest.mark.parametrize(
    ("costs", "verdict"),
    [
        ([cost((1.0, 2.9))], True),
        ([cost((3.1, 4.0))], False),
        ([cost((2.0, 4.0))], None),
        ([cost((1.0, 2.0), control=(-2.0, 0.0))], None),
        ([cost((1.0, 2.0), control=(-1.0, -0.1))], None),
        ([cost((1.0, 2.0), control=(-1.0, 0.0))], True),
        ([cost((1.0, 2.0), beds=VALUES_LEAST - 1)], None),
        ([], None),
    ],
)
def test_a_verdict_is_given_only_where_the_measurement_can_tell(
    costs: list[dict[str, Any]], verdict: bool | None
):
    assert judge(costs) is verdict


def test_what_is_said_is_the_median_over_the_beds():
    """Of each bed the median of its rounds counts, whatever the others are like."""
    beds = [
        {
            "off": [dict.fromkeys((*PLACES, switching.ALL), base)] * 3,
            "control": [dict.fromkeys((*PLACES, switching.ALL), base)] * 3,
            "on": [dict.fromkeys((*PLACES, switching.ALL), base * each) for each in (1, more, 9)],
        }
        for base, more in ((1.0, 1.01), (2.0, 1.02), (5.0, 1.30))
    ]
    for place in switching.compare(beds):
        assert place["beds_pct"] == [1.0, 2.0, 30.0]
        assert (place["more_pct"], place["off_us_per_message"]) == (2.0, 2.0)
        assert place["control_pct"] == [0.0, 0.0]
    costed = {place["place"]: place["more_pct"] for place in switching.compare(beds, added_us=0.02)}
    assert costed["routing broker"] == pytest.approx(3.0) and costed[switching.ALL] == pytest.approx(5.0)


@pytest.mark.testbed
async def test_real_brokers_are_measured_with_tracing_and_without():
    result = await tracing.measure(Settings(seconds=1.0, messages=400), lambda _: None)
    assert [cost["sampling"] for cost in result["costs"]] == [JUDGED, 1.0]
    for found in result["costs"]:
        assert found["rounds"] >= 1
        assert [place["place"] for place in found["places"]] == [*PLACES, switching.ALL]
        assert all(place["off_us_per_message"] > 0 for place in found["places"])
    assert "| 100 % traced | egress edge |" in tracing.summary(result)
