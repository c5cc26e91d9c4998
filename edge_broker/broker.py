"""The edge broker as a process: clients, ZooKeeper, sockets and timers around `edge_broker.core`.

Toward its LAN it accepts clients and the other edges of the same LAN, and announces itself by
multicast. Toward the WAN it only dials: routing brokers never need to reach into a LAN. For each
topic with endpoints here it mirrors the topic's znode and keeps a link to the topic's primary
and backup, so that failover needs no handshake.

`Declarations` (edge_broker.declarations) handles what clients declare; this module does the rest.
"""

import asyncio
import logging
from bisect import bisect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client.core import Metric

from coordinator import (
    Coordinator,
    EdgeRecord,
    MakeClient,
    Partners,
    Registration,
    RouterRecord,
    Session,
    Watch,
    client_of,
)
from edge_broker.arrivals import Arrivals
from edge_broker.core import EdgeCore
from edge_broker.declarations import Declarations
from edge_broker.direct import DECIDE_S, DirectPaths
from edge_broker.model import Peer
from overlay.discovery import Announcement
from overlay.errors import CloseReason, ProtocolError
from overlay.limits import EDGES_TOLD_MAX_BYTES, FRAME_TARGET_BYTES, MIB, OUTBOX_SOFT_BYTES, SECOND_NS
from overlay.locator import Locator
from overlay.messages import (
    ControlMessage,
    Declare,
    Draining,
    Hello,
    Measured,
    Resume,
    Role,
    Undeclare,
    Welcome,
)
from overlay.outbox import Outbox
from overlay.paths import Policy
from overlay.quality import DelayHistogram
from runtime.access import Access
from runtime.config import EdgeConfig, SlowSubscriber, listen_address
from runtime.discovery import Announcer, multicast_interface
from runtime.host import Host
from runtime.hub import ChooseLocator, Dialer, Hub, Identity
from runtime.link import Link, MeasuredLink, Principal
from runtime.operations import OperationsServer, counter, counters, gauge, hub_metrics
from runtime.process import Background, every, wait_until
from runtime.tracing import open_recorder, tracer_of

log = logging.getLogger("isthmus.edge")

_ROUTER_LINGER_NS: Final = 30 * SECOND_NS
"""How long the link to a routing broker is kept after no topic here needs it."""
_BACKPRESSURE_CHECK_S: Final = 0.02
_TEXT_OVERHEAD_BYTES: Final = 3
"""What a text takes in a frame besides its bytes, at most."""
_RELEASE_S: Final = 0.002
"""How often messages that wait for a predecessor are looked at, while there are any."""
_GATHER_S: Final = 0.1
"""How long an edge that had no routing broker at all waits for the others once it has one."""
_SETTLE_S: Final = 0.005
"""How often topics are looked at whose deadline has changed, while old messages may wait."""


class EdgeBroker:
    """One edge broker."""

    def __init__(
        self, config: EdgeConfig, host: Host | None = None, zookeeper: MakeClient | None = None
    ) -> None:
        self._host = host or Host()
        self.config = config
        self.id = config.id
        self.lan = config.lan
        self.incarnation = self._host.new_incarnation()
        retain_more = config.delays if config.retain_more else None
        self._recorder = open_recorder(config.tracing, self.id, Role.EDGE, self.lan)
        self.tracer = tracer_of(self._recorder, config.clock_drift_ppm)
        self.core = EdgeCore(
            self.id,
            self.lan,
            self.incarnation,
            retain_more,
            config.delays,
            tracer=self.tracer,
            retained_most_bytes=config.retained_mb * MIB,
        )
        self.session = Session(
            config.zookeeper,
            config.chroot,
            session_timeout_s=config.session_timeout_s,
            clock=self._host.clock,
            make_client=zookeeper or client_of(config, Role.EDGE),
        )
        self.coordinator = Coordinator(self.session, host=self._host)
        self.background = Background()
        self.declarations = Declarations(self)
        self.arrivals = Arrivals(self)
        self.hub: Hub
        self.locator = ""
        self.http = ""
        self._tls = config.tls(Role.EDGE)
        tokens = Path(config.tokens) if config.tokens else None
        self.access = Access(Path(config.access), tokens) if config.access else None
        self._proxy = Locator.parse(config.proxy) if config.proxy else None
        self._operations = OperationsServer(self.status, self.missing, self._metrics)
        self._announcer: Announcer | None = None
        self._registration: Registration[EdgeRecord] | None = None
        self._watches: list[Watch] = []
        self._links: dict[str, Link] = {}
        self._dialers: dict[str, Dialer] = {}
        self._routers: Mapping[str, RouterRecord] = {}
        self.edges: Mapping[str, EdgeRecord] = {}
        """All edge brokers there are."""
        self.direct = DirectPaths(self, Policy(config.paths), config.in_time)
        self.partners = Partners()
        """The routing brokers of our topics."""
        self._unneeded_since_ns: dict[str, int] = {}
        self._paused: set[Link] = set()
        self._letting_go: asyncio.TimerHandle | None = None
        self._releasing: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._gathering: asyncio.TimerHandle | None = None
        self._turning: asyncio.Handle | None = None
        self._slow_bytes = 0
        """How much may wait for a client before it is disconnected; 0 if its oldest messages are dropped."""
        if config.slow_subscriber == SlowSubscriber.DISCONNECT:
            self._slow_bytes = config.subscriber_pending_bytes - FRAME_TARGET_BYTES
        self._draining = False

    # Life

    async def start(self) -> None:
        """Connect to ZooKeeper, listen, register, announce."""
        config = self.config
        await self.session.start()
        await self.coordinator.start()
        self.hub = Hub(
            Identity(
                Role.EDGE,
                self.id,
                self.incarnation,
                self.lan,
                self.coordinator.cluster,
                self.config.clock_drift_ppm,
            ),
            self,
            pace=config.pace,
            clock=self._host.clock,
            connections_per_address=config.connections_per_address,
            tls=self._tls,
            authenticate=self.access.authenticate if self.access is not None else None,
        )
        host, port = listen_address("listen", config.listen)
        bound = await self.hub.listen(host, port)
        self.locator = config.advertise or str(bound)
        self.http = await self._operations.start(*listen_address("http", config.http), self._tls)
        self._registration = await self.coordinator.register_edge(
            EdgeRecord(self.id, self.locator, self.lan, config.host, self.http)
        )
        self._watches = [
            self.coordinator.watch_routers(self._on_routers),
            self.coordinator.watch_edges(self._on_edges),
        ]
        self.background.spawn(every(1.0, self._housekeeping), "housekeeping")
        self.background.spawn(every(DECIDE_S, self.direct.decide_regularly), "choose paths")
        if self._recorder is not None:
            self.background.spawn(self._recorder.flush_regularly(), "flush traces")
        if config.discovery:
            await self._announce(host)
        log.info("edge broker serves", extra={"lan": self.lan, "locator": self.locator, "http": self.http})

    async def drain(self) -> None:
        """Send clients to other edges and serve them until they have gone, then let all that waits go out."""
        self._draining = True
        await self.hub.stop_accepting()
        if self._announcer is not None:
            self._announcer.close()
        clients = [link for link in self._links.values() if link.role is Role.CLIENT]
        others = self._other_edges()
        told = [link for link in clients if link.send(Draining(others))] if others else []
        if told:
            await wait_until(lambda: not any(link.is_up for link in told), self.config.drain_timeout_s / 2)
        for link in clients:
            if link.connection is not None:
                link.connection.close(
                    CloseReason.DRAINING, "this edge broker is shutting down: use another one"
                )
        brokers = self.broker_links()
        await wait_until(
            lambda: all(link.outbox.is_idle for link in brokers if link.is_up), self.config.drain_timeout_s
        )

    async def close(self) -> None:
        """End everything; what others hold of us in ZooKeeper goes too."""
        if self._announcer is not None:
            self._announcer.close()
        for waiting in (self._releasing, self._settling, self._turning, self._gathering, self._letting_go):
            if waiting is not None:
                waiting.cancel()
        await self.background.close()
        self.declarations.close()
        for watch in self._watches:
            watch.cancel()
        if self._registration is not None:
            await self._registration.close()
        if hasattr(self, "hub"):
            await self.hub.close(CloseReason.DRAINING, "this edge broker is shutting down: use another one")
        await self._operations.close()
        await self.coordinator.close()
        await self.session.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    async def _announce(self, host: str) -> None:
        announcement = Announcement(self.id, self.lan, self.locator, self.coordinator.cluster)
        try:
            self._announcer = await Announcer.start(
                announcement,
                interface=multicast_interface(host),
                group=self.config.discovery_group,
                port=self.config.discovery_port,
            )
        except OSError as error:
            log.warning(
                "no multicast here: clients must be given this edge's address",
                extra={"error": str(error), "locator": self.locator},
            )

    # Connections

    def admit(self, hello: Hello) -> tuple[Link, Welcome]:
        """A client or another edge of the LAN connects."""
        if hello.role is Role.CLIENT:
            link = self._client_link(hello)
        elif hello.role is Role.EDGE and hello.lan:
            link = self.broker_link(hello.node, Role.EDGE, hello.lan)
        else:
            raise ProtocolError(
                CloseReason.UNEXPECTED_FRAME,
                f"a {hello.role} of LAN {hello.lan or 'none'} connects to an edge of LAN {self.lan}",
            )
        return link, Welcome(
            Role.EDGE,
            self.id,
            self.incarnation,
            self.lan,
            self.coordinator.cluster,
            edges=self._other_edges(),
        )

    def on_welcome(self, link: Link, welcome: Welcome) -> None:
        """A routing broker or LAN edge we dialled answers."""
        if (welcome.role, welcome.node) != (link.role, link.peer):
            raise ProtocolError(
                CloseReason.BAD_MESSAGE,
                f"expected {link.role} {link.peer} at this address, found {welcome.role} {welcome.node}",
            )
        if link.role is Role.ROUTER and link.peer_incarnation not in (0, welcome.incarnation):
            self.core.router_restarted(link.peer)
            self.background.spawn(self._trust(link, welcome.incarnation), f"trust {link.peer}")

    async def _trust(self, link: Link, incarnation: int) -> None:
        """Turn to a routing broker that was restarted once we have heard which topics it has lost."""
        await self.coordinator.catch_up()
        if link.peer_incarnation == incarnation:
            self.core.router_trusted(link.peer, self.hub.clock())
            self._turn_topics()

    def on_link_up(self, link: Link) -> None:
        """Choose targets anew if a routing broker came up."""
        if link.role is Role.ROUTER:
            log.info("routing broker connected", extra={"router": link.peer})
            self._gather_routers(link)
        elif link.role is Role.CLIENT:
            self.declarations.client_is_back(link)
        elif link.lan != self.lan:
            self.direct.link_up(link)
        self.arrivals.tell()

    def on_link_down(self, link: Link, reason: CloseReason, detail: str) -> None:
        """Redirect at once if a routing broker is gone; give a client time to come back."""
        self._paused.discard(link)
        if link.role is Role.ROUTER:
            log.info(
                "routing broker disconnected",
                extra={"router": link.peer, "reason": str(reason), "detail": detail},
            )
            self.core.router_down(link.peer, self.hub.clock())
            self._turn_topics()
        elif link.role is Role.CLIENT and reason is not CloseReason.REPLACED:
            for_good = reason in {CloseReason.GOODBYE, CloseReason.REVOKED, CloseReason.TOO_SLOW}
            self.declarations.client_is_away(link, for_good=for_good)
        elif link.role is Role.EDGE and link.lan != self.lan:
            self.direct.link_down(link, f"{reason}: {detail}")

    def on_data(self, link: Link, body: bytes, now_ns: int) -> None:
        """Messages from a client or a broker."""
        if link.role is Role.CLIENT:
            count, touched = self.core.admit_from_client(
                link.context, body, link.clock.shift_at(now_ns), now_ns, link.worse_drift_ppm
            )
            link.messages_received += count
            self._hold_back(link, touched)
            self.direct.watch_reserves()
        else:
            router, edge = (link.peer, "") if link.role is Role.ROUTER else ("", link.peer)
            shift_ns = link.clock.shift_at(now_ns)
            count, touched = self.core.admit_from_broker(body, shift_ns, now_ns, router, edge)
            link.messages_received += count
            if self.core.has_held and self._releasing is None:
                self._releasing = self.hub.loop.call_later(_RELEASE_S, self._release_held)
        self.flush(touched)

    def _release_held(self) -> None:
        self._releasing = None
        self.flush(self.core.release_held(self.hub.clock()))
        if self.core.has_held:
            self._releasing = self.hub.loop.call_later(_RELEASE_S, self._release_held)

    def settle_soon(self) -> None:
        """The deadline of a topic has changed: let it count as soon as no older message waits."""
        if self._settling is None:
            self._settling = self.hub.loop.call_later(_SETTLE_S, self._settle)

    def _settle(self) -> None:
        self._settling = None
        if self.core.settle():
            self.settle_soon()

    def measured_router(self, name: str | None) -> MeasuredLink | None:
        """How far away a routing broker is; None while that is not known."""
        link = self._links.get(f"{Role.ROUTER}:{name}")
        return link.measured if link is not None else None

    def on_control(self, link: Link, message: ControlMessage) -> None:
        """A client declares or undeclares an endpoint."""
        if link.role is Role.CLIENT and isinstance(message, Declare):
            self.declarations.declare(link, message)
        elif link.role is Role.CLIENT and isinstance(message, Undeclare):
            self.declarations.undeclare(link, message.endpoint)
        elif link.role is not Role.CLIENT and isinstance(message, Resume):
            self.declarations.resume_elsewhere(link, message)
        elif link.role is Role.EDGE and isinstance(message, Measured):
            self.direct.on_measured(link, message)
        else:
            raise ProtocolError(CloseReason.UNEXPECTED_FRAME, f"{type(message).__name__} from a {link.role}")

    def forget_client(self, link: Link) -> None:
        """The client's last endpoint is gone and so is the client."""
        if self._links.pop(link.key, None) is not None:
            self.core.remove_client(link.context, self.hub.clock())

    def _apply_rules(self) -> None:
        """Other rules are in force: they count for clients and endpoints that are here already."""
        assert self.access is not None
        for link in [link for link in self._links.values() if link.role is Role.CLIENT]:
            principal = link.principal or Principal()
            if self.access.counts(principal):
                self.declarations.apply_rules(link)
                continue
            log.info("client revoked", extra={"client": link.peer, "principal": principal.name})
            self.declarations.revoke(link)
            if link.connection is not None:
                link.connection.close(CloseReason.REVOKED, f"the token {principal.token} has been revoked")
            else:
                self.declarations.client_is_away(link, for_good=True)

    def tell_client(self, client: Peer | None, message: ControlMessage) -> None:
        """Send a control message to a client, if it is there."""
        link = self._links.get(client.name) if client is not None else None
        if link is not None:
            link.send(message)

    def flush(self, peers: Iterable[Peer]) -> None:
        """Write what these peers got in this loop turn."""
        for peer in peers:
            link = self._links.get(peer.name)
            if link is not None:
                link.flush_soon()
                if (
                    self._slow_bytes
                    and link.role is Role.CLIENT
                    and peer.outbox.load_bytes > self._slow_bytes
                ):
                    self._end_slow(link)

    def _end_slow(self, link: Link) -> None:
        """A client takes its messages too slowly, and this edge is configured not to put up with that."""
        if link.connection is not None:
            log.info("client too slow", extra={"client": link.peer})
            link.connection.close(
                CloseReason.TOO_SLOW,
                f"{self._slow_bytes} bytes wait for this client, no more are allowed: read faster",
            )

    def _turn_topics(self) -> None:
        """Turn some topics to another routing broker in each loop turn, until all have turned."""
        if self._turning is not None:
            self._turning.cancel()
            self._turning = None
        for peer in self.core.turn_some(self.hub.clock()):
            link = self._links.get(peer.name)
            if link is not None:
                link.flush_now()
        if self.core.is_turning:
            self._turning = self.hub.loop.call_soon(self._turn_topics)

    def _gather_routers(self, link: Link) -> None:
        """A routing broker is connected: turn to it, or wait for others if there was none before.

        A backup that is turned to takes the primary for dead and dispatches what it holds for it, ahead
        of what the primary still has to send. When a LAN is joined to the cloud again, primaries and
        backups come back within moments of each other, and in any order.
        """
        routers = [other for other in self._links.values() if other.role is Role.ROUTER]
        complete = all(other.is_up for other in routers if other.peer in self._routers)
        if self._gathering is None and (self.core.routers_up or complete):
            self.core.router_up(link.peer, link.outbox, self.hub.clock())
            self._turn_topics()
        elif self._gathering is None:
            self._gathering = self.hub.loop.call_later(_GATHER_S, self._routers_gathered)
        elif complete:
            self._gathering.cancel()
            self._routers_gathered()

    def _routers_gathered(self) -> None:
        self._gathering = None
        for link in self._links.values():
            if link.role is Role.ROUTER and link.is_up and link.peer not in self.core.routers_up:
                self.core.router_up(link.peer, link.outbox, self.hub.clock())
        self._turn_topics()

    def _client_link(self, hello: Hello) -> Link:
        link = Link(hello.node, Role.CLIENT, self.lan, Outbox(self.config.subscriber_pending_bytes))
        known = self._links.get(link.key)
        if known is not None:
            return known
        link.context = self.core.client(link.key, link.outbox)
        self._links[link.key] = link
        return link

    def broker_link(self, name: str, role: Role, lan: str = "") -> Link:
        """The link to another broker, made if there is none."""
        link = Link(name, role, lan)
        link.delays = DelayHistogram()
        known = self._links.setdefault(link.key, link)
        known.lan = lan
        return known

    def find_link(self, name: str, role: Role) -> Link | None:
        """The link to another broker, if there is one."""
        return self._links.get(f"{role}:{name}")

    def broker_links(self) -> list[Link]:
        """All links to other brokers."""
        return [link for link in self._links.values() if link.role is not Role.CLIENT]

    def _hold_back(self, link: Link, touched: Iterable[Peer]) -> None:
        """A publisher faster than its routing broker waits; nobody else does."""
        if link not in self._paused and any(
            peer.outbox.load_bytes > OUTBOX_SOFT_BYTES and peer.name.startswith(Role.ROUTER)
            for peer in touched
        ):
            if self._letting_go is None:
                self._letting_go = self.hub.loop.call_later(_BACKPRESSURE_CHECK_S, self._let_go)
            self._paused.add(link)
            if link.connection is not None:
                link.connection.pause_reading()

    def _let_go(self) -> None:
        routers = [link for link in self._links.values() if link.role is Role.ROUTER and link.is_up]
        if any(link.outbox.load_bytes > OUTBOX_SOFT_BYTES // 2 for link in routers):
            self._letting_go = self.hub.loop.call_later(_BACKPRESSURE_CHECK_S, self._let_go)
            return
        self._letting_go = None
        paused, self._paused = self._paused, set()
        for link in paused:
            if link.connection is not None:
                link.connection.resume_reading()

    # Coordination

    def _on_routers(self, routers: Mapping[str, RouterRecord]) -> None:
        appeared = routers.keys() - self._routers.keys()
        self._routers = routers
        self.dial_routers(self.partners.names)
        for name in sorted(appeared):
            if (dialer := self._dialers.get(f"{Role.ROUTER}:{name}")) is not None:
                dialer.hurry()

    def _on_edges(self, edges: Mapping[str, EdgeRecord]) -> None:
        """Link up with the other edges of this LAN; the one with the lower name dials."""
        self.edges = edges
        neighbours = {edge.id: edge for edge in edges.values() if self._is_neighbour(edge)}
        for name, record in neighbours.items():
            link = self.broker_link(name, Role.EDGE, self.lan)
            if self.id < name:
                self._dial(link, record.locator, proxy=None)
        outboxes = {name: self.broker_link(name, Role.EDGE, self.lan).outbox for name in neighbours}
        self.core.set_lan_edges(outboxes)

    def _other_edges(self) -> tuple[str, ...]:
        """Where else in the LAN a client can go, as far as a frame should tell.

        Each edge tells of those that follow it, so that all clients together know all of them.
        """
        neighbours = sorted(edge.id for edge in self.edges.values() if self._is_neighbour(edge))
        following = bisect(neighbours, self.id)
        told: list[str] = []
        room = EDGES_TOLD_MAX_BYTES
        for name in (*neighbours[following:], *neighbours[:following]):
            locator = self.edges[name].locator
            room -= len(locator.encode()) + _TEXT_OVERHEAD_BYTES
            if room < 0:
                break
            told.append(locator)
        return tuple(told)

    def _is_neighbour(self, edge: EdgeRecord) -> bool:
        return edge.lan == self.lan and edge.id != self.id

    def dial_routers(self, names: Iterable[str | None]) -> None:
        """Keep links to these routing brokers, those that are alive."""
        for name in sorted(name for name in names if name is not None):
            record = self._routers.get(name)
            if record is not None:
                self._dial(self.broker_link(record.id, Role.ROUTER), record.locator, self._proxy)

    def dial_direct(self, link: Link, locate: ChooseLocator, back_off_most_s: float) -> None:
        """Keep a link to an edge of another LAN, if it can be opened."""
        if link.key not in self._dialers:
            self._dialers[link.key] = self.hub.dial(link, locate, self._proxy, back_off_most_s)

    def _dial(self, link: Link, locator: str, proxy: Locator | None) -> None:
        address = Locator.parse(locator)
        dialer = self._dialers.get(link.key)
        if dialer is None:
            self._dialers[link.key] = self.hub.dial(link, address, proxy)
        else:
            dialer.locator = address

    async def _housekeeping(self) -> None:
        now_ns = self.hub.clock()
        if self.access is not None and self.access.refresh():
            self._apply_rules()
        for _ in self.declarations.expire_interest():
            await asyncio.sleep(0)
        for forgotten in self.core.expire_in_steps(now_ns):
            for topic in forgotten:
                self.declarations.forget_topic(topic)
            await asyncio.sleep(0)
        wanted = {f"{Role.ROUTER}:{name}" for name in self.partners.names}
        wanted |= {f"{Role.EDGE}:{edge.id}" for edge in self.edges.values() if edge.lan == self.lan}
        wanted |= {f"{Role.EDGE}:{edge}" for edge in self.direct.needed}
        for key in list(self._dialers):
            if key in wanted:
                self._unneeded_since_ns.pop(key, None)
            elif now_ns - self._unneeded_since_ns.setdefault(key, now_ns) > _ROUTER_LINGER_NS:
                self._unneeded_since_ns.pop(key, None)
                await self._dialers.pop(key).stop()
                self._links.pop(key, None)

    # Operation

    def missing(self) -> str:
        """What keeps this broker from being ready; empty if nothing."""
        if self._draining:
            return "draining"
        if self._registration is None:
            return "not registered in ZooKeeper"
        down = [
            topic.name
            for topic in self.core.topics.values()
            if topic.interested_remotely and not topic.target
        ]
        return f"no routing broker for {', '.join(sorted(down)[:5])}" if down else ""

    def status(self) -> Mapping[str, Any]:
        """Everything an operator wants to know."""
        return {
            "role": "edge",
            "id": self.id,
            "lan": self.lan,
            "locator": self.locator,
            "http": self.http,
            "cluster": self.coordinator.cluster,
            "draining": self._draining,
            "ready": not self.missing(),
            "core": self.core.statistics(),
            "paths": self.direct.statistics(),
            "session": self.session.statistics(),
            "access": self.access.statistics() if self.access is not None else None,
            "tracing": self._recorder.statistics() if self._recorder is not None else None,
            "links": [link.statistics() for link in self.broker_links()],
            "clients": [link.statistics() for link in self._links.values() if link.role is Role.CLIENT],
        }

    def _metrics(self) -> Iterable[Metric]:
        statistics = self.core.statistics()
        yield gauge("isthmus_clients", "Clients known.", statistics.clients)
        yield counter("isthmus_messages_accepted", "Messages from clients.", statistics.messages_accepted)
        yield counter("isthmus_messages_delivered", "Messages delivered here.", statistics.messages_delivered)
        yield counter("isthmus_messages_resent", "Messages sent again.", statistics.messages_resent)
        if self.access is not None:
            denied = self.access.statistics().denied
            yield counters("isthmus_access_denied", "What clients were not let do.", "action", denied)
        yield counters("isthmus_messages_dropped", "Messages dropped.", "reason", statistics.dropped)
        yield counters(
            "isthmus_topic_messages",
            "Messages from local publishers of a topic.",
            "topic",
            {topic.topic: topic.messages for topic in statistics.topics},
        )
        yield counters(
            "isthmus_topic_delivered",
            "Messages of a topic delivered here.",
            "topic",
            {topic.topic: topic.delivered for topic in statistics.topics},
        )
        yield counter(
            "isthmus_messages_from_reserve",
            "Messages sent on a second path for want of an acknowledgement in time.",
            statistics.messages_from_reserve,
        )
        yield gauge("isthmus_retained_bytes", "Memory for messages kept.", statistics.retained_bytes)
        yield counters("isthmus_path_bytes", "Bytes sent by path.", "path", self.direct.statistics()["bytes"])
        yield from hub_metrics(self.hub, [link.statistics() for link in self.broker_links()])
