"""`isthmus bench`: measurements, each a subcommand."""

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from benchmarks import coordination as coordination_benchmark
from benchmarks import cores as cores_benchmark
from benchmarks.frame_workload import TOPICS_LEAST
from benchmarks.workload import Workload
from isthmus.commands.bench_bounds import bounds, ring, tracing
from isthmus.commands.bench_frame import crashes, frame
from isthmus.commands.bench_multipath import multipath, transports
from isthmus.commands.bench_spark import spark
from isthmus.commands.bench_stress import detection, hostile, overload, tls
from isthmus.errors import explain_errors


@click.group()
def bench() -> None:
    """Measure Isthmus on this machine."""


class _Counts(click.ParamType[tuple[int, ...]]):
    name = "counts"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, for example 2000,4000", param, ctx)
        if min(counts) < 1:
            self.fail(f"{value!r} has a number below 1", param, ctx)
        return counts


@bench.command()
@click.option("--lans", type=click.IntRange(1), default=120, show_default=True, help="Each with one edge.")
@click.option("--routers", type=click.IntRange(2), default=40, show_default=True)
@click.option(
    "--topics", type=click.IntRange(1), default=1_000, show_default=True, help="One publisher each."
)
@click.option(
    "--subscribers",
    type=_Counts(),
    default="2000,4000,6000,8000,10000",
    show_default=True,
    metavar="N,N,...",
    help="Measure after each of these numbers has joined.",
)
@click.option(
    "--workers", type=click.IntRange(1), default=4, show_default=True, help="Processes the brokers share."
)
@click.option(
    "--reserve-core/--share-cores",
    default=True,
    show_default=True,
    help="Keep the brokers off one core, so that ZooKeeper is not measured waiting for them.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Decides which LAN likes which topics.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@explain_errors
def coordination(
    lans: int,
    routers: int,
    topics: int,
    subscribers: tuple[int, ...],
    workers: int,
    reserve_core: bool,
    seed: int,
    file: Path | None,
) -> None:
    """Let thousands of subscribers join; measure ZooKeeper and how soon all routes are right.

    This is the experiment of PubSubCoord, Figures 35-37, against one real ZooKeeper server.
    """
    settings = coordination_benchmark.Settings(
        Workload(lans, routers, topics, seed), subscribers, min(workers, lans), reserve_core
    )
    try:
        result = asyncio.run(
            coordination_benchmark.measure(settings, lambda text: click.echo(text, err=True))
        )
    except coordination_benchmark.BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    if file is not None:
        file.write_text(json.dumps(result.to_record(), indent=2) + "\n")
        click.echo(f"raw result in {file}", err=True)
    click.echo(coordination_benchmark.table(result))


@bench.command()
@click.option("--topics", type=click.IntRange(TOPICS_LEAST), default=7_525, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Messages per topic.")
@click.option(
    "--trace-sample",
    type=click.FloatRange(0, 1),
    help="Measure with this share of the messages traced too, in alternating rounds.",
)
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
def cores(topics: int, rounds: int, trace_sample: float | None, file: Path | None) -> None:
    """What one message costs in the core of each broker on its way."""
    result = cores_benchmark.measure(topics, rounds, trace_sample)
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")
    click.echo(cores_benchmark.summary(result))


bench.add_command(bounds)
bench.add_command(ring)
bench.add_command(tracing)
bench.add_command(frame)
bench.add_command(crashes)
bench.add_command(detection)
bench.add_command(overload)
bench.add_command(hostile)
bench.add_command(multipath)
bench.add_command(transports)
bench.add_command(tls)
bench.add_command(spark)
