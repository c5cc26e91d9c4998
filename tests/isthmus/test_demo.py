"""`isthmus demo` for real: processes, ZooKeeper, two kills; and what it does when it cannot play."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isthmus.latency import tell_latency

TOPIC_FIELDS = {
    "topic": str,
    "sent": int,
    "delivered": int,
    "lost": int,
    "longest_loss_run": int,
    "duplicates": int,
    "p50_ms": float,
    "p99_ms": float,
    "max_ms": float,
}


def run_demo(*arguments: str, timeout_s: float = 120) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "isthmus", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.testbed
def test_every_promise_holds(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ("--seconds", "3", "--json", str(file), "--report-dir", str(tmp_path / "report"))
    finished = run_demo(*arguments, timeout_s=300)
    story = finished.stdout + finished.stderr
    assert finished.returncode == 0, story
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["ok"] is True
    assert 0 < result["leader_change_ms"] <= 5000
    assert math.isfinite(result["failover_gap_ms"])
    assert all(promise["held"] for promise in result["promises"])
    assert result["leader_killed"] != result["primary_killed"]
    topics = {topic["topic"]: topic for topic in result["topics"]}
    assert topics["plant/alarm"]["loss_tolerance"] == 0
    assert topics["plant/log"]["loss_tolerance"] is None
    for topic in topics.values():
        assert {name: type(topic[name]) for name in TOPIC_FIELDS} == TOPIC_FIELDS
        assert topic["delivered"] + topic["lost"] == topic["sent"] > 0
        assert topic["duplicates"] == 0
        assert 0 < topic["p50_ms"] <= topic["p99_ms"] <= topic["max_ms"]
    # 10 ms from the plant to the cloud and 5 ms on to the office.
    assert topics["plant/alarm"]["p50_ms"] > 14
    for text in ("killed", "leads", "every promise held", " end to end p50 ", "0 of ", "age bounds broken"):
        assert text in story
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["bound_violations"] == 0 < report["bounds_checked"]
    assert {row["topic"] for row in report["topics"]} == topics.keys()
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_says_what_is_wrong_with_a_topology(tmp_path: Path) -> None:
    topology = tmp_path / "bad.yaml"
    topology.write_text("lans: {a: {}}\nrouters: many\n")
    file = tmp_path / "result.json"
    finished = run_demo(str(topology), "--json", str(file))
    assert finished.returncode == 1
    assert "line 2: routers is 'many': give a whole number" in finished.stderr
    assert json.loads(file.read_text())["ok"] is False


def test_a_report_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").mkdir()
    tell_latency(Console(), tmp_path / "traces", tmp_path)
    assert "no report: " in capsys.readouterr().out


def test_needs_something_to_kill(tmp_path: Path) -> None:
    topology = tmp_path / "small.yaml"
    topology.write_text("lans: {a: {}}\nrouters: 2\n")
    finished = run_demo(str(topology))
    assert finished.returncode == 1
    assert "needs 3" in finished.stderr
