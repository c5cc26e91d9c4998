"""What a node writes down about the messages it saw: the trace schema, here and nowhere else.

A node appends fixed-width *records* to segment files; a shipper turns closed segments into rows
for Spark. `RECORD` is the layout in the segment, `ROW_COLUMNS` the layout of the rows, and
`SEGMENT_COLUMNS` what is known of each segment as a whole. `docs/traces.md` says which event
fills which field.

A segment is a preamble and blocks:

    preamble   magic 8 bytes | length u32 | msgpack map (SegmentHeader)
    block      kind u8 | 3 bytes 0 | length u32 | CRC-32 of the payload u32 | payload

Blocks hold many records, or one entry of a table: the name and quality of service of a topic id,
or the name of a peer id. Blocks of unknown kind are skipped, so that a newer node may add some;
whatever would change the meaning of a record raises `SCHEMA_VERSION`.

Sampling is a function of publisher and sequence, so all nodes agree on it without a word on the
wire. It is a rotation: the lower half of the sequence and the upper half of the publisher are one number,
and a message is sampled if the top 31 bits of its product with `SAMPLING_STEP`, modulo 2^64, lie below a
threshold. So a publisher's sampled messages are spread evenly over all it sends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from struct import Struct
from typing import Any, Final, NamedTuple, Self
from zlib import crc32

import msgpack
from librt.strings import BytesWriter

from overlay.batch import SAMPLING_MASK, SAMPLING_SHIFT, SAMPLING_STEP, U32
from overlay.errors import OverlayError, show
from overlay.limits import KIB, MIB, MILLISECOND_NS
from overlay.qos import TopicQos

SCHEMA_VERSION: Final = 1
MAGIC: Final = b"ISTHTRC\n"

HEADER_MAX_BYTES: Final = 64 * KIB
BLOCK_MAX_BYTES: Final = 64 * MIB
LOG_MAX_BYTES: Final = 16 * MIB
"""Records a node holds in memory while its disk does not take them; more are counted as lost."""
PEERS_MAX: Final = 65_535
"""Peer ids have 16 bits; 0 stands for none or unknown."""
UNKNOWN_SLACK: Final = -(2**63)


_NUMBER_LIMIT: Final = 2**63
"""Readers keep numbers in 64 bits with a sign."""


class TraceError(OverlayError):
    """A segment that cannot be read."""


class Event(IntEnum):
    """What happened to a message at a node."""

    RECEIVED = 1
    """It came in, and nothing more is known yet."""
    DISPATCHED = 2
    """It left on a link; at its publisher: it was published."""
    REPLICATED = 3
    """A copy left for the backup."""
    DISCARDED = 4
    """The backup pruned its copy."""
    DELIVERED = 5
    """A subscriber has it."""
    DUPLICATE = 6
    """It had come before."""
    DROPPED = 7
    """It goes no further, for a reason."""


class Reason(IntEnum):
    """Why a message was dropped, or was dispatched again; 0 for any other event."""

    NONE = 0
    LATE = 1
    NO_SUBSCRIBER = 2
    NO_ROUTER = 3
    OUTBOX_FULL = 4
    SHED_BEST_EFFORT = 5
    SHED_TOLERATED = 6
    UNROUTED = 7
    EDGE_GONE = 8
    QUEUE_FULL = 9
    """A subscriber's application did not keep up."""
    RESENT = 10
    """Not dropped: dispatched once more, after a failover, as a precaution or because it was lost."""
    OTHER = 255


class BlockKind(IntEnum):
    """What a block of a segment holds."""

    RECORDS = 1
    TOPIC = 2
    PEER = 3


class Record(NamedTuple):
    """One event of one message at one node, as packed by `RECORD`. Times are on the node's clock."""

    event: int
    reason: int
    peer_in: int
    peer_out: int
    topic: int
    publisher: int
    sequence: int
    born_ns: int
    """As the message carries it, on the clock of its origin; 0 if unknown."""
    in_ns: int
    """When it came, or was published; 0 if unknown."""
    out_ns: int
    """When it left; 0 if it did not."""
    age_bound_ns: int
    """Most the message can have aged when it came; 0 if unknown."""
    link_bound_ns: int
    """Most it can have spent on the link it came on; 0 if unknown."""
    slack_ns: int
    """What is left of the deadline by the age bound; UNKNOWN_SLACK if unknown."""
    deadline_ns: int
    """What this node held it to: the topic's deadline or the subscription's own; 0 for none."""


RECORD: Final = Struct("<BBHHIQQQQQQQqQ")
RECORD_BYTES: Final = RECORD.size
RECORD_FORMATS: Final = ("u1", "u1", "<u2", "<u2", "<u4", *["<u8"] * 7, "<i8", "<u8")
"""The same layout for readers that decode whole columns."""

_PREAMBLE: Final = Struct("<8sI")
_BLOCK: Final = Struct("<BxxxII")
BLOCK_BYTES: Final = _BLOCK.size


class Column(NamedTuple):
    """A column of the rows that Spark reads."""

    name: str
    kind: str
    """`long`, `string`, `double`, `boolean` or `timestamp` (microseconds, UTC)."""


ROW_COLUMNS: Final = (
    Column("at", "timestamp"),  # when it came in, by the wall clock of the node
    Column("node", "string"),
    Column("role", "string"),
    Column("lan", "string"),
    Column("host", "string"),  # boot of the host: rows of one host share a clock
    Column("clock", "string"),
    Column("event", "string"),
    Column("reason", "string"),
    Column("topic", "string"),
    Column("publisher", "long"),  # the 64 bits as a signed number
    Column("sequence", "long"),
    Column("peer_in", "string"),
    Column("peer_out", "string"),
    Column("in_ns", "long"),
    Column("out_ns", "long"),
    Column("born_ns", "long"),
    Column("age_bound_ns", "long"),
    Column("link_bound_ns", "long"),
    Column("slack_ns", "long"),
    Column("deadline_ns", "long"),
    Column("loss_tolerance", "long"),  # null: not limited, or the topic is not known
    Column("period_ns", "long"),
)

SEGMENT_COLUMNS: Final = (
    Column("segment", "string"),
    Column("schema", "long"),
    Column("node", "string"),
    Column("role", "string"),
    Column("lan", "string"),
    Column("host", "string"),
    Column("clock", "string"),
    Column("number", "long"),
    Column("opened_at", "timestamp"),
    Column("sampling", "double"),
    Column("records", "long"),
    Column("lost_records", "long"),  # by the node before it opened this segment
    Column("deleted_segments", "long"),  # by the node's disk quota before it opened this segment
    Column("torn_bytes", "long"),
    Column("salvaged", "boolean"),
    Column("problem", "string"),  # why the segment was set aside; null if it was read
)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says about the node that wrote it."""

    node: str
    role: str
    lan: str
    host: str
    """Boot id of the host. CLOCK_MONOTONIC is one clock for all processes of one boot."""
    clock: str
    """The host's boot and the process's start: a node that has another one has started anew."""
    pid: int
    number: int
    """Counts the segments of one process from 1."""
    wall_ns: int
    """The wall clock and the node's clock, read together: places the node's times on a calendar."""
    monotonic_ns: int
    sampling: float
    lost_records: int = 0
    """Records this process has lost so far, because the disk did not take them."""
    deleted_segments: int = 0
    """Segments this process has deleted so far to keep its disk quota."""
    schema: int = SCHEMA_VERSION

    def encode(self) -> bytes:
        """The preamble of a segment."""
        packed = msgpack.packb(asdict(self))
        return _PREAMBLE.pack(MAGIC, len(packed)) + packed

    @classmethod
    def decode(cls, data: bytes) -> tuple[Self, int]:
        """Read a preamble; returns the header and where the blocks begin. Raises TraceError."""
        if len(data) < _PREAMBLE.size:
            raise TraceError(f"segment of {len(data)} bytes, its preamble alone has {_PREAMBLE.size}")
        magic, length = _PREAMBLE.unpack_from(data)
        if magic != MAGIC:
            raise TraceError(f"segment starts with {show(magic)}, not {show(MAGIC)}: no trace segment")
        end = _PREAMBLE.size + length
        if length > HEADER_MAX_BYTES or end > len(data):
            raise TraceError(f"segment header of {length} bytes is cut off or above {HEADER_MAX_BYTES}")
        values = _unpack_map(data[_PREAMBLE.size : end])
        if values.get("schema") != SCHEMA_VERSION:
            raise TraceError(
                f"schema version {show(values.get('schema'))}, this reader knows {SCHEMA_VERSION}"
            )
        known: dict[str, Any] = {}
        for field in fields(cls):
            value = values.get(field.name)
            wanted = (int, float) if field.type is float else field.type
            assert isinstance(wanted, type | tuple)
            if isinstance(value, bool) or not isinstance(value, wanted):
                raise TraceError(f"segment header has {field.name} {show(value)}, which has the wrong type")
            if isinstance(value, int) and not 0 <= value < _NUMBER_LIMIT:
                raise TraceError(f"segment header has {field.name} {value}, which nothing reaches")
            known[field.name] = value
        return cls(**known), end


class TopicEntry(NamedTuple):
    """What a topic id stands for."""

    topic: int
    name: str
    deadline_ns: int | None
    loss_tolerance: int | None
    period_ns: int | None


class PeerEntry(NamedTuple):
    """What a peer id stands for: the peer's node name, as in the headers of its own segments."""

    peer: int
    name: str


class Block(NamedTuple):
    """A whole block of a segment, or the whole records of a torn one."""

    kind: int
    payload: bytes


def block_header(kind: BlockKind, payload: bytes | bytearray) -> bytes:
    """What stands before a payload in a segment."""
    return _BLOCK.pack(kind, len(payload), crc32(payload))


def encode_block(kind: BlockKind, payload: bytes | bytearray) -> bytes:
    """A block as it stands in a segment."""
    return block_header(kind, payload) + payload


def encode_topic(topic: int, name: str, qos: TopicQos) -> bytes:
    """The block that gives a topic id its meaning."""
    period_ns = None if qos.period_ms is None else round(qos.period_ms * MILLISECOND_NS)
    entry = TopicEntry(topic, name, qos.deadline_ns, qos.loss_tolerance, period_ns)
    return encode_block(BlockKind.TOPIC, msgpack.packb(entry._asdict()))


def encode_peer(peer: int, name: str) -> bytes:
    """The block that gives a peer id its meaning."""
    return encode_block(BlockKind.PEER, msgpack.packb({"peer": peer, "name": name}))


def decode_topic(payload: bytes) -> TopicEntry:
    """Read a topic block; raises TraceError."""
    entry = TopicEntry(**_fields_of("topic", payload, TopicEntry._fields))
    _check_entry("topic", entry.topic, entry.name)
    for number in (entry.deadline_ns, entry.loss_tolerance, entry.period_ns):
        if number is not None and not _is_number(number):
            raise TraceError(f"topic entry has {show(number)} where a number belongs")
    return entry


def decode_peer(payload: bytes) -> PeerEntry:
    """Read a peer block; raises TraceError."""
    entry = PeerEntry(**_fields_of("peer", payload, PeerEntry._fields))
    _check_entry("peer", entry.peer, entry.name)
    return entry


def _fields_of(kind: str, payload: bytes, names: Sequence[str]) -> dict[str, Any]:
    values = _unpack_map(payload)
    try:
        return {name: values[name] for name in names}
    except KeyError as missing:
        raise TraceError(f"{kind} entry without {missing}") from None


def _check_entry(kind: str, number: object, name: object) -> None:
    if not _is_number(number) or not isinstance(name, str):
        raise TraceError(f"{kind} entry has number {show(number)} and name {show(name)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _NUMBER_LIMIT


def read_blocks(data: bytes, offset: int) -> Iterator[Block | int]:
    """The blocks of a segment; at the end, if it is torn, the number of bytes that are no use.

    A process that was killed leaves at most its last block unfinished: the whole records in it are
    good. A block that is complete but fails its checksum was damaged on disk, and what follows
    cannot be found.
    """
    end = len(data)
    while offset < end:
        if end - offset < BLOCK_BYTES:
            yield end - offset
            return
        kind, length, checksum = _BLOCK.unpack_from(data, offset)
        start = offset + BLOCK_BYTES
        if length > BLOCK_MAX_BYTES:
            yield end - offset
            return
        if start + length > end:
            whole = (end - start) // RECORD_BYTES * RECORD_BYTES if kind == BlockKind.RECORDS else 0
            if whole:
                yield Block(kind, data[start : start + whole])
            yield end - start - whole
            return
        payload = data[start : start + length]
        if crc32(payload) != checksum:
            yield end - offset
            return
        yield Block(kind, payload)
        offset = start + length


def _unpack_map(packed: bytes) -> dict[str, Any]:
    try:
        values = msgpack.unpackb(packed)
    except ValueError as error:
        raise TraceError(f"msgpack cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise TraceError(f"expected a map, got {show(values)}")
    return values


# Sampling

_MODULUS: Final = SAMPLING_MASK + 1


class Sampling:
    """Which messages are traced, the same at every node that has the same rate."""

    __slots__ = ("rate", "threshold")

    def __init__(self, rate: float) -> None:
        """A share of all messages: 0 for none, 1 for all."""
        if not 0 <= rate <= 1:
            raise TraceError(f"sampling rate is {show(rate)}: give a share between 0 and 1")
        self.rate = rate
        self.threshold = min(round(rate * _MODULUS), _MODULUS)

    def is_sampled(self, publisher: int, sequence: int) -> bool:
        """Whether all nodes trace this message. Publishers' ids are random, so half of one will do."""
        word = (sequence & U32) << 32 | publisher >> 32
        return word * SAMPLING_STEP >> SAMPLING_SHIFT & SAMPLING_MASK < self.threshold


class TraceLog:
    """Records of one node, waiting to be written. Used by a core; never blocks, never fails."""

    __slots__ = (
        "_all_tables",
        "_lost",
        "_peers",
        "_taken_records",
        "_taken_tables",
        "_topics",
        "buffer",
        "limit_bytes",
        "sampling",
    )

    def __init__(self, sampling: Sampling, limit_bytes: int = LOG_MAX_BYTES) -> None:
        self.sampling = sampling
        self.limit_bytes = limit_bytes
        self.buffer = BytesWriter()
        """Records that wait. A tracer writes them here itself while there is room."""
        self._lost = 0
        self._taken_records = 0
        self._topics: dict[int, tuple[str, TopicQos]] = {}
        self._peers: dict[str, int] = {}
        self._all_tables = bytearray()
        self._taken_tables = 0

    @property
    def recorded(self) -> int:
        """Records since the start."""
        return self._taken_records + len(self.buffer) // RECORD_BYTES

    @property
    def lost(self) -> int:
        """Records that found no room since the start."""
        return self._lost

    @property
    def waiting_bytes(self) -> int:
        """Size of what waits to be written."""
        return len(self.buffer)

    def define_topic(self, topic: int, name: str, qos: TopicQos) -> None:
        """Say what a topic id stands for; again when its quality of service is learnt or changes."""
        if self._topics.get(topic) != (name, qos):
            self._topics[topic] = (name, qos)
            self._all_tables += encode_topic(topic, name, qos)

    def peer(self, name: str) -> int:
        """The id of a peer, by its node name; 0 if there are too many."""
        known = self._peers.get(name)
        if known is not None:
            return known
        if len(self._peers) >= PEERS_MAX:
            return 0
        number = self._peers[name] = len(self._peers) + 1
        self._all_tables += encode_peer(number, name)
        return number

    def record(
        self,
        event: int,
        topic: int,
        publisher: int,
        sequence: int,
        *,
        born_ns: int = 0,
        in_ns: int = 0,
        out_ns: int = 0,
        age_bound_ns: int = 0,
        link_bound_ns: int = 0,
        slack_ns: int = UNKNOWN_SLACK,
        deadline_ns: int = 0,
        peer_in: int = 0,
        peer_out: int = 0,
        reason: int = 0,
    ) -> None:
        """Write down one event of a sampled message."""
        self.append(
            RECORD.pack(
                event,
                reason,
                peer_in,
                peer_out,
                topic,
                publisher,
                sequence,
                born_ns,
                in_ns,
                out_ns,
                age_bound_ns,
                link_bound_ns,
                slack_ns,
                deadline_ns,
            )
        )

    def append(self, record: bytes) -> None:
        """Write down a record as packed by `RECORD`."""
        if len(self.buffer) >= self.limit_bytes:
            self.lose()
            return
        self.buffer.write(record)

    def lose(self) -> None:
        """A record found no room."""
        self._lost += 1

    def take(self) -> tuple[bytes, bytes]:
        """All that waits: blocks of new table entries, and records without a block around them yet.

        Nothing is summed up here: that is for whoever writes, off the hot path.
        """
        tables = bytes(self._all_tables[self._taken_tables :])
        self._taken_tables = len(self._all_tables)
        records = self.buffer.getvalue()
        self.buffer.truncate(0)
        self._taken_records += len(records) // RECORD_BYTES
        return tables, records

    def tables(self) -> bytes:
        """Every table entry, as blocks: a new segment starts with them and so stands on its own."""
        return bytes(self._all_tables)


assert LOG_MAX_BYTES + RECORD_BYTES <= BLOCK_MAX_BYTES
assert len(RECORD_FORMATS) == len(Record._fields)
