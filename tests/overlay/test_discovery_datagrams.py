"""The datagrams clients find an edge broker with."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.discovery import (
    DATAGRAM_MAX_BYTES,
    Announcement,
    Query,
    decode_datagram,
    encode_datagram,
)
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import NAME_MAX_CHARACTERS

_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
_announcements = st.builds(
    Announcement,
    edge=_names,
    lan=_names,
    locator=st.builds("{}:{}".format, st.ip_addresses(v=4), st.integers(1, 65535)),
    cluster=st.text(max_size=32),
)
_announcement = Announcement("edge-a", "plant", "127.0.0.1:7400", "c1")


def _datagram(**changes: Any) -> bytes:
    content: dict[str, Any] = {
        "version": 1,
        "kind": "announcement",
        "edge": "edge-a",
        "lan": "plant",
        "locator": "127.0.0.1:7400",
        "cluster": "c1",
    }
    return b"ISTH" + msgpack.packb(content | changes)


@given(_announcements | st.builds(Query, lan=st.text(max_size=NAME_MAX_CHARACTERS)))
def test_a_datagram_survives_its_bytes_and_fits(message: Announcement | Query) -> None:
    data = encode_datagram(message)
    assert len(data) <= DATAGRAM_MAX_BYTES
    assert decode_datagram(data) == message


@given(st.binary(max_size=600) | st.binary(max_size=300).map(lambda tail: b"ISTH" + tail))
def test_arbitrary_bytes_are_a_datagram_or_a_protocol_error(data: bytes) -> None:
    try:
        message = decode_datagram(data)
    except ProtocolError:
        return
    assert decode_datagram(encode_datagram(message)) == message


@given(st.integers(0, 200))
def test_a_truncated_datagram_is_a_protocol_error(cut: int) -> None:
    data = encode_datagram(_announcement)
    with pytest.raises(ProtocolError):
        decode_datagram(data[: min(cut, len(data) - 1)])


def test_fields_a_newer_peer_adds_are_ignored() -> None:
    assert decode_datagram(_datagram(colour="blue")) == _announcement


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (_datagram(version=2), CloseReason.WRONG_PROTOCOL, "another version"),
        (_datagram(kind="farewell"), CloseReason.BAD_FRAME, "kind is 'farewell'"),
        (_datagram(kind=None), CloseReason.BAD_FRAME, "kind is None"),
        (_datagram(edge=7), CloseReason.BAD_FRAME, "edge is 7"),
        (_datagram(kind="query", lan=None), CloseReason.BAD_FRAME, "lan is None"),
        (_datagram(edge="-"), CloseReason.BAD_MESSAGE, "edge name '-' cannot be used"),
        (_datagram(lan="a b"), CloseReason.BAD_MESSAGE, "LAN name 'a b' cannot be used"),
        (_datagram(locator="nowhere"), CloseReason.BAD_MESSAGE, "address 'nowhere' cannot be used"),
        (b"ISTH" + msgpack.packb([1]), CloseReason.WRONG_PROTOCOL, "another version"),
        (b"ISTH", CloseReason.BAD_FRAME, "not msgpack"),
        (b"MDNS" + bytes(9), CloseReason.BAD_FRAME, "13 bytes that are no discovery datagram"),
        (_datagram(cluster="c" * 600), CloseReason.BAD_FRAME, "no discovery datagram"),
    ],
)
def test_what_is_wrong_with_a_datagram_is_named(data: bytes, reason: CloseReason, words: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_datagram(data)
    assert caught.value.reason is reason
    assert words in str(caught.value)
