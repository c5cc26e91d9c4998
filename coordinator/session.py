"""An asyncio session with ZooKeeper: requests, watches, states, and a lease of our own.

The states and what they mean for the owner of ephemeral znodes:

    CONNECTED   requests are answered
    SUSPENDED   the connection broke; the session and its ephemeral znodes live on until the server
                gives up on us. Watches are gone. Requests without an answer may have been applied.
    LOST        the server has ended the session: ephemeral znodes are gone. A new session follows.
    CLOSED      by our own wish

The server can tell that a session has ended only once it is reached again, so LOST comes late
when the network is cut, and never while it stays cut. Who must stop acting in time asks
`lease_valid`. The lease runs from the moment the last acknowledged request was *sent*, and only
requests that went to the leader of the ensemble (writes and sync) count: a server cut off from
its ensemble still answers reads, while the others may be ending the session.

Requests pass a window: only so many are in flight, the rest wait here. They are only handed to
kazoo while CONNECTED, and all that are unanswered when the connection breaks are failed here,
because kazoo can forget a request that it is handed while a session expires.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from coordinator.client import Client, ClientState, Done, MakeClient
from coordinator.errors import (
    ConnectionLostError,
    CoordinationError,
    CoordinationTimeoutError,
    NodeExistsError,
    NodeTooLargeError,
    NoNodeError,
    SessionClosedError,
)
from coordinator.inbox import Inbox
from coordinator.kazoo_client import ZooKeeperClient
from coordinator.limits import (
    CLOSE_GRACE_S,
    LEASE_RENEWALS_PER_TIMEOUT,
    LEASE_SHARE,
    NODE_MAX_BYTES,
    REQUESTS_IN_FLIGHT_MAX,
    SESSION_TIMEOUT_S,
    STATE_DELAY_S,
)
from coordinator.operations import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    Hint,
    HintKind,
    NodeStat,
    Operation,
    OperationResult,
    SetData,
    WatchKind,
)
from overlay.limits import SECOND_NS

WatchCallback = Callable[[Hint], None]

_logger = logging.getLogger(__name__)


class SessionState(StrEnum):
    """See the top of this module for what each means."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Counters of a session since it was started."""

    state: SessionState
    requests: int
    requests_in_flight: int
    answers_lost: int
    """Requests that were in flight when a connection broke."""
    watches: int
    """Watches the server holds for us."""
    hints: int
    reconnects: int
    expiries: int
    clients_replaced: int
    """Times kazoo's connection thread had died and was replaced."""


@dataclass(slots=True, eq=False)
class _Request:
    future: asyncio.Future[Any]
    sent_ns: int
    session_id: int
    renews_lease: bool


@dataclass(frozen=True, slots=True)
class _WatchSlot:
    """What kazoo calls when a watch fires. Equal slots are one to kazoo, as they are to the server."""

    session: "Session"
    kind: WatchKind
    path: str

    def __call__(self, event: Any) -> None:
        # An event without a path is about the connection, which the state listener reports as well.
        if event.path is not None:
            self.session._inbox.put(self.session._fire, self.kind, self.path, HintKind.CHANGED)


class Session:
    """One session with ZooKeeper, below a chroot. Made and used on one event loop."""

    def __init__(
        self,
        hosts: str,
        chroot: str = "/isthmus",
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        clock: Callable[[], int] = time.monotonic_ns,
        make_client: MakeClient = ZooKeeperClient,
    ) -> None:
        self._hosts = hosts
        self._make_client = make_client
        self._chroot = "/" + chroot.strip("/") if chroot.strip("/") else ""
        self._asked_timeout_s = session_timeout_s
        self._clock = clock
        self._state = SessionState.CLOSED
        self._session_id = 0
        self._began_ns = 0
        self._timeout_s = session_timeout_s
        self._lease_sent_ns: int | None = None
        self._connected_ns = 0
        self._client: Client | None = None
        self._connected = asyncio.Event()
        self._window = asyncio.Semaphore(REQUESTS_IN_FLIGHT_MAX)
        # In the order they were made, so that what follows from their failure has an order too.
        self._in_flight: dict[_Request, None] = {}
        self._watches: dict[tuple[WatchKind, str], dict[WatchCallback, None]] = {}
        self._listeners: dict[Callable[[SessionState], None], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests = self._answers_lost = self._hints = 0
        self._connections = self._expiries = self._clients_replaced = 0

    # Life

    async def start(self, timeout_s: float = 15.0) -> None:
        """Connect and make sure that the chroot exists."""
        if self._client is not None:
            raise SessionClosedError("this session has been started before: make a new one")
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop)
        self._state = SessionState.SUSPENDED
        self._client = self._make_client(self._hosts, self._asked_timeout_s, self._listen)
        self._client.start_nowait()
        try:
            async with asyncio.timeout(timeout_s):
                await self._make_chroot()
        except TimeoutError:
            await self.close()
            raise CoordinationTimeoutError(
                f"no ZooKeeper server at {self._hosts} within {timeout_s} s: "
                "check the address and that the server is running"
            ) from None
        except BaseException:
            await self.close()
            raise
        self.spawn(self._keep_lease())

    async def _make_chroot(self) -> None:
        await self.wait_connected()
        parts = self._chroot.split("/")[1:]
        for depth in range(1, len(parts) + 1):
            path = "/" + "/".join(parts[:depth])
            while True:
                await self.wait_connected()
                try:
                    await self._call(partial(self._at_client, "create", path, b"", False, False), True)
                except NodeExistsError:
                    break
                except ConnectionLostError:
                    continue
                break

    async def close(self) -> None:
        """End the session: its ephemeral znodes go, threads and sockets are freed."""
        client = self._client
        if self._state is SessionState.CLOSED or client is None:
            return
        self._enter(SessionState.CLOSED)
        # Whoever waits for a connection must learn that none will come.
        self._connected.set()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stop(client)

    async def _stop(self, client: Client) -> None:
        stopped = asyncio.Event()

        client.stop_nowait(lambda: self._inbox.put(stopped.set))
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await stopped.wait()
        except TimeoutError:
            client.drop_connection()
            await stopped.wait()
        client.join()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task that ends with the session at the latest; its failure is logged."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a task of the ZooKeeper session failed", exc_info=error)

    # State

    @property
    def state(self) -> SessionState:
        """The state as the event loop knows it."""
        return self._state

    @property
    def session_id(self) -> int:
        """The server's number for this session, 0 while there is none."""
        return self._session_id

    @property
    def replaced_at_ns(self) -> int | None:
        """When this session took the place of one that had expired; None if none has."""
        return self._began_ns if self._expiries else None

    @property
    def timeout_s(self) -> float:
        """The session timeout the server agreed to."""
        return self._timeout_s

    @property
    def chroot(self) -> str:
        """The path below which this session works."""
        return self._chroot or "/"

    @property
    def clock(self) -> Callable[[], int]:
        """The monotonic clock this session measures its lease with."""
        return self._clock

    @property
    def lease_until_ns(self) -> int | None:
        """When the lease lapses unless it is renewed; None without a session."""
        if self._lease_sent_ns is None:
            return None
        return self._lease_sent_ns + int(LEASE_SHARE * self._timeout_s * SECOND_NS)

    @property
    def answering_ns(self) -> tuple[int, int]:
        """Since when and until when the server is known to have answered without a break."""
        return self._connected_ns, max(self._connected_ns, self._lease_sent_ns or 0)

    @property
    def watch_count(self) -> int:
        """Watches the server holds for us."""
        return len(self._watches)

    def lease_valid(self, now_ns: int) -> bool:
        """Whether the server cannot have ended the current session yet."""
        until_ns = self.lease_until_ns
        return until_ns is not None and now_ns < until_ns

    def add_listener(self, listener: Callable[[SessionState], None]) -> Callable[[], None]:
        """Call `listener` on the event loop with every new state; returns how to end that."""

        # A fresh object, so that one function can listen twice.
        def entry(state: SessionState) -> None:
            listener(state)

        self._listeners[entry] = None
        return lambda: self._listeners.pop(entry, None)

    async def wait_connected(self) -> None:
        """Return once requests can be made; raises SessionClosedError if that will never be."""
        await self._connected.wait()
        if self._state is SessionState.CLOSED:
            raise SessionClosedError("the ZooKeeper session is closed")

    def statistics(self) -> SessionStatistics:
        """The counters as they are now."""
        return SessionStatistics(
            state=self._state,
            requests=self._requests,
            requests_in_flight=len(self._in_flight),
            answers_lost=self._answers_lost,
            watches=len(self._watches),
            hints=self._hints,
            reconnects=max(0, self._connections - 1),
            expiries=self._expiries,
            clients_replaced=self._clients_replaced,
        )

    def _listen(self, client: Client, state: ClientState, session_id: int, timeout_s: float) -> None:
        self._inbox.put(self._on_client_state, client, state, session_id, timeout_s)

    def _on_client_state(self, client: Client, state: ClientState, session_id: int, timeout_s: float) -> None:
        if client is not self._client or self._state is SessionState.CLOSED:
            return
        match state:
            case ClientState.CONNECTED:
                self._connections += 1
                if session_id != self._session_id:
                    self._session_id = session_id
                    self._began_ns = self._clock()
                    self._lease_sent_ns = None
                self._timeout_s = timeout_s
                self._connected_ns = self._clock()
                self._enter(SessionState.CONNECTED)
            case ClientState.SUSPENDED:
                self._enter(SessionState.SUSPENDED)
            case ClientState.LOST:
                self._expiries += 1
                self._session_id = 0
                self._lease_sent_ns = None
                self._enter(SessionState.LOST)

    def _enter(self, state: SessionState) -> None:
        self._state = state
        if state is SessionState.CONNECTED:
            self._connected.set()
        else:
            self._connected.clear()
            self._fail_in_flight()
        for listener in tuple(self._listeners):
            try:
                listener(state)
            except Exception:
                _logger.exception("a listener failed on session state %s", state)
        if state is not SessionState.CONNECTED:
            for kind, path in tuple(self._watches):
                self._fire(kind, path, HintKind.SPENT)

    # Lease

    async def _keep_lease(self) -> None:
        """Renew the lease while all is well; replace a client whose thread has died."""
        while True:
            # Starting a session has renewed the lease already.
            await asyncio.sleep(self._timeout_s / LEASE_RENEWALS_PER_TIMEOUT)
            try:
                if self._state is SessionState.CONNECTED:
                    await self.sync()
            except CoordinationError as error:
                _logger.debug("the lease was not renewed: %s", error)
            if self._client is not None and self._client.died:
                await self._replace_client(self._client)

    async def _replace_client(self, dead: Client) -> None:
        _logger.warning("the ZooKeeper client died; starting another one")
        self._clients_replaced += 1
        if self._state is not SessionState.LOST:
            self._on_client_state(dead, ClientState.LOST, 0, self._timeout_s)
        self._client = self._make_client(self._hosts, self._asked_timeout_s, self._listen)
        self._client.start_nowait()
        await self._stop(dead)

    # Requests

    async def sync(self) -> None:
        """Return once the server has all that was written before, and we have its hints."""
        await self._call(partial(self._at_client, "sync", self._chroot or "/"), True)

    async def get(self, path: str, watch: WatchCallback | None = None) -> tuple[bytes, NodeStat]:
        """Data and stat of a znode; raises NoNodeError, and then sets no watch."""
        answer: tuple[bytes, NodeStat] = await self._watching("get", WatchKind.DATA, path, watch)
        return answer

    async def children(self, path: str, watch: WatchCallback | None = None) -> list[str]:
        """Names of a znode's children, in no order; raises NoNodeError, and then sets no watch."""
        names, _ = await self.children_and_stat(path, watch)
        return names

    async def children_and_stat(
        self, path: str, watch: WatchCallback | None = None
    ) -> tuple[list[str], NodeStat]:
        """Names of a znode's children and its stat; raises NoNodeError, and then sets no watch."""
        answer: tuple[list[str], NodeStat] = await self._watching("children", WatchKind.CHILDREN, path, watch)
        return answer

    async def exists(self, path: str, watch: WatchCallback | None = None) -> NodeStat | None:
        """Stat of a znode, or None; the watch is set either way."""
        stat: NodeStat | None = await self._watching("exists", WatchKind.DATA, path, watch)
        return stat

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        ephemeral: bool = False,
        sequence: bool = False,
        makepath: bool = False,
    ) -> str:
        """Create a znode and return its path, which with `sequence` has ten digits appended."""
        _check_size(path, data)
        submit = partial(self._at_client, "create", self._full(path), data, ephemeral, sequence)
        try:
            created: str = await self._call(submit, True)
        except NoNodeError:
            if not makepath:
                raise
            await self._make_parents(path)
            created = await self._call(submit, True)
        return created[len(self._chroot) :]

    async def _make_parents(self, path: str) -> None:
        parts = path.split("/")[1:-1]
        for depth in range(1, len(parts) + 1):
            try:
                await self.create("/" + "/".join(parts[:depth]))
            except NodeExistsError:
                continue

    async def set(self, path: str, data: bytes, version: int = ANY_VERSION) -> NodeStat:
        """Replace a znode's data if it has `version`; raises BadVersionError or NoNodeError."""
        _check_size(path, data)
        stat: NodeStat = await self._call(
            partial(self._at_client, "set", self._full(path), data, version), True
        )
        return stat

    async def delete(self, path: str, version: int = ANY_VERSION) -> None:
        """Delete a znode if it has `version`; raises NoNodeError, BadVersionError or NotEmptyError."""
        await self._call(partial(self._at_client, "delete", self._full(path), version), True)

    async def transaction(self, operations: Sequence[Operation]) -> tuple[OperationResult, ...]:
        """Apply all operations or none; raises TransactionFailedError naming the culprit."""
        assert operations
        placed = [self._placed(operation) for operation in operations]
        size = sum(len(operation.data) for operation in placed if isinstance(operation, Create | SetData))
        if size > NODE_MAX_BYTES:
            raise NodeTooLargeError(
                f"a transaction of {len(operations)} operations has {size} bytes, "
                f"at most {NODE_MAX_BYTES} are allowed: split it"
            )
        results: tuple[OperationResult, ...] = await self._call(
            partial(self._at_client, "transaction", placed), True
        )
        cut = len(self._chroot)
        return tuple(result[cut:] if isinstance(result, str) else result for result in results)

    def _placed(self, operation: Operation) -> Operation:
        path = self._full(operation.path)
        match operation:
            case Create(_, data, ephemeral):
                _check_size(path, data)
                return Create(path, data, ephemeral)
            case SetData(_, data, version):
                _check_size(path, data)
                return SetData(path, data, version)
            case Delete(_, version):
                return Delete(path, version)
            case Check(_, version):
                return Check(path, version)

    def _full(self, path: str) -> str:
        return self._chroot + path if path != "/" else self._chroot or "/"

    def _at_client(self, operation: str, *arguments: Any) -> None:
        assert self._client is not None
        getattr(self._client, operation)(*arguments)

    async def _call(self, submit: Callable[[Done], None], renews_lease: bool) -> Any:
        await self._window.acquire()
        request = _Request(self._loop.create_future(), self._clock(), self._session_id, renews_lease)
        try:
            self._check_connected()
            self._in_flight[request] = None
            submit(partial(self._answered, request))
        except BaseException:
            self._in_flight.pop(request, None)
            self._window.release()
            raise
        self._requests += 1
        return await request.future

    def _check_connected(self) -> None:
        if self._state is SessionState.CLOSED:
            raise SessionClosedError("the ZooKeeper session is closed")
        if self._state is not SessionState.CONNECTED:
            raise ConnectionLostError(f"not connected to ZooKeeper at {self._hosts} (session {self._state})")

    def _answered(self, request: _Request, value: Any, error: CoordinationError | None) -> None:
        self._inbox.put(self._finish, request, value, error)

    def _finish(self, request: _Request, value: Any, error: CoordinationError | None) -> None:
        if isinstance(error, ConnectionLostError) and self._state is SessionState.CONNECTED:
            # kazoo fails its requests first and reports the state right after. Whoever gets the error
            # must find the new state, or it would try again at once on a connection that is gone.
            self._loop.call_later(STATE_DELAY_S, self._conclude, request, value, error)
        else:
            self._conclude(request, value, error)

    def _conclude(self, request: _Request, value: Any, error: CoordinationError | None) -> None:
        if request not in self._in_flight:
            return
        del self._in_flight[request]
        self._window.release()
        answered = not isinstance(error, ConnectionLostError)
        if answered and request.renews_lease and request.session_id == self._session_id:
            self._lease_sent_ns = max(request.sent_ns, self._lease_sent_ns or request.sent_ns)
        if request.future.done():
            return
        if error is None:
            request.future.set_result(value)
        else:
            request.future.set_exception(error)

    def _fail_in_flight(self) -> None:
        failed, self._in_flight = self._in_flight, {}
        self._answers_lost += len(failed)
        for request in failed:
            self._window.release()
            if not request.future.done():
                if self._state is SessionState.CLOSED:
                    request.future.set_exception(SessionClosedError("the ZooKeeper session was closed"))
                else:
                    request.future.set_exception(
                        ConnectionLostError(
                            "the connection broke before the answer; it may have been applied"
                        )
                    )

    # Watches

    async def _watching(self, operation: str, kind: WatchKind, path: str, watch: WatchCallback | None) -> Any:
        full = self._full(path)
        if watch is None:
            return await self._call(partial(self._at_client, operation, full, None), False)

        def submit(done: Done) -> None:
            self._watches.setdefault((kind, path), {})[watch] = None
            self._at_client(operation, full, _WatchSlot(self, kind, path), done)

        try:
            return await self._call(submit, False)
        except NoNodeError:
            self._discard_watch(kind, path, watch)
            raise

    def _discard_watch(self, kind: WatchKind, path: str, watch: WatchCallback) -> bool:
        """Forget a callback; whether it was the last one of its watch."""
        callbacks = self._watches.get((kind, path))
        if callbacks is None or watch not in callbacks:
            return False
        del callbacks[watch]
        if callbacks:
            return False
        del self._watches[kind, path]
        return True

    def _fire(self, kind: WatchKind, path: str, hint: HintKind) -> None:
        callbacks = self._watches.pop((kind, path), None)
        if callbacks is None:
            return
        self._hints += 1
        for callback in callbacks:
            callback(Hint(hint, kind, path))

    def forget_watch(self, kind: WatchKind, path: str, watch: WatchCallback) -> None:
        """Never call `watch` again; the server is told once nobody else here watches the path."""
        if self._discard_watch(kind, path, watch) and self._state is SessionState.CONNECTED:
            self.spawn(self._remove_watches(kind, path))

    async def _remove_watches(self, kind: WatchKind, path: str) -> None:
        def submit(done: Done) -> None:
            if (kind, path) in self._watches:
                # Someone has set it again meanwhile: on the server it is one and the same watch.
                self._loop.call_soon(done, True, None)
            else:
                self._at_client("remove_watches", kind, self._full(path), done)

        try:
            await self._call(submit, False)
        except CoordinationError as error:
            # It fired, or went with its connection: either way it is gone.
            _logger.debug("a watch was already gone: %s", error)


def _check_size(path: str, data: bytes) -> None:
    if len(data) > NODE_MAX_BYTES:
        raise NodeTooLargeError(f"{path} would hold {len(data)} bytes, at most {NODE_MAX_BYTES} are allowed")
