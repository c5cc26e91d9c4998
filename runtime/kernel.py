"""What only the kernel knows of a TCP connection: whether the other host answers, and bytes not yet read."""

import os
import socket
from struct import Struct
from typing import Final

from overlay.limits import KIB, MILLISECOND_NS

_READ_REST_BYTES: Final = 256 * KIB
_ACKNOWLEDGEMENTS: Final = Struct("=24xI28xI")
"""Of Linux's tcp_info: segments the peer's kernel has not acknowledged, milliseconds since it last did."""


def host_answers(sock: socket.socket, within_ns: int) -> bool:
    """The peer's kernel acknowledges our heartbeats, so the peer lives and only gets no time to run.

    Behind a proxy it is the proxy's kernel that answers. That still counts: the proxy would pass on
    the end of the peer, and taking a starved peer for dead costs more than noticing a dead path late.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    unacknowledged, last_ms = _ACKNOWLEDGEMENTS.unpack(
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGEMENTS.size)
    )
    # Where nothing is on its way, because we got no time to send, no acknowledgement is due.
    return bool(not unacknowledged or last_ms * MILLISECOND_NS <= within_ns)


def read_rest(sock: socket.socket) -> bytes:
    """Bytes that wait on a connection that has failed; none if there are no more.

    asyncio gives up on a connection when a write fails, although bytes may still wait to be read:
    messages that a killed broker had dispatched, perhaps the only copies there are.
    """
    try:
        return os.read(sock.fileno(), _READ_REST_BYTES)
    except OSError:  # nothing more; the error itself is known already
        return b""
