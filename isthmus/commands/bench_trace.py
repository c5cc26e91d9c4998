"""`isthmus bench trace`: what tracing costs."""

import json
from pathlib import Path

import click

from benchmarks import trace as trace_benchmark


@click.command()
@click.option("--messages", type=click.IntRange(1_000), default=200_000, show_default=True)
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
def trace(messages: int, file: Path | None) -> None:
    """Measure what a node pays to trace a message, in memory and to disk."""
    result = trace_benchmark.measure(messages)
    if file is not None:
        file.write_text(json.dumps(result.to_record(), indent=2) + "\n")
    click.echo(trace_benchmark.table(result))
