"""Writing a node's trace to segment files, off the hot path.

The core appends records to an `overlay.trace.TraceLog`. The node calls `flush` on its event loop
a few times a second: that takes the bytes out of the log and hands them to a thread of the
recorder, which alone touches the disk. A segment is `<node>-<start>-<number>.open` while it
grows and `.segment` once it is closed, by size or by age; readers take closed ones.

What is safe: after a kill of the process, everything handed to the system, that is all but the
last flush interval; after a loss of power, every closed segment, since a segment is synced
before it gets its final name. A reader knows that the writer of an open segment is dead when it
can lock the file.

A disk that is full or gone never disturbs the node: records are counted as lost, and told in the
header of the next segment that can be written. So is what the disk quota deleted.

The quota is for the segments of one broker, by its name, also those of its earlier processes. All
clients of a folder, living and dead, share one quota, since their names never come again, and so do
brokers that no longer run. Whoever deletes a segment locks it first: so does its writer while it is open and
a shipper while it reads it, and nobody takes it from them.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Self

from overlay.limits import DRIFT_PPM, MIB, SECOND_NS
from overlay.trace import (
    RECORD_BYTES,
    BlockKind,
    Sampling,
    SegmentHeader,
    TraceLog,
    block_header,
)
from overlay.tracer import Tracer
from runtime.errors import RuntimeShellError

log = logging.getLogger("isthmus.tracing")

DEFAULT_SAMPLING: Final = 0.01
FLUSH_INTERVAL_S: Final = 0.25
"""How often a node calls `TraceRecorder.flush`: what a kill can cost."""
SEGMENT_MAX_BYTES: Final = 32 * MIB
SEGMENT_MAX_AGE_NS: Final = 10 * SECOND_NS
"""A segment is closed after this time, so that a live view is not far behind."""
QUOTA_BYTES: Final = 1024 * MIB
"""Segments of one broker on disk, or of all clients; the oldest are deleted beyond it."""
QUOTA_MIN_SEGMENTS: Final = 4
"""So many segments of full size a quota must have room for."""
QUOTA_MIN_BYTES: Final = QUOTA_MIN_SEGMENTS * SEGMENT_MAX_BYTES
QUOTA_LOOKS: Final = 64
"""A process looks at the folder again when it has closed this part of the quota."""
WAITING_MAX_CHUNKS: Final = 8
"""Flushes of one node that may wait for the disk."""
DRAFT_SUFFIX: Final = ".new"
"""Of a segment that has no records yet; only a kill in that moment leaves one."""
OPEN_SUFFIX: Final = ".open"
CLOSED_SUFFIX: Final = ".segment"

_CLIENT_NAME: Final = re.compile(r"[0-9a-f]{16}")
"""A client's node name is its random incarnation."""
_SEGMENT_NAME: Final = re.compile(
    rf"(.+)-(\d+)-(\d+)-\d+({'|'.join(map(re.escape, (DRAFT_SUFFIX, OPEN_SUFFIX, CLOSED_SUFFIX)))})"
)
"""Node, start and id of its process, suffix."""

assert QUOTA_BYTES >= QUOTA_MIN_BYTES


class TracingError(RuntimeShellError):
    """A trace folder or setting that cannot be used at all."""


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """What became of a node's records since it started."""

    recorded: int
    lost_records: int
    """For want of room in memory or on disk."""
    segments: int
    """Closed."""
    deleted_segments: int
    """By the quota."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where and how much to trace."""

    folder: Path
    sampling: float = DEFAULT_SAMPLING
    quota_bytes: int = QUOTA_BYTES
    """For the segments of a broker, or of all clients that trace to this folder."""
    segment_bytes: int = SEGMENT_MAX_BYTES
    segment_age_ns: int = SEGMENT_MAX_AGE_NS

    def __post_init__(self) -> None:
        """Raises TracingError for a quota that segments do not fit into."""
        least = QUOTA_MIN_SEGMENTS * self.segment_bytes
        if self.quota_bytes < least:
            raise TracingError(
                f"quota_bytes is {self.quota_bytes}, but {QUOTA_MIN_SEGMENTS} segments of "
                f"{self.segment_bytes} bytes need {least}: give at least that much, or smaller segment_bytes"
            )


@dataclass(frozen=True, slots=True)
class _Chunk:
    writer: "_Writer"
    new_tables: bytes
    all_tables: bytes
    """Written instead if this chunk starts a segment."""
    records: bytes
    now_ns: int
    lost_records: int
    close: bool
    written: threading.Event = field(default_factory=threading.Event)


class TraceRecorder:
    """Owns the log of one node and the thread that writes it."""

    def __init__(
        self,
        settings: TraceSettings,
        node: str,
        role: str,
        lan: str,
        *,
        clock_ns: Callable[[], int],
        wall_ns: Callable[[], int],
    ) -> None:
        """Raises TracingError if the folder cannot be made."""
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TracingError(
                f"traces cannot go to {settings.folder} ({error.strerror}): give a folder that can be written"
            ) from error
        self.log = TraceLog(Sampling(settings.sampling))
        self._clock_ns = clock_ns
        self._writer = _Writer(settings, node, role, lan, clock_ns, wall_ns)
        self._handed = 0
        self._closed = False
        self._disk = _Disk.join()

    @classmethod
    def here(cls, settings: TraceSettings, node: str, role: str, lan: str = "") -> Self:
        """A recorder on this machine's clocks. Raises TracingError."""
        return cls(settings, node, role, lan, clock_ns=time.monotonic_ns, wall_ns=time.time_ns)

    def flush(self) -> None:
        """Hand what was recorded to the disk's thread; call it on the node's own thread."""
        if self._handed - self._writer.chunks < WAITING_MAX_CHUNKS:
            self._disk.put(self._next_chunk(close=False))
        # Else the disk is slower than the node: what waits stays in the log, which counts what it loses.

    @property
    def is_behind(self) -> bool:
        """Something handed over is not on disk yet."""
        return self._handed > self._writer.chunks

    async def flush_regularly(self) -> None:
        """Flush until cancelled; on the node's own event loop."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            self.flush()

    def close(self) -> None:
        """Write all and close the segment; returns when it is on disk."""
        if not self._closed:
            self._closed = True
            chunk = self._next_chunk(close=True)
            self._disk.put(chunk)
            chunk.written.wait()
            self._disk.leave()

    def statistics(self) -> TraceStatistics:
        """Counts since the start."""
        writer = self._writer
        return TraceStatistics(
            recorded=self.log.recorded,
            lost_records=self.log.lost + writer.lost_records,
            segments=writer.closed_segments,
            deleted_segments=writer.deleted_segments,
        )

    def _next_chunk(self, *, close: bool) -> _Chunk:
        new_tables, records = self.log.take()
        self._handed += 1
        return _Chunk(
            self._writer, new_tables, self.log.tables(), records, self._clock_ns(), self.log.lost, close
        )


class _Disk:
    """The one thread of a process that writes segments, however many nodes the process has."""

    _lock = threading.Lock()
    _current: "_Disk | None" = None

    def __init__(self) -> None:
        self._users = 0
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="traces", daemon=True)
        self._thread.start()

    @classmethod
    def join(cls) -> "_Disk":
        """Use the thread; it is started for the first user."""
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._current._users += 1
            return cls._current

    def leave(self) -> None:
        """Use the thread no longer; it ends with its last user."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            _Disk._current = None
        self._chunks.put(None)
        self._thread.join()

    def put(self, chunk: _Chunk) -> None:
        """Have a chunk written."""
        self._chunks.put(chunk)

    def _write(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            try:
                chunk.writer.write(chunk)
            except OSError as error:
                chunk.writer.lose(chunk, error)
            finally:
                chunk.writer.chunks += 1
                chunk.written.set()


class _Writer:
    """Segment files of one node. Only the recorder's thread calls it."""

    _closed_bytes: ClassVar[dict[tuple[Path, str], int]] = {}
    """Of this process since it last looked at the quota, by folder and whose quota it is."""

    def __init__(
        self,
        settings: TraceSettings,
        node: str,
        role: str,
        lan: str,
        clock_ns: Callable[[], int],
        wall_ns: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._node = node
        self._role = role
        self._lan = lan
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._host = host_clock()
        self._clock = f"{self._host}/{process_start()}"
        name = file_name_of(node)
        self._stem = f"{name}-{process_start()}-{os.getpid()}"
        self._broker = "" if _CLIENT_NAME.fullmatch(name) else name
        # All clients of a folder share a quota, and within a process the looks at it.
        self._quota_key = settings.folder, self._broker
        self._file: int | None = None
        self._path = Path()
        self._number = 0
        self._written = 0
        self._opened_ns = 0
        self.chunks = 0
        """Written or lost so far."""
        self.lost_records = 0
        self.closed_segments = 0
        self.deleted_segments = 0

    def write(self, chunk: _Chunk) -> None:
        """Append; opens and closes segments as needed. Raises OSError with the file as it was before."""
        if chunk.records:
            if self._file is None:
                self._open(chunk)
            else:
                self._append(chunk.new_tables)
            self._append(block_header(BlockKind.RECORDS, chunk.records), chunk.records)
        elif self._file is not None:
            self._append(chunk.new_tables)
        if self._file is not None:
            full = self._written >= self._settings.segment_bytes
            old = chunk.now_ns - self._opened_ns >= self._settings.segment_age_ns
            if full or old or chunk.close:
                self._close()

    def lose(self, chunk: _Chunk, error: OSError) -> None:
        """The disk refused a chunk."""
        lost = len(chunk.records) // RECORD_BYTES
        if lost and not self.lost_records:
            log.error("traces cannot be written", extra={"error": str(error), "path": str(self._path)})
        self.lost_records += lost
        # Table entries of the chunk are lost with it: only a new segment, which repeats all, is whole.
        with contextlib.suppress(OSError):
            self._close()

    def _open(self, chunk: _Chunk) -> None:
        self._keep_quota()
        self._number += 1
        self._path = self._settings.folder / f"{self._stem}-{self._number:06}{OPEN_SUFFIX}"
        header = SegmentHeader(
            node=self._node,
            role=self._role,
            lan=self._lan,
            host=self._host,
            clock=self._clock,
            pid=os.getpid(),
            number=self._number,
            wall_ns=self._wall_ns(),
            monotonic_ns=self._clock_ns(),
            sampling=self._settings.sampling,
            lost_records=self.lost_records + chunk.lost_records,
            deleted_segments=self.deleted_segments,
        )
        # Locked before it gets its name: whoever can lock an open segment knows that we are dead.
        draft = self._path.with_suffix(DRAFT_SUFFIX)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._written = 0
            self._opened_ns = chunk.now_ns
            self._file = descriptor
            self._append(header.encode(), chunk.all_tables)
            draft.rename(self._path)
        except OSError:
            self._file = None
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise

    def _append(self, *parts: bytes | bytearray) -> None:
        assert self._file is not None
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[os.write(self._file, view) :]
        except OSError:
            # A full disk takes a part: cut it off, so that the segment ends with a whole block.
            os.ftruncate(self._file, self._written)
            os.lseek(self._file, self._written, os.SEEK_SET)
            raise
        self._written += sum(map(len, parts))

    def _close(self) -> None:
        if self._file is None:
            return
        descriptor, self._file = self._file, None
        try:
            os.fsync(descriptor)
            self._path.rename(self._path.with_suffix(CLOSED_SUFFIX))
            self.closed_segments += 1
        finally:
            os.close(descriptor)
            if self._quota_key in self._closed_bytes:
                self._closed_bytes[self._quota_key] += self._written

    def _keep_quota(self) -> None:
        """Delete the oldest segments beyond the quotas that are this node's business.

        To look at every file of a folder takes a while if it has thousands: it is done when it may matter.
        """
        unseen = self._settings.quota_bytes // QUOTA_LOOKS
        if self._closed_bytes.get(self._quota_key, unseen) < unseen:
            return
        self._closed_bytes[self._quota_key] = 0
        own, shared = _find_segments(self._settings.folder, self._broker)
        # What this process writes before it looks again must fit too.
        room = self._settings.quota_bytes - self._settings.segment_bytes - unseen
        deleted = _delete_oldest(own, room) + _delete_oldest(shared, room)
        if deleted and not self.deleted_segments:
            log.warning(
                "oldest traces deleted to keep the quota: ship them in time, or raise it",
                extra={"quota_mb": self._settings.quota_bytes // MIB, "path": str(self._settings.folder)},
            )
        self.deleted_segments += deleted


class _Found(NamedTuple):
    """A segment on disk; sorts by age."""

    changed_ns: int
    path: Path
    size: int


def _find_segments(folder: Path, broker: str) -> tuple[list[_Found], list[_Found]]:
    """Segments of a broker, if one is named, and those of all clients and of brokers that do not run.

    A broker in another container looks as if it did not run: then its segments count among the others.
    """
    found = []
    runs: dict[tuple[str, str], bool] = {}
    living = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            named = _SEGMENT_NAME.fullmatch(entry.name)
            if named is not None:
                name, started, pid, suffix = named.groups()
                if (started, pid) not in runs:
                    runs[started, pid] = _start_of(pid) == int(started)
                if runs[started, pid]:
                    living.add(name)
                # Its writer is about to lock a draft.
                if suffix != DRAFT_SUFFIX or not runs[started, pid]:
                    found.append((name, entry))
    own: list[_Found] = []
    shared: list[_Found] = []
    for name, entry in found:
        is_shared = name not in living or _CLIENT_NAME.fullmatch(name) is not None
        group = own if name == broker else shared if is_shared else None
        if group is not None:
            with contextlib.suppress(FileNotFoundError):  # a shipper or another node may be at work too
                status = entry.stat()
                group.append(_Found(status.st_mtime_ns, Path(entry.path), status.st_size))
    return own, shared


def _delete_oldest(segments: list[_Found], room: int) -> int:
    """Delete until the rest fits; returns how many this call has deleted."""
    excess = sum(segment.size for segment in segments) - room
    deleted = 0
    for segment in sorted(segments):
        if excess <= 0:
            break
        try:
            with segment.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                segment.path.unlink()
            deleted += segment.path.suffix != DRAFT_SUFFIX
        except FileNotFoundError:
            pass  # somebody else was faster
        except BlockingIOError:
            # One that is open is being written and stays; one that is closed is being shipped and goes.
            if segment.path.suffix != CLOSED_SUFFIX:
                continue
        except OSError:
            continue  # of another user, for example
        excess -= segment.size
    return deleted


def open_recorder(
    settings: TraceSettings | None, node: str, role: str, lan: str = ""
) -> TraceRecorder | None:
    """A recorder on this machine's clocks; None if nothing is to be traced. Raises TracingError."""
    return None if settings is None else TraceRecorder.here(settings, node, role, lan)


def tracer_of(recorder: TraceRecorder | None, drift_ppm: int = DRIFT_PPM) -> Tracer | None:
    """What a core records with; `drift_ppm` is the most that this node's clock drifts."""
    return None if recorder is None else Tracer(recorder.log, drift_ppm)


def file_name_of(node: str) -> str:
    """A node's name as a part of a file name; different names may share one."""
    return re.sub(r"[^\w.]", "_", node) or "_"


def host_clock() -> str:
    """The boot of this host: processes with the same one read the same monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Without it nobody can claim to share our clock.
        return f"process-{os.getpid()}-{os.urandom(8).hex()}"


def process_start() -> int:
    """When this process started, in clock ticks since boot; 0 where the system does not tell."""
    return _start_of("self") or 0


def _start_of(pid: str) -> int | None:
    """When a process started; None if there is none."""
    try:
        # The command's name, in parentheses, may hold spaces: count from behind it.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
