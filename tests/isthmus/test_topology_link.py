"""`isthmus topology link`, `cut` and `heal` on a running WAN."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from isthmus.main import cli
from tests.topology.namespaces_needed import needs_namespaces
from topology.conditions import LinkConditions
from topology.emulation import EmulatedNetwork, two_sites


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["topology", *arguments])


@needs_namespaces
@pytest.mark.testbed
async def test_changes_cuts_and_heals(tmp_path: Path) -> None:
    network = EmulatedNetwork(two_sites(LinkConditions(delay_ms=20), LinkConditions()), tmp_path)
    try:
        await network.start()
        name = ("--run", network.namespaces.run)
        changed = await asyncio.to_thread(
            run, "link", "a", "b", "--delay", "250ms", "--loss", "1%", "--rate", "500kbit", "--json", *name
        )
        assert changed.exit_code == 0, changed.output
        for lane in json.loads(changed.output).values():
            assert (lane["delay_ms"], lane["loss"], lane["rate_mbit"]) == (250, 0.01, 0.5)
        cut = await asyncio.to_thread(run, "cut", "a", "b", "--one-way", *name)
        assert cut.output == "a > b: cut\n"
        healed = await asyncio.to_thread(run, "heal", "a", "b", *name)
        assert healed.output.splitlines()[0] == "a > b: 250 ms, 1 % lost, 0.5 Mbit/s"
        wrong = await asyncio.to_thread(run, "link", "a", "moon", *name)
        assert wrong.exit_code == 1 and "there is no link from a to moon: sites are a, b" in wrong.output
    finally:
        await network.stop()


def test_refuses_what_is_no_quantity() -> None:
    result = run("link", "a", "b", "--delay", "soon")
    assert result.exit_code == 2 and "'soon' is no time: write it like 10ms, 10s, 10" in result.output


def test_says_when_no_such_testbed_runs() -> None:
    result = run("cut", "a", "b", "--run", "0-nobody")
    assert result.exit_code == 1 and "no testbed 0-nobody runs" in result.output
