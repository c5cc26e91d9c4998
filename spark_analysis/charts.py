"""Charts as inline SVG: plain text, no script, readable in light and dark."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any, Final

Row = dict[str, Any]

WIDTH: Final = 960
NOTHING: Final = "\N{EN DASH}"
"""Stands where there is no value."""
_SHORTEST_TENTH: Final = 30
"""What took less than a microsecond is shown as a microsecond."""
_LEGEND_MAX: Final = 16
COLOURS: Final = ("#2f6fde", "#e0842b", "#2a9d6f", "#b5539c", "#7a6ff0", "#c9443f", "#4aa3b8", "#8a8f3a")


def number(value: float | None, unit: str = "") -> str:
    """A number with three significant digits, or a dash."""
    if value is None:
        return NOTHING
    if isinstance(value, int) or value == 0 or abs(value) >= 1_000:
        return f"{value:,.0f}{unit}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}{unit}"


def milliseconds(value: float | None) -> str:
    """A duration in a unit in which it reads well."""
    if value is None:
        return NOTHING
    if value >= 1_000:
        return number(value / 1_000, " s")
    # What three digits would show as 1000 µs is a millisecond.
    return number(value, " ms") if value >= 0.9995 or value == 0 else number(value * 1_000, " µs")


def tick(value: float, unit: str = "") -> str:
    """A round value on an axis."""
    return f"{value:,.0f}{unit}" if abs(value) >= 1_000 else f"{value:.3g}{unit}"


def svg(name: str, height: float, parts: Iterable[str], width: float = WIDTH) -> str:
    """A whole chart; `name` is its id on the page."""
    body = "".join(parts)
    return f'<svg id="{escape(name)}" viewBox="0 0 {width:g} {height:g}" role="img">{body}</svg>'


def text(x: float, y: float, content: str, *, anchor: str = "start", style: str = "") -> str:
    """A label; `style` names a class of the page."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, tip: str = "", style: str = "") -> str:
    """A rectangle with a tooltip."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    kind = f' class="{style}"' if style else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}" '
        f'fill="{fill}"{kind}>{title}</rect>'
    )


def line(x1: float, y1: float, x2: float, y2: float, style: str = "grid") -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def ticks(most: float, count: int = 4) -> list[float]:
    """Round values from 0 up to about `most`."""
    if most <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(most / count))
    for factor in (1, 2, 5, 10):
        if most / (step * factor) <= count:
            step *= factor
            break
    return [index * step for index in range(math.ceil(most / step) + 1)]


def hop_distributions(histogram: Sequence[Row], hops: Sequence[Row]) -> str:
    """One ridge per hop on a logarithmic axis of durations, with its median and 99th percentile."""
    if not histogram:
        return ""
    left, right, top, ridge = 190, 150, 26, 46
    first = max(min(row["tenth"] for row in histogram), _SHORTEST_TENTH)
    last = max(row["tenth"] for row in histogram) + 1
    first, last = 10 * math.floor(first / 10), 10 * math.ceil(last / 10)
    scale = (WIDTH - left - right) / max(last - first, 1)
    height = top + ridge * len(hops) + 30
    parts = []
    for decade in range(first, last + 1, 10):
        x = left + (decade - first) * scale
        parts += [
            line(x, top, x, height - 26),
            text(x, height - 8, _decade(decade), anchor="middle"),
        ]
    for index, hop in enumerate(hops):
        base = top + ridge * (index + 1)
        bars: Counter[int] = Counter()
        for row in histogram:
            if row["hop"] == hop["hop"]:
                bars[max(row["tenth"], _SHORTEST_TENTH)] += row["count"]
        most = max(bars.values(), default=1)
        colour = COLOURS[0] if hop["kind"] == "link" else COLOURS[1]
        parts += [text(left - 12, base - 12, hop["hop"], anchor="end"), line(left, base, WIDTH - right, base)]
        for tenth, count in sorted(bars.items()):
            tall = (ridge - 10) * math.sqrt(count / most)
            start, end = milliseconds(10 ** (tenth / 10 - 6)), milliseconds(10 ** ((tenth + 1) / 10 - 6))
            x = left + (tenth - first) * scale
            parts.append(
                box(
                    x,
                    base - tall,
                    scale - 0.6,
                    tall,
                    colour,
                    f"{hop['hop']}: {count:,} between {start} and {end}",
                )
            )
        for key, style in (("p50_ms", "median"), ("p99_ms", "tail")):
            if hop[key]:
                x = left + (max(10 * math.log10(hop[key] * 1e6), first) - first) * scale
                parts.append(line(x, base - ridge + 8, x, base + 3, style))
        summary = f"{milliseconds(hop['p50_ms'])} / {milliseconds(hop['p99_ms'])}"
        parts.append(text(WIDTH - right + 10, base - 12, summary, style="value"))
    parts.append(text(WIDTH - right + 10, 14, "median / p99", style="quiet"))
    return svg("plot-hops", height, parts)


def _decade(tenth: int) -> str:
    """10^n nanoseconds, in words."""
    power = tenth // 10
    unit = min(power // 3, 3)
    return f"{10 ** (power - 3 * unit):,} {('ns', 'µs', 'ms', 's')[unit]}"


def timeline(rows: Sequence[Row], bin_us: int, outages: Sequence[tuple[int, int, str]]) -> str:
    """Deliveries and ages over time, with losses, duplicates and outages marked."""
    if not rows:
        return ""
    left, right, top, band, gap = 84, 28, 22, 130, 44
    start_us = min(row["bin_us"] for row in rows)
    span_us = max(max(row["bin_us"] for row in rows) + bin_us - start_us, bin_us)
    scale = (WIDTH - left - right) / span_us
    height = top + 2 * band + gap + 34
    parts = []
    for outage_start, outage_end, label in outages:
        x = left + (outage_start - start_us) * scale
        wide = max((outage_end - outage_start) * scale, 2)
        parts.append(box(x, top, wide, 2 * band + gap, "var(--outage)", label))
    per_second = 1e6 / bin_us
    floors = (top + band, top + 2 * band + gap)
    most_rate = max(row["deliveries"] for row in rows) * per_second
    most_age = max((row["p99_ms"] or 0 for row in rows), default=0)
    for base, most, unit in ((floors[0], most_rate, "/s"), (floors[1], most_age, " ms")):
        marks = ticks(most)
        for mark in marks:
            y = base - band * mark / marks[-1]
            parts += [
                line(left, y, WIDTH - right, y),
                text(left - 8, y + 4, tick(mark, unit), anchor="end"),
            ]
    rate_top, age_top = ticks(most_rate)[-1], ticks(most_age)[-1]
    ages: dict[str, list[tuple[float, float]]] = {"p50_ms": [], "p99_ms": []}
    for row in rows:
        x = left + (row["bin_us"] - start_us) * scale
        wide = max(bin_us * scale - 0.4, 0.8)
        offset = f"{(row['bin_us'] - start_us) / 1e6:.1f} s"
        tall = band * row["deliveries"] * per_second / rate_top
        tip = f"{offset}: {row['deliveries']:,} delivered, {row['late']:,} late, {row['lost']:,} lost"
        parts.append(box(x, floors[0] - tall, wide, tall, COLOURS[0], tip))
        if row["late"]:
            late = tall * row["late"] / max(row["deliveries"], 1)
            parts.append(box(x, floors[0] - late, wide, late, COLOURS[1], tip))
        for key, sign, row_y in (("lost", "#c9443f", 5.0), ("duplicates", "#7a6ff0", 13.0)):
            if row[key]:
                parts.append(
                    box(x, floors[0] + row_y, max(wide, 2), 6, sign, f"{offset}: {row[key]:,} {key}")
                )
        for key, points in ages.items():
            if row[key] is not None:
                points.append((x + wide / 2, floors[1] - band * row[key] / age_top))
    for key, colour in (("p99_ms", COLOURS[1]), ("p50_ms", COLOURS[0])):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ages[key])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    for mark in ticks(span_us / 1e6, 8):
        if mark <= span_us / 1e6:
            x = left + mark * 1e6 * scale
            parts.append(text(x, height - 10, tick(mark, " s"), anchor="middle"))
    parts += [
        text(left, 14, "deliveries per second (late ones orange); below: losses red, duplicates violet"),
        text(left, top + band + gap - 8, "age of delivered messages: median blue, p99 orange"),
    ]
    return svg("plot-timeline", height, parts)


def heat_map(rows: Sequence[Row]) -> str:
    """From each LAN to each LAN, coloured by the 99th percentile of the age."""
    if not rows:
        return ""
    froms = sorted({row["publisher_lan"] or "unknown" for row in rows})
    tos = sorted({row["subscriber_lan"] or "unknown" for row in rows})
    left, top, cell_height = 150, 50, 54
    cell = min(170.0, (WIDTH - left - 10) / max(len(tos), 1))
    worst = max((row["p99_ms"] or 0 for row in rows), default=0) or 1
    parts = [
        text(left, 14, "to LAN", style="quiet"),
        text(left - 12, 38, "from LAN", anchor="end", style="quiet"),
    ]
    parts += [text(left + cell * (index + 0.5), 38, name, anchor="middle") for index, name in enumerate(tos)]
    parts += [
        text(left - 12, top + cell_height * (index + 0.5) + 4, name, anchor="end")
        for index, name in enumerate(froms)
    ]
    for row in rows:
        x = left + cell * tos.index(row["subscriber_lan"] or "unknown")
        y = top + cell_height * froms.index(row["publisher_lan"] or "unknown")
        heat = 0.15 + 0.75 * math.sqrt((row["p99_ms"] or 0) / worst)
        hits = f"{row['in_time_pct']:.2f} % in time" if row["in_time_pct"] is not None else "no deadline"
        tip = f"{row['count']:,} deliveries, median {milliseconds(row['p50_ms'])}, {hits}"
        parts += [
            box(x + 1, y + 1, cell - 2, cell_height - 2, f"rgba(224,132,43,{heat:.2f})", tip, "cell"),
            text(x + cell / 2, y + 23, milliseconds(row["p99_ms"]), anchor="middle", style="strong"),
            text(x + cell / 2, y + 41, f"{number(row['count'])} · {hits}", anchor="middle", style="small"),
        ]
    return svg("plot-lans", top + cell_height * len(froms) + 10, parts)


def waterfall(legs: Sequence[Row]) -> str:
    """The way of the slowest deliveries, part by part."""
    journeys: dict[tuple[str, int, str], list[Row]] = {}
    for leg in legs:
        journeys.setdefault((leg["publisher"], leg["sequence"], leg["subscriber"]), []).append(leg)
    if not journeys:
        return ""
    left, right, top, bar = 280, 330, 24, 26
    right_end = WIDTH - left - right
    lengths = [sum((leg["wait_ms"] or 0) + (leg["link_ms"] or 0) for leg in way) for way in journeys.values()]
    longest = max(*(way[0]["age_ms"] for way in journeys.values()), *lengths, 1e-9)
    marks = ticks(longest, 6)
    scale = (WIDTH - left - right) / marks[-1]
    height = top + bar * len(journeys) + 28
    parts = [line(left + mark * scale, top - 4, left + mark * scale, height - 24) for mark in marks]
    parts += [text(left + mark * scale, height - 8, tick(mark, " ms"), anchor="middle") for mark in marks]
    stages: dict[str, str] = {}
    for index, ((_, sequence, subscriber), way) in enumerate(journeys.items()):
        y = top + bar * index
        parts.append(
            text(left - 10, y + 15, f"{way[0]['topic']} #{sequence} → {subscriber}"[-42:], anchor="end")
        )
        x = float(left)
        longest_ms, worst = 0.0, ""
        for leg in way:
            stay = f"in {_article(leg['from_role'], leg['to_role'])}"
            way_on = f"{leg['from_role'] or 'unknown'} → {leg['to_role'] or 'unknown'}"
            for stage, place, took_ms, style in (
                (stay, f"in {leg['from_node']}", leg["wait_ms"] or 0, ""),
                (way_on, f"{leg['from_node']} → {leg['to_node']}", leg["link_ms"] or 0, "link"),
            ):
                colour = stages.setdefault(stage, COLOURS[len(stages) % len(COLOURS)])
                tip = f"{milliseconds(took_ms)} {place}"
                parts.append(box(x, y + 3, took_ms * scale, bar - 8, colour, tip, style))
                x += took_ms * scale
                if took_ms > longest_ms:
                    longest_ms, worst = took_ms, place
        parts += [
            text(left + right_end + 8, y + 15, milliseconds(way[0]["age_ms"]), style="value"),
            text(left + right_end + 76, y + 15, f"{milliseconds(longest_ms)} {worst}"[:44], style="small"),
        ]
    parts.append(
        text(10, 14, "from publishing to delivery; pale: on a link, solid: in a node", style="quiet")
    )
    parts.append(text(left + right_end + 8, 14, "age, and the longest part of it", style="quiet"))
    for index, (stage, colour) in enumerate(list(stages.items())[:_LEGEND_MAX]):
        column, row_y = 20 + index % 5 * 188, height + index // 5 * 20
        parts += [
            box(column, row_y, 12, 12, colour, style="link" if "→" in stage else ""),
            text(column + 18, row_y + 10, stage, style="small"),
        ]
    return svg("plot-waterfall", height + 20 * math.ceil(min(len(stages), _LEGEND_MAX) / 5) + 6, parts)


def _article(role: str | None, to_role: str | None) -> str:
    """Which of a message's stations this is; there are two edges on the way."""
    if role == "edge":
        return "the egress edge" if to_role == "client" else "the ingress edge"
    return {"client": "the publisher", "router": "the router"}.get(role or "", "an unknown node")


def outage_chart(name: str, rows: Sequence[Row], duration_ms: float) -> str:
    """Deliveries around one outage."""
    left, right, top, band = 84, 34, 18, 110
    if not rows:
        return ""
    offsets = sorted({row["offset_ms"] for row in rows})
    steps = [after - before for before, after in pairwise(offsets)]
    wide_ms = min(steps, default=10.0)
    first, last = min(offsets[0], -100.0), max(offsets[-1] + wide_ms, duration_ms + 100)
    scale = (WIDTH - left - right) / (last - first)
    most = ticks(max(row["deliveries"] for row in rows))[-1]
    base = top + band
    parts = [box(left - first * scale, top, duration_ms * scale, band, "var(--outage)", "nothing came")]
    for mark in ticks(most, 3):
        y = base - band * min(mark / most, 1)
        parts += [line(left, y, WIDTH - right, y), text(left - 8, y + 4, tick(mark), anchor="end")]
    for row in rows:
        x = left + (row["offset_ms"] - first) * scale
        tall = band * row["deliveries"] / most
        tip = (
            f"{row['offset_ms']:.0f} ms: {row['deliveries']:,} delivered, {row['lost']:,} lost, "
            f"oldest {milliseconds(row['oldest_ms'])}"
        )
        parts.append(box(x, base - tall, wide_ms * scale - 0.5, tall, COLOURS[0], tip))
        if row["lost"]:
            parts.append(box(x, base + 3, max(wide_ms * scale, 2), 5, "#c9443f", tip))
    for mark in (first, 0.0, duration_ms, last):
        parts.append(text(left + (mark - first) * scale, base + 24, f"{mark:.0f} ms", anchor="middle"))
    return svg(name, base + 32, parts)
