"""Who is hit: from a role to names, as the testbed is at that moment."""

import random
from collections.abc import Collection, Iterable, Mapping

from topology.drills.script import Whom
from topology.driver import Driver
from topology.errors import TopologyError
from topology.model import Topology
from topology.snapshot import Snapshot


async def choose(
    whom: Whom, driver: Driver, snapshot: Snapshot, randomness: random.Random, orphans: Collection[str]
) -> list[str]:
    """Names of those in this role, one fault each; servers and pairs that go together share a name.

    `orphans` are topics whose primary was hit before. Raises TopologyError if there is nobody.
    """
    if whom is Whom.ZOOKEEPER_LEADER:
        return [await driver.zookeeper_leader()]
    if whom is Whom.ZOOKEEPER_FOLLOWER:
        leader = await driver.zookeeper_leader()
        return [_one_of(set(driver.zookeeper_servers()) - {leader}, whom, driver.topology, randomness)]
    if whom is Whom.ZOOKEEPER:
        return [",".join(driver.zookeeper_servers())]
    if whom is Whom.EVERY_BROKER:
        return list(driver.nodes)
    if whom is Whom.NEW_ROUTER:
        return [f"router-{1 + len(driver.routers)}"]
    if whom is Whom.WALL_CLOCK:
        return ["the wall clock"]
    return [_one_of(candidates(whom, snapshot, driver.topology, orphans), whom, driver.topology, randomness)]


def candidates(whom: Whom, snapshot: Snapshot, topology: Topology, orphans: Collection[str]) -> set[str]:
    """Everybody a fault may hit. Pure."""
    crossing = {
        topic: pair
        for topic, pair in snapshot.assignment.items()
        if topic in topology.topics and topology.crosses_wan(topic)
    }
    primaries = {primary for primary, _ in crossing.values()}
    backups = {backup for _, backup in crossing.values()}
    leader = {snapshot.leader}
    if whom is Whom.LEADER:
        return leader
    if whom is Whom.PRIMARY:
        return primaries - leader or primaries
    if whom is Whom.BACKUP:
        return backups - primaries - leader or backups - leader or backups
    if whom is Whom.NEW_PRIMARY:
        return {crossing[topic][0] for topic in orphans if topic in crossing}
    if whom is Whom.PRIMARY_AND_BACKUP:
        return {f"{primary},{backup}" for primary, backup in crossing.values() if primary and backup}
    if whom is Whom.EDGE:
        return _edges_in_use(snapshot, topology)
    assert whom is Whom.LAN, f"{whom} is nobody in particular"
    return {lan.name for lan in topology.lans if _crosses(topology, lan.name)}


def _edges_in_use(snapshot: Snapshot, topology: Topology) -> set[str]:
    clients: Mapping[str, int] = {broker.name: broker.clients for broker in snapshot.brokers}
    return {edge for lan in topology.lans if len(lan.edges) > 1 for edge in lan.edges if clients.get(edge)}


def _crosses(topology: Topology, lan: str) -> bool:
    return any(
        topology.crosses_wan(topic)
        and lan in topology.publishing_lans(topic) | topology.subscribing_lans(topic)
        for topic in topology.topics
    )


def _one_of(names: Iterable[str], whom: Whom, topology: Topology, randomness: random.Random) -> str:
    found = sorted(name for name in names if name)
    if not found:
        raise TopologyError(f"topology {topology.name} has no {whom} to hit: choose another one")
    return randomness.choice(found)
