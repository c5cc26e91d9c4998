"""`isthmus topology`: what it prints, draws and refuses."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from isthmus.main import cli

BROKEN = "lans:\n  a: {edges: 0}\nrouters: 1\ntopics:\n  t: {deadline: 4}\n"
SLOW = """\
lans: {a: {wan: {delay_ms: 90}}, b: {}}
routers: 2
topics: {t: {deadline_ms: 50}}
publishers: [{lan: a, topic: t}]
subscribers: [{lan: b, topic: t}]
"""


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["topology", *arguments])
    # A bug would end in an exception of another kind.
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def test_lists_what_there_is() -> None:
    names = [item["name"] for item in json.loads(run("list", "--json").output)]
    assert names == [
        "frame-edge-cloud",
        "global",
        "pubsubcoord-8-cases",
        "star-8",
        "two-lans",
        "wind-farm",
        "wind-farm-storm",
    ]
    assert all(name in run("list").output for name in names)


def test_check_tells_every_mistake_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN)
    result = run("check", str(file))
    assert result.exit_code == 1
    assert f"{file}, line 2: lans.a.edges is 0: it must be from 1 to 100" in result.output
    assert f"{file}, line 5: topics.t.deadline is unknown" in result.output


def test_check_warns_and_strict_fails(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text(SLOW)
    result = run("check", str(file))
    assert result.exit_code == 0
    assert "slow is sound: 2 LANs, 2 edge brokers, 2 routing brokers, 2 links, 1 topics" in result.output
    assert (
        "warning: topic t from a to b: the deadline is 50 ms, but the links alone take 90 ms" in result.output
    )
    assert run("check", str(file), "--strict").exit_code == 1
    assert run("check", "two-lans", "--strict").exit_code == 0


def test_check_looks_at_every_scenario() -> None:
    record = json.loads(run("check", "pubsubcoord-8-cases", "--json").output)
    assert record["ok"] and record["warnings"][""] == record["warnings"]["case-1"] == []
    assert len(record["warnings"]["case-8"]) == 2


def test_shows_tables() -> None:
    output = run("show", "star-8").output
    for text in ("40 ms ± 5, 0.5 % lost", "site-8 and cloud", "cloud-b", "storm"):
        assert text in output, text


def test_shows_a_scenario() -> None:
    record = json.loads(run("show", "pubsubcoord-8-cases", "--scenario", "case-5", "--json").output)
    links = {link["name"]: link["out"]["delay_ms"] for link in record["links"]}
    assert links == {"L1": 250, "L2": 30, "L3": 30} and record["scenario"] == "case-5"
    assert [route["via_router_ms"] for route in record["routes"]] == [60, 60, 60]
    result = run("show", "two-lans", "--scenario", "storm")
    assert result.exit_code == 1 and "has no scenario 'storm': it has no scenarios" in result.output


def test_draws(tmp_path: Path) -> None:
    file = tmp_path / "global.png"
    result = run("plot", "global", "--out", str(file))
    assert result.exit_code == 0 and file.read_bytes().startswith(b"\x89PNG")
    assert run("plot", "global", "--out", str(tmp_path / "a.bmp")).exit_code == 1


def test_says_what_drawing_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("plot", "two-lans", "--out", "never.png")
    assert result.exit_code == 1
    assert "matplotlib is not installed: run pip install 'isthmus[plot]'" in result.output


def test_composes(tmp_path: Path) -> None:
    text = run("compose", "two-lans").output
    assert text == (Path(__file__).parents[2] / "docker-compose.yml").read_text()
    file = tmp_path / "file.yml"
    run("compose", "two-lans", "--out", str(file))
    assert file.read_text() == text
    assert "cannot be written" in run("compose", "two-lans", "--out", str(tmp_path / "no" / "f.yml")).output


def test_an_unknown_name_names_those_there_are() -> None:
    result = run("check", "two-lan")
    assert result.exit_code == 1
    assert "'two-lan' cannot be read" in result.output and "two-lans" in result.output
