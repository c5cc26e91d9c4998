"""A topology as hosts, addresses and links."""

import pytest

from topology.errors import DriverError
from topology.model import load_topology
from topology.network import CLOUD, lan_host, read_network


def test_two_lans() -> None:
    plan = read_network(load_topology("two-lans"))
    assert plan.host("plant-1").address == "198.18.1.10"
    assert plan.host("office-1").address == "198.18.2.10"
    assert plan.host("router-3").address == "198.18.100.12"
    assert plan.at("198.18.100.1").name == lan_host(CLOUD)
    assert len({host.address for host in plan.hosts}) == len(plan.hosts) == 9
    on_wan = {host.name for host in plan.hosts if host.has_wan}
    assert {host.name for host in plan.hosts} - on_wan == {lan_host("plant"), lan_host("office")}
    delays = {(link.source, link.target): link.conditions.delay_ms for link in plan.links}
    assert delays == {
        ("plant", CLOUD): 10,
        (CLOUD, "plant"): 10,
        ("office", CLOUD): 5,
        (CLOUD, "office"): 5,
        ("plant", "office"): 15,
        ("office", "plant"): 15,
    }
    with pytest.raises(DriverError, match=r"there is no host nobody: use one of lan\.cloud, router-1"):
        plan.host("nobody")


def test_hosts_of_the_cloud_that_are_apart_are_sites_of_their_own() -> None:
    plan = read_network(load_topology("global"))
    sites = {host.site for host in plan.hosts}
    assert CLOUD not in sites
    assert len(plan.links) == len(sites) * (len(sites) - 1)
    for router in load_topology("global").routers:
        assert plan.host(router.name).site == router.host
    assert plan.host(plan.zookeeper).has_wan
