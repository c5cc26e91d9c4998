"""Pictures of topologies: where boxes go, and that a file comes out."""

from itertools import combinations
from pathlib import Path

import pytest

from topology.errors import TopologyError
from topology.layout import GAP_IN, lay_out
from topology.model import library, load_topology, parse_topology
from topology.plot import plot

CROWD = "routers: 7\nlans:\n" + "".join(f"  lan-{n}: {{edges: 6}}\n" for n in range(15))


def test_boxes_do_not_overlap() -> None:
    for topology in (*map(load_topology, library()), parse_topology(CROWD)):
        layout = lay_out(topology)
        places = [box for box in layout.boxes.values() if layout.is_map or box.kind != "host"]
        for one, other in combinations(places, 2):
            # A little tolerance: pushing apart ends when nothing overlaps any more.
            assert one.overlap(other, GAP_IN - 0.02) == (0.0, 0.0), (topology.name, one.title, other.title)


def test_hosts_lie_inside_the_cloud() -> None:
    layout = lay_out(load_topology("star-8"))
    cloud = layout.boxes["cloud"]
    assert cloud.inner
    for host in cloud.inner:
        assert abs(host.x - cloud.x) + host.width / 2 < cloud.width / 2
        assert abs(host.y - cloud.y) + host.height / 2 < cloud.height / 2


def test_located_places_lie_as_on_a_map() -> None:
    boxes = lay_out(load_topology("global")).boxes
    assert boxes["houston"].x < boxes["rotterdam"].x < boxes["singapore"].x < boxes["tokyo"].x
    assert boxes["santos"].y < boxes["singapore"].y < boxes["rotterdam"].y
    assert not lay_out(load_topology("two-lans")).is_map


def test_a_line_leaves_a_box_at_its_border() -> None:
    box = next(iter(lay_out(load_topology("two-lans")).boxes.values()))
    x, y = box.border(box.x + 100, box.y)
    assert (x, y) == (pytest.approx(box.x + box.width / 2), pytest.approx(box.y))
    assert box.border(box.x, box.y - 100)[1] == pytest.approx(box.y - box.height / 2)


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_draws_in_the_format_of_the_name(tmp_path: Path, name: str, begins: bytes) -> None:
    plot(load_topology("pubsubcoord-8-cases").under("case-6"), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_names_what_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "star.svg"
    plot(load_topology("star-8"), file)
    # matplotlib writes each text as a comment beside its outlines.
    text = file.read_text()
    for word in (
        "headquarters",
        "site-8-1",
        "router-3",
        "zookeeper-2",
        "25 ms",
        "out 2 Mbit/s",
        "2 pub · 2 sub",
    ):
        assert f"<!-- {word} -->" in text, word


def test_refuses_names_and_places_it_cannot_write(tmp_path: Path) -> None:
    topology = load_topology("two-lans")
    with pytest.raises(TopologyError, match=r"ending '\.jpg': use one of \.png, \.svg, \.pdf"):
        plot(topology, tmp_path / "a.jpg")
    with pytest.raises(TopologyError, match="cannot be written: No such file"):
        plot(topology, tmp_path / "no" / "a.png")
