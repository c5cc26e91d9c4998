"""The topologies that come with Isthmus hold what their descriptions say."""

from pathlib import Path

import pytest

from topology.conditions import LinkConditions
from topology.geography import fibre_delay_ms
from topology.graph import routes, warnings
from topology.model import library, load_topology, parse_topology

GOOD = LinkConditions(delay_ms=30)
BAD = LinkConditions(delay_ms=250, loss=0.01)
TABLE_3 = {
    # PubSubCoord, Table 3: L1, L2, L3.
    "case-1": (GOOD, GOOD, GOOD),
    "case-2": (GOOD, GOOD, BAD),
    "case-3": (GOOD, BAD, GOOD),
    "case-4": (GOOD, BAD, BAD),
    "case-5": (BAD, GOOD, GOOD),
    "case-6": (BAD, GOOD, BAD),
    "case-7": (BAD, BAD, GOOD),
    "case-8": (BAD, BAD, BAD),
}


def test_what_there_is() -> None:
    assert set(library()) == {
        *("two-lans", "star-8", "pubsubcoord-8-cases", "frame-edge-cloud", "global"),
        *("wind-farm", "wind-farm-storm"),
    }


@pytest.mark.parametrize("name", sorted(library()))
def test_every_one_is_sound(name: str) -> None:
    topology = load_topology(name)
    assert warnings(topology) == []
    assert topology.description
    for scenario in topology.scenarios:
        assert topology.under(scenario).all_links


def test_the_eight_cases_are_those_of_table_3() -> None:
    topology = load_topology("pubsubcoord-8-cases")
    assert list(topology.scenarios) == list(TABLE_3)
    for case, expected in TABLE_3.items():
        ways = {link.name: link.ways for link in topology.under(case).all_links}
        assert all(ways[name].out == ways[name].back for name in ways)
        assert (ways["L1"].out, ways["L2"].out, ways["L3"].out) == expected


def test_multi_path_has_a_good_path_in_the_cases_where_the_paper_saw_one() -> None:
    topology = load_topology("pubsubcoord-8-cases")
    quickest = {case: routes(topology.under(case))[0].quickest_ms for case in TABLE_3}
    assert [case for case, delay_ms in quickest.items() if delay_ms <= 60] == [
        f"case-{n}" for n in range(1, 6)
    ]


def test_global_spans_four_continents_and_has_the_delays_of_its_map() -> None:
    topology = load_topology("global")
    assert len(topology.lans) == 5
    assert {host.place for host in topology.hosts} == set(topology.locations)
    pairs = 0
    for link in topology.links:
        first, second = (topology.locations[end] for end in link.ends)
        assert link.ways.out == link.ways.back
        assert link.delay_ms == pytest.approx(fibre_delay_ms(first, second), abs=0.051), link.name
        pairs += 1
    places = len(topology.locations)
    assert pairs == places * (places - 1) // 2
    # Drivers that know one way to the cloud take the nearest region.
    regions = {router.host for router in topology.routers}
    for lan in topology.lans:
        assert lan.wan.delay_ms == min(topology.conditions(lan.name, region).delay_ms for region in regions)


def test_the_cut_cable_takes_the_way_round() -> None:
    topology = load_topology("global")
    cut = topology.under("cable-cut")
    for end, link in (("rotterdam", "rotterdam-singapore"), ("frankfurt", "singapore-frankfurt")):
        around = (
            topology.conditions(end, "houston").delay_ms
            + topology.conditions("houston", "singapore").delay_ms
        )
        assert cut.scenarios["cable-cut"].links[link].out.delay_ms == pytest.approx(around)


def test_frame_edge_cloud_has_the_categories_of_table_2() -> None:
    topology = load_topology("frame-edge-cloud")
    rows = [
        (qos.period_ms, qos.deadline_ms, qos.loss_tolerance, qos.retention)
        for qos in topology.topics.values()
    ]
    assert rows == [
        *((50, 50, 0, 2), (50, 50, 3, 0), (100, 100, 0, 1)),
        *((100, 100, 3, 0), (100, 100, None, 0), (500, 500, 0, 1)),
    ]
    assert topology.lan("control-room").wan.round_trip_ms == 0.5
    assert topology.lan("datacentre").wan.round_trip_ms == 44
    assert [topic for topic in topology.topics if "datacentre" in topology.subscribing_lans(topic)] == [
        "category/5"
    ]


def test_star_8_joins_eight_lans() -> None:
    topology = load_topology("star-8")
    assert len(topology.lans) == 8
    assert len(topology.subscribing_lans("alarm")) == 7 == len(topology.publishing_lans("status"))
    last = topology.lan("site-8").wan.ways
    assert last.out.rate_mbit == 2 and last.back.rate_mbit == 20 and last.out.burst == 3


def test_the_example_of_the_docs_is_sound() -> None:
    text = (Path(__file__).parents[2] / "docs" / "topologies.md").read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    topology = parse_topology(example, "topologies.md")
    assert warnings(topology) == []
    assert topology.under("storm").conditions("office", "cloud-a") == LinkConditions(60, loss=0.05, burst=8)
