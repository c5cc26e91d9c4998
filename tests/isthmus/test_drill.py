"""`isthmus drill`: what it lists, how it ends, what it leaves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from isthmus.commands.drill import drill
from topology.drills.catalogue import CATALOGUE
from topology.drills.engine import PLAYS_MAX

BAD = "lans: {a: {}}\nrouters: many\n"
ALONE = """\
lans: {a: {edges: 1}, b: {edges: 1}}
routers: [{name: router-1, host: h1}, {name: router-2, host: h2}]
topics: {t: {period_ms: 50, deadline_ms: 500, loss_tolerance: 0}}
publishers: [{lan: a, topic: t, rate_per_s: 20}]
subscribers: [{lan: b, topic: t}]
"""


def test_lists_every_drill_with_what_it_promises() -> None:
    result = CliRunner().invoke(drill, ["list"])
    assert result.exit_code == 0
    assert all(name in result.output for name in CATALOGUE)


def test_an_unknown_name_is_told_with_those_that_exist() -> None:
    result = CliRunner().invoke(drill, ["nonsense"])
    assert result.exit_code == 2
    assert "there is no drill nonsense" in result.output and "primary-killed" in result.output


@pytest.mark.parametrize("name", ["leader-killed", "all"])
def test_what_cannot_be_played_is_unknown(name: str, tmp_path: Path) -> None:
    topology, file = tmp_path / "bad.yaml", tmp_path / "result.json"
    topology.write_text(BAD)
    arguments = [name, "--topology", str(topology), "--json", str(file), "--no-report"]
    result = CliRunner().invoke(drill, arguments)
    assert result.exit_code == 2, result.output
    assert "routers is 'many'" in result.output
    # Of many, each has a second chance.
    assert result.output.count("\nleader-killed: unknown") == (PLAYS_MAX if name == "all" else 1)
    content = json.loads(file.read_text())
    drills: list[dict[str, Any]] = content["drills"] if name == "all" else [content]
    assert {item["verdict"] for item in drills} == {"unknown"}
    assert len(drills) == (len(CATALOGUE) if name == "all" else 1)
    if name == "all":
        assert content["played_again"] == list(CATALOGUE)
        assert content["elapsed_s"] >= 0


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "isthmus", "drill", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.testbed
def test_a_killed_primary_is_survived_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    finished = _run("primary-killed", "--json", str(file), "--report-dir", str(tmp_path / "report"))
    story = finished.stdout + finished.stderr
    assert finished.returncode == 0, story
    assert "primary-killed: held" in story
    result = json.loads(file.read_text())
    assert result["verdict"] == "held" and result["driver"] == "process"
    (fault,) = result["faults"]
    assert fault["fault"] == "kill" and fault["healed_s"] > fault["at_s"] > 0
    assert all(topic["sent"] > 0 for topic in result["topics"])
    assert (tmp_path / "report" / "primary-killed" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.testbed
def test_an_overlay_that_cannot_recover_is_never_called_held(tmp_path: Path) -> None:
    """Two routing brokers, one killed: there is no third to be the backup until it is back."""
    topology, file = tmp_path / "alone.yaml", tmp_path / "result.json"
    topology.write_text(ALONE)
    finished = _run("primary-killed", "--topology", str(topology), "--json", str(file), "--no-report")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "BROKEN  whole again" in finished.stdout
    assert json.loads(file.read_text())["verdict"] == "broken"
