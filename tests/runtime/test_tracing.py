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
from runtime.tracing import TraceRecorder, TraceSettings, TracingError


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


def recorder(folder: Path, clock: Clock, **settings: int) -> TraceRecorder:
    made = TraceRecorder(
        TraceSettings(folder, sampling=1.0, **settings),
        "edge/1",
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


def test_the_quota_spares_other_nodes(tmp_path: Path, clock: Clock):
    other = tmp_path / "edge_1-2-3-000001.segmented"
    other.write_bytes(bytes(10_000))
    foreign = tmp_path / "edge_10-2-3-000001.segment"
    foreign.write_bytes(bytes(10_000))
    own = tmp_path / "edge_1-2-3-000001.segment"
    own.write_bytes(bytes(10_000))
    made = recorder(tmp_path, clock, segment_bytes=1_000, quota_bytes=4_000)
    record(made, range(1, 2))
    made.close()
    assert other.exists() and foreign.exists()
    assert not own.exists()


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
    TraceSettings(Path(sys.argv[1]), sampling=1.0, segment_bytes=50_000),
    "router-1", "router", "", clock_ns=time.monotonic_ns, wall_ns=time.time_ns,
)
made.log.define_topic(1, "valve", TopicQos())
sequence = 0
while True:
    for _ in range(100):
        sequence += 1
        made.log.record(Event.RECEIVED, 1, 7, sequence)
    made.flush()
    print(made.statistics().segments, flush=True)
    time.sleep(0.005)  # the pace of a node: what no disk can follow is lost, as it should be
"""


def test_a_kill_loses_no_closed_segment_and_leaves_a_readable_open_one(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if int(line) >= 5:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
    closed = sorted(tmp_path.glob("*.segment"))
    assert len(closed) >= 5
    sequences = [sequence for path in closed for sequence in read(path)[1]]
    for path in tmp_path.glob("*.open"):
        sequences += read(path)[1]
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert sequences == list(range(1, len(sequences) + 1))
