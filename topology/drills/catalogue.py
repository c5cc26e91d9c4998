"""The drills that come with Isthmus. What each promises follows from docs/guarantees.md."""

from typing import Final

from topology.drills.script import Action, Drill, Fault, Whom

_DRILLS: Final = (
    Drill(
        "leader-killed",
        "the leader is killed and comes back",
        "another routing broker leads in time; healthy brokers keep their topics",
        (Fault(Action.KILL, Whom.LEADER, at_s=0.0, lasts_s=1.0, replaced=True),),
    ),
    Drill(
        "primary-killed",
        "a primary is killed and comes back",
        "its backup takes over; healthy brokers keep their topics",
        (Fault(Action.KILL, Whom.PRIMARY, at_s=0.0, lasts_s=1.0, replaced=True),),
    ),
)

CATALOGUE: Final = {drill.name: drill for drill in _DRILLS}
