"""Topologies: what the library holds, what is read, and what is refused with line and remedy."""

from pathlib import Path

import pytest

from overlay.qos import TopicQos
from topology.errors import InvalidTopologyError
from topology.model import library, load_topology, parse_topology

SMALL = """\
lans:
  a: {edges: 2}
  b: {edges: [left, right], wan: {delay_ms: 7}}
wan: {delay_ms: 3}
routers: 2
topics:
  t: {period_ms: 100, loss_tolerance: 2}
publishers:
  - {lan: a, topic: t, rate_per_s: 10}
  - {lan: a, topic: t}
subscribers:
  - {lan: b, topic: t, edge: right}
"""


def test_reads_everything() -> None:
    topology = parse_topology(SMALL, source="small.yaml")
    assert topology.name == "small"
    assert [lan.edges for lan in topology.lans] == [("a-1", "a-2"), ("left", "right")]
    assert [lan.wan.delay_ms for lan in topology.lans] == [3, 7]
    assert [(router.name, router.host) for router in topology.routers] == [
        ("router-1", "host-1"),
        ("router-2", "host-2"),
    ]
    assert topology.topics == {"t": TopicQos(period_ms=100, loss_tolerance=2)}
    # Without an edge, endpoints take turns.
    assert [publisher.edge for publisher in topology.publishers] == ["a-1", "a-2"]
    assert topology.subscribers[0].edge == "right"
    assert topology.crosses_wan("t")
    assert topology.rate_per_s("t") == 20
    assert topology.zookeeper_servers == 1


def test_the_library_is_valid() -> None:
    assert "two-lans" in library()
    for name in library():
        assert load_topology(name).name == name


def test_two_lans_has_what_the_demonstration_needs() -> None:
    topology = load_topology("two-lans")
    assert {lan.name: len(lan.edges) for lan in topology.lans} == {"plant": 2, "office": 1}
    assert len({router.host for router in topology.routers}) == 3
    tolerances = {qos.loss_tolerance for qos in topology.topics.values()}
    assert {0, 3, None} <= tolerances
    assert [topic for topic in topology.topics if not topology.crosses_wan(topic)] == ["plant/vibration"]
    directions = {
        (publisher.lan, subscriber.lan)
        for publisher in topology.publishers
        for subscriber in topology.subscribers
        if publisher.topic == subscriber.topic
    }
    assert {("plant", "office"), ("office", "plant"), ("plant", "plant")} <= directions


def test_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(SMALL)
    assert load_topology(file).name == "mine"


def test_a_missing_file_names_the_library() -> None:
    with pytest.raises(InvalidTopologyError, match=r"'no-such' cannot be read.*two-lans"):
        load_topology("no-such")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t is empty"),
        ("lans: [", "t, line 1: not YAML"),
        ("a: b\n\tc: d", "t, line 2: not YAML"),
        ("- 1", "t, line 1: is a list: give a mapping"),
        ("lans: {a: {}}", "t, line 1: routers is missing"),
        ("lans: {a: {}}\nrouters: 1\nrooters: 2", "t, line 3: rooters is unknown: known are name"),
        ("lans: {a: {}, a: {}}\nrouters: 1", "t, line 1: lans has 'a' twice"),
        (
            "lans:\n  a:\n    edges: 0\nrouters: 1",
            r"t, line 3: lans\.a\.edges is 0: it must be from 1 to 100",
        ),
        (
            "lans:\n  a:\n    edges: many\nrouters: 1",
            r"line 3: lans\.a\.edges is 'many': give a whole number",
        ),
        (
            "lans:\n  a:\n    edges: [a b]\nrouters: 1",
            r"line 3: lans\.a\.edges\[0\] cannot be used: edge name",
        ),
        ("lans:\n  -a: {}\nrouters: 1", r"line 2: lans\.-a cannot be used: LAN name"),
        ("lans: {a: {edges: [x]}, b: {edges: [x]}}\nrouters: 1", "two brokers are named 'x'"),
        ("lans: {}\nrouters: 1", "lans has 0 LANs"),
        ("lans: {a: {}}\nrouters: []", "routers has 0 routing brokers"),
        ("lans: {a: {}}\nrouters:\n- {name: r, rack: 1}", r"line 3: routers\[0\]\.rack is unknown"),
        ("lans: {a: {}}\nrouters: 1\nwan: {delay_ms: -1}", r"line 3: wan\.delay_ms is -1: it must be from 0"),
        (
            "lans: {a: {}}\nrouters: 1\nwan: {delay_ms: .nan}",
            r"line 3: wan\.delay_ms is '.nan': give a number",
        ),
        (
            "lans: {a: {}}\nrouters: 1\nwan: {loss: 0.1}",
            r"line 3: wan\.loss is not supported.*supported are delay_ms",
        ),
        (
            "lans: {a: {}}\nrouters: 1\nzookeeper: {servers: 2}",
            r"line 3: zookeeper\.servers is 2: use 1, or 3",
        ),
        (
            "lans: {a: {}}\nrouters: 1\ntopics: {t: {loss_tolerance: -1}}",
            r"line 3: topics\.t cannot be used: loss_tol",
        ),
        ("lans: {a: {}}\nrouters: 1\ntopics: {t: {deadline: 1}}", r"line 3: topics\.t\.deadline is unknown"),
        ("lans: {a: {}}\nrouters: 1\npublishers: [{lan: a}]", r"line 3: publishers\[0\] has no topic"),
        (
            "lans: {a: {}}\nrouters: 1\ntopics: {t: {}}\nsubscribers:\n- lan: b\n  topic: t",
            r"line 5: subscribers\[0\]\.lan is 'b', no such LAN: use one of a",
        ),
        (
            "lans: {a: {}}\nrouters: 1\ntopics: {t: {}}\nsubscribers:\n- lan: a\n  topic: u",
            r"line 6: subscribers\[0\]\.topic is 'u', which topics does not have",
        ),
        (
            "lans: {a: {}}\nrouters: 1\ntopics: {t: {}}\nsubscribers:\n- lan: a\n  topic: t\n  edge: z",
            r"line 7: subscribers\[0\]\.edge is 'z', no edge of LAN a: use one of a-1",
        ),
        (
            "lans: {a: {}}\nrouters: 1\ntopics: {t: {period_ms: 10}}\n"
            "publishers:\n- lan: a\n  topic: t\n  rate_per_s: 200",
            r"line 7: publishers\[0\]\.rate_per_s is 200, a message every 5 ms, but period_ms of t is 10",
        ),
        (
            "lans: {a: {}}\nrouters: 1\ntopics: {t: {}}\npublishers:\n- {lan: a, topic: t, payload_bytes: 4}",
            r"line 5: publishers\[0\]\.payload_bytes is 4: it must be from 48",
        ),
    ],
)
def test_refuses_with_line_and_remedy(text: str, message: str) -> None:
    with pytest.raises(InvalidTopologyError, match=message):
        parse_topology(text, source="t")
