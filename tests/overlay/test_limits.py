"""Limits that only make sense together with sizes from other modules."""

from overlay.batch import FRAME_OVERHEAD_BYTES, MESSAGE_HEADER_BYTES, Run, encode_batch, encode_message
from overlay.codec import encode, encode_heartbeat
from overlay.discovery import DATAGRAM_MAX_BYTES, Announcement, encode_datagram
from overlay.framing import FrameReader
from overlay.limits import (
    FRAME_MAX_BYTES,
    HANDSHAKE_FRAME_MAX_BYTES,
    NAME_MAX_CHARACTERS,
    PAYLOAD_MAX_BYTES,
    TOPIC_MAX_BYTES,
)
from overlay.messages import Declare, EndpointKind, Heartbeat, Hello, Role
from overlay.qos import TopicQos


def test_the_largest_payload_fits_a_frame() -> None:
    assert PAYLOAD_MAX_BYTES + MESSAGE_HEADER_BYTES + FRAME_OVERHEAD_BYTES <= FRAME_MAX_BYTES
    reader = FrameReader()
    reader.open_up()
    reader.feed(encode_batch(0, 1, 0, [Run(1, encode_message(1, 2, 3, 4, bytes(PAYLOAD_MAX_BYTES)))]))
    assert len(reader.take_frames()) == 1


def test_the_longest_introduction_fits_before_the_handshake() -> None:
    name = "n" * NAME_MAX_CHARACTERS
    top = 2**64 - 1
    hello = Hello(Role.ROUTER, name, top, top, name, name, top, top, top)
    assert len(encode(hello)) <= HANDSHAKE_FRAME_MAX_BYTES


def test_heartbeats_and_declarations_are_small() -> None:
    assert len(encode_heartbeat(Heartbeat(1, 2, 3, 4))) == 37
    declare = Declare(2**64 - 1, EndpointKind.PUBLISHER, "t" * TOPIC_MAX_BYTES, TopicQos().to_record())
    assert len(encode(declare)) < 1024


def test_the_longest_announcement_fits_a_datagram() -> None:
    name = "n" * NAME_MAX_CHARACTERS
    address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535"
    assert len(encode_datagram(Announcement(name, name, address, name))) <= DATAGRAM_MAX_BYTES
