"""The options of `isthmus trace`, `report` and `watch`; tests/spark_analysis has what they compute."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from isthmus.main import cli
from overlay.trace import Event
from tests.spark_analysis.nodes import MS, Node


def test_segments_are_shipped(tmp_path: Path):
    node = Node("router-1", "router")
    node.saw(Event.RECEIVED, 7, 1, in_ns=MS)
    node.write(tmp_path)
    node.write(tmp_path, number=2, schema=9)
    result = CliRunner().invoke(cli, ["trace", "ship", str(tmp_path), "--json"])
    assert result.exit_code == 0
    done = json.loads(result.stdout)
    assert (done["segments"], done["records"], len(done["set_aside"])) == (1, 1, 1)
    assert len(list((tmp_path / "parquet" / "rows").rglob("*.parquet"))) == 1
    again = CliRunner().invoke(cli, ["trace", "ship", str(tmp_path)])
    assert again.stdout.startswith("0 segments")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["trace", "ship", "/nowhere"], "is no folder"),
        (["report", "/nowhere"], "Missing option '--out'"),
        (["report", "/nowhere", "--out", "x"], "is no folder"),
        (["report", "/nowhere", "--out", "x", "--conf", "memory"], "is no setting"),
        (["watch", "/nowhere"], "is no folder"),
        (["watch", "s3a://traces"], "give --out"),
        (["bench", "spark", "--rows", "many"], "is not a list of numbers"),
    ],
)
def test_what_cannot_be_done_is_refused_before_spark_starts(arguments: list[str], complaint: str):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code != 0
    assert complaint in result.output
