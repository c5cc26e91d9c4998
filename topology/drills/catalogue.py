"""The drills that come with Isthmus. What each promises follows from docs/guarantees.md."""

from typing import Final

from topology.drills.script import Action, Drill, Fault, Whom

_DRILLS: Final = (
    Drill(
        "leader-killed",
        "the leader is killed and comes back",
        "another routing broker leads in time; healthy brokers keep their topics",
        (Fault(Action.KILL, Whom.LEADER, lasts_s=1, replaced=True),),
    ),
    Drill(
        "primary-killed",
        "a primary is killed and comes back",
        "its backup takes over; healthy brokers keep their topics",
        (Fault(Action.KILL, Whom.PRIMARY, lasts_s=1, replaced=True),),
    ),
    Drill(
        "primary-frozen",
        "a primary stands still until others have its topics, then goes on",
        "it is fenced: what it still sends nobody sees twice or out of order",
        (Fault(Action.FREEZE, Whom.PRIMARY, lasts_s=6, replaced=True),),
    ),
    Drill(
        "backup-killed",
        "a backup is killed and comes back",
        "messages keep flowing; topics get another backup",
        (Fault(Action.KILL, Whom.BACKUP, lasts_s=1, replaced=True),),
        flows=True,
    ),
    Drill(
        "two-primaries-killed",
        "a primary is killed, then the one that took over; one routing broker is left",
        "there was time for a new backup in between: that one takes over",
        (
            Fault(Action.KILL, Whom.PRIMARY, lasts_s=1, replaced=True, undone_last=True),
            Fault(Action.KILL, Whom.NEW_PRIMARY, lasts_s=4),
        ),
    ),
    Drill(
        "edge-killed",
        "an edge broker with clients is killed; its LAN has another one",
        "its clients go on there where they were",
        (Fault(Action.KILL, Whom.EDGE, lasts_s=5),),
    ),
    Drill(
        "zookeeper-follower-killed",
        "one of the ZooKeeper servers, not the leading one, is killed and comes back",
        "messages keep flowing",
        (Fault(Action.KILL_ZOOKEEPER, Whom.ZOOKEEPER_FOLLOWER, lasts_s=4),),
        flows=True,
    ),
    Drill(
        "zookeeper-leader-killed",
        "the leading ZooKeeper server is killed and comes back",
        "messages keep flowing",
        (Fault(Action.KILL_ZOOKEEPER, Whom.ZOOKEEPER_LEADER, lasts_s=4),),
        flows=True,
    ),
    Drill(
        "zookeeper-gone",
        "all of ZooKeeper is gone for a minute",
        "messages keep flowing; the overlay is whole again when ZooKeeper is back",
        (Fault(Action.KILL_ZOOKEEPER, Whom.ZOOKEEPER, lasts_s=60),),
        flows=True,
    ),
    Drill(
        "lan-cut-off",
        "a LAN is cut off from everything for three seconds",
        "what was published meanwhile comes through afterwards, within tolerances",
        (Fault(Action.CUT, Whom.LAN, lasts_s=3),),
    ),
    Drill(
        "one-way-out",
        "nothing leaves a LAN for three seconds, while everything comes in",
        "what was published meanwhile comes through afterwards, within tolerances",
        (Fault(Action.CUT_OUT, Whom.LAN, lasts_s=3),),
    ),
    Drill(
        "one-way-in",
        "nothing comes into a LAN for three seconds, while everything leaves",
        "what was published meanwhile comes through afterwards, within tolerances",
        (Fault(Action.CUT_BACK, Whom.LAN, lasts_s=3),),
    ),
    Drill(
        "router-without-zookeeper",
        "a primary is cut off from ZooKeeper, and from nobody else, until others have its topics",
        "messages keep flowing; healthy brokers keep their topics",
        (Fault(Action.CUT_ZOOKEEPER, Whom.PRIMARY, lasts_s=8, replaced=True),),
        flows=True,
    ),
    Drill(
        "primary-without-backup",
        "a primary and its backup are cut off from each other, and from nobody else",
        "both may dispatch; nobody sees a message twice or out of order",
        (Fault(Action.CUT_ROUTERS, Whom.PRIMARY_AND_BACKUP, lasts_s=5),),
        flows=True,
    ),
    Drill(
        "slow-link",
        "a LAN's link takes ten times as long for five seconds",
        "deadlines may be missed, nothing beyond the tolerance is lost",
        (Fault(Action.SLOW, Whom.LAN, lasts_s=5),),
    ),
    Drill(
        "rolling-restart",
        "every broker is drained, ended and started again, one after the other",
        "clients go over to other edges and topics to other brokers, within tolerances",
        (Fault(Action.RESTART, Whom.EVERY_BROKER, lasts_s=0),),
    ),
    Drill(
        "broker-added-and-drained",
        "a routing broker joins, takes topics over, drains and leaves",
        "the new broker gets topics, and they move on when it leaves",
        (Fault(Action.ADD, Whom.NEW_ROUTER, lasts_s=6),),
    ),
    Drill(
        "wall-clock-jumps",
        "the wall clock of all brokers and applications goes back by an hour",
        "nobody notices: everything is timed by monotonic clocks",
        (Fault(Action.SHIFT_CLOCK, Whom.WALL_CLOCK, lasts_s=4),),
        flows=True,
    ),
)

CATALOGUE: Final = {drill.name: drill for drill in _DRILLS}
