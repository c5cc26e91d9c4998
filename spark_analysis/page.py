"""The report as one HTML page that needs nothing else: no script, no font, no request."""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from spark_analysis import charts
from spark_analysis.analysis import Analysis
from spark_analysis.charts import NOTHING, milliseconds, number
from spark_analysis.comparison import ALL, GONE, NEW, SAME
from spark_analysis.histograms import RELATIVE_ERROR
from spark_analysis.outages import describe_carriers, longest

ROWS_SHOWN: Final = 200
"""Rows of a table on the page; the files have all."""

BLAMED_SHOWN: Final = 12
CHANGES_SHOWN: Final = 15
CLIENT_DIGITS: Final = 6
"""Of a client's id, on the page."""
OUTAGES_UNFOLDED: Final = 4
"""Outages whose timelines one sees without asking."""

Row = dict[str, Any]

_CLIENT_ID: Final = re.compile(r"\b[0-9a-f]{16}\b")

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2530; --quiet: #66727f; --paper: #ffffff; --panel: #f5f7f9;
  --rule: #dde3e9; --outage: rgba(201,68,63,.16); --good: #1f8a5b; --bad: #c0392b; --warn: #b06a12; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --quiet: #97a3af; --paper: #14181d;
  --panel: #1c2229; --rule: #323b45; --good: #4cc38a; --bad: #ff7b6e; --warn: #e8a750; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 1200px; padding: 28px 32px 60px; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 19px; margin: 40px 0 6px; }
h3 { font-size: 15px; margin: 20px 0 4px; }
p { margin: 4px 0 12px; }
.quiet, p.note { color: var(--quiet); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 20px 0; }
.card { background: var(--panel); border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 25px; line-height: 1.25; font-weight: 650; }
.card span { color: var(--quiet); font-size: 13px; }
.good b { color: var(--good); }
.bad b { color: var(--bad); }
svg { width: 100%; height: auto; display: block; margin: 8px 0; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg text.quiet { fill: var(--quiet); }
svg text.value { font-variant-numeric: tabular-nums; }
svg text.strong { font-weight: 650; font-size: 14px; }
svg text.small { font-size: 10.5px; fill: var(--ink); }
.grid { stroke: var(--rule); }
.median { stroke: var(--ink); stroke-width: 2; }
.tail { stroke: var(--bad); stroke-width: 2; }
rect.link { opacity: .45; }
rect.cell { rx: 5px; }
summary { cursor: pointer; color: var(--quiet); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 5px 6px; border-bottom: 1px solid var(--rule); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--quiet); font-weight: 500; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td.bad { color: var(--bad); font-weight: 600; }
td.good { color: var(--good); }
ul.problems { background: var(--panel); border-left: 4px solid var(--warn); border-radius: 4px;
  padding: 12px 16px 12px 34px; }
"""

_MILLISECONDS: Final = ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")
_HEADINGS: Final = {
    "p50_ms": "median",
    "p90_ms": "p90",
    "p99_ms": "p99",
    "p999_ms": "p99.9",
    "max_ms": "max",
    "change_pct": "change",
    "deadline_hit_pct": "in time %",
    "in_time_pct": "in time %",
    "slow_pct": "slow %",
    "loss_tolerance": "tolerated",
    "longest_loss_run": "longest loss run",
    "duplicates_dropped": "duplicates",
    "bound_violations": "bounds broken",
    "bound_error_p50_ms": "bound error",
    "bound_p50_ms": "bound, median",
    "bound_p99_ms": "bound p99",
    "deadline_ms": "deadline",
    "slow_messages": "slow messages",
    "lost_p50_ms": "lost, median",
    "lost_max_ms": "lost, most",
}


def render(analysis: Analysis, source: str, comparison: Sequence[Row] = (), other: str = "") -> str:
    """The whole page."""
    names = _Names(analysis)
    sections = [
        f"<h1>Latency report</h1><p class='quiet'>{escape(source)} · {_period(analysis)}</p>",
        _cards(analysis.summary),
        _problems(analysis.problems),
        _comparison(comparison, other),
        _topics(analysis),
        _timeline(analysis),
        _outages(analysis),
        _hops(analysis),
        _slow(analysis, names),
        _lans(analysis),
        _places(analysis, names),
        f"<p class='note'>Percentiles are within {RELATIVE_ERROR:.1%} of the true ones; counts are exact. "
        "Ages are true where publisher and subscriber share a host's clock, else they are upper bounds.</p>",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    title = f"<title>Latency report: {escape(source)}</title><style>{_STYLE}</style>"
    body = "\n".join(sections)
    return f'<!doctype html>\n<html lang="en"><head>{head}{title}</head>\n<body>\n{body}\n</body></html>\n'


def table(rows: Sequence[Row], columns: Sequence[str], name: str, most: int = ROWS_SHOWN) -> str:
    """Rows as an HTML table, the first of them if there are many."""
    head = "".join(
        f"<th>{escape(_HEADINGS.get(column, column.replace('_', ' ')))}</th>" for column in columns
    )
    body = "".join(f"<tr>{''.join(_cell(row, column) for column in columns)}</tr>" for row in rows[:most])
    more = len(rows) - most
    files = "report.json" if "comparison" in name else f"tables/{name.removesuffix('-of-clients')}.csv"
    note = f"<p class='note'>{more:,} more in {files}</p>" if more > 0 else ""
    return f"<div class='scroll'><table id='table-{name}'><tr>{head}</tr>{body}</table></div>{note}"


def _cell(row: Row, column: str) -> str:
    value = row.get(column)
    style = ""
    if column == "longest_loss_run" and row.get("within_tolerance") is not None:
        style = "good" if row["within_tolerance"] else "bad"
    elif column == "bound_violations" and value:
        style = "bad"
    if isinstance(value, str):
        shown = value
    elif value is None:
        shown = NOTHING
    elif column.endswith("_ms"):
        shown = milliseconds(value)
    elif column.endswith("_pct"):
        shown = f"{value:.2f}"
    else:
        shown = number(value)
    kind = f" class='{style}'" if style else ""
    return f"<td{kind}>{escape(shown)}</td>"


class _Names:
    """Clients by their LAN and the start of their id: an id alone says nothing to an operator."""

    def __init__(self, analysis: Analysis) -> None:
        clients = [row for row in analysis.rows("nodes") if row["role"] == "client"]
        self._short = {
            row["node"]: f"{row['lan'] or 'client'}·{row['node'][:CLIENT_DIGITS]}" for row in clients
        }

    def rename(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with short names wherever a client's id stands."""
        return [
            {key: self._of(value) if isinstance(value, str) else value for key, value in row.items()}
            for row in rows
        ]

    def is_of_client(self, place: str) -> bool:
        """A client, or a link of one."""
        return any(part in self._short for part in place.split(" → "))

    def _of(self, value: str) -> str:
        return _CLIENT_ID.sub(lambda found: self._short.get(found[0], found[0]), value)


def _period(analysis: Analysis) -> str:
    bins = [row["bin_us"] for row in analysis.rows("timeline")]
    if not bins:
        return "nothing was delivered"
    start = datetime.fromtimestamp(min(bins) / 1e6, UTC)
    span_s = (max(bins) - min(bins) + analysis.timeline_bin_us) / 1e6
    return f"{start:%Y-%m-%d %H:%M:%S} UTC, {number(span_s)} s"


def _cards(summary: Row) -> str:
    hit = summary["deadline_hit_pct"]
    broken = summary["bound_violations"]
    worst = max((row["longest_loss_run"] or 0 for row in summary["topics"]), default=0)
    over = any(row["within_tolerance"] is False for row in summary["topics"])
    doubt = summary["unaccounted"] or any(row["lost"] is None for row in summary["topics"])
    lost = f"lost, {worst} in a row at most"
    if summary["unaccounted"]:
        lost += f"; {number(summary['unaccounted'])} unaccounted"
    cards = [
        (number(summary["messages"]), "messages", ""),
        (number(summary["deliveries"]), "deliveries", ""),
        (NOTHING if hit is None else f"{hit:.2f} %", "within their deadlines", ""),
        (number(summary["lost"]), lost, "bad" if over else "" if doubt else "good"),
        (number(summary["duplicates_dropped"]), "duplicates dropped", ""),
        (
            number(broken) if summary["bounds_checked"] else NOTHING,
            f"age bounds broken, of {number(summary['bounds_checked'])} checked",
            "bad" if broken else "good" if summary["bounds_checked"] else "",
        ),
    ]
    return (
        "<div class='cards'>"
        + "".join(
            f"<div class='card {style}'><b>{escape(value)}</b><span>{escape(label)}</span></div>"
            for value, label, style in cards
        )
        + "</div>"
    )


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems[:ROWS_SHOWN])
    return f"<h2>About these traces</h2><ul class='problems'>{items}</ul>"


def _comparison(rows: Sequence[Row], other: str) -> str:
    """What changed, most first; an operator asks for that before anything else."""
    if not rows:
        return ""
    changed = sorted(
        (row for row in rows if row["status"] != SAME),
        # Totals before all others.
        key=lambda row: (row["what"] != ALL, -abs(row["change_pct"] or math.inf)),
    )
    columns = ("what", "measure", "before", "now", "change_pct")
    shown = [_in_words(row) for row in changed]
    words = f"<h2>Compared with {escape(other)}</h2>"
    if len(rows) > len(changed):
        words += f"<p class='note'>{len(rows) - len(changed):,} other measures are as they were.</p>"
    if not shown:
        return words
    words += table(shown[:CHANGES_SHOWN], columns, "comparison")
    if len(shown) > CHANGES_SHOWN:
        more = table(shown[CHANGES_SHOWN:], columns, "comparison-rest")
        words += f"<details><summary>{len(shown) - CHANGES_SHOWN:,} smaller changes</summary>{more}</details>"
    return words


def _in_words(row: Row) -> Row:
    measure = row["measure"]
    values: Row = {"what": row["what"], "measure": _HEADINGS.get(measure, measure.replace("_", " "))}
    for when in ("before", "now"):
        value = row[when]
        values[when] = milliseconds(value) if measure.endswith("_ms") else number(value)
    change = row["change_pct"]
    if row["status"] in (NEW, GONE):
        return values | {"change_pct": row["status"]}
    return values | {"change_pct": NOTHING if change is None else f"{change:+.1f} %"}


def _topics(analysis: Analysis) -> str:
    columns = (
        "topic",
        "messages",
        "deliveries",
        *_MILLISECONDS,
        "deadline_ms",
        "deadline_hit_pct",
        "slow_pct",
        "lost",
        "longest_loss_run",
        "loss_tolerance",
        "unaccounted",
        "duplicates_dropped",
        "bound_violations",
        "bound_error_p50_ms",
    )
    return "<h2>Topics</h2>" + table(analysis.rows("topics"), columns, "topics")


def _timeline(analysis: Analysis) -> str:
    marks = [
        (outage.start_us, outage.end_us, f"outage {outage.number}: {outage.duration_ms:.0f} ms")
        for outage in analysis.outages
    ]
    return "<h2>Time line</h2>" + charts.timeline(analysis.rows("timeline"), analysis.timeline_bin_us, marks)


def _outages(analysis: Analysis) -> str:
    if not analysis.outages:
        return (
            "<h2>Outages</h2><p>No subscriber waited longer than three periods and 100 ms for what was "
            "published.</p>"
        )
    around = analysis.rows("outage_timeline")
    parts = []
    shown = sorted(longest(analysis.outages), key=lambda outage: -outage.duration_ms)
    for outage in shown:
        words = (
            f"Outage {outage.number}: {milliseconds(outage.duration_ms)}"
            f"{'' if outage.ended else ' without end'}, {outage.streams} streams of "
            f"{outage.topics} topics, {outage.lost} lost, at most {outage.longest_loss_run} in a row; "
            f"routers: {describe_carriers(analysis.carriers, outage.number)}"
        )
        rows = [row for row in around if row["outage"] == outage.number]
        chart = charts.outage_chart(
            f"plot-outage-{outage.number}", rows, (outage.resumed_us - outage.start_us) / 1_000
        )
        parts.append(f"<h3>{escape(words)}</h3>{chart}")
    head = f"<h2>Outages</h2><p class='note'>{len(analysis.outages)} in all, the longest first.</p>"
    folded = "".join(parts[OUTAGES_UNFOLDED:])
    if folded:
        more = len(parts) - OUTAGES_UNFOLDED
        folded = f"<details><summary>{more} shorter outages</summary>{folded}</details>"
    return head + "".join(parts[:OUTAGES_UNFOLDED]) + folded


def _hops(analysis: Analysis) -> str:
    hops = analysis.rows("hops")
    plot = charts.hop_distributions(analysis.rows("hop_histogram"), hops)
    note = (
        "<p class='note'>Blue: on a link. Orange: waiting in a node. Heights are square roots of counts.</p>"
    )
    return f"<h2>Latency per hop</h2>{note}{plot}" + table(hops, ("hop", "count", *_MILLISECONDS), "hops")


def _slow(analysis: Analysis, names: _Names) -> str:
    blame = names.rename(analysis.rows("blame"))
    words = "<h2>Where slow messages lost their time</h2>"
    if blame:
        words += table(
            blame, ("place", "kind", "slow_messages", "lost_p50_ms", "lost_max_ms"), "blame", BLAMED_SHOWN
        )
        words += (
            "<p class='note'>Slow: the age bound is beyond the topic's deadline. Named is the part of the "
            "way that took most longer than its own median.</p>"
        )
    else:
        words += "<p>Every message that has a bound is proven to have met its deadline.</p>"
    return words + "<h2>The slowest messages</h2>" + charts.waterfall(names.rename(analysis.rows("slowest")))


def _lans(analysis: Analysis) -> str:
    note = "<p class='note'>99th percentile of the age; deliveries and deadline hits below it.</p>"
    return f"<h2>LAN to LAN</h2>{note}" + charts.heat_map(analysis.rows("lans"))


def _places(analysis: Analysis, names: _Names) -> str:
    links = (
        "link",
        "count",
        *_MILLISECONDS,
        "bound_p50_ms",
        "bound_p99_ms",
        "bound_error_p50_ms",
        "never_arrived",
    )
    nodes = ("node", "role", "lan", "count", *_MILLISECONDS)
    drops = names.rename(analysis.rows("drops"))
    dropped = ""
    if drops:
        dropped = "<h2>Dropped</h2>" + table(drops, ("node", "topic", "reason", "messages"), "drops")
    return (
        "<h2>Links</h2><p class='note'>Bound: how long nodes could prove that messages took at most, without "
        "comparing clocks; its error is known where both ends share a host's clock.</p>"
        + _brokers_first(analysis, names, "links", "link", links)
        + "<h2>Waiting in nodes</h2>"
        + _brokers_first(analysis, names, "nodes", "node", nodes)
        + dropped
    )


def _brokers_first(analysis: Analysis, names: _Names, name: str, key: str, columns: Sequence[str]) -> str:
    """What is of clients is folded away: there may be many, and they seldom are where time is lost."""
    rows = analysis.rows(name)
    brokers = [row for row in rows if not names.is_of_client(row[key])]
    clients = names.rename([row for row in rows if names.is_of_client(row[key])])
    if not brokers:
        return table(clients, columns, name)
    shown = table(brokers, columns, name)
    if not clients:
        return shown
    of_clients = "links of clients" if name == "links" else "clients"
    return (
        f"{shown}<details><summary>{len(clients):,} {of_clients}, by LAN and the start of the client's id"
        f"</summary>{table(clients, columns, f'{name}-of-clients')}</details>"
    )
