"""The networks of a topology as hosts, addresses and links, and how they are laid out in namespaces.

Every site (a LAN, or the cloud) is a switch with hosts on it, and brokers also have a way to the WAN:

    198.18.<site>.1          the switch: clients of a LAN; in the cloud, ZooKeeper
    198.18.<site>.10 and on  its brokers: `lan0` on the switch, `wan0` to all other sites
    198.18.100.x             the cloud; if its hosts are apart, 198.18.101.x and on the others

A host has one address, on `lan0`; other sites are reached through `wan0` with the same address. The
clients' namespace has no `wan0` and no route beyond its own /24, and no host forwards, so clients
reach their own LAN and nothing else. 198.18.0.0/15 is set aside for tests of networks (RFC 2544): it
is nobody's real network, and no namespace is connected to the machine's own.

`read_network` is the only place that reads the topology's model for this.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from topology.conditions import LinkConditions
from topology.errors import DriverError
from topology.links import CLOUD
from topology.model import Topology
from topology.namespaces import Namespaces, run_ip

NETWORK: Final = "198.18.0.0/16"
CLOUD_NUMBER: Final = 100
MULTICAST: Final = "224.0.0.0/4"
SWITCH_NUMBER: Final = 1
FIRST_BROKER_NUMBER: Final = 10


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with an address; not the model's host, on which several brokers may run."""

    name: str
    site: str
    address: str
    is_switch: bool
    has_wan: bool


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two sites."""

    source: str
    target: str
    conditions: LinkConditions


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """All hosts and links."""

    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    zookeeper: str = ""
    """The host of all its servers."""

    def host(self, name: str) -> Host:
        """The host of this name."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise DriverError(f"there is no host {name}: use one of {known}")

    def switch(self, site: str) -> Host:
        """The switch of a site."""
        return next(host for host in self.hosts if host.site == site and host.is_switch)

    def at(self, address: str) -> Host:
        """The host with this address."""
        return next(host for host in self.hosts if host.address == address)

    def on_wan(self, site: str) -> Host:
        """A host of this site that is on the WAN."""
        return next(host for host in self.hosts if host.site == site and host.has_wan)


def read_network(topology: Topology) -> NetworkPlan:
    """Hosts and links of a topology.

    The cloud is one site, unless its hosts are apart from each other or differ in how far LANs are from
    them: then each is a site of its own.
    """
    lans = [lan.name for lan in topology.lans]
    cloud = list(dict.fromkeys([*topology.zookeeper_hosts, *(router.host for router in topology.routers)]))
    together = all(topology.conditions(a, b).is_perfect for a, b in itertools.permutations(cloud, 2)) and all(
        topology.conditions(*way) == topology.conditions(*first)
        for lan in lans
        for host in cloud
        for way, first in (((lan, host), (lan, cloud[0])), ((host, lan), (cloud[0], lan)))
    )
    site_of = {host: CLOUD if together else host for host in cloud}
    places = {CLOUD: cloud[0]} if together else {host: host for host in cloud}
    if CLOUD_NUMBER + len(places) > 255:
        raise DriverError(f"the cloud has {len(places)} hosts apart: there is room for {255 - CLOUD_NUMBER}")
    hosts = []
    for number, site in enumerate(places, CLOUD_NUMBER):
        hosts.append(_host(lan_host(site), site, number, SWITCH_NUMBER, has_wan=True))
        routers = [router.name for router in topology.routers if site_of[router.host] == site]
        hosts += [
            _host(router, site, number, FIRST_BROKER_NUMBER + index) for index, router in enumerate(routers)
        ]
    for number, lan in enumerate(topology.lans, 1):
        hosts.append(_host(lan_host(lan.name), lan.name, number, SWITCH_NUMBER, has_wan=False))
        hosts += [
            _host(edge, lan.name, number, FIRST_BROKER_NUMBER + index) for index, edge in enumerate(lan.edges)
        ]
    places |= {lan: lan for lan in lans}
    links = [
        Link(a, b, topology.conditions(places[a], places[b])) for a, b in itertools.permutations(places, 2)
    ]
    return NetworkPlan(tuple(hosts), tuple(links), lan_host(site_of[topology.zookeeper_hosts[0]]))


def lan_host(site: str) -> str:
    """The host of a site's clients; names of brokers have no dot."""
    return f"lan.{site}"


def _host(name: str, site: str, site_number: int, number: int, has_wan: bool = True) -> Host:
    return Host(name, site, f"198.18.{site_number}.{number}", number == SWITCH_NUMBER, has_wan)


def lay_out(plan: NetworkPlan, namespaces: Namespaces) -> None:
    """Make the namespaces, switches and cables. The WAN comes later."""
    for host in sorted(plan.hosts, key=lambda host: not host.is_switch):
        namespaces.add(host.name)
        name = namespaces.name(host.name)
        if host.is_switch:
            # Snooping wants a querier to tell who listens to a group; a switch without it floods.
            lines = ["link add lan0 type bridge mcast_snooping 0"]
        else:
            switch, port = namespaces.name(plan.switch(host.site).name), f"p{host.address.rpartition('.')[2]}"
            run_ip(*f"link add lan0 netns {name} type veth peer name {port} netns {switch}".split())
            run_ip("-n", switch, "link", "set", port, "master", "lan0", "up")
            lines = []
        lines += [
            f"addr add {host.address}/24 dev lan0",
            "link set lan0 up",
            f"route add {MULTICAST} dev lan0",
        ]
        run_ip("-n", name, batch=lines)


def ferry_specification(
    links: Iterable[Link], control: Path, seed: int, untapped: Iterable[str] = ()
) -> dict[str, Any]:
    """What `topology.ferry` has to know."""
    return {
        "seed": seed,
        "control": str(control),
        "untapped": list(untapped),
        "links": [
            {"from": link.source, "to": link.target, "conditions": asdict(link.conditions)} for link in links
        ],
    }


def write_specification(path: Path, specification: dict[str, Any]) -> None:
    """Leave it where the ferry reads it, and where people can look it up later."""
    path.write_text(json.dumps(specification, indent=1), encoding="utf-8")
