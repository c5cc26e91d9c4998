"""A picture of a topology: LANs with their brokers, the cloud, and links coloured by delay.

Needs matplotlib (`pip install 'isthmus[plot]'`), which nothing else of the testbed does.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from topology.conditions import LinkConditions
from topology.errors import TopologyError
from topology.layout import CHARACTER_IN, CHIP_GAP_IN, LINE_IN, PADDING_IN, Box, Layout, lay_out
from topology.links import CLOUD, Link
from topology.model import Topology

FORMATS: Final = (".png", ".svg", ".pdf")
DOTS_PER_INCH: Final = 130
MARGIN_IN: Final = 0.5
HEADER_IN: Final = 0.75
FOOTER_IN: Final = 0.55
WIDTH_LEAST_IN: Final = 8.0

_BOXES: Final = {
    # kind: (fill, border)
    "lan": ("#eaf2fb", "#7fa8d6"),
    "host": ("#fdf3e3", "#dcb26f"),
    "cloud": ("#f6f6f4", "#c4c4bd"),
}
_CHIPS: Final = {
    # kind: (fill, text, what it is)
    "edge": ("#2f6db3", "white", "edge broker"),
    "router": ("#d9822b", "white", "routing broker"),
    "zookeeper": ("#6f6f68", "white", "ZooKeeper server"),
    "clients": ("#d5ecd4", "#22551f", "publishers and subscribers"),
}
_LABEL_PLACES: Final = (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74, 0.18, 0.82)
_DELAYS: Final = ("#2a9d5c", "#e0b320", "#c8372d")
"""Quick to slow."""
SLOW_MS: Final = 100.0
"""At least this delay is the slow end of the scale, so that a quick link does not look slow."""


def plot(topology: Topology, file: Path) -> None:
    """Draw a topology, under the scenario in force, into a file; its name says the format."""
    if file.suffix.lower() not in FORMATS:
        raise TopologyError(f"{file} has the ending {file.suffix!r}: use one of {', '.join(FORMATS)}")
    layout = lay_out(topology)
    links = _drawn_links(topology, layout)
    figure, axes = _canvas(layout, [_curve(link, layout).at(0.5) for link in links])
    colours = _colours(topology)
    labels: list[Box] = []
    for link in links:
        _draw_link(axes, link, layout, colours, labels)
    for box in layout.boxes.values():
        _draw_box(axes, box)
    _draw_frame(figure, axes, topology, colours)
    try:
        figure.savefig(file, dpi=DOTS_PER_INCH, facecolor="white", metadata=_metadata(file))
    except OSError as error:
        raise TopologyError(f"{file} cannot be written: {error.strerror}") from error


def _metadata(file: Path) -> dict[str, str | None]:
    # Without a date the same topology gives the same file.
    return {"Date": None} if file.suffix.lower() == ".svg" else {}


def _canvas(layout: Layout, points: list[tuple[float, float]]) -> tuple[Figure, Axes]:
    """An area on which one unit is one inch, large enough for the boxes and for these points."""
    boxes = [*layout.boxes.values(), *(Box("", "label", x=x, y=y) for x, y in points)]
    left = min(box.x - box.width / 2 for box in boxes) - MARGIN_IN
    right = max(box.x + box.width / 2 for box in boxes) + MARGIN_IN
    bottom = min(box.y - box.height / 2 for box in boxes) - MARGIN_IN - FOOTER_IN
    top = max(box.y + box.height / 2 for box in boxes) + MARGIN_IN + HEADER_IN
    short = max(0.0, WIDTH_LEAST_IN - (right - left)) / 2
    left, right = left - short, right + short
    figure = Figure(figsize=(right - left, top - bottom))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_axis_off()
    return figure, axes


def _colours(topology: Topology) -> ScalarMappable:
    delays = [
        conditions.delay_ms for link in topology.all_links for conditions in (link.ways.out, link.ways.back)
    ]
    scale: Colormap = LinearSegmentedColormap.from_list("delay", _DELAYS)
    return ScalarMappable(Normalize(0, max(*delays, SLOW_MS)), scale)


def _drawn_links(topology: Topology, layout: Layout) -> list[Link]:
    """On a map a LAN's way to the cloud has no place of its own; links to hosts are drawn instead.

    Links between LANs come first, so that the others lie above them.
    """
    lans = {lan.name for lan in topology.lans}
    wan = [] if layout.is_map else [lan.wan for lan in topology.lans]
    return sorted((*topology.links, *wan), key=lambda link: not lans.issuperset(link.ends))


@dataclass(frozen=True, slots=True)
class _Curve:
    """A link as it is drawn: from border to border, perhaps bowed."""

    start: tuple[float, float]
    end: tuple[float, float]
    bend: float

    def at(self, along: float) -> tuple[float, float]:
        """A point of it, 0 is the start and 1 the end."""
        (x0, y0), (x2, y2) = self.start, self.end
        # matplotlib's arc3: a quadratic curve whose control point lies beside the middle.
        x1 = (x0 + x2) / 2 + self.bend * (y2 - y0)
        y1 = (y0 + y2) / 2 - self.bend * (x2 - x0)
        near, middle, far = (1 - along) ** 2, 2 * along * (1 - along), along**2
        return near * x0 + middle * x1 + far * x2, near * y0 + middle * y1 + far * y2


def _curve(link: Link, layout: Layout) -> _Curve:
    first, second = (layout.boxes[end] for end in link.ends)
    bend = _bend(first, second, layout)
    towards_x = (first.x + second.x) / 2 + bend * (second.y - first.y)
    towards_y = (first.y + second.y) / 2 - bend * (second.x - first.x)
    if not bend:
        return _Curve(first.border(second.x, second.y), second.border(first.x, first.y), bend)
    return _Curve(first.border(towards_x, towards_y), second.border(towards_x, towards_y), bend)


def _draw_link(axes: Axes, link: Link, layout: Layout, colours: ScalarMappable, labels: list[Box]) -> None:
    curve = _curve(link, layout)
    _, slowest_ms = colours.get_clim()
    assert slowest_ms is not None
    worst = max(link.ways.out, link.ways.back, key=lambda conditions: conditions.delay_ms)
    colour = colours.cmap(worst.delay_ms / slowest_ms)
    direct = all(layout.boxes[end].kind == "lan" for end in link.ends)
    crowded = layout.is_map
    axes.add_patch(
        FancyArrowPatch(
            curve.start,
            curve.end,
            connectionstyle=f"arc3,rad={curve.bend:.4f}",
            arrowstyle="-",
            shrinkA=0,
            shrinkB=0,
            color=colour,
            linewidth=(1.0 if direct else 1.6) if crowded else 2.2,
            linestyle=(0, (5, 2.5)) if direct else "-",
            alpha=0.55 if crowded and direct else 0.95,
            zorder=1 if direct else 2,
        )
    )
    if crowded and direct:
        # On a map of all links these would hide the others; `isthmus topology show` lists them.
        return
    label = _place_label(curve, _label(link), layout, labels)
    labels.append(label)
    axes.text(
        label.x,
        label.y,
        label.title,
        ha="center",
        va="center",
        fontsize=7 if crowded else 8.5,
        color="#333333",
        zorder=7,
        linespacing=1.25,
        bbox={"boxstyle": "round,pad=0.22", "facecolor": "white", "edgecolor": colour, "linewidth": 0.8},
    )


def _place_label(curve: _Curve, text: str, layout: Layout, labels: list[Box]) -> Box:
    """On the line, where it hides no box and no other label if there is such a place."""
    lines = text.split("\n")
    label = Box(text, "label", width=CHARACTER_IN * max(map(len, lines)), height=0.2 * len(lines))
    for along in _LABEL_PLACES:
        label.x, label.y = curve.at(along)
        others = (*layout.boxes.values(), *labels)
        if all(label.overlap(other, 0.04) == (0.0, 0.0) for other in others):
            return label
    label.x, label.y = curve.at(0.5)
    return label


def _bend(first: Box, second: Box, layout: Layout) -> float:
    """How much a link must bow so that it does not run behind the cloud."""
    cloud = layout.boxes.get(CLOUD)
    if cloud is None or first.kind != "lan" or second.kind != "lan":
        return 0.0
    length = math.hypot(second.x - first.x, second.y - first.y)
    middle = math.hypot((first.x + second.x) / 2, (first.y + second.y) / 2)
    level = abs(second.x - first.x) > 3 * abs(second.y - first.y)
    clear = cloud.height / 2 if level else math.hypot(cloud.width, cloud.height) / 2
    return max(0.0, 2 * (clear + 0.45 - middle) / length) if middle < clear + 0.45 else 0.0


def _label(link: Link) -> str:
    given = link.name not in {f"{link.ends[0]}-wan", "-".join(link.ends)}
    name = f"{link.name}: " if given else ""
    limited = any(conditions.rate_mbit is not None for conditions in (link.ways.out, link.ways.back))
    out, back = _parts(link.ways.out, limited), _parts(link.ways.back, limited)
    alike = [part for part in out if part in back]
    lines = [", ".join(alike)] if alike else []
    if out != back:
        lines.append("out " + ", ".join(part for part in out if part not in alike))
        lines.append("back " + ", ".join(part for part in back if part not in alike))
    return name + "\n".join(lines)


def _parts(conditions: LinkConditions, limited: bool) -> list[str]:
    jitter = f" ± {conditions.jitter_ms:g}" if conditions.jitter_ms else ""
    parts = [f"{conditions.delay_ms:g}{jitter} ms"]
    if conditions.loss:
        parts.append(f"{conditions.loss * 100:g} % lost" + (" in bursts" if conditions.burst else ""))
    if limited:
        parts.append("any rate" if conditions.rate_mbit is None else f"{conditions.rate_mbit:g} Mbit/s")
    return parts


def _draw_box(axes: Axes, box: Box) -> None:
    fill, border = _BOXES[box.kind]
    layer = 3 if box.kind == "cloud" else 4
    _rectangle(axes, (box.x, box.y, box.width, box.height), fill, border, layer, rounding=0.1)
    top = box.y + box.height / 2 - PADDING_IN - LINE_IN / 2 + 0.03
    axes.text(
        box.x,
        top,
        box.title,
        ha="center",
        va="center",
        fontsize=10 if box.kind == "lan" else 9,
        fontweight="bold" if box.kind == "lan" else "normal",
        color="#555550" if box.kind == "cloud" else "#222222",
        zorder=layer + 1,
    )
    y = top - LINE_IN - CHIP_GAP_IN / 2
    for row in box.rows():
        x = box.x - (sum(chip.width for chip in row) + CHIP_GAP_IN * (len(row) - 1)) / 2
        for chip in row:
            colour, text, _ = _CHIPS[chip.kind]
            _rectangle(axes, (x + chip.width / 2, y, chip.width, LINE_IN), colour, colour, 5, rounding=0.05)
            axes.text(
                x + chip.width / 2,
                y - 0.01,
                chip.text,
                ha="center",
                va="center",
                fontsize=8,
                color=text,
                zorder=6,
            )
            x += chip.width + CHIP_GAP_IN
        y -= LINE_IN + CHIP_GAP_IN


def _rectangle(
    axes: Axes,
    place: tuple[float, float, float, float],
    fill: str,
    border: str,
    layer: int,
    *,
    rounding: float,
) -> None:
    x, y, width, height = place
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle=f"round,pad=0,rounding_size={rounding}",
            facecolor=fill,
            edgecolor=border,
            linewidth=1.0,
            zorder=layer,
        )
    )


def _draw_frame(figure: Figure, axes: Axes, topology: Topology, colours: ScalarMappable) -> None:
    """Title above, legend and scale of delays below."""
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    title = topology.name + (f", {topology.scenario}" if topology.scenario else "")
    axes.text(left + 0.3, top - 0.32, title, fontsize=14, fontweight="bold", va="center", color="#222222")
    scenario = topology.scenarios.get(topology.scenario)
    subtitle = (scenario.description if scenario else "") or (
        f"{len(topology.lans)} LANs, {len(topology.routers)} routing brokers, "
        f"{topology.zookeeper_servers} ZooKeeper server{'s' if topology.zookeeper_servers > 1 else ''}, "
        f"{len(topology.topics)} topics"
    )
    axes.text(left + 0.3, top - 0.6, subtitle, fontsize=9, va="center", color="#666660")
    handles = [
        Line2D([], [], linestyle="", marker="s", markersize=8, color=colour, label=what)
        for colour, _, what in _CHIPS.values()
    ]
    lans = {lan.name for lan in topology.lans}
    if any(lans.issuperset(link.ends) for link in topology.links):
        handles.append(Line2D([], [], linestyle=(0, (4, 2)), color="#888880", label="direct link"))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 0.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handletextpad=0.3,
        columnspacing=1.2,
    )
    width, height = right - left, top - bottom
    bar = figure.add_axes((1 - 2.3 / width, 1 - 0.42 / height, 2.0 / width, 0.1 / height))
    figure.colorbar(colours, cax=bar, orientation="horizontal")
    bar.tick_params(labelsize=7, length=2, color="#888880", labelcolor="#555550")
    bar.set_title("one-way delay in ms", fontsize=7.5, color="#555550", pad=3)
