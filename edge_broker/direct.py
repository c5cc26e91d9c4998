"""Links straight to edges of other LANs, and which messages take them (PubSubCoord, III.3.2.4).

For every topic with a deadline, a local publisher and subscribers in other LANs, unless its policy is
`single`, a link is kept to each edge of those subscribers. It is a link like any other: its address
comes from the other edge's znode, it is authenticated, has heartbeats and bounds ages. A link that
cannot be opened, because of NAT or a firewall, is tried again with growing pauses; no message waits for
it, all take the routing path meanwhile. If two edges need a link to each other, one is enough: the one
with the higher name gives the other a head start.

Twice a second the paths of every such topic are chosen anew from what is measured (`overlay.paths`). An
edge measures its own links. What it cannot measure, the way from a routing broker to the other edge, that
edge tells it on the direct link itself (`Measured`); without one there is nothing to choose.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from edge_broker.model import Peer, Topic
from edge_broker.targets import TOPICS_AT_A_TIME
from overlay.express import RESIDUAL
from overlay.limits import COPIES_MAX, MIB
from overlay.locator import Locator
from overlay.messages import Measured, Role
from overlay.outbox import Ticket
from overlay.paths import BOTH, Choice, Decider, LinkView, PathView, Policy, options
from overlay.quality import copies_for
from runtime.hub import ChooseLocator
from runtime.link import Link

if TYPE_CHECKING:
    from edge_broker.broker import EdgeBroker

log = logging.getLogger("isthmus.edge")

DECIDE_S: Final = 0.5
_BACK_OFF_MOST_S: Final = 30.0
"""Longest pause between attempts to open a direct link."""
_HEAD_START_S: Final = 3.0
_TELL_EVERY: Final = 2
"""Every how many decisions the other edges are told of our links."""
_RESERVE_S: Final = 0.003
"""How often messages that may have to take another path are looked at, while there are any."""
_NOWHERE: Final = Locator("127.0.0.1", 1)
_VIEW_MAX: Final = 401
"""Longest list that describes a link: two hundred delays."""
_OVERLOADED_BYTES: Final = 1 * MIB
"""With more waiting for an edge, its direct link is not relied on."""


class DirectPaths:
    """The direct links of one edge broker and the paths of its topics."""

    def __init__(self, broker: "EdgeBroker", default: Policy, wanted: float) -> None:
        self._broker = broker
        self._default = default
        self._wanted = wanted
        self._deciders: dict[tuple[int, str, str], Decider] = {}
        self._told: dict[str, dict[str, LinkView]] = {}
        """By edge: what it says of its links from routing brokers."""
        self._missing: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """By edge: set while its link should be dialled."""
        self._decisions = 0
        self._sending_reserves = False
        self.needed: frozenset[str] = frozenset()
        """Edges of other LANs that messages may have to be sent to directly, as found twice a second."""

    def policy(self, topic: Topic) -> Policy:
        """How the topic's paths are chosen."""
        if topic.qos.deadline_ms is None:
            return Policy.SINGLE
        return topic.qos.paths or self._default

    def dial(self) -> None:
        """Open links that are needed and not there."""
        for edge in sorted(self.needed):
            record = self._broker.edges.get(edge)
            if record is not None and record.lan != self._broker.lan:
                link = self._broker.broker_link(edge, Role.EDGE, record.lan)
                self._broker.dial_direct(link, self._locator_once_needed(link), _BACK_OFF_MOST_S)
                if link.is_up:
                    self._missing[edge].clear()
                else:
                    self._missing[edge].set()

    def link_up(self, link: Link) -> None:
        """A direct link has opened."""
        log.info("direct link up", extra={"edge": link.peer, "lan": link.lan})
        link.on_acknowledged = self._on_acknowledged
        self._broker.core.direct_up(link.peer, link.outbox)
        self.decide(self._broker.core.topics.values())

    def link_down(self, link: Link, detail: str) -> None:
        """A direct link is gone: everything takes the routing path, at once."""
        log.info("direct link down", extra={"edge": link.peer, "lan": link.lan, "detail": detail})
        self._told.pop(link.peer, None)
        for key in [key for key in self._deciders if key[1] == link.peer]:
            del self._deciders[key]  # it may be another way when it comes back
        self._broker.flush(self._broker.core.direct_down(link.peer, self._broker.hub.clock()))

    async def decide_regularly(self) -> None:
        """Choose all paths anew, and tell the other edges what we have measured for them."""
        topics = await self._find_topics()
        self.needed = frozenset(
            edge for topic in topics if self._is_chosen(topic) for edge in topic.remote_edges
        )
        self.dial()
        self.decide(topics)
        self._decisions += 1
        if self._decisions % _TELL_EVERY == 0:
            self._tell()

    async def _find_topics(self) -> list[Topic]:
        """The topics with paths to choose or to give up: often none of the thousands that are looked at."""
        known = self._broker.core.topics
        found: list[Topic] = []
        for number, topic in enumerate(list(known.values()), 1):
            if topic.choices or self._is_chosen(topic):
                found.append(topic)
            if number % TOPICS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return [topic for topic in found if known.get(topic.topic_id) is topic]

    def _is_chosen(self, topic: Topic) -> bool:
        """There are paths to choose between."""
        return bool(topic.publishers and topic.remote_edges) and self.policy(topic) is not Policy.SINGLE

    def decide(self, topics: Iterable[Topic]) -> None:
        """Choose the paths of topics, as far as there is a choice."""
        now_ns = self._broker.hub.clock()
        # Thousands of topics have few different answers, and finding one takes some hundred microseconds.
        chosen: dict[object, Mapping[str, Choice]] = {}
        touched: set[Peer] = set()
        if not self._broker.session.lease_valid(now_ns):
            # New subscribers at other edges may be known to routing brokers only: nothing is sent past
            # those, and for a while after we have read again.
            self._deciders.clear()
        for topic in topics:
            if not self._is_chosen(topic):
                if topic.choices and self.policy(topic) is Policy.SINGLE:
                    touched |= self._broker.core.set_paths(topic, {}, now_ns)
                continue
            key = (topic.remote_edges, topic.deadline_ns, topic.target, self.policy(topic))
            choices = chosen.get(key)
            if choices is None:
                choices = chosen[key] = {
                    edge: choice
                    for edge in topic.remote_edges
                    if (choice := self._choose(topic, edge, now_ns))
                }
            if choices != topic.choices:
                touched |= self._broker.core.set_paths(topic, choices, now_ns)
        self._broker.flush(touched)

    def on_measured(self, link: Link, message: Measured) -> None:
        """Another edge tells what it knows of its links from routing brokers."""
        self._told[link.peer] = {
            router: view
            for router, values in message.links.items()
            if (view := _read_view(values)) is not None
        }

    def watch_reserves(self) -> None:
        """Messages may have to take the routing path unless they are acknowledged soon."""
        if not self._sending_reserves and self._broker.core.has_reserves:
            self._sending_reserves = True
            self._broker.hub.loop.call_later(_RESERVE_S, self._send_reserves)

    def statistics(self) -> Mapping[str, Any]:
        """For /status: bytes sent by path, and the links."""
        links = self._broker.broker_links()
        return {
            "policy": self._default,
            "in_time": self._wanted,
            "bytes": {
                "routing": sum(_bytes_sent(link) for link in links if link.role is Role.ROUTER),
                "direct": sum(_bytes_sent(link) for link in links if self._is_direct(link)),
            },
        }

    def _choose(self, topic: Topic, edge: str, now_ns: int) -> Choice | None:
        """The paths of a topic to one edge; None if only the routing path is there."""
        link = self._broker.find_link(edge, Role.EDGE)
        if link is None or not link.is_up or link.outbox.load_bytes > _OVERLOADED_BYTES:
            return None
        if self.policy(topic) is Policy.BOTH or topic.target is None:
            return BOTH
        router = topic.target.bare_name
        decider = self._deciders.setdefault((topic.deadline_ns, edge, router), Decider(self._wanted))
        first = self._broker.find_link(router, Role.ROUTER)
        second = self._told.get(edge, {}).get(router)
        if first is None or second is None:
            return decider.current
        routing = PathView((view_of(first, outgoing=True), second))
        direct = PathView((view_of(link, outgoing=True),))
        return decider.decide(options(routing, direct, topic.deadline_ns), now_ns)

    def _tell(self) -> None:
        views = {
            link.peer: _write_view(view_of(link, outgoing=False))
            for link in self._broker.broker_links()
            if link.role is Role.ROUTER and link.is_up
        }
        for link in self._broker.broker_links():
            if self._is_direct(link):
                link.send(Measured(views))

    def _is_direct(self, link: Link) -> bool:
        return link.role is Role.EDGE and link.lan != self._broker.lan

    def _locator_once_needed(self, link: Link) -> ChooseLocator:
        """Where to dial; asked before every attempt, so it waits while there is nothing to dial."""

        async def locate() -> Locator:
            if self._broker.id > link.peer:
                await asyncio.sleep(_HEAD_START_S)
            await self._missing[link.peer].wait()
            # Of an edge that is gone the address is of no use, and the attempt fails as it should.
            record = self._broker.edges.get(link.peer)
            return Locator.parse(record.locator) if record is not None else _NOWHERE

        return locate

    def _on_acknowledged(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.cancelled = True

    def _send_reserves(self) -> None:
        broker = self._broker
        touched = broker.core.send_reserves(broker.hub.clock())
        if touched:
            broker.flush(touched)
        self._sending_reserves = broker.core.has_reserves
        if self._sending_reserves:
            broker.hub.loop.call_later(_RESERVE_S, self._send_reserves)


def view_of(link: Link, *, outgoing: bool) -> LinkView:
    """What is known of one direction of a link."""
    delays = link.delays.distribution() if link.delays is not None else ()
    express = link.express
    if express is None or not express.is_worth_it:  # TCP repairs losses, which shows in the delays
        return LinkView(delays)
    loss, burst = (
        (express.loss_there, express.burst_there) if outgoing else (express.meter.loss, express.meter.burst)
    )
    return LinkView(delays, loss, burst, copies_for(loss, burst, RESIDUAL))


def _bytes_sent(link: Link) -> int:
    """Of frames; datagrams count as often as they were sent, with their reports."""
    statistics = link.statistics()
    return statistics.outbox.bytes_sent + statistics.datagram_bytes_sent


def _write_view(view: LinkView) -> list[int | float]:
    flat = [value for pair in view.delays for value in pair]
    return [view.loss, view.burst, view.copies, *flat]


def _read_view(values: object) -> LinkView | None:
    """What `_write_view` wrote; None if a peer wrote something else."""
    if not isinstance(values, list) or len(values) < 3 or len(values) > _VIEW_MAX or len(values) % 2 == 0:
        return None
    if not all(type(value) in {int, float} and 0 <= value < 2**63 for value in values):
        return None
    loss, burst, copies, *flat = values
    if loss > 1 or burst > 1 or not 1 <= copies <= COPIES_MAX:
        return None
    delays = tuple(
        (int(delay_ns), float(share)) for delay_ns, share in zip(flat[::2], flat[1::2], strict=True)
    )
    return LinkView(delays, float(loss), float(burst), int(copies))
