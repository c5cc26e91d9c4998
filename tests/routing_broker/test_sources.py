"""Which edges are asked to send again what a subscriber has missed."""

from overlay.limits import ROUTE_LINGER_NS
from routing_broker.sources import Sources

EDGES = frozenset({"a", "b", "c"})


def settled() -> Sources:
    """All edges are registered; the topic's publishers are at the first."""
    sources = Sources()
    sources.set_edges(EDGES, 0)
    sources.set_topic("t", ["a", "a"], 0)
    sources.expire(ROUTE_LINGER_NS, 0)
    return sources


def test_edges_of_registered_publishers_are_asked():
    sources = settled()
    assert sources.of("t", EDGES) == {"a"}
    assert sources.of("t", {"b", "c"}) == set()
    assert sources.of("another", EDGES) == set()


def test_an_edge_that_is_not_registered_may_publish_anything():
    sources = settled()
    sources.set_topic("t", [], 1)
    sources.set_edges(EDGES - {"a"}, 1)
    sources.expire(100 * ROUTE_LINGER_NS, 0)
    assert sources.of("t", EDGES) == {"a"}
    assert sources.of("another", EDGES) == {"a"}


def test_an_edge_that_has_lost_a_publisher_is_asked_for_a_while():
    sources = settled()
    sources.set_topic("t", ["b"], 1)
    assert sources.of("t", EDGES) == {"a", "b"}
    sources.expire(ROUTE_LINGER_NS, 0)
    assert sources.of("t", EDGES) == {"a", "b"}
    sources.expire(1 + ROUTE_LINGER_NS, 0)
    assert sources.of("t", EDGES) == {"b"}


def test_an_edge_that_has_just_registered_is_asked_for_a_while():
    sources = settled()
    sources.set_edges(EDGES - {"c"}, 1)
    sources.set_edges(EDGES, 2)
    assert sources.of("t", EDGES) == {"a", "c"}
    sources.expire(2 + ROUTE_LINGER_NS, 0)
    assert sources.of("t", EDGES) == {"a"}


def test_time_passes_only_while_zookeeper_answers():
    sources = settled()
    sources.set_topic("t", [], 1)
    sources.expire(2 * ROUTE_LINGER_NS, ROUTE_LINGER_NS + 1)
    assert sources.of("t", EDGES) == {"a"}


def test_a_topic_that_is_left_is_forgotten():
    sources = settled()
    sources.forget_topic("t")
    assert sources.of("t", EDGES) == set()
