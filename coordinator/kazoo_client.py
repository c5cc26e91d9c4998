"""The only module that knows kazoo, which has no type hints: everything untyped ends here.

kazoo runs its own threads. Every callback handed to this class is called on one of them and
must do nothing but hand over to the event loop.

Three things kazoo does not offer are added here, at the cost of touching its private parts:
the negotiated session timeout, removal of watches (request 18 of the ZooKeeper protocol), and
whether its connection thread has died of an unexpected answer. Two detours are cut short, which
makes it about twice as fast; see `_shorten_paths`.
"""

import logging
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kazoo import client, exceptions, retry, security  # type: ignore[import-untyped]
from kazoo.handlers import utils  # type: ignore[import-untyped]
from kazoo.protocol import serialization, states  # type: ignore[import-untyped]

from coordinator.client import ClientState, Done, StateListener, WatchCallback
from coordinator.errors import (
    BadVersionError,
    ConnectionLostError,
    CoordinationError,
    NodeExistsError,
    NoNodeError,
    NotAllowedError,
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

_logger = logging.getLogger(__name__)


class _RemoveWatches:
    """The request to remove this connection's watches of a path; kazoo lacks it.

    kazoo calls `deserialize` on its connection thread when the answer arrives, in order with the
    answers to other requests. That is the one moment at which its own list of watches can be
    cleared without losing a watch that was set after the removal was asked for.
    """

    type = 18

    def __init__(self, kind: WatchKind, path: str, watchers: dict[str, set[WatchCallback]]) -> None:
        self._kind = kind
        self._path = path
        self._watchers = watchers

    def serialize(self) -> bytes:
        path = self._path.encode()
        return (
            struct.pack("!i", len(path))
            + path
            + struct.pack("!i", 1 if self._kind is WatchKind.CHILDREN else 2)
        )

    def deserialize(self, _data: bytes, _offset: int) -> bool:
        self._watchers.pop(self._path, None)
        return True


class _Inline:
    """Stands for a handler that does not run, so that a result calls its callbacks where it is set."""

    running = False


class ZooKeeperClient:
    """One kazoo client: asynchronous requests with typed answers and errors of our own."""

    def __init__(
        self,
        hosts: str,
        session_timeout_s: float,
        on_state: StateListener,
        credentials: tuple[str, str] | None = None,
        tls: tuple[str, str, str] | None = None,
    ) -> None:
        """`credentials` are user and password, `tls` files of authority, certificate and key."""
        self._on_state = on_state
        self._stopper: threading.Thread | None = None
        self._negotiated_timeout_s = session_timeout_s
        # The default retry waits up to an hour between two attempts to connect.
        forever = retry.KazooRetry(max_tries=-1, delay=0.05, max_delay=1.0)
        options: dict[str, Any] = {}
        if credentials is not None:
            options["auth_data"] = [("digest", ":".join(credentials))]
            options["default_acl"] = (security.make_digest_acl(*credentials, all=True),)
        self._kazoo: Any = client.KazooClient(
            hosts=hosts, timeout=session_timeout_s, connection_retry=forever, logger=_logger, **options
        )
        if tls is not None:
            # kazoo would trust every public authority too, and leave sockets open that no handshake came of.
            self._kazoo.handler.create_connection = partial(_connect_encrypted, _tls_context(*tls))
        self._kazoo.add_listener(self._listen)
        self._observe_handshake()
        self._outlive_garbage()
        self._shorten_paths()

    def _observe_handshake(self) -> None:
        connection = self._kazoo._connection
        invoke = connection._invoke

        def observing(timeout: float, request: Any, xid: int | None = None) -> Any:
            answer = invoke(timeout, request, xid)
            if isinstance(answer, tuple) and hasattr(answer[0], "time_out"):
                self._negotiated_timeout_s = answer[0].time_out / 1000
            return answer

        connection._invoke = observing

    def _outlive_garbage(self) -> None:
        """Let the connection thread end quietly on an answer that kazoo cannot read; `died` tells."""
        connection = self._kazoo._connection
        loop = connection.zk_loop

        def guarded() -> None:
            try:
                loop()
            except Exception:
                _logger.exception("the connection thread of kazoo died")

        connection.zk_loop = guarded

    def _shorten_paths(self) -> None:
        """Halve what a request costs: answers reach us without a detour, and waiting is cheaper."""
        handler = self._kazoo.handler
        inline = _Inline()
        # kazoo hands completed results to yet another thread, unless its handler is not running.
        handler.async_result = lambda: utils.AsyncResult(inline, threading.Condition, TimeoutError)
        # kazoo makes and destroys an epoll instance for every request and every answer.
        handler.select = _poll

    def _listen(self, state: str) -> None:
        session_id = self._kazoo._session_id or 0
        self._on_state(self, ClientState(state), session_id, self._negotiated_timeout_s)

    # Life

    def start_nowait(self) -> None:
        """Begin to connect; the state listener tells when that has succeeded."""
        self._kazoo.start_async()

    def stop_nowait(self, done: Callable[[], None]) -> None:
        """Begin to end the session and to free threads and sockets; `done` is called at the end."""

        # Stopping kazoo blocks, so that takes a thread of its own.
        def stop() -> None:
            try:
                self._stop_blocking()
            finally:
                done()

        self._stopper = threading.Thread(target=stop, name="zookeeper-stop", daemon=True)
        self._stopper.start()

    def join(self) -> None:
        """Wait until the thread that stopped the client is gone, after `done` was called."""
        if self._stopper is not None:
            self._stopper.join()

    def _stop_blocking(self) -> None:
        try:
            self._kazoo.stop()
        except exceptions.WriterNotClosedException:
            _logger.warning("the ZooKeeper client did not stop in time")
        else:
            self._kazoo.close()

    def drop_connection(self) -> None:
        """Cut the TCP connection, so that a thread waiting on it goes on."""
        connected = self._kazoo._connection._socket
        if connected is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    @property
    def died(self) -> bool:
        """Whether the connection thread ended without having been asked to."""
        thread = self._kazoo._connection._connection_routine
        return thread is not None and not thread.is_alive() and not self._kazoo._stopped.is_set()

    @property
    def credentials(self) -> tuple[int, bytes]:
        """Session id and password, with which another client could take the session over."""
        return self._kazoo._session_id or 0, self._kazoo._session_passwd

    # Requests

    def get(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with (data, stat)."""
        _link(self._kazoo.get_async(path, watch), path, done, _data_and_stat)

    def children(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with (names of the children, stat)."""
        _link(self._kazoo.get_children_async(path, watch, include_data=True), path, done, _names_and_stat)

    def exists(self, path: str, watch: WatchCallback | None, done: Done) -> None:
        """Answer with the stat, or None."""
        _link(self._kazoo.exists_async(path, watch), path, done, _stat)

    def create(self, path: str, data: bytes, ephemeral: bool, sequence: bool, done: Done) -> None:
        """Answer with the path that was created."""
        # Each call of kazoo's own `create_async` leaves sixty objects in cycles to the garbage collector.
        acl = self._kazoo.default_acl or security.OPEN_ACL_UNSAFE
        result = self._kazoo.handler.async_result()
        self._kazoo._call(serialization.Create(path, data, acl, ephemeral | sequence << 1), result)
        _link(result, path, done)

    def set(self, path: str, data: bytes, version: int, done: Done) -> None:
        """Answer with the new stat."""
        _link(self._kazoo.set_async(path, data, version), path, done, _stat)

    def delete(self, path: str, version: int, done: Done) -> None:
        """Answer with True."""
        _link(self._kazoo.delete_async(path, version), path, done)

    def sync(self, path: str, done: Done) -> None:
        """Answer once the server has asked the ensemble's leader, after all hints that came before."""

        def answered(value: Any, error: CoordinationError | None) -> None:
            # Hints reach us on another thread than answers do: this one lines up behind them.
            self._kazoo.handler.dispatch_callback(states.Callback("sync", done, (value, error)))

        _link(self._kazoo.sync_async(path), path, answered)

    def transaction(self, operations: Sequence[Operation], done: Done) -> None:
        """Answer with one result per operation, or TransactionFailedError."""
        request = self._kazoo.transaction()
        for operation in operations:
            match operation:
                case Create(path, data, ephemeral):
                    request.create(path, data, ephemeral=ephemeral)
                case SetData(path, data, version):
                    request.set_data(path, data, version)
                case Delete(path, version):
                    request.delete(path, version)
                case Check(path, version):
                    request.check(path, version)
        paths = [operation.path for operation in operations]
        _link(request.commit_async(), "transaction", done, lambda results: _results(paths, results))

    def remove_watches(self, kind: WatchKind, path: str, done: Done) -> None:
        """Take this connection's watches off a path, here and on the server."""
        kazoo = self._kazoo
        watchers = kazoo._child_watchers if kind is WatchKind.CHILDREN else kazoo._data_watchers
        result = kazoo.handler.async_result()
        kazoo._call(_RemoveWatches(kind, path, watchers), result)
        _link(result, path, done)


def _tls_context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(authority)
    if certificate:
        context.load_cert_chain(certificate, key)
    return context


def _connect_encrypted(
    context: ssl.SSLContext, *, address: tuple[str, int], hostname: str, timeout: float, **_: Any
) -> ssl.SSLSocket:
    """What kazoo calls to connect; the server's certificate must be for `hostname`."""
    plain = socket.create_connection(address, timeout)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(plain, server_hostname=hostname)
    finally:
        plain.close()  # the encrypted one has taken it over, or nobody needs it


def _poll(
    readable: Sequence[Any], writable: Sequence[Any], _: Sequence[Any], timeout_s: float | None = None
) -> tuple[list[Any], list[Any], list[Any]]:
    """What `select.select` does, for file descriptors of any number.

    Of an encrypted record that holds several answers, all but the first are not in the kernel any more:
    waiting for the socket would leave them until something else arrives.
    """
    poll = select.poll()
    decrypted = {
        waiting.fileno() for waiting in readable if isinstance(waiting, ssl.SSLSocket) and waiting.pending()
    }
    if decrypted:
        timeout_s = 0
    for waiting in readable:
        poll.register(waiting, select.POLLIN)
    for waiting in writable:
        poll.register(waiting, select.POLLOUT)
    ready = decrypted | {number for number, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
    return (
        [waiting for waiting in readable if waiting.fileno() in ready],
        [waiting for waiting in writable if waiting.fileno() in ready],
        [],
    )


def _link(result: Any, path: str, done: Done, convert: Callable[[Any], Any] | None = None) -> None:
    def completed(finished: Any) -> None:
        error = finished.exception
        if error is not None:
            done(None, _translate(error, path))
            return
        try:
            value = finished.value if convert is None else convert(finished.value)
        except CoordinationError as failure:
            done(None, failure)
        else:
            done(value, None)

    result.rawlink(completed)


def _data_and_stat(answer: Any) -> tuple[bytes, NodeStat]:
    data, stat = answer
    return data or b"", _stat_of(stat)


def _names_and_stat(answer: Any) -> tuple[list[str], NodeStat]:
    names, stat = answer
    return names, _stat_of(stat)


def _stat(answer: Any) -> NodeStat | None:
    return None if answer is None else _stat_of(answer)


def _stat_of(stat: Any) -> NodeStat:
    return NodeStat(
        version=stat.version,
        ephemeral_owner=stat.ephemeralOwner,
        created_zxid=stat.czxid,
        modified_zxid=stat.mzxid,
        children=stat.numChildren,
        children_version=stat.cversion,
    )


def _results(paths: Sequence[str], results: Sequence[Any]) -> tuple[OperationResult, ...]:
    for index, result in enumerate(results):
        # Operations before the culprit are reported as rolled back, those after it as not run.
        if isinstance(result, Exception) and not isinstance(
            result, exceptions.RolledBackError | exceptions.RuntimeInconsistency
        ):
            raise TransactionFailedError(index, _translate(result, paths[index]))
    failures = [result for result in results if isinstance(result, Exception)]
    if failures:
        raise TransactionFailedError(0, CoordinationError(f"the server gave no cause: {failures[0]!r}"))
    return tuple(result if isinstance(result, str | bool) else _stat_of(result) for result in results)


def _translate(error: Any, path: str) -> CoordinationError:
    if isinstance(error, exceptions.NoNodeError):
        return NoNodeError(f"{path} or its parent does not exist")
    if isinstance(error, exceptions.NodeExistsError):
        return NodeExistsError(f"{path} exists")
    if isinstance(error, exceptions.BadVersionError):
        return BadVersionError(f"{path} has another version than expected")
    if isinstance(error, exceptions.NotEmptyError):
        return NotEmptyError(f"{path} has children")
    if isinstance(error, exceptions.NoAuthError | exceptions.AuthFailedError):
        return NotAllowedError(f"ZooKeeper does not let us at {path}: check zookeeper_credentials")
    lost = exceptions.ConnectionLoss | exceptions.SessionExpiredError | exceptions.SessionMovedError
    if isinstance(error, lost | exceptions.OperationTimeoutError | exceptions.RequestTimeoutError):
        return ConnectionLostError(f"no answer for {path} ({type(error).__name__}), it may have been applied")
    return CoordinationError(f"ZooKeeper refused a request for {path}: {error!r}")
