"""Reading whole data frames: where their messages are, and when those were born."""

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Final

from edge_broker.model import Publisher
from overlay.batch import (
    BATCH_HEADER_BYTES,
    MESSAGE_HEADER,
    MESSAGE_HEADER_BYTES,
    BatchHeader,
    decode_batch_header,
    truncated,
)
from overlay.errors import CloseReason, ProtocolError
from overlay.messages import UNKNOWN_CLOCK_SHIFT

BORN: Final = Struct("<Q")
BORN_OFFSET: Final = 20
"""Where a message header has the time the message was born."""


def parse(body: bytes) -> tuple[BatchHeader, list[tuple[int, int, int, int, int, int]]]:
    """The frame's header and its messages as (topic, publisher, sequence, born, start, end), all whole."""
    header = decode_batch_header(body)
    messages: list[tuple[int, int, int, int, int, int]] = []
    end = len(body)
    last_start = end - MESSAGE_HEADER_BYTES
    offset = BATCH_HEADER_BYTES
    unpack_from = MESSAGE_HEADER.unpack_from
    while offset < end:
        if offset > last_start:
            raise truncated(len(messages), header.messages)
        topic_id, publisher_id, sequence, born_ns, length = unpack_from(body, offset)
        start = offset
        offset += MESSAGE_HEADER_BYTES + length
        messages.append((topic_id, publisher_id, sequence, born_ns, start, offset))
    if offset != end or len(messages) != header.messages:
        raise truncated(len(messages), header.messages)
    return header, messages


def parse_from_client(
    publishers: Mapping[int, Publisher], body: bytes
) -> tuple[BatchHeader, list[tuple[Publisher, int, int, int, int]]]:
    """The messages of a client's frame as (publisher, sequence, born, start, end), all checked."""
    header = decode_batch_header(body)
    found: list[tuple[Publisher, int, int, int, int]] = []
    end = len(body)
    last_start = end - MESSAGE_HEADER_BYTES
    offset = BATCH_HEADER_BYTES
    unpack_from = MESSAGE_HEADER.unpack_from
    while offset < end:
        if offset > last_start:
            raise truncated(len(found), header.messages)
        topic_id, publisher_id, sequence, born_ns, length = unpack_from(body, offset)
        publisher = publishers.get(publisher_id)
        if publisher is None or publisher.topic.topic_id != topic_id:
            raise ProtocolError(
                CloseReason.UNKNOWN_PUBLISHER,
                f"publisher {publisher_id:016x} has not declared topic {topic_id}",
            )
        start = offset
        offset += MESSAGE_HEADER_BYTES + length
        found.append((publisher, sequence, born_ns, start, offset))
    if offset != end or len(found) != header.messages:
        raise truncated(len(found), header.messages)
    return header, found


def on_our_clock(
    body: bytes, messages: Iterable[tuple[Publisher, int, int, int, int]], shift_ns: int, now_ns: int
) -> bytes:
    """The frame's body with all stamps brought to our clock; 0 where their age is not known.

    What is known of a client's clock changes all the time, but a message is never older than one
    its publisher sent before it: stamps of a publisher never step back, and so never change the
    order of its messages.
    """
    known = shift_ns != UNKNOWN_CLOCK_SHIFT
    data = bytearray(body)
    last_born_ns = -1
    here_ns = last_stamped_ns = 0
    stamp = BORN.pack(0)
    for publisher, _, born_ns, start, _ in messages:
        if born_ns != last_born_ns:
            # A client cannot make its messages younger than now or older than our clock.
            here_ns = max(1, min(born_ns - shift_ns, now_ns)) if known and born_ns else 0
            last_born_ns = born_ns
        stamped_ns = max(publisher.born_ns, here_ns)
        publisher.born_ns = stamped_ns
        if stamped_ns != last_stamped_ns:
            stamp = BORN.pack(stamped_ns)
            last_stamped_ns = stamped_ns
        data[start + BORN_OFFSET : start + BORN_OFFSET + BORN.size] = stamp
    return bytes(data)


def born_here_ns(born_ns: int, clock_shift_ns: int, now_ns: int) -> int:
    """When a message was born on our clock, at the latest that can be proven; now if unknown."""
    if not born_ns or clock_shift_ns == UNKNOWN_CLOCK_SHIFT:
        return now_ns
    return born_ns - clock_shift_ns
