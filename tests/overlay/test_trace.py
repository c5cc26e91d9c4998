"""The trace schema: what is written can be read, however it was cut off; all nodes sample alike."""

import contextlib
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.qos import TopicQos
from overlay.trace import (
    BLOCK_BYTES,
    MAGIC,
    PEERS_MAX,
    RECORD,
    RECORD_BYTES,
    SCHEMA_VERSION,
    UNKNOWN_SLACK,
    Block,
    BlockKind,
    Event,
    PeerEntry,
    Reason,
    Record,
    Sampling,
    SegmentHeader,
    TopicEntry,
    TraceError,
    TraceLog,
    decode_peer,
    decode_topic,
    encode_block,
    read_blocks,
)

HEADER = SegmentHeader(
    node="edge-1",
    role="edge",
    lan="plant",
    host="boot",
    clock="boot/17",
    pid=42,
    number=3,
    wall_ns=1_700_000_000_000_000_000,
    monotonic_ns=5_000_000_000,
    sampling=0.01,
    lost_records=7,
)
PUBLISHERS = st.integers(0, 2**64 - 1)
SEQUENCES = st.integers(1, 2**62)


def filled_log() -> TraceLog:
    log = TraceLog(Sampling(1))
    log.define_topic(3, "valve", TopicQos(period_ms=10, deadline_ms=50, loss_tolerance=2))
    edge = log.peer("edge-1")
    for sequence in range(1, 6):
        log.record(Event.RECEIVED, 3, 2**64 - 1, sequence, in_ns=100 + sequence, peer_in=edge)
    return log


def written(log: TraceLog) -> bytes:
    tables, records = log.take()
    return tables + encode_block(BlockKind.RECORDS, records)


def records_of(data: bytes) -> tuple[list[Record], int]:
    found: list[Record] = []
    torn = 0
    for block in read_blocks(data, 0):
        if isinstance(block, int):
            torn = block
        elif block.kind == BlockKind.RECORDS:
            found += [Record(*values) for values in RECORD.iter_unpack(block.payload)]
    return found, torn


def test_a_header_is_read_as_it_was_written():
    data = HEADER.encode()
    assert SegmentHeader.decode(data + b"blocks") == (HEADER, len(data))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "preamble alone"),
        (b"PAR1" + bytes(40), "no trace segment"),
        (HEADER.encode()[:-1], "cut off"),
        (MAGIC + b"\xff\xff\xff\xff" + bytes(40), "cut off"),
        (MAGIC + b"\x01\0\0\0\xc1", "msgpack"),
        (MAGIC + b"\x01\0\0\0\x05", "expected a map"),
        (replace(HEADER, schema=SCHEMA_VERSION + 1).encode(), f"schema version {SCHEMA_VERSION + 1}"),
        (replace(HEADER, node=5).encode(), "has node 5"),
        (replace(HEADER, pid=True).encode(), "has pid True"),
    ],
)
def test_what_is_no_header_is_refused_with_the_reason(data: bytes, complaint: str):
    with pytest.raises(TraceError, match=complaint):
        SegmentHeader.decode(data)


@given(st.binary(max_size=200))
def test_garbage_raises_only_the_trace_error(garbage: bytes):
    with contextlib.suppress(TraceError):
        SegmentHeader.decode(MAGIC + garbage)
    list(read_blocks(garbage, 0))


def test_records_and_tables_are_read_as_they_were_written():
    data = written(filled_log())
    tables = [block for block in read_blocks(data, 0) if isinstance(block, Block)][:2]
    assert decode_topic(tables[0].payload) == TopicEntry(3, "valve", 50_000_000, 2, 10_000_000)
    assert decode_peer(tables[1].payload) == PeerEntry(1, "edge-1")
    records, torn = records_of(data)
    assert torn == 0
    assert [record.sequence for record in records] == [1, 2, 3, 4, 5]
    assert records[0] == Record(
        Event.RECEIVED, Reason.NONE, 1, 0, 3, 2**64 - 1, 1, 0, 101, 0, 0, 0, UNKNOWN_SLACK, 0
    )


def test_a_table_entry_without_its_fields_is_refused():
    with pytest.raises(TraceError, match="name"):
        decode_topic(msgpack.packb({"topic": 1}))
    with pytest.raises(TraceError, match="peer"):
        decode_peer(msgpack.packb({"name": "edge-1"}))


def test_wherever_a_segment_is_cut_its_whole_records_are_read():
    data = written(filled_log())
    start = len(data) - 5 * RECORD_BYTES
    for end in range(start, len(data) + 1):
        records, torn = records_of(data[:end])
        assert [record.sequence for record in records] == list(range(1, (end - start) // RECORD_BYTES + 1))
        assert torn == (end - start) % RECORD_BYTES


def test_a_damaged_block_ends_the_reading_and_is_counted():
    first = encode_block(BlockKind.RECORDS, bytes(RECORD_BYTES))
    second = bytearray(encode_block(BlockKind.RECORDS, bytes(2 * RECORD_BYTES)))
    second[BLOCK_BYTES + 5] ^= 1
    records, torn = records_of(first + bytes(second))
    assert len(records) == 1
    assert torn == len(second)


def test_a_new_segment_starts_with_all_tables():
    log = filled_log()
    log.take()
    kinds = [block.kind for block in read_blocks(log.tables(), 0) if isinstance(block, Block)]
    assert kinds == [BlockKind.TOPIC, BlockKind.PEER]
    log.define_topic(3, "valve", TopicQos(period_ms=10, deadline_ms=50, loss_tolerance=2))
    log.peer("edge-1")
    assert log.take() == (b"", b"")


def test_a_full_log_counts_what_it_loses():
    log = TraceLog(Sampling(1), limit_bytes=2 * RECORD_BYTES)
    for sequence in range(1, 6):
        log.record(Event.RECEIVED, 1, 1, sequence)
    assert (log.recorded, log.lost, log.waiting_bytes) == (2, 3, 2 * RECORD_BYTES)
    log.take()
    log.record(Event.RECEIVED, 1, 1, 6)
    assert (log.recorded, log.lost) == (3, 3)


def test_too_many_peers_are_unknown_peers():
    log = TraceLog(Sampling(1))
    for number in range(PEERS_MAX):
        log.peer(f"client-{number}")
    assert log.peer("client-0") == 1
    assert log.peer("one more") == 0


@given(PUBLISHERS, SEQUENCES)
def test_all_or_none(publisher: int, sequence: int):
    everything, nothing = Sampling(1), Sampling(0)
    assert everything.is_sampled(publisher, sequence)
    assert not nothing.is_sampled(publisher, sequence)


@given(PUBLISHERS, st.sampled_from([0.01, 0.05, 0.25]))
def test_the_share_of_each_publisher_is_the_rate(publisher: int, rate: float):
    sampling = Sampling(rate)
    share = sum(sampling.is_sampled(publisher, sequence) for sequence in range(1, 4_001)) / 4_000
    assert share == pytest.approx(rate, abs=0.001)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_share(rate: float):
    with pytest.raises(TraceError, match="between 0 and 1"):
        Sampling(rate)
