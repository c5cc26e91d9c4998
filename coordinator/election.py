"""The election of the leader among routing brokers, with fencing.

Every candidate has an ephemeral sequential znode in /leader; the lowest number leads. The name
holds a GUID, so that a candidate whose answer got lost finds the znode it made. Each candidate
watches only the one before it and looks at the whole list again when that goes.

    joining ──▶ waiting ──predecessor gone──▶ claiming ──▶ leading ──lapse──▶ joining

Whoever finds itself first claims the leadership by one transaction: its candidate znode exists,
and /epoch goes up by one. From then on every write checks that /epoch has not moved, so the
write of a leader that has been deposed without noticing is refused.

Leading ends by the lease, without waiting for news: when the lease lapses, or when the session is
another one. It ends at once when a watch hints that /epoch has changed, which only a newer leader
does, or the candidate znode, which is never written: the answer to whether that is so may take as long
as the lease. If the session turns out to have survived, the candidate claims again, under a new epoch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from coordinator import paths
from coordinator.errors import (
    BadVersionError,
    ConnectionLostError,
    CoordinationError,
    FencedError,
    NoNodeError,
    RecordError,
    SessionClosedError,
    TransactionFailedError,
)
from coordinator.limits import CLOSE_GRACE_S
from coordinator.operations import (
    Check,
    Hint,
    HintKind,
    NodeStat,
    Operation,
    OperationResult,
    SetData,
    WatchKind,
)
from coordinator.records import EpochRecord, decode_candidate, encode_candidate
from coordinator.session import Session, SessionState, WatchCallback
from overlay.limits import SECOND_NS
from runtime.host import Host

_logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a failure that trying again at once will not mend."""

LeaderChange = Callable[[bool, int], None]
"""Called with whether we lead, and the epoch."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a candidate stands: its own znode, and the one to wait for, if any."""

    own: str | None
    predecessor: str | None

    @property
    def first(self) -> bool:
        """Whether nobody is before us."""
        return self.own is not None and self.predecessor is None


def standing(names: Collection[str], guid: str) -> Standing:
    """Find our place among the candidates' znode names."""
    ranked = sorted(
        (name for name in names if _sequence(name) is not None), key=lambda name: (_sequence(name), name)
    )
    own = next((index for index, name in enumerate(ranked) if name.startswith(f"candidate-{guid}-")), None)
    if own is None:
        return Standing(None, None)
    return Standing(ranked[own], ranked[own - 1] if own > 0 else None)


def _sequence(name: str) -> int | None:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None


class Mandate:
    """The right to act as leader: valid for one epoch, one session, and only while the lease holds."""

    def __init__(self, session: Session, session_id: int, epoch: int, epoch_version: int) -> None:
        self._session = session
        self._session_id = session_id
        self.epoch = epoch
        self._epoch_version = epoch_version
        self._ended = False

    def end(self) -> None:
        """The server has deposed us, although the lease lasts."""
        self._ended = True

    def valid(self) -> bool:
        """Whether the server cannot have deposed us yet, as far as is known."""
        session = self._session
        return (
            not self._ended
            and session.session_id == self._session_id != 0
            and session.lease_valid(session.clock())
        )

    async def commit(self, operations: list[Operation]) -> tuple[OperationResult, ...]:
        """Apply operations under this epoch; raises FencedError if it is no longer ours to do so.

        The results are those of `operations`; so is the index of a TransactionFailedError.
        """
        if not self.valid():
            raise FencedError(f"the lease of epoch {self.epoch} has lapsed: nothing was written")
        try:
            results = await self._session.transaction([Check(paths.EPOCH, self._epoch_version), *operations])
        except TransactionFailedError as error:
            if error.index == 0:
                raise FencedError(
                    f"epoch {self.epoch} is over, another leader has been elected: nothing was written"
                ) from None
            raise TransactionFailedError(error.index - 1, error.cause) from None
        return results[1:]


LeaderJob = Callable[[Mandate], Awaitable[None]]
"""What a leader does; runs until it is cancelled, or ends by FencedError."""


class Candidacy:
    """One router's part in the election, from joining until it is closed."""

    def __init__(
        self,
        session: Session,
        router: str,
        job: LeaderJob,
        on_change: LeaderChange | None = None,
        host: Host | None = None,
    ) -> None:
        self._session = session
        self._router = router
        self._job = job
        self._guid = (host or Host()).new_name()
        self._listeners: list[LeaderChange] = [] if on_change is None else [on_change]
        self._mandate: Mandate | None = None
        self._epoch = 0
        self._hinted = asyncio.Event()
        self._closed = False
        self._first_time = True
        self._stop_listening = session.add_listener(self._on_session)
        self._task = session.spawn(self._run())

    @property
    def is_leader(self) -> bool:
        """Whether we may act as leader at this very moment."""
        return self._mandate is not None and self._mandate.valid()

    @property
    def epoch(self) -> int:
        """The epoch of our latest leadership, 0 if there was none."""
        return self._epoch

    def add_listener(self, listener: LeaderChange) -> None:
        """Call `listener` on every change of our leadership."""
        self._listeners.append(listener)

    async def close(self) -> None:
        """Leave the election; the next candidate need not wait for our session to end."""
        if self._closed:
            return
        self._closed = True
        self._stop_listening()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                own = standing(await self._session.children(paths.LEADER), self._guid).own
                if own is not None:
                    await self._session.delete(f"{paths.LEADER}/{own}")
        except (TimeoutError, ConnectionLostError, SessionClosedError, NoNodeError) as error:
            _logger.debug("the candidacy of %s goes with its session: %s", self._router, error)

    def _on_session(self, _: SessionState) -> None:
        self._hinted.set()

    def _on_hint(self, _: Hint) -> None:
        self._hinted.set()

    async def _run(self) -> None:
        while not self._closed:
            try:
                await self._session.wait_connected()
                await self._stand()
            except SessionClosedError:
                return
            except (ConnectionLostError, NoNodeError, BadVersionError, TransactionFailedError) as error:
                _logger.debug("the election is looked at again: %s", error)
            except CoordinationError as error:
                _logger.warning("router %s cannot stand for election: %s", self._router, error)
                await asyncio.sleep(RETRY_S)

    async def _stand(self) -> None:
        """One pass: find our place, then wait for the one before us, or lead."""
        self._hinted.clear()
        place = standing(await self._session.children(paths.LEADER), self._guid)
        if place.own is None:
            if self._first_time:
                await self._remove_previous()
                self._first_time = False
            path = f"{paths.LEADER}/candidate-{self._guid}-"
            await self._session.create(path, encode_candidate(self._router), ephemeral=True, sequence=True)
            return
        own = await self._session.exists(f"{paths.LEADER}/{place.own}")
        if own is None or own.ephemeral_owner != self._session.session_id:
            # Of a session of ours that has ended: the server is about to remove it.
            await self._wait_gone(place.own)
        elif place.predecessor is not None:
            await self._wait_gone(place.predecessor)
        else:
            mandate = await self._claim(place.own)
            await self._lead(mandate, place.own)

    async def _remove_previous(self) -> None:
        """Remove candidates our previous process left; our registration has proven that it is dead."""
        for name in await self._session.children(paths.LEADER):
            path = f"{paths.LEADER}/{name}"
            try:
                data, stat = await self._session.get(path)
                if (
                    decode_candidate(data) == self._router
                    and stat.ephemeral_owner != self._session.session_id
                ):
                    await self._session.delete(path, stat.version)
            except (NoNodeError, RecordError) as error:
                _logger.debug("left alone: %s", error)

    async def _wait_gone(self, name: str) -> None:
        """Return when the candidate `name` is gone, or anything else deserves a look."""
        path = f"{paths.LEADER}/{name}"
        try:
            if await self._session.exists(path, self._on_hint) is not None:
                await self._hinted.wait()
        finally:
            self._session.forget_watch(WatchKind.DATA, path, self._on_hint)

    async def _claim(self, own: str) -> Mandate:
        session_id = self._session.session_id
        data, stat = await self._session.get(paths.EPOCH)
        record = EpochRecord(EpochRecord.from_json(data).epoch + 1, self._router, own)
        results = await self._session.transaction(
            [Check(f"{paths.LEADER}/{own}"), SetData(paths.EPOCH, record.to_json(), stat.version)]
        )
        raised = results[1]
        assert isinstance(raised, NodeStat)
        return Mandate(self._session, session_id, record.epoch, raised.version)

    async def _lead(self, mandate: Mandate, own: str) -> None:
        if not mandate.valid():
            return
        self._mandate = mandate
        self._epoch = mandate.epoch
        _logger.info("router %s leads, epoch %d", self._router, mandate.epoch)
        self._tell(True)
        job = asyncio.ensure_future(self._job(mandate))
        job.add_done_callback(lambda _: self._hinted.set())
        try:
            await self._wait_deposed(mandate, own, job)
        finally:
            self._mandate = None
            _logger.info("router %s no longer leads, epoch %d", self._router, mandate.epoch)
            self._tell(False)
            job.cancel()
            (outcome,) = await asyncio.gather(job, return_exceptions=True)
            if isinstance(outcome, Exception) and not isinstance(outcome, CoordinationError):
                _logger.error("the leader's work failed", exc_info=outcome)
                await asyncio.sleep(RETRY_S)

    async def _wait_deposed(self, mandate: Mandate, own: str, job: "asyncio.Future[None]") -> None:
        """Return when the mandate is over, by lease, by session, by epoch, or because the job ended."""
        clock = self._session.clock
        watched = False

        def on_hint(hint: Hint) -> None:
            if hint.kind is HintKind.CHANGED:
                mandate.end()
            self._hinted.set()

        try:
            while mandate.valid() and not job.done():
                until_ns = self._session.lease_until_ns
                left_s = 0.0 if until_ns is None else (until_ns - clock()) / SECOND_NS
                try:
                    # Nothing in here may outlast the lease, and a request may stay unanswered for long.
                    async with asyncio.timeout(max(left_s, 0.0)):
                        self._hinted.clear()
                        if not watched and self._session.state is SessionState.CONNECTED:
                            if not await self._still_standing(mandate, own, on_hint):
                                return
                            watched = True
                        if not job.done():
                            await self._hinted.wait()
                            watched = False
                except TimeoutError:
                    continue
        finally:
            self._session.forget_watch(WatchKind.DATA, paths.EPOCH, on_hint)
            self._session.forget_watch(WatchKind.DATA, f"{paths.LEADER}/{own}", on_hint)

    async def _still_standing(self, mandate: Mandate, own: str, on_hint: WatchCallback) -> bool:
        """Whether epoch and candidate znode are ours, setting watches on both; unknown counts as yes."""
        try:
            (data, _), stat = await asyncio.gather(
                self._session.get(paths.EPOCH, on_hint),
                self._session.exists(f"{paths.LEADER}/{own}", on_hint),
            )
        except ConnectionLostError:
            return True
        return stat is not None and EpochRecord.from_json(data).epoch == mandate.epoch

    def _tell(self, leads: bool) -> None:
        for listener in self._listeners:
            try:
                listener(leads, self._epoch)
            except Exception:
                _logger.exception("a listener failed on a change of leadership")
