"""What one direction of an emulated link does to packets."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.limits import MILLISECOND_NS, SECOND_NS
from topology.conditions import LinkConditions
from topology.lane import QUEUE_MAX_NS, Lane

PACKETS = 50_000


def fates(lane: Lane, packets: int, every_ns: int = 100_000, size: int = 100) -> list[int | None]:
    """When each packet of a steady stream comes out."""
    return [lane.admit(number * every_ns, size) for number in range(packets)]


def test_a_perfect_lane_changes_nothing() -> None:
    lane = Lane(LinkConditions(), "1")
    assert fates(lane, 3) == [0, 100_000, 200_000]
    assert lane.statistics().packets == 3 and lane.statistics().bytes == 300


def test_delay() -> None:
    assert Lane(LinkConditions(delay_ms=250), "1").admit(7, 100) == 7 + 250 * MILLISECOND_NS


@pytest.mark.parametrize("loss", [0.01, 0.05, 0.3])
def test_independent_loss(loss: float) -> None:
    lane = Lane(LinkConditions(loss=loss), "1")
    lost = [fate is None for fate in fates(lane, PACKETS)]
    assert sum(lost) / PACKETS == pytest.approx(loss, abs=0.004)
    assert lane.statistics().lost == sum(lost)
    # Independent: a loss makes the next one neither likelier nor less likely.
    after = [second for first, second in pairwise(lost) if first]
    assert sum(after) / len(after) == pytest.approx(loss, abs=0.05)


@pytest.mark.parametrize("burst", [2.0, 8.0])
def test_loss_in_bursts_has_the_right_amount_and_length(burst: float) -> None:
    lost = [fate is None for fate in fates(Lane(LinkConditions(loss=0.05, burst=burst), "1"), 4 * PACKETS)]
    assert sum(lost) / len(lost) == pytest.approx(0.05, abs=0.005)
    starts = sum(second and not first for first, second in zip([False, *lost], lost, strict=False))
    assert sum(lost) / starts == pytest.approx(burst, rel=0.1)


def test_the_rate_spaces_packets() -> None:
    # 1,000 bytes take 8 ms at 1 Mbit/s.
    lane = Lane(LinkConditions(rate_mbit=1, delay_ms=5), "1")
    assert [lane.admit(0, 1_000) for _ in range(3)] == [
        13 * MILLISECOND_NS,
        21 * MILLISECOND_NS,
        29 * MILLISECOND_NS,
    ]


def test_more_than_the_rate_is_dropped_at_the_tail() -> None:
    lane = Lane(LinkConditions(rate_mbit=1), "1")
    out = [lane.admit(0, 1_000) for _ in range(100)]
    passed = [due for due in out if due is not None]
    assert max(passed) <= QUEUE_MAX_NS + 8 * MILLISECOND_NS
    assert lane.statistics().queue_dropped == 100 - len(passed) > 0
    # Once the queue has drained it takes packets again.
    assert lane.admit(SECOND_NS, 1_000) == SECOND_NS + 8 * MILLISECOND_NS


def test_a_cut_lane_lets_nothing_through_and_a_healed_one_everything() -> None:
    lane = Lane(LinkConditions(delay_ms=1), "1")
    lane.is_cut = True
    assert lane.admit(0, 100) is None
    lane.is_cut = False
    assert lane.admit(5, 100) == MILLISECOND_NS + 5
    assert lane.statistics().cut_dropped == 1


@given(
    st.lists(st.tuples(st.integers(0, 10 * MILLISECOND_NS), st.integers(40, 1_500)), max_size=100),
    st.floats(0, 50),
    st.floats(0, 1),
    st.none() | st.floats(0.1, 100),
    st.integers(0, 1_000),
)
def test_packets_never_overtake_each_other_or_time(
    packets: list[tuple[int, int]], delay_ms: float, jitter: float, rate_mbit: float | None, seed: int
) -> None:
    conditions = LinkConditions(delay_ms=delay_ms, jitter_ms=delay_ms * jitter, loss=0.1, rate_mbit=rate_mbit)
    lanes = [Lane(conditions, str(seed)) for _ in range(2)]
    now_ns = latest_ns = 0
    for step, (gap_ns, size) in enumerate(packets):
        now_ns += gap_ns
        if step == len(packets) // 2:
            for lane in lanes:
                lane.change(LinkConditions())
        due_ns, again_ns = (lane.admit(now_ns, size) for lane in lanes)
        assert due_ns == again_ns, "the same seed, the same fate"
        if due_ns is not None:
            assert due_ns >= now_ns - 1
            assert due_ns >= latest_ns
            latest_ns = due_ns
