"""Reading the data frames of clients: who sent their messages, and when those were born."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from librt.strings import BytesWriter, read_i64_le, write_i64_le

from edge_broker.model import Publisher
from overlay.batch import (
    BATCH_HEADER_BYTES,
    BORN_END,
    BORN_OFFSET,
    LENGTH_WORD_OFFSET,
    MESSAGE_HEADER_BYTES,
    PUBLISHER_OFFSET,
    U32,
)
from overlay.delay import put_back_ns
from overlay.errors import CloseReason, ProtocolError
from overlay.messages import UNKNOWN_CLOCK_SHIFT

if TYPE_CHECKING:
    from mypy_extensions import i64


def publishers_of(publishers: Mapping[int, Publisher], body: bytes) -> list[Publisher]:
    """The publisher of each message of a client's frame; the frame has been checked to be whole."""
    found: list[Publisher] = []
    end: i64 = len(body)
    offset: i64 = BATCH_HEADER_BYTES
    while offset < end:
        topic_id: i64 = read_i64_le(body, offset)
        publisher_id = read_i64_le(body, offset + PUBLISHER_OFFSET)
        length: i64 = read_i64_le(body, offset + LENGTH_WORD_OFFSET) >> 32
        publisher = publishers.get(publisher_id)
        if publisher is None or publisher.topic.topic_id != topic_id & U32:
            raise ProtocolError(
                CloseReason.UNKNOWN_PUBLISHER,
                f"publisher {publisher_id:016x} has not declared topic {topic_id & U32}",
            )
        found.append(publisher)
        offset += MESSAGE_HEADER_BYTES + (length & U32)
    return found


def on_our_clock(
    body: bytes, publishers: Sequence[Publisher], shift_ns: int, now_ns: int, worse_drift_ppm: int = 0
) -> bytes:
    """The frame's body with all stamps brought to our clock; 0 where their age is not known.

    `worse_drift_ppm` is what the client's clock drifts if that is more than ours. All who get its messages
    from us reckon with ours: births at that client are put back by what its clock may have missed.

    What is known of a client's clock changes all the time, but a message is never older than one
    its publisher sent before it: stamps of a publisher never step back, and so never change the
    order of its messages.
    """
    if worse_drift_ppm:
        body = _put_back(body, shift_ns, now_ns, worse_drift_ppm)
    known = shift_ns != UNKNOWN_CLOCK_SHIFT
    data = BytesWriter()
    copied: i64 = 0
    offset: i64 = BATCH_HEADER_BYTES
    for publisher in publishers:
        born_ns: i64 = read_i64_le(body, offset + BORN_OFFSET)
        length: i64 = read_i64_le(body, offset + LENGTH_WORD_OFFSET) >> 32
        here_ns = publisher.born_ns
        if known and born_ns:
            stamp_ns: i64 = born_ns - shift_ns
            if stamp_ns <= here_ns:
                if not here_ns:  # older than our clock
                    here_ns = publisher.born_ns = 1
            elif stamp_ns > now_ns:  # a client cannot make its messages younger than now
                here_ns = publisher.born_ns = now_ns
            else:
                here_ns = publisher.born_ns = stamp_ns
        data.write(body[copied : offset + BORN_OFFSET])
        write_i64_le(data, here_ns)
        copied = offset + BORN_END
        offset += MESSAGE_HEADER_BYTES + (length & U32)
    data.write(body[copied:])
    return data.getvalue()


def _put_back(body: bytes, shift_ns: int, now_ns: int, drift_ppm: int) -> bytes:
    """The frame's body with births so early that the client's clock may have drifted so much since."""
    data = BytesWriter()
    copied: i64 = 0
    offset: i64 = BATCH_HEADER_BYTES
    end: i64 = len(body)
    while offset < end:
        born_ns: i64 = read_i64_le(body, offset + BORN_OFFSET)
        length: i64 = read_i64_le(body, offset + LENGTH_WORD_OFFSET) >> 32
        data.write(body[copied : offset + BORN_OFFSET])
        write_i64_le(data, put_back_ns(born_ns, shift_ns, now_ns, drift_ppm))
        copied = offset + BORN_END
        offset += MESSAGE_HEADER_BYTES + (length & U32)
    data.write(body[copied:])
    return data.getvalue()


def born_here_ns(born_ns: int, clock_shift_ns: int, now_ns: int) -> int:
    """When a message was born on our clock, at the latest that can be proven; now if unknown."""
    if not born_ns or clock_shift_ns == UNKNOWN_CLOCK_SHIFT:
        return now_ns
    return born_ns - clock_shift_ns
