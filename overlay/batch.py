"""Data frames: batches of messages that share an origin, forwarded verbatim.

A hop never re-encodes a message. It cuts the body into *runs*, the longest stretches of
neighbouring messages that go to the same places, and writes a new batch header in front of
the runs that leave on one link. A message starts with a fixed header:

    topic u32 | publisher u64 | sequence u64 | born u64 | length u32 | payload

Publishers stay below 2^63 and are read as signed numbers; sequences, times and clock shifts stay
below 2^61 (`WIRE_NUMBER_BITS`), so that sums of a few of them are signed numbers too.
The loops that look at every message read single fields with `librt`: compiled they are machine
code (`make compile`), interpreted they cost about what `struct` does.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le

from overlay.errors import CloseReason, ProtocolError
from overlay.limits import WIRE_NUMBER_BITS
from overlay.messages import UNKNOWN_CLOCK_SHIFT, FrameKind, Message

if TYPE_CHECKING:
    from mypy_extensions import i64

MESSAGE_HEADER: Final = Struct("<IQQQI")
"""topic, publisher, sequence, born_ns, payload length."""
MESSAGE_HEADER_BYTES: Final = 32
PUBLISHER_OFFSET: Final = 4
SEQUENCE_OFFSET: Final = 12
BORN_OFFSET: Final = 20
BORN_END: Final = 28
LENGTH_WORD_OFFSET: Final = 24
"""The length is the upper half of the eight bytes here, the topic the lower half of those at 0."""
_MIDDLE_WORD_OFFSET: Final = 16
_TOO_LARGE: Final = 0xFFFF_FFFF >> (WIRE_NUMBER_BITS - 32) << (WIRE_NUMBER_BITS - 32)
"""The lower half of the word here is the upper half of a message's sequence, and that of the word with the
length is the upper half of its time of birth: a bit of these in either says that it is too large."""
U32: Final = 0xFFFF_FFFF
_BEYOND: Final = 0x7FFF_FFFF

SAMPLED_WORD_OFFSET: Final = 8
"""The upper half of the publisher and the lower half of the sequence: what sampling goes by, in one word."""
SAMPLING_STEP: Final = 0x1E37_79B9_9E37_79B9
"""Its lower half is 2^32 divided by the golden ratio: neighbouring sequences fall far apart.

It is itself below 2^63, which a compiled node's numbers are; of the product such a node keeps 64 bits."""
SAMPLING_SHIFT: Final = 33
SAMPLING_MASK: Final = 0x7FFF_FFFF
"""The highest 31 of those 64 bits are what is compared."""
NOTHING_SAMPLED: Final = 0
"""The threshold of a node that does not trace."""

_BATCH_HEADER: Final = Struct("<BxxQqQI")
_FRAME_AND_BATCH_HEADER: Final = Struct("<IBBxxQqQI")
BATCH_HEADER_BYTES: Final = 31
FRAME_OVERHEAD_BYTES: Final = 36

assert MESSAGE_HEADER.size == MESSAGE_HEADER_BYTES
assert _MIDDLE_WORD_OFFSET == SEQUENCE_OFFSET + 4
assert LENGTH_WORD_OFFSET == BORN_OFFSET + 4 == BORN_END - 4
assert _BATCH_HEADER.size == BATCH_HEADER_BYTES
assert _FRAME_AND_BATCH_HEADER.size == FRAME_OVERHEAD_BYTES


class BatchHeader:
    """What the messages of a data frame share."""

    __slots__ = ("clock_shift_ns", "messages", "origin", "sent_ns", "urgency")

    def __init__(
        self, urgency: int, origin: int, clock_shift_ns: int, messages: int, sent_ns: int = 0
    ) -> None:
        self.urgency = urgency
        """Deadline class; frames hold one class only, so that bulk can be shed unopened."""
        self.origin = origin
        """Incarnation of the node whose clock the messages' `born_ns` were read on."""
        self.clock_shift_ns = clock_shift_ns
        """What to add to `now - born` to get a bound on the age; UNKNOWN_CLOCK_SHIFT if there is none."""
        self.messages = messages
        """How many messages follow."""
        self.sent_ns = sent_ns
        """When the frame left, on the clock of the node that sent it; 0 if it did not say."""

    def shifted(self, clock_shift_ns: int) -> "BatchHeader":
        """The same with another clock shift."""
        return BatchHeader(self.urgency, self.origin, clock_shift_ns, self.messages, self.sent_ns)


class Passage:
    """How the messages of a data frame came to a node that traces some of them."""

    __slots__ = ("_next", "clock_shift_ns", "in_ns", "link_bound_ns", "next_offset", "offsets", "peer_in")

    def __init__(
        self, offsets: list[int], in_ns: int, peer_in: int, clock_shift_ns: int, link_bound_ns: int = 0
    ) -> None:
        self.offsets = offsets
        """Where in the frame the traced ones start, in order."""
        self.in_ns = in_ns
        """When they came; 0 if they came at different times and are sent again now."""
        self.peer_in = peer_in
        """Who sent them, as the trace numbers peers; 0 for nobody."""
        self.clock_shift_ns = clock_shift_ns
        """Of the messages' stamps, at this node."""
        self.link_bound_ns = link_bound_ns
        """Most they can have spent on the link they came on; 0 if unknown."""
        self._next = 0
        self.next_offset = offsets[0]
        """The first traced message that no run has been cut behind; beyond the frame if there is none."""

    def within(self, start: int, end: int) -> list[int]:
        """Where traced messages start in this part of the frame."""
        offsets = self.offsets
        if start <= offsets[0] and offsets[-1] < end:
            return offsets
        return offsets[bisect_left(offsets, start) : bisect_left(offsets, end)]

    def cut(self, start: int, end: int) -> bool:
        """Whether a traced message starts in this part of the frame; parts come in their order."""
        offsets = self.offsets
        self._next = bisect_left(offsets, end, self._next)
        self.next_offset = offsets[self._next] if self._next < len(offsets) else _BEYOND
        return self._next > 0 and offsets[self._next - 1] >= start

    def with_offsets(self, offsets: list[int]) -> "Passage":
        """For other bytes that came the same way."""
        return Passage(offsets, self.in_ns, self.peer_in, self.clock_shift_ns, self.link_bound_ns)

    def of_single(self, offset: int) -> "Passage | None":
        """For the message at this offset on its own; None if it is not traced."""
        return self.with_offsets([0]) if self.within(offset, offset + 1) else None


class Run:
    """Neighbouring messages, as they are on the wire."""

    __slots__ = ("came", "data", "messages", "start")

    def __init__(self, messages: int, data: bytes) -> None:
        self.messages = messages
        self.data = data
        self.came: Passage | None = None
        """Set if some of the messages are traced here."""
        self.start = 0
        """Where in the bytes that `came` speaks of these start."""


def cut_run(messages: int, data: bytes, start: int, end: int, came: Passage | None) -> Run:
    """A part of a data frame; it is told how the frame came if it holds traced messages."""
    run = Run(messages, data[start:end])
    if came is not None and came.next_offset < end and came.cut(start, end):
        run.came = came
        run.start = start
    return run


def encode_message(topic_id: int, publisher: int, sequence: int, born_ns: int, payload: bytes) -> bytes:
    """One message as it travels in a data frame."""
    return MESSAGE_HEADER.pack(topic_id, publisher, sequence, born_ns, len(payload)) + payload


def encode_batch(
    urgency: int, origin: int, clock_shift_ns: int, runs: Iterable[Run], sent_ns: int = 0
) -> bytes:
    """A whole data frame."""
    size = FRAME_OVERHEAD_BYTES - 4
    count = 0
    parts = [b""]
    for run in runs:
        size += len(run.data)
        count += run.messages
        parts.append(run.data)
    parts[0] = _FRAME_AND_BATCH_HEADER.pack(
        size, FrameKind.DATA, urgency, origin, clock_shift_ns, sent_ns, count
    )
    return b"".join(parts)


def decode_batch_header(body: bytes) -> BatchHeader:
    """The header of a data frame's body; messages follow at BATCH_HEADER_BYTES."""
    if len(body) < BATCH_HEADER_BYTES:
        raise ProtocolError(
            CloseReason.BAD_FRAME,
            f"data frame of {len(body)} bytes, its header alone has {BATCH_HEADER_BYTES}",
        )
    urgency, origin, clock_shift_ns, sent_ns, messages = _BATCH_HEADER.unpack_from(body)
    if sent_ns >> WIRE_NUMBER_BITS or (
        abs(clock_shift_ns) >> WIRE_NUMBER_BITS and clock_shift_ns != UNKNOWN_CLOCK_SHIFT
    ):
        raise ProtocolError(
            CloseReason.BAD_FRAME,
            f"data frame sent at {sent_ns} with clock shift {clock_shift_ns}:"
            f" both stay below 2^{WIRE_NUMBER_BITS}",
        )
    return BatchHeader(urgency, origin, clock_shift_ns, messages, sent_ns)


def check_messages(body: bytes, count: int, threshold: int = NOTHING_SAMPLED) -> list[int] | None:
    """Raise ProtocolError unless `count` whole messages with numbers in bounds fill a data frame's body.

    Returns where its sampled messages start, in order, None if there are none: this is the one place
    that looks at every message of every frame, so that tracing costs one more word of each.
    """
    sampled: list[int] | None = None
    offset: i64 = BATCH_HEADER_BYTES
    end: i64 = len(body)
    last_start: i64 = end - MESSAGE_HEADER_BYTES
    seen: i64 = 0
    below: i64 = threshold
    uppers: i64 = 0
    while offset <= last_start:
        last_word: i64 = read_i64_le(body, offset + LENGTH_WORD_OFFSET)
        uppers |= last_word | read_i64_le(body, offset + _MIDDLE_WORD_OFFSET)
        if below:
            word: i64 = read_i64_le(body, offset + SAMPLED_WORD_OFFSET)
            if word * SAMPLING_STEP >> SAMPLING_SHIFT & SAMPLING_MASK < below:
                if sampled is None:
                    sampled = []
                sampled.append(offset)
        offset += MESSAGE_HEADER_BYTES + (last_word >> 32 & U32)
        seen += 1
    if offset != end or seen != count:
        raise truncated(seen if offset <= end else seen - 1, count)
    if uppers & _TOO_LARGE:
        raise _too_large()
    return sampled


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
        if (sequence | born_ns) >> WIRE_NUMBER_BITS:
            raise _too_large()
        yield Message(topic_id, publisher, sequence, born_ns, body[start:offset])
        seen += 1
    if seen != count:
        raise truncated(seen, count)


def truncated(seen: int, count: int) -> ProtocolError:
    """The error for a data frame whose messages do not fill it exactly."""
    return ProtocolError(
        CloseReason.BAD_FRAME, f"data frame announces {count} messages, {seen} are whole and fill it"
    )


def _too_large() -> ProtocolError:
    return ProtocolError(
        CloseReason.BAD_FRAME, f"a message's sequence or time of birth is not below 2^{WIRE_NUMBER_BITS}"
    )
