"""The WAN's commands and its verdict about itself; test_emulation sends packets through it."""

from typing import Any

import pytest

from overlay.limits import MILLISECOND_NS
from topology.errors import TopologyError
from topology.ferry import LATE_NS, Lateness, lag_reason
from topology.wan_server import Wan, seeded_lanes

PERFECT = {"delay_ms": 0.0}


def wan() -> Wan:
    pairs = [("plant", "cloud"), ("cloud", "plant"), ("office", "cloud"), ("cloud", "office")]
    return Wan(seeded_lanes([{"from": a, "to": b, "conditions": PERFECT} for a, b in pairs], seed=1))


def test_link_changes_both_ways_and_keeps_what_is_not_named() -> None:
    it = wan()
    it.obey({"command": "link", "a": "plant", "b": "cloud", "changes": {"delay_ms": 250}})
    answer = it.obey({"command": "link", "a": "plant", "b": "cloud", "changes": {"loss": 0.01}})
    assert set(answer) == {"plant > cloud", "cloud > plant"}
    for lane in answer.values():
        assert (lane["delay_ms"], lane["loss"], lane["cut"]) == (250, 0.01, False)
    assert it.lanes["plant", "cloud"].admit(0, 100) in {None, 250 * MILLISECOND_NS}
    assert it.lanes["office", "cloud"].admit(0, 100) == 0


def test_one_way_leaves_the_other_alone() -> None:
    it = wan()
    answer = it.obey({"command": "cut", "a": "plant", "b": "cloud", "one_way": True})
    assert answer == {"plant > cloud": answer["plant > cloud"]} and answer["plant > cloud"]["cut"]
    assert it.lanes["plant", "cloud"].is_cut and not it.lanes["cloud", "plant"].is_cut
    it.obey({"command": "heal", "a": "plant", "b": "cloud"})
    assert not it.lanes["plant", "cloud"].is_cut


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (
            {"command": "explode"},
            "'explode' is no command: use link, cut, heal, attach, detach, watch or statistics",
        ),
        (
            {"command": "cut", "a": "plant", "b": "moon"},
            "no link from plant to moon: sites are cloud, office, plant",
        ),
        (
            {"command": "link", "a": "plant", "b": "cloud", "changes": {"color": 1}},
            "color: no such condition: use delay_ms",
        ),
        (
            {"command": "link", "a": "plant", "b": "cloud", "changes": {"loss": 2}},
            r"loss is 2: it must be from 0 to 0\.99",
        ),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(request_: dict[str, Any], complaint: str) -> None:
    it = wan()
    before = it.statistics()
    with pytest.raises(TopologyError, match=complaint):
        it.obey(request_)
    assert it.statistics() == before


def test_a_change_that_suits_one_direction_only_changes_neither() -> None:
    it = wan()
    it.obey({"command": "link", "a": "plant", "b": "cloud", "one_way": True, "changes": {"delay_ms": 9}})
    with pytest.raises(TopologyError, match="jitter_ms is 5, more than delay_ms, 0"):
        it.obey({"command": "link", "a": "plant", "b": "cloud", "changes": {"jitter_ms": 5}})
    assert it.lanes["plant", "cloud"].conditions.jitter_ms == 0


def verdict(lateness: Lateness, kernel_dropped: int = 0) -> str | None:
    return lag_reason(
        {
            "forwarded": lateness.forwarded,
            "late": lateness.late,
            "late_max_ms": lateness.max_ns / MILLISECOND_NS,
            "kernel_dropped": kernel_dropped,
        }
    )


def test_a_few_late_packets_are_borne_and_more_make_the_run_invalid() -> None:
    lateness = Lateness()
    for _ in range(999):
        lateness.note(MILLISECOND_NS)
    lateness.note(LATE_NS + 1)
    assert verdict(lateness) is None
    lateness.note(LATE_NS + 1)
    reason = verdict(lateness)
    assert reason is not None and reason.startswith("2 of 1001 packets were carried more than 10 ms late")
    assert lateness.percentile_ms(0.5) == pytest.approx(1.1)
    assert lateness.percentile_ms(1.0) == pytest.approx(10.1)


def test_packets_read_after_nobody_looked_count_as_late() -> None:
    lateness = Lateness()
    lateness.note_unseen(0, 10 * LATE_NS)
    lateness.note_unseen(3, LATE_NS)
    assert lateness.late == 0
    lateness.note_unseen(3, LATE_NS + 1)
    assert lateness.late == 3 and verdict(lateness) is not None


def test_packets_the_kernel_dropped_make_the_run_invalid() -> None:
    reason = verdict(Lateness(), kernel_dropped=7)
    assert reason is not None and "dropped 7 packets" in reason
