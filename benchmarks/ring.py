"""A ring of nodes with drifting clocks: the shape of Figures 5 and 6 of Fail-Aware Publish/Subscribe.

A publication goes once round a ring of four nodes and comes back to where it was born, so that its
true delay is known there. The overlay has no rings (two hops join any two LANs), so this is a model
in true time: seeded delays with spikes and losses, clocks with offsets and drifts, and the real
`LinkClock` on every link, fed by heartbeats every 100 ms. *Unoptimised* is equation 1 with the
latest helper and no lower bound, summed by equation 7; *optimised* is what the overlay does.
"""

import random
import statistics
from dataclasses import dataclass, field
from typing import Any, Final

from overlay.delay import LinkClock, age_bound_ns
from overlay.equations import Helper, total_ns, upper_bound_ns
from overlay.limits import MILLISECOND_NS, SECOND_NS

NODES: Final = 4
DRIFT_PPM: Final = 50
HEARTBEAT_NS: Final = 100 * MILLISECOND_NS
PUBLISH_EVERY_NS: Final = 200 * MILLISECOND_NS
LOSS: Final = 0.02
INSIDE_MOST_NS: Final = 2 * MILLISECOND_NS


@dataclass(frozen=True, slots=True)
class Region:
    """How far apart the nodes are."""

    name: str
    base_ms: tuple[float, float]
    """Between which the delays of links lie when nothing is in the way."""
    jitter_ms: float
    spike_ms: float


REGIONS: Final = (Region("national", (4, 9), 1.5, 60), Region("global", (60, 160), 12, 500))


class _Clock:
    def __init__(self, randomness: random.Random) -> None:
        self._offset_ns = randomness.randrange(10**12, 10**15)
        self._rate = 1 + randomness.uniform(-DRIFT_PPM, DRIFT_PPM) / 1e6

    def read(self, true_ns: int) -> int:
        return self._offset_ns + round(true_ns * self._rate)


@dataclass(slots=True)
class _Link:
    """From one node of the ring to the next, which is where its clock is kept."""

    region: Region
    randomness: random.Random
    there_ms: float
    back_ms: float
    clock: LinkClock = field(default_factory=lambda: LinkClock(DRIFT_PPM))
    latest: Helper | None = None

    def delay_ns(self, base_ms: float) -> int:
        """One message's delay: the way itself, something on it, sometimes much."""
        delay_ms = base_ms + self.randomness.expovariate(1 / self.region.jitter_ms)
        if self.randomness.random() < 0.05:
            delay_ms += self.randomness.uniform(0, self.region.spike_ms)
        return round(delay_ms * MILLISECOND_NS)

    def exchange(self, ours: _Clock, theirs: _Clock, sent_ns: int) -> None:
        """A heartbeat to the sender of the link, echoed; either may get lost."""
        if self.randomness.random() < 2 * LOSS:
            return
        arrived_ns = sent_ns + self.delay_ns(self.back_ms)
        known_ns = arrived_ns + self.delay_ns(self.there_ms)
        self.latest = Helper(ours.read(sent_ns), theirs.read(arrived_ns))
        self.clock.helper(self.latest.sent_ns, self.latest.received_ns, ours.read(known_ns))


def measure(publications: int, seed: int) -> dict[str, Any]:
    """Send publications round the ring in both regions."""
    return {
        "publications": publications,
        "seed": seed,
        "regions": [_measure(region, publications, random.Random(seed)) for region in REGIONS],
    }


def _measure(region: Region, publications: int, randomness: random.Random) -> dict[str, Any]:
    clocks = [_Clock(randomness) for _ in range(NODES)]
    links = [
        _Link(region, randomness, randomness.uniform(*region.base_ms), randomness.uniform(*region.base_ms))
        for _ in range(NODES)
    ]
    true_ms: list[float] = []
    optimised_ms: list[float] = []
    unoptimised_ms: list[float] = []
    lost = 0
    next_heartbeat_ns = 0
    for number in range(publications):
        born_ns = SECOND_NS + number * PUBLISH_EVERY_NS
        while next_heartbeat_ns < born_ns - SECOND_NS:
            # Far enough before the publication that the answers are there when it comes by.
            for index, link in enumerate(links):
                link.exchange(clocks[(index + 1) % NODES], clocks[index], next_heartbeat_ns)
            next_heartbeat_ns += HEARTBEAT_NS
        found = _send_round(clocks, links, born_ns, randomness)
        if found is None:
            lost += 1
            continue
        for values, value_ns in zip((true_ms, optimised_ms, unoptimised_ms), found, strict=True):
            values.append(value_ns / MILLISECOND_NS)
    return {
        "region": region.name,
        "lost": lost,
        "true_ms": true_ms,
        "optimised_ms": optimised_ms,
        "unoptimised_ms": unoptimised_ms,
    }


def _send_round(
    clocks: list[_Clock], links: list[_Link], born_ns: int, randomness: random.Random
) -> tuple[int, int, int] | None:
    """True delay, optimised and unoptimised bound of one publication; None if it or a helper is lost."""
    now_ns, shift_ns = born_ns, 0
    bounds_ns: list[int] = []
    inside_ns: list[int] = []
    for index, link in enumerate(links):
        ours, theirs = clocks[(index + 1) % NODES], clocks[index]
        waited_ns = randomness.randrange(INSIDE_MOST_NS) if index else 0
        sent_ns = now_ns + waited_ns
        arrived_ns = sent_ns + link.delay_ns(link.there_ms)
        if link.latest is None or randomness.random() < LOSS:
            return None
        inside_ns.append(theirs.read(sent_ns) - theirs.read(now_ns))
        bounds_ns.append(upper_bound_ns(link.latest, theirs.read(sent_ns), ours.read(arrived_ns), DRIFT_PPM))
        shift_ns += link.clock.shift_at(ours.read(arrived_ns))
        now_ns = arrived_ns
    elapsed_ns = clocks[0].read(now_ns) - clocks[0].read(born_ns) + shift_ns
    return now_ns - born_ns, age_bound_ns(elapsed_ns, DRIFT_PPM), total_ns(bounds_ns, inside_ns, DRIFT_PPM)


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        "| ring | publications | median delay, ms "
        "| optimised: median error | p99 | unoptimised: median error | p99 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for region in result["regions"]:
        cells = [f"{len(region['true_ms'])}", f"{statistics.median(region['true_ms']):.1f}"]
        for which in ("optimised_ms", "unoptimised_ms"):
            errors = sorted(
                bound - true for bound, true in zip(region[which], region["true_ms"], strict=True)
            )
            cells += [f"{statistics.median(errors):.1f}", f"{errors[int(0.99 * len(errors))]:.1f}"]
        lines.append(f"| {region['region']} | {' | '.join(cells)} |")
    return "\n".join(lines)
