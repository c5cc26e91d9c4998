"""The control plane as a broker sees it: register, declare topics, add endpoints, watch, stand for leader."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from coordinator import paths
from coordinator.election import Candidacy, LeaderChange, Mandate
from coordinator.errors import (
    BadVersionError,
    ClusterFormatError,
    ConnectionLostError,
    CoordinationError,
    CoordinationTimeoutError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RecordError,
    TopicExistsError,
    TopicInUseError,
    UnknownTopicError,
)
from coordinator.keeper import EphemeralKeeper
from coordinator.leader import Leader, LeaderCounters
from coordinator.limits import CATCH_UP_POLL_S, OPERATION_TIMEOUT_S, READS_PER_S, RESYNC_S, TOPIC_ID_MAX
from coordinator.mirror import (
    CountedNamesMirror,
    FolderMirror,
    LeaderMirror,
    Mirror,
    MirrorSettings,
    NamesMirror,
    TopicMirror,
    Watch,
    parse_endpoints,
)
from coordinator.policy import LoadPolicy
from coordinator.records import (
    FORMAT,
    ClusterRecord,
    EdgeRecord,
    Endpoint,
    EpochRecord,
    FlagRecord,
    RouterRecord,
    TopicRecord,
    TopicView,
    requests_of,
)
from coordinator.registration import Registration
from coordinator.session import Session, SessionState, SessionStatistics
from overlay.qos import SubscriptionQos, TopicQos, explain_difference
from runtime.host import Host

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

DecideQos = Callable[[TopicQos, frozenset[SubscriptionQos]], TopicQos]
"""Given what a topic has and what its subscribers ask for, what it shall have; raises to refuse."""


@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """What a coordinator holds and has done."""

    session: SessionStatistics
    mirrors: int
    mirror_reads: int
    mirror_changes: int
    mirror_failures: int
    endpoints_kept: int
    leader_rounds: int
    assignments_changed: int
    assignment_transactions: int
    leader_reloads: int


class Coordinator:
    """One broker's access to the control plane, on a session it does not own.

    Calls wait out broken connections and try again, for at most `operation_timeout_s`, then raise
    CoordinationTimeoutError. All of them can be repeated safely.
    """

    def __init__(
        self,
        session: Session,
        *,
        resync_s: float = RESYNC_S,
        operation_timeout_s: float = OPERATION_TIMEOUT_S,
        host: Host | None = None,
    ) -> None:
        self._session = session
        self._host = host or Host()
        self._operation_timeout_s = operation_timeout_s
        self._settings = MirrorSettings(resync_s=resync_s, randomness=self._host.randomness)
        self._keeper = EphemeralKeeper(session)
        self._leader_counters = LeaderCounters()
        self._mirrors: list[Mirror[Any]] = []
        self._mirrors_swept = 0
        """How many mirrors there were when cancelled ones were last let go of."""
        self._registrations: list[Registration[RouterRecord] | Registration[EdgeRecord]] = []
        self._candidacies: list[Candidacy] = []
        self._cluster = ""

    # Life

    async def start(self) -> None:
        """Make sure that the tree exists and is of our format."""
        await self._insist("preparing the tree", self._prepare)

    async def _prepare(self) -> None:
        for folder in paths.FOLDERS:
            await self._create_unless_there(folder, b"")
        await self._create_unless_there(paths.EPOCH, EpochRecord().to_json())
        await self._create_unless_there(paths.CLUSTER, ClusterRecord(self._host.new_name()).to_json())
        data, _ = await self._session.get(paths.CLUSTER)
        record = ClusterRecord.from_json(data)
        if record.format != FORMAT:
            raise ClusterFormatError(
                f"the tree at {self._session.chroot} has format {record.format}, this needs {FORMAT}: "
                "use the version of Isthmus that made it, or another chroot"
            )
        self._cluster = record.cluster

    async def _create_unless_there(self, path: str, data: bytes) -> None:
        try:
            await self._session.create(path, data)
        except NodeExistsError:
            return

    async def close(self) -> None:
        """End everything that was started here. The session stays open: close it afterwards."""
        for mirror in self._mirrors:
            mirror.cancel()
        self._mirrors.clear()
        leaving: list[Awaitable[None]] = [candidacy.close() for candidacy in self._candidacies]
        leaving += [registration.close() for registration in self._registrations]
        self._candidacies.clear()
        self._registrations.clear()
        await asyncio.gather(*leaving)
        self._keeper.close()

    @property
    def session(self) -> Session:
        """The session below."""
        return self._session

    @property
    def cluster(self) -> str:
        """Which cluster this is; empty before `start`."""
        return self._cluster

    def set_reading_pace(self, reads_per_s: float = READS_PER_S) -> None:
        """How fast to read what is watched when there is very much of it: messages have to wait meanwhile."""
        self._settings.pace.reads_per_s = reads_per_s

    async def catch_up(self) -> None:
        """Return once everything watched here has been read as it was when this was called, or later.

        Waits as long as ZooKeeper cannot be reached.
        """
        while True:
            await self._session.wait_connected()
            connected_ns, _ = self._session.answering_ns
            try:
                await self._session.sync()
            except ConnectionLostError as error:
                _logger.debug("catching up is tried again: %s", error)
                continue
            # What was written before has been hinted at by now. Where topics change all the time, some mirror
            # is always behind: what counts is that each has read once more, not that all are idle.
            behind = [(mirror, mirror.next_read) for mirror in self._mirrors if mirror.is_behind]
            while self._is_still_connected(connected_ns):
                if all(mirror.has_read(number) for mirror, number in behind):
                    return
                await asyncio.sleep(CATCH_UP_POLL_S)

    def _is_still_connected(self, since_ns: int) -> bool:
        """If the connection has broken, what was hinted at is yet to be read."""
        connected = self._session.state is SessionState.CONNECTED
        return connected and self._session.answering_ns[0] == since_ns

    def statistics(self) -> CoordinatorStatistics:
        """The counters as they are now."""
        mirrors, leader = self._settings.counters, self._leader_counters
        return CoordinatorStatistics(
            session=self._session.statistics(),
            mirrors=mirrors.mirrors,
            mirror_reads=mirrors.reads,
            mirror_changes=mirrors.changes,
            mirror_failures=mirrors.failures,
            endpoints_kept=len(self._keeper),
            leader_rounds=leader.rounds,
            assignments_changed=leader.changes,
            assignment_transactions=leader.transactions,
            leader_reloads=leader.reloads,
        )

    async def _insist(self, doing: str, attempt: Callable[[], Awaitable[_Result]]) -> _Result:
        """Try until it is answered, for as long as a call may take."""
        try:
            async with asyncio.timeout(self._operation_timeout_s):
                while True:
                    await self._session.wait_connected()
                    try:
                        return await attempt()
                    except ConnectionLostError as error:
                        _logger.debug("%s is tried again: %s", doing, error)
        except TimeoutError:
            raise CoordinationTimeoutError(
                f"{doing} was not answered within {self._operation_timeout_s} s: "
                "check that ZooKeeper is running and can be reached"
            ) from None

    # Brokers

    async def register_router(self, record: RouterRecord) -> Registration[RouterRecord]:
        """Enter a routing broker, until the registration is closed; raises DuplicateBrokerError."""
        registration = Registration(self._session, self._settings, paths.router_path(record.id), record)
        await self._within(f"registering router {record.id}", registration.start())
        self._registrations.append(registration)
        return registration

    async def register_edge(self, record: EdgeRecord) -> Registration[EdgeRecord]:
        """Enter an edge broker, until the registration is closed; raises DuplicateBrokerError."""
        registration = Registration(self._session, self._settings, paths.edge_path(record.id), record)
        await self._within(f"registering edge {record.id}", registration.start())
        self._registrations.append(registration)
        return registration

    def join_election(
        self, router_id: str, policy: LoadPolicy, on_change: LeaderChange | None = None
    ) -> Candidacy:
        """Stand for leader, and do the leader's work while elected. Register the router before."""

        async def lead(mandate: Mandate) -> None:
            await Leader(self._session, self._settings, policy, mandate, self._leader_counters).run()

        candidacy = Candidacy(self._session, router_id, lead, on_change, self._host)
        self._candidacies.append(candidacy)
        return candidacy

    # Topics

    async def declare_topic(
        self, name: str, qos: TopicQos | None = None, *, must_match: bool = True
    ) -> TopicRecord:
        """The topic's record; makes the topic if it is new.

        Without `qos`, or without `must_match`, any existing topic will do. Raises TopicExistsError
        if it needs something else.
        """
        return await self._insist(f"declaring topic {name!r}", lambda: self._declare(name, qos, must_match))

    async def _declare(self, name: str, qos: TopicQos | None, must_match: bool) -> TopicRecord:
        path = paths.topic_path(name)
        while True:
            try:
                data, _ = await self._session.get(path)
            except NoNodeError:
                record = await self._make_topic(path, name, qos or TopicQos())
                if record is None:
                    continue
                return record
            record = TopicRecord.from_json(data)
            if must_match and qos is not None and (difference := explain_difference(record.qos, qos)):
                raise TopicExistsError(
                    f"topic {name!r} exists with another quality of service: {difference}. "
                    "Ask for the same or for none, change the topic, or use another one"
                )
            return record

    async def change_qos(self, name: str, decide: DecideQos) -> TopicRecord:
        """Give a topic another quality of service; raises UnknownTopicError, and what `decide` raises.

        `decide` is asked again if somebody else changed the topic meanwhile. Neither that nor an
        assignment by the leader is ever overwritten: the record is replaced only in the version
        that `decide` has seen.
        """
        return await self._insist(f"changing topic {name!r}", lambda: self._change_qos(name, decide))

    async def _change_qos(self, name: str, decide: DecideQos) -> TopicRecord:
        path = paths.topic_path(name)
        while True:
            try:
                data, stat = await self._session.get(path)
                names = await self._session.children(path)
                record = TopicRecord.from_json(data)
                endpoints = parse_endpoints(names, self._settings.counters, {}).values()
                qos = decide(record.qos, requests_of(endpoints))
                if qos == record.qos:
                    return record
                changed = replace(record, qos=qos)
                await self._session.set(path, changed.to_json(), stat.version)
            except NoNodeError:
                raise _unknown(name) from None
            except BadVersionError:
                continue
            return changed

    async def _make_topic(self, path: str, name: str, qos: TopicQos) -> TopicRecord | None:
        """Create a topic under a new id; None if somebody else has been faster."""
        # Every write raises the version of a znode by one, so the version is a counter that never goes back.
        topic_id = (await self._session.set(paths.IDS, b"")).version
        if topic_id > TOPIC_ID_MAX:
            raise CoordinationError(f"topic ids are used up: the next would be {topic_id}. Use a new chroot")
        record = TopicRecord(topic_id, name, qos, None, None, 0)
        try:
            await self._session.create(path, record.to_json())
        except NodeExistsError:
            return None
        return record

    async def topic(self, name: str) -> TopicRecord:
        """The record of a topic; raises UnknownTopicError."""

        async def read() -> TopicRecord:
            try:
                data, _ = await self._session.get(paths.topic_path(name))
            except NoNodeError:
                raise _unknown(name) from None
            return TopicRecord.from_json(data)

        return await self._insist(f"reading topic {name!r}", read)

    async def topics(self) -> dict[str, TopicRecord]:
        """All topics by name. Records that make no sense are left out and logged."""
        nodes = await self._insist("listing topics", lambda: self._session.children(paths.TOPICS))
        names = sorted(paths.unquote_topics(nodes))
        found = await asyncio.gather(*(self.topic(name) for name in names), return_exceptions=True)
        records: dict[str, TopicRecord] = {}
        for name, record in zip(names, found, strict=True):
            if isinstance(record, TopicRecord):
                records[name] = record
            elif isinstance(record, UnknownTopicError | RecordError):
                _logger.info("topic %r is left out: %s", name, record)
            else:
                raise record
        return records

    async def delete_topic(self, name: str) -> None:
        """Delete a topic; raises TopicInUseError while it has endpoints, UnknownTopicError without one."""
        await self._insist(f"deleting topic {name!r}", lambda: self._delete_topic(name))

    async def _delete_topic(self, name: str) -> None:
        path = paths.topic_path(name)
        try:
            _, stat = await self._session.get(path)
            await self._session.delete(path, stat.version)
        except NoNodeError:
            raise _unknown(name) from None
        except NotEmptyError:
            count = len(await self._session.children(path))
            raise TopicInUseError(
                f"topic {name!r} still has {count} endpoints: stop its publishers and subscribers first"
            ) from None

    # Endpoints

    async def add_endpoint(self, topic_name: str, endpoint: Endpoint, data: Mapping[str, Any]) -> None:
        """Make an endpoint known and keep it so until it is removed; raises UnknownTopicError.

        If ZooKeeper does not answer in time this raises CoordinationTimeoutError, and the endpoint
        is still made known as soon as it does, unless it is removed.
        """
        content = json.dumps(data, ensure_ascii=False).encode()
        path = f"{paths.topic_path(topic_name)}/{endpoint.name}"
        try:
            await self._within(f"adding {path}", self._keeper.keep(path, content))
        except NoNodeError:
            raise _unknown(topic_name) from None

    async def remove_endpoint(self, topic_name: str, endpoint: Endpoint) -> None:
        """Take an endpoint away; it is no error if there is none."""
        path = f"{paths.topic_path(topic_name)}/{endpoint.name}"
        await self._within(f"removing {path}", self._keeper.drop(path))

    async def _within(self, doing: str, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._operation_timeout_s):
                await work
        except TimeoutError:
            raise CoordinationTimeoutError(
                f"{doing} was not answered within {self._operation_timeout_s} s: "
                "check that ZooKeeper is running and can be reached"
            ) from None

    async def endpoints(self, name: str) -> tuple[Endpoint, ...]:
        """The endpoints of a topic, in order of their names; raises UnknownTopicError."""

        async def read() -> tuple[Endpoint, ...]:
            try:
                names = await self._session.children(paths.topic_path(name))
            except NoNodeError:
                raise _unknown(name) from None
            return tuple(parse_endpoints(sorted(names), self._settings.counters, {}).values())

        return await self._insist(f"listing endpoints of topic {name!r}", read)

    # Flags

    async def raise_flag(self, flag: FlagRecord) -> None:
        """Flag a topic until the flag is lowered, or this session is over."""
        path = paths.flag_path(flag.router, flag.topic)
        await self._within(f"flagging topic {flag.topic!r}", self._keeper.keep(path, flag.to_json()))

    async def lower_flag(self, router: str, topic: str) -> None:
        """Take a flag back; it is no error if there is none."""
        path = paths.flag_path(router, topic)
        await self._within(f"lowering the flag of topic {topic!r}", self._keeper.drop(path))

    async def flags(self) -> dict[str, FlagRecord]:
        """The flagged topics by name."""
        names = await self._insist("listing flags", lambda: self._session.children(paths.FLAGS))

        async def read(name: str) -> FlagRecord | None:
            try:
                data, _ = await self._session.get(f"{paths.FLAGS}/{name}")
                return FlagRecord.from_json(data)
            except NoNodeError:
                return None  # lowered meanwhile
            except RecordError as error:
                _logger.info("flag %r is left out: %s", name, error)
                return None

        found = await self._insist(
            "reading flags", lambda: asyncio.gather(*(read(name) for name in sorted(names)))
        )
        return {flag.topic: flag for flag in found if flag is not None}

    # Watches

    def watch_topic(self, name: str, callback: Callable[[TopicView], None]) -> Watch:
        """Call back with the topic once it exists, and on every change of its record or endpoints."""
        return self._watch(TopicMirror(self._session, self._settings, name, callback))

    def watch_routers(self, callback: Callable[[dict[str, RouterRecord]], None]) -> Watch:
        """Call back with the live routing brokers, and on every change."""
        return self._watch(
            FolderMirror(self._session, self._settings, paths.ROUTERS, RouterRecord.from_json, callback)
        )

    def watch_edges(self, callback: Callable[[dict[str, EdgeRecord]], None]) -> Watch:
        """Call back with the live edge brokers, and on every change."""
        return self._watch(
            FolderMirror(self._session, self._settings, paths.EDGES, EdgeRecord.from_json, callback)
        )

    def watch_edge_names(self, callback: Callable[[frozenset[str]], None]) -> Watch:
        """Call back with the names of the live edge brokers, and on every change.

        One watch, where `watch_edges` needs one for each edge broker.
        """
        return self._watch(NamesMirror(self._session, self._settings, paths.EDGES, callback))

    def watch_assignments(self, router_id: str, callback: Callable[[frozenset[str], int], None]) -> Watch:
        """Call back with the names of the topics that `router_id` serves, as primary or backup.

        And with the version of this list, for `confirm_assignments`.
        """

        def deliver(view: tuple[frozenset[str], int]) -> None:
            nodes, version = view
            callback(frozenset(paths.unquote_topics(nodes)), version)

        path = paths.folder_path(router_id)
        return self._watch(CountedNamesMirror(self._session, self._settings, path, deliver))

    async def confirm_assignments(self, router_id: str, version: int) -> None:
        """Tell the leader that `router_id` can serve the topics it was given up to `version`."""
        path, data = paths.folder_path(router_id), str(version).encode()
        await self._insist("confirming assignments", lambda: self._session.set(path, data))

    def watch_leader(self, callback: Callable[[str | None, int], None]) -> Watch:
        """Call back with the leader, None while there is none, and the epoch."""
        return self._watch(LeaderMirror(self._session, self._settings, callback))

    def _watch(self, mirror: Mirror[Any]) -> Watch:
        # Looking at all of them each time would take long for a broker that mirrors thousands of topics.
        if len(self._mirrors) > 2 * self._mirrors_swept:
            self._mirrors = [known for known in self._mirrors if not known.cancelled]
            self._mirrors_swept = max(len(self._mirrors), 64)
        self._mirrors.append(mirror)
        return mirror


def _unknown(name: str) -> UnknownTopicError:
    return UnknownTopicError(f"topic {name!r} does not exist: declare it first")
