"""The schedule of a campaign: seeded, spaced, and only what is promised against."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.drills.histories import flawless, without
from topology.drills.campaign import EVERY_S, campaign, summary, totals
from topology.drills.history import Phases, judge_history
from topology.drills.script import Action
from topology.drills.verdict import DrillResult, InjectedFault, Verdict


@given(st.integers(0, 10**6), st.floats(20, 600))
def test_a_seed_gives_the_same_faults_every_time(seed: int, seconds: float) -> None:
    script = campaign(seconds, seed)
    assert script == campaign(seconds, seed)
    times = [fault.at_s for fault in script.faults]
    assert times == sorted(times) and times[-1] < seconds
    assert len(times) == pytest.approx(seconds / EVERY_S, rel=0.25, abs=2)
    assert all(0 <= fault.lasts_s < EVERY_S - 1 for fault in script.faults)


def test_seeds_differ_and_every_kind_of_fault_comes_up() -> None:
    scripts = [campaign(300, seed) for seed in range(20)]
    assert len({script.faults for script in scripts}) == len(scripts)
    seen = {fault.action for script in scripts for fault in script.faults}
    assert seen >= {Action.KILL, Action.FREEZE, Action.CUT, Action.CUT_ZOOKEEPER, Action.CUT_ROUTERS}


def test_totals_count_what_every_subscriber_got_and_missed() -> None:
    streams = [flawless(20), without(flawless(20, subscriber=1), 5, 7)]
    topic = judge_history("t", streams, 1, None, Phases(0, 1))
    fault = InjectedFault("kill", "router-1", 1.0, 2.0)
    result = DrillResult("campaign", "process", 1, Verdict.BROKEN, 12.34, (fault,), (topic,))
    assert totals(result) == {
        "faults": 1,
        "delivered": 37,
        "lost_beyond_tolerance": 2,
        "longest_gap_ms": 12.3,
    }
    written = {**result.to_record(), "totals": totals(result)}
    lines = summary({"one": written, "two": written}).splitlines()
    assert lines[2] == "| one | 1 | broken | 1 | 37 | 2 | 12.3 |"
    assert lines[-1] == "| all | | broken | 2 | 74 | 4 | 12.3 |"
