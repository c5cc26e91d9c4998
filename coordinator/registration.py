"""A broker's own entry in the tree: there while the broker lives, and nobody else's.

Meeting another session's znode under our name has two explanations:

* It is ours, left by our previous process, whose session has not expired yet. If the record has
  our host and our locator this is certain: we listen on that address now, so whoever registered
  it is dead. It is replaced at once, with a version check.
* It may belong to a living broker. A dead one's session ends within a session timeout, so we wait
  that long; if the entry still stands, its owner is alive and we are the intruder.

The certainty of the first case holds only when a process starts. One that was frozen, lost its
session and wakes up must not push out its successor, so later it always waits.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any, Generic, TypeVar

from coordinator.errors import (
    BadVersionError,
    ConnectionLostError,
    CoordinationError,
    DuplicateBrokerError,
    NodeExistsError,
    NoNodeError,
    RecordError,
    SessionClosedError,
    TransactionFailedError,
)
from coordinator.limits import CLOSE_GRACE_S
from coordinator.mirror import MirrorSettings, NodeMirror
from coordinator.operations import Create, Delete, Hint, NodeStat, WatchKind
from coordinator.records import EdgeRecord, RouterRecord
from coordinator.session import Session
from overlay.limits import SECOND_NS

_logger = logging.getLogger(__name__)

_Broker = TypeVar("_Broker", RouterRecord, EdgeRecord)

EXPIRY_WAIT_TIMEOUTS = 1.5
"""How many session timeouts a previous owner is given; servers round expiry up to the next tick."""


class Registration(Generic[_Broker]):
    """The entry of one broker. It comes back by itself after a lost session."""

    def __init__(self, session: Session, settings: MirrorSettings, path: str, record: _Broker) -> None:
        self._session = session
        self._settings = settings
        self._path = path
        self._record: _Broker = record
        self._lock = asyncio.Lock()
        self._mirror: NodeMirror | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._failure: asyncio.Future[CoordinationError] = asyncio.get_running_loop().create_future()

    @property
    def record(self) -> _Broker:
        """What is registered."""
        return self._record

    @property
    def failure(self) -> CoordinationError | None:
        """Why the entry is lost for good, if it is."""
        return self._failure.result() if self._failure.done() else None

    async def wait_failure(self) -> CoordinationError:
        """Return once the entry is lost for good: another broker has taken the name. Stop serving then."""
        return await asyncio.shield(self._failure)

    async def start(self) -> None:
        """Register; raises DuplicateBrokerError."""
        async with self._lock:
            await self._establish(first=True)
        self._mirror = NodeMirror(self._session, self._settings, self._path, self._on_node)

    async def update(self, **changes: Any) -> None:
        """Change fields of the record, here and in the tree."""
        self._record = replace(self._record, **changes)
        async with self._lock:
            self._check_open()
            await self._establish(first=False)

    async def close(self) -> None:
        """Take the entry out. If ZooKeeper cannot be reached now, it goes with the session."""
        if self._closed:
            return
        self._closed = True
        if self._mirror is not None:
            self._mirror.cancel()
        if self._task is not None:
            self._task.cancel()
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                stat = await self._session.exists(self._path)
                if stat is not None and stat.ephemeral_owner == self._session.session_id:
                    await self._session.delete(self._path)
        except (TimeoutError, ConnectionLostError, SessionClosedError, NoNodeError) as error:
            _logger.debug("the entry %s goes with its session: %s", self._path, error)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError(f"the registration {self._path} is closed")
        if self._failure.done():
            raise self._failure.result()

    def _on_node(self, view: tuple[NodeStat | None]) -> None:
        stat = view[0]
        ours = stat is not None and stat.ephemeral_owner == self._session.session_id
        if not ours and self._task is None and not self._closed and not self._failure.done():
            self._task = self._session.spawn(self._restore())

    async def _restore(self) -> None:
        try:
            async with self._lock:
                await self._establish(first=False)
        except SessionClosedError:
            return
        except DuplicateBrokerError as error:
            _logger.error("%s", error)
            if not self._failure.done():
                self._failure.set_result(error)
        finally:
            self._task = None
            if self._mirror is not None and not self._closed:
                self._mirror.refresh()

    async def _establish(self, *, first: bool) -> None:
        """Make the znode exist, ours and up to date."""
        while True:
            await self._session.wait_connected()
            data = self._record.to_json()
            try:
                await self._session.create(self._path, data, ephemeral=True)
                return
            except NodeExistsError:
                if await self._settle_existing(data, first=first):
                    return
            except ConnectionLostError:
                continue

    async def _settle_existing(self, data: bytes, *, first: bool) -> bool:
        """Update or replace the znode that is there; False to try again from the start."""
        try:
            found, stat = await self._session.get(self._path)
            if stat.ephemeral_owner == self._session.session_id:
                if found != data:
                    await self._session.set(self._path, data, stat.version)
                return True
            if first and self._is_our_address(found):
                _logger.info("replacing the entry our previous process left at %s", self._path)
                await self._session.transaction(
                    [Delete(self._path, stat.version), Create(self._path, data, ephemeral=True)]
                )
                return True
            await self._wait_for_expiry(found)
        except (ConnectionLostError, NoNodeError, BadVersionError, TransactionFailedError) as error:
            _logger.debug("the entry %s is looked at again: %s", self._path, error)
        return False

    def _is_our_address(self, found: bytes) -> bool:
        try:
            other = type(self._record).from_json(found)
        except RecordError:
            return False
        return (other.host, other.locator) == (self._record.host, self._record.locator)

    async def _wait_for_expiry(self, found: bytes) -> None:
        """Return once the other's entry is gone; raises DuplicateBrokerError if it stays."""
        clock = self._session.clock
        patience_s = EXPIRY_WAIT_TIMEOUTS * self._session.timeout_s
        deadline_ns = clock() + int(patience_s * SECOND_NS)
        hinted = asyncio.Event()

        def wake(_: Hint) -> None:
            hinted.set()

        try:
            while True:
                hinted.clear()
                stat = await self._session.exists(self._path, wake)
                if stat is None or stat.ephemeral_owner == self._session.session_id:
                    return
                left_s = (deadline_ns - clock()) / SECOND_NS
                if left_s <= 0:
                    raise DuplicateBrokerError(
                        f"{self._path} still belongs to another live broker after {patience_s} s; "
                        f"it says {found.decode(errors='replace')}. "
                        "Give this broker another id, or stop that one"
                    )
                try:
                    async with asyncio.timeout(left_s):
                        await hinted.wait()
                except TimeoutError:
                    continue
        finally:
            self._session.forget_watch(WatchKind.DATA, self._path, wake)
