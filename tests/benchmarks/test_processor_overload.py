"""The verdict of `isthmus bench overload --bottleneck router`: what was measured, judged and told."""

from typing import Any

import pytest

from benchmarks.frame_testbed import Setup
from benchmarks.frame_workload import CATEGORIES, categories_of
from benchmarks.processor_overload import Settings, _categories, _check_overloaded, summary
from topology.errors import DriverError

TOPICS = 55


def _received(longest_run: int, late: int) -> dict[str, Any]:
    kinds = len(CATEGORIES)
    return {
        "numbers": {str(number): number for number in range(TOPICS)},
        "longest_run": {str(number): longest_run for number in range(TOPICS)},
        "delivered": [100] * kinds,
        "late": [late] * kinds,
        "p99_ms": [1.0] * kinds,
        "peak_ms": [2.0] * kinds,
    }


def test_losses_count_against_the_tolerance_and_lateness_against_the_shortest_deadline() -> None:
    sent = {"offered": [200] * len(CATEGORIES)}
    fine = _categories(TOPICS, sent, _received(0, 1))
    assert all(row["ok"] for row in fine)
    assert sum(row["topics"] for row in fine) == len(categories_of(TOPICS)) == TOPICS
    lossy = _categories(TOPICS, sent, _received(2, 0))
    assert [row["ok"] for row in lossy] == [
        category.loss_tolerance is None or category.loss_tolerance >= 2 for category in CATEGORIES
    ]
    late = _categories(TOPICS, sent, _received(0, 2))
    assert [row["ok"] for row in late] == [category.deadline_ms > 50 for category in CATEGORIES]


def test_the_summary_names_a_broken_promise() -> None:
    rows = _categories(TOPICS, {"offered": [200] * len(CATEGORIES)}, _received(0, 0))
    result = {
        "ok": False,
        "broker": "router-a",
        "factor": 1.5,
        "passed_per_s": 30_000,
        "overload": 1.5,
        "processor_allowed": 0.05,
        "processor_needed": 0.1,
        "offered_per_s": 1_000,
        "seconds": 5.0,
        "lost": 3,
        "dropped": {"edge-a shed_tolerated": 3},
        "categories": rows,
    }
    text = summary(result)
    assert "A PROMISE BROKEN" in text
    assert "| 0 | 200 | 50.0 | 0 | 0 | 100.0 | 1.0 | 50 |" in text
    assert "edge-a shed_tolerated: 3" in text


def test_a_broker_that_bears_its_load_shows_nothing() -> None:
    settings = Settings(Setup(TOPICS, "frame"), factor=1.5)
    _check_overloaded(0.99, settings)
    with pytest.raises(DriverError, match="used 70% of the time it got"):
        _check_overloaded(0.7, settings)
