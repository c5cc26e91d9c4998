"""Control frames and heartbeats as bytes and back.

Control frames are msgpack maps whose keys are the field names of the dataclass: readable in a
packet dump, and a newer peer may add fields that an older one ignores. Decoding checks every
field's type; garbage raises ProtocolError and nothing else.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from struct import Struct
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import msgpack

from overlay.errors import CloseReason, ProtocolError, show
from overlay.framing import frame
from overlay.limits import CONTROL_NESTING_MAX
from overlay.messages import (
    Close,
    ControlMessage,
    Declare,
    Declared,
    Draining,
    FrameKind,
    Heartbeat,
    Hello,
    Matched,
    Measured,
    Prune,
    Publishers,
    QosChanged,
    Refused,
    Resume,
    Undeclare,
    Welcome,
)

_TYPE_OF_KIND: Final[dict[int, type[ControlMessage]]] = {
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
_KIND_OF_TYPE: Final = {message_type: kind for kind, message_type in _TYPE_OF_KIND.items()}


def _options(hint: Any) -> tuple[tuple[Any, Any], ...]:
    """The types that a field may have, each with what its elements are of."""
    union = isinstance(hint, types.UnionType) or get_origin(hint) is Union
    return tuple(
        (get_origin(option) or option, next(iter(get_args(option)), None))
        for option in (get_args(hint) if union else (hint,))
    )


_FIELDS: Final = {
    message_type: tuple(
        (
            item.name,
            item.default is MISSING and item.default_factory is MISSING,
            _options(get_type_hints(message_type)[item.name]),
        )
        for item in fields(message_type)
    )
    for message_type in _KIND_OF_TYPE
}

_HEARTBEAT: Final = Struct("<QQQQ")
_HEARTBEAT_BYTES: Final = _HEARTBEAT.size
_HEARTBEAT_KIND: Final = int(FrameKind.HEARTBEAT)


def encode(message: ControlMessage) -> bytes:
    """A control message as a whole frame."""
    message_type = type(message)
    content = {name: getattr(message, name) for name, _, _ in _FIELDS[message_type]}
    return frame(_KIND_OF_TYPE[message_type], msgpack.packb(content))


def decode(kind: int, body: bytes) -> ControlMessage:
    """The control message in the body of a frame of this kind."""
    message_type = _TYPE_OF_KIND.get(kind)
    if message_type is None:
        raise ProtocolError(CloseReason.BAD_FRAME, f"unknown frame kind {kind}")
    try:
        content = msgpack.unpackb(body, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(
            CloseReason.BAD_FRAME, f"{message_type.__name__}: not msgpack: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ProtocolError(CloseReason.BAD_FRAME, f"{message_type.__name__}: not a map")
    values: dict[str, Any] = {}
    for name, required, options in _FIELDS[message_type]:
        if name in content:
            values[name] = _checked(message_type.__name__, name, content[name], options)
        elif required:
            raise ProtocolError(CloseReason.BAD_FRAME, f"{message_type.__name__}: {name} is missing")
    return message_type(**values)


def _checked(message: str, name: str, value: object, options: tuple[tuple[Any, Any], ...]) -> Any:
    """`value` as one of the types that its field may have, or ProtocolError."""
    for plain, inner in options:
        if plain is types.NoneType:
            if value is None:
                return None
        elif plain is int:
            if _is_plain(value, int):
                return value
        elif plain is tuple:
            if isinstance(value, list) and all(_is_plain(item, inner) for item in value):
                return tuple(value)
        elif plain is dict:
            if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
                _check_nesting(message, name, value)
                return dict(value)
        elif issubclass(plain, StrEnum):
            if isinstance(value, str) and value in plain.__members__.values():
                return plain(value)
        elif type(value) is plain:
            return value
    raise ProtocolError(CloseReason.BAD_FRAME, f"{message}: {name} is {show(value)}")


def _check_nesting(message: str, name: str, value: object) -> None:
    """Whoever passes a field on walks through it: what only a decoder can bear goes no further."""
    level = [value]
    for _ in range(CONTROL_NESTING_MAX):
        level = [
            item
            for outer in level
            if isinstance(outer, Mapping | list)
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    if any(isinstance(item, Mapping | list) for item in level):
        raise ProtocolError(
            CloseReason.BAD_FRAME, f"{message}: {name} is nested deeper than {CONTROL_NESTING_MAX} levels"
        )


def _is_plain(value: object, kind: type) -> bool:
    """Text, or a number that fits into 64 bits."""
    return type(value) is kind and (kind is not int or 0 <= value < 2**64)  # type: ignore[operator]


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """A heartbeat as a whole frame."""
    return frame(_HEARTBEAT_KIND, _HEARTBEAT.pack(*heartbeat))


def decode_heartbeat(body: bytes) -> Heartbeat:
    """The heartbeat in the body of a HEARTBEAT frame."""
    if len(body) != _HEARTBEAT_BYTES:
        raise ProtocolError(
            CloseReason.BAD_FRAME, f"heartbeat of {len(body)} bytes, it has {_HEARTBEAT_BYTES}"
        )
    return Heartbeat(*_HEARTBEAT.unpack(body))
