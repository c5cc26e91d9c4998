"""Links of a topology, named conditions and scenarios: what they are and how they are read.

A link joins two *places*: a LAN, a host of the cloud, or the cloud as a whole. Wherever the file wants
the conditions of a link it takes a mapping or the name of an entry of `conditions`:

    conditions:
      slow: {delay_ms: 250, loss: 0.01}
    wan: slow
    wan: {use: slow, rate_mbit: 10}
    wan: {delay_ms: 30, out: {rate_mbit: 5}, back: {rate_mbit: 50}}

`out` is towards the second end of the link (for a LAN's `wan`: towards the cloud), `back` the other
way; what they do not say is as for both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from overlay.errors import OverlayError
from overlay.names import check_name
from topology.conditions import (
    BURST_MAX_PACKETS,
    CONDITION_NAMES,
    DELAY_MAX_MS,
    JITTER_MAX_MS,
    LOSS_MAX,
    PERFECT,
    RATE_MAX_MBIT,
    RATE_MIN_MBIT,
    LinkConditions,
)
from topology.document import Problems, Value
from topology.errors import InvalidTopologyError

CLOUD: Final = "cloud"
"""The place between all LANs; no LAN and no host may be called so."""
LINKS_MAX: Final = 10_000
SCENARIOS_MAX: Final = 1_000

_LIMITS: Final = {
    "delay_ms": (0.0, DELAY_MAX_MS),
    "jitter_ms": (0.0, JITTER_MAX_MS),
    "loss": (0.0, LOSS_MAX),
    "burst": (1.0, BURST_MAX_PACKETS),
    "rate_mbit": (RATE_MIN_MBIT, RATE_MAX_MBIT),
}
_MAY_BE_NULL: Final = frozenset({"burst", "rate_mbit"})


@dataclass(frozen=True, slots=True)
class BothWays:
    """The conditions of a link in its two directions."""

    out: LinkConditions = PERFECT
    back: LinkConditions = PERFECT

    def describe(self) -> str:
        """For people: once if both directions are alike."""
        if self.out == self.back:
            return self.out.describe()
        return f"out {self.out.describe()}; back {self.back.describe()}"


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two places."""

    name: str
    ends: tuple[str, str]
    ways: BothWays
    """`out` is from the first end to the second."""

    @property
    def delay_ms(self) -> float:
        """One way, the mean of both directions."""
        return self.round_trip_ms / 2

    @property
    def round_trip_ms(self) -> float:
        """There and back."""
        return self.ways.out.delay_ms + self.ways.back.delay_ms

    def conditions_from(self, place: str) -> LinkConditions:
        """What happens to a packet that enters the link at this end."""
        return self.ways.out if place == self.ends[0] else self.ways.back


@dataclass(frozen=True, slots=True)
class Scenario:
    """Other conditions for some links of a topology."""

    name: str
    description: str
    links: Mapping[str, BothWays]


def in_series(first: LinkConditions, second: LinkConditions) -> LinkConditions:
    """What a packet meets that crosses one link after the other."""
    rates = [item.rate_mbit for item in (first, second) if item.rate_mbit is not None]
    bursts = [item.burst for item in (first, second) if item.burst is not None and item.loss]
    loss = min(LOSS_MAX, 1 - (1 - first.loss) * (1 - second.loss))
    return LinkConditions(
        delay_ms=min(DELAY_MAX_MS, first.delay_ms + second.delay_ms),
        jitter_ms=min(JITTER_MAX_MS, first.jitter_ms + second.jitter_ms),
        loss=loss,
        # So much loss may need longer bursts than either link has alone.
        burst=max(*bursts, loss / (1 - loss), 1.0) if bursts else None,
        rate_mbit=min(rates, default=None),
    )


def read_named(value: Value, problems: Problems) -> dict[str, BothWays]:
    """The section `conditions`."""
    named: dict[str, BothWays] = {}
    for name, entry in value.entries().items():
        problems.read(read_name, entry, "", "conditions", name)
        # An entry may use those above it.
        named[name] = problems.read(read_ways, entry, BothWays(), named)
    return named


def read_ways(
    value: Value,
    named: Mapping[str, BothWays],
    base: BothWays | None = None,
    also: tuple[str, ...] = (),
) -> BothWays:
    """Conditions by name or as a mapping; `base` holds where the mapping says nothing."""
    if not value.is_map:
        return _look_up(value, named)
    fields = value.fields((*also, *CONDITION_NAMES, "use", "out", "back"))
    start = base or BothWays()
    if "use" in fields:
        start = _look_up(fields["use"], named)
    out, back = (_read_direction(value, fields, one) for one in (start.out, start.back))
    if "out" in fields:
        out = _read_direction(fields["out"], fields["out"].fields(CONDITION_NAMES), out)
    if "back" in fields:
        back = _read_direction(fields["back"], fields["back"].fields(CONDITION_NAMES), back)
    return BothWays(out, back)


def _look_up(value: Value, named: Mapping[str, BothWays]) -> BothWays:
    name = value.text()
    if name not in named:
        known = f"use one of {', '.join(named)}" if named else "there are none yet"
        raise value.error(
            f"is {name!r}, which `conditions` does not have: {known}, or give a mapping like {{delay_ms: 30}}"
        )
    return named[name]


def _read_direction(value: Value, fields: Mapping[str, Value], base: LinkConditions) -> LinkConditions:
    found: dict[str, Any] = {
        name: None if name in _MAY_BE_NULL and field.is_null else field.number(*_LIMITS[name])
        for name, field in fields.items()
        if name in _LIMITS
    }
    try:
        return replace(base, **found)
    except InvalidTopologyError as error:
        raise value.error(f"cannot be used: {error}") from error


def read_links(value: Value, named: Mapping[str, BothWays], places: tuple[str, ...]) -> tuple[Link, ...]:
    """The section `links`; `places` are the LANs and the hosts of the cloud."""
    links: list[Link] = []
    seen: dict[frozenset[str], str] = {}
    for item in value.items():
        ways = read_ways(item, named, also=("name", "between"))
        fields = item.entries()
        if "between" not in fields:
            raise item.error("does not say what it joins: give between: [PLACE, PLACE]")
        first, second = _read_ends(fields["between"], places)
        pair = frozenset({first, second})
        if pair in seen:
            raise item.error(f"joins {first} and {second}, as {seen[pair]} does: keep one of them")
        name = f"{first}-{second}"
        if "name" in fields:
            name = read_name(fields["name"], "link", fields["name"].text())
        seen[pair] = name
        links.append(Link(name, (first, second), ways))
    if len(links) > LINKS_MAX:
        raise value.error(f"has {len(links)} links: at most {LINKS_MAX} are allowed")
    return tuple(links)


def _read_ends(value: Value, places: tuple[str, ...]) -> tuple[str, str]:
    ends = [item.text() for item in value.items()]
    if len(ends) != 2 or ends[0] == ends[1]:
        raise value.error(f"names {len(ends)} places: name two different ones, [PLACE, PLACE]")
    for item, place in zip(value.items(), ends, strict=True):
        if place == CLOUD:
            raise item.error("is the cloud as a whole: give the conditions to it under `wan` of the LAN")
        if place not in places:
            raise item.error(f"is {place!r}, no LAN and no host of the cloud: use one of {', '.join(places)}")
    return ends[0], ends[1]


def read_scenarios(
    value: Value, named: Mapping[str, BothWays], links: Mapping[str, Link], problems: Problems
) -> dict[str, Scenario]:
    """The section `scenarios`; `links` has every link by its name."""
    entries = value.entries()
    if len(entries) > SCENARIOS_MAX:
        raise value.error(f"has {len(entries)} scenarios: at most {SCENARIOS_MAX} are allowed")
    scenarios: dict[str, Scenario] = {}
    for name, entry in entries.items():
        scenario = problems.read(_read_scenario, entry, None, name, named, links)
        if scenario is not None:
            scenarios[name] = scenario
    return scenarios


def _read_scenario(
    value: Value, name: str, named: Mapping[str, BothWays], links: Mapping[str, Link]
) -> Scenario | None:
    read_name(value, "scenario", name)
    fields = value.fields(("description", "links"))
    if "links" not in fields:
        raise value.error("changes nothing: give links: {LINK: CONDITIONS}")
    changed: dict[str, BothWays] = {}
    for link, entry in fields["links"].entries().items():
        if link not in links:
            raise entry.error(f"is no link: use one of {', '.join(links)}")
        changed[link] = read_ways(entry, named, links[link].ways)
    return Scenario(name, fields["description"].text().strip() if "description" in fields else "", changed)


def read_name(value: Value, kind: str, name: str) -> str:
    """A name that may name things."""
    try:
        return check_name(kind, name)
    except OverlayError as error:
        raise value.error(f"cannot be used: {error}") from error
