"""`isthmus bench spark`: the report on generated traces with known answers."""

import json
from pathlib import Path
from typing import Any

import click

from benchmarks import spark as spark_benchmark
from isthmus.errors import explain_errors


class _Sizes(click.ParamType[tuple[int, ...]]):
    name = "sizes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(float(part)) for part in value.split(","))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a list of numbers, for example 1e6,1e7", param, ctx)


@click.command()
@click.option("--rows", type=_Sizes(), default="1e6,1e7", show_default=True, metavar="N,N,...")
@click.option("--master", default="local[2]", show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@explain_errors
def spark(rows: tuple[int, ...], master: str, seed: int, file: Path | None) -> None:
    """Report on generated traces of growing size; check every number, measure time and memory."""
    result = spark_benchmark.measure(rows, master, seed, lambda text: click.echo(text, err=True))
    if file is not None:
        file.write_text(json.dumps(result.to_record(), indent=2) + "\n")
    click.echo(spark_benchmark.table(result))
    if any(point.wrong for point in result.points):
        raise click.ClickException("the report is wrong")
