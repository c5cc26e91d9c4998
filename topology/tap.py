"""Counts the messages that pass a point of the WAN, by topic, from the bytes themselves.

What brokers say about themselves is no proof that a topic stayed in its LAN. The gateway between a
LAN and the cloud sees every byte; the tap reads the frames in them.
"""

from collections import Counter

from overlay.batch import BATCH_HEADER_BYTES, MESSAGE_HEADER, MESSAGE_HEADER_BYTES
from overlay.errors import ProtocolError
from overlay.framing import FrameReader
from overlay.messages import FrameKind


class Tap:
    """One direction of all connections through a gateway."""

    def __init__(self) -> None:
        self.bytes = 0
        self.messages: Counter[int] = Counter()
        """Messages by topic id."""
        self.unreadable = 0
        """Connections whose bytes were no frames; what passed on them is unknown."""

    def stream(self) -> "TapStream":
        """The reader for one new connection."""
        return TapStream(self)


class TapStream:
    """One direction of one connection."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._reader: FrameReader | None = FrameReader()
        self._reader.open_up()

    def feed(self, data: bytes) -> None:
        """Count what these bytes hold."""
        self._tap.bytes += len(data)
        if self._reader is None:
            return
        try:
            self._reader.feed(data)
            for kind, body in self._reader.take_frames():
                if kind == FrameKind.DATA:
                    self._count(body)
        except ProtocolError:
            self._tap.unreadable += 1
            self._reader = None

    def _count(self, body: bytes) -> None:
        offset = BATCH_HEADER_BYTES
        while offset + MESSAGE_HEADER_BYTES <= len(body):
            topic_id, _, _, _, length = MESSAGE_HEADER.unpack_from(body, offset)
            self._tap.messages[topic_id] += 1
            offset += MESSAGE_HEADER_BYTES + length
