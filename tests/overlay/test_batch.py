"""Data frames: round trips, and every way to cut them short."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from librt.strings import read_i64_le

from overlay.batch import (
    BATCH_HEADER_BYTES,
    BORN_OFFSET,
    FRAME_OVERHEAD_BYTES,
    LENGTH_WORD_OFFSET,
    PUBLISHER_OFFSET,
    SEQUENCE_OFFSET,
    U32,
    Run,
    check_messages,
    decode_batch_header,
    decode_messages,
    encode_batch,
    encode_message,
)
from overlay.errors import CloseReason, ProtocolError
from overlay.framing import FRAME_HEADER_BYTES, FrameReader
from overlay.messages import UNKNOWN_CLOCK_SHIFT, FrameKind, Message

u61 = st.integers(0, 2**61 - 1)
u63 = st.integers(0, 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
_messages = st.lists(
    st.builds(
        Message,
        topic_id=st.integers(0, 2**32 - 1),
        publisher=u63,
        sequence=u61,
        born_ns=u61,
        payload=st.binary(max_size=40),
    ),
    max_size=10,
)
_shifts = st.just(UNKNOWN_CLOCK_SHIFT) | st.integers(1 - 2**61, 2**61 - 1)
_headers = st.tuples(st.integers(0, 255), u64, _shifts)


def _encode(message: Message) -> bytes:
    return encode_message(
        message.topic_id, message.publisher, message.sequence, message.born_ns, message.payload
    )


def _body(messages: list[Message], header: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    return encode_batch(*header, [Run(1, _encode(message)) for message in messages])[FRAME_HEADER_BYTES:]


@given(_headers, _messages, st.data())
def test_a_batch_survives_its_bytes_however_it_is_cut_into_runs(
    header: tuple[int, int, int], messages: list[Message], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(messages)))) | {0, len(messages)})
    runs = [Run(end - start, b"".join(map(_encode, messages[start:end]))) for start, end in pairwise(cuts)]
    encoded = encode_batch(*header, runs)
    reader = FrameReader()
    reader.open_up()
    reader.feed(encoded)
    ((kind, body),) = reader.take_frames()
    assert reader.pending_bytes == 0
    assert kind == FrameKind.DATA
    decoded = decode_batch_header(body)
    assert (decoded.urgency, decoded.origin, decoded.clock_shift_ns) == header
    assert decoded.messages == len(messages)
    assert list(decode_messages(body)) == messages
    assert body[BATCH_HEADER_BYTES:] == b"".join(map(_encode, messages))
    assert len(encoded) == FRAME_OVERHEAD_BYTES + sum(len(run.data) for run in runs)


@given(_messages.filter(bool))
def test_single_fields_are_where_the_offsets_say(messages: list[Message]) -> None:
    for message in messages:
        data = _encode(message)
        assert read_i64_le(data, 0) & U32 == message.topic_id
        assert read_i64_le(data, PUBLISHER_OFFSET) == message.publisher
        assert read_i64_le(data, SEQUENCE_OFFSET) == message.sequence
        assert read_i64_le(data, BORN_OFFSET) == message.born_ns
        assert read_i64_le(data, LENGTH_WORD_OFFSET) >> 32 & U32 == len(message.payload)


@given(st.binary(max_size=200), st.integers(0, 4))
def test_the_quick_check_and_the_decoder_agree_about_any_bytes(messages: bytes, count: int) -> None:
    body = encode_batch(0, 0, 0, [Run(count, messages)])[FRAME_HEADER_BYTES:]
    try:
        check_messages(body, count)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            list(decode_messages(body))
    else:
        assert len(list(decode_messages(body))) == count


@given(_messages)
def test_a_batch_cut_short_at_any_byte_is_a_protocol_error(messages: list[Message]) -> None:
    body = _body(messages)
    for end in range(len(body)):
        with pytest.raises(ProtocolError) as caught:
            list(decode_messages(body[:end]))
        assert caught.value.reason is CloseReason.BAD_FRAME


@given(_messages, st.binary(min_size=1, max_size=80))
def test_a_batch_with_bytes_behind_it_is_a_protocol_error(messages: list[Message], tail: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(decode_messages(_body(messages) + tail))


@given(_messages, st.integers(0, 2**32 - 1))
def test_a_wrong_count_is_a_protocol_error_that_names_both(messages: list[Message], count: int) -> None:
    if count == len(messages):
        count += 1
    body = encode_batch(0, 0, 0, [Run(count, b"".join(map(_encode, messages)))])[FRAME_HEADER_BYTES:]
    with pytest.raises(ProtocolError, match=f"announces {count} messages, {len(messages)} are whole"):
        list(decode_messages(body))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_batch_or_a_protocol_error(body: bytes) -> None:
    try:
        messages = list(decode_messages(body))
    except ProtocolError as error:
        assert error.reason is CloseReason.BAD_FRAME
        return
    assert body[BATCH_HEADER_BYTES:] == b"".join(map(_encode, messages))


def test_a_short_header_is_refused_with_both_lengths() -> None:
    with pytest.raises(ProtocolError, match=f"of 3 bytes, its header alone has {BATCH_HEADER_BYTES}"):
        decode_batch_header(b"abc")


def test_an_empty_batch_is_a_batch() -> None:
    assert list(decode_messages(_body([]))) == []


@pytest.mark.parametrize(("sequence", "born_ns"), [(2**61, 1), (1, 2**61), (2**63 - 1, 1), (1, 2**64 - 1)])
def test_numbers_that_a_compiled_node_cannot_add_are_refused(sequence: int, born_ns: int) -> None:
    body = _body([Message(1, 2, 3, 4, b""), Message(1, 2, sequence, born_ns, b"")])
    with pytest.raises(ProtocolError, match=r"not below 2\^61"):
        check_messages(body, 2)
    with pytest.raises(ProtocolError, match=r"not below 2\^61"):
        list(decode_messages(body))


@pytest.mark.parametrize(
    ("shift_ns", "sent_ns"), [(2**61, 0), (-(2**61), 0), (UNKNOWN_CLOCK_SHIFT + 1, 0), (0, 2**61)]
)
def test_a_header_with_such_numbers_is_refused_with_them(shift_ns: int, sent_ns: int) -> None:
    body = encode_batch(0, 0, shift_ns, [], sent_ns)[FRAME_HEADER_BYTES:]
    with pytest.raises(
        ProtocolError, match=f"sent at {sent_ns} with clock shift {shift_ns}: both stay below"
    ):
        decode_batch_header(body)
