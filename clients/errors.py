"""What can go wrong for a client."""

from overlay.errors import IsthmusError


class ClientError(IsthmusError):
    """Base of every error this package raises."""


class EdgeNotFoundError(ClientError):
    """No edge broker could be reached; the message says where it was looked for."""


class RefusedError(ClientError):
    """The edge broker refused an endpoint; `code` is for programs, the message for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ClosedError(ClientError):
    """The client, publisher or subscription has been closed."""


class PayloadTooLargeError(ClientError):
    """A payload above the limit; nothing was sent."""


class BacklogFullError(ClientError):
    """Too much waits to be sent; nothing of this message was taken. Wait, or publish with `await`."""
