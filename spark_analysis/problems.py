"""What is wrong with the traces themselves, in sentences: a report that hides gaps is worth nothing."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

NAMED_MAX: Final = 5
"""Nodes or links that one sentence names."""

Row = Mapping[str, Any]


def find_problems(
    segments: Sequence[Row],
    clocks: Sequence[Row],
    links: Sequence[Row],
    topics: Sequence[Row],
    set_aside: Sequence[str],
) -> list[str]:
    """Everything a reader of the report must know about its sources."""
    problems = [
        f"segment {row['segment']} was set aside: {row['problem']}" for row in segments if row["problem"]
    ]
    told = {row["segment"] for row in segments if row["problem"]}
    problems += [
        f"segment {text.replace(': ', ' was set aside: ', 1)}"
        for text in set_aside
        if text.partition(":")[0] not in told
    ]
    problems += _segment_losses([row for row in segments if not row["problem"]], clocks)
    problems += _clocks(clocks)
    problems += _missing(links, {row["node"] for row in clocks})
    rates = sorted({row["sampling"] for row in segments if row["sampling"] is not None})
    if len(rates) > 1:
        problems.append(
            f"nodes sampled at different rates ({', '.join(f'{rate:g}' for rate in rates)}): "
            "messages that only some of them traced look incomplete"
        )
    if rates and rates[0] < 1:
        problems.append(
            f"{rates[0]:.2%} of the messages were traced: losses and loss runs count traced messages only"
        )
    unknown = sum(row["age_unknown"] or 0 for row in topics)
    if unknown:
        problems.append(
            f"{unknown} deliveries have no age: no bound was known, and no publisher on the same host "
            "was traced"
        )
    return problems


def _segment_losses(segments: Sequence[Row], clocks: Sequence[Row]) -> list[str]:
    problems = []
    torn = [row for row in segments if row["torn_bytes"]]
    if torn:
        skipped = sum(row["torn_bytes"] for row in torn)
        problems.append(
            f"{len(torn)} segments end with a half-written or damaged part, {skipped} bytes were skipped "
            f"({named(row['segment'] for row in torn)})"
        )
    salvaged = sum(bool(row["salvaged"]) for row in segments)
    if salvaged:
        problems.append(f"{salvaged} open segments of processes that died were salvaged")
    # Each header tells what its process had lost so far: the last one tells all.
    for field, text in (
        ("lost_records", "records were lost by nodes whose disk did not take them"),
        ("deleted_segments", "segments were deleted by nodes to keep their disk quota"),
    ):
        most: dict[str, int] = defaultdict(int)
        for row in segments:
            most[f"{row['node']} {row['clock']}"] = max(
                most[f"{row['node']} {row['clock']}"], row[field] or 0
            )
        if any(most.values()):
            names = (name.partition(" ")[0] for name, count in most.items() if count)
            problems.append(f"{sum(most.values())} {text} ({named(names)})")
    expected, read = sum(row["records"] or 0 for row in segments), sum(row["rows"] for row in clocks)
    if read < expected:
        problems.append(
            f"{expected - read} of {expected} rows could not be read: a Parquet file is damaged or gone"
        )
    return problems


def _clocks(clocks: Sequence[Row]) -> list[str]:
    hosts: dict[str, set[str]] = defaultdict(set)
    starts: dict[str, set[str]] = defaultdict(set)
    for row in clocks:
        hosts[row["node"]].add(row["host"])
        starts[row["node"]].add(row["clock"])
    problems = []
    restarted = sorted(node for node, found in hosts.items() if len(found) > 1)
    if restarted:
        problems.append(
            f"the clock of {named(restarted)} restarted or moved to another host: times before and after are "
            "not compared"
        )
    again = sorted(node for node, found in starts.items() if len(found) > 1 and node not in restarted)
    if again:
        problems.append(f"{named(again)} started more than once")
    return problems


def _missing(links: Sequence[Row], traced: set[str]) -> list[str]:
    ends = {row[side] for row in links for side in ("from_node", "to_node")}
    problems = []
    if untraced := sorted(ends - traced):
        problems.append(f"{len(untraced)} nodes were named by others but have no traces ({named(untraced)})")
    both = [row for row in links if row["from_node"] in traced and row["to_node"] in traced]
    for field, text in (
        ("never_arrived", "were sent but their arrival is not in the traces: lost, or still on their way"),
        ("never_sent", "arrived but their sending is not in the traces"),
    ):
        count = sum(row[field] for row in both)
        if count:
            problems.append(f"{count} messages {text} ({named(row['link'] for row in both if row[field])})")
    return problems


def named(names: Iterable[str]) -> str:
    """Some of many names."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(found[:NAMED_MAX]) + more
