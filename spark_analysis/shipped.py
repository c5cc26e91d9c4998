"""The folder of shipped traces: files that are there whole or not at all, and a quota for them.

    OUT/rows/date=2026-01-31/<segment>.parquet
    OUT/segments/<segment>.parquet                 changed when the segment was opened, by its date on disk
    OUT/segments/deleted-by-quota.parquet          what the quota has deleted, as a row
    OUT/deleted-by-quota.json                      the same, and what is about to be deleted

What was shipped from one segment, or set aside of it, is kept or deleted as one. Before that it is
counted and named in the JSON file, and when all is gone its name is taken out: whoever comes after a
kill deletes the rest, and nothing is counted twice. The count is also a row like those of segments, so that a
report that reads `segments`, wherever they are, can tell.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from overlay.trace import SCHEMA_VERSION
from spark_analysis.errors import AnalysisError
from spark_analysis.schema import ARROW_SEGMENTS, ROWS_FOLDER, SEGMENTS_FOLDER

ASIDE_FOLDER: Final = "aside"
CLOSED_SUFFIX: Final = ".segment"
TALLY_STEM: Final = "deleted-by-quota"
"""Stands for a segment in the tally's row."""
QUOTA_NODE: Final = "shipper"
"""Stands for a node in the tally's row."""
FOLLOW_QUOTA_BYTES: Final = 10 * 2**30
"""For what is shipped on and on, unless told otherwise."""
KEPT_SHARE: Final = 0.95
"""Of the quota, when it was exceeded: so that not every segment makes all files be looked at."""
PASSES_PER_LOOK: Final = 30
"""Others may ship to the same folder: it is looked at again after so many passes."""

_PARQUET: Final = ".parquet"
_LOCK_NAME: Final = ".quota.lock"


@dataclass(frozen=True)
class Places:
    """Where the traces of one folder go."""

    folder: Path
    """That nodes write to."""
    out: Path

    @property
    def aside(self) -> Path:
        """What could not be read."""
        return self.folder / ASIDE_FOLDER

    @property
    def tally(self) -> Path:
        """What the quota has deleted."""
        return self.out / f"{TALLY_STEM}.json"


@dataclass(frozen=True)
class Deleted:
    """What a quota has deleted of shipped traces."""

    segments: int = 0
    size_bytes: int = 0
    until_ns: int = 0
    """Wall time at which the latest of them was opened."""

    def __add__(self, other: "Deleted") -> "Deleted":
        return Deleted(
            self.segments + other.segments,
            self.size_bytes + other.size_bytes,
            max(self.until_ns, other.until_ns),
        )


@dataclass(frozen=True, order=True)
class _Shipped:
    """All that is left of one segment; sorts by age."""

    opened_ns: int
    stem: str
    size_bytes: int


class Quota:
    """Keeps shipped traces below a limit. One for all passes of a shipper: it remembers how much there is."""

    def __init__(self, limit_bytes: int) -> None:
        assert limit_bytes > 0, limit_bytes
        self.limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._passes = 0

    def begin(self, places: Places) -> Deleted:
        """A pass over a folder begins."""
        look = self._passes % PASSES_PER_LOOK == 0
        self._passes += 1
        return self._keep(places) if look else Deleted()

    def add(self, places: Places, size_bytes: int) -> Deleted:
        """So much has come; delete the oldest if that is too much."""
        self._taken_bytes += size_bytes
        return self._keep(places) if self._taken_bytes > self.limit_bytes else Deleted()

    def _keep(self, places: Places) -> Deleted:
        found = sorted(_find_shipped(places))
        taken = sum(shipped.size_bytes for shipped in found)
        going: list[_Shipped] = []
        if taken > self.limit_bytes:
            for shipped in found:
                if taken <= self.limit_bytes * KEPT_SHARE:
                    break
                # Killed after it was shipped and before its segment was deleted: it would be shipped again.
                if not (places.folder / f"{shipped.stem}{CLOSED_SUFFIX}").exists():
                    going.append(shipped)
                    taken -= shipped.size_bytes
        self._taken_bytes = taken
        return _delete(places, going) if going else Deleted()


def read_tally(out: Path) -> Deleted:
    """What the quota has deleted of a folder of shipped traces so far. Raises AnalysisError."""
    return _read_tally(Places(out, out).tally)[0]


def finish_deleting(places: Places) -> None:
    """Delete what a shipper that was killed has counted as deleted."""
    if places.tally.exists():
        with _only_deleter(places.out):
            deleted, going = _read_tally(places.tally)
            if going:
                _finish(places, deleted, going)


def write_whole(path: Path, table: pa.Table, changed_ns: int | None = None) -> int:
    """Write a Parquet file that is there whole or not at all; returns its size.

    `changed_ns` is the date it has on disk, if not now.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Spark does not read files whose names begin with a dot. What a kill leaves is written over when the
    # segment, which is still there, is shipped again.
    draft = path.with_name(f".{path.name}.draft")
    try:
        pq.write_table(table, draft, compression="zstd")
        if changed_ns is not None:
            os.utime(draft, ns=(changed_ns, changed_ns))
        with draft.open("rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return size


def _find_shipped(places: Places) -> Iterator[_Shipped]:
    """Everything that counts, by the segment it came from."""
    sizes: dict[str, int] = {}
    opened_ns: dict[str, int] = {}
    # The entry in `segments` comes last: its date is the one that counts.
    files = [*places.aside.glob(f"*{CLOSED_SUFFIX}"), *(places.out / ROWS_FOLDER).glob(f"*/[!.]*{_PARQUET}")]
    for path in [*files, *(places.out / SEGMENTS_FOLDER).glob(f"[!.]*{_PARQUET}")]:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            sizes[path.stem] = sizes.get(path.stem, 0) + status.st_size
            opened_ns[path.stem] = status.st_mtime_ns
    for stem, size in sizes.items():
        if stem != TALLY_STEM:
            yield _Shipped(opened_ns[stem], stem, size)


def _delete(places: Places, going: Sequence[_Shipped]) -> Deleted:
    now = Deleted(
        len(going), sum(shipped.size_bytes for shipped in going), max(shipped.opened_ns for shipped in going)
    )
    with _only_deleter(places.out):
        before, unfinished = _read_tally(places.tally)
        stems = [*unfinished, *(shipped.stem for shipped in going)]
        _write_tally(places.tally, before + now, stems)
        _finish(places, before + now, stems)
    return now


def _finish(places: Places, deleted: Deleted, going: Iterable[str]) -> None:
    """What was counted goes."""
    row = places.out / SEGMENTS_FOLDER / f"{TALLY_STEM}{_PARQUET}"
    write_whole(row, pa.Table.from_pylist([_facts(deleted)], ARROW_SEGMENTS))
    _delete_files(places, going)
    _write_tally(places.tally, deleted, ())


def _delete_files(places: Places, stems: Iterable[str]) -> None:
    rows = places.out / ROWS_FOLDER
    dates = list(rows.iterdir()) if rows.is_dir() else []
    for stem in stems:
        # A report that reads just now says that files are missing, which they are; the next one is right.
        (places.out / SEGMENTS_FOLDER / f"{stem}{_PARQUET}").unlink(missing_ok=True)
        for date in dates:
            (date / f"{stem}{_PARQUET}").unlink(missing_ok=True)
        (places.aside / f"{stem}{CLOSED_SUFFIX}").unlink(missing_ok=True)
    for date in dates:
        with contextlib.suppress(OSError):  # not empty
            date.rmdir()


@contextlib.contextmanager
def _only_deleter(out: Path) -> Iterator[None]:
    """Shippers of different folders may have the same folder for what they ship."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / _LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_tally(path: Path) -> tuple[Deleted, list[str]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        counts = (int(found[name]) for name in ("segments", "size_bytes", "until_ns"))
        return Deleted(*counts), [str(stem) for stem in found["going"]]
    except FileNotFoundError:
        return Deleted(), []
    except (ValueError, KeyError, TypeError) as error:
        raise AnalysisError(
            f"{path} does not tell what was deleted ({error!r}): delete it to count from 0 again"
        ) from error


def _write_tally(path: Path, deleted: Deleted, going: Iterable[str]) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(asdict(deleted) | {"going": list(going)}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _facts(deleted: Deleted) -> dict[str, object]:
    return {
        "segment": TALLY_STEM,
        "schema": SCHEMA_VERSION,
        "node": QUOTA_NODE,
        "role": QUOTA_NODE,
        "lan": "",
        "host": "",
        "clock": "",
        "number": 0,
        "opened_at": datetime.fromtimestamp(deleted.until_ns / 1e9, UTC),
        "records": 0,
        "lost_records": 0,
        "deleted_segments": deleted.segments,
        "torn_bytes": 0,
        "salvaged": False,
    }
