"""What a drill is: a script of faults, each with when and whom, over messages that flow.

A script holds no code. `topology.drills.actions` knows what each action does to a testbed and how it
is undone, `topology.drills.engine` plays scripts, `topology.drills.catalogue` has those that come with
Isthmus.
"""

from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """What happens to somebody."""

    KILL = "kill"
    """The process ends at once (SIGKILL); undone, it is started again."""
    FREEZE = "freeze"
    """The process stands still (SIGSTOP) with its connections open; undone, it goes on."""


class Whom(StrEnum):
    """Whom a fault hits; who that is is found out when it happens."""

    LEADER = "leader"
    PRIMARY = "primary"
    """Primary of a topic that crosses the WAN; not the leader, if there is another."""
    BACKUP = "backup"
    """Backup of such a topic; neither a primary of one nor the leader, if there is another."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    action: Action
    whom: Whom
    at_s: float
    """After the calm in which the minimum rate was seen, at the earliest."""
    lasts_s: float
    """Until it is undone, at the least."""
    replaced: bool = False
    """It is not undone before others have taken over."""


@dataclass(frozen=True, slots=True)
class Drill:
    """A script. Faults come one after the other, each to an overlay that is whole."""

    name: str
    summary: str
    """What happens, for people."""
    promise: str
    """What is promised all the same, beside what every drill checks."""
    faults: tuple[Fault, ...]
    seconds: float = 10.0
    """How long messages flow, at least."""
