"""Many runs in a few figures, also of several files that `isthmus sim --json` has written.

python -m simulation.summary results/sim/*.json
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


def summarise(runs: Sequence[Record]) -> dict[str, Any]:
    """What runs have shown together; `runs` as `Outcome.to_record` gives them."""
    simulated_s = sum(run["simulated_s"] for run in runs)
    wall_s = sum(run["wall_s"] for run in runs)
    owed = sum(run["owed"] for run in runs)
    judged = sum(run["judged"] for run in runs)
    return {
        "seeds": len(runs),
        "first_seed": min(run["seed"] for run in runs),
        "last_seed": max(run["seed"] for run in runs),
        "held": sum(run["verdict"] == "held" for run in runs),
        "broken": [run["seed"] for run in runs if run["verdict"] == "broken"],
        "unknown": [run["seed"] for run in runs if run["verdict"] == "unknown"],
        "simulated_s": round(simulated_s, 1),
        "wall_s": round(wall_s, 1),
        "speed": round(simulated_s / wall_s, 1),
        "speed_median": round(statistics.median(run["simulated_s"] / run["wall_s"] for run in runs), 1),
        "faults": sum(len(run["faults"]) for run in runs),
        "published": sum(run["published"] for run in runs),
        "delivered": sum(run["delivered"] for run in runs),
        "owed": owed,
        "judged": judged,
        "judged_pct": round(100 * judged / owed, 1) if owed else None,
    }


def in_words(summary: Mapping[str, Any]) -> str:
    """A summary in one line."""
    broken = [*summary["broken"], *summary["unknown"]]
    return (
        f"{summary['seeds']} seeds, {summary['simulated_s']:.0f} simulated s in {summary['wall_s']:.0f} s "
        f"({summary['speed']:.0f} times as fast, median {summary['speed_median']:.0f}), "
        f"{summary['faults']} faults, {summary['delivered']} messages delivered, "
        f"{summary['judged_pct']} % of those owed judged for loss, "
        f"not held: {', '.join(map(str, broken)) or 'none'}"
    )


def of_files(files: Iterable[Path]) -> dict[str, Any]:
    """What the runs in files have shown together, and which commits they were of."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    runs = [run for result in results for run in result["runs"]]
    seeds_by_commit: dict[str, int] = {}
    for result in results:
        commit = result["machine"]["commit"]
        seeds_by_commit[commit] = seeds_by_commit.get(commit, 0) + len(result["runs"])
    return {**summarise(runs), "seeds_by_commit": seeds_by_commit}


if __name__ == "__main__":
    print(json.dumps(of_files(map(Path, sys.argv[1:])), indent=1))
