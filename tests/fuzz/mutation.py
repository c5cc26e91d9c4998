"""Hostile inputs made from good ones: seeded, so that a failure can be had again."""

import random
from collections.abc import Sequence

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = (
    *(b"\xc0", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xcf" + b"\xff" * 8, b"\xcb\x7f\xf8" + bytes(6), b"\xd9\x00", b"\x91" * 600, b"\x81\xa1a" * 200),
    *(b'"', b"{", b"[", b"null", b"NaN", b"Infinity", b"-1", b"1e999", b"true", b"[" * 500, b'{"a":' * 500),
    *(
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\x00",
        b"\n",
        b"\t",
        b": ",
        b"- ",
        b"&a",
        b"*a",
        b"<<: *a",
        b"!!python",
    ),
    *(b"9" * 5_000, b"_", b"%", b"${x}", b"../", b"'", b"\\", b"\r\n\r\n", b"HTTP/1.1 200 OK"),
)
INPUT_MAX_BYTES = 64 * 1024


class Mutator:
    """Makes inputs from the examples of a corpus."""

    def __init__(self, corpus: Sequence[bytes], rng: random.Random) -> None:
        assert corpus
        self._corpus = list(corpus)
        self._rng = rng
        self._unchanged = iter(self._corpus)

    def next(self) -> bytes:
        """An input: first every example as it is, then one changed in a few places or, seldom, noise."""
        rng = self._rng
        if (example := next(self._unchanged, None)) is not None:
            return example
        kind = rng.random()
        if kind < 0.05:
            return rng.randbytes(rng.choice((0, 1, 4, 5, 17, 64, 300)))
        data = bytearray(rng.choice(self._corpus))
        if kind > 0.1:
            for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
                self._change(data)
        return bytes(data[:INPUT_MAX_BYTES])

    def _change(self, data: bytearray) -> None:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        match rng.randrange(9):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 3:
                del data[at : at + rng.choice((1, 1, 2, 8, 64))]
            case 4:
                del data[at:]
            case 5:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(INTERESTING) % 2 ** (8 * size)
                data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 6:
                data[at:at] = rng.choice(WORDS)
            case 7:
                other = rng.choice(self._corpus)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                piece = data[at : at + rng.randrange(1, 40)]
                data[at:at] = piece * rng.choice((1, 1, 30))


def cuts(data: bytes, rng: random.Random) -> list[bytes]:
    """The same bytes in pieces, as a network might deliver them."""
    pieces: list[bytes] = []
    start = 0
    while start < len(data):
        size = rng.choice((1, 2, 3, 7, 100, 5_000))
        pieces.append(data[start : start + size])
        start += size
    return pieces
