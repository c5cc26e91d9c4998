"""Errors of the control plane: Java, the embedded ZooKeeper and coordination itself."""

from overlay.errors import IsthmusError


class CoordinationError(IsthmusError):
    """Base of every error this package raises."""


class JavaNotFoundError(CoordinationError):
    """No Java runtime that is new enough; the message lists what was looked at."""


class ZooKeeperStartError(CoordinationError):
    """The embedded ZooKeeper did not start serving; the message ends with its last log lines."""


class FourLetterError(CoordinationError):
    """A ZooKeeper server gave no usable answer to a four-letter word."""


class RecordError(CoordinationError):
    """Content of a znode that is not what its place in the tree demands."""


class ConnectionLostError(CoordinationError):
    """No answer came: the request may or may not have been applied. Wait for a connection and look."""


class SessionClosedError(CoordinationError):
    """The session was closed by us; nothing can be asked any more."""


class CoordinationTimeoutError(CoordinationError):
    """ZooKeeper could not be asked within the time the caller allows."""


class NoNodeError(CoordinationError):
    """The znode, or the parent of the one to create, does not exist."""


class NodeExistsError(CoordinationError):
    """The znode to create exists."""


class BadVersionError(CoordinationError):
    """The znode has been changed since it was read."""


class NotAllowedError(CoordinationError):
    """The access list of a znode does not include us."""


class NotEmptyError(CoordinationError):
    """The znode to delete has children."""


class NodeTooLargeError(CoordinationError):
    """More bytes than a znode can hold."""


class TransactionFailedError(CoordinationError):
    """Nothing of the transaction was applied, because of the operation at `index`."""

    def __init__(self, index: int, cause: CoordinationError) -> None:
        super().__init__(f"operation {index} of the transaction failed, nothing was applied: {cause}")
        self.index = index
        self.cause = cause


class FencedError(CoordinationError):
    """A leader acted under an epoch that is no longer the current one; its write was refused."""


class ClusterFormatError(CoordinationError):
    """The tree was written by a version of Isthmus this one cannot work with."""


class DuplicateBrokerError(CoordinationError):
    """Another live broker has registered the same name."""


class TopicExistsError(CoordinationError):
    """The topic exists with another quality of service than the one asked for."""


class TopicInUseError(CoordinationError):
    """A topic that still has endpoints cannot be deleted."""


class UnknownTopicError(CoordinationError):
    """The topic has not been declared."""


class UnknownPolicyError(CoordinationError):
    """No load policy has this name."""
