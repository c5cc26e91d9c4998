"""Cutting a byte stream into frames, however the bytes arrive."""

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import CloseReason, ProtocolError
from overlay.framing import FRAME_HEADER_BYTES, FrameReader, frame
from overlay.limits import FRAME_MAX_BYTES, HANDSHAKE_FRAME_MAX_BYTES

Frames = list[tuple[int, bytes]]
_frames = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=60)), max_size=12)


def _bytes_of(frames: Frames) -> bytes:
    return b"".join(frame(kind, body) for kind, body in frames)


def _open_reader() -> FrameReader:
    reader = FrameReader()
    reader.open_up()
    return reader


def _feed(reader: FrameReader, pieces: list[bytes]) -> Frames:
    frames: Frames = []
    for piece in pieces:
        reader.feed(piece)
        frames += reader.take_frames()
    return frames


@given(_frames)
def test_frames_fed_whole_come_back(frames: Frames) -> None:
    reader = FrameReader()
    assert _feed(reader, [_bytes_of(frames)]) == frames
    assert reader.pending_bytes == 0


@given(_frames)
def test_frames_fed_byte_by_byte_come_back_the_same(frames: Frames) -> None:
    reader = FrameReader()
    stream = _bytes_of(frames)
    assert _feed(reader, [stream[at : at + 1] for at in range(len(stream))]) == frames
    assert reader.pending_bytes == 0


@given(_frames, st.data())
def test_frames_cut_anywhere_come_back_the_same(frames: Frames, data: st.DataObject) -> None:
    stream = _bytes_of(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert _feed(FrameReader(), pieces) == frames


@given(_frames, st.integers(1, 5))
def test_frames_taken_a_few_at_a_time_come_back_the_same(frames: Frames, at_most: int) -> None:
    reader = FrameReader()
    reader.feed(_bytes_of(frames))
    taken: Frames = []
    while some := reader.take_frames(at_most):
        assert len(some) <= at_most
        taken += some
    assert taken == frames


@given(_frames, st.binary(min_size=1, max_size=80))
def test_an_unfinished_frame_stays_pending(frames: Frames, body: bytes) -> None:
    reader = FrameReader()
    whole = frame(7, body)
    reader.feed(_bytes_of(frames) + whole[:-1])
    assert reader.take_frames() == frames
    assert reader.pending_bytes == len(whole) - 1
    reader.feed(whole[-1:])
    assert reader.take_frames() == [(7, body)]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_frames_or_a_protocol_error(data: bytes) -> None:
    reader = FrameReader()
    reader.feed(data)
    try:
        frames = reader.take_frames()
    except ProtocolError as error:
        assert error.reason in {CloseReason.BAD_FRAME, CloseReason.FRAME_TOO_LARGE}
        return
    assert _bytes_of(frames) == data[: len(data) - reader.pending_bytes]


@pytest.mark.parametrize("opened", [False, True])
def test_length_zero_is_no_frame(opened: bool) -> None:
    reader = _open_reader() if opened else FrameReader()
    reader.feed(pack("<I", 0))
    with pytest.raises(ProtocolError, match="length 0, at least the kind") as caught:
        reader.take_frames()
    assert caught.value.reason is CloseReason.BAD_FRAME


@pytest.mark.parametrize(("opened", "limit"), [(False, HANDSHAKE_FRAME_MAX_BYTES), (True, FRAME_MAX_BYTES)])
@pytest.mark.parametrize("beyond", ["one more", "2**32 - 1"])
def test_a_length_above_the_limit_is_refused_before_its_bytes_arrive(
    opened: bool, limit: int, beyond: str
) -> None:
    length = limit + 1 if beyond == "one more" else 2**32 - 1
    reader = _open_reader() if opened else FrameReader()
    reader.feed(pack("<I", length))
    with pytest.raises(ProtocolError, match=rf"{length} bytes, at most {limit} .* smaller batches") as caught:
        reader.take_frames()
    assert caught.value.reason is CloseReason.FRAME_TOO_LARGE


def test_a_frame_of_exactly_the_limit_passes_before_and_after_the_handshake() -> None:
    reader = FrameReader()
    small = bytes(HANDSHAKE_FRAME_MAX_BYTES - 1)
    reader.feed(frame(1, small))
    assert reader.take_frames() == [(1, small)]
    reader.open_up()
    large = bytes(FRAME_MAX_BYTES - 1)
    reader.feed(frame(5, large))
    assert reader.take_frames() == [(5, large)]


def test_a_large_frame_right_behind_the_handshake_waits_for_the_limit_to_rise() -> None:
    reader = FrameReader()
    large = bytes(HANDSHAKE_FRAME_MAX_BYTES)
    reader.feed(frame(1, b"hello") + frame(5, large))
    assert reader.take_frames(at_most=1) == [(1, b"hello")]
    reader.open_up()
    assert reader.take_frames() == [(5, large)]


def test_the_header_has_five_bytes() -> None:
    assert frame(3, b"ab") == b"\x03\0\0\0\x03ab"
    assert len(frame(3, b"")) == FRAME_HEADER_BYTES
