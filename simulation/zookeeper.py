"""A model of ZooKeeper: what an ensemble promises its clients, and what it does not.

`Ensemble` is the tree and its history. All writes pass through it one after the other and get a number
each (zxid). Every *member* follows that history at its own pace: a read shows the member's state, which
may lag behind; a write is answered when the member it was sent to has caught up with it. Watches are
held by members, fire once, in the order of the changes, and are gone when their connection is. A session
lives as long as some member hears of its client in time; what was ephemeral goes with it, in one write.
A client is never shown an older state than it has seen: a member that is behind refuses it. Requests of
a connection whose session has moved to another one are refused.

Members are ordinary asyncio servers that speak a small protocol of their own, so that the network does
to them what it does to everybody: answers are lost after the write was applied, requests of a killed
process still arrive, members freeze. `ModelClient` behaves as `coordinator.kazoo_client` does. Both run
on a real event loop as well, where they pass the same tests as the real server.
"""

import asyncio
import marshal
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from coordinator.operations import ANY_VERSION, Check, Create, Delete, Operation, SetData

TICK_S: Final = 0.5
LENGTH: Final = struct.Struct("<I")

# Errors, as they travel.
NO_NODE: Final = "no node"
NODE_EXISTS: Final = "node exists"
BAD_VERSION: Final = "bad version"
NOT_EMPTY: Final = "not empty"
EPHEMERAL_PARENT: Final = "ephemerals have no children"
EXPIRED: Final = "session expired"
_READS: Final = frozenset(("get", "children", "exists", "ping"))
"""What a member answers by itself."""

Wire = tuple[Any, ...]
Write = Callable[["Tree"], Any]


class RefusedError(Exception):
    """A write that cannot be done, and why."""

    def __init__(self, code: str, index: int = -1) -> None:
        super().__init__(code)
        self.code = code
        self.index = index


@dataclass(slots=True)
class Znode:
    """One node of the tree."""

    data: bytes
    owner: int
    created: int
    modified: int
    version: int = 0
    creations: int = 0
    """Children ever created: numbers sequential ones."""
    children: dict[str, None] = field(default_factory=dict)

    def stat(self) -> tuple[int, ...]:
        """As it travels: version, owner, created, modified, children, changes of children."""
        count = len(self.children)
        return self.version, self.owner, self.created, self.modified, count, 2 * self.creations - count


@dataclass(frozen=True, slots=True)
class Txn:
    """One write of the history: what each member does to its own tree."""

    zxid: int
    session: int
    operations: tuple[Operation, ...]
    """With the names of sequential znodes worked out."""
    ends_session: bool = False


def parent_of(path: str) -> str:
    """The path above."""
    return path.rpartition("/")[0] or "/"


class Tree:
    """The znodes, as one member knows them."""

    def __init__(self) -> None:
        self.nodes: dict[str, Znode] = {"/": Znode(b"", 0, 0, 0)}
        self.ephemerals: dict[int, dict[str, None]] = {}
        self.zxid = 0

    def apply(self, txn: Txn) -> list[tuple[str, str]]:
        """Do what a write says; returns the watches that it fires, as (kind, path)."""
        self.zxid = txn.zxid
        fired: list[tuple[str, str]] = []
        operations: Sequence[Operation] = txn.operations
        if txn.ends_session:
            operations = [Delete(path) for path in self.ephemerals.pop(txn.session, {})]
        for operation in operations:
            match operation:
                case Create(path, data, ephemeral):
                    self._create(path, data, txn.session if ephemeral else 0)
                    fired += [("data", path), ("children", parent_of(path))]
                case SetData(path, data, _):
                    node = self.nodes[path]
                    node.data, node.version, node.modified = data, node.version + 1, txn.zxid
                    fired.append(("data", path))
                case Delete(path, _):
                    self._delete(path)
                    fired += [("data", path), ("children", path), ("children", parent_of(path))]
                case Check():
                    continue
        return fired

    def _create(self, path: str, data: bytes, owner: int) -> None:
        parent = self.nodes[parent_of(path)]
        parent.children[path.rpartition("/")[2]] = None
        parent.creations += 1
        self.nodes[path] = Znode(data, owner, self.zxid, self.zxid)
        if owner:
            self.ephemerals.setdefault(owner, {})[path] = None

    def _delete(self, path: str) -> None:
        node = self.nodes.pop(path)
        del self.nodes[parent_of(path)].children[path.rpartition("/")[2]]
        if node.owner:
            self.ephemerals.get(node.owner, {}).pop(path, None)

    def check(self, operation: Operation) -> None:
        """Raise RefusedError if this cannot be done now."""
        path = operation.path
        if isinstance(operation, Create):
            parent = self.nodes.get(parent_of(path))
            if parent is None:
                raise RefusedError(NO_NODE)
            if path in self.nodes:
                raise RefusedError(NODE_EXISTS)
            if parent.owner:
                raise RefusedError(EPHEMERAL_PARENT)
            return
        node = self.nodes.get(path)
        if node is None:
            raise RefusedError(NO_NODE)
        if operation.version not in (ANY_VERSION, node.version):
            raise RefusedError(BAD_VERSION)
        if isinstance(operation, Delete) and node.children:
            raise RefusedError(NOT_EMPTY)

    def result(self, operation: Operation) -> Any:
        """What the client is told of an operation that was just applied."""
        match operation:
            case Create(path, _, _):
                return path
            case SetData(path, _, _):
                return self.nodes[path].stat()
            case _:
                return True


@dataclass(slots=True)
class ModelSession:
    """A session, as the ensemble knows it."""

    id: int
    password: bytes
    timeout_s: float
    heard_s: float
    holder: "ServerConnection | None" = None
    """The connection that has it; requests of others are refused."""


CommitListener = Callable[[Txn, "Tree"], None]


class Ensemble:
    """The history, the sessions, and the members that follow."""

    def __init__(self, loop: asyncio.AbstractEventLoop, randomness: random.Random) -> None:
        self._loop = loop
        self._randomness = randomness
        self.tree = Tree()
        self.sessions: dict[int, ModelSession] = {}
        self.members: list[Member] = []
        self.on_commit: list[CommitListener] = []
        self.expiries = 0
        self.paused = False
        """No session expires: nobody is there to end it."""
        self._zxid = 0
        self._last_session = 0x1000_0000_0000
        self._ticker = loop.call_later(TICK_S, self._tick)

    def close(self) -> None:
        """Stop expiring sessions."""
        self._ticker.cancel()

    # Sessions

    def open_session(self, asked_s: float) -> ModelSession:
        """A new session."""
        self._last_session += 1
        timeout_s = min(max(asked_s, 2 * TICK_S), 20 * TICK_S)
        password = self._randomness.randbytes(16)
        session = ModelSession(self._last_session, password, timeout_s, self._loop.time())
        self.sessions[session.id] = session
        return session

    def touch(self, session: ModelSession) -> None:
        """Its client was heard."""
        session.heard_s = self._loop.time()

    def resume(self) -> None:
        """The ensemble is back: every session gets its full time again."""
        self.paused = False
        for session in self.sessions.values():
            self.touch(session)

    def end_session(self, session_id: int) -> Txn | None:
        """Remove what was ephemeral, in one write."""
        if self.sessions.pop(session_id, None) is None:
            return None
        return self._commit(Txn(self._next_zxid(), session_id, (), ends_session=True))

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        now_s = self._loop.time()
        if self.paused:
            return
        for session in [item for item in self.sessions.values() if now_s - item.heard_s > item.timeout_s]:
            self.expiries += 1
            self.end_session(session.id)

    # Writes

    def write(
        self, session_id: int, operations: Sequence[Operation], sequence: bool
    ) -> tuple[Txn, tuple[Any, ...]]:
        """Do all or nothing; raises RefusedError with the index of the operation that cannot be done."""
        if session_id not in self.sessions:
            raise RefusedError(EXPIRED)
        zxid = self._next_zxid()
        named = [self._named(operation) if sequence else operation for operation in operations]
        trial = self._trial(zxid, session_id, named)
        txn = Txn(zxid, session_id, tuple(named))
        self._commit(txn)
        return txn, trial

    def _trial(self, zxid: int, session_id: int, operations: Sequence[Operation]) -> tuple[Any, ...]:
        """The results of operations, each after those before it; the tree stays as it is."""
        scratch = _scratch(self.tree, operations)
        results = []
        for index, operation in enumerate(operations):
            try:
                scratch.check(operation)
            except RefusedError as error:
                raise RefusedError(error.code, index) from None
            scratch.apply(Txn(zxid, session_id, (operation,)))
            results.append(scratch.result(operation))
        return tuple(results)

    def _named(self, operation: Operation) -> Operation:
        assert isinstance(operation, Create)
        parent = self.tree.nodes.get(parent_of(operation.path))
        number = parent.creations if parent is not None else 0
        return Create(f"{operation.path}{number:010d}", operation.data, operation.ephemeral)

    def _next_zxid(self) -> int:
        self._zxid += 1
        return self._zxid

    def _commit(self, txn: Txn) -> Txn:
        for listener in self.on_commit:
            listener(txn, self.tree)
        self.tree.apply(txn)
        for member in self.members:
            member.follow(txn)
        return txn


def _scratch(tree: Tree, operations: Sequence[Operation]) -> Tree:
    """A tree to try operations on: copies of what they touch, and nothing else."""
    scratch = Tree()
    scratch.nodes.clear()
    for operation in operations:
        for path in (operation.path, parent_of(operation.path)):
            node = tree.nodes.get(path)
            if node is not None and path not in scratch.nodes:
                scratch.nodes[path] = replace(node, children=dict(node.children))
    return scratch


class Member:
    """One server of the ensemble."""

    def __init__(self, ensemble: Ensemble, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.ensemble = ensemble
        self.name = name
        self.tree = Tree()
        self.lag_s = 0.0
        """How far it is behind the ensemble."""
        self.cut_off = False
        """It hears nothing of the others: answers reads, but nothing it does counts."""
        self.watches: dict[tuple[str, str], dict[ServerConnection, None]] = {}
        self.connections: dict[ServerConnection, None] = {}
        self._loop = loop
        self._behind: list[Txn] = []
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._catching_up: asyncio.TimerHandle | None = None
        assert ensemble.tree.zxid == 0, "members are made before the first write"
        ensemble.members.append(self)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Serve clients."""
        return await self._loop.create_server(lambda: ServerConnection(self), host, port)

    def stop_serving(self) -> None:
        """Drop all clients, as a member that has lost its leader does."""
        for connection in list(self.connections):
            connection.drop()

    def rejoin(self) -> None:
        """Hear of the others again. Whoever waits for an answer of this member will not get it."""
        self.stop_serving()
        self.cut_off = False
        self.catch_up()

    def follow(self, txn: Txn) -> None:
        """Hear of a write; it is applied when the member gets to it."""
        self._behind.append(txn)
        if self._catching_up is None and not self.cut_off:
            if self.lag_s:
                self._catching_up = self._loop.call_later(self.lag_s, self.catch_up)
            else:
                self.catch_up()

    def catch_up(self) -> None:
        """Apply everything there is."""
        if self._catching_up is not None:
            self._catching_up.cancel()
            self._catching_up = None
        if self.cut_off:
            return
        behind, self._behind = self._behind, []
        for txn in behind:
            for kind, path in self.tree.apply(txn):
                for connection in self.watches.pop((kind, path), {}):
                    connection.send(("event", kind, path))
            ready = [call for zxid, call in self._waiting if zxid <= txn.zxid]
            self._waiting = [item for item in self._waiting if item[0] > txn.zxid]
            for call in ready:
                call()

    def when_applied(self, zxid: int, call: Callable[[], None]) -> None:
        """Call once this member's state includes a write."""
        if self.tree.zxid >= zxid or not any(txn.zxid <= zxid for txn in self._behind):
            call()
        else:
            self._waiting.append((zxid, call))


class ServerConnection(asyncio.Protocol):
    """A client's connection to a member."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._ensemble = member.ensemble
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._session: ModelSession | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._member.connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._member.connections.pop(self, None)
        for watchers in self._member.watches.values():
            watchers.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        messages, self._buffer = split(self._buffer)
        for message in messages:
            self._handle(message)

    def send(self, message: Wire) -> None:
        """Tell the client something."""
        if self._transport is not None:
            self._transport.write(pack(message))

    def drop(self) -> None:
        """End the connection; the session goes on."""
        if self._transport is not None:
            self._transport.abort()

    def _handle(self, message: Wire) -> None:
        kind = message[0]
        if kind == "connect":
            self._connect(*message[1:])
            return
        session = self._session
        if session is None or session.holder is not self:
            self.drop()  # the session has moved
            return
        if session.id not in self._ensemble.sessions:
            self.drop()  # expired: the client learns it when it connects again
            return
        if self._member.cut_off:
            if kind in _READS:
                self._read(*message)
            return  # writes wait for a leader that does not answer
        self._ensemble.touch(session)
        if kind in _READS or kind == "remove_watches":
            self._read(*message)
        elif kind == "close":
            txn = self._ensemble.end_session(session.id)
            xid = message[1]
            assert txn is not None
            self._member.when_applied(txn.zxid, lambda: self._answer(xid, True))
        elif kind == "sync":
            xid = message[1]
            self._member.when_applied(self._ensemble.tree.zxid, lambda: self._answer(xid, True))
        else:
            self._write(session, *message)

    def _connect(self, session_id: int, password: bytes, asked_s: float, seen_zxid: int) -> None:
        member = self._member
        if member.cut_off or seen_zxid > member.tree.zxid:
            self.drop()  # the client has seen what this member has not
            return
        if session_id:
            session = self._ensemble.sessions.get(session_id)
            if session is None or session.password != password:
                self.send(("expired",))
                return
            self._ensemble.touch(session)
        else:
            session = self._ensemble.open_session(asked_s)
        session.holder = self
        self._session = session
        self.send(("connected", session.id, session.password, session.timeout_s))

    def _read(self, kind: str, xid: int, path: str = "", watch: bool = False, *_: Any) -> None:
        member = self._member
        if kind == "ping":
            self._answer(xid, True)
            return
        if kind == "remove_watches":
            watchers = member.watches.get(("children" if watch else "data", path), {})
            if self in watchers:
                del watchers[self]
                self._answer(xid, True)
            else:
                self._answer(xid, None, NO_NODE)
            return
        node = member.tree.nodes.get(path)
        if watch and (node is not None or kind == "exists"):
            member.watches.setdefault(("children" if kind == "children" else "data", path), {})[self] = None
        if kind == "exists":
            self._answer(xid, None if node is None else node.stat())
        elif node is None:
            self._answer(xid, None, NO_NODE)
        elif kind == "get":
            self._answer(xid, (node.data, node.stat()))
        else:
            self._answer(xid, (tuple(node.children), node.stat()))

    def _write(self, session: ModelSession, kind: str, xid: int, *arguments: Any) -> None:
        sequence = False
        operations: Sequence[Operation]
        if kind == "create":
            path, data, ephemeral, sequence = arguments
            operations = [Create(path, data, ephemeral)]
        elif kind == "set":
            operations = [SetData(*arguments)]
        elif kind == "delete":
            operations = [Delete(*arguments)]
        else:
            operations = [_OPERATIONS[name](*values) for name, values in arguments[0]]
        try:
            txn, results = self._ensemble.write(session.id, operations, sequence)
        except RefusedError as error:
            # A refusal has its place in the history too: what the member shows next is not older.
            code, index = error.code, max(error.index, 0)
            culprit = index if kind == "transaction" else None
            zxid = self._ensemble.tree.zxid
            self._member.when_applied(zxid, lambda: self._answer(xid, culprit, code))
            return
        value = results if kind == "transaction" else results[0]
        self._member.when_applied(txn.zxid, lambda: self._answer(xid, value))

    def _answer(self, xid: int, value: Any, error: str = "") -> None:
        self.send(("answer", xid, self._member.tree.zxid, error, value))


_MARSHAL_VERSION: Final = 2
"""Later ones write an object that is referred to again, or a string that is interned, in other bytes."""

_OPERATIONS: Final[dict[str, Callable[..., Operation]]] = {
    "Create": Create,
    "SetData": SetData,
    "Delete": Delete,
    "Check": Check,
}


def pack(message: Wire) -> bytes:
    """A message as bytes, which depend on nothing but what it says."""
    body = marshal.dumps(message, _MARSHAL_VERSION)
    return LENGTH.pack(len(body)) + body


def split(buffer: bytes) -> tuple[list[Wire], bytes]:
    """The whole messages at the start of the bytes, and the rest."""
    if len(buffer) > LENGTH.size and LENGTH.unpack_from(buffer)[0] == len(buffer) - LENGTH.size:
        return [marshal.loads(buffer[LENGTH.size :])], b""  # one, as nearly always
    messages: list[Wire] = []
    start = 0
    while len(buffer) - start >= LENGTH.size:
        (length,) = LENGTH.unpack_from(buffer, start)
        end = start + LENGTH.size + length
        if end > len(buffer):
            break
        messages.append(marshal.loads(buffer[start + LENGTH.size : end]))
        start = end
    return messages, buffer[start:]
