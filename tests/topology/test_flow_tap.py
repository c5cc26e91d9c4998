"""Messages are counted from packets: once each, however often they are sent."""

import random
import struct

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from overlay.batch import Run, encode_batch, encode_message
from overlay.codec import encode
from overlay.express import FRAME, FRAME_HEADER
from overlay.framing import FRAME_HEADER_BYTES
from overlay.messages import Hello, Role
from runtime.datagrams import HEADER, Seal
from topology.flow_tap import FlowTap
from topology.tap import Tap

SYN, ACK, FIN = 0x02, 0x10, 0x01


def packet(sequence: int, payload: bytes = b"", flags: int = ACK, port: int = 40_000) -> bytes:
    tcp = struct.pack("!HHIIBBHHH", port, 7_400, sequence % 2**32, 0, 5 << 4, flags, 0, 0, 0)
    total = 20 + len(tcp) + len(payload)
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, total, 0, 0, 64, 6, 0, b"\xc6\x12\x01\x0a", b"\xc6\x12\x64\x0a"
    )
    return ip + tcp + payload


def frames(count: int, topic: int = 7) -> bytes:
    return b"".join(
        encode_batch(0, 1, 0, [Run(2, encode_message(topic, 1, n, 0, b"x" * 50) * 2)]) for n in range(count)
    )


@pytest.mark.parametrize("start", [0, 2**32 - 700])
def test_counts_across_packets_and_the_end_of_the_numbers(start: int) -> None:
    tap = FlowTap()
    tap.feed(packet(start, flags=SYN))
    data = frames(20)
    for offset in range(0, len(data), 333):
        tap.feed(packet(start + 1 + offset, data[offset : offset + 333]))
    assert tap.tap.messages == {7: 40} and tap.tap.unreadable == 0 and tap.connections == 1
    tap.feed(packet(start + 1 + len(data), flags=FIN | ACK))
    assert tap.connections == 0


def test_what_is_sent_again_counts_once() -> None:
    tap = FlowTap()
    tap.feed(packet(99, flags=SYN))
    data = frames(30)
    generator = random.Random(1)
    sent = 0
    while sent < len(data):
        begin = max(0, sent - generator.choice([0, 0, 100, 1_000]))
        end = min(len(data), sent + generator.randrange(1, 400))
        tap.feed(packet(100 + begin, data[begin:end]))
        sent = end
    assert tap.tap.messages == {7: 60}


def test_a_hole_makes_the_connection_unreadable_and_no_other() -> None:
    tap = FlowTap()
    for port in (1, 2):
        tap.feed(packet(0, flags=SYN, port=port))
    data = frames(1)
    tap.feed(packet(2, data[1:], port=1))
    tap.feed(packet(1, data, port=1))
    tap.feed(packet(1, data, port=2))
    assert tap.tap.unreadable == 1 and tap.tap.messages == {7: 2}


def test_passes_over_what_is_not_tcp() -> None:
    tap = FlowTap()
    tap.feed(packet(0, b"x")[:9] + b"\x11" + packet(0, b"x")[10:])
    tap.feed(packet(5, b"data of a connection whose beginning was not seen"))
    assert tap.connections == 0 and tap.tap.bytes == 0


def test_sealed_datagrams_are_read_with_the_seal_of_the_handshake() -> None:
    seals: dict[int, Seal] = {}
    there, back = Tap(seals), Tap(seals)
    seal = Seal(7, bytes(range(32)))
    hello = Hello(Role.EDGE, "a", 1, 10_000_000, datagrams=str(seal))
    body = encode_batch(0, 1, 0, [Run(1, encode_message(5, 1, 1, 0, b"payload"))])[FRAME_HEADER_BYTES:]
    header = HEADER.pack(seal.channel, 1)
    sealed = ChaCha20Poly1305(seal.key).encrypt(
        bytes(4) + (1).to_bytes(8, "little"), FRAME_HEADER.pack(FRAME, 1) + body, header
    )
    # Before the handshake nobody can tell what it is; after it, datagrams go to who said hello.
    back.feed_datagram(header + sealed)
    assert back.messages == {}
    there.stream().feed(encode(hello))
    back.feed_datagram(header + sealed)
    assert back.messages == {5: 1} and back.unreadable == 0
    back.feed_datagram(header + sealed[:-1] + bytes([sealed[-1] ^ 1]))
    assert back.messages == {5: 1} and back.unreadable == 1
