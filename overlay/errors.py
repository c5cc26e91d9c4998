"""Errors of the overlay: what a peer did wrong on the wire, and what a caller asked wrongly."""

import reprlib
from enum import StrEnum
from typing import Final

_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def show(value: object) -> str:
    """A value for an error message: as in Python, but short however large or deeply nested it is."""
    return _SHORT.repr(value)


class IsthmusError(Exception):
    """Base of all our errors, of every package: what the world did, told to the user in one line."""


class OverlayError(IsthmusError):
    """Base of every error this package raises."""


class CloseReason(StrEnum):
    """Why a connection ended. The reason travels in the CLOSE frame, in logs and in counters."""

    GOODBYE = "goodbye"
    """The peer is done with this connection."""
    DRAINING = "draining"
    """The broker is shutting down: use another one."""
    REPLACED = "replaced"
    """The same peer opened a newer connection."""
    BAD_FRAME = "bad_frame"
    """Bytes that are no frame: unknown kind, wrong length, truncated body."""
    FRAME_TOO_LARGE = "frame_too_large"
    BAD_MESSAGE = "bad_message"
    """A well-formed frame whose content is not acceptable."""
    WRONG_PROTOCOL = "wrong_protocol"
    WRONG_CLUSTER = "wrong_cluster"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    UNEXPECTED_FRAME = "unexpected_frame"
    """A frame this peer may not send, or not at this point."""
    UNKNOWN_PUBLISHER = "unknown_publisher"
    """Data from a publisher that was not declared on this connection."""
    SILENT = "silent"
    """No heartbeat for too long."""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_SLOW = "too_slow"
    """A subscriber takes its messages too slowly, and its edge is configured to end that."""
    TLS_FAILED = "tls_failed"
    """No encrypted channel came about: wrong authority, expired or no certificate, or no TLS at all."""
    WRONG_IDENTITY = "wrong_identity"
    """Certificate or token do not prove what the peer says it is."""
    REVOKED = "revoked"
    """What the peer was let in with does not count any more."""
    LOST = "lost"
    """The connection broke without a word."""


class ProtocolError(OverlayError):
    """The peer sent something it must not send; the connection closes with `reason`."""

    def __init__(self, reason: CloseReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class InvalidNameError(OverlayError):
    """A broker, LAN or topic name that cannot be used."""


class AccessDeniedError(OverlayError):
    """Something a client is not allowed to do."""


class QosError(OverlayError):
    """A quality of service that contradicts itself, or two that do not fit together."""
