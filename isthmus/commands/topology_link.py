"""`isthmus topology link`, `cut` and `heal`: other conditions on a link of a running netns testbed."""

import json
import re
from collections.abc import Callable
from typing import Any, Final

import click

from isthmus.errors import explain_errors
from topology.conditions import LinkConditions
from topology.wan_control import change_link, cut_link, heal_link


def _quantity(name: str, units: dict[str, float]) -> Callable[[str], float]:
    """Reads a number with a unit, or without one in the unit that the link wants."""

    def read(value: str) -> float:
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z%]*)", value.strip().lower())
        if match is None or match[2] not in units:
            known = ", ".join(f"10{unit}" for unit in units)
            raise click.BadParameter(f"{value!r} is no {name}: write it like {known}")
        return float(match[1]) * units[match[2]]

    read.__name__ = name
    return read


_TIME: Final = _quantity("time", {"ms": 1.0, "s": 1_000.0, "": 1.0})
_SHARE: Final = _quantity("share", {"%": 0.01, "": 1.0})
_RATE: Final = _quantity("rate", {"mbit": 1.0, "kbit": 0.001, "gbit": 1_000.0, "": 1.0})

_ONE_WAY = click.option("--one-way", is_flag=True, help="Only from A to B.")
_RUN = click.option("--run", metavar="NAME", help="Which testbed, if several run.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--delay", "delay_ms", type=_TIME, help="One way, for example 250ms.")
@click.option(
    "--jitter", "jitter_ms", type=_TIME, help="How far a packet's delay may be off, to either side."
)
@click.option("--loss", type=_SHARE, help="For example 1%.")
@click.option("--burst", type=float, help="Packets lost in a row, on average.")
@click.option("--rate", "rate_mbit", type=_RATE, help="For example 10mbit.")
@_ONE_WAY
@_RUN
@_JSON
@explain_errors
def link(a: str, b: str, one_way: bool, run: str | None, as_json: bool, **changes: float | None) -> None:
    """Change the link between sites A and B (LANs, or cloud) while a testbed runs.

    What is not given stays as it is; with nothing given, the link is shown.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    _show(change_link(a, b, given, one_way=one_way, run=run), as_json)


@click.command()
@click.argument("a")
@click.argument("b")
@_ONE_WAY
@_RUN
@_JSON
@explain_errors
def cut(a: str, b: str, one_way: bool, run: str | None, as_json: bool) -> None:
    """Let nothing through between sites A and B of a running testbed."""
    _show(cut_link(a, b, one_way=one_way, run=run), as_json)


@click.command()
@click.argument("a")
@click.argument("b")
@_ONE_WAY
@_RUN
@_JSON
@explain_errors
def heal(a: str, b: str, one_way: bool, run: str | None, as_json: bool) -> None:
    """Let everything through between sites A and B again, under the conditions of before."""
    _show(heal_link(a, b, one_way=one_way, run=run), as_json)


def _show(lanes: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(lanes, indent=2))
        return
    for name, lane in lanes.items():
        facts = dict(lane)
        state = "cut" if facts.pop("cut") else LinkConditions(**facts).describe()
        click.echo(f"{name}: {state}")
