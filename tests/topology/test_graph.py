"""Graphs of a topology, and what they say about deadlines, hosts and links."""

import networkx as nx

from topology.graph import overlay_graph, place_graph, routes, warnings
from topology.model import load_topology, parse_topology

BASE = """\
lans:
  a: {edges: 2, wan: {delay_ms: 10, back: {delay_ms: 5}}}
  b: {wan: {delay_ms: 40, loss: 0.5}}
routers: [{host: east}, {host: west}]
links:
  - {between: [b, west], delay_ms: 1}
"""
TALK = "topics: {t: {deadline_ms: 50}}\npublishers: [{lan: a, topic: t}]\nsubscribers: [{lan: b, topic: t}]\n"


def test_places_are_joined_by_what_packets_meet() -> None:
    graph = place_graph(parse_topology(BASE))
    assert set(graph) == {"a", "b", "east", "west", "zookeeper-1"}
    assert graph.nodes["a"]["kind"] == "lan" and graph.nodes["east"]["kind"] == "host"
    assert graph.edges["a", "east"]["delay_ms"] == 10
    assert graph.edges["east", "a"]["delay_ms"] == 5
    assert graph.edges["b", "east"]["loss"] == 0.5 and graph.edges["b", "west"]["loss"] == 0


def test_the_overlay_joins_brokers_and_not_the_edges_of_one_lan() -> None:
    graph = overlay_graph(parse_topology(BASE))
    assert set(graph) == {"a-1", "a-2", "b-1", "router-1", "router-2"}
    assert not graph.has_edge("a-1", "a-2")
    assert graph.edges["a-1", "b-1"]["delay_ms"] == 50
    path = nx.shortest_path(graph, "a-1", "b-1", weight="delay_ms")
    assert path == ["a-1", "router-2", "b-1"]


def test_routes_name_the_nearest_routing_broker() -> None:
    (route,) = routes(parse_topology(BASE + TALK))
    assert (route.source, route.target, route.router) == ("a", "b", "router-2")
    assert (route.via_router_ms, route.direct_ms, route.quickest_ms, route.deadline_ms) == (11, 50, 11, 50)


def test_the_quickest_route_of_the_graph_is_the_quickest_of_the_table() -> None:
    topology = load_topology("global")
    graph = overlay_graph(topology)
    for route in routes(topology):
        source, target = (topology.lan(name).edges[0] for name in (route.source, route.target))
        direct = graph.edges[source, target]["delay_ms"]
        assert direct == route.direct_ms
        over = [
            graph.edges[source, r.name]["delay_ms"] + graph.edges[r.name, target]["delay_ms"]
            for r in topology.routers
        ]
        assert min(over) == route.via_router_ms


def warned(text: str) -> str:
    return "\n".join(warnings(parse_topology(text)))


def test_a_sound_topology_gets_no_warning() -> None:
    assert warned(BASE + TALK) == ""


def test_warns_of_deadlines_that_links_do_not_allow() -> None:
    slow = BASE.replace("delay_ms: 1}", "delay_ms: 60}").replace("delay_ms: 10", "delay_ms: 20")
    assert warned(slow + TALK) == (
        "topic t from a to b: the deadline is 50 ms, but the links alone take 60 ms"
    )
    direct = slow + "  - {between: [a, b], delay_ms: 30}\n" + TALK
    assert "only a direct path can keep the deadline of 50 ms, it takes 30 ms" in warned(direct)


def test_warns_of_topics_nobody_uses() -> None:
    text = (
        BASE
        + "topics: {t: {}, u: {}, v: {}}\npublishers: [{lan: a, topic: t}]\nsubscribers: [{lan: a, topic: u}]"
    )
    assert warned(text).split("\n") == [
        "topic t has no subscriber",
        "topic u has no publisher",
        "topic v has neither publisher nor subscriber",
    ]


def test_warns_when_one_crash_takes_primary_and_backup() -> None:
    one = "lans: {a: {}}\nrouters: "
    assert "there is one routing broker" in warned(one + "1")
    assert "all routing brokers are on host h" in warned(one + "[{host: h}, {host: h}]")


def test_warns_of_a_link_too_narrow_for_its_payloads() -> None:
    narrow = BASE.replace("wan: {delay_ms: 40, loss: 0.5}", "wan: {back: {rate_mbit: 0.5}}")
    busy = TALK.replace("{lan: a, topic: t}]", "{lan: a, topic: t, rate_per_s: 100, payload_bytes: 1000}]", 1)
    assert "link b-wan carries 0.5 Mbit/s back, but payloads alone make 0.8 Mbit/s" in warned(narrow + busy)
    assert warned(narrow.replace("0.5", "0.9") + busy) == ""


def test_warns_of_links_faster_than_light() -> None:
    text = BASE + "locations: {b: [0, 0], west: [0, 90]}\n"
    assert "link b-west takes 1 ms, but light in fibre needs 50.0 ms" in warned(text)
