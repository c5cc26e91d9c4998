"""Link conditions: their limits, Gilbert's bursts, and how people read them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.conditions import LinkConditions
from topology.errors import InvalidTopologyError
from topology.links import in_series


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delay_ms": -1}, "delay_ms is -1: it must be from 0 to 10000"),
        ({"delay_ms": float("nan")}, "delay_ms is nan"),
        ({"loss": 1.0}, "loss is 1: it must be from 0 to 0.99"),
        ({"rate_mbit": 0}, "rate_mbit is 0: it must be from 0.001"),
        ({"delay_ms": 3, "jitter_ms": 4}, "jitter_ms is 4, more than delay_ms, 3"),
        ({"loss": 0.8, "burst": 3}, "raise burst to at least 4"),
    ],
)
def test_refuses_what_no_link_can_do(fields: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidTopologyError, match=message):
        LinkConditions(**fields)


def test_reads_as_people_write() -> None:
    conditions = LinkConditions(delay_ms=30, jitter_ms=2, loss=0.01, burst=4, rate_mbit=10)
    assert conditions.describe() == "30 ms ± 2, 1 % lost in bursts of 4, 10 Mbit/s"
    assert LinkConditions().is_perfect and LinkConditions().describe() == "0 ms"


@given(st.floats(0, 0.5), st.floats(1, 1_000))
def test_burst_probabilities_give_the_loss_and_the_burst_asked_for(loss: float, burst: float) -> None:
    conditions = LinkConditions(loss=loss, burst=burst)
    enter, leave = conditions.enter_burst_probability, conditions.leave_burst_probability
    assert 0 <= enter <= 1 and 0 < leave <= 1
    assert enter / (enter + leave) == pytest.approx(loss)
    assert 1 / leave == pytest.approx(burst)


def test_a_long_run_of_the_burst_model_loses_what_was_asked_for() -> None:
    conditions = LinkConditions(loss=0.05, burst=5)
    chance = random.Random(7)
    bad, lost, bursts, packets = False, 0, 0, 200_000
    for _ in range(packets):
        if bad:
            bad = chance.random() >= conditions.leave_burst_probability
        elif chance.random() < conditions.enter_burst_probability:
            bad = True
            bursts += 1
        lost += bad
    assert lost / packets == pytest.approx(0.05, abs=0.005)
    assert lost / bursts == pytest.approx(5, rel=0.05)


def test_links_in_series() -> None:
    near = LinkConditions(delay_ms=5, jitter_ms=1, loss=0.1, burst=3, rate_mbit=10)
    far = LinkConditions(delay_ms=20, jitter_ms=2, loss=0.2, rate_mbit=4)
    both = in_series(near, far)
    assert both.loss == pytest.approx(0.28)
    assert both == LinkConditions(delay_ms=25, jitter_ms=3, loss=both.loss, burst=3, rate_mbit=4)


@given(st.floats(0, 0.49), st.floats(0, 0.49), st.floats(1, 5), st.none() | st.floats(1, 5))
def test_any_two_links_in_series_are_a_link(
    first: float, second: float, burst: float, other: float | None
) -> None:
    both = in_series(LinkConditions(loss=first, burst=burst), LinkConditions(loss=second, burst=other))
    assert both.loss >= max(first, second) - 1e-12
