"""Endpoints that come from another edge go on where they were.

A client that changes its edge tells the new one, for each publisher, the last message it received. What
it has missed is still retained where it entered the overlay, so it is sent again from there:

    by publishers of the new edge          straight to the client (`here`)
    by publishers of other edges of the LAN    from edge to edge (`elsewhere`)
    by publishers in other LANs            through the topic's routing broker (`elsewhere`)

For other subscribers these are duplicates. The new edge drops them for those, but for a while gives the
client that resumes all it gets, and the client puts it in order.

A publisher that comes from another edge may have messages on their way from there: for a while its
messages are marked as unordered, so that egress edges wait for those. And if this edge, which may not have
known the topic, sees no subscriber in another LAN, there may have been one a moment ago that is about to
register again: as others keep their routes for it (`overlay.lingering`), messages wait here for a while,
which begins when ZooKeeper has told this edge for the first time who subscribes.
"""

from collections.abc import Mapping
from typing import Final

from edge_broker.dispatch import Dispatch
from edge_broker.model import Peer, Topic
from edge_broker.targets import Targets
from overlay.limits import RESUME_NS

_UNTIL_TOLD_NS: Final = 2**61


class Resuming:
    """What an edge does for endpoints that change their edge."""

    def __init__(self, dispatch: Dispatch, targets: Targets) -> None:
        self._dispatch = dispatch
        self._targets = targets

    def publisher_here(self, topic: Topic, now_ns: int) -> None:
        """A publisher came from another edge: what it sent there may still be on its way."""
        topic.mixed_until_ns = now_ns + RESUME_NS
        self._targets.update_routes(topic)

    def publisher_untold(self, topic: Topic) -> None:
        """A publisher begins before ZooKeeper has told who subscribes; then `publisher_here` follows."""
        topic.mixed_until_ns = _UNTIL_TOLD_NS
        self._targets.update_routes(topic)

    def here(self, topic: Topic, client: Peer, positions: Mapping[int, int], now_ns: int) -> set[Peer]:
        """A subscriber came from another edge: what it has missed goes to it, now and as it comes."""
        topic.resuming[client] = now_ns + RESUME_NS
        touched: set[Peer] = set()
        for publisher in topic.publishers.values():
            for message in publisher.retention.after(positions.get(publisher.publisher_id)):
                self._dispatch.repeat_own(topic, message, touched, now_ns)
        return touched

    def elsewhere(
        self, topic: Topic, positions: Mapping[int, int], now_ns: int, router: str = "", edge: str = ""
    ) -> set[Peer]:
        """A subscriber has come to another edge: send what is retained beyond its positions.

        To an edge of this LAN, or through the routing broker that asks, if that is where the topic's messages
        go now; if not, the one they do go to asks as well. Returns peers with new data.
        """
        touched: set[Peer] = set()
        if topic.is_turning:
            self._targets.turn_now(topic, touched, now_ns)
        via = self._targets.lan_edges.get(edge) if edge else self._targets.routers_up.get(router)
        if via is not None and (edge or via is topic.target):
            self._targets.send_missed(topic, via, positions, touched, now_ns)
        return touched

    def expire(self, topic: Topic, now_ns: int) -> None:
        """What is over is over; called every second."""
        for client in [client for client, until_ns in topic.resuming.items() if until_ns <= now_ns]:
            del topic.resuming[client]
        if topic.mixed_until_ns and topic.mixed_until_ns <= now_ns:
            topic.mixed_until_ns = 0
            self._targets.update_routes(topic)
            if not topic.interested_remotely:
                self._stop_waiting(topic)

    @staticmethod
    def _stop_waiting(topic: Topic) -> None:
        """No other LAN is interested after all."""
        for publisher in topic.publishers.values():
            if topic.keeps_sent:
                publisher.retention.count_as_sent()
            else:
                publisher.retention.forget()
