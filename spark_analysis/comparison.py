"""Two runs compared by the summaries of their reports."""

from collections.abc import Mapping
from typing import Any, Final

COMPARED: Final = {
    "topics": ("topic", "messages", ("p50_ms", "p99_ms", "deadline_hit_pct", "longest_loss_run", "lost")),
    "hops": ("hop", "count", ("p50_ms", "p99_ms")),
    "links": ("link", "count", ("p50_ms", "p99_ms")),
}
"""Per part of a summary: what names a row, what counts its messages, and what is compared."""
_TOTALS: Final = (
    "messages",
    "deliveries",
    "lost",
    "unaccounted",
    "bound_violations",
    "bounds_checked",
    "deadline_hit_pct",
)
ALL: Final = "all topics"
NEW: Final = "new"
GONE: Final = "gone"
CHANGED: Final = "changed"
SAME: Final = "same"

Row = dict[str, Any]


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Row]:
    """What changed between two runs: the totals, all that both have, and what only one of them has.

    Of a topic, hop or link that is new or gone only the number of its messages is told. A measure that
    only one run knows is told too: a topic of which nothing comes any more has no percentiles.
    """
    # An older report may not have all of them.
    changes = [_change(ALL, name, before[name], now[name]) for name in _TOTALS if name in before]
    for part, (key, count, measures) in COMPARED.items():
        old_rows = {row[key]: row for row in before[part]}
        new_rows = {row[key]: row for row in now[part]}
        for name, row in new_rows.items():
            if name in old_rows:
                changes += [
                    _change(name, measure, old_rows[name].get(measure), row.get(measure))
                    for measure in measures
                ]
            else:
                changes.append(_change(name, count, None, row.get(count)) | {"status": NEW})
        changes += [
            _change(name, count, row.get(count), None) | {"status": GONE}
            for name, row in old_rows.items()
            if name not in new_rows
        ]
    return [
        row for row in changes if row["status"] in (NEW, GONE) or (row["before"], row["now"]) != (None, None)
    ]


def _change(what: str, measure: str, old: float | None, new: float | None) -> Row:
    change_pct = round(100 * (new - old) / old, 2) if old and new is not None else None
    return {
        "what": what,
        "measure": measure,
        "before": old,
        "now": new,
        "change_pct": change_pct,
        "status": SAME if old == new else CHANGED,
    }
