"""A campaign: random faults over mixed load, one about every five seconds, for as long as asked.

The schedule follows from the seed alone: what happens, to which role, when and for how long. Who is in
that role is found out when it happens. Every fault is undone and the overlay whole before the next one,
because that is what is promised: two faults at once may hit all who have a message.
"""

import argparse
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from topology.drills.script import Action, Drill, Fault, Whom
from topology.drills.verdict import DrillResult, Verdict, worst

EVERY_S: Final = 5.0
JITTER_S: Final = 1.0
SETTLED_S: Final = 0.3
"""The assignment must have been the same for so long before the next fault."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A kind of fault and how long it lasts."""

    action: Action
    whom: Whom
    least_s: float
    most_s: float
    weight: int = 1


_MENU: Final = (
    _Choice(Action.KILL, Whom.PRIMARY, 0.2, 2.0, weight=4),
    _Choice(Action.KILL, Whom.LEADER, 0.2, 2.0, weight=2),
    _Choice(Action.KILL, Whom.BACKUP, 0.2, 2.0, weight=2),
    _Choice(Action.FREEZE, Whom.PRIMARY, 0.1, 3.0, weight=2),
    _Choice(Action.FREEZE, Whom.LEADER, 0.1, 3.0),
    _Choice(Action.RESTART, Whom.PRIMARY, 0.0, 0.5),
    _Choice(Action.CUT, Whom.LAN, 0.1, 2.5, weight=2),
    _Choice(Action.CUT_OUT, Whom.LAN, 0.1, 2.5),
    _Choice(Action.CUT_BACK, Whom.LAN, 0.1, 2.5),
    _Choice(Action.CUT_ZOOKEEPER, Whom.PRIMARY, 0.5, 3.0),
    _Choice(Action.CUT_ROUTERS, Whom.PRIMARY_AND_BACKUP, 0.5, 3.0),
    _Choice(Action.SLOW, Whom.LAN, 0.5, 3.0),
)


def campaign(seconds: float, seed: int) -> Drill:
    """The script of a campaign."""
    randomness = random.Random(seed)
    faults = []
    at_s = 0.0
    while at_s < seconds - EVERY_S:
        (choice,) = randomness.choices(_MENU, [choice.weight for choice in _MENU])
        lasts_s = round(randomness.uniform(choice.least_s, choice.most_s), 3)
        faults.append(Fault(choice.action, choice.whom, lasts_s, at_s=round(at_s, 3)))
        at_s += randomness.uniform(EVERY_S - JITTER_S, EVERY_S + JITTER_S)
    return Drill(
        "campaign",
        f"{len(faults)} random faults in {seconds:g} s, seed {seed}",
        "nothing beyond the tolerance is lost, whatever happens",
        tuple(faults),
        seconds=seconds,
        settled_s=SETTLED_S,
    )


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Several campaigns, as `--json` wrote them, and their sum, as a table."""
    lines = [
        "| campaign | seed | verdict | faults | delivered | lost beyond tolerance | longest silence, ms |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for name, result in results.items():
        found = result["totals"]
        lines.append(
            f"| {name} | {result['seed']} | {result['verdict']} | {found['faults']} | {found['delivered']} "
            f"| {found['lost_beyond_tolerance']} | {found['longest_gap_ms']} |"
        )
    every = [result["totals"] for result in results.values()]
    sums = [sum(found[key] for found in every) for key in ("faults", "delivered", "lost_beyond_tolerance")]
    longest_ms = max((found["longest_gap_ms"] or 0.0 for found in every), default=0.0)
    verdict = worst(Verdict(result["verdict"]) for result in results.values())
    lines.append(f"| all | | {verdict} | {sums[0]} | {sums[1]} | {sums[2]} | {longest_ms} |")
    return "\n".join(lines)


def totals(result: DrillResult) -> dict[str, Any]:
    """What a campaign comes down to."""
    gap_ms = result.failover_ms
    return {
        "faults": len(result.faults),
        "delivered": sum(topic.deliveries for topic in result.topics),
        "lost_beyond_tolerance": sum(topic.lost_beyond_tolerance for topic in result.topics),
        "longest_gap_ms": None if gap_ms is None else round(gap_ms, 1),
    }


def main() -> None:
    """Print what campaigns came to: python -m topology.drills.campaign RESULT.json ..."""
    parser = argparse.ArgumentParser(prog="campaign")
    parser.add_argument("results", type=Path, nargs="+")
    files: list[Path] = parser.parse_args().results
    print(summary({file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}))


if __name__ == "__main__":
    main()
