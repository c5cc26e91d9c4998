"""Many runs in a few figures."""

import json
from pathlib import Path

from click.testing import CliRunner

from isthmus.main import cli
from simulation.summary import in_words, of_files, summarise


def _run(seed: int, verdict: str = "held", wall_s: float = 0.5) -> dict[str, object]:
    return {
        "seed": seed,
        "verdict": verdict,
        "simulated_s": 50.0,
        "wall_s": wall_s,
        "faults": ["one"],
        "published": 100,
        "delivered": 90,
        "owed": 100,
        "judged": 75,
    }


def test_runs_are_summed_up() -> None:
    summary = summarise([_run(3, wall_s=0.25), _run(4, "broken"), _run(5, "unknown", wall_s=1.0)])
    assert (summary["seeds"], summary["first_seed"], summary["last_seed"]) == (3, 3, 5)
    assert (summary["held"], summary["broken"], summary["unknown"]) == (1, [4], [5])
    assert (summary["speed_median"], summary["judged_pct"]) == (100.0, 75.0)
    assert "not held: 4, 5" in in_words(summary)


def test_files_are_summed_up_by_commit(tmp_path: Path) -> None:
    for name, commit, seeds in (("a", "abc", (1, 2)), ("b", "def", (3,))):
        content = {"machine": {"commit": commit}, "runs": [_run(seed) for seed in seeds]}
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    summary = of_files(sorted(tmp_path.iterdir()))
    assert (summary["held"], summary["seeds_by_commit"]) == (3, {"abc": 2, "def": 1})


def test_a_range_of_seeds_is_run_and_written(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = CliRunner().invoke(cli, ["sim", "--seeds", "2..3", "--json", str(file)])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [run["seed"] for run in result["runs"]] == [2, 3]
    assert result["summary"]["held"] == 2
    assert 0 < result["summary"]["judged"] <= result["summary"]["owed"]


def test_a_range_without_seeds_is_refused() -> None:
    for wrong in ("5..3", "0", "many"):
        assert CliRunner().invoke(cli, ["sim", "--seeds", wrong]).exit_code == 2
