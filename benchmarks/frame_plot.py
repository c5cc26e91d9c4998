"""Figure 9 of FRAME from our results: latency of a topic of three categories around the crash.

    python -m benchmarks.frame_plot RESULT.json... PLOT.png

A program of its own, because only it needs matplotlib (`pip install 'isthmus[bench]'`).
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.frame_report import CONFIGS
from benchmarks.frame_workload import CATEGORIES

PLOTTED: Final = (0, 2, 5)
BEFORE_MS: Final = 1_500
AFTER_MS: Final = 6_000


def plot(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """One row per configuration, one column per category."""
    by_config = {result["config"]: result for result in results if result["crash"]}
    configs = [config for config in CONFIGS if config in by_config]
    figure = Figure(figsize=(12, 2.6 * len(configs)), layout="constrained")
    axes = figure.subplots(len(configs), len(PLOTTED), squeeze=False, sharex=True, sharey="col")
    for row, config in enumerate(configs):
        for column, number in enumerate(PLOTTED):
            axis = axes[row][column]
            course = next(item for item in by_config[config]["courses"] if item["category"] == number)
            points = [
                (sent_ms / 1_000, latency_ms)
                for sent_ms, latency_ms in zip(course["sent_ms"], course["latency_ms"], strict=True)
                if -BEFORE_MS <= sent_ms <= AFTER_MS
            ]
            axis.plot(
                [at for at, _ in points], [value for _, value in points], ".-", markersize=3, linewidth=0.6
            )
            axis.axvline(0, color="red", linewidth=0.8)
            axis.axhline(CATEGORIES[number].deadline_ms, color="grey", linestyle="--", linewidth=0.8)
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            if row == 0:
                axis.set_title(f"category {number}, deadline {CATEGORIES[number].deadline_ms} ms")
            if row == len(configs) - 1:
                axis.set_xlabel("time of sending after the crash, s")
            if column == 0:
                axis.set_ylabel(f"{config}\nlatency, ms")
    topics = results[0]["topics"]
    figure.suptitle(
        f"End-to-end latency of a topic around the crash of the primary (red), {topics} topics; "
        "dashed: its deadline"
    )
    figure.savefig(file, dpi=110)


def main() -> None:
    """Plot the results the command line names."""
    *sources, target = map(Path, sys.argv[1:])
    plot([json.loads(source.read_text()) for source in sources], target)


if __name__ == "__main__":
    main()
