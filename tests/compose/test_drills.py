"""One topology, one drill, three drivers: the same promises are checked, and kept, on all of them."""

import pytest

from topology.drills import testbeds
from topology.drills.catalogue import CATALOGUE
from topology.drills.engine import PLAYS_MAX, Plan, run_drill
from topology.drills.verdict import DrillResult, Verdict
from topology.drivers import DRIVERS
from topology.model import load_topology
from topology.observer import Observer

pytestmark = pytest.mark.compose


async def test_the_leader_is_killed_on_every_driver() -> None:
    drill = CATALOGUE["leader-killed"]
    results: dict[str, DrillResult] = {}
    for name in DRIVERS:
        plan = Plan(drill, load_topology("wind-farm"), name, testbeds.testbed_for(drill, name))
        for _ in range(PLAYS_MAX):
            results[name] = await run_drill(plan, Observer())
            if results[name].verdict is not Verdict.UNKNOWN:
                break
    told = {name: (result.verdict, result.reason, result.reasons()) for name, result in results.items()}
    assert Verdict.BROKEN not in {result.verdict for result in results.values()}, told
    if Verdict.UNKNOWN in {result.verdict for result in results.values()}:
        pytest.skip(f"nothing can be said: {told}")
    # Those of a WAN that is watched come on top.
    process, netns, compose = (
        {promise.name: promise.held for promise in results[name].promises} for name in DRIVERS
    )
    assert process and process.items() <= netns.items() and netns == compose
