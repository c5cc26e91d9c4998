"""`isthmus trace`: looking after traces."""

import json
import time
from pathlib import Path

import click

from isthmus.errors import explain_errors
from spark_analysis.shipper import ship as ship_folder

POLL_S = 2.0


@click.group()
def trace() -> None:
    """Look after the traces that brokers and clients write."""


@trace.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the Parquet files.  [default: FOLDER/parquet]",
)
@click.option("--follow", is_flag=True, help="Go on with segments as they are closed.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@explain_errors
def ship(folder: Path, out: Path | None, follow: bool, as_json: bool) -> None:
    """Turn closed segments into Parquet, each once, and salvage those of dead processes.

    One shipper per host; it may be killed at any time.
    """
    try:
        while True:
            done = ship_folder(folder, out)
            if done.segments or done.set_aside or not follow:
                if as_json:
                    click.echo(json.dumps(done.to_record()))
                else:
                    click.echo(
                        f"{done.segments} segments with {done.records} records shipped, {done.salvaged} "
                        f"of them salvaged, {done.torn_bytes} torn bytes skipped"
                    )
                    for problem in done.set_aside:
                        click.echo(f"set aside {problem}", err=True)
            if not follow:
                return
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return
