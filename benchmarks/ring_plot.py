"""Figures 5 and 6 of Fail-Aware Publish/Subscribe from `isthmus bench ring --json`.

    python -m benchmarks.ring_plot RESULT.json PLOT.png

A program of its own, because only it needs matplotlib (`pip install 'isthmus[bench]'`).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

SHOWN: Final = 300
"""Publications in the upper plots: more would be a blot."""


def plot(result: Mapping[str, Any], file: Path) -> None:
    """A column per region: bounds over the true delay, then how their errors are spread."""
    regions = result["regions"]
    figure = Figure(figsize=(6.5 * len(regions), 10), layout="constrained")
    axes = figure.subplots(3, len(regions), squeeze=False)
    for column, region in enumerate(regions):
        top_ms = max(region["unoptimised_ms"][:SHOWN])
        for row, which in enumerate(("optimised", "unoptimised")):
            axis = axes[row][column]
            axis.plot(region[f"{which}_ms"][:SHOWN], linewidth=0.9, color="tab:red", label="upper bound")
            axis.plot(region["true_ms"][:SHOWN], linewidth=0.9, color="tab:blue", label="true delay")
            axis.set_ylim(0, 1.3 * top_ms)
            axis.set_title(f"{region['region']}, {which}")
            axis.set_xlabel("publication")
            axis.set_ylabel("ms")
            axis.legend(loc="upper right")
        axis = axes[2][column]
        errors = {
            which: [
                bound - true for bound, true in zip(region[f"{which}_ms"], region["true_ms"], strict=True)
            ]
            for which in ("optimised", "unoptimised")
        }
        axis.hist(
            list(errors.values()),
            bins=60,
            range=(0, sorted(errors["unoptimised"])[int(0.98 * len(errors["unoptimised"]))]),
            histtype="stepfilled",
            alpha=0.6,
            label=list(errors),
            color=["tab:green", "tab:orange"],
        )
        axis.set_yscale("log")
        axis.set_title(f"{region['region']}, error of the bound")
        axis.set_xlabel("bound above the true delay, ms")
        axis.set_ylabel("publications")
        axis.legend()
    figure.suptitle("Round a ring of four processes with unsynchronised clocks, links of the overlay")
    figure.savefig(file, dpi=100)


def main() -> None:
    """Plot the result the command line names."""
    source, target = map(Path, sys.argv[1:])
    plot(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main()
