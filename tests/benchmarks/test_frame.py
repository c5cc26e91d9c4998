"""FRAME's experiment: the workload and the record as functions, and one small run with real processes."""

import math

import pytest

from benchmarks import frame
from benchmarks.frame_record import Record
from benchmarks.frame_testbed import Setup
from benchmarks.frame_workload import (
    BACKUP_DELAY_MS,
    CATEGORIES,
    FAILOVER_MS,
    PAPER_TOPICS,
    SUBSCRIBER_DELAY_MS,
    categories_of,
    offered_rate,
    proxies,
    topics_per_category,
)
from overlay.bounds import Delays, check_admission, needs_replication
from overlay.limits import MILLISECOND_NS

DELAYS = Delays(
    0,
    round(SUBSCRIBER_DELAY_MS * MILLISECOND_NS),
    round(BACKUP_DELAY_MS * MILLISECOND_NS),
    round(FAILOVER_MS * MILLISECOND_NS),
)


@pytest.mark.parametrize("topics", PAPER_TOPICS)
def test_topics_are_spread_as_in_the_paper(topics: int) -> None:
    counts = topics_per_category(topics)
    assert (counts[0], counts[1], counts[5]) == (10, 10, 5)
    assert counts[2] == counts[3] == counts[4] == (topics - 25) // 3
    assert len(categories_of(topics)) == topics
    assert [categories_of(topics).count(kind) for kind in range(6)] == list(counts)


def test_any_number_of_topics_is_spread_as_evenly_as_it_can_be() -> None:
    assert topics_per_category(30) == (10, 10, 2, 2, 1, 5)
    with pytest.raises(ValueError, match="at least 28"):
        topics_per_category(27)


def test_the_rate_is_the_papers() -> None:
    assert offered_rate(7_525) == pytest.approx(75_410)
    assert offered_rate(13_525) == pytest.approx(135_410)


def test_proxies_hold_ten_fifty_and_one_topics_and_take_turns() -> None:
    found = proxies(7_525)
    assert sorted(topic for proxy in found for topic in proxy.topics) == list(range(7_525))
    kinds = categories_of(7_525)
    for proxy in found:
        assert {kinds[topic] for topic in proxy.topics} == {proxy.category.number}
        assert len(proxy.topics) == {0: 10, 1: 10, 5: 1}.get(proxy.category.number, 50)
    phases = [proxy.phase_ns for proxy in found if proxy.category.number == 2]
    assert len(set(phases)) == len(phases) == 50
    assert max(phases) < CATEGORIES[2].period_ns


def test_every_category_is_admitted_and_2_and_5_need_replication() -> None:
    for category in CATEGORIES:
        check_admission(category.qos(), DELAYS)
    needing = [category.number for category in CATEGORIES if needs_replication(category.qos(), DELAYS)]
    assert needing == [2, 5]


def record() -> Record:
    found = Record({3: 0, 4: 1}, [50, 100], [4])
    found.measure(0, 10_000)
    return found


def test_losses_are_counted_as_runs_by_topic() -> None:
    found = record()
    for sequence in (1, 2, 5, 6, 8):
        found.take([(3, sequence, 100)], 110)
    found.take([(4, 7, 100), (4, 8, 100)], 120)
    found.finish({3: 9, 4: 8}, 200)
    assert found.unheard == 0
    assert (found.longest_run[3], found.longest_run[4]) == (2, 0)
    assert found.lost == 2 + 1 + 1
    assert (found.duplicates, found.reordered) == (0, 0)


def test_losses_at_the_very_end_count() -> None:
    found = record()
    found.take([(3, 1, 100)], 110)
    found.finish({3: 6}, 200)
    assert found.longest_run[3] == 5


def test_duplicates_and_steps_back_are_told_apart_and_not_delivered_twice() -> None:
    found = record()
    for sequence in (1, 2, 4, 4, 3):
        found.take([(3, sequence, 100)], 110)
    assert (found.duplicates, found.reordered) == (1, 1)
    assert found.delivered(0) == 3


def test_latencies_count_by_category_and_time_of_sending() -> None:
    found = record()
    found.measure(1_000, 2_000)
    found.take([(4, 1, 900), (4, 2, 1_000), (4, 3, 1_970), (4, 4, 2_000)], 2_060)
    assert found.delivered(1) == 2
    assert found.late == [0, 1]
    found.finish({}, 3_000)
    assert found.peak_ms(1, 0) == pytest.approx(1_060 / 1e6)
    assert [list(part) for part in found.courses[4]] == [[1_000, 1_970], [1_060, 90]]


@pytest.mark.testbed
async def test_a_small_run_with_a_crash_keeps_every_loss_tolerance() -> None:
    settings = frame.Settings(Setup(55, "frame"), seconds=4, crash=True, warm_up_s=0.5)
    result = await frame.measure(settings, lambda _: None)
    assert (result["topics"], result["config"], result["crash"]) == (55, "frame", True)
    assert [row["category"] for row in result["categories"]] == list(range(6))
    assert [row["loss_tolerance"] for row in result["categories"]] == [0, 3, 0, 3, None, 0]
    assert all(row["loss_success_pct"] == 100 for row in result["categories"]), frame.summary(result)
    assert (result["duplicates"], result["reordered"]) == (0, 0)
    assert result["replicated_messages"] > 0
    assert math.isclose(result["offered_rate"], offered_rate(55), rel_tol=0.5)
    assert all(row["peak_after_crash_ms"] > 0 for row in result["categories"])
