"""The command `isthmus sim`: how it ends, and that what it prints repeats a run."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import isthmus.commands.simulation as command
from isthmus.main import cli
from runtime.compiled import compiled_modules
from simulation.run import simulate
from tests.simulation.test_ablations import SMALLEST


@pytest.mark.skipif(bool(compiled_modules()), reason="compiled modules have no method to take out")
def test_a_broken_run_prints_the_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation, seed, _ = SMALLEST[0]
    file, again = tmp_path / "first.json", tmp_path / "again.json"
    arguments = ["sim", "--seed", str(seed), "--without", str(ablation), "--json", str(file)]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 1, done.output
    replay = done.output.partition("replay: isthmus ")[2].strip()
    monkeypatch.chdir(tmp_path)
    repeated = CliRunner().invoke(cli, [*shlex.split(replay), "--json", str(again)])
    assert Path("history.txt").stat().st_size
    assert repeated.exit_code == 1, repeated.output
    first, second = (json.loads(path.read_text()) for path in (file, again))
    assert first["verdict"] == "broken"
    assert (first["trace_hash"], first["violations"]) == (second["trace_hash"], second["violations"])


@pytest.mark.parametrize(("crash", "status"), [("", 0), ("ZeroDivisionError()", 2)])
def test_a_run_that_cannot_be_judged_is_not_green(
    monkeypatch: pytest.MonkeyPatch, crash: str, status: int
) -> None:
    outcome = replace(simulate(1), crash=crash)
    monkeypatch.setattr(command, "simulate", lambda *_: outcome)
    done = CliRunner().invoke(cli, ["sim", "--seed", "1"])
    assert done.exit_code == status, done.output
    assert ("replay: isthmus sim --seed 1 --log" in done.output) == bool(crash)
