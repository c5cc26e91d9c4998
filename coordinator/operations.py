"""What is asked of ZooKeeper and what it answers, as plain values that know nothing of kazoo."""

from dataclasses import dataclass
from enum import StrEnum

ANY_VERSION = -1
"""Matches whatever version the znode has."""


@dataclass(frozen=True, slots=True)
class NodeStat:
    """The part of a znode's stat that we decide on."""

    version: int
    """Counts changes of the data."""
    ephemeral_owner: int
    """Session id of the owner, 0 for a persistent znode."""
    created_zxid: int
    modified_zxid: int
    children: int
    children_version: int
    """Counts creations and deletions of children."""


@dataclass(frozen=True, slots=True)
class Create:
    """Create a znode, inside a transaction."""

    path: str
    data: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class SetData:
    """Replace the data of a znode, inside a transaction."""

    path: str
    data: bytes
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a znode, inside a transaction."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Check:
    """Fail the transaction unless the znode exists with this version."""

    path: str
    version: int = ANY_VERSION


Operation = Create | SetData | Delete | Check
OperationResult = NodeStat | str | bool
"""SetData answers with a stat, Create with the path, the others with True."""


class WatchKind(StrEnum):
    """Which changes a watch waits for."""

    DATA = "data"
    """The znode is created, changed or deleted."""
    CHILDREN = "children"
    """A child appears or vanishes, or the znode itself is deleted."""


class HintKind(StrEnum):
    """Why a watch called. It is a hint to read again, never news by itself."""

    CHANGED = "changed"
    SPENT = "spent"
    """The connection broke and took the watch with it."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What a watch callback is handed."""

    kind: HintKind
    watch: WatchKind
    path: str
