"""The options of `isthmus bench`; the measurements have tests of their own in tests/benchmarks."""

import pytest
from click.testing import CliRunner

from isthmus.commands.bench import bench


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--subscribers", "many"], "is not a list of numbers"),
        (["--subscribers", "0,10"], "has a number below 1"),
        (["--subscribers", "20,10"], "give growing numbers"),
        (["--routers", "1"], "is not in the range"),
        (["--lans", "100000", "--workers", "1"], "open files"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    arguments: list[str], complaint: str
) -> None:
    result = CliRunner().invoke(bench, ["coordination", *arguments])
    assert result.exit_code != 0
    assert complaint in result.output


def test_each_benchmark_has_help() -> None:
    result = CliRunner().invoke(bench, ["coordination", "--help"])
    assert result.exit_code == 0
    assert "--subscribers" in result.output
