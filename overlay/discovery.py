"""The datagrams with which clients find an edge broker of their LAN.

A datagram is the four bytes `ISTH` and a msgpack map. An edge announces itself; a client asks.
"""

from dataclasses import asdict, dataclass
from typing import Final

import msgpack

from overlay.errors import CloseReason, InvalidNameError, ProtocolError, show
from overlay.locator import Locator
from overlay.names import check_name

_MAGIC: Final = b"ISTH"
DATAGRAM_MAX_BYTES: Final = 512
DISCOVERY_VERSION: Final = 1
DISCOVERY_GROUP: Final = "239.255.74.0"
"""Multicast group of the organisation-local scope; one LAN, one group."""
DISCOVERY_PORT: Final = 7474


@dataclass(frozen=True, slots=True)
class Announcement:
    """Edge to everyone in the LAN: clients can connect to me at `locator`."""

    edge: str
    lan: str
    locator: str
    cluster: str


@dataclass(frozen=True, slots=True)
class Query:
    """Client to all edges of the LAN: announce yourselves to me."""

    lan: str = ""
    """Only edges of this LAN should answer; empty for any."""


def encode_datagram(message: Announcement | Query) -> bytes:
    """The bytes of a discovery datagram."""
    kind = "announcement" if isinstance(message, Announcement) else "query"
    return _MAGIC + msgpack.packb({"version": DISCOVERY_VERSION, "kind": kind, **asdict(message)})


def decode_datagram(data: bytes) -> Announcement | Query:
    """Read a discovery datagram; anything else raises ProtocolError."""
    if len(data) > DATAGRAM_MAX_BYTES or not data.startswith(_MAGIC):
        raise ProtocolError(CloseReason.BAD_FRAME, f"{len(data)} bytes that are no discovery datagram")
    try:
        content = msgpack.unpackb(data[len(_MAGIC) :], strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(CloseReason.BAD_FRAME, f"not msgpack: {error}") from error
    if not isinstance(content, dict) or content.get("version") != DISCOVERY_VERSION:
        raise ProtocolError(CloseReason.WRONG_PROTOCOL, "a discovery datagram of another version")
    kind = content.get("kind")
    if kind not in ("announcement", "query"):
        raise ProtocolError(CloseReason.BAD_FRAME, f"kind is {show(kind)}")
    names = ("lan",) if kind == "query" else ("edge", "lan", "locator", "cluster")
    values: dict[str, str] = {}
    for name in names:
        value = content.get(name)
        if not isinstance(value, str):
            raise ProtocolError(CloseReason.BAD_FRAME, f"{name} is {show(value)}")
        values[name] = value
    if kind == "query":
        return Query(**values)
    try:
        check_name("edge", values["edge"])
        check_name("LAN", values["lan"])
        Locator.parse(values["locator"])
    except InvalidNameError as error:
        raise ProtocolError(CloseReason.BAD_MESSAGE, str(error)) from error
    return Announcement(**values)
