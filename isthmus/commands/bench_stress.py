"""`isthmus bench detection`, `overload`, `hostile` and `tls`: what the world does to brokers."""

import asyncio
import json
from pathlib import Path

import click

from benchmarks import detection as detection_benchmark
from benchmarks import hostile as hostile_benchmark
from benchmarks import overload as overload_benchmark
from benchmarks import processor_overload
from benchmarks import tls as tls_benchmark
from benchmarks.frame_testbed import EGRESS, PRIMARY, Setup
from benchmarks.frame_workload import TOPICS_LEAST
from benchmarks.hostile_peer import KINDS
from isthmus.errors import explain_errors
from overlay.limits import HEARTBEAT_SILENCE_NS, MILLISECOND_NS

_SILENCE_MS = HEARTBEAT_SILENCE_NS / MILLISECOND_NS


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.option("--kills", type=click.IntRange(0), default=10, show_default=True, help="Brokers killed.")
@click.option("--freezes", type=click.IntRange(0), default=10, show_default=True, help="Brokers frozen.")
@click.option("--cuts", type=click.IntRange(0), default=5, show_default=True, help="Ways to a broker cut.")
@click.option("--busy-seconds", type=click.FloatRange(1), default=60.0, show_default=True)
@click.option("--topics", type=click.IntRange(TOPICS_LEAST), default=55, show_default=True)
@click.option("--silence-ms", type=click.FloatRange(30), default=_SILENCE_MS, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Decides whom.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@explain_errors
def detection(
    kills: int,
    freezes: int,
    cuts: int,
    busy_seconds: float,
    topics: int,
    silence_ms: float,
    seed: int,
    file: Path | None,
) -> None:
    """Keep all cores busy: count false alarms, then time how soon dead and frozen brokers are noticed."""
    setup = Setup(topics, "frame", session_timeout_s=2.0, silence_ms=silence_ms, equal_capacity=True)
    settings = detection_benchmark.Settings(setup, kills, freezes, cuts, busy_seconds, seed)
    result = asyncio.run(detection_benchmark.measure(settings, _say))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(detection_benchmark.summary(result))
    if result["false_alarms"]:
        raise SystemExit(1)


@click.command()
@click.option(
    "--bottleneck",
    type=click.Choice(["link", "router", "egress"]),
    default="link",
    show_default=True,
    help="A narrow link, or a broker with too little processor time (needs root).",
)
@click.option(
    "--factor", type=click.FloatRange(1), default=1.5, show_default=True, help="Offered over carried."
)
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True)
@click.option(
    "--topics",
    type=click.IntRange(TOPICS_LEAST),
    default=1_525,
    show_default=True,
    help="Of FRAME's workload, where a broker is the bottleneck.",
)
@click.option("--nice", "niceness", type=click.IntRange(-20, 19), default=0, help="Of all processes.")
@click.option("--keep-logs", is_flag=True, help="Leave the logs of all processes.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@explain_errors
def overload(
    bottleneck: str,
    factor: float,
    seconds: float,
    topics: int,
    niceness: int,
    keep_logs: bool,
    file: Path | None,
) -> None:
    """Offer more than a link or a broker bears; fails if topics lose more in a row than they tolerate."""
    if bottleneck == "link":
        result = asyncio.run(
            overload_benchmark.measure(overload_benchmark.Settings(factor, seconds, keep_logs), _say)
        )
        text = overload_benchmark.summary(result)
    else:
        broker = {"router": PRIMARY, "egress": EGRESS}[bottleneck]
        # Compiled, a broker needs so little that the share left to it goes into heartbeats.
        setup = Setup(
            topics, "frame", niceness=niceness, keep_logs=keep_logs, backup_leads=True, interpreted=broker
        )
        settings = processor_overload.Settings(setup, broker, factor, seconds)
        result = asyncio.run(processor_overload.measure(settings, _say))
        text = processor_overload.summary(result)
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(text)
    if not result["ok"]:
        raise SystemExit(1)


@click.command()
@click.option(
    "--attack",
    "attacks",
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="Only this one; repeat. All of them without it.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--stalled-rounds",
    type=click.IntRange(1),
    default=40,
    show_default=True,
    help="With a stalled subscriber, where percentiles are compared.",
)
@click.option("--window-s", type=click.FloatRange(0.2), default=3.0, show_default=True)
@click.option(
    "--scale", type=click.FloatRange(0.001), default=1.0, show_default=True, help="Of the attackers."
)
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@click.option("--judge/--no-judge", default=True, help="Whether to fail if others notice.")
@explain_errors
def hostile(
    attacks: tuple[str, ...],
    rounds: int,
    stalled_rounds: int,
    window_s: float,
    scale: float,
    file: Path | None,
    judge: bool,
) -> None:
    """Attack an edge broker; fails if others lose messages, miss deadlines, or may wait for a stalled one."""
    settings = hostile_benchmark.Settings(
        attacks or tuple(KINDS), rounds, stalled_rounds, window_s, scale=scale
    )
    result = asyncio.run(hostile_benchmark.measure(settings, _say))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(hostile_benchmark.summary(result))
    if judge and not result["ok"]:
        raise SystemExit(1)


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--window-s", type=click.FloatRange(0.2), default=3.0, show_default=True)
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@explain_errors
def tls(rounds: int, window_s: float, file: Path | None) -> None:
    """What encryption of all links costs, in messages a second and in the brokers' time."""
    settings = tls_benchmark.Settings(rounds=rounds, window_s=window_s)
    result = asyncio.run(tls_benchmark.measure(settings, _say))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(tls_benchmark.summary(result))
