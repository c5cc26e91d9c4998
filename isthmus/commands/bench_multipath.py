"""`isthmus bench multipath` and `isthmus bench transports`: across an emulated WAN."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import click

from benchmarks import multipath as benchmark
from benchmarks import transports as transports_benchmark
from isthmus.errors import explain_errors
from overlay.paths import Policy


@click.command()
@click.option("--seconds", type=click.FloatRange(1), default=30.0, show_default=True, help="Of each case.")
@click.option("--settle-s", type=click.FloatRange(0), default=12.0, show_default=True, help="Before that.")
@click.option("--cases", default="1-8", show_default=True, help="For example 1,5 or 6-8.")
@click.option("--policies", default=",".join(Policy), show_default=True)
@click.option("--calibration-packets", type=click.IntRange(100), default=benchmark.CALIBRATION_PACKETS)
@click.option("--keep-logs", is_flag=True, help="Leave the logs of all processes.")
@click.option("--judge/--no-judge", default=True, help="Fail if a demand is not met.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@click.option("--resume", is_flag=True, help="Keep the valid rows that --json has already.")
@click.option("--at-most-s", type=click.FloatRange(0), help="Begin no row after so long; --resume goes on.")
@explain_errors
def multipath(
    seconds: float,
    settle_s: float,
    cases: str,
    policies: str,
    calibration_packets: int,
    keep_logs: bool,
    judge: bool,
    file: Path | None,
    resume: bool,
    at_most_s: float | None,
) -> None:
    """Latency, kept deadlines and bytes of the eight cases of PubSubCoord's Table 3 (needs root)."""
    settings = benchmark.Settings(
        seconds, settle_s, _numbers(cases), _policies(policies), calibration_packets, keep_logs
    )
    if resume and file is None:
        raise click.UsageError("--resume goes on with a result: say which with --json FILE")

    def store(result: dict[str, Any]) -> None:
        if file is not None:
            file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    result = asyncio.run(
        benchmark.measure(
            settings,
            lambda text: click.echo(text, err=True),
            earlier=json.loads(file.read_text()) if resume and file is not None and file.exists() else None,
            at_most_s=math.inf if at_most_s is None else at_most_s,
            store=store,
        )
    )
    store(result)
    click.echo(benchmark.summary(result))
    if judge and not result["ok"]:
        raise SystemExit(1)


@click.command()
@click.option("--delay-ms", type=click.FloatRange(0), default=250.0, show_default=True)
@click.option(
    "--loss", type=click.FloatRange(0, 0.5), default=0.01, show_default=True, help="Share of packets."
)
@click.option("--rate", "rate_per_s", type=click.FloatRange(1), default=100.0, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True)
@click.option(
    "--judge/--no-judge", default=True, help="Fail if the machine was too busy to emulate the link."
)
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@explain_errors
def transports(
    delay_ms: float, loss: float, rate_per_s: float, seconds: float, judge: bool, file: Path | None
) -> None:
    """What a lost packet costs over TCP, over several connections, and with datagrams (needs root)."""
    settings = transports_benchmark.Settings(delay_ms, loss, rate_per_s, seconds)
    result = asyncio.run(transports_benchmark.measure(settings, lambda text: click.echo(text, err=True)))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(transports_benchmark.summary(result))
    if judge and not result["valid"]:
        raise SystemExit(1)


def _numbers(text: str) -> tuple[int, ...]:
    """`1,3` or `6-8`."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        raise click.BadParameter(f"{text!r}: give numbers like 1,5 or 6-8") from None
    if not found or not set(found) <= set(benchmark.CASES):
        raise click.BadParameter(f"{text!r}: cases are 1 to 8")
    return tuple(found)


def _policies(text: str) -> tuple[Policy, ...]:
    try:
        return tuple(Policy(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}: policies are {', '.join(Policy)}") from None
