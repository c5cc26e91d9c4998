"""Reading a segment into an Arrow table, whole columns at a time."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from overlay.trace import (
    RECORD_FORMATS,
    UNKNOWN_SLACK,
    BlockKind,
    Event,
    PeerEntry,
    Reason,
    Record,
    SegmentHeader,
    TopicEntry,
    TraceError,
    decode_peer,
    decode_topic,
    read_blocks,
)
from spark_analysis.schema import ARROW_ROWS

_RECORD: Final = np.dtype(list(zip(Record._fields, RECORD_FORMATS, strict=True)))
_EVENTS: Final = {event.value: event.name.lower() for event in Event}
_REASONS: Final = {reason.value: reason.name.lower() for reason in Reason if reason is not Reason.NONE}

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Segment:
    """A segment that was read."""

    header: SegmentHeader
    rows: pa.Table
    torn_bytes: int
    """At the end, of a block that was not finished or is damaged."""


@dataclass
class _Contents:
    topics: dict[int, TopicEntry]
    peers: dict[int, str]
    records: list[bytes]
    torn_bytes: int


def read_segment(data: bytes) -> Segment:
    """Decode a whole segment. Raises TraceError if it is none, or of an unknown schema version."""
    header, start = SegmentHeader.decode(data)
    contents = _read_contents(data, start)
    records = np.frombuffer(b"".join(contents.records), dtype=_RECORD)
    return Segment(header, _rows(header, contents, records), contents.torn_bytes)


def _read_contents(data: bytes, start: int) -> _Contents:
    contents = _Contents({}, {}, [], 0)
    for block in read_blocks(data, start):
        if isinstance(block, int):
            contents.torn_bytes = block
        elif block.kind == BlockKind.RECORDS:
            if len(block.payload) % _RECORD.itemsize:
                raise TraceError(
                    f"block of {len(block.payload)} bytes, records have {_RECORD.itemsize} bytes each"
                )
            contents.records.append(block.payload)
        elif block.kind == BlockKind.TOPIC:
            topic = decode_topic(block.payload)
            contents.topics[topic.topic] = topic
        elif block.kind == BlockKind.PEER:
            peer: PeerEntry = decode_peer(block.payload)
            contents.peers[peer.peer] = peer.name
    return contents


def _rows(header: SegmentHeader, contents: _Contents, records: Numbers) -> pa.Table:
    count = len(records)
    topics = contents.topics
    topic = records["topic"]
    in_ns = records["in_ns"].astype(np.int64)
    out_ns = records["out_ns"].astype(np.int64)
    own_deadline_ns = _known(records["deadline_ns"])
    topic_deadline_ns = _look_up(topic, {key: entry.deadline_ns for key, entry in topics.items()}, pa.int64())
    # A record that only knows when its message left is placed on the calendar by that.
    placed_ns = np.where(in_ns > 0, in_ns, out_ns) + (header.wall_ns - header.monotonic_ns)
    columns = {
        "at": pa.array(placed_ns // 1_000, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        "node": _constant(header.node, count),
        "role": _constant(header.role, count),
        "lan": _constant(header.lan, count),
        "host": _constant(header.host, count),
        "clock": _constant(header.clock, count),
        "event": _look_up(records["event"], _EVENTS, pa.string(), unknown="event {}"),
        "reason": _look_up(records["reason"], _REASONS, pa.string()),
        "topic": _look_up(
            topic, {key: entry.name for key, entry in topics.items()}, pa.string(), unknown="topic {}"
        ),
        "publisher": pa.array(records["publisher"].view(np.int64) if count else [], pa.int64()),
        "sequence": pa.array(records["sequence"].astype(np.int64)),
        "peer_in": _look_up(records["peer_in"], contents.peers, pa.string()),
        "peer_out": _look_up(records["peer_out"], contents.peers, pa.string()),
        "in_ns": _known(records["in_ns"]),
        "out_ns": _known(records["out_ns"]),
        "born_ns": _known(records["born_ns"]),
        "age_bound_ns": _known(records["age_bound_ns"]),
        "link_bound_ns": _known(records["link_bound_ns"]),
        "slack_ns": pa.array(records["slack_ns"], mask=records["slack_ns"] == UNKNOWN_SLACK),
        "deadline_ns": pc.coalesce(own_deadline_ns, topic_deadline_ns),
        "loss_tolerance": _look_up(
            topic, {key: entry.loss_tolerance for key, entry in topics.items()}, pa.int64()
        ),
        "period_ns": _look_up(topic, {key: entry.period_ns for key, entry in topics.items()}, pa.int64()),
    }
    return pa.table(columns, schema=ARROW_ROWS)


def _constant(value: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, pa.string()), count)


def _known(values: Numbers) -> pa.Array:
    """Numbers in which 0 stands for unknown."""
    return pa.array(values.astype(np.int64), mask=values == 0)


def _look_up(keys: Numbers, table: dict[int, Any], kind: pa.DataType, unknown: str | None = None) -> pa.Array:
    """What each key stands for; if it is not in the table, `unknown` with the key in it, or null."""
    different, positions = np.unique(keys, return_inverse=True)
    meanings = []
    for key in different.tolist():
        missing = None if unknown is None else unknown.format(key)
        meanings.append(table.get(key, missing))
    return pa.array(meanings, kind).take(pa.array(positions.reshape(-1)))
