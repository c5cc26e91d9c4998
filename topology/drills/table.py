"""The table of drills in docs/drills.md, from the result of `isthmus drill all --json`.

    python -m topology.drills.table RESULT.json MACHINE.json DOCUMENT.md

replaces what stands between the two marks in the document; a test keeps both in step.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from topology.drills.catalogue import CATALOGUE
from topology.errors import TopologyError

BEGIN: Final = "<!-- table of drills: made by make drills-table -->"
END: Final = "<!-- end of the table -->"


def render(result: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """The result of all drills as a table, under a line that says where it comes from."""
    drills: Sequence[Mapping[str, Any]] = result["drills"]
    again = ", ".join(f"`{name}`" for name in result["played_again"]) or "none"
    lines = [
        f"Commit {machine['commit']}, {'compiled' if machine['compiled'] else 'interpreted'}, "
        f"{machine['cores']} cores: {len(drills)} drills in {result['elapsed_s'] / 60:.1f} minutes, "
        f"{again} played again.",
        "",
        "| drill | what happens | verdict | longest silence, ms | sent | lost (most in a row) | twice | back "
        "| in time before / during / after, % |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_row(drill) for drill in drills]
    return "\n".join(lines)


def _row(drill: Mapping[str, Any]) -> str:
    name = drill["drill"]
    # Best effort may lose anything: it says nothing about a drill.
    topics = [topic for topic in drill["topics"] if topic["loss_tolerance"] is not None]
    silence_ms = drill["failover_ms"]
    cells = [
        f"`{name}`",
        CATALOGUE[name].summary if name in CATALOGUE else "",
        drill["verdict"],
        "" if silence_ms is None else f"{silence_ms:.0f}",
        f"{sum(topic['sent'] for topic in topics)}",
        f"{sum(t['lost'] for t in topics)} ({max((t['longest_loss_run'] for t in topics), default=0)})",
        f"{sum(topic['duplicates'] for topic in topics)}",
        f"{sum(topic['reordered'] for topic in topics)}",
        " / ".join(_in_time(topics, phase) for phase in ("before", "during", "after")),
    ]
    return f"| {' | '.join(cells)} |"


def _in_time(topics: Sequence[Mapping[str, Any]], phase: str) -> str:
    shares = [s for topic in topics if (s := topic["deadline_hit_pct"][phase]) is not None]
    return f"{min(shares):.0f}" if shares else "-"


def insert(document: str, table: str) -> str:
    """The document with this table between the marks. Raises TopologyError if it has no marks."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise TopologyError(f"the document has no place for the table: put it between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}"


def main() -> None:
    """Write the table into the document."""
    parser = argparse.ArgumentParser(prog="table")
    parser.add_argument("result", type=Path)
    parser.add_argument("machine", type=Path)
    parser.add_argument("document", type=Path)
    arguments = parser.parse_args()
    result, machine = (json.loads(file.read_text("utf-8")) for file in (arguments.result, arguments.machine))
    text = arguments.document.read_text(encoding="utf-8")
    arguments.document.write_text(insert(text, render(result, machine)), encoding="utf-8")


if __name__ == "__main__":
    main()
