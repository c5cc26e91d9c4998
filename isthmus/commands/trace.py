"""`isthmus trace`: looking after traces."""

import json
import time
from pathlib import Path

import click

from isthmus.errors import explain_errors
from overlay.limits import MIB
from spark_analysis.shipped import FOLLOW_QUOTA_BYTES, Quota, read_tally
from spark_analysis.shipper import PARQUET_FOLDER, Shipment
from spark_analysis.shipper import ship as ship_folder

POLL_S = 2.0
FOLLOW_QUOTA_MB = FOLLOW_QUOTA_BYTES // MIB
QUOTA_MIN_MB = 128
"""Less would hardly hold what brokers trace within some minutes."""


def _check_quota(context: click.Context, parameter: click.Parameter, value: int | None) -> int | None:
    if value is not None and value != 0 and value < QUOTA_MIN_MB:
        raise click.BadParameter(f"{value} is too little: give at least {QUOTA_MIN_MB}, or 0 for no quota")
    return value


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
@click.option(
    "--quota-mb",
    type=int,
    callback=_check_quota,
    help="Most that shipped traces take on disk; the oldest are deleted beyond it, 0 for no quota.  "
    f"[default: {FOLLOW_QUOTA_MB} with --follow, else none]",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@explain_errors
def ship(folder: Path, out: Path | None, follow: bool, quota_mb: int | None, as_json: bool) -> None:
    """Turn closed segments into Parquet, each once, and salvage those of dead processes.

    One shipper per host; it may be killed at any time.
    """
    if quota_mb is None:
        quota_mb = FOLLOW_QUOTA_MB if follow else 0
    quota = Quota(quota_mb * MIB) if quota_mb else None
    try:
        while True:
            done = ship_folder(folder, out, quota)
            if done.segments or done.set_aside or done.deleted.segments or not follow:
                _tell(done, as_json)
            if quota is not None and done.deleted.segments:
                in_all = read_tally(out or folder / PARQUET_FOLDER).segments
                click.echo(
                    f"warning: the {done.deleted.segments} oldest segments shipped "
                    f"({done.deleted.size_bytes / MIB:.1f} MB) were deleted to keep {quota_mb} MB, "
                    f"{in_all} so far: raise --quota-mb or move older traces elsewhere in time",
                    err=True,
                )
            if not follow:
                return
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def _tell(done: Shipment, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(done.to_record()))
        return
    click.echo(
        f"{done.segments} segments with {done.records} records shipped, {done.salvaged} "
        f"of them salvaged, {done.torn_bytes} torn bytes skipped"
    )
    for problem in done.set_aside:
        click.echo(f"set aside {problem}", err=True)
