"""Mirrors: local copies of parts of the tree that follow the original.

A ZooKeeper watch fires once, says little, and is lost with its connection. So a watch is only a
hint here. A mirror that is hinted waits a moment for more hints, reads again (which sets its
watches anew), and calls back if what it read is not what it had. It also reads again after a
reconnect, and every now and then without any reason.

A mirror is an object, not a task: it owns a timer, and a task only while it reads.

    idle ──hint──▶ waiting ──timer──▶ reading ──▶ idle, or waiting again if hinted meanwhile
"""

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from coordinator import paths
from coordinator.errors import (
    ConnectionLostError,
    CoordinationError,
    NoNodeError,
    RecordError,
    SessionClosedError,
)
from coordinator.limits import COALESCE_MAX_S, COALESCE_S, READS_PER_S, RESYNC_READS, RESYNC_S
from coordinator.operations import Hint, HintKind, NodeStat, WatchKind
from coordinator.records import Endpoint, EpochRecord, TopicRecord, TopicView
from coordinator.session import Session, SessionState
from overlay.limits import SECOND_NS

_logger = logging.getLogger(__name__)

_View = TypeVar("_View")
_Record = TypeVar("_Record", bound="_Named")
_Answer = TypeVar("_Answer")
_Answer_co = TypeVar("_Answer_co", covariant=True)


def _nothing() -> None:
    """There is nothing to do."""


class _Named(Protocol):
    @property
    def id(self) -> str: ...


class Watch(Protocol):
    """What a caller holds of something that calls it back."""

    def cancel(self) -> None:
        """Never call back again, and leave nothing behind."""


@dataclass(slots=True)
class MirrorCounters:
    """Counted over all mirrors that share it."""

    mirrors: int = 0
    reads: int = 0
    changes: int = 0
    busy: int = 0
    """Mirrors that wait to read or read just now."""
    failures: int = 0
    """Reads that failed for another reason than a broken connection, records that made no sense included."""


@dataclass(slots=True)
class ReadingPace:
    """How fast the mirrors that share it read when very many are hinted at once."""

    reads_per_s: float = READS_PER_S


@dataclass(frozen=True, slots=True)
class MirrorSettings:
    """What the mirrors of one coordinator have in common."""

    coalesce_s: float = COALESCE_S
    resync_s: float = RESYNC_S
    randomness: random.Random = field(default_factory=random.Random)
    """Spreads the resyncs, so that many mirrors do not read at the same moment."""
    counters: MirrorCounters = field(default_factory=MirrorCounters)
    pace: ReadingPace = field(default_factory=ReadingPace)


class Mirror(ABC, Generic[_View]):
    """The schedule of a mirror; subclasses say what to read."""

    def __init__(self, session: Session, settings: MirrorSettings, deliver: Callable[[_View], None]) -> None:
        self._session = session
        self._settings = settings
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._armed: set[tuple[WatchKind, str]] = set()
        self._view: _View | None = None
        self._hinted = False
        self._cancelled = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._resync_timer: asyncio.TimerHandle | None = None
        self._last_read_s = 0.0
        self._begun = 0
        """Reads that have begun, and so the number of the last one."""
        self._read_up_to = 0
        """The last read that has come to its end, other than by a broken connection."""
        self._stop_listening = session.add_listener(self._on_session)
        settings.counters.mirrors += 1
        self._resync_share = settings.randomness.uniform(0.8, 1.2)
        self._resynced_s = self._loop.time()
        self._resync()
        self._schedule(0)

    def cancel(self) -> None:
        """Never call back again; the server is told to drop the watches."""
        if self._cancelled:
            return
        self._cancelled = True
        self._settings.counters.mirrors -= 1
        self._stop_listening()
        self._stop_listening = _nothing  # it refers to us: without a cycle no collector is needed
        if self._timer is not None:
            self._timer.cancel()
            self._settings.counters.busy -= 1
        if self._resync_timer is not None:
            self._resync_timer.cancel()
        if self._task is not None:
            self._task.cancel()
        for kind, path in sorted(self._armed):
            self._session.forget_watch(kind, path, self._on_hint)
        self._armed.clear()

    @property
    def cancelled(self) -> bool:
        """Whether this mirror has ended."""
        return self._cancelled

    @property
    def is_behind(self) -> bool:
        """It waits to read or reads just now."""
        return not self._cancelled and (self._timer is not None or self._task is not None)

    @property
    def next_read(self) -> int:
        """The number of the read that will know of everything hinted at so far."""
        return self._begun + (self._task is None or self._hinted)

    def has_read(self, number: int) -> bool:
        """That read has come to its end and what it found been told; or nobody wants to know any more."""
        return self._cancelled or self._read_up_to >= number

    def refresh(self) -> None:
        """Read everything again soon."""
        self._forget_all()
        self._schedule(self._settings.coalesce_s)

    @abstractmethod
    async def _read(self) -> _View | None:
        """Read what is mirrored, setting watches by `_get`, `_children` and `_exists`.

        None means that there is nothing to call back with.
        """

    def _note(self, hint: Hint) -> None:
        """Remember what the hint was about; by default everything is read again anyway."""

    def _forget_all(self) -> None:
        """Trust nothing that was read before; by default everything is read again anyway."""

    # Schedule

    def _on_hint(self, hint: Hint) -> None:
        if self._cancelled:
            return
        self._armed.discard((hint.watch, hint.path))
        if hint.kind is HintKind.SPENT:
            self._forget_all()
        else:
            self._note(hint)
        self._schedule(self._settings.coalesce_s)

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.CLOSED:
            self.cancel()
        elif state is SessionState.CONNECTED:
            self._forget_all()
            self._schedule(0)

    def _resync(self) -> None:
        """Read everything again if it is time to, and plan the next look."""
        now_s = self._loop.time()
        # The net must not cost more than what it is to catch: who watches much reads it again less often.
        # How much that is may have changed since the timer was set.
        stretch = max(1.0, self._session.watch_count / RESYNC_READS)
        due_s = self._resynced_s + self._settings.resync_s * stretch * self._resync_share
        if due_s <= now_s:
            self.refresh()
            self._resynced_s = now_s
            self._resync_share = self._settings.randomness.uniform(0.8, 1.2)
            due_s = now_s + self._settings.resync_s * stretch * self._resync_share
        self._resync_timer = self._loop.call_at(due_s, self._resync)

    def _schedule(self, delay_s: float) -> None:
        self._hinted = True
        connected = self._session.state is SessionState.CONNECTED
        if self._task is None and self._timer is None and connected:
            if delay_s > 0:
                # What takes long to read is read less often while hints pour in.
                delay_s = min(max(delay_s, 2 * self._last_read_s), COALESCE_MAX_S)
            # When thousands are hinted at once, they take turns: this loop also forwards messages.
            counters = self._settings.counters
            delay_s += counters.busy / self._settings.pace.reads_per_s
            self._timer = self._loop.call_later(delay_s, self._begin)
            counters.busy += 1

    def _begin(self) -> None:
        self._timer = None
        if self._session.state is not SessionState.CONNECTED:
            self._settings.counters.busy -= 1
            return
        self._hinted = False
        self._begun += 1
        self._task = self._session.spawn(self._work())

    async def _work(self) -> None:
        number, ended = self._begun, True
        started_ns = self._session.clock()
        try:
            self._settings.counters.reads += 1
            view = await self._read()
        except (ConnectionLostError, SessionClosedError):
            # The session's next state brings us back.
            self._forget_all()
            self._hinted = True
            view, ended = None, False
        except CoordinationError as error:
            self._forget_all()
            self._settings.counters.failures += 1
            _logger.warning("%s could not be read: %s", type(self).__name__, error)
            view = None
        finally:
            self._task = None
            self._settings.counters.busy -= 1
        self._last_read_s = (self._session.clock() - started_ns) / SECOND_NS
        if self._cancelled:
            return
        if view is not None and view != self._view:
            self._view = view
            self._settings.counters.changes += 1
            self._call_back(view)
        if ended:
            self._read_up_to = number
        if self._hinted:
            self._schedule(self._settings.coalesce_s)

    def _call_back(self, view: _View) -> None:
        try:
            self._deliver(view)
        except Exception:
            _logger.exception("the callback of a %s failed", type(self).__name__)

    # Reading with a watch

    async def _get(self, path: str) -> tuple[bytes, NodeStat]:
        return await self._arming(WatchKind.DATA, path, self._session.get)

    async def _children(self, path: str) -> list[str]:
        return await self._arming(WatchKind.CHILDREN, path, self._session.children)

    async def _read_folder(self, path: str) -> tuple[frozenset[str], int]:
        """The names in a folder and how often one has come or gone; an absent folder is an empty one."""
        while True:
            try:
                names, stat = await self._arming(WatchKind.CHILDREN, path, self._session.children_and_stat)
                return frozenset(names), stat.children_version
            except NoNodeError:
                if await self._exists(path) is None:
                    return frozenset(), 0

    async def _exists(self, path: str) -> NodeStat | None:
        return await self._arming(WatchKind.DATA, path, self._session.exists)

    async def _arming(self, kind: WatchKind, path: str, read: "_Reader[_Answer]") -> _Answer:
        self._armed.add((kind, path))
        try:
            return await read(path, self._on_hint)
        except NoNodeError:
            self._armed.discard((kind, path))
            raise

    def _disarm(self, kind: WatchKind, path: str) -> None:
        if (kind, path) in self._armed:
            self._armed.discard((kind, path))
            self._session.forget_watch(kind, path, self._on_hint)


class _Reader(Protocol[_Answer_co]):
    async def __call__(self, path: str, watch: Callable[[Hint], None], /) -> _Answer_co: ...


class TopicMirror(Mirror[TopicView]):
    """The record of one topic and its endpoints. Silent until the topic exists.

    Endpoints come and go far more often than the record changes: only what was hinted at is read again.
    """

    def __init__(
        self, session: Session, settings: MirrorSettings, topic: str, deliver: Callable[[TopicView], None]
    ) -> None:
        self._path = paths.topic_path(topic)
        self._record: TopicRecord | None = None
        self._endpoints: dict[str, Endpoint] = {}
        """By the names of their znodes: of many, few are new when they are read again."""
        self._current: set[WatchKind] = set()
        """DATA if `_record` has been read and not been hinted at since, CHILDREN for `_endpoints`."""
        super().__init__(session, settings, deliver)

    def _note(self, hint: Hint) -> None:
        self._current.discard(hint.watch)

    def _forget_all(self) -> None:
        self._current.clear()

    async def _read(self) -> TopicView | None:
        while True:
            stale = [kind for kind in WatchKind if kind not in self._current]
            # Set before reading: a hint during the read must be able to clear it again.
            self._current.update(stale)
            outcomes = await asyncio.gather(
                *(self._read_part(kind) for kind in stale), return_exceptions=True
            )
            if any(isinstance(outcome, NoNodeError) for outcome in outcomes):
                self._current.clear()
                if await self._exists(self._path) is None:
                    return self._gone()
                continue
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
            assert self._record is not None
            return TopicView(self._record, frozenset(self._endpoints.values()))

    async def _read_part(self, kind: WatchKind) -> None:
        if kind is WatchKind.DATA:
            data, _ = await self._get(self._path)
            record = TopicRecord.from_json(data)
            known = self._record
            if known is not None and known.id == record.id and record.epoch < known.epoch:
                # From a leader that has been deposed, or from a server that lags behind.
                self._settings.counters.failures += 1
                _logger.warning(
                    "topic %s: epoch %d is older than %d, ignored", record.name, record.epoch, known.epoch
                )
                return
            self._record = record
        else:
            names = await self._children(self._path)
            self._endpoints = parse_endpoints(names, self._settings.counters, self._endpoints)

    def _gone(self) -> TopicView | None:
        if self._view is None:
            return None
        return TopicView(replace(self._view.record, primary=None, backup=None), frozenset(), exists=False)


def parse_endpoints(
    names: Iterable[str], counters: MirrorCounters, known: Mapping[str, Endpoint]
) -> dict[str, Endpoint]:
    """The endpoints among a topic's children by name; what is no endpoint is counted and left out."""
    endpoints: dict[str, Endpoint] = {}
    for name in names:
        try:
            endpoints[name] = known.get(name) or Endpoint.parse(name)
        except RecordError as error:
            counters.failures += 1
            _logger.warning("ignored: %s", error)
    return endpoints


class NamesMirror(Mirror[frozenset[str]]):
    """The names in a folder; an absent folder is an empty one."""

    def __init__(
        self,
        session: Session,
        settings: MirrorSettings,
        path: str,
        deliver: Callable[[frozenset[str]], None],
    ) -> None:
        self._path = path
        super().__init__(session, settings, deliver)

    async def _read(self) -> frozenset[str]:
        names, _ = await self._read_folder(self._path)
        return names


class CountedNamesMirror(Mirror[tuple[frozenset[str], int]]):
    """The names in a folder, and how often one has come or gone; an absent folder is an empty one.

    The count tells that a znode was deleted and made again under the same name between two reads.
    """

    def __init__(
        self,
        session: Session,
        settings: MirrorSettings,
        path: str,
        deliver: Callable[[tuple[frozenset[str], int]], None],
    ) -> None:
        self._path = path
        super().__init__(session, settings, deliver)

    async def _read(self) -> tuple[frozenset[str], int]:
        return await self._read_folder(self._path)


class FolderMirror(Mirror[dict[str, _Record]], Generic[_Record]):
    """The records in a folder by name. Only what was hinted at is read again."""

    def __init__(
        self,
        session: Session,
        settings: MirrorSettings,
        path: str,
        parse: Callable[[bytes], _Record],
        deliver: Callable[[dict[str, _Record]], None],
    ) -> None:
        self._path = path
        self._parse = parse
        self._listed = False
        """Whether `_names` is what the folder holds, as far as hints tell."""
        self._names: frozenset[str] = frozenset()
        self._current: set[str] = set()
        """Names whose record has been read and not been hinted at since."""
        self._records: dict[str, _Record] = {}
        super().__init__(session, settings, deliver)

    def _note(self, hint: Hint) -> None:
        if hint.path == self._path:
            self._listed = False
        else:
            self._current.discard(hint.path.rsplit("/", 1)[1])

    def _forget_all(self) -> None:
        self._listed = False
        self._current.clear()

    async def _read(self) -> dict[str, _Record]:
        while not self._listed:
            # Set before reading: a hint during the read must be able to clear it again.
            self._listed = True
            self._names = await self._list()
        for name in self._records.keys() - self._names:
            del self._records[name]
        self._current &= self._names
        stale = sorted(self._names - self._current)
        self._current.update(stale)
        await asyncio.gather(*(self._read_record(name) for name in stale))
        return dict(sorted(self._records.items()))

    async def _list(self) -> frozenset[str]:
        try:
            return frozenset(await self._children(self._path))
        except NoNodeError:
            if await self._exists(self._path) is not None:
                self._listed = False
            return frozenset()

    async def _read_record(self, name: str) -> None:
        try:
            data, _ = await self._get(f"{self._path}/{name}")
            record = self._parse(data)
            if record.id != name:
                raise RecordError(f"its id is {record.id!r}")
            self._records[name] = record
        except NoNodeError:
            self._records.pop(name, None)
            self._current.discard(name)
        except RecordError as error:
            self._settings.counters.failures += 1
            self._records.pop(name, None)
            _logger.warning("%s/%s is ignored: %s", self._path, name, error)

    def _call_back(self, view: dict[str, _Record]) -> None:
        # A copy, because the callback may keep and change what it is handed.
        super()._call_back(dict(view))


class LeaderMirror(Mirror[tuple[str | None, int]]):
    """The leader and its epoch; no leader once the znode of its candidacy is gone."""

    def __init__(
        self,
        session: Session,
        settings: MirrorSettings,
        deliver: Callable[[str | None, int], None],
    ) -> None:
        super().__init__(session, settings, lambda view: deliver(*view))

    async def _read(self) -> tuple[str | None, int] | None:
        try:
            data, _ = await self._get(paths.EPOCH)
        except NoNodeError:
            await self._exists(paths.EPOCH)
            return None
        record = EpochRecord.from_json(data)
        if record.candidate is None:
            return None, record.epoch
        path = f"{paths.LEADER}/{record.candidate}"
        for kind, armed in tuple(self._armed):
            if armed not in {paths.EPOCH, path}:
                self._disarm(kind, armed)
        standing = await self._exists(path)
        return record.leader if standing is not None else None, record.epoch


class NodeMirror(Mirror[tuple[NodeStat | None]]):
    """Whether one znode exists, and whose it is."""

    def __init__(
        self,
        session: Session,
        settings: MirrorSettings,
        path: str,
        deliver: Callable[[tuple[NodeStat | None]], None],
    ) -> None:
        self._path = path
        super().__init__(session, settings, deliver)

    async def _read(self) -> tuple[NodeStat | None]:
        return (await self._exists(self._path),)
