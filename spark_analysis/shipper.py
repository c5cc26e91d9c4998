"""Turns the segments of a trace folder into Parquet, once each.

    FOLDER/<node>-....segment          closed: shipped, then deleted
    FOLDER/<node>-....open             being written; salvaged if its writer is dead
    FOLDER/aside/                      what could not be read, with the reason in `segments`
    FOLDER/parquet/rows/date=2026-01-31/<segment>.parquet
    FOLDER/parquet/segments/<segment>.parquet

A segment's Parquet file has the segment's name. It is written aside and renamed, and only then
is the segment deleted. A shipper that is killed at any moment leaves a segment or its Parquet
file or both; in the last case the next one finds the file there and only deletes the segment.
So nothing is lost and nothing counted twice. A lock keeps two shippers from one folder.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from overlay.trace import SegmentHeader, TraceError
from spark_analysis.errors import AnalysisError
from spark_analysis.schema import ARROW_SEGMENTS, ROWS_FOLDER, SEGMENTS_FOLDER
from spark_analysis.segments import Segment, read_segment

PARQUET_FOLDER: Final = "parquet"
ASIDE_FOLDER: Final = "aside"
OPEN_SUFFIX: Final = ".open"
CLOSED_SUFFIX: Final = ".segment"
_LOCK_NAME: Final = ".shipper.lock"


@dataclass
class Shipment:
    """What one pass over a trace folder did."""

    segments: int = 0
    records: int = 0
    salvaged: int = 0
    """Open segments of dead processes among them."""
    torn_bytes: int = 0
    """Of records that were not finished."""
    set_aside: list[str] = field(default_factory=list)
    """Segments that could not be read, each with the reason."""

    def to_record(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "segments": self.segments,
            "records": self.records,
            "salvaged": self.salvaged,
            "torn_bytes": self.torn_bytes,
            "set_aside": self.set_aside,
        }


def has_segments(folder: Path) -> bool:
    """Whether there is something to ship."""
    return any(path.suffix in {OPEN_SUFFIX, CLOSED_SUFFIX} for path in folder.iterdir())


def ship(folder: Path, out: Path | None = None) -> Shipment:
    """Ship every closed segment, and every open one whose writer is dead. Raises AnalysisError."""
    if not folder.is_dir():
        raise AnalysisError(f"{folder} is no folder: give the one that the nodes write their traces to")
    shipment = Shipment()
    try:
        with _only_shipper(folder):
            salvaged = _salvage(folder)
            for path in sorted(folder.glob(f"*{CLOSED_SUFFIX}")):
                _ship_segment(path, out or folder / PARQUET_FOLDER, path.name in salvaged, shipment)
    except OSError as error:
        raise AnalysisError(
            f"traces in {folder} cannot be shipped ({error}): free space or allow writing, then ship again"
        ) from error
    return shipment


@contextlib.contextmanager
def _only_shipper(folder: Path) -> Iterator[None]:
    with (folder / _LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _salvage(folder: Path) -> set[str]:
    """Close the open segments whose writers are dead; returns their names."""
    salvaged = set()
    for path in sorted(folder.glob(f"*{OPEN_SUFFIX}")):
        closed = path.with_suffix(CLOSED_SUFFIX)
        # The writer may close it at any moment: then it is gone, and there as a closed one.
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.rename(closed)
            salvaged.add(closed.name)
    return salvaged


def _ship_segment(path: Path, out: Path, salvaged: bool, shipment: Shipment) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return  # its node deleted it to keep its quota
    try:
        segment = read_segment(data)
    except TraceError as error:
        facts = _facts(path.name, salvaged=salvaged, problem=str(error))
        _write(out / SEGMENTS_FOLDER / f"{path.stem}.parquet", pa.Table.from_pylist([facts], ARROW_SEGMENTS))
        aside = path.parent / ASIDE_FOLDER
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)
        shipment.set_aside.append(f"{path.name}: {error}")
        return
    header = segment.header
    date = datetime.fromtimestamp(header.wall_ns / 1e9, UTC).date()
    rows = out / ROWS_FOLDER / f"date={date}" / f"{path.stem}.parquet"
    if not rows.exists():
        facts = _facts(path.name, header, segment, salvaged=salvaged)
        _write(out / SEGMENTS_FOLDER / rows.name, pa.Table.from_pylist([facts], ARROW_SEGMENTS))
        _write(rows, segment.rows)
        shipment.segments += 1
        shipment.records += segment.rows.num_rows
        shipment.salvaged += salvaged
        shipment.torn_bytes += segment.torn_bytes
    path.unlink()


def _facts(
    name: str,
    header: SegmentHeader | None = None,
    segment: Segment | None = None,
    *,
    salvaged: bool,
    problem: str | None = None,
) -> dict[str, Any]:
    facts: dict[str, Any] = {"segment": name, "salvaged": salvaged, "problem": problem}
    if header is not None and segment is not None:
        facts |= {
            "schema": header.schema,
            "node": header.node,
            "role": header.role,
            "lan": header.lan,
            "host": header.host,
            "clock": header.clock,
            "number": header.number,
            "opened_at": datetime.fromtimestamp(header.wall_ns / 1e9, UTC),
            "sampling": float(header.sampling),
            "records": segment.rows.num_rows,
            "lost_records": header.lost_records,
            "deleted_segments": header.deleted_segments,
            "torn_bytes": segment.torn_bytes,
        }
    return facts


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Spark does not read files whose names begin with a dot.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, draft, compression="zstd")
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
