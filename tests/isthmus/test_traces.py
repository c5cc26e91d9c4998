"""The options of `isthmus trace`, `report` and `watch`; tests/spark_analysis has what they compute."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from isthmus.commands import trace
from isthmus.main import cli
from overlay.trace import Event
from spark_analysis.shipped import Quota
from spark_analysis.shipper import Shipment
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


def test_what_the_quota_deletes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace, "MIB", 250)  # a quota of 128 MB is one of 32,000 bytes, two segments
    node = Node("router-1", "router")
    for number in range(1, 5):
        node.saw(Event.RECEIVED, 7, number, in_ns=MS)
        node.write(tmp_path, number)
    result = CliRunner().invoke(cli, ["trace", "ship", str(tmp_path), "--json", "--quota-mb", "128"])
    assert result.exit_code == 0
    done = json.loads(result.stdout)
    assert done["segments"] == 4
    left = list((tmp_path / "parquet" / "rows").rglob("*.parquet"))
    assert 0 < done["deleted_segments"] == 4 - len(left)
    assert f"warning: the {done['deleted_segments']} oldest segments shipped" in result.stderr
    assert f"{done['deleted_segments']} so far: raise --quota-mb" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "limit_mb"),
    [
        ([], None),
        (["--quota-mb", "0"], None),
        (["--quota-mb", "200"], 200),
        (["--follow"], 10_240),
        (["--follow", "--quota-mb", "0"], None),
        (["--follow", "--quota-mb", "200"], 200),
    ],
)
def test_a_shipper_that_follows_has_a_quota_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], limit_mb: int | None
):
    given = []

    def ship(folder: Path, out: Path | None, quota: Quota | None) -> Shipment:
        given.append(None if quota is None else quota.limit_bytes // 2**20)
        raise KeyboardInterrupt

    monkeypatch.setattr(trace, "ship_folder", ship)
    CliRunner().invoke(cli, ["trace", "ship", str(tmp_path), *arguments])
    assert given == [limit_mb]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["trace", "ship", "/nowhere"], "is no folder"),
        (["trace", "ship", "/nowhere", "--quota-mb", "127"], "127 is too little: give at least 128, or 0"),
        (["edge", "--lan", "plant", "--trace-quota-mb", "5"], "trace_quota_mb is 5: it must be at least 128"),
        (["router", "--trace-quota-mb", "5"], "trace_quota_mb is 5: it must be at least 128"),
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
