"""Recording what passes: the sampled messages of a frame, each once per link, with both its times."""

from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import (
    BATCH_HEADER_BYTES,
    FRAME_OVERHEAD_BYTES,
    Passage,
    Run,
    check_messages,
    cut_run,
    decode_batch_header,
    encode_batch,
    encode_message,
)
from overlay.delay import age_bound_ns, link_bound_ns
from overlay.framing import FRAME_HEADER_BYTES
from overlay.limits import DRIFT_PPM, RUN_OVERHEAD_BYTES
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from overlay.trace import RECORD, UNKNOWN_SLACK, Event, Reason, Record, Sampling, TraceLog
from overlay.tracer import ARRIVALS_MAX, Tracer, sampled_offsets

QOS = TopicQos(period_ms=10, deadline_ms=50, loss_tolerance=2)
PUBLISHERS = st.integers(0, 2**63 - 1)
SEQUENCES = st.integers(0, 2**61 - 1)


def message(sequence: int, publisher: int = 7, size: int = 5) -> bytes:
    return encode_message(3, publisher, sequence, 1_000, bytes(size))


def body(*messages: bytes) -> bytes:
    frame = encode_batch(1, 9, 0, (Run(len(messages), b"".join(messages)),))
    return frame[FRAME_OVERHEAD_BYTES - BATCH_HEADER_BYTES :]


def tracer(rate: float = 1.0) -> Tracer:
    made = Tracer(TraceLog(Sampling(rate)))
    made.define_topic(3, "valve", QOS)
    return made


def admit(made: Tracer, frame: bytes, peer: str, clock_shift_ns: int, now_ns: int) -> Passage:
    """As a core does with a frame that has sampled messages."""
    sampled = check_messages(frame, decode_batch_header(frame).messages, made.threshold)
    assert sampled is not None
    return made.admit(sampled, peer, clock_shift_ns, now_ns, sent_ns=now_ns - 250, link_shift_ns=50)


def records(made: Tracer) -> list[Record]:
    return [Record(*values) for values in RECORD.iter_unpack(made.log.take()[1])]


@given(st.lists(st.tuples(PUBLISHERS, SEQUENCES, st.integers(0, 40)), max_size=30), st.floats(0, 1))
def test_the_walk_finds_what_the_sampling_says(names: list[tuple[int, int, int]], rate: float):
    sampling = Sampling(rate)
    expected = []
    data = b""
    for publisher, sequence, size in names:
        if sampling.is_sampled(publisher, sequence):
            expected.append(len(data))
        data += message(sequence, publisher, size)
    assert sampled_offsets(data, 0, sampling.threshold) == expected
    frame = encode_batch(1, 9, 0, (Run(len(names), data),))[FRAME_HEADER_BYTES:]
    in_frame = [BATCH_HEADER_BYTES + offset for offset in expected]
    assert check_messages(frame, len(names), sampling.threshold) == (in_frame or None)


@given(st.binary(max_size=300))
def test_garbage_is_walked_without_harm(garbage: bytes):
    sampled_offsets(garbage, 0, Sampling(1).threshold)


def test_a_frame_without_sampled_messages_leaves_no_trace():
    frame = body(message(1), message(2))
    assert check_messages(frame, 2, tracer(0.0).threshold) is None
    assert check_messages(frame, 2) is None


def test_what_leaves_an_outbox_is_recorded_with_both_times():
    made = tracer()
    frame = body(message(1), message(2), message(3))
    came = admit(made, frame, "edge-1", 200, 5_000)
    outbox = Outbox()
    outbox.trace = made.link("edge-2")
    cut = BATCH_HEADER_BYTES + len(message(1))
    for messages, start, end in ((1, BATCH_HEADER_BYTES, cut), (2, cut, len(frame))):
        outbox.append(10**9, 1, 9, 200, cut_run(messages, frame, start, end, came), 5_000)
    assert records(made) == []
    outbox.take_frames(1_000_000, 8_000)
    found = records(made)
    assert [record.sequence for record in found] == [1, 2, 3]
    assert found[0] == Record(
        event=Event.DISPATCHED,
        reason=Reason.NONE,
        peer_in=made.log.peer("edge-1"),
        peer_out=made.log.peer("edge-2"),
        topic=3,
        publisher=7,
        sequence=1,
        born_ns=1_000,
        in_ns=5_000,
        out_ns=8_000,
        # What was measured, with the drift of every clock on the way.
        age_bound_ns=age_bound_ns(4_200, DRIFT_PPM),
        link_bound_ns=link_bound_ns(4_750, 50, 5_000, DRIFT_PPM),
        slack_ns=50_000_000 - age_bound_ns(4_200, DRIFT_PPM),
        deadline_ns=50_000_000,
    )


def test_only_the_sampled_messages_of_a_run_are_recorded():
    made = tracer(0.3)
    messages = [message(sequence) for sequence in range(1, 41)]
    sampled = [sequence for sequence in range(1, 41) if Sampling(0.3).is_sampled(7, sequence)]
    frame = body(*messages)
    came = admit(made, frame, "edge-1", 0, 5_000)
    run = cut_run(40, frame, BATCH_HEADER_BYTES, len(frame), came)
    made.link("edge-2").sent(run, 8_000)
    assert [record.sequence for record in records(made)] == sampled


def test_what_is_shed_is_recorded_and_the_rest_keeps_its_passage():
    made = tracer()
    frame = body(message(1), message(2), message(3))
    came = admit(made, frame, "edge-1", 0, 5_000)
    run = cut_run(3, frame, BATCH_HEADER_BYTES, len(frame), came)
    link = made.link("edge-2")
    kept = Run(1, message(2))
    link.shed(run, kept, Reason.SHED_TOLERATED, 6_000)
    dropped = records(made)
    assert [(r.sequence, r.event, r.reason, r.in_ns) for r in dropped] == [
        (sequence, Event.DROPPED, Reason.SHED_TOLERATED, 5_000) for sequence in (1, 3)
    ]
    link.sent(kept, 7_000)
    assert [(r.sequence, r.event) for r in records(made)] == [(2, Event.DISPATCHED)]


def test_a_full_outbox_and_a_lost_peer_are_recorded():
    made = tracer()
    outbox = Outbox(capacity_bytes=2 * (len(message(1)) + RUN_OVERHEAD_BYTES))
    outbox.trace = made.link("edge-2")
    for sequence in (1, 2, 3):
        run = Run(1, message(sequence))
        made.publish(run, 4_000)
        outbox.append(sequence * 10**9, 1, 9, 0, run, 5_000)
    outbox.discard(9_000)
    found = records(made)
    assert [(r.sequence, r.reason, r.out_ns) for r in found] == [
        (1, Reason.OUTBOX_FULL, 5_000),
        (2, Reason.EDGE_GONE, 9_000),
        (3, Reason.EDGE_GONE, 9_000),
    ]


def test_copies_that_are_dropped_are_no_loss():
    made = tracer()
    run = Run(1, message(1))
    made.publish(run, 4_000)
    made.link("router-2", int(Event.REPLICATED)).dropped(run, Reason.EDGE_GONE, 5_000)
    assert records(made) == []


def test_what_is_sent_again_came_when_it_came():
    made = tracer()
    frame = body(message(1), message(2))
    came = admit(made, frame, "client-1", 0, 5_000)
    made.remember(frame, came)
    again = Run(2, message(1) + message(99))
    made.send_again(again)
    made.link("router-2").sent(again, 900_000)
    first, unknown = records(made)
    assert (first.in_ns, first.peer_in, first.out_ns) == (5_000, made.log.peer("client-1"), 900_000)
    assert first.reason == unknown.reason == Reason.RESENT
    assert (unknown.in_ns, unknown.slack_ns) == (0, UNKNOWN_SLACK)


def test_arrivals_are_found_whenever_they_were_added_and_the_oldest_are_forgotten():
    made = tracer()
    half = ARRIVALS_MAX // 2
    for part in range(3):
        frame = body(*(message(1 + part * half + at) for at in range(half)))
        made.remember(frame, admit(made, frame, f"client-{part}", 0, 5_000 + part))
        newest = Run(2, message(1 + part * half) + message((part + 1) * half))
        made.send_again(newest)
        made.link("router-2").sent(newest, 900_000)
        found = records(made)
        assert [record.in_ns for record in found] == [5_000 + part] * 2
        assert {record.peer_in for record in found} == {made.log.peer(f"client-{part}")}
    again = Run(2, message(1) + message(half + 1))
    made.send_again(again)
    made.link("router-2").sent(again, 900_000)
    assert [record.in_ns for record in records(made)] == [0, 5_001]


def test_the_age_of_a_published_message_is_nobodys_bound():
    made = tracer()
    run = Run(1, message(1))
    made.publish(run, 1_000)
    made.link("edge-1").sent(run, 1_500)
    (record,) = records(made)
    assert (record.in_ns, record.out_ns, record.age_bound_ns, record.peer_in) == (1_000, 1_500, 0, 0)
    assert run.came is not None and run.came.clock_shift_ns == UNKNOWN_CLOCK_SHIFT


def test_a_record_is_laid_out_as_the_schema_says():
    """The tracer writes field by field what readers unpack with `RECORD`, the largest values too."""
    made = tracer()
    publisher, sequence, topic = 2**63 - 2, 2**63 - 3, 2**32 - 4
    made.define_topic(topic, "last", QOS)
    data = encode_message(topic, publisher, sequence, 2**62, b"x")
    came = Passage([0], 2**62 + 5, 65_535, UNKNOWN_CLOCK_SHIFT, 2**62)
    made.message(Event.DROPPED, Reason.OTHER, data, 0, came, 2**62 + 9, 65_534)
    (record,) = records(made)
    assert record == Record(
        Event.DROPPED,
        Reason.OTHER,
        65_535,
        65_534,
        topic,
        publisher,
        sequence,
        2**62,
        2**62 + 5,
        2**62 + 9,
        0,
        2**62,
        UNKNOWN_SLACK,
        50_000_000,
    )


def test_a_full_log_loses_records_and_counts_them():
    log = TraceLog(Sampling(1), limit_bytes=2 * RECORD.size)
    made = Tracer(log)
    for sequence in (1, 2, 3):
        run = Run(1, message(sequence))
        made.publish(run, 1_000)
        made.link("edge-1").sent(run, 1_500)
    assert (log.recorded, log.lost) == (2, 1)
    assert [record.sequence for record in records(made)] == [1, 2]
    assert (log.recorded, log.waiting_bytes) == (2, 0)
