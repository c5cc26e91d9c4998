"""Topologies: what the library holds, what is read, and what is refused with line and remedy."""

from pathlib import Path

import pytest

from overlay.qos import TopicQos
from topology.conditions import LinkConditions
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
        ("lans: {a: {}}\nrouters: 1\nwan: {loss: 2}", r"line 3: wan\.loss is 2: it must be from 0 to 0\.99"),
        ("lans: {a: {}}\nrouters: 1\nwan: {loss: 1%}", r"line 3: wan\.loss is '1%': give a number from 0"),
        ("lans: {a: {}}\nrouters: 1\nwan: {burst: 0}", r"line 3: wan\.burst is 0: it must be from 1 to"),
        (
            "lans: {a: {}}\nrouters: 1\nwan:\n  {delay_ms: 1, jitter_ms: 2}",
            r"line 4: wan cannot be used: jitter_ms is 2, more than delay_ms, 1",
        ),
        (
            "lans: {a: {}}\nrouters: 1\nwan: {loss: 0.9, burst: 2}",
            r"line 3: wan cannot be used: loss is 0\.9 in bursts of 2.*raise burst to at least 9",
        ),
        (
            "lans: {a: {}}\nrouters: 1\nwan: fast",
            r"line 3: wan is 'fast', which `conditions` does not have.*\{delay_ms: 30\}",
        ),
        (
            "lans: {a: {}}\nrouters: 1\nwan: {out: {delay_ms: 1, colour: red}}",
            r"line 3: wan\.out\.colour is unknown: known are delay_ms",
        ),
        ("lans: {a: {}}\nrouters: 1\ncloud: {out: {delay_ms: 1}}", "line 3: cloud has directions"),
        (
            "lans: {a: {}, b: {}}\nrouters: 1\nlinks:\n- {between: [a, c]}",
            r"line 4: links\[0\]\.between\[1\] is 'c', no LAN and no host of the cloud: use one of a, b",
        ),
        ("lans: {a: {}}\nrouters: 1\nlinks:\n- {delay_ms: 3}", r"line 4: links\[0\] does not say what it"),
        ("lans: {a: {}}\nrouters: 1\nlinks:\n- {between: [a, a]}", r"line 4: .*between names 2 places: name"),
        ("lans: {a: {}}\nrouters: 1\nlinks:\n- {between: [a, cloud]}", r"line 4: .*under `wan` of the LAN"),
        (
            "lans: {a: {}, b: {}}\nrouters: 1\nlinks:\n- {between: [a, b]}\n- {between: [b, a]}",
            r"line 5: links\[1\] joins b and a, as a-b does: keep one of them",
        ),
        (
            "lans: {a: {wan: {name: x}}, b: {wan: {name: x}}}\nrouters: 1",
            "two links are named 'x': every link needs a name of its own",
        ),
        (
            "lans: {a: {}}\nrouters: 1\nscenarios:\n  s:\n    links: {b-wan: {delay_ms: 1}}",
            r"line 5: scenarios\.s\.links\.b-wan is no link: use one of a-wan",
        ),
        (
            "lans: {a: {}}\nrouters: 1\nscenarios: {s: {}}",
            r"line 3: scenarios\.s changes nothing: give links",
        ),
        ("lans: {a: {}}\nrouters: 1\nlocations: {b: [0, 0]}", r"line 3: locations\.b is no LAN and no host"),
        (
            "lans: {a: {}}\nrouters: 1\nlocations: {a: [95, 0]}",
            r"line 3: locations\.a\[0\] is 95: it must be",
        ),
        ("lans: {cloud: {}}\nrouters: 1", "'cloud' names a LAN or host"),
        ("lans: {a: {}}\nrouters: [{host: a}]", "'a' is a LAN and a host of the cloud"),
        (
            "lans: {a: {edges: [{host: h}]}, b: {edges: [{host: h}]}}\nrouters: 1",
            "host 'h' is in LAN b and in a",
        ),
        (
            "lans: {a: {}}\nrouters: 1\nzookeeper: {servers: 3, hosts: [x]}",
            r"line 3: zookeeper\.hosts has 1 hosts for 3 servers",
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


def test_tells_every_mistake_at_once_in_the_order_of_the_file() -> None:
    text = """\
lans:
  a: {edges: 0}
  b: {edgs: 1}
routers: 0
topics:
  t: {loss_tolerance: -1}
  u: {deadline: 4}
colour: red
"""
    with pytest.raises(InvalidTopologyError) as caught:
        parse_topology(text, source="t")
    lines = [
        int(line.split(",")[1].split(":")[0].removeprefix(" line ")) for line in str(caught.value).split("\n")
    ]
    assert lines == [2, 3, 4, 6, 7, 8]


def test_a_wrong_lan_is_not_blamed_on_those_who_use_it() -> None:
    text = "lans: {a: {edges: 0}}\nrouters: 1\ntopics: {t: {}}\nsubscribers:\n- {lan: a, topic: t}"
    with pytest.raises(InvalidTopologyError) as caught:
        parse_topology(text, source="t")
    assert str(caught.value) == "t, line 1: lans.a.edges is 0: it must be from 1 to 100"


def test_many_mistakes_are_counted_not_all_shown() -> None:
    text = "lans: {a: {}}\nrouters: 1\ntopics:\n" + "".join(f"  t{n}: {{deadline: 1}}\n" for n in range(30))
    with pytest.raises(InvalidTopologyError, match=r"and 10 more$"):
        parse_topology(text, source="t")


WIDE = """\
conditions:
  slow: {delay_ms: 250, loss: 0.01}
  uneven: {use: slow, jitter_ms: 5, out: {rate_mbit: 5}, back: {rate_mbit: 50, delay_ms: 100}}
wan: {delay_ms: 10, loss: 0.1, burst: 4}
cloud: {delay_ms: 1}
lans:
  a: {edges: [{name: a1, host: box}, {name: a2, host: box}, a3]}
  b: {wan: {name: to-b, use: uneven, rate_mbit: null}}
  c: {wan: slow}
routers: [{host: east}, {host: east}, {host: west}]
zookeeper: {servers: 3, hosts: [east, west, keeper]}
links:
  - {between: [a, east], delay_ms: 2, out: {delay_ms: 3}}
  - {name: direct, between: [a, b], use: slow}
scenarios:
  calm: {description: all is well, links: {to-b: {delay_ms: 1, jitter_ms: 0}, direct: {loss: 0}, a-wan: slow}}
"""


def test_links_have_conditions_by_name_by_direction_and_by_default() -> None:
    topology = parse_topology(WIDE)
    a, b, c = (lan.wan for lan in topology.lans)
    assert a.ways.out == a.ways.back == LinkConditions(delay_ms=10, loss=0.1, burst=4)
    assert (b.name, b.ends) == ("to-b", ("b", "cloud"))
    assert b.ways.out == LinkConditions(delay_ms=250, jitter_ms=5, loss=0.01, rate_mbit=None)
    assert b.ways.back == LinkConditions(delay_ms=100, jitter_ms=5, loss=0.01, rate_mbit=None)
    assert c.ways.out == LinkConditions(delay_ms=250, loss=0.01)
    assert [link.name for link in topology.all_links] == ["a-wan", "to-b", "c-wan", "a-east", "direct"]


def test_what_a_packet_meets_between_two_places() -> None:
    topology = parse_topology(WIDE)
    assert topology.conditions("a", "east").delay_ms == 3
    assert topology.conditions("east", "a").delay_ms == 2
    assert topology.conditions("a", "west").delay_ms == 10
    assert topology.conditions("west", "b").delay_ms == 100
    assert topology.conditions("b", "a") == LinkConditions(delay_ms=250, loss=0.01)
    assert topology.conditions("east", "west").delay_ms == 1
    assert topology.conditions("a", "a").is_perfect
    # No link of their own: out of the one, into the other.
    through = topology.conditions("a", "c")
    assert (through.delay_ms, through.burst) == (260, 4)
    assert through.loss == pytest.approx(1 - 0.9 * 0.99)


def test_a_scenario_changes_its_links_and_nothing_else() -> None:
    topology = parse_topology(WIDE)
    calm = topology.under("calm")
    assert calm.scenario == "calm"
    assert calm.conditions("b", "west") == LinkConditions(delay_ms=1, loss=0.01)
    assert calm.conditions("a", "b") == LinkConditions(delay_ms=250)
    assert calm.lan("a").wan.ways.out == LinkConditions(delay_ms=250, loss=0.01)
    assert calm.conditions("a", "east") == topology.conditions("a", "east")
    with pytest.raises(InvalidTopologyError, match="has no scenario 'storm': it has calm"):
        topology.under("storm")


def test_hosts_and_what_runs_on_them() -> None:
    topology = parse_topology(WIDE + "topics: {t: {}}\nsubscribers: [{lan: b, topic: t}]\n")
    assert {(host.name, host.place): host.runs for host in topology.hosts} == {
        ("box", "a"): ("a1", "a2"),
        ("a3", "a"): ("a3",),
        ("b-1", "b"): ("b-1",),
        ("b-clients", "b"): ("clients",),
        ("c-1", "c"): ("c-1",),
        ("east", "east"): ("router-1", "router-2", "zookeeper-1"),
        ("west", "west"): ("router-3", "zookeeper-2"),
        ("keeper", "keeper"): ("zookeeper-3",),
    }
