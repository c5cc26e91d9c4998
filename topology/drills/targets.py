"""Who is hit: from a role to a name, as the testbed is at that moment. Pure."""

import random
from collections.abc import Iterable

from topology.drills.script import Whom
from topology.errors import TopologyError
from topology.model import Topology
from topology.snapshot import Snapshot


def choose(whom: Whom, snapshot: Snapshot, topology: Topology, randomness: random.Random) -> str:
    """The name of somebody in this role. Raises TopologyError if there is nobody."""
    crossing = [
        pair
        for topic, pair in sorted(snapshot.assignment.items())
        if topic in topology.topics and topology.crosses_wan(topic)
    ]
    primaries = {primary for primary, _ in crossing}
    backups = {backup for _, backup in crossing}
    if whom is Whom.LEADER:
        return _one_of([snapshot.leader], whom, topology, randomness)
    if whom is Whom.PRIMARY:
        return _one_of(primaries - {snapshot.leader} or primaries, whom, topology, randomness)
    return _one_of(
        backups - primaries - {snapshot.leader} or backups - {snapshot.leader} or backups,
        whom,
        topology,
        randomness,
    )


def _one_of(candidates: Iterable[str], whom: Whom, topology: Topology, randomness: random.Random) -> str:
    names = sorted(name for name in candidates if name)
    if not names:
        raise TopologyError(f"topology {topology.name} has no {whom} to hit: choose another one")
    return randomness.choice(names)
