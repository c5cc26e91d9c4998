"""Turns the segments of a trace folder into Parquet, once each.

    FOLDER/<node>-....segment          closed: shipped, then deleted
    FOLDER/<node>-....open             being written; salvaged if its writer is dead
    FOLDER/aside/                      what could not be read, with the reason in `segments`
    FOLDER/parquet/rows/date=2026-01-31/<segment>.parquet
    FOLDER/parquet/segments/<segment>.parquet
    FOLDER/parquet/segments/deleted-by-quota.parquet

A segment's Parquet file has the segment's name. It is written aside and renamed, and only then
is the segment deleted. A shipper that is killed at any moment leaves a segment or its Parquet
file or both; in the last case the next one finds the file there and only deletes the segment.
So nothing is lost and nothing counted twice. A lock keeps two shippers from one folder. A segment
is locked while it is shipped, so that no node deletes it just then to keep its quota.

A quota for what is shipped deletes the oldest, rows and all else of a segment at once, and counts
(`spark_analysis.shipped`); without one nothing is deleted.
"""

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from overlay.trace import SegmentHeader, TraceError
from spark_analysis.errors import AnalysisError
from spark_analysis.schema import ARROW_SEGMENTS, ROWS_FOLDER, SEGMENTS_FOLDER
from spark_analysis.segments import Segment, read_segment
from spark_analysis.shipped import (
    CLOSED_SUFFIX,
    TALLY_STEM,
    Deleted,
    Places,
    Quota,
    finish_deleting,
    write_whole,
)

PARQUET_FOLDER: Final = "parquet"
OPEN_SUFFIX: Final = ".open"
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
    deleted: Deleted = field(default_factory=Deleted)
    """By the quota for what is shipped."""

    def to_record(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "segments": self.segments,
            "records": self.records,
            "salvaged": self.salvaged,
            "torn_bytes": self.torn_bytes,
            "set_aside": self.set_aside,
            "deleted_segments": self.deleted.segments,
            "deleted_bytes": self.deleted.size_bytes,
        }


def has_segments(folder: Path) -> bool:
    """Whether there is something to ship."""
    return any(path.suffix in {OPEN_SUFFIX, CLOSED_SUFFIX} for path in folder.iterdir())


def tell_deleted(segments: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Split rows of `segments`: those of segments, and what a quota deleted of them, in a sentence."""
    others = [row for row in segments if row["segment"] != TALLY_STEM]
    told = [
        f"{row['deleted_segments']} shipped segments, opened until {row['opened_at']:%Y-%m-%d %H:%M:%S}, "
        "were deleted by `isthmus trace ship` to keep its quota: what they held is missing here"
        for row in segments
        if row["segment"] == TALLY_STEM
    ]
    return others, told


def ship(folder: Path, out: Path | None = None, quota: Quota | None = None) -> Shipment:
    """Ship every closed segment, and every open one whose writer is dead. Raises AnalysisError.

    With a quota, the oldest that was shipped is deleted beyond it; give the same one to every pass.
    """
    if not folder.is_dir():
        raise AnalysisError(f"{folder} is no folder: give the one that the nodes write their traces to")
    shipment = Shipment()
    places = Places(folder, out or folder / PARQUET_FOLDER)
    try:
        with _only_shipper(folder):
            finish_deleting(places)
            salvaged = _salvage(folder)
            if quota is not None:
                shipment.deleted += quota.begin(places)
            for path in sorted(folder.glob(f"*{CLOSED_SUFFIX}")):
                size_bytes = _ship_segment(path, places, path.name in salvaged, shipment)
                if quota is not None and size_bytes:
                    shipment.deleted += quota.add(places, size_bytes)
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


def _ship_segment(path: Path, places: Places, salvaged: bool, shipment: Shipment) -> int:
    """Returns how much was written."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return _ship_locked(path, file.read(), places, salvaged, shipment)
    return 0  # its node deleted it to keep its quota


def _ship_locked(path: Path, data: bytes, places: Places, salvaged: bool, shipment: Shipment) -> int:
    entry = places.out / SEGMENTS_FOLDER / f"{path.stem}.parquet"
    try:
        segment = read_segment(data)
    except TraceError as error:
        facts = _facts(path.name, salvaged=salvaged, problem=str(error))
        size_bytes = _write_facts(entry, facts, path.stat().st_mtime_ns)
        places.aside.mkdir(exist_ok=True)
        path.rename(places.aside / path.name)
        shipment.set_aside.append(f"{path.name}: {error}")
        return size_bytes + len(data)
    header = segment.header
    date = datetime.fromtimestamp(header.wall_ns / 1e9, UTC).date()
    rows = places.out / ROWS_FOLDER / f"date={date}" / entry.name
    size_bytes = 0
    if not rows.exists():
        facts = _facts(path.name, header, segment, salvaged=salvaged)
        size_bytes = _write_facts(entry, facts, header.wall_ns)
        size_bytes += write_whole(rows, segment.rows)
        shipment.segments += 1
        shipment.records += segment.rows.num_rows
        shipment.salvaged += salvaged
        shipment.torn_bytes += segment.torn_bytes
    path.unlink()
    return size_bytes


def _write_facts(entry: Path, facts: dict[str, Any], opened_ns: int) -> int:
    """The date on disk tells a quota how old the segment is."""
    return write_whole(entry, pa.Table.from_pylist([facts], ARROW_SEGMENTS), opened_ns)


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
