"""The client of the model of ZooKeeper: behaves towards a session as kazoo does."""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from coordinator.client import ClientState, Done, StateListener, WatchCallback
from coordinator.errors import (
    BadVersionError,
    ConnectionLostError,
    CoordinationError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    TransactionFailedError,
)
from coordinator.operations import (
    Check,
    Create,
    Delete,
    NodeStat,
    Operation,
    OperationResult,
    SetData,
    WatchKind,
)
from overlay.locator import Locator
from simulation.zookeeper import BAD_VERSION, NO_NODE, NODE_EXISTS, NOT_EMPTY, Wire, pack, split

_CONNECT_TIMEOUT_S: Final = 1.0
_BACK_OFF_FIRST_S: Final = 0.05
_BACK_OFF_MOST_S: Final = 1.0
_PINGS_PER_TIMEOUT: Final = 3


class _Event(NamedTuple):
    path: str | None


class _Pending(NamedTuple):
    path: str
    done: Done
    convert: Callable[[Any], Any] | None
    paths: tuple[str, ...] = ()


class ModelClient:
    """One client of the model; `randomness` decides which server it tries first."""

    def __init__(
        self, hosts: str, session_timeout_s: float, on_state: StateListener, *, randomness: random.Random
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._servers = [Locator.parse(host) for host in hosts.split(",")]
        randomness.shuffle(self._servers)
        self._asked_s = session_timeout_s
        self._timeout_s = session_timeout_s
        self._on_state = on_state
        self._session_id = 0
        self._password = b""
        self._seen_zxid = 0
        self._connection: _Connection | None = None
        self._watchers: dict[tuple[str, str], dict[WatchCallback, None]] = {}
        self._xid = 0
        self._stopped = False
        self.before_transaction: Callable[[], None] | None = None
        """Lets a fault happen at the worst moment."""
        self._task: asyncio.Task[None] | None = None

    # Life

    def start_nowait(self) -> None:
        """Begin to connect."""
        self._task = self._loop.create_task(self._run(), name="model of a ZooKeeper client")

    def stop_nowait(self, done: Callable[[], None]) -> None:
        """End the session, if a server can be told."""
        if self._stopped:
            self._loop.call_soon(done)
            return
        self._stopped = True

        def stopped(*_: object) -> None:
            if self._connection is not None:
                self._connection.drop()
            if self._task is not None:
                self._task.cancel()
                self._task.add_done_callback(lambda _: done())

        if self._connection is not None and self._session_id:
            self._ask("close", (), _Pending("close", stopped, None))
        else:
            stopped()

    def join(self) -> None:
        """There is no thread to wait for."""

    def drop_connection(self) -> None:
        """Cut the connection."""
        if self._connection is not None:
            self._connection.drop()

    @property
    def died(self) -> bool:
        """It never does."""
        return False

    @property
    def credentials(self) -> tuple[int, bytes]:
        """Session id and password."""
        return self._session_id, self._password

    async def _run(self) -> None:
        back_off_s = _BACK_OFF_FIRST_S
        turn = 0
        while not self._stopped:
            server = self._servers[turn % len(self._servers)]
            turn += 1
            connection = _Connection(self)
            make = partial(_same, connection)
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await self._loop.create_connection(make, server.host, server.port)
                    connection.send(
                        ("connect", self._session_id, self._password, self._asked_s, self._seen_zxid)
                    )
                    greeting = await connection.greeting
            except (OSError, TimeoutError):
                connection.drop()
                await asyncio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, _BACK_OFF_MOST_S)
                continue
            back_off_s = _BACK_OFF_FIRST_S
            if greeting[0] == "expired":
                self._session_id, self._password = 0, b""
                connection.drop()
                self._tell(ClientState.LOST)
                continue
            _, self._session_id, self._password, self._timeout_s = greeting
            self._connection = connection
            self._tell(ClientState.CONNECTED)
            await self._keep_alive(connection)
            self._connection = None
            self._watchers.clear()
            connection.fail_pending()
            if not self._stopped:
                self._tell(ClientState.SUSPENDED)

    async def _keep_alive(self, connection: "_Connection") -> None:
        """Return when the connection is gone; a server that does not answer in time is left."""
        interval_s = self._timeout_s / _PINGS_PER_TIMEOUT
        while not connection.closed.done():
            answered = connection.answers
            self._ask("ping", (), _Pending("ping", lambda *_: None, None))
            await asyncio.wait((connection.closed,), timeout=interval_s)
            if not connection.closed.done() and connection.answers == answered:
                connection.drop()

    def _tell(self, state: ClientState) -> None:
        self._on_state(self, state, self._session_id, self._timeout_s)

    # Requests

    def get(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with (data, stat)."""
        self._watch("data", path, watch)
        self._ask("get", (path, watch is not None), _Pending(path, done, _data_and_stat))

    def children(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with (names of the children, stat)."""
        self._watch("children", path, watch)
        self._ask("children", (path, watch is not None), _Pending(path, done, _names_and_stat))

    def exists(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with the stat, or None."""
        self._watch("data", path, watch)
        self._ask("exists", (path, watch is not None), _Pending(path, done, _stat))

    def create(self, path: str, data: bytes, ephemeral: bool, sequence: bool, done: Done) -> None:
        """Answer with the path that was created."""
        self._ask("create", (path, data, ephemeral, sequence), _Pending(path, done, None))

    def set(self, path: str, data: bytes, version: int, done: Done) -> None:
        """Answer with the new stat."""
        self._ask("set", (path, data, version), _Pending(path, done, _stat))

    def delete(self, path: str, version: int, done: Done) -> None:
        """Answer with True."""
        self._ask("delete", (path, version), _Pending(path, done, None))

    def sync(self, path: str, done: Done) -> None:
        """Answer once the member has caught up with the ensemble."""
        self._ask("sync", (), _Pending(path, done, None))

    def transaction(self, operations: Sequence[Operation], done: Done) -> None:
        """Answer with one result per operation."""
        plain: list[tuple[str, tuple[Any, ...]]] = []
        for operation in operations:
            match operation:
                case Create(path, data, ephemeral):
                    plain.append(("Create", (path, data, ephemeral)))
                case SetData(path, data, version):
                    plain.append(("SetData", (path, data, version)))
                case Delete(path, version):
                    plain.append(("Delete", (path, version)))
                case Check(path, version):
                    plain.append(("Check", (path, version)))
        paths = tuple(operation.path for operation in operations)
        if self.before_transaction is not None:
            self.before_transaction()
        self._ask("transaction", (tuple(plain),), _Pending("transaction", done, _results, paths))

    def remove_watches(self, kind: WatchKind, path: str, done: Done) -> None:
        """Take this connection's watches off a path."""
        name = "children" if kind is WatchKind.CHILDREN else "data"

        def removed(value: Any, error: CoordinationError | None) -> None:
            self._watchers.pop((name, path), None)
            done(value, error)

        self._ask("remove_watches", (path, name == "children"), _Pending(path, removed, None))

    def _watch(self, kind: str, path: str, watch: WatchCallback | None) -> None:
        if watch is not None:
            self._watchers.setdefault((kind, path), {})[watch] = None

    def _ask(self, kind: str, arguments: tuple[Any, ...], pending: _Pending) -> None:
        connection = self._connection
        if connection is None or connection.closed.done():
            self._loop.call_soon(pending.done, None, _lost(pending.path))
            return
        self._xid += 1
        connection.ask(self._xid, (kind, self._xid, *arguments), pending)

    # From the connection

    def fire(self, kind: str, path: str) -> None:
        """A watch has fired."""
        for watch in self._watchers.pop((kind, path), {}):
            watch(_Event(path))

    def seen(self, zxid: int) -> None:
        """The server has shown a state."""
        self._seen_zxid = max(self._seen_zxid, zxid)


class _Connection(asyncio.Protocol):
    """One connection to a server, from the client's side."""

    def __init__(self, client: ModelClient) -> None:
        loop = asyncio.get_running_loop()
        self._client = client
        self.greeting: asyncio.Future[Wire] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.answers = 0
        self._pending: dict[int, _Pending] = {}
        self._transport: asyncio.Transport | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        messages, self._buffer = split(self._buffer)
        for message in messages:
            if self.closed.done():
                return
            if message[0] == "event":
                self._client.fire(message[1], message[2])
            elif message[0] == "answer":
                self._answered(*message[1:])
            elif not self.greeting.done():
                self.greeting.set_result(message)

    def send(self, message: Wire) -> None:
        """Write a message."""
        if self._transport is not None:
            self._transport.write(pack(message))

    def ask(self, xid: int, message: Wire, pending: _Pending) -> None:
        """Write a request."""
        self._pending[xid] = pending
        if self._transport is not None:
            self._transport.write(pack(message))

    def drop(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def fail_pending(self) -> None:
        """The answers will not come."""
        pending, self._pending = self._pending, {}
        for item in pending.values():
            item.done(None, _lost(item.path))

    def _end(self) -> None:
        if not self.greeting.done():
            self.greeting.set_exception(ConnectionResetError("the connection broke before the greeting"))
            self.greeting.exception()  # nobody may be waiting for it any more
        if not self.closed.done():
            self.closed.set_result(None)

    def _answered(self, xid: int, zxid: int, error: str, value: Any) -> None:
        self.answers += 1
        self._client.seen(zxid)
        path, done, convert, paths = self._pending.pop(xid)
        if error and paths:
            index = int(value)
            done(None, TransactionFailedError(index, _error(error, paths[index])))
        elif error:
            done(None, _error(error, path))
        else:
            done(value if convert is None else convert(value), None)


def _same(connection: _Connection) -> _Connection:
    return connection


def _data_and_stat(answer: Any) -> tuple[bytes, NodeStat]:
    return answer[0], NodeStat(*answer[1])


def _names_and_stat(answer: Any) -> tuple[list[str], NodeStat]:
    return list(answer[0]), NodeStat(*answer[1])


def _stat(answer: Any) -> NodeStat | None:
    return None if answer is None else NodeStat(*answer)


def _results(answers: Any) -> tuple[OperationResult, ...]:
    return tuple(NodeStat(*answer) if isinstance(answer, tuple) else answer for answer in answers)


def _lost(path: str) -> CoordinationError:
    return ConnectionLostError(f"no answer for {path}, it may have been applied")


def _error(code: str, path: str) -> CoordinationError:
    if code == NO_NODE:
        return NoNodeError(f"{path} or its parent does not exist")
    if code == NODE_EXISTS:
        return NodeExistsError(f"{path} exists")
    if code == BAD_VERSION:
        return BadVersionError(f"{path} has another version than expected")
    if code == NOT_EMPTY:
        return NotEmptyError(f"{path} has children")
    return CoordinationError(f"ZooKeeper refused a request for {path}: {code}")
