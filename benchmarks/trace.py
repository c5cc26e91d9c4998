"""What tracing costs a node, by message: not sampled, sampled at some rate, and the disk's share."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import describe
from overlay.qos import TopicQos
from overlay.trace import RECORD_BYTES, Event, Sampling, TraceLog
from runtime.tracing import TraceRecorder, TraceSettings

PUBLISHER: Final = 0x9D3F_52A1_77C0_E415
FLUSH_EVERY: Final = 50_000
"""Records between flushes: a busy second."""


@dataclass(frozen=True, slots=True)
class Result:
    """Nanoseconds per message, of the node's own thread unless said otherwise."""

    messages: int
    loop_ns: float
    """The loop alone."""
    unsampled_ns: float
    """One comparison, at a sampling rate of 0."""
    one_percent_ns: float
    all_ns: float
    """Every message recorded, in memory."""
    all_to_disk_ns: float
    """Every message recorded, flushed and written by the recorder's thread, until all is on disk."""
    record_bytes: int
    machine: dict[str, Any]

    def to_record(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def measure(messages: int) -> Result:
    """Each figure is the best of five runs."""
    machine = describe()
    return Result(
        messages=messages,
        loop_ns=_best(lambda: _loop(messages), messages),
        unsampled_ns=_best(lambda: _record(TraceLog(Sampling(0.0)), messages), messages),
        one_percent_ns=_best(lambda: _record(TraceLog(Sampling(0.01)), messages), messages),
        all_ns=_best(lambda: _record(TraceLog(Sampling(1.0), messages * RECORD_BYTES), messages), messages),
        all_to_disk_ns=_best(lambda: _to_disk(messages), messages),
        record_bytes=RECORD_BYTES,
        machine=machine,
    )


def _best(work: Callable[[], None], messages: int) -> float:
    best_ns = min(_timed_ns(work) for _ in range(5))
    return round(best_ns / messages, 1)


def _timed_ns(work: Callable[[], None]) -> int:
    started_ns = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - started_ns


def _loop(messages: int) -> None:
    for _ in range(1, messages + 1):
        pass


def _record(log: TraceLog, messages: int, flush: Callable[[], None] | None = None) -> None:
    sampling = log.sampling
    peer = log.peer("router-1")
    next_sampled = sampling.next_sampled(PUBLISHER, 1)
    for sequence in range(1, messages + 1):
        if sequence >= next_sampled:
            log.record(
                Event.DISPATCHED,
                1,
                PUBLISHER,
                sequence,
                born_ns=10**15,
                in_ns=10**15 + 1_000_000,
                out_ns=10**15 + 2_000_000,
                age_bound_ns=1_500_000,
                link_bound_ns=1_500_000,
                slack_ns=48_500_000,
                deadline_ns=50_000_000,
                peer_in=peer,
                peer_out=peer,
            )
            next_sampled = sampling.following(PUBLISHER, sequence)
            if flush is not None and sequence % FLUSH_EVERY == 0:
                flush()


def _to_disk(messages: int) -> None:
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        settings = TraceSettings(Path(folder), sampling=1.0)
        recorder = TraceRecorder(
            settings, "node", "router", "", clock_ns=time.monotonic_ns, wall_ns=time.time_ns
        )
        recorder.log.define_topic(1, "valve", TopicQos())
        _record(recorder.log, messages, recorder.flush)
        recorder.close()
        assert recorder.statistics().lost_records == 0


def table(result: Result) -> str:
    """For people."""
    base = result.loop_ns
    return "\n".join(
        f"{name:<34} {value - base:>8.1f} ns per message"
        for name, value in (
            ("not sampled", result.unsampled_ns),
            ("1 % sampled", result.one_percent_ns),
            ("all, in memory", result.all_ns),
            ("all, until on disk", result.all_to_disk_ns),
        )
    )
