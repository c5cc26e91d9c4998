"""Counts the messages that pass a point of the WAN, by topic, from the bytes themselves.

What brokers say about themselves is no proof that a topic stayed in its LAN. The gateway between a
LAN and the cloud sees every byte; the tap reads the frames in them. Urgent frames travel as sealed
datagrams beside the connections (`runtime.datagrams`): the tap takes the seals from the handshakes it
sees.
"""

from collections import Counter

from cryptography.exceptions import InvalidTag

from overlay.batch import BATCH_HEADER_BYTES, MESSAGE_HEADER, MESSAGE_HEADER_BYTES
from overlay.codec import decode
from overlay.errors import ProtocolError
from overlay.express import FRAME, FRAME_HEADER
from overlay.framing import FrameReader
from overlay.messages import FrameKind, Hello, Welcome
from runtime.connection import NUMBER
from runtime.datagrams import HEADER, Seal


class Tap:
    """One direction of all connections through a gateway."""

    def __init__(self, seals: dict[int, Seal] | None = None) -> None:
        """`seals` by channel are shared by all taps that see parts of the same connections."""
        self.bytes = 0
        self._seals: dict[int, Seal] = {} if seals is None else seals
        self.messages: Counter[int] = Counter()
        """Messages by topic id."""
        self.unreadable = 0
        """Connections whose bytes were no frames; what passed on them is unknown."""

    def stream(self) -> "TapStream":
        """The reader for one new connection."""
        return TapStream(self)

    def learn(self, kind: int, body: bytes) -> None:
        """See a handshake: it says how datagrams to its sender are sealed."""
        try:
            message = decode(kind, body)
        except ProtocolError:
            # The broker will complain; what follows can be counted all the same.
            return
        if isinstance(message, Hello | Welcome) and (seal := Seal.parse(message.datagrams)) is not None:
            self._seals[seal.channel] = seal

    def feed_datagram(self, data: bytes) -> None:
        """Count what a datagram holds; those of channels whose handshake was not seen are passed over."""
        if len(data) <= HEADER.size:
            return
        channel, number = HEADER.unpack_from(data)
        seal = self._seals.get(channel)
        if seal is None:
            return
        self.bytes += len(data)
        try:
            payload = seal.open(number, data)
        except InvalidTag:
            self.unreadable += 1
            return
        if payload[0] == FRAME:
            self.count(payload[FRAME_HEADER.size :])

    def count(self, body: bytes) -> None:
        """Count the messages of a data frame."""
        offset = BATCH_HEADER_BYTES
        while offset + MESSAGE_HEADER_BYTES <= len(body):
            topic_id, _, _, _, length = MESSAGE_HEADER.unpack_from(body, offset)
            self.messages[topic_id] += 1
            offset += MESSAGE_HEADER_BYTES + length


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
                    self._tap.count(body)
                elif kind == FrameKind.NUMBERED:
                    self._tap.count(body[NUMBER.size :])
                elif kind in {FrameKind.HELLO, FrameKind.WELCOME}:
                    self._tap.learn(kind, body)
        except ProtocolError:
            self._tap.unreadable += 1
            self._reader = None
