"""The leader's work: keep every topic assigned to routers that live.

The decisions are made by `assignment.Planner`. This module feeds it and carries out what it says:

    hint ─▶ round: read new topics ─▶ plan ─▶ write in transactions ─▶ wait for the next hint

The leader is the only one who changes who serves a topic, so it keeps all records in memory with
their versions, reads only what is new, and re-reads a share of them with every resync. Every
write checks the version of the record and the epoch. If a write fails, the tree is not as we
think: what we know of the topics concerned is thrown away and read again. That happens too when
somebody has changed a topic's quality of service since we read its record.

The folders in /assignments follow from the topic records. They exist so that a router can watch
its own topics and no others. A router writes into its folder up to which version it has read it, and
all topics in it: it becomes primary in a planned move only of what it knows, or messages would wait
there for a router that is slow to reach ZooKeeper.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from coordinator import paths
from coordinator.assignment import Change, Placement, Planner, Reason
from coordinator.election import Mandate
from coordinator.errors import (
    ConnectionLostError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RecordError,
    TransactionFailedError,
)
from coordinator.limits import (
    ABSENCE_GRACE_S,
    CHANGES_PER_WAVE,
    FOLDER_KEPT_S,
    OPERATIONS_PER_TRANSACTION,
    READS_PER_WAVE,
    REST_PER_WORK,
    REVIEW_S,
    ROUND_INTERVAL_S,
    SCRUB_TOPICS,
    SETTLE_S,
)
from coordinator.mirror import CountedNamesMirror, FolderMirror, MirrorSettings
from coordinator.operations import Create, Delete, NodeStat, Operation, SetData
from coordinator.policy import LoadPolicy
from coordinator.records import RouterRecord, TopicRecord
from coordinator.session import Session
from overlay.limits import SECOND_NS

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """A topic record as last read or written."""

    record: TopicRecord
    version: int
    placement: Placement

    @classmethod
    def of(cls, record: TopicRecord, version: int) -> "_Known":
        """A record and what it says about who serves the topic."""
        return cls(record, version, Placement(record.primary, record.backup))


@dataclass(slots=True)
class LeaderCounters:
    """What a leader has done, counted over all its terms."""

    rounds: int = 0
    changes: int = 0
    transactions: int = 0
    reloads: int = 0


class Leader:
    """One term of office. Made when a mandate is won, run until it is over."""

    def __init__(
        self,
        session: Session,
        settings: MirrorSettings,
        policy: LoadPolicy,
        mandate: Mandate,
        counters: LeaderCounters,
    ) -> None:
        self._session = session
        self._settings = settings
        self._policy = policy
        self._mandate = mandate
        self._counters = counters
        self._clock: Callable[[], int] = session.clock
        self._started_ns = self._clock()
        self._wake = asyncio.Event()
        self._nodes: frozenset[str] | None = None
        """Names in /topics as they are quoted there."""
        self._nodes_count = 0
        self._routers: dict[str, RouterRecord] | None = None
        self._topics: dict[str, _Known] = {}
        self._unreadable: set[str] = set()
        self._folders: dict[str, set[str]] = {}
        """Topics by router, as /assignments has them."""
        self._reload = True
        self._folders_read = False
        self._again = False
        """Something must be read again at once."""
        self._untidy = True
        replaced_ns = session.replaced_at_ns
        self._patient = (
            replaced_ns is not None and self._started_ns - replaced_ns < ABSENCE_GRACE_S * SECOND_NS
        )
        """Missing routers are given time: we were cut off from ZooKeeper ourselves, or many are missing."""
        self._settled_at_ns: dict[str, int] = {}
        """When the new backup of a topic will have settled."""
        self._unconfirmed: dict[str, int] = {}
        """Topics that wait to be moved, and the version of its folder that the new primary must confirm."""
        self._gone_since_ns: dict[str, int] = {}
        self._scrub_from = 0

    async def run(self) -> None:
        """Work until cancelled; ends by FencedError when the mandate turns out to be over."""
        names = CountedNamesMirror(self._session, self._settings, paths.TOPICS, self._on_topics)
        routers = FolderMirror(
            self._session, self._settings, paths.ROUTERS, RouterRecord.from_json, self._on_routers
        )
        try:
            while True:
                began_ns = self._clock()
                delay_s = await self._round()
                # While hints pour in, rounds that take long are rarer.
                took_s = (self._clock() - began_ns) / SECOND_NS
                await asyncio.sleep(max(ROUND_INTERVAL_S, took_s))
                try:
                    async with asyncio.timeout(delay_s):
                        await self._wake.wait()
                except TimeoutError:
                    if delay_s >= REVIEW_S:
                        self._plan_scrub()
                self._wake.clear()
        finally:
            names.cancel()
            routers.cancel()

    def _on_topics(self, view: tuple[frozenset[str], int]) -> None:
        nodes, count = view
        if self._nodes is not None and count - self._nodes_count != len(nodes ^ self._nodes):
            # A topic was deleted and declared again: same name, new record.
            self._reload = True
        self._nodes, self._nodes_count = view
        self._wake.set()

    def _on_routers(self, routers: dict[str, RouterRecord]) -> None:
        # Reported loads change all the time and are looked at with the next review.
        if _what_matters(routers) != _what_matters(self._routers):
            self._wake.set()
        self._routers = routers

    # A round

    async def _round(self) -> float:
        """Do what is to be done now; returns how long to wait for a hint before the next round."""
        self._counters.rounds += 1
        self._again = False
        try:
            if self._reload:
                await self._load()
            elif not self._folders_read:
                await self._read_folders()
            if self._nodes is None or self._routers is None:
                return REVIEW_S
            await self._read_topics(self._nodes)
            await self._make_folders(self._routers)
            now_ns = self._clock()
            changes = await self._plan(self._routers, now_ns)
            finished = await self._carry_out(changes, self._routers)
            if self._untidy and not self._again:  # else some records are not known just now
                await self._tidy()
            await self._remove_folders(now_ns)
        except ConnectionLostError as error:
            # A write may or may not have been applied. The lease decides whether there is a next round.
            _logger.info("the leader reads everything again: %s", error)
            self._reload = True
            await self._session.wait_connected()
            return 0.0
        if self._reload or self._again or not finished:
            return ROUND_INTERVAL_S
        if self._in_term_for(max(ABSENCE_GRACE_S, SETTLE_S), self._clock()):
            return ABSENCE_GRACE_S / 4
        return SETTLE_S if changes or self._settled_at_ns else REVIEW_S

    def _in_term_for(self, duration_s: float, now_ns: int) -> bool:
        """Whether this term is younger than `duration_s`."""
        return now_ns - self._started_ns < duration_s * SECOND_NS

    async def _plan(self, routers: dict[str, RouterRecord], now_ns: int) -> list[Change]:
        for topic in [topic for topic, at_ns in self._settled_at_ns.items() if at_ns <= now_ns]:
            del self._settled_at_ns[topic]
        placements = {name: known.placement for name, known in self._topics.items()}
        # What the leader before us has changed just now is not known to us.
        recent = placements if self._in_term_for(SETTLE_S, now_ns) else self._settled_at_ns
        planner = Planner(
            placements,
            routers,
            self._policy,
            unsettled=recent.keys(),
            awaited=self._awaited(placements.values(), routers, now_ns),
        )
        for _ in planner.steps():
            await asyncio.sleep(0)
        return await self._without_unconfirmed(planner.changes(), now_ns)

    async def _without_unconfirmed(self, changes: list[Change], now_ns: int) -> list[Change]:
        """Put off moves to backups that have not confirmed yet that they know the topic."""
        folders: dict[str, tuple[int, int]] = {}
        put_off: set[str] = set()
        for change in changes:
            topic, router = change.topic, change.placement.primary
            if change.reason is not Reason.MOVE or router != self._topics[topic].placement.backup:
                continue
            assert router is not None
            if router not in folders:
                folders[router] = await self._read_confirmed(router)
            confirmed, version = folders[router]
            if confirmed < self._unconfirmed.setdefault(topic, version):
                self._settled_at_ns[topic] = now_ns + int(SETTLE_S * SECOND_NS)
                put_off.add(topic)
        return [change for change in changes if change.topic not in put_off]

    async def _read_confirmed(self, router: str) -> tuple[int, int]:
        """Which version of its folder a router has confirmed, and which one it has to."""
        if self._folders.get(router, set()) & self._unreadable:
            return 0, 0  # it would be waited for until somebody mends what it cannot read either
        try:
            data, stat = await self._session.get(paths.folder_path(router))
        except NoNodeError:
            self._reload = True
            return 0, 1
        return int(data) if data.isdigit() else 0, stat.children_version

    def _awaited(
        self, placements: Iterable[Placement], routers: dict[str, RouterRecord], now_ns: int
    ) -> set[str]:
        """Routers that are missing, and given some time because it was not only them.

        A missing router has died, as a rule. But if several are missing at the moment of an election,
        or if our own session has just expired, routers were rather cut off from ZooKeeper and are about
        to come back; taking their topics away would move the load onto the first that are back.
        """
        if not self._in_term_for(ABSENCE_GRACE_S, now_ns):
            return set()
        served: set[str | None] = set()
        for placement in placements:
            served.add(placement.primary)
            served.add(placement.backup)
        missing = {name for name in served if name is not None and name not in routers}
        # Once several were missing, the last one is given the same time as the first.
        self._patient = self._patient or len(missing) > 1
        return missing if self._patient else set()

    # Reading

    async def _load(self) -> None:
        """Throw away what is known and read the assignment folders; records follow in the round."""
        self._counters.reloads += 1
        self._reload = False
        self._topics.clear()
        self._unreadable.clear()
        await self._read_folders()

    async def _read_folders(self) -> None:
        self._folders_read = True
        self._untidy = True
        routers = [name for name in await self._session.children(paths.ASSIGNMENTS) if paths.is_router(name)]
        contents = await asyncio.gather(*(self._read_folder(router) for router in routers))
        self._folders = dict(zip(routers, contents, strict=True))

    async def _read_folder(self, router: str) -> set[str]:
        try:
            names = await self._session.children(f"{paths.ASSIGNMENTS}/{router}")
        except NoNodeError:
            self._reload = True
            return set()
        return paths.unquote_topics(names)

    async def _read_topics(self, nodes: frozenset[str]) -> None:
        """Read the records of new topics, forget those of deleted ones."""
        names = paths.unquote_topics(nodes)
        for topic in self._topics.keys() - names:
            del self._topics[topic]
            self._settled_at_ns.pop(topic, None)
            self._unconfirmed.pop(topic, None)
            self._untidy = True
        self._unreadable &= names
        new = sorted(names - self._topics.keys() - self._unreadable)
        for start in range(0, len(new), READS_PER_WAVE):
            began_ns = self._clock()
            await asyncio.gather(*(self._read_topic(topic) for topic in new[start : start + READS_PER_WAVE]))
            if start + READS_PER_WAVE < len(new):
                await asyncio.sleep(self._rest_s(began_ns))

    async def _read_topic(self, topic: str) -> None:
        try:
            data, stat = await self._session.get(paths.topic_path(topic))
            self._topics[topic] = _Known.of(TopicRecord.from_json(data), stat.version)
        except NoNodeError:
            # Deleted meanwhile; the list of names will say so.
            self._topics.pop(topic, None)
        except RecordError as error:
            self._unreadable.add(topic)
            self._topics.pop(topic, None)
            _logger.warning("topic %r stays unassigned: %s", topic, error)

    def _plan_scrub(self) -> None:
        """Forget the folders and some records, in turn, so that the next round reads them again."""
        self._folders_read = False
        self._unreadable.clear()
        names = sorted(self._topics)
        if self._scrub_from >= len(names):
            self._scrub_from = 0
        for topic in names[self._scrub_from : self._scrub_from + SCRUB_TOPICS]:
            del self._topics[topic]
        self._scrub_from += SCRUB_TOPICS

    # Writing

    async def _make_folders(self, routers: dict[str, RouterRecord]) -> None:
        missing = [router for router in routers if router not in self._folders]
        await asyncio.gather(*(self._make_folder(router) for router in missing))

    async def _make_folder(self, router: str) -> None:
        try:
            await self._session.create(paths.folder_path(router))
        except NodeExistsError:
            self._reload = True
        self._folders.setdefault(router, set())

    async def _carry_out(self, changes: list[Change], routers: dict[str, RouterRecord]) -> bool:
        """Write changes, those of topics that nobody serves first and at once.

        For the others the data plane has found its way already, and the leader takes its time. Says
        whether all are written: if there is news meanwhile, a new plan comes first.
        """
        unserved: list[Change] = []
        served: list[Change] = []
        for change in changes:
            before = self._topics[change.topic].record
            alive = before.primary in routers or before.backup in routers
            (served if alive else unserved).append(change)
        for start in range(0, len(unserved), CHANGES_PER_WAVE):
            await self._write(unserved[start : start + CHANGES_PER_WAVE])
        for start in range(0, len(served), CHANGES_PER_WAVE):
            began_ns = self._clock()
            await self._write(served[start : start + CHANGES_PER_WAVE])
            if start + CHANGES_PER_WAVE < len(served):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._rest_s(began_ns)):
                        await self._wake.wait()
                        return False
        return True

    def _rest_s(self, began_ns: int) -> float:
        """How long to leave the processor to messages after work that began at `began_ns`."""
        return REST_PER_WORK * (self._clock() - began_ns) / SECOND_NS

    async def _write(self, changes: list[Change]) -> None:
        """Write changes in transactions, all on their way at once."""
        groups: list[tuple[list[Change], list[Operation]]] = []
        for change in changes:
            operations = self._operations(change)
            if not groups or len(groups[-1][1]) + len(operations) > OPERATIONS_PER_TRANSACTION:
                groups.append(([], []))
            groups[-1][0].append(change)
            groups[-1][1].extend(operations)
        await _all(self._write_group(*group) for group in groups)

    def _operations(self, change: Change) -> list[Operation]:
        known = self._topics[change.topic]
        operations: list[Operation] = [
            SetData(paths.topic_path(change.topic), self._changed(change).to_json(), known.version)
        ]
        before = {known.record.primary, known.record.backup}
        after = {change.placement.primary, change.placement.backup}
        for router in sorted(name for name in before | after if name is not None):
            listed = change.topic in self._folders.get(router, ())
            path = paths.assignment_path(router, change.topic)
            if router in after and not listed:
                operations.append(Create(path))
            elif router not in after and listed:
                operations.append(Delete(path))
        return operations

    def _changed(self, change: Change) -> TopicRecord:
        return replace(
            self._topics[change.topic].record,
            primary=change.placement.primary,
            backup=change.placement.backup,
            epoch=self._mandate.epoch,
        )

    async def _write_group(self, changes: list[Change], operations: list[Operation]) -> None:
        try:
            results = await self._mandate.commit(operations)
        except TransactionFailedError as error:
            _logger.info("the tree is not as the leader thought, it reads again: %s", error)
            # A record or a folder has changed; whose does not matter. Others are as they were.
            self._folders_read = False
            self._again = True
            for change in changes:
                self._topics.pop(change.topic, None)
            return
        self._counters.transactions += 1
        self._counters.changes += len(changes)
        stats = [result for result in results if isinstance(result, NodeStat)]
        settled_ns = self._clock() + int(SETTLE_S * SECOND_NS)
        for change, stat in zip(changes, stats, strict=True):
            before = self._topics[change.topic].record
            self._topics[change.topic] = _Known.of(self._changed(change), stat.version)
            self._unconfirmed.pop(change.topic, None)
            if change.placement.backup not in {None, before.backup, before.primary}:
                self._settled_at_ns[change.topic] = settled_ns
        for operation in operations:
            if not isinstance(operation, SetData):
                _, _, router, node = operation.path.split("/")
                listed = self._folders.setdefault(router, set())
                topics = paths.unquote_topics([node])
                if isinstance(operation, Create):
                    listed |= topics
                else:
                    listed -= topics

    async def _tidy(self) -> None:
        """Make the folders say what the records say."""
        self._untidy = False
        wanted: dict[str, set[str]] = {router: set() for router in self._folders}
        for topic, known in self._topics.items():
            for router in (known.record.primary, known.record.backup):
                if router is not None:
                    wanted.setdefault(router, set()).add(topic)
        operations: list[Operation] = []
        for router, listed in self._folders.items():
            superfluous = listed - wanted[router] - self._unreadable
            operations += [Delete(paths.assignment_path(router, topic)) for topic in sorted(superfluous)]
            missing = wanted[router] - listed
            operations += [Create(paths.assignment_path(router, topic)) for topic in sorted(missing)]
        starts = range(0, len(operations), OPERATIONS_PER_TRANSACTION)
        await _all(self._write_group([], operations[at : at + OPERATIONS_PER_TRANSACTION]) for at in starts)

    async def _remove_folders(self, now_ns: int) -> None:
        """Remove the empty folders of routers long gone."""
        routers = self._routers or {}
        for router in self._folders.keys() & routers.keys():
            self._gone_since_ns.pop(router, None)
        for router in sorted(self._folders.keys() - routers.keys()):
            gone_ns = now_ns - self._gone_since_ns.setdefault(router, now_ns)
            if self._folders[router] or gone_ns < FOLDER_KEPT_S * SECOND_NS:
                continue
            try:
                await self._session.delete(paths.folder_path(router))
            except (NoNodeError, NotEmptyError):
                self._reload = True
            del self._folders[router]
            del self._gone_since_ns[router]


def _what_matters(routers: dict[str, RouterRecord] | None) -> dict[str, tuple[str, float, bool]] | None:
    """What of the routers calls for a round at once."""
    if routers is None:
        return None
    return {name: (router.host, router.capacity, router.draining) for name, router in routers.items()}


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Let all finish before the first failure is raised: a round must not overlap the next."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
