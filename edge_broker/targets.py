"""Where each topic's messages go from here, and turning to another routing broker.

The *target* of a topic with interest in another LAN is its primary if that one's link is up, else
its backup. When the target changes, for whatever reason, everything retained is sent to the new
target, in order and before newer messages, and with it whatever still waits for the old one if that
lives. What the old target had already delivered arrives twice and is dropped at the egress; nothing is
lost and nothing overtakes.

A routing broker that was restarted may have lost its topics while it was away, and then drops what it is
sent. Until we know which are still its own (`router_trusted`), the other one of a topic goes first.

An edge may have to turn ten thousand topics at once, and messages must not wait for all of them. So
topics are *turning* until it is their turn, some at a time (`turn_some`): first those of which the old
target had messages that it did not acknowledge, then the most urgent. A message of a topic that is
turning has it turned at once (`turn_now`).
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from librt.strings import read_i64_le

from edge_broker.dispatch import Dispatch
from edge_broker.model import DropReason, Peer, Route, Topic
from edge_broker.resending import Resending
from overlay.batch import (
    BATCH_HEADER_BYTES,
    BORN_OFFSET,
    LENGTH_WORD_OFFSET,
    MESSAGE_HEADER_BYTES,
    PUBLISHER_OFFSET,
    SEQUENCE_OFFSET,
    U32,
)
from overlay.messages import Role
from overlay.outbox import Outbox
from overlay.paths import Choice
from overlay.schedule import Unsure, granule_born_ns
from overlay.tracer import Tracer
from overlay.urgency import UNORDERED

if TYPE_CHECKING:
    from mypy_extensions import i64

TOPICS_AT_A_TIME: Final = 200
"""Topics that are looked after before messages are: half a millisecond of work, interpreted a few."""
_SHARED_ROUTES_MAX: Final = 4_096
"""Routes remembered for sharing; forgetting them costs memory, nothing else."""


class Targets:
    """The brokers an edge sends to, and the routes of its topics."""

    def __init__(self, topics: Mapping[int, Topic], dispatch: Dispatch, tracer: Tracer | None) -> None:
        self._topics = topics
        self._dispatch = dispatch
        self._tracer = tracer
        self.routers_up: dict[str, Peer] = {}
        self._restarted: set[str] = set()
        """Routing brokers that may not serve our topics any more."""
        self.lan_edges: dict[str, Peer] = {}
        self._has_neighbours = False
        """This LAN has had other edges: clients of one that has just gone may come here."""
        self._routes: dict[object, Route] = {}
        self._unsure: dict[int, Unsure] = {}
        self.directly: dict[str, Peer] = {}
        """Edges of other LANs that can be sent to directly."""
        self.path_changes = 0
        """Topics whose messages took other paths from then on, each time."""
        self._turning: dict[Topic, None] = {}
        """Topics whose target is to be chosen anew, in the order in which that is done."""
        self._undelivered: dict[Peer, dict[int, dict[int, bytes]]] = {}
        """What routing brokers that are gone never acknowledged; until no topic is turning."""
        self._pending: tuple[object, Mapping[int, Mapping[int, bytes]]] | None = None
        """What waits for one routing broker, as it was looked at last."""
        self.resent = 0
        """Messages sent to another routing broker again."""
        self.changes = 0
        """Topics given another target, each time."""

    def router_up(self, name: str, outbox: Outbox) -> None:
        """The link to a routing broker is up: topics it serves may turn to it."""
        peer = self.routers_up[name] = Peer(f"{Role.ROUTER}:{name}", outbox)
        self._dispatch.trace_link(peer)
        self._turn_others()

    def router_restarted(self, name: str) -> None:
        """A routing broker whose link is about to come up is not the process that it was."""
        self._restarted.add(name)

    def router_trusted(self, name: str) -> None:
        """What we know of our topics is not older than this routing broker's restart."""
        self._restarted.discard(name)
        self._turn_others()

    def router_down(self, router: Peer) -> None:
        """The link to a routing broker is down: its topics turn away from it."""
        del self.routers_up[router.bare_name]
        bodies = router.outbox.withdraw()
        self._undelivered[router] = _by_publisher(bodies)
        # What it was sent and has not acknowledged may be lost, and waits already.
        ids = _topic_ids(bodies)
        theirs = [topic for topic in self._topics.values() if topic.target is router]
        self._begin_turning(theirs, key=lambda topic: (topic.topic_id not in ids, topic.deadline_ns))

    @property
    def is_turning(self) -> bool:
        """Some topics have not turned to their new target yet."""
        return bool(self._turning)

    def turn_now(self, topic: Topic, touched: set[Peer], now_ns: int) -> None:
        """Turn one topic: a message is to go to its new target."""
        again = Resending()
        self._turn(topic, again)
        self._send_again(again, touched, now_ns)

    def turn_some(self, touched: set[Peer], now_ns: int) -> None:
        """Turn the next few topics."""
        again = Resending()
        for topic in list(islice(self._turning, TOPICS_AT_A_TIME)):
            self._turn(topic, again)
        self._send_again(again, touched, now_ns)

    def forget(self, topic: Topic) -> None:
        """This edge has nothing to do with the topic any more."""
        self._turning.pop(topic, None)
        self._forget_undelivered()

    def forget_pending(self) -> None:
        """What was looked at last need not be remembered any longer; called every second."""
        self._pending = None

    def forget_peer(self, peer: Peer) -> None:
        """A client is gone: routes to it are not shared any more, or they would keep it in memory."""
        for key in [key for key, route in self._routes.items() if peer in route.peers]:
            del self._routes[key]

    def set_lan_edges(self, outboxes: Mapping[str, Outbox]) -> None:
        """The other edges of this LAN, by name."""
        if outboxes.keys() == self.lan_edges.keys():
            return
        self._has_neighbours = self._has_neighbours or bool(outboxes)
        self.lan_edges = {name: Peer(f"{Role.EDGE}:{name}", outbox) for name, outbox in outboxes.items()}
        for peer in self.lan_edges.values():
            self._dispatch.trace_link(peer)
        for topic in self._topics.values():
            self.update_routes(topic)

    def direct_up(self, name: str, outbox: Outbox) -> None:
        """An edge of another LAN can be sent to directly."""
        self.directly[name] = Peer(f"{Role.EDGE}:{name}", outbox, is_direct=True)
        self._dispatch.trace_link(self.directly[name])

    def direct_down(self, name: str, now_ns: int) -> set[Peer]:
        """It cannot any more: what it has not acknowledged goes to routing brokers, in order."""
        touched: set[Peer] = set()
        peer = self.directly.pop(name, None)
        if peer is None:
            return touched
        undelivered = _by_publisher(peer.outbox.withdraw())
        again = Resending()
        for topic in self._topics.values():
            if name in topic.direct:
                self._apply_paths(topic, topic.choices)
            # Whatever its path is by now: a link that fails is often given up a moment before it breaks.
            if name not in topic.relied_on:
                continue
            topic.relied_on.remove(name)
            if not topic.interested_remotely or undelivered.keys().isdisjoint(topic.publishers):
                continue
            self._recall(topic, undelivered)
            if topic.target is not None and not topic.is_turning:  # else its turn sends everything
                self._send_all(topic, topic.target, again)
        self._send_again(again, touched, now_ns)
        return touched

    def set_paths(self, topic: Topic, choices: Mapping[str, Choice], now_ns: int) -> set[Peer]:
        """How a topic's messages get to edges of other LANs; returns peers with new data.

        An edge that is sent to directly from now on first gets everything retained: it may wait for a
        routing broker, or at one that does not reach the edge, where newer messages would overtake it
        and it would come too late. And what waits on a path that is given up because it has become too
        slow need not wait there: the routing broker gets it too.
        """
        before, was_routed = topic.direct, topic.via_routing
        self._apply_paths(topic, choices)
        touched: set[Peer] = set()
        again = Resending()
        added = tuple(self.directly[edge] for edge in topic.direct if edge not in before)
        if added:
            route = self._route(added, topic)
            for publisher in topic.publishers.values():
                for message in publisher.retention.messages:
                    again.add(route, message)
        if topic.via_routing and not was_routed and topic.target is not None and not topic.is_turning:
            left = [
                self.directly[edge] for edge in before if edge not in topic.direct and edge in self.directly
            ]
            self._send_waiting(topic, left, topic.target, again)
        self._send_again(again, touched, now_ns)
        return touched

    def _send_waiting(self, topic: Topic, left: Iterable[Peer], target: Peer, again: Resending) -> None:
        """Send a routing broker what waits for edges that are not sent to directly any more."""
        route = self._route((target,), topic)
        for peer in left:
            pending = {} if peer.outbox.is_idle else self._pending_for(peer)
            for publisher_id in topic.publishers:
                for _, message in sorted(pending.get(publisher_id, {}).items()):
                    again.add(route, message)
                    self.resent += 1

    def _apply_paths(self, topic: Topic, choices: Mapping[str, Choice]) -> None:
        before = (topic.direct, topic.via_routing)
        topic.choices = choices
        self._update_onward(topic)
        self.path_changes += before != (topic.direct, topic.via_routing)

    def send_reserves(self, touched: set[Peer], now_ns: int) -> None:
        """Send to routing brokers what edges should have acknowledged by now.

        To those that stood in reserve when it was sent; if they are gone, to those its topics have now.
        """
        again = Resending()
        for late in self._dispatch.take_overdue(now_ns):
            if self.routers_up.get(late.router.bare_name) is late.router:
                late.router.outbox.append(
                    late.deadline_ns, late.urgency, self._dispatch.origin, 0, late.run, now_ns
                )
                touched.add(late.router)
                continue
            for message in _messages_of(late.run.data):
                topic = self._topics.get(read_i64_le(message, 0) & U32)
                if topic is not None and topic.target is not None:
                    again.add(self._route((topic.target,), topic), message)
        self._send_again(again, touched, now_ns)

    def choose(self, topic: Topic) -> Peer | None:
        """The routing broker this topic's messages should go to; None if to none."""
        if not topic.interested_remotely:
            return None
        up = [name for name in (topic.primary, topic.backup) if name is not None and name in self.routers_up]
        return self.routers_up[min(up, key=self._restarted.__contains__)] if up else None

    def retarget(self, topic: Topic, touched: set[Peer], now_ns: int) -> None:
        """The topic's routing brokers or the interest in it may have changed."""
        again = Resending()
        self._retarget(topic, again)
        self._send_again(again, touched, now_ns)

    def send_missed(
        self, topic: Topic, via: Peer, positions: Mapping[int, int], touched: set[Peer], now_ns: int
    ) -> None:
        """A subscriber elsewhere resumes: send what is retained beyond its positions."""
        route = self._route((via,), topic)
        again = Resending()
        for publisher in topic.publishers.values():
            for message in publisher.retention.after(positions.get(publisher.publisher_id)):
                again.add(route, message)
                self.resent += 1
        self._send_again(again, touched, now_ns)

    def update_routes(self, topic: Topic) -> None:
        """The topic's subscribers or requirements have changed."""
        topic.deliver = self._route(tuple(topic.subscribers), topic)
        self._update_onward(topic)

    def _turn_others(self) -> None:
        """Turn the topics that have a better target now."""
        others = [topic for topic in self._topics.values() if topic.target is not self.choose(topic)]
        self._begin_turning(others, key=attrgetter("deadline_ns"))

    def _begin_turning(self, topics: Iterable[Topic], key: Callable[[Topic], Any]) -> None:
        for topic in sorted(topics, key=key):
            topic.is_turning = True
            self._turning.setdefault(topic)
        self._forget_undelivered()

    def _turn(self, topic: Topic, again: Resending) -> None:
        topic.is_turning = False
        self._turning.pop(topic, None)
        if topic.target is not None and topic.target in self._undelivered:
            self._recall(topic, self._undelivered[topic.target])
        if topic.target is not self.choose(topic):
            self._retarget(topic, again)
        self._forget_undelivered()

    def _forget_undelivered(self) -> None:
        if not self._turning:
            self._undelivered.clear()

    def _pending_for(self, router: Peer) -> Mapping[int, Mapping[int, bytes]]:
        """What a routing broker has not acknowledged; looked at once if many topics turn away from it."""
        statistics = router.outbox.statistics()
        state = (router, statistics.messages_sent, statistics.waiting_messages, statistics.waiting_bytes)
        if self._pending is None or self._pending[0] != state:
            self._pending = (state, _by_publisher(router.outbox.pending()))
        return self._pending[1]

    def _recall(self, topic: Topic, undelivered: Mapping[int, Mapping[int, bytes]]) -> None:
        """The target of a topic is gone: what it never acknowledged is unsent again."""
        for publisher in topic.publishers.values():
            retention = publisher.retention
            dropped = retention.dropped
            retention.recall(undelivered.get(publisher.publisher_id, {}))
            self._dispatch.dropped[DropReason.NO_ROUTER] += retention.dropped - dropped

    def _retarget(self, topic: Topic, again: Resending) -> None:
        """Choose the topic's routing broker anew; a new one is to get everything retained."""
        before, target = topic.target, self.choose(topic)
        topic.target = target
        self._update_onward(topic)
        if before is target or target is None:
            return
        if before is not None and not before.outbox.is_idle:
            # It lives and more than is retained may still wait for it, as after a cut: the new one must
            # get all of that too, or what is newer comes first and the rest too late.
            self._recall(topic, self._pending_for(before))
        self.changes += 1
        self._send_all(topic, target, again)

    def _send_all(self, topic: Topic, target: Peer, again: Resending) -> None:
        """Send a routing broker everything retained."""
        route = self._route((target,), topic)
        for publisher in topic.publishers.values():
            for message in publisher.retention.resend():
                again.add(route, message)
                self.resent += 1

    def _send_again(self, again: Resending, touched: set[Peer], now_ns: int) -> None:
        for route, run in again.take():
            if self._tracer is not None:
                self._tracer.send_again(run)
            born_ns = granule_born_ns(read_i64_le(run.data, BORN_OFFSET), 0, route.granule_ns)
            self._dispatch.send(route, run, born_ns, touched, now_ns)

    def _update_onward(self, topic: Topic) -> None:
        onward = [self.lan_edges[edge] for edge in topic.interested_edges if edge in self.lan_edges]
        reserve, reserve_after_ns = self._update_paths(topic)
        onward += [self.directly[edge] for edge in topic.direct]
        if topic.target is not None and topic.via_routing:
            onward.append(topic.target)
        believed = topic.interested_remotely or (topic.mixed_until_ns > 0 and topic.kept_messages > 0)
        topic.keeps_unsent = topic.target is None and believed
        topic.keeps_sent = topic.kept_messages > 0 and (topic.interested_remotely or self._has_neighbours)
        topic.forward = topic.ingress = self._route(tuple(onward), topic, reserve, reserve_after_ns)
        if topic.subscribers:
            topic.ingress = self._route((*topic.subscribers, *onward), topic, reserve, reserve_after_ns)

    def _update_paths(self, topic: Topic) -> tuple[Peer | None, int]:
        """Set who gets the topic's messages directly, and whether the routing broker is needed.

        Gives the routing broker that stands in reserve, and when.
        """
        topic.direct = tuple(
            edge
            for edge in topic.remote_edges
            if edge in self.directly and edge in topic.choices and topic.choices[edge].direct
        )
        # While no routing broker can be reached, messages are also kept for it: none is ever lost for
        # having been sent on one path only.
        topic.via_routing = (
            topic.target is None
            or topic.direct != topic.remote_edges
            or any(topic.choices[edge].routing for edge in topic.direct)
        )
        if topic.via_routing:
            return None, 0
        topic.relied_on.update(topic.direct)
        moments = [topic.choices[edge].reserve_after_ns for edge in topic.direct]
        return (topic.target, min(moments)) if moments and all(moments) else (None, 0)

    def _route(
        self,
        peers: tuple[Peer, ...],
        topic: Topic,
        reserve: Peer | None = None,
        reserve_after_ns: int = 0,
    ) -> Route:
        # A peer is nobody's equal but its own, so peers are good keys.
        # What was sent directly alone may still be on its way when the path has been given up.
        unordered = bool(topic.choices or topic.relied_on or topic.mixed_until_ns)
        key = (peers, topic.requirements, topic if topic.floor_ns else None, unordered, reserve)
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= _SHARED_ROUTES_MAX:
                self._routes.clear()
            unsure = self._unsure.setdefault(topic.deadline_ns, Unsure())
            if topic.floor_ns:  # this route is the topic's alone
                unsure = Unsure(unsure.until_ns)
            deadline_ns, urgency, keep_every = topic.requirements
            if unordered:
                urgency |= UNORDERED
            route = self._routes[key] = Route(peers, deadline_ns, urgency, keep_every, unsure)
            route.reserve = reserve
        route.reserve_after_ns = reserve_after_ns
        if topic.floor_ns:
            route.unsure.until_ns = max(route.unsure.until_ns, topic.floor_ns)
            route.level = max(route.level, topic.floor_level)
        return route


def _messages_of(data: bytes) -> list[bytes]:
    """The messages of a run, each on its own."""
    found: list[bytes] = []
    end: i64 = 0
    while end < len(data):
        start = end
        length: i64 = read_i64_le(data, start + LENGTH_WORD_OFFSET) >> 32
        end = start + MESSAGE_HEADER_BYTES + (length & U32)
        found.append(data[start:end])
    return found


def _topic_ids(bodies: Iterable[bytes]) -> set[int]:
    """The topics of the messages of data frames."""
    found: set[int] = set()
    for body in bodies:
        end: i64 = BATCH_HEADER_BYTES
        while end < len(body):
            topic_id: i64 = read_i64_le(body, end)
            length: i64 = read_i64_le(body, end + LENGTH_WORD_OFFSET) >> 32
            found.add(topic_id & U32)
            end += MESSAGE_HEADER_BYTES + (length & U32)
    return found


def _by_publisher(bodies: Iterable[bytes]) -> dict[int, dict[int, bytes]]:
    """Messages of data frames by publisher and sequence."""
    found: dict[int, dict[int, bytes]] = {}
    for body in bodies:
        end: i64 = BATCH_HEADER_BYTES
        while end < len(body):
            start = end
            length: i64 = read_i64_le(body, start + LENGTH_WORD_OFFSET) >> 32
            end = start + MESSAGE_HEADER_BYTES + (length & U32)
            messages = found.setdefault(read_i64_le(body, start + PUBLISHER_OFFSET), {})
            messages[read_i64_le(body, start + SEQUENCE_OFFSET)] = body[start:end]
    return found
