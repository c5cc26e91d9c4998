"""Whole overlays in virtual time: what must hold, that it is repeatable, and that harm is noticed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation import simulate

SEEDS = (1, 2, 3, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_promises_hold(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.violations == ()
    assert outcome.faults
    assert outcome.delivered > 50


def test_a_seed_gives_the_same_history_everywhere(tmp_path: Path) -> None:
    def run(name: str, hash_seed: str) -> tuple[dict[str, object], str]:
        result, log = tmp_path / f"{name}.json", tmp_path / f"{name}.log"
        command = [sys.executable, "-m", "isthmus", "sim", "--seed", "9"]
        subprocess.run(
            [*command, "--json", str(result), "--log", str(log)],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            timeout=60,
        )
        return json.loads(result.read_text(encoding="utf-8")), log.read_text(encoding="utf-8")

    (one, one_log), (other, other_log) = run("one", "1"), run("other", "2")
    assert one_log == other_log
    assert one["trace_hash"] == other["trace_hash"]
    assert set(one) >= {"seed", "verdict", "simulated_s", "wall_s", "trace_hash"}
