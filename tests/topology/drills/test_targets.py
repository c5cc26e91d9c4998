"""Who is hit when."""

import pytest

from topology.drills.script import Whom
from topology.drills.targets import candidates
from topology.model import load_topology
from topology.snapshot import BrokerView, Snapshot, TopicView

TOPOLOGY = load_topology("wind-farm")


def broker(name: str, leader: bool = False, clients: int = 0) -> BrokerView:
    role = "router" if name.startswith("router") else "edge"
    return BrokerView(name, role, "", "", "", "", True, True, leader, int(leader), 0, clients, ())


def topic(name: str, primary: str, backup: str) -> TopicView:
    return TopicView(name, primary, backup, (), 0, 0, {}, (), ())


SNAPSHOT = Snapshot(
    brokers=(
        *(broker("router-1", leader=True), broker("router-2"), broker("router-3")),
        *(broker("farm-1", clients=3), broker("farm-2"), broker("control-1", clients=1)),
    ),
    topics=(
        topic("turbine/alarm", "router-1", "router-2"),
        topic("turbine/power", "router-2", "router-3"),
        # It stays in its LAN: whoever serves it carries nothing.
        topic("turbine/vibration", "router-3", "router-1"),
    ),
)


@pytest.mark.parametrize(
    ("whom", "expected"),
    [
        (Whom.LEADER, {"router-1"}),
        (Whom.PRIMARY, {"router-2"}),
        (Whom.BACKUP, {"router-3"}),
        (Whom.NEW_PRIMARY, {"router-1"}),
        (Whom.PRIMARY_AND_BACKUP, {"router-1,router-2", "router-2,router-3"}),
        (Whom.EDGE, {"farm-1", "control-1"}),
        (Whom.LAN, {"farm", "control"}),
    ],
)
def test_roles(whom: Whom, expected: set[str]) -> None:
    assert candidates(whom, SNAPSHOT, TOPOLOGY, orphans=["turbine/alarm", "turbine/vibration"]) == expected


def test_the_leader_is_hit_if_it_is_the_only_primary() -> None:
    snapshot = Snapshot(SNAPSHOT.brokers, SNAPSHOT.topics[:1])
    assert candidates(Whom.PRIMARY, snapshot, TOPOLOGY, []) == {"router-1"}
    assert candidates(Whom.BACKUP, snapshot, TOPOLOGY, []) == {"router-2"}
