"""What a session needs of a ZooKeeper client, without saying which one.

`coordinator.kazoo_client` is the real one. A model of ZooKeeper that can be simulated stands behind the
same methods, and both must pass the same tests (tests/coordinator/contract).
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Protocol

from coordinator.errors import CoordinationError
from coordinator.operations import Operation, WatchKind

Done = Callable[[Any, CoordinationError | None], None]
"""Called once with the answer or the error, perhaps on another thread."""
WatchCallback = Callable[[Any], None]
"""Called once with an event whose `path` is None if it is only about the connection."""


class ClientState(StrEnum):
    """What a client reports of its connection."""

    CONNECTED = "CONNECTED"
    SUSPENDED = "SUSPENDED"
    LOST = "LOST"


StateListener = Callable[[Any, ClientState, int, float], None]
"""Called with the client, its state, session id and negotiated timeout, perhaps on another thread."""


class Client(Protocol):
    """Asynchronous requests with typed answers and errors of our own."""

    def start_nowait(self) -> None:
        """Begin to connect; the state listener tells when that has succeeded."""

    def stop_nowait(self, done: Callable[[], None]) -> None:
        """Begin to end the session; `done` is called when it has ended and everything is freed."""

    def join(self) -> None:
        """Wait for the last instructions of what `stop_nowait` has begun, after `done` was called."""

    def drop_connection(self) -> None:
        """Cut the connection; the session goes on with another one."""

    @property
    def died(self) -> bool:
        """Whether the client has ended without having been asked to."""

    def get(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with (data, stat)."""

    def children(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with (names of the children, stat)."""

    def exists(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with the stat, or None."""

    def create(self, path: str, data: bytes, ephemeral: bool, sequence: bool, done: Done) -> None:
        """Answer with the path that was created."""

    def set(self, path: str, data: bytes, version: int, done: Done) -> None:
        """Answer with the new stat."""

    def delete(self, path: str, version: int, done: Done) -> None:
        """Answer with True."""

    def sync(self, path: str, done: Done) -> None:
        """Answer once the server has asked the ensemble's leader, after all hints that came before."""

    def transaction(self, operations: Sequence[Operation], done: Done) -> None:
        """Answer with one result per operation, or TransactionFailedError."""

    def remove_watches(self, kind: WatchKind, path: str, done: Done) -> None:
        """Take this connection's watches off a path, here and on the server."""


MakeClient = Callable[[str, float, StateListener], Client]
"""Makes a client from the servers' addresses, the session timeout asked for, and the state listener."""
