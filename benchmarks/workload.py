"""Who publishes and subscribes where in the coordination benchmark: PubSubCoord III.4.2 as a function.

The paper has 120 LANs, 20 with 50 publishers each and 100 with 100 subscribers each; the subscribers
of a LAN are interested in 100 of the 1,000 topics. Everything here follows from a few numbers, so
that every process of a run knows, without being told, what the routes must be in the end.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, Self

from coordinator import EndpointKind

TOPICS_PER_LAN: Final = 100
LANS_PER_PUBLISHING_LAN: Final = 6
ROUTERS_PER_HOST: Final = 4
"""Routing brokers that count as one host, so that primary and backup have hosts to be spread over."""


@dataclass(frozen=True)
class Declaration:
    """One endpoint to declare at one edge."""

    edge: str
    kind: EndpointKind
    topic: str
    endpoint: int


@dataclass(frozen=True)
class Workload:
    """The size of a run; the rest follows."""

    lans: int = 120
    routers: int = 40
    topics: int = 1_000
    seed: int = 1

    def to_record(self) -> dict[str, Any]:
        """The plain form that travels between processes."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Read the plain form."""
        return cls(**record)

    @cached_property
    def router_names(self) -> tuple[str, ...]:
        """All routing brokers."""
        return tuple(f"router-{number:03d}" for number in range(self.routers))

    @cached_property
    def edge_names(self) -> tuple[str, ...]:
        """All edge brokers, one per LAN."""
        return tuple(f"edge-{number:03d}" for number in range(self.lans))

    @cached_property
    def topic_names(self) -> tuple[str, ...]:
        """All topics."""
        return tuple(f"topic-{number:04d}" for number in range(self.topics))

    def host_of(self, router: str) -> str:
        """The host a routing broker counts as."""
        return f"host-{self.router_names.index(router) // ROUTERS_PER_HOST:02d}"

    def lan_of(self, edge: str) -> str:
        """The LAN of an edge broker."""
        return f"lan-{edge.removeprefix('edge-')}"

    @cached_property
    def publishing_edges(self) -> tuple[str, ...]:
        """Edges of the LANs with publishers: a sixth of all."""
        return self.edge_names[: max(1, self.lans // LANS_PER_PUBLISHING_LAN)]

    @cached_property
    def subscribing_edges(self) -> tuple[str, ...]:
        """Edges of the LANs with subscribers: all others."""
        return self.edge_names[len(self.publishing_edges) :] or self.edge_names

    @cached_property
    def interests(self) -> dict[str, tuple[str, ...]]:
        """The topics that the LAN of each subscribing edge cares for, in the order they are joined."""
        randomness = random.Random(self.seed)
        count = min(TOPICS_PER_LAN, self.topics)
        return {
            edge: tuple(randomness.sample(self.topic_names, count)) for edge in sorted(self.subscribing_edges)
        }

    def publishers(self) -> Iterator[Declaration]:
        """One publisher per topic, spread over the publishing LANs."""
        edges = self.publishing_edges
        for number, topic in enumerate(self.topic_names):
            yield Declaration(edges[number % len(edges)], EndpointKind.PUBLISHER, topic, number)

    def subscribers(self, first: int, end: int) -> Iterator[Declaration]:
        """Subscribers number `first` to `end`, exclusive; consecutive ones are in different LANs."""
        edges = self.subscribing_edges
        for number in range(first, end):
            edge = edges[number % len(edges)]
            interest = self.interests[edge]
            topic = interest[number // len(edges) % len(interest)]
            yield Declaration(edge, EndpointKind.SUBSCRIBER, topic, self.topics + number)

    def routes(self, subscribers: int) -> dict[str, frozenset[str]]:
        """For each topic the edges that must get its messages once this many subscribers have joined."""
        edges: dict[str, set[str]] = {topic: set() for topic in self.topic_names}
        for declaration in self.subscribers(0, subscribers):
            edges[declaration.topic].add(declaration.edge)
        return {topic: frozenset(found) for topic, found in edges.items()}
