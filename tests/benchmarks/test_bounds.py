"""The age bound benchmarks: a short run keeps its promises, the ring shows what the figures show."""

import statistics

import pytest

from benchmarks import bounds, bounds_cost, ring
from benchmarks.bounds import ALLOWED_MS, DELAYS_MS, PinnedClock, Settings, Tally
from benchmarks.ring_regions import DRIFT_PPM
from benchmarks.switching import ALL, PLACES
from clients import ReceivedMessage
from overlay.delay import drift_allowance_ns
from overlay.limits import MILLISECOND_NS, SECOND_NS

NOISE_MS = 5 * ALLOWED_MS
"""What the error of a link's bound may be above half its round trip in a test: the machine is shared, and a
link of a few samples may have had no helper that nobody held up. The benchmark itself allows a fifth."""


def message(age_bound_ms: float | None, true_ms: int) -> ReceivedMessage:
    born_ns = 10**9
    received_ns = born_ns + true_ms * MILLISECOND_NS
    return ReceivedMessage("t", born_ns.to_bytes(8, "little"), 7, 1, 0, age_bound_ms, None, received_ns)


def test_a_bound_below_the_truth_is_counted() -> None:
    tally = Tally("a to b")
    for bound_ms in (12.0, 9.99, None, 10.0):
        tally.check(message(bound_ms, 10))
    assert (tally.checked, tally.below, tally.unknown) == (3, 1, 1)
    assert sorted(round(error, 2) for error in tally.errors_ms) == [-0.01, 0.0, 2.0]


def test_a_pinned_clock_stands_still() -> None:
    clock = PinnedClock()
    clock.pinned_ns = 5
    assert [clock(), clock()] == [5, 5]
    clock.pinned_ns = 0
    assert clock() > 5


def test_what_bounds_cost_is_measured() -> None:
    cost = bounds_cost.measure_cores(rounds=2)
    low, high = cost["interval_percent"]
    assert cost["off_us_per_message"] > 0 and low <= cost["percent"] <= high
    assert "bounds cost" in bounds_cost.cores_summary(cost)


@pytest.mark.testbed
async def test_real_brokers_are_measured_with_bounds_and_without() -> None:
    cost = await bounds_cost.measure_brokers(seconds=0.5, messages=400, say=lambda _: None)
    assert cost["rounds"] >= 1
    assert cost["unknown_pct"] == {"off": 100.0, "control": 100.0, "on": 0.0}, "bounds were switched"
    assert [place["place"] for place in cost["places"]] == [*PLACES, ALL]
    assert all(place["off_us_per_message"] > 0 for place in cost["places"])
    assert "| bounds | egress edge |" in bounds_cost.brokers_summary(cost)


@pytest.mark.testbed
async def test_no_bound_is_below_the_truth_and_links_are_bounded_closely() -> None:
    """What it costs is left to the benchmark itself: tests share the machine with others."""
    result = await bounds.measure(Settings(messages=40_000, core_rounds=1, broker_seconds=0), lambda _: None)
    assert result["messages"] >= 40_000
    assert result["below_truth"] == 0, bounds.summary(result)  # with by how much
    assert len(result["ways"]) == 6
    ends = {link["node"] for link in result["links"]}
    assert {f"client in {lan}" for lan in DELAYS_MS} < ends
    assert len(ends) == len(DELAYS_MS) * 2 + 2, "clients, edges and two routing brokers tell of their links"
    for link in result["links"]:
        limit_ms = link["round_trip_ms"] / 2 + NOISE_MS
        assert link["median_error_ms"] <= limit_ms, f"{link}\n{bounds.summary(result)}"
    assert all(way["least_error_ms"] > 0 for way in result["ways"])
    assert f"{result['messages']} messages, 0 bounds below" in bounds.summary(result)


@pytest.mark.slow
@pytest.mark.testbed
async def test_optimised_bounds_follow_the_delay_and_unoptimised_ones_the_helpers() -> None:
    result = await ring.measure(150, seed=3)
    assert result["ok"], ring.summary(result)
    for region in result["regions"]:
        true, best, plain = (region[f"{name}_ms"] for name in ("true", "optimised", "unoptimised"))
        assert all(a <= b for a, b in zip(true, best, strict=True))
        assert all(a <= b for a, b in zip(true, plain, strict=True))
        for a, b in zip(best, plain, strict=True):
            # With heartbeats every 50 ms and ways of at most a second no latest helper is older than this.
            allowed_ns = drift_allowance_ns([3 * SECOND_NS] * ring.NODES, round(a * 1e6), DRIFT_PPM)
            assert a <= b + allowed_ns / 1e6, "optimised is never above unoptimised"
        errors = [b - a for a, b in zip(true, best, strict=True)]
        loose = [b - a for a, b in zip(true, plain, strict=True)]
        # The figures' point: with the best helper the error hardly depends on what helpers ran into.
        assert statistics.pstdev(errors) < statistics.pstdev(loose) / 2
        assert statistics.median(errors) < statistics.median(loose)
    assert "| national |" in ring.summary(result)
