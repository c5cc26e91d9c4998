"""The description of a testbed: LANs, brokers, links, topics and who publishes and subscribes.

One YAML file is the single description; drivers run it. This module reads and checks it, nothing
else. Everything is checked before anything starts, and every mistake is told at once: an error names
the line, the value and the remedy. `docs/topologies.md` says what a file may hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Final

from overlay.qos import TopicQos
from topology.conditions import LinkConditions
from topology.document import Problems, Value, read_document
from topology.endpoints import (
    PublisherSpec,
    SubscriberSpec,
    read_publishers,
    read_subscribers,
    read_topics,
)
from topology.errors import InvalidTopologyError
from topology.geography import LATITUDE_MAX, LONGITUDE_MAX, Location
from topology.links import (
    CLOUD,
    BothWays,
    Link,
    Scenario,
    in_series,
    read_links,
    read_name,
    read_named,
    read_scenarios,
    read_ways,
)

LANS_MAX: Final = 99
"""The process testbed gives LAN number n the addresses 127.n.x.y; the cloud has 127.100.x.y."""
EDGES_MAX_PER_LAN: Final = 100
ROUTERS_MAX: Final = 200

_SECTIONS: Final = (
    *("name", "description", "zookeeper", "conditions", "wan", "cloud", "lans", "routers", "links"),
    *("scenarios", "locations", "topics", "publishers", "subscribers"),
)


@dataclass(frozen=True, slots=True)
class Lan:
    """An isolated network with its edge brokers."""

    name: str
    edges: tuple[str, ...]
    wan: Link
    """The way to the cloud: `out` towards it, `back` into the LAN."""
    edge_hosts: tuple[str, ...]
    """The host of each edge broker."""

    @property
    def client_host(self) -> str:
        """The host of the LAN's publishers and subscribers."""
        return f"{self.name}-clients"


@dataclass(frozen=True, slots=True)
class Router:
    """A routing broker in the cloud."""

    name: str
    host: str
    """The host it counts as; primary and backup of a topic go to different ones."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and what runs on it."""

    name: str
    lan: str
    """Empty in the cloud."""
    runs: tuple[str, ...]
    """Brokers, ZooKeeper servers as `zookeeper-<n>`, or `clients`."""

    @property
    def place(self) -> str:
        """Where it is as far as links go: its LAN, or itself if it is in the cloud."""
        return self.lan or self.name


@dataclass(frozen=True, slots=True)
class Topology:
    """A whole testbed."""

    name: str
    description: str
    zookeeper_servers: int
    zookeeper_hosts: tuple[str, ...]
    """One for each server."""
    lans: tuple[Lan, ...]
    routers: tuple[Router, ...]
    links: tuple[Link, ...]
    """Ways beside those between each LAN and the cloud: between two LANs, or to one host."""
    cloud: LinkConditions
    """Between any two hosts of the cloud that have no link of their own."""
    topics: Mapping[str, TopicQos]
    publishers: tuple[PublisherSpec, ...]
    subscribers: tuple[SubscriberSpec, ...]
    scenarios: Mapping[str, Scenario]
    locations: Mapping[str, Location]
    text: str = field(repr=False)
    """The YAML it was read from."""
    scenario: str = ""
    """Which one is in force."""

    def lan(self, name: str) -> Lan:
        """The LAN of this name."""
        return next(lan for lan in self.lans if lan.name == name)

    @property
    def all_links(self) -> tuple[Link, ...]:
        """Each LAN's link to the cloud, then the others."""
        return (*(lan.wan for lan in self.lans), *self.links)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Every machine: of the LANs first, then of the cloud."""
        with_clients = {item.lan for item in self.publishers} | {item.lan for item in self.subscribers}
        runs: dict[tuple[str, str], list[str]] = {}
        for lan in self.lans:
            for edge, host in zip(lan.edges, lan.edge_hosts, strict=True):
                runs.setdefault((host, lan.name), []).append(edge)
            if lan.name in with_clients:
                runs.setdefault((lan.client_host, lan.name), []).append("clients")
        for router in self.routers:
            runs.setdefault((router.host, ""), []).append(router.name)
        for number, host in enumerate(self.zookeeper_hosts, 1):
            runs.setdefault((host, ""), []).append(f"zookeeper-{number}")
        return tuple(Host(name, lan, tuple(found)) for (name, lan), found in runs.items())

    def conditions(self, source: str, target: str) -> LinkConditions:
        """What a packet from one place (a LAN or a host of the cloud) to another meets.

        A link between the two decides. Without one, two LANs are joined by their two links to the
        cloud, a LAN and a host by the LAN's, and two hosts by `cloud`. Within a place the network is
        perfect.
        """
        if source == target:
            return LinkConditions()
        for link in self.links:
            if {source, target} == set(link.ends):
                return link.conditions_from(source)
        wans = {lan.name: lan.wan.ways for lan in self.lans}
        if source in wans and target in wans:
            return in_series(wans[source].out, wans[target].back)
        if source in wans:
            return wans[source].out
        return wans[target].back if target in wans else self.cloud

    def under(self, scenario: str) -> "Topology":
        """The topology under one of its scenarios. Raises InvalidTopologyError if it has none such."""
        if scenario not in self.scenarios:
            has = f"it has {', '.join(self.scenarios)}" if self.scenarios else "it has no scenarios"
            raise InvalidTopologyError(f"topology {self.name} has no scenario {scenario!r}: {has}")
        changed = self.scenarios[scenario].links

        def changed_link(link: Link) -> Link:
            return replace(link, ways=changed.get(link.name, link.ways))

        return replace(
            self,
            scenario=scenario,
            lans=tuple(replace(lan, wan=changed_link(lan.wan)) for lan in self.lans),
            links=tuple(changed_link(link) for link in self.links),
        )

    def publishing_lans(self, topic: str) -> frozenset[str]:
        """LANs with publishers of a topic."""
        return frozenset(item.lan for item in self.publishers if item.topic == topic)

    def subscribing_lans(self, topic: str) -> frozenset[str]:
        """LANs with subscribers of a topic."""
        return frozenset(item.lan for item in self.subscribers if item.topic == topic)

    def crosses_wan(self, topic: str) -> bool:
        """Whether some subscriber is in another LAN than some publisher."""
        return any(
            publishing != subscribing
            for publishing in self.publishing_lans(topic)
            for subscribing in self.subscribing_lans(topic)
        )

    def rate_per_s(self, topic: str) -> float:
        """Messages a second of all publishers of a topic."""
        return sum(item.rate_per_s for item in self.publishers if item.topic == topic)


def library() -> dict[str, str]:
    """The topologies that come with Isthmus: name and text."""
    folder = resources.files("topology") / "library"
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name.removesuffix(".yaml"))
        if entry.name.endswith(".yaml")
    }


def load_topology(name_or_path: str | Path) -> Topology:
    """Read a topology from a file, or from the library by its name."""
    path = Path(name_or_path)
    known = library()
    if path.suffix not in {".yaml", ".yml"} and str(name_or_path) in known:
        return parse_topology(known[str(name_or_path)], source=f"{name_or_path}.yaml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InvalidTopologyError(
            f"topology {str(name_or_path)!r} cannot be read: {reason}; "
            f"give a YAML file or one of {', '.join(known)}"
        ) from error
    return parse_topology(text, source=str(path))


def parse_topology(text: str, source: str = "topology") -> Topology:
    """Read a topology from YAML text; `source` names it in errors."""
    root = read_document(source, text)
    problems = Problems()
    fields = _read_sections(root, problems)
    servers, zookeeper_hosts = problems.read(_read_zookeeper, fields.get("zookeeper"), (1, ("zookeeper-1",)))
    named = problems.read(read_named, fields.get("conditions"), {}, problems)
    wan = problems.read(read_ways, fields.get("wan"), BothWays(), named)
    cloud = problems.read(read_ways, fields.get("cloud"), BothWays(), named)
    lans = problems.read(_read_lans, fields.get("lans"), (), named, wan, problems)
    routers = problems.read(_read_routers, fields.get("routers"), ())
    topics = problems.read(read_topics, fields.get("topics"), {}, problems)
    # What follows names LANs, hosts and topics: with those wrong it would only seem to be wrong, too.
    problems.raise_if_any()
    if cloud.out != cloud.back:
        problems.add(
            fields["cloud"].error("has directions, but hosts of the cloud have no order: remove them")
        )
    edges = {lan.name: lan.edges for lan in lans}
    problems.read(_check_names, root, None, lans, routers, zookeeper_hosts)
    cloud_hosts = (*(router.host for router in routers), *zookeeper_hosts)
    places = tuple(dict.fromkeys((*edges, *cloud_hosts)))
    links = problems.read(read_links, fields.get("links"), (), named, places)
    by_name = problems.read(_links_by_name, root, {}, (*(lan.wan for lan in lans), *links))
    problems.raise_if_any()
    topology = Topology(
        name=problems.read(Value.text, fields.get("name"), Path(source).stem),
        description=problems.read(Value.text, fields.get("description"), "").strip(),
        zookeeper_servers=servers,
        zookeeper_hosts=zookeeper_hosts,
        lans=lans,
        routers=routers,
        links=links,
        cloud=cloud.out,
        topics=topics,
        publishers=problems.read(read_publishers, fields.get("publishers"), (), edges, topics, problems),
        subscribers=problems.read(read_subscribers, fields.get("subscribers"), (), edges, topics, problems),
        scenarios=problems.read(read_scenarios, fields.get("scenarios"), {}, named, by_name, problems),
        locations=problems.read(_read_locations, fields.get("locations"), {}, places),
        text=text,
    )
    problems.raise_if_any()
    return topology


def _read_sections(root: Value, problems: Problems) -> dict[str, Value]:
    fields = root.entries()
    for name, value in fields.items():
        if name not in _SECTIONS:
            problems.add(value.error(f"is unknown: known are {', '.join(_SECTIONS)}"))
    for required in ("lans", "routers"):
        if required not in fields:
            problems.add(root.error(f"{required} is missing: a topology needs lans and routers"))
    return fields


def _read_zookeeper(value: Value) -> tuple[int, tuple[str, ...]]:
    fields = value.fields(("servers", "hosts"))
    servers = fields["servers"].integer(1, 3) if "servers" in fields else 1
    if servers == 2:
        raise fields["servers"].error("is 2: use 1, or 3 for an ensemble that survives one crash")
    if "hosts" not in fields:
        return servers, tuple(f"zookeeper-{number + 1}" for number in range(servers))
    hosts = tuple(read_name(item, "host", item.text()) for item in fields["hosts"].items())
    if len(hosts) != servers:
        raise fields["hosts"].error(f"has {len(hosts)} hosts for {servers} servers: name one for each server")
    return servers, hosts


def _read_lans(
    value: Value, named: Mapping[str, BothWays], wan: BothWays, problems: Problems
) -> tuple[Lan, ...]:
    entries = value.entries()
    if not 1 <= len(entries) <= LANS_MAX:
        raise value.error(f"has {len(entries)} LANs: there must be 1 to {LANS_MAX}")
    lans = (problems.read(_read_lan, entry, None, name, named, wan) for name, entry in entries.items())
    return tuple(lan for lan in lans if lan is not None)


def _read_lan(value: Value, name: str, named: Mapping[str, BothWays], wan: BothWays) -> Lan | None:
    read_name(value, "LAN", name)
    fields = value.fields(("edges", "wan"))
    edges = _read_edges(fields["edges"], name) if "edges" in fields else [(f"{name}-1", f"{name}-1")]
    ways, link = wan, f"{name}-wan"
    if "wan" in fields:
        ways = read_ways(fields["wan"], named, wan, also=("name",))
        link_name = fields["wan"].entries().get("name") if fields["wan"].is_map else None
        if link_name is not None:
            link = read_name(link_name, "link", link_name.text())
    return Lan(
        name=name,
        edges=tuple(edge for edge, _ in edges),
        wan=Link(link, (name, CLOUD), ways),
        edge_hosts=tuple(host for _, host in edges),
    )


def _read_edges(value: Value, lan: str) -> list[tuple[str, str]]:
    """Edge brokers and their hosts: a number, or a list of names or of {name, host}."""
    if not value.is_list:
        names = [f"{lan}-{number + 1}" for number in range(value.integer(1, EDGES_MAX_PER_LAN))]
        return [(name, name) for name in names]
    edges = []
    for number, item in enumerate(value.items(), 1):
        if not item.is_map:
            name = read_name(item, "edge", item.text())
            edges.append((name, name))
            continue
        fields = item.fields(("name", "host"))
        name = f"{lan}-{number}"
        if "name" in fields:
            name = read_name(fields["name"], "edge", fields["name"].text())
        host = read_name(fields["host"], "host", fields["host"].text()) if "host" in fields else name
        edges.append((name, host))
    if not 1 <= len(edges) <= EDGES_MAX_PER_LAN:
        raise value.error(f"has {len(edges)} entries: there must be 1 to {EDGES_MAX_PER_LAN}")
    return edges


def _read_routers(value: Value) -> tuple[Router, ...]:
    if not value.is_list:
        numbers = range(1, value.integer(1, ROUTERS_MAX) + 1)
        return tuple(Router(f"router-{number}", f"host-{number}") for number in numbers)
    routers = []
    for number, item in enumerate(value.items(), 1):
        name, host = f"router-{number}", f"host-{number}"
        if not item.is_map:
            routers.append(Router(read_name(item, "routing broker", item.text()), host))
            continue
        fields = item.fields(("name", "host"))
        if "name" in fields:
            name = read_name(fields["name"], "routing broker", fields["name"].text())
        if "host" in fields:
            host = read_name(fields["host"], "host", fields["host"].text())
        routers.append(Router(name, host))
    if not 1 <= len(routers) <= ROUTERS_MAX:
        raise value.error(f"has {len(routers)} routing brokers: there must be 1 to {ROUTERS_MAX}")
    return tuple(routers)


def _read_locations(value: Value, places: tuple[str, ...]) -> dict[str, Location]:
    locations = {}
    for place, entry in value.entries().items():
        if place not in places:
            raise entry.error(f"is no LAN and no host of the cloud: use one of {', '.join(places)}")
        numbers = list(entry.items())
        if len(numbers) != 2:
            raise entry.error(
                "is no location: give [latitude, longitude] in degrees, south and west negative"
            )
        locations[place] = Location(
            numbers[0].number(-LATITUDE_MAX, LATITUDE_MAX), numbers[1].number(-LONGITUDE_MAX, LONGITUDE_MAX)
        )
    return locations


def _check_names(
    root: Value, lans: tuple[Lan, ...], routers: tuple[Router, ...], zookeeper_hosts: tuple[str, ...]
) -> None:
    """Every broker has a name of its own, and a host is in one place only."""
    brokers = [*(edge for lan in lans for edge in lan.edges), *(router.name for router in routers)]
    twice = next((name for name in brokers if brokers.count(name) > 1), None)
    if twice is not None:
        raise root.error(f"two brokers are named {twice!r}: every broker needs a name of its own")
    place_of = dict.fromkeys((*(router.host for router in routers), *zookeeper_hosts), CLOUD)
    for lan in lans:
        if lan.name == CLOUD or CLOUD in lan.edge_hosts:
            raise root.error(f"{CLOUD!r} names a LAN or host: it is the name of what joins them; use another")
        if lan.name in place_of:
            raise root.error(f"{lan.name!r} is a LAN and a host of the cloud: rename one of them")
        for host in (*lan.edge_hosts, lan.client_host):
            if place_of.setdefault(host, lan.name) != lan.name:
                raise root.error(
                    f"host {host!r} is in LAN {lan.name} and in {place_of[host]}: a host is in one place; "
                    "rename one of them"
                )


def _links_by_name(root: Value, links: tuple[Link, ...]) -> dict[str, Link]:
    found: dict[str, Link] = {}
    for link in links:
        if link.name in found:
            raise root.error(f"two links are named {link.name!r}: every link needs a name of its own")
        found[link.name] = link
    return found
