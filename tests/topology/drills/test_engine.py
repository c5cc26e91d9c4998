"""What a drill says when it cannot say anything, and the records it leaves."""

from typing import Any

import pytest

from tests.topology.drills.histories import flawless
from topology.drills.actions import DEEDS
from topology.drills.catalogue import CATALOGUE
from topology.drills.engine import Plan, run_drill
from topology.drills.history import Phases, judge_history
from topology.drills.script import Action
from topology.drills.verdict import DrillResult, InjectedFault, Verdict, unknown, verdict_of, worst
from topology.errors import DriverError
from topology.model import parse_topology
from topology.observer import Observer
from topology.process_driver import ProcessDriver
from topology.promises import nothing_else_died

DRILL_FIELDS = {"drill", "driver", "seed", "verdict", "failover_ms", "faults", "topics"}
TOPIC_FIELDS = {
    *("topic", "sent", "delivered", "lost", "longest_loss_run", "loss_tolerance", "duplicates", "reordered"),
    "deadline_hit_pct",
}
TINY = "lans: {a: {}}\nrouters: 1\n"


class _NoTestbed(ProcessDriver):
    async def start(self) -> None:
        raise DriverError("no testbed today")


class _Bug(ProcessDriver):
    async def start(self) -> None:
        raise ZeroDivisionError("a bug of the checker")


@pytest.mark.parametrize(("kind", "story"), [(_NoTestbed, "no testbed today"), (_Bug, "ZeroDivisionError")])
async def test_what_fails_is_unknown_and_says_why(kind: type[ProcessDriver], story: str) -> None:
    plan = Plan(CATALOGUE["leader-killed"], parse_topology(TINY), "process", kind, seed=7)
    result = await run_drill(plan, Observer())
    assert result.verdict is Verdict.UNKNOWN
    assert story in result.reason
    assert result.to_record()["seed"] == 7


def test_verdicts() -> None:
    kept, broken = nothing_else_died([]), nothing_else_died(["edge"])
    assert verdict_of([kept]) is Verdict.HELD
    assert verdict_of([kept, broken]) is Verdict.BROKEN
    assert verdict_of([]) is Verdict.UNKNOWN, "nothing promised, nothing held"
    assert worst([Verdict.HELD, Verdict.UNKNOWN, Verdict.BROKEN]) is Verdict.BROKEN
    assert worst([Verdict.HELD, Verdict.UNKNOWN]) is Verdict.UNKNOWN
    assert worst([Verdict.HELD]) is Verdict.HELD
    assert worst([]) is Verdict.UNKNOWN
    assert [verdict.exit_status for verdict in Verdict] == [0, 1, 2]


def test_the_record_of_a_drill() -> None:
    topic = judge_history("t", [flawless(20)], 0, 20.0, Phases(0, 1))
    fault = InjectedFault("kill", "router-1", 2.0004, 6.0)
    result = DrillResult("d", "process", 3, Verdict.HELD, 12.344, (fault,), (topic,))
    record: dict[str, Any] = result.to_record()
    assert record.keys() == DRILL_FIELDS
    assert record["topics"][0].keys() == TOPIC_FIELDS
    assert record["topics"][0]["deadline_hit_pct"] == {"before": None, "during": None, "after": 100.0}
    assert record["faults"] == [{"fault": "kill", "target": "router-1", "at_s": 2.0, "healed_s": 6.0}]
    assert record["failover_ms"] == 12.34
    assert unknown("d", "netns", 1, "why").to_record().keys() == DRILL_FIELDS


def test_the_catalogue_is_sound() -> None:
    assert DEEDS.keys() == set(Action)
    for name, drill in CATALOGUE.items():
        assert name == drill.name and drill.summary and drill.promise and drill.faults
        times = [fault.at_s for fault in drill.faults]
        assert times == sorted(times) and all(fault.lasts_s >= 0 for fault in drill.faults)
