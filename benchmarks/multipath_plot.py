"""Figures 38 to 40 of PubSubCoord from our results: latency by case and policy, and bytes on the wire.

    python -m benchmarks.multipath_plot RESULT.json PLOT.png

A program of its own, because only it needs matplotlib (`pip install 'isthmus[bench]'`).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from overlay.paths import Policy

_COLOURS: Final = {Policy.SINGLE: "#888888", Policy.BOTH: "#4477aa", Policy.ADAPTIVE: "#cc6677"}
_WIDTH: Final = 0.26
_DEADLINES: Final = ("100", "300", "600")


def plot(result: Mapping[str, Any], file: Path) -> None:
    """Average and maximum latency, deadlines kept, and bytes, a group of bars per case."""
    rows = {(row["case"], row["policy"]): row for row in result["cases"]}
    cases = sorted({case for case, _ in rows})
    figure = Figure(figsize=(12, 11), layout="constrained")
    latency, hits, carried = figure.subplots(3, 1)
    for number, policy in enumerate(Policy):
        at = [index + (number - 1) * _WIDTH for index in range(len(cases))]
        found = [rows.get((case, policy.value)) for case in cases]
        colour = _COLOURS[policy]
        shown = [(x, row) for x, row in zip(at, found, strict=True) if row is not None]
        places = [x for x, _ in shown]
        latency.bar(places, [row["avg_ms"] for _, row in shown], _WIDTH, color=colour, label=policy.value)
        latency.plot(places, [row["max_ms"] for _, row in shown], "_", color="black", markersize=14)
        latency.plot(places, [row["p99_ms"] for _, row in shown], ".", color="black", markersize=4)
        carried.bar(places, [row["wire_bytes"] / 1e6 for _, row in shown], _WIDTH, color=colour)
        for place, row in shown:
            for index, deadline in enumerate(_DEADLINES):
                x = place + (index - 1) * _WIDTH / 3.3
                share = row["deadline_hit_pct"][deadline]
                hits.bar(x, share, _WIDTH / 3.6, color=colour)
                if not row["can_keep"][deadline]:
                    hits.plot(x, 3, "x", color=colour, markersize=5)
    latency.set_ylabel("latency, ms")
    latency.set_title("average (bar), 99th percentile (dot), maximum (line)")
    figure.legend(loc="outside lower center", ncols=3)
    hits.set_ylabel("in time, %")
    hits.set_title("deadlines of 100, 300 and 600 ms kept, from left to right; x: no path can keep it")
    carried.set_ylabel("MB on all links")
    carried.set_title(f"bytes on the wire in {result['settings']['seconds']:g} s, everything included")
    for axis in (latency, hits, carried):
        axis.set_xticks(range(len(cases)), [f"case {case}" for case in cases])
        axis.grid(axis="y", linewidth=0.3)
    figure.suptitle("One path or two: the eight cases of PubSubCoord's Table 3")
    figure.savefig(file, dpi=110)


def main() -> None:
    """Plot the result the command line names."""
    source, target = map(Path, sys.argv[1:])
    plot(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main()
