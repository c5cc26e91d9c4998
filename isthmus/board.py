"""What `isthmus watch` shows on a terminal: each topic and link as it is now, and how it came there.

A row is the newest window that all nodes have told of: how many messages a second, how old, how many too
late, and the slowest hundredth over the last windows as a line. Topics are shown as soon as something is
known of them and marked until the window is final; links when their windows are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlay.limits import SECOND_NS
from runtime.tracing import SEGMENT_MAX_AGE_NS
from spark_analysis.charts import milliseconds, number

HISTORY: Final = 30
"""Windows whose slowest hundredth is drawn."""
ROWS: Final = 12
"""Most topics, and most links, that are shown: those that miss most, then the slowest."""
_LEVELS: Final = "▁▂▃▄▅▆▇█"

Row = Mapping[str, Any]


@dataclass
class _Series:
    """The windows of one topic or link."""

    windows: dict[datetime, Row] = field(default_factory=dict)
    final: set[datetime] = field(default_factory=set)

    def add(self, row: Row, final: bool) -> None:
        """A window, again if it has grown; what is final stays."""
        start = row["window_start"]
        if final or start not in self.final:
            self.windows[start] = row
        if final:
            self.final.add(start)
        for old in sorted(self.windows)[:-HISTORY]:
            del self.windows[old]
            self.final.discard(old)


class Board:
    """Everything that is known of the last windows."""

    def __init__(self, title: str, window_s: int, late_s: int) -> None:
        self._title = title
        self._window_s = window_s
        self._late_s = late_s
        self._series: dict[str, dict[str, _Series]] = {"topics": {}, "links": {}}

    def add(self, kind: str, rows: list[dict[str, Any]], *, final: bool) -> None:
        """Windows of topics or links."""
        name = kind.removesuffix("s")
        for row in rows:
            self._series[kind].setdefault(row[name], _Series()).add(row, final)

    def render(self) -> RenderableType:
        """As it is now."""
        parts: list[RenderableType] = [Text(self._title, style="bold")]
        if not any(self._series.values()):
            parts.append(Text("nothing has come yet: nodes close a segment every 10 s while messages flow"))
        for kind, series in self._series.items():
            if series:
                parts.append(self._table(kind, series))
        if self._series["topics"] and not self._series["links"]:
            parts.append(Text(f"links follow when a window is final, {self._late_s} s after its end"))
        return Group(*parts)

    def _table(self, kind: str, series: Mapping[str, _Series]) -> Table:
        shown = self._shown_window(series)
        final = all(shown in each.final for each in series.values() if shown in each.windows)
        table = Table(
            title=f"{kind}, {shown:%H:%M:%S} UTC and {self._window_s} s on{'' if final else ', so far'}",
            title_justify="left",
        )
        table.add_column(kind.removesuffix("s"))
        for column in ("messages/s", "median", "p99", "missed"):
            table.add_column(column, justify="right")
        table.add_column("p99 until now")
        now = {name: each for name, each in series.items() if shown in each.windows}
        ranked = sorted(now, key=lambda name: _urgency(now[name].windows[shown]))
        for name in ranked[:ROWS]:
            each = now[name]
            row = each.windows[shown]
            count = row["deliveries" if kind == "topics" else "messages"]
            missed = row["missed"]
            table.add_row(
                Text(name),
                f"{count / self._window_s:.4g}",
                milliseconds(row["p50_ms"]),
                milliseconds(row["p99_ms"]),
                Text(number(missed), style="bold red" if missed else ""),
                line([each.windows[start]["p99_ms"] for start in sorted(each.windows) if start <= shown]),
            )
        if len(ranked) > ROWS or len(now) < len(series):
            silent = len(series) - len(now)
            more = [f"{len(ranked) - ROWS} more, all better"] if len(ranked) > ROWS else []
            more += [f"{silent} without messages in this window"] if silent else []
            table.caption = ", ".join(more)
        return table

    def _shown_window(self, series: Mapping[str, _Series]) -> datetime:
        """The newest window that is final, or so old that all nodes have closed their segments of it."""
        starts = sorted({start for each in series.values() for start in each.windows})
        whole = starts[-1] - timedelta(seconds=self._window_s + SEGMENT_MAX_AGE_NS // SECOND_NS)
        return max(
            (
                start
                for start in starts
                if start <= whole or any(start in each.final for each in series.values())
            ),
            default=starts[0],
        )


def _urgency(row: Row) -> tuple[int, float]:
    return -row["missed"], -(row["p99_ms"] or 0.0)


def line(values: list[float | None]) -> str:
    """Numbers as a line of small bars; a space for one that is not known."""
    most = max((value for value in values if value is not None), default=0.0)
    return "".join(
        " "
        if value is None
        else _LEVELS[min(len(_LEVELS) - 1, int(len(_LEVELS) * value / most))]
        if most
        else _LEVELS[0]
        for value in values
    )
