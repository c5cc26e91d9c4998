"""The routing broker as a process: ZooKeeper, sockets and timers around `routing_broker.core`.

It registers itself, takes part in the election of the leader, and serves the topics that its
folder under /assignments names. For each of those it mirrors the topic's znode: record and
endpoints give the routes. A topic that is taken away is served a while longer, because edges
learn of the change at their own pace.

Routing brokers that share a topic, one as primary, the other as backup, keep a link between
them; the one with the lower name dials. Copies and prunes go from primary to backup, in both
directions if each is the other's backup for some topics. When the link breaks, the backup takes
the primary for dead and dispatches what it holds for it. If the primary lives after all, edges
drop what comes twice and hold back what comes too early, as long as its deadline allows.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client.core import Metric

from coordinator import (
    Candidacy,
    CoordinationError,
    Coordinator,
    EndpointKind,
    FlagRecord,
    MakeClient,
    Partners,
    Registration,
    RouterRecord,
    Session,
    TopicView,
    Watch,
    client_of,
    policy_by_name,
)
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import ROUTE_LINGER_NS, SECOND_NS
from overlay.lingering import Lingering
from overlay.locator import Locator
from overlay.messages import ControlMessage, Hello, Prune, Resume, Role, Welcome
from overlay.outbox import Ticket
from overlay.qos import SubscriptionQos, strictest
from overlay.resume import check_sender, read_resume
from routing_broker.admission import AdmissionWatch, FlagChange, Interest, Network
from routing_broker.core import RouterCore
from routing_broker.mode import Mode
from routing_broker.model import Peer
from routing_broker.proven import ProvenDelays
from routing_broker.sources import Sources
from runtime.config import RouterConfig, listen_address
from runtime.host import Host
from runtime.hub import BACK_OFF_MOST_S, Dialer, Hub, Identity
from runtime.link import Link
from runtime.operations import OperationsServer, counter, counters, gauge, gauges, hub_metrics
from runtime.process import Background, every, wait_until
from runtime.tracing import open_recorder, tracer_of

log = logging.getLogger("isthmus.router")

TOPIC_LINGER_S: Final = 30.0
"""How long a topic is still served after it was assigned to others."""
_TOPICS_AT_A_TIME: Final = 200
"""Topics that are looked after before messages are."""
_EDGE_LINGER_NS: Final = 10 * SECOND_NS
"""How long messages wait for an edge that is neither registered nor connected."""
_LEARNING_S: Final = 2.0
"""A starting broker waits for news of its topics as long as they do not fail to come for this long."""
_STARTING_READS_PER_S: Final = 2_000.0
"""Pace of reading while there are no messages that could wait for it."""
_GATHERING_S: Final = 1.6 * BACK_OFF_MOST_S
"""How long a starting broker waits for edges to dial it: a little longer than they pause in between."""
_LOAD_REPORT_S: Final = 5.0
_CONFIRM_S: Final = 0.5
"""How often the leader is told which assignments have been read, if they have changed."""
_PRUNE_S: Final = 0.005
"""How long prunes are collected before they are sent."""
_SETTLE_S: Final = 0.005
"""How often topics are looked at whose deadline has changed, while old messages may wait."""


class RoutingBroker:
    """One routing broker."""

    def __init__(
        self, config: RouterConfig, host: Host | None = None, zookeeper: MakeClient | None = None
    ) -> None:
        self._host = host or Host()
        self.config = config
        self.id = config.id
        self._recorder = open_recorder(config.tracing, self.id, Role.ROUTER)
        self.tracer = tracer_of(self._recorder, config.clock_drift_ppm)
        self.core = RouterCore(Mode(config.mode), config.delays, self.tracer)
        self.session = Session(
            config.zookeeper,
            config.chroot,
            session_timeout_s=config.session_timeout_s,
            clock=self._host.clock,
            make_client=zookeeper or client_of(config, Role.ROUTER),
        )
        self.coordinator = Coordinator(self.session, host=self._host)
        self._tls = config.tls(Role.ROUTER)
        self.hub: Hub
        self.locator = ""
        self.http = ""
        self._proxy = Locator.parse(config.proxy) if config.proxy else None
        self._operations = OperationsServer(self.status, self.missing, self._metrics)
        self._background = Background()
        self._links: dict[str, Link] = {}
        self._registration: Registration[RouterRecord] | None = None
        self._candidacy: Candidacy | None = None
        self._watches: list[Watch] = []
        self._topic_watches: dict[str, Watch] = {}
        self._topic_ids: dict[str, int] = {}
        self._views: dict[str, TopicView] = {}
        self._subscribers: dict[str, Lingering[tuple[str, str, SubscriptionQos]]] = {}
        """Edge and LAN of the subscribers of each topic, and what they ask for."""
        self._sources = Sources()
        self._admission = AdmissionWatch(config.delays)
        self._proven = ProvenDelays()
        self._assigned: frozenset[str] = frozenset()
        self._assignments_version: int | None = None
        """Of what `_assigned` was read from; None before that."""
        self._confirmed_version = 0
        self._partners = Partners(self.id)
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._edges: frozenset[str] = frozenset()
        self._edges_read = False
        self._awaited: set[str] = set()
        """Edges that have not come yet since this broker started, and for which the others wait."""
        self._gathering: asyncio.TimerHandle | None = None
        self._routers: Mapping[str, RouterRecord] = {}
        self._unseen_since_ns: dict[str, int] = {}
        self._dialers: dict[str, Dialer] = {}
        self._pruning: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._draining = False

    # Life

    async def start(self) -> None:
        """Connect to ZooKeeper, learn our topics, listen, register, take part in the election."""
        config = self.config
        await self.session.start()
        await self.coordinator.start()
        self.hub = Hub(
            Identity(
                Role.ROUTER,
                self.id,
                self._host.new_incarnation(),
                cluster=self.coordinator.cluster,
                drift_ppm=self.config.clock_drift_ppm,
            ),
            self,
            pace=config.pace,
            clock=self._host.clock,
            connections_per_address=config.connections_per_address,
            tls=self._tls,
        )
        self._watches = [
            self.coordinator.watch_edge_names(self._on_edges),
            self.coordinator.watch_routers(self._on_routers),
            self.coordinator.watch_assignments(self.id, self._on_assignments),
        ]
        await self._learn_topics()
        self._await_edges()
        bound = await self.hub.listen(*listen_address("listen", config.listen))
        self.locator = config.advertise or str(bound)
        self.http = await self._operations.start(*listen_address("http", config.http), self._tls)
        self._registration = await self.coordinator.register_router(
            RouterRecord(
                id=self.id,
                locator=self.locator,
                host=config.host,
                capacity=config.capacity,
                http=self.http,
                delays=config.delays,
            )
        )
        self._candidacy = self.coordinator.join_election(self.id, policy_by_name(config.policy))
        self._background.spawn(every(1.0, self._housekeeping), "housekeeping")
        self._background.spawn(self._report_load(), "report load")
        self._background.spawn(every(_CONFIRM_S, self._confirm_assignments), "confirm assignments")
        if self._recorder is not None:
            self._background.spawn(self._recorder.flush_regularly(), "flush traces")
        log.info("routing broker serves", extra={"locator": self.locator, "http": self.http})

    async def _learn_topics(self) -> None:
        """Read who subscribes to the topics that were ours before a restart.

        Edges turn to their primary as soon as it listens. Until then the backup serves them; afterwards
        they would have to wait for us to read. A topic that cannot be read holds us up only for a while.
        """
        self.coordinator.set_reading_pace(_STARTING_READS_PER_S)
        known = -1
        while known < len(self._views):
            known = len(self._views)
            if await wait_until(self._knows_its_topics, _LEARNING_S):
                break
        self.coordinator.set_reading_pace()

    def _knows_its_topics(self) -> bool:
        known = self._assignments_version is not None and self._edges_read
        return known and all(name in self._views for name in self._assigned)

    def _await_edges(self) -> None:
        """Let no edge send here before those that its messages are for have come, or had the time to.

        Until then the backup serves them; here they would wait for the one that dials us last.
        """
        self._awaited = self._subscribing_edges()
        if self._awaited:
            self.hub.hold_edges(self._edge_has_come)
            self._gathering = self.hub.loop.call_later(_GATHERING_S, self.hub.answer_edges)

    def _edge_has_come(self, edge: str) -> None:
        self._awaited.discard(edge)
        if not self._awaited:
            self.hub.answer_edges()

    def _subscribing_edges(self) -> set[str]:
        """Registered edges that topics of ours have subscribers at."""
        return {edge for topic in self.core.topics.values() for edge in topic.subscribers} & self._edges

    async def drain(self) -> None:
        """Let the leader move all topics away, then let the outboxes run empty.

        Waits only while there is someone to take the topics over and ZooKeeper to arrange it.
        """
        self._draining = True
        timeout_s = self.config.drain_timeout_s
        await self._tell_leader(draining=True)
        if not await wait_until(lambda: not self._assigned or not self._can_hand_over(), timeout_s):
            log.warning("still assigned after draining", extra={"topics": len(self._assigned)})
        connected = [link for link in self._links.values() if link.is_up]
        await wait_until(lambda: all(link.outbox.is_idle for link in connected if link.is_up), timeout_s / 2)

    async def close(self) -> None:
        """End everything; what others hold of us in ZooKeeper goes too."""
        for handle in self._leaving.values():
            handle.cancel()
        for timer in (self._pruning, self._settling, self._gathering):
            if timer is not None:
                timer.cancel()
        await self._background.close()
        if self._candidacy is not None:
            await self._candidacy.close()
        for watch in (*self._watches, *self._topic_watches.values()):
            watch.cancel()
        if self._registration is not None:
            await self._registration.close()
        if hasattr(self, "hub"):
            await self.hub.close(CloseReason.DRAINING, "this routing broker is shutting down")
        await self._operations.close()
        await self.coordinator.close()
        await self.session.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    # Connections

    def admit(self, hello: Hello) -> tuple[Link, Welcome]:
        """An edge broker or another routing broker connects."""
        if hello.role is Role.CLIENT:
            raise ProtocolError(
                CloseReason.UNEXPECTED_FRAME, "a client connects to a routing broker: connect to an edge"
            )
        link = (
            self._edge_link(hello.node, hello.lan)
            if hello.role is Role.EDGE
            else self._router_link(hello.node)
        )
        identity = self.hub.identity
        return link, Welcome(Role.ROUTER, self.id, identity.incarnation, cluster=identity.cluster)

    def on_welcome(self, link: Link, welcome: Welcome) -> None:
        """A routing broker we dialled answers."""
        if (welcome.role, welcome.node) != (link.role, link.peer):
            raise ProtocolError(
                CloseReason.BAD_MESSAGE,
                f"expected {link.role} {link.peer} at this address, found {welcome.role} {welcome.node}",
            )

    def on_link_up(self, link: Link) -> None:
        """A routing broker that is connected can hold copies."""
        if link.role is Role.ROUTER:
            log.info("routing broker connected", extra={"router": link.peer})
            self._flush(self.core.backup_up(link.peer, link.outbox, self.hub.clock()))

    def on_link_down(self, link: Link, reason: CloseReason, detail: str) -> None:
        """The outbox of an edge waits for it; a routing broker that is gone is stood in for."""
        log.info("disconnected", extra={"peer": link.key, "reason": str(reason), "detail": detail})
        if link.role is Role.ROUTER:
            self.core.backup_down(link.peer)
            self._flush(self.core.recover(link.peer, self.hub.clock()))

    def on_data(self, link: Link, body: bytes, now_ns: int) -> None:
        """Messages from an edge, or copies from a primary."""
        if link.role is Role.ROUTER:
            shift_ns = link.clock.shift_at(now_ns)
            link.messages_received += self.core.keep(link.peer, link.received, body, shift_ns, now_ns)
            return
        count, touched = self.core.admit(link.context, body, link.clock.shift_at(now_ns), now_ns)
        link.messages_received += count
        self._flush(touched)

    def on_control(self, link: Link, message: ControlMessage) -> None:
        """A primary has dispatched what we hold copies of; or a subscriber has come to another edge."""
        if link.role is Role.EDGE and isinstance(message, Resume):
            self._resume(link, message)
            return
        if link.role is not Role.ROUTER or not isinstance(message, Prune) or len(message.frames) % 2:
            raise ProtocolError(CloseReason.UNEXPECTED_FRAME, f"{type(message).__name__} from a {link.role}")
        ranges = zip(message.frames[::2], message.frames[1::2], strict=True)
        self.core.prune(link.peer, ranges, self.hub.clock())

    def _resume(self, link: Link, message: Resume) -> None:
        """Send to the subscriber's new edge from now on, and have sent again what it has missed.

        In this order: whatever was dispatched before is retained where it came from, if it may not be lost.
        """
        check_sender(message, link.peer, link.lan)
        _, request = read_resume(message)
        if message.topic not in self._views:
            return
        self._subscribers[message.topic].expect((message.edge, message.lan, request), self.hub.clock())
        self._set_topic(message.topic)
        for edge in sorted(self._sources.of(message.topic, self.core.peers.keys())):
            source = self._links.get(f"{Role.EDGE}:{edge}")
            if source is not None and source.lan != message.lan:
                source.send(message)

    def _edge_link(self, edge: str, lan: str) -> Link:
        peer = self.core.peer(edge, lan)
        link = self._links.get(f"{Role.EDGE}:{edge}")
        if link is None:
            link = Link(edge, Role.EDGE, lan, peer.outbox)
            link.context = peer
            link.on_acknowledged = self._on_acknowledged
            self._links[link.key] = link
        link.lan = lan
        return link

    def _router_link(self, router: str) -> Link:
        link = Link(router, Role.ROUTER)
        return self._links.setdefault(link.key, link)

    def _on_acknowledged(self, tickets: list[Ticket]) -> None:
        """An edge has what it was sent: what needed copies may need them no longer."""
        if tickets:
            self.core.acknowledged(tickets)
            if self._pruning is None:
                self._pruning = self.hub.loop.call_later(_PRUNE_S, self._prune)

    def _prune(self) -> None:
        self._pruning = None
        for router, ranges in self.core.take_prunes().items():
            link = self._links.get(f"{Role.ROUTER}:{router}")
            if link is not None:
                link.send(Prune(tuple(number for pair in ranges for number in pair)))

    def _flush(self, peers: Iterable[Peer]) -> None:
        """Write what these peers got, the most urgent first."""
        for peer in sorted(peers, key=lambda peer: peer.outbox.next_deadline_ns or 0):
            role = Role.EDGE if self.core.peers.get(peer.name) is peer else Role.ROUTER
            link = self._links.get(f"{role}:{peer.name}")
            if link is not None:
                link.flush_soon()

    # Coordination

    def _on_assignments(self, topics: frozenset[str], version: int) -> None:
        given, taken = topics - self._assigned, self._assigned - topics
        self._assigned = topics
        self._assignments_version = version
        for name in sorted(given):
            handle = self._leaving.pop(name, None)
            if handle is not None:
                handle.cancel()
            if name not in self._topic_watches:
                self._topic_watches[name] = self.coordinator.watch_topic(name, self._on_topic)
            elif (view := self._views.get(name)) is not None:
                self._partners.set_topic(name, view.record.primary, view.record.backup)
        for name in sorted(taken):
            self._partners.forget_topic(name)
            self._leaving[name] = self.hub.loop.call_later(TOPIC_LINGER_S, self._leave_topic, name)

    async def _confirm_assignments(self) -> None:
        """Tell the leader what we have read: to balance the load it makes us the primary only of that."""
        version = self._assignments_version
        if version is None or version == self._confirmed_version or not self._knows_its_topics():
            return
        try:
            if version:  # else there never was anything, and perhaps no folder
                await self.coordinator.confirm_assignments(self.id, version)
        except CoordinationError as error:
            log.warning("ZooKeeper was not told", extra={"assignments": version, "error": str(error)})
        else:
            self._confirmed_version = version

    def _leave_topic(self, name: str) -> None:
        self._leaving.pop(name, None)
        self._topic_watches.pop(name).cancel()
        self._views.pop(name, None)
        self._subscribers.pop(name, None)
        self._sources.forget_topic(name)
        self._admission.set_topic(name, None)
        topic_id = self._topic_ids.pop(name, None)
        if topic_id is not None:
            self.core.remove_topic(topic_id)

    def _on_topic(self, view: TopicView) -> None:
        name = view.record.name
        self._views[name] = view
        self._topic_ids[name] = view.record.id
        subscribers = self._subscribers.setdefault(name, Lingering(ROUTE_LINGER_NS))
        subscribers.update(
            (
                (endpoint.edge, endpoint.lan, endpoint.request)
                for endpoint in view.endpoints
                if endpoint.kind is EndpointKind.SUBSCRIBER
            ),
            self.hub.clock(),
        )
        publishers = (endpoint for endpoint in view.endpoints if endpoint.kind is EndpointKind.PUBLISHER)
        self._sources.set_topic(name, (endpoint.edge for endpoint in publishers), self.hub.clock())
        self._set_topic(name)
        if name in self._assigned:
            self._partners.set_topic(name, view.record.primary, view.record.backup)
        self._dial_partners({view.record.primary, view.record.backup} - {None, self.id})

    def _set_topic(self, name: str) -> None:
        record = self._views[name].record
        backup, primary = (record.backup, None) if record.primary == self.id else (None, record.primary)
        known = tuple(self._subscribers[name])
        subscribers = {edge: lan for edge, lan, _ in known}
        qos = strictest(record.qos, (request for _, _, request in known))
        now_ns = self.hub.clock()
        self._flush(self.core.set_topic(record.id, name, qos, subscribers, now_ns, backup, primary))
        self._settle()
        interest = None
        if record.primary == self.id:
            publishers = frozenset(
                (endpoint.edge, endpoint.lan)
                for endpoint in self._views[name].endpoints
                if endpoint.kind is EndpointKind.PUBLISHER
            )
            interest = Interest(qos, publishers, frozenset(subscribers.items()), backup)
        self._admission.set_topic(name, interest)

    def _settle(self) -> None:
        """Let changed deadlines count as soon as no older messages wait."""
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        if self.core.settle():
            self._settling = self.hub.loop.call_later(_SETTLE_S, self._settle)

    def _on_edges(self, edges: frozenset[str]) -> None:
        self._edges = edges
        self._sources.set_edges(edges, self.hub.clock())
        self._edges_read = True

    def _on_routers(self, routers: Mapping[str, RouterRecord]) -> None:
        appeared = routers.keys() - self._routers.keys()
        self._routers = routers
        self._dial_partners(self._partners.names)
        for name in sorted(appeared & self._dialers.keys()):
            self._dialers[name].hurry()

    def _dial_partners(self, partners: Iterable[str | None]) -> None:
        """Keep a link to every routing broker we share a topic with; the lower name dials."""
        for name in sorted(name for name in partners if name is not None):
            record = self._routers.get(name)
            if record is None or record.id < self.id:
                continue
            dialer = self._dialers.get(record.id)
            if dialer is None:
                link = self._router_link(record.id)
                self._dialers[record.id] = self.hub.dial(link, Locator.parse(record.locator), self._proxy)
            else:
                dialer.locator = Locator.parse(record.locator)

    async def _housekeeping(self) -> None:
        now_ns = self.hub.clock()
        self.core.expire(now_ns)
        self._judge(now_ns)
        since_ns, until_ns = self.session.answering_ns
        self._sources.expire(until_ns, since_ns)
        for number, (topic, subscribers) in enumerate(list(self._subscribers.items()), 1):
            if self._subscribers.get(topic) is subscribers and subscribers.expire(until_ns, since_ns):
                self._set_topic(topic)
            if number % _TOPICS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        for name in sorted(self._dialers.keys() - self._partners.names - self._routers.keys()):
            await self._dialers.pop(name).stop()
            self._links.pop(f"{Role.ROUTER}:{name}", None)
        self._forget_edges(now_ns)
        if self._pruning is None:
            # Not only acknowledgements let go of copies: no other may follow soon.
            self._prune()

    def _forget_edges(self, now_ns: int) -> None:
        """Give up on edges that are away and that nothing here is for any more.

        An edge that was restarted is registered again, but if none of its clients came back it has no
        reason to connect. What waited for it would wait for ever, and its copies would push those of
        others out of the backup's buffer.
        """
        away = [
            edge
            for edge in self.core.peers
            if (link := self._links.get(f"{Role.EDGE}:{edge}")) is None or not link.is_up
        ]
        for edge in self._unseen_since_ns.keys() - set(away):
            del self._unseen_since_ns[edge]
        if not away:
            return
        wanted = self._subscribing_edges()
        for edge in away:
            if edge in wanted:
                self._unseen_since_ns.pop(edge, None)
            elif now_ns - self._unseen_since_ns.setdefault(edge, now_ns) > _EDGE_LINGER_NS:
                self.core.remove_peer(edge, now_ns)
                self._links.pop(f"{Role.EDGE}:{edge}", None)
                self._unseen_since_ns.pop(edge, None)

    def _judge(self, now_ns: int) -> None:
        """Flag topics that the network no longer lets keep what was admitted."""
        measured = [(link, known) for link in self._links.values() if (known := link.measured) is not None]
        edges = {link.peer: known for link, known in measured if link.role is Role.EDGE}
        network = Network(
            to_edges_ns={name: known.one_way_ns for name, known in edges.items()},
            to_routers_ns={
                link.peer: known.one_way_ns for link, known in measured if link.role is Role.ROUTER
            },
            noticed_late_ns={name: known.noticed_late_ns for name, known in edges.items()},
        )
        if self._proven.update({name: known.least_ns for name, known in edges.items()}, now_ns):
            self.core.set_least_delays(self._proven.counted_ns)
        for change in self._admission.check(network, now_ns):
            self._background.spawn(self._flag(change), f"flag {change.topic}")

    async def _flag(self, change: FlagChange) -> None:
        try:
            if change.reason:
                log.warning("topic flagged", extra={"topic": change.topic, "reason": change.reason})
                await self.coordinator.raise_flag(FlagRecord(change.topic, self.id, change.reason))
            else:
                log.info("topic passes again", extra={"topic": change.topic})
                await self.coordinator.lower_flag(self.id, change.topic)
        except CoordinationError as error:
            log.warning("ZooKeeper was not told", extra={"topic": change.topic, "error": str(error)})

    async def _report_load(self) -> None:
        """Tell the leader the message rate, when it has changed by a tenth or more."""
        reported = 0.0
        before = 0
        while True:
            await asyncio.sleep(_LOAD_REPORT_S)
            admitted = self.core.statistics().messages_admitted
            rate = (admitted - before) / _LOAD_REPORT_S
            before = admitted
            if abs(rate - reported) > 0.1 * max(reported, 1.0):
                reported = rate
                await self._tell_leader(messages_per_s=round(rate, 1), topics=self._partners.primaries)

    async def _tell_leader(self, **changes: Any) -> None:
        """Update our entry in ZooKeeper; while it cannot be reached, the leader learns it later."""
        if self._registration is None:
            return
        try:
            async with asyncio.timeout(self.config.session_timeout_s):
                await self._registration.update(**changes)
        except (TimeoutError, CoordinationError) as error:
            log.warning("ZooKeeper was not told", extra={**changes, "error": str(error)})

    def _can_hand_over(self) -> bool:
        others = (router for router in self._routers.values() if router.id != self.id)
        return self.session.lease_valid(self.hub.clock()) and any(not router.draining for router in others)

    # Operation

    @property
    def is_leader(self) -> bool:
        """This broker leads and its lease holds."""
        return self._candidacy is not None and self._candidacy.is_leader

    def missing(self) -> str:
        """What keeps this broker from being ready; empty if nothing."""
        if self._draining:
            return "draining"
        if self._registration is None:
            return "not registered in ZooKeeper"
        if not self.session.lease_valid(self.hub.clock()):
            return "no answer from ZooKeeper"
        return ""

    def status(self) -> Mapping[str, Any]:
        """Everything an operator wants to know."""
        return {
            "role": "router",
            "id": self.id,
            "locator": self.locator,
            "http": self.http,
            "host": self.config.host,
            "cluster": self.coordinator.cluster,
            "leader": self.is_leader,
            "epoch": self._candidacy.epoch if self._candidacy is not None else 0,
            "draining": self._draining,
            "ready": not self.missing(),
            "primary_of": self._primary_topics(),
            "backup_of": sorted(
                name for name in self._assigned if self._role_of(name, primary=False) == self.id
            ),
            "routes": {topic.name: sorted(topic.subscribers) for topic in self.core.topics.values()},
            "flagged": dict(self._admission.flags),
            "core": self.core.statistics(),
            "session": self.session.statistics(),
            "tracing": self._recorder.statistics() if self._recorder is not None else None,
            "links": [link.statistics() for link in self._links.values()],
        }

    def _primary_topics(self) -> list[str]:
        return sorted(name for name in self._assigned if self._role_of(name, primary=True) == self.id)

    def _role_of(self, name: str, *, primary: bool) -> str | None:
        view = self._views.get(name)
        if view is None:
            return None
        return view.record.primary if primary else view.record.backup

    def _metrics(self) -> Iterable[Metric]:
        statistics = self.core.statistics()
        yield gauge("isthmus_leader", "1 if this broker leads.", self.is_leader)
        yield gauge("isthmus_topics", "Topics served.", statistics.topics)
        yield gauges(
            "isthmus_topic_flagged",
            "1 for a topic whose promise does not hold as the network is.",
            "topic",
            dict.fromkeys(self._admission.flags, 1),
        )
        yield counter("isthmus_messages_admitted", "Messages from edges.", statistics.messages_admitted)
        yield counter("isthmus_messages_dispatched", "Messages to edges.", statistics.messages_dispatched)
        yield counter(
            "isthmus_messages_replicated", "Copies sent to backups.", statistics.messages_replicated
        )
        yield counter(
            "isthmus_messages_recovered",
            "Copies dispatched for a dead primary.",
            statistics.messages_recovered,
        )
        yield gauge("isthmus_copies_kept", "Copies kept for other routing brokers.", statistics.copies_kept)
        yield counters("isthmus_messages_dropped", "Messages dropped.", "reason", statistics.dropped)
        yield from hub_metrics(self.hub, [link.statistics() for link in self._links.values()])
