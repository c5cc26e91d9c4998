"""A topology as graphs (networkx), and what they tell: routes, delays, deadlines out of reach.

`place_graph` has the LANs and the hosts of the cloud, joined by what packets meet between them.
`overlay_graph` has the brokers, joined as the overlay joins them: edges with routing brokers and with
the edges of other LANs, routing brokers with each other. Both are directed; every arc has its
`conditions` and, as plain numbers for path searches, `delay_ms` and `loss`.
"""

from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final

import networkx as nx

from topology.geography import least_delay_ms
from topology.model import Lan, Topology

DELAY_TOLERANCE_MS: Final = 0.05
"""Delays in files are rounded to a tenth."""


@dataclass(frozen=True, slots=True)
class Route:
    """The quickest ways between the LANs of a publisher and a subscriber, as far as links go."""

    topic: str
    source: str
    target: str
    via_router_ms: float
    """Through the nearest routing broker."""
    router: str
    direct_ms: float
    """Straight from edge to edge."""
    deadline_ms: float | None

    @property
    def quickest_ms(self) -> float:
        """The better of the two."""
        return min(self.via_router_ms, self.direct_ms)


def place_graph(topology: Topology) -> "nx.DiGraph[str]":
    """LANs and hosts of the cloud. Node attribute `kind`: lan or host."""
    graph: nx.DiGraph[str] = nx.DiGraph(name=topology.name)
    for lan in topology.lans:
        graph.add_node(lan.name, kind="lan", edges=lan.edges)
    for host in topology.hosts:
        if not host.lan:
            graph.add_node(host.name, kind="host", runs=host.runs)
    for source, target in permutations(list(graph), 2):
        graph.add_edge(source, target, **_arc(topology, source, target))
    return graph


def overlay_graph(topology: Topology) -> "nx.DiGraph[str]":
    """Brokers. Node attributes: `kind` edge or router, `place`, `host`."""
    graph: nx.DiGraph[str] = nx.DiGraph(name=topology.name)
    for lan in topology.lans:
        for edge, host in zip(lan.edges, lan.edge_hosts, strict=True):
            graph.add_node(edge, kind="edge", place=lan.name, host=host)
    for router in topology.routers:
        graph.add_node(router.name, kind="router", place=router.host, host=router.host)
    for source, target in permutations(list(graph), 2):
        here, there = graph.nodes[source]["place"], graph.nodes[target]["place"]
        if here == there and graph.nodes[source]["kind"] == "edge":
            # Edges of one LAN do not talk with each other.
            continue
        graph.add_edge(source, target, **_arc(topology, here, there))
    return graph


def _arc(topology: Topology, source: str, target: str) -> dict[str, Any]:
    conditions = topology.conditions(source, target)
    return {"conditions": conditions, "delay_ms": conditions.delay_ms, "loss": conditions.loss}


def routes(topology: Topology) -> list[Route]:
    """For each topic and each pair of LANs it joins."""
    found = []
    for topic, qos in topology.topics.items():
        for source in sorted(topology.publishing_lans(topic)):
            for target in sorted(topology.subscribing_lans(topic) - {source}):
                via_ms, router = min(
                    (
                        topology.conditions(source, item.host).delay_ms
                        + topology.conditions(item.host, target).delay_ms,
                        item.name,
                    )
                    for item in topology.routers
                )
                direct_ms = topology.conditions(source, target).delay_ms
                found.append(Route(topic, source, target, via_ms, router, direct_ms, qos.deadline_ms))
    return found


def warnings(topology: Topology) -> list[str]:
    """What can be run but will hardly do what its author wants, under the scenario in force."""
    return [
        *_endpoint_warnings(topology),
        *_deadline_warnings(topology),
        *_host_warnings(topology),
        *_capacity_warnings(topology),
        *_location_warnings(topology),
    ]


def _endpoint_warnings(topology: Topology) -> list[str]:
    found = []
    for topic in topology.topics:
        publishing, subscribing = topology.publishing_lans(topic), topology.subscribing_lans(topic)
        if not publishing and not subscribing:
            found.append(f"topic {topic} has neither publisher nor subscriber")
        elif not publishing or not subscribing:
            found.append(f"topic {topic} has no {'subscriber' if publishing else 'publisher'}")
    return found


def _deadline_warnings(topology: Topology) -> list[str]:
    found = []
    for route in routes(topology):
        if route.deadline_ms is None:
            continue
        where = f"topic {route.topic} from {route.source} to {route.target}"
        if route.quickest_ms >= route.deadline_ms:
            found.append(
                f"{where}: the deadline is {route.deadline_ms:g} ms, but the links alone take "
                f"{route.quickest_ms:g} ms"
            )
        elif route.via_router_ms >= route.deadline_ms:
            found.append(
                f"{where}: only a direct path can keep the deadline of {route.deadline_ms:g} ms, it takes "
                f"{route.direct_ms:g} ms and the way through {route.router} {route.via_router_ms:g} ms"
            )
    return found


def _host_warnings(topology: Topology) -> list[str]:
    hosts = {router.host for router in topology.routers}
    if len(hosts) > 1:
        return []
    if len(topology.routers) == 1:
        return ["there is one routing broker: nothing can take over when it dies"]
    return [f"all routing brokers are on host {hosts.pop()}: a crash of the host takes primary and backup"]


def _capacity_warnings(topology: Topology) -> list[str]:
    """Links to the cloud that are too narrow for the payloads alone."""
    found = []
    for lan in topology.lans:
        for way, conditions, mbit in (
            ("out", lan.wan.ways.out, _leaving_mbit(topology, lan)),
            ("back", lan.wan.ways.back, _entering_mbit(topology, lan)),
        ):
            if conditions.rate_mbit is not None and mbit > conditions.rate_mbit:
                found.append(
                    f"link {lan.wan.name} carries {conditions.rate_mbit:g} Mbit/s {way}, but payloads alone "
                    f"make {mbit:.3g} Mbit/s"
                )
    return found


def _leaving_mbit(topology: Topology, lan: Lan) -> float:
    """One copy of each message that another LAN wants."""
    return sum(
        item.rate_per_s * item.payload_bytes * 8e-6
        for item in topology.publishers
        if item.lan == lan.name and topology.subscribing_lans(item.topic) - {lan.name}
    )


def _entering_mbit(topology: Topology, lan: Lan) -> float:
    """One copy for each edge with subscribers."""
    wanted = {(item.topic, item.edge) for item in topology.subscribers if item.lan == lan.name}
    return sum(
        item.rate_per_s * item.payload_bytes * 8e-6
        for item in topology.publishers
        for topic, _ in wanted
        if item.topic == topic and item.lan != lan.name
    )


def _location_warnings(topology: Topology) -> list[str]:
    found = []
    for link in topology.links:
        first, second = (topology.locations.get(end) for end in link.ends)
        if first is None or second is None:
            continue
        least_ms = least_delay_ms(first, second)
        quickest_ms = min(link.ways.out.delay_ms, link.ways.back.delay_ms)
        if quickest_ms < least_ms - DELAY_TOLERANCE_MS:
            found.append(
                f"link {link.name} takes {quickest_ms:g} ms, but light in fibre needs {least_ms:.1f} ms "
                "between the two places"
            )
    return found
