"""Data frames: batches of messages that share an origin, forwarded verbatim.

A hop never re-encodes a message. It cuts the body into *runs*, the longest stretches of
neighbouring messages that go to the same places, and writes a new batch header in front of
the runs that leave on one link. A message starts with a fixed header:

    topic u32 | publisher u64 | sequence u64 | born u64 | length u32 | payload
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple

from overlay.errors import CloseReason, ProtocolError
from overlay.messages import FrameKind, Message

MESSAGE_HEADER: Final = Struct("<IQQQI")
"""topic, publisher, sequence, born_ns, payload length."""
MESSAGE_HEADER_BYTES: Final = MESSAGE_HEADER.size
TOPIC_AND_LENGTH: Final = Struct("<I24xI")
"""The two fields that whoever only counts messages by topic needs."""

_BATCH_HEADER: Final = Struct("<BxxQqI")
_FRAME_AND_BATCH_HEADER: Final = Struct("<IBBxxQqI")
BATCH_HEADER_BYTES: Final = _BATCH_HEADER.size
FRAME_OVERHEAD_BYTES: Final = _FRAME_AND_BATCH_HEADER.size


class BatchHeader(NamedTuple):
    """What the messages of a data frame share."""

    urgency: int
    """Deadline class; frames hold one class only, so that bulk can be shed unopened."""
    origin: int
    """Incarnation of the node whose clock the messages' `born_ns` were read on."""
    clock_shift_ns: int
    """What to add to `now - born` to get a bound on the age; UNKNOWN_CLOCK_SHIFT if there is none."""
    messages: int
    """How many messages follow."""


class Run(NamedTuple):
    """Neighbouring messages, as they are on the wire."""

    messages: int
    data: bytes


def encode_message(topic_id: int, publisher: int, sequence: int, born_ns: int, payload: bytes) -> bytes:
    """One message as it travels in a data frame."""
    return MESSAGE_HEADER.pack(topic_id, publisher, sequence, born_ns, len(payload)) + payload


def encode_batch(urgency: int, origin: int, clock_shift_ns: int, runs: Iterable[Run]) -> bytes:
    """A whole data frame."""
    size = FRAME_OVERHEAD_BYTES - 4
    count = 0
    parts = [b""]
    for run in runs:
        size += len(run.data)
        count += run.messages
        parts.append(run.data)
    parts[0] = _FRAME_AND_BATCH_HEADER.pack(size, FrameKind.DATA, urgency, origin, clock_shift_ns, count)
    return b"".join(parts)


def decode_batch_header(body: bytes) -> BatchHeader:
    """The header of a data frame's body; messages follow at BATCH_HEADER_BYTES."""
    if len(body) < BATCH_HEADER_BYTES:
        raise ProtocolError(
            CloseReason.BAD_FRAME,
            f"data frame of {len(body)} bytes, its header alone has {BATCH_HEADER_BYTES}",
        )
    return BatchHeader(*_BATCH_HEADER.unpack_from(body))


def decode_messages(body: bytes) -> Iterator[Message]:
    """The messages of a data frame, one by one; for clients, tests and tools."""
    count = decode_batch_header(body).messages
    offset = BATCH_HEADER_BYTES
    end = len(body)
    seen = 0
    while offset < end:
        if end - offset < MESSAGE_HEADER_BYTES:
            raise truncated(seen, count)
        topic_id, publisher, sequence, born_ns, length = MESSAGE_HEADER.unpack_from(body, offset)
        start = offset + MESSAGE_HEADER_BYTES
        offset = start + length
        if offset > end:
            raise truncated(seen, count)
        yield Message(topic_id, publisher, sequence, born_ns, body[start:offset])
        seen += 1
    if seen != count:
        raise truncated(seen, count)


def truncated(seen: int, count: int) -> ProtocolError:
    """The error for a data frame whose messages do not fill it exactly."""
    return ProtocolError(
        CloseReason.BAD_FRAME, f"data frame announces {count} messages, {seen} are whole and fill it"
    )
