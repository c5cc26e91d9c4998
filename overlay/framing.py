"""Cutting a byte stream into frames: `u32 length | u8 kind | body`, little endian.

The length counts the kind and the body. Only the length is looked at before the whole frame
is there, so a peer that sends slowly costs a buffer of at most one frame.
"""

from struct import Struct
from typing import Final, NoReturn

from overlay.errors import CloseReason, ProtocolError
from overlay.limits import FRAME_MAX_BYTES, HANDSHAKE_FRAME_MAX_BYTES

_LENGTH: Final = Struct("<I")
_LENGTH_KIND: Final = Struct("<IB")

FRAME_HEADER_BYTES: Final = _LENGTH_KIND.size


def frame(kind: int, body: bytes) -> bytes:
    """One frame as bytes."""
    return _LENGTH_KIND.pack(1 + len(body), kind) + body


class FrameReader:
    """Collects bytes and hands out whole frames as (kind, body).

    Before the handshake only small frames are let in; `open_up` raises the limit.
    """

    __slots__ = ("_limit_bytes", "_needed_bytes", "_parts", "_pending_bytes")

    def __init__(self) -> None:
        # Parts are only joined when they hold a whole frame, so small pieces cost no copying.
        self._parts: list[bytes] = []
        self._pending_bytes = 0
        self._needed_bytes = _LENGTH.size
        self._limit_bytes = HANDSHAKE_FRAME_MAX_BYTES

    def open_up(self) -> None:
        """The peer has introduced itself: frames of full size are welcome."""
        self._limit_bytes = FRAME_MAX_BYTES

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return self._pending_bytes

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._parts.append(data)
        self._pending_bytes += len(data)

    def take_frames(self, at_most: int = 2**31) -> list[tuple[int, bytes]]:
        """The whole frames received so far; `at_most` one during the handshake, as the limit changes then.

        Raises ProtocolError on a length no frame can have, once the frames before it have been taken: what
        a stream means does not depend on how it arrives.
        """
        if self._pending_bytes < self._needed_bytes:
            return []
        frames: list[tuple[int, bytes]] = []
        buffer = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        offset = 0
        available = len(buffer)
        self._needed_bytes = _LENGTH.size
        while available - offset >= _LENGTH.size and len(frames) < at_most:
            (length,) = _LENGTH.unpack_from(buffer, offset)
            if not 0 < length <= self._limit_bytes:
                if frames:
                    break
                self._refuse(length)
            end = offset + _LENGTH.size + length
            if end > available:
                self._needed_bytes = end - offset
                break
            frames.append((buffer[offset + 4], buffer[offset + 5 : end]))
            offset = end
        rest = buffer[offset:]
        self._parts = [rest] if rest else []
        self._pending_bytes = len(rest)
        return frames

    def _refuse(self, length: int) -> NoReturn:
        if length == 0:
            raise ProtocolError(CloseReason.BAD_FRAME, "frame of length 0, at least the kind is needed")
        raise ProtocolError(
            CloseReason.FRAME_TOO_LARGE,
            f"frame of {length} bytes, at most {self._limit_bytes} are allowed: send smaller batches",
        )
