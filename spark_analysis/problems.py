"""What is wrong with the traces themselves, in sentences: a report that hides gaps is worth nothing."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from overlay.trace import SCHEMA_VERSION
from spark_analysis.shipper import tell_deleted

NAMED_MAX: Final = 5
"""Nodes or links that one sentence names."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Sources:
    """Where the rows came from, and what could not be read of it."""

    segments: Sequence[Row]
    """Those that could be read, and those that the shipper set aside."""
    unknown: Sequence[Row] = ()
    """Segments of a schema version that this reader does not know; their rows are left out."""
    unread: Sequence[str] = ()
    """Files that tell of segments and cannot be read."""
    set_aside: Sequence[str] = ()
    """By this run's own shipping, each with the reason."""


def find_problems(
    sources: Sources,
    clocks: Sequence[Row],
    links: Sequence[Row],
    topics: Sequence[Row],
    endings: Sequence[Row],
) -> list[str]:
    """Everything a reader of the report must know about its sources."""
    segments, deleted = tell_deleted(sources.segments)
    problems = deleted + [
        f"segment {row['segment']} was set aside: {row['problem']}" for row in segments if row["problem"]
    ]
    told = {row["segment"] for row in segments if row["problem"]}
    problems += [
        f"segment {text.replace(': ', ' was set aside: ', 1)}"
        for text in sources.set_aside
        if text.partition(":")[0] not in told
    ]
    problems += _unreadable(sources)
    problems += _segment_losses([row for row in segments if not row["problem"]], clocks)
    problems += _clocks(clocks)
    problems += _missing(links, {row["node"] for row in clocks})
    problems += _undelivered(topics, endings)
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


def _unreadable(sources: Sources) -> list[str]:
    problems = []
    if sources.unknown:
        versions = ", ".join(str(version) for version in sorted({row["schema"] for row in sources.unknown}))
        problems.append(
            f"{len(sources.unknown)} segments have schema version {versions}, this reader knows "
            f"{SCHEMA_VERSION}: their rows are left out ({named(row['segment'] for row in sources.unknown)})"
        )
    if sources.unread:
        problems.append(
            f"{len(sources.unread)} files that tell of segments are damaged or empty "
            f"({named(sources.unread)})"
        )
    return problems


def _undelivered(topics: Sequence[Row], endings: Sequence[Row]) -> list[str]:
    problems = []
    silent = [row for row in topics if not row["deliveries"] and row["lost"] is None]
    if silent:
        problems.append(
            f"{sum(row['messages'] for row in silent)} messages of {len(silent)} topics have no delivery in "
            f"the traces ({named(row['topic'] for row in silent)}): nobody subscribed, no subscriber was "
            "traced, or all were lost"
        )
    doubtful = [row for row in endings if row["unaccounted"]]
    if doubtful:
        count = sum(row["unaccounted"] for row in doubtful)
        subscribers = list(dict.fromkeys(row["subscriber"] for row in doubtful))
        problems.append(
            f"{count} messages were published after the last delivery to "
            f"{len(subscribers)} subscribers ({named(subscribers)}), which left or were cut off: the traces "
            "do not tell which, and these are not counted as lost"
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
    return problems + _unread_rows(segments, clocks)


def _unread_rows(segments: Sequence[Row], clocks: Sequence[Row]) -> list[str]:
    """Per node, so that what is missing of one is not made up for by what is too much of another."""
    expected: dict[tuple[str, str], int] = defaultdict(int)
    read: dict[tuple[str, str], int] = defaultdict(int)
    for row in segments:
        expected[(row["node"], row["clock"])] += row["records"] or 0
    for row in clocks:
        read[(row["node"], row["clock"])] += row["rows"]
    if any(node is None for node, _ in expected):
        # Traces that were not shipped by nodes, but generated as a whole.
        expected, read = {("", ""): sum(expected.values())}, {("", ""): sum(read.values())}
    missing = sum(max(0, count - read.get(node, 0)) for node, count in expected.items())
    surplus = sum(max(0, count - expected.get(node, 0)) for node, count in read.items())
    problems = []
    if missing:
        problems.append(
            f"{missing} of {sum(expected.values())} rows could not be read: a Parquet file is damaged or gone"
        )
    if surplus:
        problems.append(
            f"{surplus} of {sum(read.values())} rows are of segments that nothing is known of: a file that "
            "tells of segments is damaged or gone"
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
