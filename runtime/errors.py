"""Errors of running a node."""

from overlay.errors import IsthmusError


class RuntimeShellError(IsthmusError):
    """Base of every error this package raises."""


class ConfigurationError(RuntimeShellError):
    """A setting that cannot be used; the message says where it came from and what would do."""
