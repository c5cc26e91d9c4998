"""Our Tables 4 and 5 beside the paper's, and the recovery plot of Figure 9."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.frame_workload import CATEGORIES

CONFIGS: Final = ("frame+", "frame", "fcfs", "fcfs-")
# Success for loss tolerance (FRAME, Table 4) and latency (Table 5), in percent, by topics, configuration
# and category. With 1,525 topics all are 100; so is loss with 4,525.
PAPER_LOSS: Final[Mapping[int, Mapping[str, Sequence[float]]]] = {
    topics: {
        "frame+": (100,) * 6,
        "frame": (80.0, 80.0, 73.2, 79.3, 100, 80.0) if topics == 13_525 else (100,) * 6,
        "fcfs": (0, 0, 0, 0, 100, 0) if topics >= 7_525 else (100,) * 6,
        "fcfs-": (100, 100, 78.4, 99.3, 100, 100) if topics == 13_525 else (100,) * 6,
    }
    for topics in (1_525, 4_525, 7_525, 10_525, 13_525)
}
PAPER_LATENCY: Final[Mapping[int, Mapping[str, Sequence[float]]]] = {
    1_525: dict.fromkeys(CONFIGS, (100,) * 6),
    4_525: {
        "frame+": (100,) * 6,
        "frame": (99.9, 99.9, 100, 100, 100, 100),
        "fcfs": (99.9, 99.9, 100, 99.9, 99.9, 100),
        "fcfs-": (100,) * 6,
    },
    7_525: {
        "frame+": (100,) * 6,
        "frame": (99.9, 99.9, 99.9, 99.9, 99.9, 100),
        "fcfs": (0.2, 0.2, 0, 0, 0, 0),
        "fcfs-": (99.9, 99.9, 99.9, 99.9, 99.9, 100),
    },
    10_525: {
        "frame+": (100, 100, 99.9, 99.9, 99.9, 100),
        "frame": (99.9, 99.9, 99.9, 99.9, 99.9, 100),
        "fcfs": (0.2, 0.2, 0.1, 0.1, 0.1, 0),
        "fcfs-": (99.8, 99.8, 99.9, 99.9, 99.9, 100),
    },
    13_525: {
        "frame+": (98.4, 98.4, 97.6, 97.6, 97.6, 98.6),
        "frame": (85.4, 85.3, 83.7, 83.8, 83.8, 86.1),
        "fcfs": (0.1, 0.2, 0, 0, 0, 0),
        "fcfs-": (99.4, 99.5, 98.3, 98.3, 98.3, 100),
    },
}


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """All results as Markdown."""
    crashed = [result for result in results if result["crash"]]
    calm = [result for result in results if not result["crash"]]
    parts = ["# FRAME's experiment with Isthmus", "", *_conditions(results)]
    if crashed:
        parts += [
            "",
            "## Success for loss tolerance, % of topics, with a crash (Table 4)",
            "",
            *_table(crashed, "loss_success_pct", PAPER_LOSS),
            "",
            "## Peak latency after the crash, ms (section VI.C)",
            "",
            *_table(crashed, "peak_after_crash_ms", {}),
        ]
    for title, chosen in (("without a crash (Table 5)", calm), ("with a crash", crashed)):
        if chosen:
            parts += [
                "",
                f"## Success for latency, % of messages, {title}",
                "",
                *_table(chosen, "latency_success_pct", PAPER_LATENCY if chosen is calm else {}),
            ]
    parts += ["", "## Processor and replication (Figure 7)", "", *_costs(results)]
    return "\n".join(parts) + "\n"


def _conditions(results: Sequence[Mapping[str, Any]]) -> list[str]:
    machine = results[0]["machine"]
    commits = ", ".join(sorted({result["machine"]["commit"] for result in results}))
    settings = results[0]["settings"]
    steal = max(result["steal_pct"] for result in results)
    others = max(result["busy_cores"] - sum(result["cpu_pct"].values()) / 100 for result in results)
    return [
        f"Commit {commits}, {machine['measured_at']}, Python {machine['python']}, "
        f"{machine['cores']} cores ({machine['processor']}), all processes on this machine over loopback, "
        f"pinning {settings['setup']['pinning']}, niceness {settings['setup']['niceness']}. "
        f"Measured for {settings['seconds']:g} s after {settings['warm_up_s']:g} s of warm-up; the paper: "
        f"60 s after 35 s, five hosts, ten runs. Up to {steal:g} % of the processor was stolen and up to "
        f"{max(0.0, others):.1f} cores were busy with other programs.",
        "",
        "Cells: ours, then the paper's in parentheses.",
    ]


def _table(
    results: Sequence[Mapping[str, Any]], field: str, paper: Mapping[int, Mapping[str, Sequence[float]]]
) -> list[str]:
    found = {(result["topics"], result["config"]): result for result in results}
    lines: list[str] = []
    for topics in sorted({topics for topics, _ in found}):
        configs = [config for config in CONFIGS if (topics, config) in found]
        lines += [
            f"| {topics} topics: deadline, ms | loss tolerance | " + " | ".join(configs) + " |",
            "|---:|---:|" + "---:|" * len(configs),
        ]
        for kind, category in enumerate(CATEGORIES):
            cells = []
            for config in configs:
                value = found[topics, config]["categories"][kind][field]
                theirs = paper.get(topics, {}).get(config)
                cells.append(f"{value:g}" + (f" ({theirs[kind]:g})" if theirs is not None else ""))
            tolerance = "∞" if category.loss_tolerance is None else str(category.loss_tolerance)
            lines.append(f"| {category.deadline_ms} | {tolerance} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines[:-1]


def _costs(results: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| topics | configuration | crash | offered/s | delivered/s | primary, % | backup, % | edges, % "
        "| load tools, % | replicated, % of messages | lost | memory of primary, MiB |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in sorted(results, key=lambda item: (item["topics"], CONFIGS.index(item["config"]))):
        use = result["cpu_pct"]
        lines.append(
            f"| {result['topics']} | {result['config']} | {'yes' if result['crash'] else 'no'} "
            f"| {result['offered_rate']:,.0f} | {result['delivered_rate']:,.0f} "
            f"| {use['router-a']:.0f} | {use['router-b']:.0f} | {use['edge-a']:.0f} + {use['edge-b']:.0f} "
            f"| {use['publishers']:.0f} + {use['subscribers']:.0f} | {100 * result['replicated_share']:.0f} "
            f"| {result['lost']:,} | {result['memory_mib']['router-a']:.0f} |"
        )
    return lines
