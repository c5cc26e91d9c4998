"""What a drill is: a script of faults, each with when and whom, over messages that flow.

A script holds no code. `topology.drills.actions` knows what each action does to a testbed and how it
is undone, `topology.drills.targets` who is meant, `topology.drills.engine` plays scripts, and
`topology.drills.catalogue` has those that come with Isthmus.
"""

from dataclasses import dataclass
from enum import StrEnum

from topology.settling import STABLE_S


class Action(StrEnum):
    """What happens to somebody."""

    KILL = "kill"
    """A broker's process ends at once (SIGKILL); undone, it is started again."""
    FREEZE = "freeze"
    """A broker's process stands still (SIGSTOP) with its connections open; undone, it goes on."""
    RESTART = "restart"
    """A broker is asked to end (SIGTERM) and does, having handed over; undone, it is started again."""
    ADD = "add"
    """Another routing broker joins; undone, it drains and leaves."""
    KILL_ZOOKEEPER = "kill-zookeeper"
    """ZooKeeper servers end at once; undone, they are started on their data."""
    CUT = "cut"
    """A LAN is cut off from everything else; undone, what waited comes through."""
    CUT_OUT = "cut-out"
    """Nothing leaves a LAN any more, while everything still comes in."""
    CUT_BACK = "cut-back"
    """Nothing comes into a LAN any more, while everything still leaves."""
    CUT_ZOOKEEPER = "cut-zookeeper"
    """A routing broker is cut off from ZooKeeper only."""
    CUT_ROUTERS = "cut-routers"
    """Two routing brokers are cut off from each other only."""
    SLOW = "slow"
    """A LAN's link takes ten times as long."""
    SHIFT_CLOCK = "shift-clock"
    """The wall clock of all brokers and applications jumps; undone, it jumps back."""


class Whom(StrEnum):
    """Whom a fault hits; who that is is found out when it happens."""

    LEADER = "leader"
    PRIMARY = "primary"
    """Primary of a topic that crosses the WAN; not the leader, if there is another."""
    BACKUP = "backup"
    """Backup of such a topic; neither a primary of one nor the leader, if there is another."""
    NEW_PRIMARY = "new primary"
    """Primary of a topic whose primary was hit before."""
    PRIMARY_AND_BACKUP = "primary and backup"
    """Those of one topic that crosses the WAN."""
    EDGE = "edge"
    """An edge in a LAN that has another one."""
    EVERY_BROKER = "every broker"
    """All brokers, one after the other."""
    NEW_ROUTER = "new router"
    """One that is not there yet."""
    LAN = "LAN"
    ZOOKEEPER_FOLLOWER = "ZooKeeper follower"
    ZOOKEEPER_LEADER = "ZooKeeper leader"
    ZOOKEEPER = "all of ZooKeeper"
    WALL_CLOCK = "wall clock"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    action: Action
    whom: Whom
    lasts_s: float
    """Until it is undone, at the least."""
    at_s: float = 0.0
    """After the calm in which the minimum rate was seen, at the earliest."""
    replaced: bool = False
    """It is not undone before others have taken over."""
    undone_last: bool = False
    """It is not undone before the faults after it are."""


@dataclass(frozen=True, slots=True)
class Drill:
    """A script. Faults come one after the other, each to an overlay that is whole."""

    name: str
    summary: str
    """What happens, for people."""
    promise: str
    """What is promised all the same, beside what every drill checks."""
    faults: tuple[Fault, ...]
    seconds: float = 8.0
    """How long messages flow, at least."""
    settled_s: float = STABLE_S
    """Before each fault the assignment must have been the same for so long."""
    churns: bool = False
    """Clients and topics come and go, and no broker may grow."""
    flows: bool = False
    """Messages keep flowing through the fault: no stream may fall silent."""

    @property
    def shifts_clock(self) -> bool:
        """It needs a testbed whose wall clock can be shifted."""
        return any(fault.action is Action.SHIFT_CLOCK for fault in self.faults)
