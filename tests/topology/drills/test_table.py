"""The table in docs/drills.md is that of the stored result."""

import json
from pathlib import Path

import pytest

from topology.drills.catalogue import CATALOGUE
from topology.drills.table import BEGIN, END, insert, render
from topology.errors import TopologyError

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks" / "results" / "drills.json"


def test_the_document_shows_the_stored_result() -> None:
    result = json.loads(RESULT.read_text())
    machine = json.loads(RESULT.with_name("drills-machine.json").read_text())
    drills = result["drills"]
    document = (ROOT / "docs" / "drills.md").read_text()
    assert document == insert(document, render(result, machine)), "run make drills-table"
    assert result["elapsed_s"] <= 15 * 60
    assert [drill["drill"] for drill in drills] == list(CATALOGUE), "run make drills"
    assert {drill["verdict"] for drill in drills} == {"held"}


def test_a_document_without_a_place_is_told() -> None:
    assert insert(f"a {BEGIN} old {END} z", "new") == f"a {BEGIN}\n\nnew\n\n{END} z"
    with pytest.raises(TopologyError, match="no place for the table"):
        insert("nothing", "new")
