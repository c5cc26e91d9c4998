"""The benchmarks of traces: known answers are found, and a wrong report would be noticed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.spark import Checker, SparkBenchmarkError, measure
from benchmarks.spark_traces import ROWS_MIN, generate, longest_run
from spark_analysis.analysis import Analysis


@pytest.mark.slow
def test_a_generated_run_is_reported_right_and_a_wrong_number_is_noticed(
    tmp_path: Path, analyse_folder: Callable[[Path], Analysis]
):
    answers = generate(tmp_path, ROWS_MIN, seed=5)
    summary = analyse_folder(tmp_path).summary
    checker = Checker(answers, summary)
    checker.check()
    assert checker.wrong == []
    assert checker.checked > 900
    assert summary["bound_violations"] == 100
    summary["topics"][3]["longest_loss_run"] += 1
    summary["links"][5]["p99_ms"] *= 1.01
    spoilt = Checker(answers, summary)
    spoilt.check()
    assert len(spoilt.wrong) == 2


def test_the_longest_run_is_counted():
    flags = [False, True, True, False, True, True, True, False, True]
    assert longest_run(np.array(flags)) == 3
    assert longest_run(np.array([False])) == 0


def test_too_small_a_run_is_refused():
    with pytest.raises(SparkBenchmarkError, match=f"at least {ROWS_MIN}"):
        measure([10], "local[1]", 1, lambda _: None)
