"""Ephemeral znodes that are kept: made again after every new session, until they are dropped.

The keeper holds what is wanted and works off the difference to what has been confirmed. One task
works while there is a difference; it takes paths in batches, so that thousands of endpoints come
back within a second or two after a session was lost.

An answer that got lost is harmless: the next attempt finds the znode with our session as its
owner. A znode owned by another session is a leftover of our previous session or process, because
the paths kept here carry the name of this broker; it is replaced.
"""

import asyncio
import logging
from collections.abc import Sequence

from coordinator.errors import (
    ConnectionLostError,
    CoordinationError,
    NodeExistsError,
    NoNodeError,
    SessionClosedError,
    TransactionFailedError,
)
from coordinator.limits import OPERATIONS_PER_TRANSACTION
from coordinator.operations import Create, Delete, Operation
from coordinator.session import Session, SessionState

_logger = logging.getLogger(__name__)

BATCH = 4 * OPERATIONS_PER_TRANSACTION


class EphemeralKeeper:
    """Keeps znodes in existence as long as they are wanted."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wanted: dict[str, bytes] = {}
        self._open: dict[str, None] = {}
        """Paths that may not be as wanted, oldest first."""
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._stop_listening = session.add_listener(self._on_session)

    def close(self) -> None:
        """Keep nothing any more; the znodes go with the session."""
        self._stop_listening()
        self._wanted.clear()
        self._open.clear()
        if self._task is not None:
            self._task.cancel()
        for path in tuple(self._waiters):
            self._resolve(path, SessionClosedError(f"{path} is no longer kept: the coordinator was closed"))

    def __len__(self) -> int:
        return len(self._wanted)

    async def keep(self, path: str, data: bytes) -> None:
        """Make `path` exist with `data`, now and after every new session.

        Raises NoNodeError if its parent does not exist, and then does not keep it. Cancelling the
        wait leaves it wanted.
        """
        self._wanted[path] = data
        await self._settled(path)

    async def drop(self, path: str) -> None:
        """Make `path` not exist, and do not keep it any more."""
        self._wanted.pop(path, None)
        await self._settled(path)

    async def _settled(self, path: str) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(path, []).append(waiter)
        self._open[path] = None
        self._work_on()
        await waiter

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._open.update(dict.fromkeys(self._wanted))
        elif state is SessionState.CONNECTED:
            self._work_on()
        elif state is SessionState.CLOSED:
            self.close()

    def _work_on(self) -> None:
        if self._task is None and self._open:
            self._task = self._session.spawn(self._work())

    async def _work(self) -> None:
        try:
            while self._open:
                await self._session.wait_connected()
                batch = list(self._open)[:BATCH]
                for path in batch:
                    del self._open[path]
                await self._work_off(batch)
        finally:
            self._task = None

    async def _work_off(self, batch: Sequence[str]) -> None:
        creates = [path for path in batch if path in self._wanted]
        deletes = [path for path in batch if path not in self._wanted]
        groups = [
            group[start : start + OPERATIONS_PER_TRANSACTION]
            for group in (creates, deletes)
            for start in range(0, len(group), OPERATIONS_PER_TRANSACTION)
        ]
        await asyncio.gather(*(self._settle_group(group) for group in groups))

    async def _settle_group(self, group: Sequence[str]) -> None:
        if len(group) > 1:
            operations: list[Operation] = []
            for path in group:
                data = self._wanted.get(path)
                operations.append(Delete(path) if data is None else Create(path, data, ephemeral=True))
            try:
                await self._session.transaction(operations)
            except (TransactionFailedError, ConnectionLostError):
                # Some of them are as wanted already, or an answer was lost: look at each.
                _logger.debug("%d znodes are looked at one by one", len(group))
            else:
                for path in group:
                    self._resolve(path, None)
                return
        await asyncio.gather(*(self._settle_one(path) for path in group))

    async def _settle_one(self, path: str) -> None:
        data = self._wanted.get(path)
        try:
            if data is None:
                await self._delete(path)
            else:
                await self._create(path, data)
        except (ConnectionLostError, SessionClosedError):
            self._open[path] = None
        except CoordinationError as error:
            self._wanted.pop(path, None)
            if not self._resolve(path, error):
                _logger.warning("%s is no longer kept: %s", path, error)
        else:
            self._resolve(path, None)

    async def _delete(self, path: str) -> None:
        try:
            await self._session.delete(path)
        except NoNodeError:
            return

    async def _create(self, path: str, data: bytes) -> None:
        while True:
            try:
                await self._session.create(path, data, ephemeral=True)
            except NodeExistsError:
                if await self._take_over(path, data):
                    return
            else:
                return

    async def _take_over(self, path: str, data: bytes) -> bool:
        """Make the znode that is there ours; False if it vanished or changed meanwhile."""
        try:
            found, stat = await self._session.get(path)
            if stat.ephemeral_owner == self._session.session_id:
                if found != data:
                    await self._session.set(path, data)
            else:
                await self._session.transaction(
                    [Delete(path, stat.version), Create(path, data, ephemeral=True)]
                )
        except (NoNodeError, TransactionFailedError):
            return False
        return True

    def _resolve(self, path: str, error: CoordinationError | None) -> bool:
        """Tell those who wait for `path`; whether there was someone to tell."""
        if path in self._open and error is None:
            # It was wanted otherwise while we worked; those who wait learn when that is done.
            return True
        told = False
        for waiter in self._waiters.pop(path, ()):
            if not waiter.done():
                told = True
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
        return told
