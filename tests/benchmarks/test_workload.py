"""The workload of the coordination benchmark is the paper's, and the same in every process."""

from collections import Counter

from benchmarks.workload import Workload
from coordinator import EndpointKind

PAPER = Workload()


def test_the_default_is_the_papers() -> None:
    publishers = list(PAPER.publishers())
    subscribers = list(PAPER.subscribers(0, 10_000))
    assert set(Counter(declaration.edge for declaration in publishers).values()) == {50}
    assert set(Counter(declaration.edge for declaration in subscribers).values()) == {100}
    assert len(PAPER.publishing_edges) == 20
    assert len(PAPER.subscribing_edges) == 100
    assert {declaration.topic for declaration in publishers} == set(PAPER.topic_names)
    for edge in PAPER.subscribing_edges:
        assert len({item.topic for item in subscribers if item.edge == edge}) == 100


def test_endpoints_are_unique_and_never_on_both_sides() -> None:
    declarations = [*PAPER.publishers(), *PAPER.subscribers(0, 10_000)]
    assert len({declaration.endpoint for declaration in declarations}) == len(declarations)
    kinds = Counter(declaration.kind for declaration in declarations)
    assert kinds == {EndpointKind.PUBLISHER: 1_000, EndpointKind.SUBSCRIBER: 10_000}


def test_routes_are_those_of_the_subscribers_so_far() -> None:
    routes = PAPER.routes(4_000)
    joined = {(declaration.topic, declaration.edge) for declaration in PAPER.subscribers(0, 4_000)}
    assert {(topic, edge) for topic, edges in routes.items() for edge in edges} == joined


def test_every_process_computes_the_same() -> None:
    twin = Workload.from_record(PAPER.to_record())
    assert list(twin.subscribers(0, 500)) == list(PAPER.subscribers(0, 500))
    assert list(Workload(seed=2).subscribers(0, 500)) != list(PAPER.subscribers(0, 500))


def test_one_lan_is_enough() -> None:
    tiny = Workload(lans=1, routers=2, topics=3)
    assert {declaration.edge for declaration in (*tiny.publishers(), *tiny.subscribers(0, 9))} == {"edge-000"}
