"""Segment files: closed by size and age, within the quota, whole after a kill, no harm by a full disk."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay.qos import TopicQos
from overlay.trace import (
    RECORD,
    RECORD_BYTES,
    Block,
    BlockKind,
    Event,
    SegmentHeader,
    read_blocks,
)
from runtime import tracing
from runtime.tracing import TraceRecorder, TraceSettings, TracingError, process_start


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


def recorder(folder: Path, clock: Clock, *, node: str = "edge/1", **settings: int) -> TraceRecorder:
    made = TraceRecorder(
        TraceSettings(folder, sampling=1.0, **settings),
        node,
        "edge",
        "plant",
        clock_ns=clock,
        wall_ns=lambda: 1_700_000_000_000_000_000,
    )
    made.log.define_topic(1, "valve", TopicQos())
    return made


def record(made: TraceRecorder, sequences: Iterator[int] | range) -> None:
    for sequence in sequences:
        made.log.record(Event.RECEIVED, 1, 7, sequence, peer_in=made.log.peer("router-1"))


def read(path: Path) -> tuple[SegmentHeader, list[int], list[int]]:
    """Header, sequences and kinds of blocks of a segment."""
    data = path.read_bytes()
    header, start = SegmentHeader.decode(data)
    blocks = [block for block in read_blocks(data, start) if isinstance(block, Block)]
    records = b"".join(block.payload for block in blocks if block.kind == BlockKind.RECORDS)
    return header, [values[6] for values in RECORD.iter_unpack(records)], [block.kind for block in blocks]


def wait_for(condition: object, made: TraceRecorder) -> None:
    """Flush until a condition holds; fails after 10 s."""
    assert callable(condition)
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        made.flush()
        time.sleep(0.005)


def test_what_is_recorded_is_in_a_closed_segment(tmp_path: Path, clock: Clock):
    made = recorder(tmp_path, clock)
    record(made, range(1, 4))
    made.flush()
    record(made, range(4, 6))
    made.close()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("edge_1-") and path.suffix == ".segment"
    header, sequences, kinds = read(path)
    assert (header.node, header.role, header.lan, header.sampling) == ("edge/1", "edge", "plant", 1.0)
    assert (header.pid, header.number, header.monotonic_ns) == (os.getpid(), 1, 1_000)
    assert sequences == [1, 2, 3, 4, 5]
    assert kinds[:2] == [BlockKind.TOPIC, BlockKind.PEER]
    assert made.statistics().recorded == 5
    assert made.statistics().segments == 1
    made.close()


def test_each_segment_stands_on_its_own(tmp_path: Path, clock: Clock):
    made = recorder(tmp_path, clock, segment_bytes=10 * RECORD_BYTES)
    for first in (1, 11, 21):
        record(made, range(first, first + 10))
        made.flush()
    made.close()
    paths = sorted(tmp_path.iterdir())
    assert [path.suffix for path in paths] == [".segment"] * 3
    for number, path in enumerate(paths, 1):
        header, sequences, kinds = read(path)
        assert header.number == number
        assert len(sequences) == 10
        assert kinds == [BlockKind.TOPIC, BlockKind.PEER, BlockKind.RECORDS]


def test_an_old_segment_is_closed_though_nothing_comes(tmp_path: Path, clock: Clock):
    made = recorder(tmp_path, clock, segment_age_ns=100)
    record(made, range(1, 2))
    made.flush()
    clock.now_ns += 100
    wait_for(lambda: made.statistics().segments == 1, made)
    assert [path.suffix for path in tmp_path.iterdir()] == [".segment"]
    made.close()


def test_a_node_with_nothing_to_tell_writes_nothing(tmp_path: Path, clock: Clock):
    made = recorder(tmp_path, clock)
    made.flush()
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_an_open_segment_is_locked_by_its_writer(tmp_path: Path, clock: Clock):
    made = recorder(tmp_path, clock)
    record(made, range(1, 2))
    wait_for(lambda: list(tmp_path.glob("*.open")), made)
    (path,) = tmp_path.glob("*.open")
    with path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.close()


def test_the_quota_deletes_the_oldest_and_tells(tmp_path: Path, clock: Clock):
    size = 100 * RECORD_BYTES
    made = recorder(tmp_path, clock, segment_bytes=size, quota_bytes=4 * size)
    for turn in range(8):
        record(made, range(turn * 100, turn * 100 + 100))
        made.flush()
        wait_for(lambda turn=turn: made.statistics().segments == turn + 1, made)
    made.close()
    numbers = sorted(read(path)[0].number for path in tmp_path.iterdir())
    deleted = made.statistics().deleted_segments
    assert numbers == list(range(deleted + 1, 9))
    assert deleted >= 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5 * size
    last = max(tmp_path.iterdir())
    assert read(last)[0].deleted_segments == deleted


def put(folder: Path, name: str, age_s: int = 0, size: int = 10_000) -> Path:
    """A segment that has not changed for so long."""
    path = folder / name
    path.write_bytes(bytes(size))
    changed_ns = time.time_ns() - age_s * 1_000_000_000
    os.utime(path, ns=(changed_ns, changed_ns))
    return path


def test_the_quota_spares_brokers_that_run(tmp_path: Path, clock: Clock):
    other = put(tmp_path, "edge_1-2-3-000001.segmented")
    running = put(tmp_path, f"edge_10-{process_start()}-{os.getpid()}-000001.segment")
    earlier = put(tmp_path, "edge_10-2-3-000001.segment")
    own = put(tmp_path, "edge_1-2-3-000001.segment")
    made = recorder(tmp_path, clock, segment_bytes=1_000, quota_bytes=4_000)
    record(made, range(1, 2))
    made.close()
    assert other.exists() and running.exists() and earlier.exists()
    assert not own.exists()
    assert made.statistics().deleted_segments == 1


@pytest.mark.parametrize("node", ["edge/1", f"{7:016x}"])
def test_what_clients_and_brokers_left_behind_shares_a_quota(tmp_path: Path, clock: Clock, node: str):
    """Names of clients, and of brokers that were given none, never come again: nobody else deletes theirs."""
    left = [
        put(tmp_path, f"{name}-2-3-000001.segment", age_s)
        for name, age_s in ((f"{5:016x}", 40), ("edge_host_ab12", 30), (f"{4:016x}", 20), (f"{6:016x}", 10))
    ]
    made = recorder(tmp_path, clock, node=node, segment_bytes=2_000, quota_bytes=25_000)
    record(made, range(1, 2))
    made.close()
    assert [path.exists() for path in left] == [False, False, True, True]
    (written,) = (path for path in tmp_path.iterdir() if path not in left)
    assert read(written)[0].deleted_segments == made.statistics().deleted_segments == 2


def test_clients_of_one_process_share_a_quota(tmp_path: Path, clock: Clock):
    size = 100 * RECORD_BYTES
    clients = [
        recorder(tmp_path, clock, node=f"{number:016x}", segment_bytes=size, quota_bytes=6 * size)
        for number in range(3)
    ]
    for turn in range(5):
        for made in clients:
            record(made, range(100))
            made.flush()
            wait_for(lambda made=made, turn=turn: made.statistics().segments == turn + 1, made)
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6 * size
    for made in clients:
        made.close()
    deleted = sum(made.statistics().deleted_segments for made in clients)
    assert deleted + len(list(tmp_path.iterdir())) == 15


def test_a_folder_is_looked_at_only_when_enough_was_written(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    looks = []
    real_look = tracing._find_segments
    monkeypatch.setattr(
        tracing, "_find_segments", lambda *arguments: looks.append(arguments) or real_look(*arguments)
    )
    made = recorder(tmp_path, clock, segment_bytes=RECORD_BYTES, quota_bytes=64 * 1_000)
    for turn in range(20):
        record(made, range(1))
        made.flush()
        wait_for(lambda turn=turn: made.statistics().segments == turn + 1, made)
    made.close()
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 1 < len(looks) <= 1 + written // 1_000


def test_the_quota_takes_open_segments_of_the_dead_only(tmp_path: Path, clock: Clock):
    dead = put(tmp_path, f"{5:016x}-2-3-000001.open", 20)
    living = put(tmp_path, f"{6:016x}-2-3-000001.open", 30)
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made = recorder(tmp_path, clock, node=f"{7:016x}", segment_bytes=1_000, quota_bytes=4_000)
        record(made, range(1, 2))
        made.close()
    assert living.exists() and not dead.exists()
    assert made.statistics().deleted_segments == 1


def test_drafts_of_the_dead_go_uncounted_and_those_of_the_living_stay(tmp_path: Path, clock: Clock):
    dead = put(tmp_path, f"{5:016x}-2-3-000001.new", 20)
    living = put(tmp_path, f"{6:016x}-{process_start()}-{os.getpid()}-000001.new", 30)
    made = recorder(tmp_path, clock, node=f"{7:016x}", segment_bytes=1_000, quota_bytes=4_000)
    record(made, range(1, 2))
    made.close()
    assert living.exists() and not dead.exists()
    assert made.statistics().deleted_segments == 0


def test_a_segment_that_is_being_shipped_is_not_deleted(tmp_path: Path, clock: Clock):
    """It will be gone in a moment, so nothing else has to go in its place."""
    shipped = put(tmp_path, f"{5:016x}-2-3-000001.segment", 20)
    later = put(tmp_path, f"{6:016x}-2-3-000001.segment", 10)
    with shipped.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made = recorder(tmp_path, clock, segment_bytes=2_000, quota_bytes=15_000)
        record(made, range(1, 2))
        made.close()
    assert shipped.exists() and later.exists()
    assert made.statistics().deleted_segments == 0


def test_a_quota_that_segments_do_not_fit_into_is_refused(tmp_path: Path):
    with pytest.raises(
        TracingError, match="quota_bytes is 3999, but 4 segments of 1000 bytes need 4000: give"
    ):
        TraceSettings(tmp_path, quota_bytes=3_999, segment_bytes=1_000)


def test_a_full_disk_costs_records_and_nothing_else(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """The disk takes part of a block and then no more; when it has room again the loss is told."""
    made = recorder(tmp_path, clock)
    record(made, range(1, 4))
    wait_for(lambda: list(tmp_path.glob("*.open")), made)
    real_write = os.write
    calls = []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            return real_write(descriptor, data[: len(data) // 2])
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(tracing.os, "write", full)
        record(made, range(4, 8))
        made.flush()
        wait_for(lambda: made.statistics().lost_records == 4, made)
    record(made, range(8, 10))
    made.close()
    paths = sorted(tmp_path.glob("*.segment"))
    assert [read(path)[1] for path in paths] == [[1, 2, 3], [8, 9]]
    assert read(paths[1])[0].lost_records == 4
    assert made.statistics().lost_records == 4


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path, clock: Clock):
    (tmp_path / "file").touch()
    with pytest.raises(TracingError, match="give a folder that can be written"):
        recorder(tmp_path / "file" / "traces", clock)


KILLED = """
import sys, time
from pathlib import Path
from overlay.qos import TopicQos
from overlay.trace import Event
from runtime.tracing import TraceRecorder, TraceSettings

made = TraceRecorder(
    TraceSettings(Path(sys.argv[1]), sampling=1.0, segment_bytes=50_000, quota_bytes=int(sys.argv[3])),
    sys.argv[2], "router", "", clock_ns=time.monotonic_ns, wall_ns=time.time_ns,
)
made.log.define_topic(1, "valve", TopicQos())
sequence = 0
while True:
    if made.is_behind:
        time.sleep(0.001)
        continue
    for _ in range(100):
        sequence += 1
        made.log.record(Event.RECEIVED, 1, 7, sequence)
    made.flush()
    print(made.statistics().segments, flush=True)
    time.sleep(0.005)  # the pace of a node: what no disk can follow is lost, as it should be
"""


def kill_after(folder: Path, segments: int, node: str, quota_bytes: int) -> None:
    """A process that writes traces until it has closed so many segments, and dies."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), node, str(quota_bytes)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if int(line) >= segments:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_kill_loses_no_closed_segment_and_leaves_a_readable_open_one(tmp_path: Path):
    kill_after(tmp_path, 5, "router-1", 10_000_000)
    closed = sorted(tmp_path.glob("*.segment"))
    assert len(closed) >= 5
    sequences = [sequence for path in closed for sequence in read(path)[1]]
    for path in tmp_path.glob("*.open"):
        sequences += read(path)[1]
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert sequences == list(range(1, len(sequences) + 1))


def test_clients_that_are_killed_one_after_the_other_stay_within_one_quota(tmp_path: Path):
    quota_bytes = 400_000
    for number in range(4):
        kill_after(tmp_path, 4, f"{number:016x}", quota_bytes)
        # The last block goes to a segment that was not full yet.
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= quota_bytes + 10_000
    paths = list(tmp_path.iterdir())
    names = {path.name.partition("-")[0] for path in paths}
    assert f"{0:016x}" not in names and f"{3:016x}" in names
    headers = [read(path)[0] for path in paths if path.suffix == ".segment"]
    assert max(header.deleted_segments for header in headers) > 0
