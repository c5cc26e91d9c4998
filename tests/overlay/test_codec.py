"""Control frames: round trips, and what garbage may do (raise ProtocolError, nothing else)."""

from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from typing import Any, get_args, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.codec import decode, decode_heartbeat, encode, encode_heartbeat
from overlay.errors import CloseReason, ProtocolError
from overlay.framing import FrameReader
from overlay.limits import CONTROL_NESTING_MAX, HANDSHAKE_FRAME_MAX_BYTES
from overlay.messages import (
    Close,
    ControlMessage,
    Declare,
    Declared,
    Draining,
    EndpointKind,
    FrameKind,
    Heartbeat,
    Hello,
    Matched,
    Measured,
    Prune,
    Publishers,
    QosChanged,
    QosIntent,
    Refused,
    Resume,
    Role,
    Undeclare,
    Welcome,
)

KINDS: dict[FrameKind, type[ControlMessage]] = {
    FrameKind.HELLO: Hello,
    FrameKind.WELCOME: Welcome,
    FrameKind.CLOSE: Close,
    FrameKind.DECLARE: Declare,
    FrameKind.DECLARED: Declared,
    FrameKind.REFUSED: Refused,
    FrameKind.UNDECLARE: Undeclare,
    FrameKind.MATCHED: Matched,
    FrameKind.PRUNE: Prune,
    FrameKind.QOS_CHANGED: QosChanged,
    FrameKind.PUBLISHERS: Publishers,
    FrameKind.MEASURED: Measured,
    FrameKind.DRAINING: Draining,
    FrameKind.RESUME: Resume,
}
u64 = st.integers(0, 2**64 - 1)
_plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)


_values = st.recursive(_plain, _nested, max_leaves=6)
_qos = st.dictionaries(st.text(), _plain | _nested(_plain | _nested(_plain)), max_size=4)
_of_hint: dict[object, st.SearchStrategy[Any]] = {
    int: u64,
    bool: st.booleans(),
    str: st.text(),
    Role: st.sampled_from(Role),
    EndpointKind: st.sampled_from(EndpointKind),
    QosIntent: st.sampled_from(QosIntent),
    tuple[str, ...]: st.lists(st.text(), max_size=4).map(tuple),
    tuple[int, ...]: st.lists(u64, max_size=4).map(tuple),
    tuple[int, ...] | None: st.none() | st.lists(u64, max_size=4).map(tuple),
    dict[str, Any]: _qos,
    dict[str, Any] | None: st.none() | _qos,
}


def _instances(message_type: type[ControlMessage]) -> st.SearchStrategy[ControlMessage]:
    hints = get_type_hints(message_type)
    return st.builds(message_type, **{item.name: _of_hint[hints[item.name]] for item in fields(message_type)})


_messages = st.one_of(*map(_instances, KINDS.values()))


def _split(data: bytes) -> tuple[int, bytes]:
    reader = FrameReader()
    reader.open_up()
    reader.feed(data)
    (only,) = reader.take_frames()
    assert reader.pending_bytes == 0
    return only


def _decode_or_refuse(kind: int, body: bytes) -> ControlMessage | None:
    """The message, or None if it was refused as garbage must be; anything else fails the test."""
    try:
        return decode(kind, body)
    except ProtocolError as error:
        assert error.reason is CloseReason.BAD_FRAME
        assert len(str(error)) < 500
        return None


def test_there_is_a_type_for_every_control_frame() -> None:
    assert set(KINDS) | {FrameKind.HEARTBEAT, FrameKind.DATA, FrameKind.NUMBERED} == set(FrameKind)
    assert set(KINDS.values()) == set(get_args(ControlMessage))


@given(_messages)
def test_every_control_message_survives_its_bytes(message: ControlMessage) -> None:
    kind, body = _split(encode(message))
    assert KINDS[FrameKind(kind)] is type(message)
    assert decode(kind, body) == message


@given(u64, u64, u64, u64)
def test_every_heartbeat_survives_its_bytes(sent: int, echo: int, echo_received: int, received: int) -> None:
    heartbeat = Heartbeat(sent, echo, echo_received, received)
    kind, body = _split(encode_heartbeat(heartbeat))
    assert kind == FrameKind.HEARTBEAT
    assert decode_heartbeat(body) == heartbeat


@given(st.binary(max_size=64).filter(lambda body: len(body) != 32))
def test_a_heartbeat_of_another_length_is_refused_with_both_lengths(body: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"heartbeat of {len(body)} bytes, it has 32") as caught:
        decode_heartbeat(body)
    assert caught.value.reason is CloseReason.BAD_FRAME


@given(st.integers(0, 255), st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(kind: int, body: bytes) -> None:
    message = _decode_or_refuse(kind, body)
    assert message is None or type(message) is KINDS[FrameKind(kind)]


@given(st.sampled_from(list(KINDS)), _values | _qos)
def test_arbitrary_msgpack_is_a_message_or_a_protocol_error(kind: FrameKind, content: object) -> None:
    message = _decode_or_refuse(kind, msgpack.packb(content))
    assert message is None or type(message) is KINDS[kind]


@given(_messages, st.data())
def test_one_field_replaced_by_anything_is_a_message_or_a_protocol_error(
    message: ControlMessage, data: st.DataObject
) -> None:
    content: dict[str, Any] = asdict(message)
    name = data.draw(st.sampled_from(sorted(content)))
    content[name] = data.draw(_values)
    kind, _ = _split(encode(message))
    decoded = _decode_or_refuse(kind, msgpack.packb(content))
    if decoded is not None:
        assert _split(encode(decoded)) == _split(encode(decode(kind, _split(encode(decoded))[1])))


@given(_messages, st.data())
def test_a_truncated_message_is_a_protocol_error(message: ControlMessage, data: st.DataObject) -> None:
    kind, body = _split(encode(message))
    cut = data.draw(st.integers(0, len(body) - 1))
    assert _decode_or_refuse(kind, body[:cut]) is None


@given(_messages, st.dictionaries(st.text(), _values, max_size=3))
def test_fields_a_newer_peer_adds_are_ignored(message: ControlMessage, extra: dict[str, Any]) -> None:
    content = {f"new {name}": value for name, value in extra.items()} | asdict(message)
    kind, _ = _split(encode(message))
    assert decode(kind, msgpack.packb(content)) == message


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, item.name)
        for kind, message_type in KINDS.items()
        for item in fields(message_type)
        if item.default is MISSING and item.default_factory is MISSING
    ],
)
def test_a_missing_field_is_named(kind: FrameKind, name: str) -> None:
    whole: dict[str, Any] = {
        "role": "edge",
        "node": "a",
        "incarnation": 1,
        "heartbeat_ns": 1,
        "reason": "goodbye",
        "endpoint": 1,
        "lan": "plant",
        "edge": "e1",
        "kind": "pub",
        "topic": "t",
        "topic_id": 1,
        "code": "c",
        "subscribers": 0,
        "frames": [1, 2],
        "publishers": [3, 4],
        "complete": True,
    }
    assert isinstance(decode(kind, msgpack.packb(whole)), KINDS[kind])
    del whole[name]
    with pytest.raises(ProtocolError, match=f"{KINDS[kind].__name__}: {name} is missing"):
        decode(kind, msgpack.packb(whole))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"endpoint": -1, "subscribers": 0}, "endpoint is -1"),
        ({"endpoint": 1, "subscribers": True}, "subscribers is True"),
        ({"endpoint": 1.0, "subscribers": 0}, "endpoint is 1.0"),
        ({"endpoint": 1, "subscribers": None}, "subscribers is None"),
        ({"endpoint": 1, "subscribers": "many"}, "subscribers is 'many'"),
        ([1, 2], "not a map"),
        (None, "not a map"),
    ],
)
def test_a_field_of_the_wrong_type_is_named_with_its_value(content: object, words: str) -> None:
    with pytest.raises(ProtocolError, match=f"Matched: {words}"):
        decode(FrameKind.MATCHED, msgpack.packb(content))


@pytest.mark.parametrize("frames", [None, 5, "12", [1, -2], [1, "2"], [True, 2], {"1": 2}])
def test_a_prune_of_anything_but_frame_numbers_is_refused(frames: object) -> None:
    with pytest.raises(ProtocolError, match="Prune: frames is"):
        decode(FrameKind.PRUNE, msgpack.packb({"frames": frames}))


@pytest.mark.parametrize("kind", [0, FrameKind.HEARTBEAT, FrameKind.DATA, len(FrameKind) + 1, 255])
def test_a_kind_that_is_no_control_frame_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown frame kind {int(kind)}"):
        decode(kind, b"\x80")


@pytest.mark.parametrize("depth", [10, 400, 1000, 3000])
def test_a_deeply_nested_value_within_the_handshake_limit_is_refused_shortly(depth: int) -> None:
    body = b"\x81" + msgpack.packb("reason") + b"\x91" * depth + b"\xc0"
    assert len(body) < HANDSHAKE_FRAME_MAX_BYTES
    assert _decode_or_refuse(FrameKind.CLOSE, body) is None


@pytest.mark.parametrize("nest", [lambda value: [value], lambda value: {"a": value}], ids=["lists", "maps"])
def test_a_map_is_nested_as_deep_as_the_limit_and_no_deeper(nest: Callable[[object], object]) -> None:
    def declared(depth: int) -> bytes:
        value: object = 1
        for _ in range(depth):
            value = nest(value)
        return msgpack.packb({"endpoint": 1, "kind": "pub", "topic": "a", "qos": {"period_ms": value}})

    message = decode(FrameKind.DECLARE, declared(CONTROL_NESTING_MAX - 1))
    assert decode(*_split(encode(message))) == message
    for depth in (CONTROL_NESTING_MAX, 400):
        with pytest.raises(ProtocolError, match=f"qos is nested deeper than {CONTROL_NESTING_MAX} levels"):
            decode(FrameKind.DECLARE, declared(depth))


@pytest.mark.parametrize(
    "value",
    [
        b"\xd4\x01\x00",
        b"\xd6\xff\0\0\0\0",
        b"\xc7\x00\x01",
        b"\xc1",
        b"\xdb\xff\xff\xff\xff",
        b"\xa2\xff\xfe",
    ],
    ids=["extension", "timestamp", "empty extension", "reserved byte", "endless text", "not UTF-8"],
)
def test_exotic_msgpack_is_refused(value: bytes) -> None:
    assert _decode_or_refuse(FrameKind.CLOSE, b"\x81" + msgpack.packb("reason") + value) is None


def test_secrets_are_not_shown_when_a_message_is():
    hello = Hello(Role.EDGE, "e1", 1, 10**7, token="a token", datagrams="a key")
    welcome = Welcome(Role.ROUTER, "r1", 1, datagrams="a key")
    assert "e1" in repr(hello) and "r1" in repr(welcome)
    assert not any(secret in repr((hello, welcome)) for secret in ("a token", "a key"))
