"""Telling others that a subscriber has come from another edge, so that they send what it has missed.

The subscriber's new edge tells the other edges of the LAN and the topic's routing brokers, which pass it
on to the edges that may have publishers of the topic. Each of them first counts the new edge among those it
sends to, without waiting for ZooKeeper, and then passes on or sends again: so nothing falls in between. A
routing broker whose link comes up while the subscriber resumes, or that gets the topic then, is told as well.
"""

from typing import TYPE_CHECKING

from edge_broker.model import Peer, Topic
from overlay.limits import RESUME_NS
from overlay.messages import Resume, Role
from overlay.resume import positions_of

if TYPE_CHECKING:
    from edge_broker.broker import EdgeBroker


class _Arrival:
    """A subscriber that resumes."""

    __slots__ = ("frame", "told", "topic", "until_ns")

    def __init__(self, topic: Topic, frame: Resume, until_ns: int) -> None:
        self.topic = topic
        self.frame = frame
        self.until_ns = until_ns
        self.told: set[tuple[str, int]] = set()
        """Links and which of their connections."""


class Arrivals:
    """The subscribers of one edge that have just come from another one."""

    def __init__(self, broker: "EdgeBroker") -> None:
        self._broker = broker
        self._arrivals: dict[tuple[Peer, int], _Arrival] = {}
        """By client and endpoint."""

    def begin(self, topic: Topic, client: Peer, frame: Resume) -> None:
        """A subscriber resumes here."""
        now_ns = self._broker.hub.clock()
        self._broker.flush(
            self._broker.core.resuming.here(topic, client, positions_of(frame.positions), now_ns)
        )
        self._arrivals[client, frame.endpoint] = _Arrival(topic, frame, now_ns + RESUME_NS)
        self.tell()

    def tell(self) -> None:
        """Tell whoever has not been told yet; to be called when links or topics have changed."""
        if not self._arrivals:
            return
        now_ns = self._broker.hub.clock()
        for key in [key for key, arrival in self._arrivals.items() if arrival.until_ns <= now_ns]:
            del self._arrivals[key]
        neighbours = [
            link
            for link in self._broker.broker_links()
            if link.role is Role.EDGE and link.lan == self._broker.lan
        ]
        for arrival in self._arrivals.values():
            names = (arrival.topic.primary, arrival.topic.backup)
            routers = [self._broker.find_link(name, Role.ROUTER) for name in names if name is not None]
            for link in (*neighbours, *routers):
                if link is None or not link.is_up or (link.key, link.connects) in arrival.told:
                    continue
                arrival.told.add((link.key, link.connects))
                link.send(arrival.frame)
