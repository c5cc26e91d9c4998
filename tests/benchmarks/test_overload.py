"""The overload benchmark: its topics are admitted and may be shed as said, and a short run keeps them."""

import pytest

from benchmarks import overload
from overlay.bounds import check_admission
from overlay.shedding import keep_every
from runtime.config import RouterConfig

DELAYS = RouterConfig().delays


def test_every_category_is_admitted_and_tolerant_ones_may_be_shed_at_the_routing_broker() -> None:
    for category in overload.CATEGORIES:
        check_admission(category.qos, DELAYS)
        every = keep_every(category.qos, DELAYS)
        assert (every is None) == (category.name == "best effort")
        assert every is None or (every > 1) != category.is_urgent
        assert category.qos.period_ms in (None, 1_000 / category.rate_per_s)


def test_the_testbed_has_a_publisher_and_a_subscriber_of_every_topic() -> None:
    layout = overload.topology()
    assert len(layout.topics) == sum(category.topics for category in overload.CATEGORIES)
    assert sorted(item.topic for item in layout.publishers) == sorted(layout.topics)
    assert sorted(item.topic for item in layout.subscribers) == sorted(layout.topics)
    assert all(layout.crosses_wan(topic) for topic in layout.topics)
    for category in overload.CATEGORIES:
        assert layout.topics[f"{category.name.replace(' ', '-')}-0"] == category.qos


@pytest.mark.slow
@pytest.mark.testbed
async def test_a_short_overload_loses_only_what_may_be_lost_and_every_drop_is_counted() -> None:
    """Deadlines are left to the benchmark itself: tests share the machine with others."""
    result = await overload.measure(overload.Settings(1.5, 3), lambda _: None)
    assert result["losses_seen"] == result["drops_counted"] > 0
    for row in result["categories"]:
        assert row["loss_tolerance"] is None or row["longest_loss_run"] <= row["loss_tolerance"], row
        assert row["duplicates_and_steps_back"] == 0
    assert "times what the link carries" in overload.summary(result)
