"""Errors of the testbed."""

from overlay.errors import IsthmusError


class TopologyError(IsthmusError):
    """Base of every error this package raises."""


class InvalidTopologyError(TopologyError):
    """A topology that cannot be used; the message says where in the file and what would do."""

    def __init__(self, message: str, *, line: int = 0) -> None:
        super().__init__(message)
        self.line = line
        """Where in the file; 0 if it is about no line."""


class DriverError(TopologyError):
    """The testbed could not start, or a process of it does not do what it should."""


class LoadError(TopologyError):
    """Publishers or subscribers of the testbed failed, so nothing can be said about the messages."""
