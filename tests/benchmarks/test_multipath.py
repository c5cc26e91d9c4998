"""The multi-path benchmark: what it demands, and a tiny run on emulated links."""

import json

import pytest

from benchmarks.multipath import CASES, can_keep, failures, topology
from overlay.paths import Policy
from tests.isthmus.run import isthmus
from tests.topology.namespaces_needed import needs_namespaces

A_ONLY, NOTHING = ["direct"], []


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (1, {100: ["direct", "routing"], 300: ["direct", "routing"], 600: ["direct", "routing"]}),
        (4, {100: ["direct"], 300: ["direct"], 600: ["direct", "routing"]}),
        (5, {100: ["routing"], 300: ["direct", "routing"], 600: ["direct", "routing"]}),
        (6, {100: [], 300: ["direct", "routing"], 600: ["direct", "routing"]}),
        (8, {100: [], 300: ["direct"], 600: ["direct", "routing"]}),
    ],
)
def test_which_paths_can_keep_a_deadline_follows_from_delays_alone(case, expected):
    layout = topology(Policy.BOTH).under(f"case-{case}")
    assert {deadline: can_keep(layout, deadline) for deadline in expected} == expected


@pytest.mark.parametrize("policy", Policy)
def test_every_topic_has_the_policy_that_is_measured(policy):
    layout = topology(policy)
    assert {qos.paths for qos in layout.topics.values()} == {policy}
    assert all(f"case-{case}" in layout.scenarios for case in CASES)


def _row(policy, hits=100.0, wire_bytes=1_000, paths=A_ONLY):
    return {
        "case": 1,
        "policy": policy,
        "deadline_hit_pct": {"100": hits},
        "can_keep": {"100": paths},
        "wire_bytes": wire_bytes,
    }


def _failures(*rows, calibration_ok=True, policies=("single",)):
    return failures(
        {
            "calibration_ok": calibration_ok,
            "cases": [_row("single", hits=0.0), *rows],
            "settings": {"cases": [1], "policies": policies},
        }
    )


def test_missed_demands_are_named():
    assert _failures(_row("both"), _row("adaptive", wire_bytes=1_200)) == []
    assert "99.8" in _failures(_row("both", hits=99.8))[0]
    assert "1.21 times" in _failures(_row("adaptive", wire_bytes=1_210))[0]
    assert _failures(_row("both", wire_bytes=5_000)) == []
    assert _failures(_row("adaptive", hits=0.0, paths=NOTHING)) == []
    assert len(_failures(calibration_ok=False)) == 1
    assert _failures(policies=("single", "both")) == ["case 1, both: not measured"]


@needs_namespaces
@pytest.mark.slow
async def test_a_tiny_run_on_emulated_links(tmp_path):
    file = tmp_path / "result.json"
    command = (
        *("bench", "multipath", "--cases", "5", "--policies", "single,adaptive", "--seconds", "3"),
        *("--settle-s", "6", "--calibration-packets", "500", "--json", str(file), "--no-judge"),
    )
    # In two pieces: one row, then the other.
    done = await isthmus(*command, "--at-most-s", "0", timeout_s=240)
    assert done.status == 0, done.errors
    first = json.loads(file.read_text())
    assert [row["policy"] for row in first["cases"]] == ["single"] and not first["ok"]
    done = await isthmus(*command, "--resume", timeout_s=240)
    assert done.status == 0, done.errors
    result = json.loads(file.read_text())
    # A row that the machine was too busy for is run again, any other is kept.
    assert result["cases"][0] == first["cases"][0] or not first["cases"][0]["valid"]
    assert len(result["pieces"]) == 2
    assert [(row["case"], row["policy"]) for row in result["cases"]] == [(5, "single"), (5, "adaptive")]
    for row in result["cases"]:
        assert row["lost"] == 0
        assert row["deadline_hit_pct"].keys() == {"100", "300", "600"}
        assert row["avg_ms"] >= 60
        assert row["wire_bytes"] > 0
    done = await isthmus(*command, "--resume", "--seconds", "4", timeout_s=60)
    assert done.status == 1 and "has seconds 3, not 4" in done.errors
