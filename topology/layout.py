"""Where the boxes of a topology's picture go. Plain geometry in inches; drawing is in `topology.plot`.

If every LAN and host has a location, boxes lie as on a map, pushed apart where they would overlap.
Otherwise the cloud is in the middle with its hosts in it, and the LANs stand around it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from topology.model import Topology

CHARACTER_IN: Final = 0.082
"""Width of a character of the small font."""
LINE_IN: Final = 0.24
CHIP_GAP_IN: Final = 0.1
PADDING_IN: Final = 0.16
MAP_WIDTH_IN: Final = 15.0
MAP_HEIGHT_IN: Final = 8.0
GAP_IN: Final = 0.55
"""Least room between two boxes."""
CHIPS_PER_ROW: Final = 4
HOSTS_PER_ROW: Final = 3
PUSHES_MAX: Final = 400


@dataclass(frozen=True, slots=True)
class Chip:
    """Something that runs: a broker, a ZooKeeper server or the clients of a LAN."""

    text: str
    kind: str
    """edge, router, zookeeper or clients."""

    @property
    def width(self) -> float:
        """Room it needs."""
        return CHARACTER_IN * len(self.text) + 0.16


@dataclass(slots=True)
class Box:
    """A LAN, a host of the cloud, or the cloud."""

    title: str
    kind: str
    """lan, host or cloud."""
    chips: Sequence[Chip] = ()
    x: float = 0.0
    y: float = 0.0
    """The middle."""
    width: float = 0.0
    height: float = 0.0
    inner: list["Box"] = field(default_factory=list)

    def rows(self) -> list[Sequence[Chip]]:
        """The chips, row by row."""
        return [self.chips[at : at + CHIPS_PER_ROW] for at in range(0, len(self.chips), CHIPS_PER_ROW)]

    def fit(self) -> None:
        """Become as large as the content needs."""
        widest = max((sum(chip.width + CHIP_GAP_IN for chip in row) for row in self.rows()), default=0.0)
        self.width = 2 * PADDING_IN + max(1.15 * CHARACTER_IN * len(self.title), widest - CHIP_GAP_IN)
        self.height = 2 * PADDING_IN + LINE_IN + len(self.rows()) * (LINE_IN + CHIP_GAP_IN) - CHIP_GAP_IN

    def overlap(self, other: "Box", gap: float) -> tuple[float, float]:
        """How far two boxes with a gap around them lie over each other, along x and y; 0 if they do not."""
        over_x = (self.width + other.width) / 2 + gap - abs(self.x - other.x)
        over_y = (self.height + other.height) / 2 + gap - abs(self.y - other.y)
        return (over_x, over_y) if over_x > 0 and over_y > 0 else (0.0, 0.0)

    def border(self, towards_x: float, towards_y: float) -> tuple[float, float]:
        """Where a line from the middle to a point leaves the box."""
        run, rise = towards_x - self.x, towards_y - self.y
        scale = min(
            self.width / 2 / abs(run) if run else math.inf,
            self.height / 2 / abs(rise) if rise else math.inf,
            1.0,
        )
        return self.x + run * scale, self.y + rise * scale


@dataclass(frozen=True, slots=True)
class Layout:
    """All boxes, placed."""

    boxes: dict[str, Box]
    """By the name of the place; with `cloud` if it has a box of its own."""
    is_map: bool


def lay_out(topology: Topology) -> Layout:
    """Place everything."""
    lans = {lan.name: _lan_box(topology, lan.name) for lan in topology.lans}
    hosts: dict[str, Box] = {}
    for host in topology.hosts:
        if not host.lan:
            kinds = ("zookeeper" if name.startswith("zookeeper-") else "router" for name in host.runs)
            chips = tuple(Chip(name, kind) for name, kind in zip(host.runs, kinds, strict=True))
            hosts[host.name] = Box(host.name, "host", chips)
    for box in (*lans.values(), *hosts.values()):
        box.fit()
    if all(name in topology.locations for name in (*lans, *hosts)):
        _place_on_map(topology, {**lans, **hosts})
        return Layout({**lans, **hosts}, is_map=True)
    cloud = _cloud_box(list(hosts.values()))
    _place_around(list(lans.values()), cloud)
    return Layout({**lans, **hosts, "cloud": cloud}, is_map=False)


def _lan_box(topology: Topology, name: str) -> Box:
    chips = [Chip(edge, "edge") for edge in topology.lan(name).edges]
    publishers = sum(item.lan == name for item in topology.publishers)
    subscribers = sum(item.lan == name for item in topology.subscribers)
    counts = [f"{count} {word}" for count, word in ((publishers, "pub"), (subscribers, "sub")) if count]
    if counts:
        chips.append(Chip(" · ".join(counts), "clients"))
    return Box(name, "lan", tuple(chips))


def _cloud_box(hosts: list[Box]) -> Box:
    """The cloud with its hosts inside, in rows."""
    cloud = Box("cloud", "cloud", inner=hosts)
    rows = [hosts[at : at + HOSTS_PER_ROW] for at in range(0, len(hosts), HOSTS_PER_ROW)]
    cloud.width = 2 * PADDING_IN + max(
        sum(host.width for host in row) + PADDING_IN * (len(row) - 1) for row in rows
    )
    cloud.height = PADDING_IN + LINE_IN + sum(max(host.height for host in row) + PADDING_IN for row in rows)
    top = cloud.height / 2 - LINE_IN - PADDING_IN
    for row in rows:
        height = max(host.height for host in row)
        left = -(sum(host.width for host in row) + PADDING_IN * (len(row) - 1)) / 2
        for host in row:
            host.x, host.y = left + host.width / 2, top - height / 2
            left += host.width + PADDING_IN
        top -= height + PADDING_IN
    return cloud


def _place_around(lans: list[Box], cloud: Box) -> None:
    """On an ellipse around the cloud, the first at the left, clockwise; wide enough for all."""
    room_x = cloud.width / 2 + max(lan.width for lan in lans) / 2 + 1.9
    room_y = cloud.height / 2 + max(lan.height for lan in lans) / 2 + 1.3
    scale = 1.0
    for _ in range(PUSHES_MAX):
        for number, lan in enumerate(lans):
            angle = math.pi - 2 * math.pi * number / len(lans)
            lan.x, lan.y = scale * room_x * math.cos(angle), scale * room_y * math.sin(angle)
        if not any(
            one.overlap(other, GAP_IN) != (0.0, 0.0)
            for number, one in enumerate(lans)
            for other in (cloud, *lans[:number])
        ):
            return
        scale *= 1.05


def _place_on_map(topology: Topology, boxes: dict[str, Box]) -> None:
    spots = {name: topology.locations[name] for name in boxes}
    west = min(spot.longitude for spot in spots.values())
    east = max(spot.longitude for spot in spots.values())
    south = min(spot.latitude for spot in spots.values())
    north = max(spot.latitude for spot in spots.values())
    for name, box in boxes.items():
        box.x = (spots[name].longitude - west) / max(1.0, east - west) * MAP_WIDTH_IN
        box.y = (spots[name].latitude - south) / max(1.0, north - south) * MAP_HEIGHT_IN
    placed = list(boxes.values())
    for _ in range(PUSHES_MAX):
        pushed = [_push_apart(one, other) for i, one in enumerate(placed) for other in placed[:i]]
        if True not in pushed:
            return


def _push_apart(one: Box, other: Box) -> bool:
    over_x, over_y = one.overlap(other, GAP_IN)
    if not over_x:
        return False
    # Along the way that takes less; a little more than needed, so that it comes to an end.
    if over_x < over_y:
        step = math.copysign(over_x / 2 + 0.01, one.x - other.x)
        one.x, other.x = one.x + step, other.x - step
    else:
        step = math.copysign(over_y / 2 + 0.01, one.y - other.y)
        one.y, other.y = one.y + step, other.y - step
    return True
