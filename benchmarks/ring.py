"""A ring of four processes with drifting clocks: Figures 5 and 6 of Fail-Aware Publish/Subscribe.

A publication goes once round the ring and comes back to where it was born, so that its true delay is
known there. The overlay has no rings (two hops join any two LANs), so the nodes are not brokers
(`benchmarks.ring_node`), but the links between them are the overlay's: the same hub, connections,
heartbeats, frames and clocks, over TCP through relays with changing delays. *Unoptimised* is equation
1 with the latest helper and no lower bound, summed by equation 7; *optimised* is what the overlay does.
"""

import asyncio
import random
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.ring_regions import DRIFT_PPM, REGIONS, Region
from topology.children import Child

NODES: Final = 4
PUBLISH_EVERY_S: Final = 0.02
START_TIMEOUT_S: Final = 30.0
SETTLE_S: Final = 1.0
"""In which every link has had helpers, and the last publications come back."""
WAY_ROUND_S: Final = 5.0


async def measure(publications: int, seed: int) -> dict[str, Any]:
    """Send publications round the ring in both regions."""
    description = machine.describe()
    regions = [await _measure(region, publications, seed) for region in REGIONS]
    below = sum(region["below_truth"] for region in regions)
    return {
        "ok": not below,
        "publications": publications,
        "seed": seed,
        "drift_ppm": DRIFT_PPM,
        "regions": regions,
        "machine": description,
    }


async def _measure(region: Region, publications: int, seed: int) -> dict[str, Any]:
    randomness = random.Random(f"clocks {seed} {region.name}")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-ring-")))
        nodes = []
        for number in range(NODES):
            skew = (str(randomness.randrange(10**12, 10**15)), str(DRIFT_PPM if number % 2 else -DRIFT_PPM))
            arguments = ["node", str(number), *skew]
            nodes.append(
                await _start(stack, Child(f"node-{number}", "benchmarks.ring_node", arguments, folder))
            )
        locators = [(await node.wait_for("serving", START_TIMEOUT_S))["locator"] for node in nodes]
        wan = await _start(
            stack, Child("wan", "benchmarks.ring_node", ["wan", region.name, str(seed)], folder)
        )
        relays = (await wan.ask("serve", START_TIMEOUT_S, targets=locators))["locators"]
        for number, node in enumerate(nodes):
            await node.send("join", locator=relays[(number + 1) % NODES])
        for node in nodes:
            for _ in ("the node before", "the next one"):
                await node.wait_for("up", START_TIMEOUT_S)
        await asyncio.sleep(SETTLE_S)
        await nodes[0].send("publish", count=publications, every_s=PUBLISH_EVERY_S)
        await nodes[0].wait_for("published", START_TIMEOUT_S + 10 * publications * PUBLISH_EVERY_S)
        await asyncio.sleep(WAY_ROUND_S)
        back = (await nodes[0].ask("results", START_TIMEOUT_S))["back"]
    true_ms, optimised_ms, unoptimised_ms = (
        [value / 1e6 for value in values] for values in zip(*back, strict=True)
    )
    return {
        "region": region.name,
        "unknown": publications - len(back),
        "below_truth": sum(bound < true for true, bound, _ in back),
        "unoptimised_below_truth": sum(bound < true for true, _, bound in back),
        "true_ms": true_ms,
        "optimised_ms": optimised_ms,
        "unoptimised_ms": unoptimised_ms,
    }


async def _start(stack: AsyncExitStack, child: Child) -> Child:
    await child.start()
    stack.push_async_callback(child.stop)
    return child


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        "| ring | publications | below the truth | median delay, ms "
        "| optimised: median error | p99 | unoptimised: median error | p99 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for region in result["regions"]:
        cells = [
            f"{len(region['true_ms'])}",
            f"{region['below_truth']}",
            f"{statistics.median(region['true_ms']):.1f}",
        ]
        for which in ("optimised_ms", "unoptimised_ms"):
            errors = sorted(
                bound - true for bound, true in zip(region[which], region["true_ms"], strict=True)
            )
            cells += [f"{statistics.median(errors):.1f}", f"{errors[int(0.99 * len(errors))]:.1f}"]
        lines.append(f"| {region['region']} | {' | '.join(cells)} |")
    return "\n".join(lines)
