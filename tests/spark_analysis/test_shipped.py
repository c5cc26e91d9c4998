"""The quota for what is shipped: the oldest goes, whole, counted and told, whoever is killed when."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from overlay.trace import RECORD_BYTES, Event
from runtime.tracing import TraceRecorder, TraceSettings
from spark_analysis import shipped
from spark_analysis.errors import AnalysisError
from spark_analysis.schema import ARROW_SEGMENTS
from spark_analysis.shipped import PASSES_PER_LOOK, TALLY_STEM, Deleted, Quota, read_tally
from spark_analysis.shipper import ship, tell_deleted
from tests.spark_analysis.nodes import MS, WALL_NS, Node

RECORDS = 20
SECOND_NS = 1_000 * MS


def write(folder: Path, numbers: range, name: str = "router-1", **changes: object) -> None:
    """Segments of a node that were opened a second after each other."""
    node = Node(name, "router")
    for number in numbers:
        for sequence in range(number * RECORDS, (number + 1) * RECORDS):
            node.saw(Event.RECEIVED, 7, sequence, in_ns=MS)
        node.write(folder, number, **({"wall_ns": WALL_NS + number * SECOND_NS} | changes))


def rows_of(folder: Path, out: str = "parquet") -> list[int]:
    return sorted(
        row["sequence"]
        for path in folder.glob(f"{out}/rows/*/[!.]*")
        for row in pq.ParquetFile(path).read().to_pylist()
    )


def entries_of(folder: Path) -> list[dict[str, object]]:
    paths = sorted(folder.glob("parquet/segments/[!.]*"))
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def stems_of(folder: Path, kind: str) -> set[str]:
    return {path.stem for path in folder.glob(f"parquet/{kind}/[!.]*.parquet")} - {TALLY_STEM}


def sequences(numbers: range) -> list[int]:
    return list(range(numbers.start * RECORDS, numbers.stop * RECORDS))


@pytest.fixture(scope="module")
def one_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What one such segment takes when it is shipped."""
    folder = tmp_path_factory.mktemp("one")
    write(folder, range(1, 2))
    ship(folder)
    return sum(path.stat().st_size for path in folder.glob("parquet/**/*.parquet"))


def test_the_oldest_go_whole_and_it_is_counted_and_told(tmp_path: Path, one_bytes: int):
    write(tmp_path, range(1, 9))
    done = ship(tmp_path, quota=Quota(5 * one_bytes + one_bytes // 2))
    assert done.segments == 8
    assert stems_of(tmp_path, "rows/*") == stems_of(tmp_path, "segments")
    kept = len(stems_of(tmp_path, "segments"))
    assert kept == 5 and done.deleted.segments == 3
    assert rows_of(tmp_path) == sequences(range(4, 9))
    assert done.to_record()["deleted_segments"] == 3
    assert abs(done.deleted.size_bytes - 3 * one_bytes) < one_bytes
    assert read_tally(tmp_path / "parquet") == done.deleted
    assert done.deleted.until_ns == WALL_NS + 3 * SECOND_NS
    # The next shipper goes on counting.
    write(tmp_path, range(9, 11))
    done = ship(tmp_path, quota=Quota(5 * one_bytes + one_bytes // 2))
    assert done.deleted.segments == 2
    assert read_tally(tmp_path / "parquet").segments == 5
    others, told = tell_deleted(entries_of(tmp_path))
    assert [row["number"] for row in others] == [6, 7, 8, 9, 10]
    assert told == [
        "5 shipped segments, opened until 2023-11-14 22:13:25, were deleted by `isthmus trace ship` to keep "
        "its quota: what they held is missing here"
    ]


def test_the_tally_is_a_row_like_others(tmp_path: Path, one_bytes: int):
    write(tmp_path, range(1, 4))
    ship(tmp_path, quota=Quota(2 * one_bytes + one_bytes // 2))
    (path,) = tmp_path.glob(f"parquet/segments/{TALLY_STEM}.parquet")
    assert pq.read_schema(path) == ARROW_SEGMENTS
    (row,) = pq.ParquetFile(path).read().to_pylist()
    assert (row["node"], row["deleted_segments"], row["records"], row["problem"]) == ("shipper", 1, 0, None)


def test_what_was_opened_first_goes_first_whatever_its_name(tmp_path: Path, one_bytes: int):
    """A heap of segments that waited is shipped by name: that says nothing about their age."""
    write(tmp_path, range(11, 14), "a-node")
    write(tmp_path, range(1, 4), "z-node")
    ship(tmp_path)
    ship(tmp_path, quota=Quota(3 * one_bytes + one_bytes // 2))
    assert rows_of(tmp_path) == sequences(range(11, 14))


def test_what_was_set_aside_counts_and_goes_too(tmp_path: Path, one_bytes: int):
    write(tmp_path, range(1, 3), schema=9)
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, ns=(WALL_NS + number, WALL_NS + number))
    write(tmp_path, range(3, 5))
    assert len(ship(tmp_path).set_aside) == 2
    aside = tmp_path / "aside"
    first = min(aside.iterdir())
    entry = tmp_path / "parquet" / "segments" / f"{first.stem}.parquet"
    in_all = sum(path.stat().st_size for path in [*tmp_path.rglob("*.parquet"), *aside.iterdir()])
    done = ship(tmp_path, quota=Quota(in_all - 1))
    assert done.deleted == Deleted(1, done.deleted.size_bytes, WALL_NS)
    assert not first.exists() and not entry.exists()
    assert len(list(aside.iterdir())) == 1
    assert rows_of(tmp_path) == sequences(range(3, 5))


def test_without_a_quota_nothing_is_deleted(tmp_path: Path):
    write(tmp_path, range(1, 5))
    assert ship(tmp_path).deleted == Deleted()
    assert rows_of(tmp_path) == sequences(range(1, 5))
    assert read_tally(tmp_path / "parquet") == Deleted()
    assert tell_deleted(entries_of(tmp_path))[1] == []


def test_folders_of_days_that_are_gone_go_too(tmp_path: Path, one_bytes: int):
    write(tmp_path, range(1, 3), wall_ns=WALL_NS - 86_400 * SECOND_NS)
    write(tmp_path, range(3, 6))
    ship(tmp_path, quota=Quota(2 * one_bytes + one_bytes // 2))
    assert [path.name for path in (tmp_path / "parquet" / "rows").iterdir()] == ["date=2023-11-14"]


def test_what_was_shipped_but_is_still_there_is_not_deleted_first(tmp_path: Path, one_bytes: int):
    """Killed before the segment was deleted: without its Parquet file it would be shipped again."""
    write(tmp_path, range(1, 4))
    first = min(tmp_path.iterdir())
    data = first.read_bytes()
    ship(tmp_path)
    first.write_bytes(data)
    done = ship(tmp_path, quota=Quota(2 * one_bytes + one_bytes // 2))
    assert done.segments == 0
    assert not first.exists()
    assert done.deleted.segments == 1
    assert rows_of(tmp_path) == sequences(range(1, 2)) + sequences(range(3, 4))


def test_what_others_ship_is_noticed_after_some_passes(tmp_path: Path, one_bytes: int):
    quota = Quota(2 * one_bytes + one_bytes // 2)
    ship(tmp_path, quota=quota)
    write(tmp_path, range(1, 5))
    ship(tmp_path)
    passes = 1
    while not ship(tmp_path, quota=quota).deleted.segments:
        passes += 1
        assert passes <= PASSES_PER_LOOK
    assert rows_of(tmp_path) == sequences(range(3, 5))


def test_folders_are_not_looked_through_with_every_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_bytes: int
):
    looks = []
    real_look = shipped._find_shipped
    monkeypatch.setattr(
        shipped, "_find_shipped", lambda places: looks.append(places) or list(real_look(places))
    )
    write(tmp_path, range(1, 31))
    ship(tmp_path, quota=Quota(100 * one_bytes))
    assert len(looks) == 1


def test_a_tally_that_cannot_be_read_is_told_with_the_remedy(tmp_path: Path):
    write(tmp_path, range(1, 2))
    ship(tmp_path)
    (tmp_path / "parquet" / f"{TALLY_STEM}.json").write_text("{}")
    with pytest.raises(AnalysisError, match="delete it to count from 0 again"):
        ship(tmp_path)


KILLED_AT_EACH_STEP = """
import os, shutil, signal, sys
from pathlib import Path
from spark_analysis.shipped import Quota
from spark_analysis.shipper import ship

source, limit = Path(sys.argv[1]), int(sys.argv[2])
step = 0
while True:
    step += 1
    folder = source.with_name(f"step-{step:03}")
    shutil.copytree(source, folder)
    child = os.fork()
    if child == 0:
        left = step
        def counted(real):
            def call(*arguments, **options):
                global left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)
            return call
        for name in ("unlink", "replace", "rename", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        ship(folder, quota=Quota(limit))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        sys.exit(status)
"""


def test_a_shipper_killed_at_any_step_deletes_no_more_and_counts_and_ships_nothing_twice(
    tmp_path: Path, one_bytes: int
):
    """The process dies by SIGKILL before each of its changes to the folder, once before every one."""
    limit = 2 * one_bytes + one_bytes // 2
    source = tmp_path / "source"
    write(source, range(1, 3))
    ship(source)
    write(source, range(3, 5))
    (source / "router-1-1-1-000005.segment").write_bytes(b"no segment at all")
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(source, undisturbed)
    ship(undisturbed, quota=Quota(limit))
    expected = rows_of(undisturbed)
    deleted = read_tally(undisturbed / "parquet")
    assert deleted.segments >= 2
    subprocess.run([sys.executable, "-c", KILLED_AT_EACH_STEP, str(source), str(limit)], check=True)
    folders = sorted(tmp_path.glob("step-*"))
    # Each segment is renamed twice and deleted once, and each that goes is deleted twice.
    assert len(folders) > 20
    halves = 0
    for folder in folders:
        found = rows_of(folder)
        assert len(found) == len(set(found))
        halves += stems_of(folder, "rows/*") - stems_of(folder, "segments") != set()
        ship(folder, quota=Quota(limit))
        assert rows_of(folder) == expected, folder.name
        assert stems_of(folder, "segments") == stems_of(undisturbed, "segments")
        assert read_tally(folder / "parquet") == deleted, folder.name
        assert not list(folder.glob("*.segment"))
        assert not list(folder.rglob(".*.draft"))
        assert ship(folder, quota=Quota(limit)).deleted == Deleted()
    # Some died in the middle of a segment that was going.
    assert halves >= 2


def test_a_later_shipper_without_a_quota_finishes_too(tmp_path: Path, one_bytes: int):
    """A report ships as well, and must not read half of what was going."""
    write(tmp_path, range(1, 4))
    ship(tmp_path)
    places = shipped.Places(tmp_path, tmp_path / "parquet")
    shipped._write_tally(places.tally, Deleted(1, one_bytes, WALL_NS), ["router-1-1-1-000001"])
    assert ship(tmp_path).deleted == Deleted()
    assert rows_of(tmp_path) == sequences(range(2, 4))
    assert read_tally(places.out) == Deleted(1, one_bytes, WALL_NS)
    assert tell_deleted(entries_of(tmp_path))[1][0].startswith("1 shipped segments")


def test_nodes_and_shipper_delete_and_ship_at_once_and_every_segment_has_one_fate(tmp_path: Path):
    """A node with a quota so small that it deletes all the time, and a shipper that is always at work."""
    size = 20 * RECORD_BYTES
    settings = TraceSettings(tmp_path, sampling=1.0, quota_bytes=4 * size, segment_bytes=size)
    node = TraceRecorder.here(settings, "edge-1", "edge")
    shipments = []
    counter = itertools.count()
    while len(shipments) < 40 or not node.statistics().deleted_segments:
        for _ in range(5):
            for sequence in itertools.islice(counter, 20):
                node.log.record(Event.RECEIVED, 1, 7, sequence)
            node.flush()
        # The node's thread goes on to write and to delete meanwhile.
        shipments.append(ship(tmp_path))
        assert len(shipments) < 4_000
    node.close()
    shipments.append(ship(tmp_path))
    statistics = node.statistics()
    assert statistics.lost_records == 0
    assert sum(done.segments for done in shipments) + statistics.deleted_segments == statistics.segments
    found = rows_of(tmp_path)
    assert len(found) == len(set(found)) == sum(done.records for done in shipments)
