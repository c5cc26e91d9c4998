"""`isthmus bench bounds`, `ring` and `tracing`: age bounds against the truth, and what the truth costs."""

import asyncio
import json
from pathlib import Path

import click

from benchmarks import bounds as bounds_benchmark
from benchmarks import bounds_cost, machine
from benchmarks import ring as ring_benchmark
from benchmarks import tracing as tracing_benchmark
from isthmus.errors import explain_errors


def _say(text: str) -> None:
    click.echo(text, err=True)


_json_option = click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)


@click.command()
@click.option("--messages", type=click.IntRange(1_000), default=1_000_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Decides pauses, batches and cuts.")
@click.option("--keep-logs", is_flag=True, help="Leave the logs of all processes.")
@click.option("--cost-only", is_flag=True, help="Only measure what bounds cost brokers and their cores.")
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=bounds_cost.BROKER_SECONDS,
    show_default=True,
    help="For measuring what bounds cost running brokers.",
)
@click.option("--check", is_flag=True, help="Fail also if what bounds cost could not be told.")
@_json_option
@explain_errors
def bounds(
    messages: int,
    seed: int,
    keep_logs: bool,
    cost_only: bool,
    seconds: float,
    check: bool,
    file: Path | None,
) -> None:
    """Check age bounds of messages between LANs against the truth; fails if one is below it or too dear."""
    if cost_only:
        measuring = bounds_benchmark.measure_cost(bounds_cost.CORE_ROUNDS, seconds, _say)
        cost = asyncio.run(measuring)
        result = {"ok": cost["brokers"]["ok"], "cost": cost, "machine": machine.describe()}
        text = bounds_cost.brokers_summary(cost["brokers"])
    else:
        settings = bounds_benchmark.Settings(messages, seed, broker_seconds=seconds, keep_logs=keep_logs)
        result = asyncio.run(bounds_benchmark.measure(settings, _say))
        text = bounds_benchmark.summary(result)
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(text)
    if result["ok"] is False or (check and not result["ok"]):
        raise SystemExit(1)


@click.command()
@click.option("--publications", type=click.IntRange(10), default=1_500, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@_json_option
@explain_errors
def ring(publications: int, seed: int, file: Path | None) -> None:
    """Figures 5 and 6 of Fail-Aware Publish/Subscribe on a ring of processes; `benchmarks.ring_plot` draws.

    Fails if a bound is below the truth.
    """
    result = asyncio.run(ring_benchmark.measure(publications, seed))
    if file is not None:
        file.write_text(json.dumps(result) + "\n", encoding="utf-8")
    click.echo(ring_benchmark.summary(result))
    if not result["ok"]:
        raise SystemExit(1)


@click.command()
@click.option("--seconds", type=click.FloatRange(0), default=120.0, show_default=True)
@click.option("--messages", type=click.IntRange(1_000), default=8_000, show_default=True, help="Per turn.")
@click.option(
    "--check", is_flag=True, help="Fail unless tracing 1 % is shown to cost no broker more than 3 %."
)
@_json_option
@explain_errors
def tracing(seconds: float, messages: int, check: bool, file: Path | None) -> None:
    """What tracing 1 % and 100 % of the messages costs real brokers, in processor time per message."""
    result = asyncio.run(tracing_benchmark.measure(tracing_benchmark.Settings(seconds, messages), _say))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(tracing_benchmark.summary(result))
    if check and not result["ok"]:
        raise SystemExit(1)
