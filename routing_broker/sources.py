"""Which edges may have publishers of a topic: those that are asked to send something again.

ZooKeeper names them. But an edge whose session has ended works on, and its clients publish, while nothing of
it is registered: it may have publishers of any topic. So may, for a while, an edge that has just registered,
as its endpoints may follow, or that has just lost a publisher, as it may be found to have lost all. Whoever
is asked in vain knows nothing of the topic, or has nothing to send.
"""

from collections.abc import Iterable, Set

from overlay.limits import ROUTE_LINGER_NS
from overlay.lingering import Lingering


class Sources:
    """The edges of publishers, as far as a routing broker knows."""

    def __init__(self) -> None:
        self._registered: frozenset[str] = frozenset()
        self._named: dict[str, frozenset[str]] = {}
        """Edges of the registered publishers, by topic."""
        self._unsure: Lingering[str] = Lingering(ROUTE_LINGER_NS)
        """Edges of which more may be known in a moment."""

    def set_edges(self, registered: frozenset[str], now_ns: int) -> None:
        """These edges are registered now."""
        for edge in registered - self._registered:
            self._unsure.expect(edge, now_ns)
        self._registered = registered

    def set_topic(self, topic: str, edges: Iterable[str], now_ns: int) -> None:
        """The registered publishers of a topic are at these edges now."""
        named = frozenset(edges)
        for edge in self._named.get(topic, frozenset()) - named:
            self._unsure.expect(edge, now_ns)
        self._named[topic] = named

    def forget_topic(self, topic: str) -> None:
        """The topic is not ours any more."""
        self._named.pop(topic, None)

    def expire(self, until_ns: int, heard_since_ns: int) -> None:
        """ZooKeeper has answered until `until_ns`, without a break since `heard_since_ns`."""
        self._unsure.expire(until_ns, heard_since_ns)

    def of(self, topic: str, connected: Set[str]) -> Set[str]:
        """Those of the edges that are connected which may have publishers of the topic."""
        named = self._named.get(topic, frozenset())
        return (connected - self._registered) | (connected & named.union(self._unsure))
