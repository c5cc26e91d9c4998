"""Dispatch-replicate coordination (FRAME, Table 3) and recovery, on the core."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.batch import Run, decode_messages, encode_batch, encode_message
from overlay.bounds import Delays
from overlay.limits import MILLISECOND_NS, OUTBOX_MAX_BYTES
from overlay.outbox import Outbox
from overlay.qos import BEST_EFFORT, TopicQos
from routing_broker.backup import BackupBuffer, Kept, to_ranges
from routing_broker.core import RouterCore
from routing_broker.mode import Mode

MS = MILLISECOND_NS
DELAYS = Delays(0, 1 * MS, MS // 20, 50 * MS)
CATEGORY_2 = TopicQos(100, 100, 0, 1)
CATEGORY_3 = TopicQos(100, 100, 3, 0)
NOW = 10**12


def body_of(topic_id, *sequences, publisher=77, born_ns=NOW):
    runs = [Run(1, encode_message(topic_id, publisher, sequence, born_ns, b"p")) for sequence in sequences]
    return encode_batch(3, 5, 0, runs)[5:]


def sequences(frames):
    return [message.sequence for data in frames for message in decode_messages(data[5:])]


@dataclass
class Pair:
    """A primary with one egress edge and a backup, wired by hand."""

    mode: Mode = Mode.FRAME
    qos: TopicQos = CATEGORY_2
    primary: RouterCore = field(init=False)
    backup: RouterCore = field(init=False)

    def __post_init__(self):
        self.primary = RouterCore(self.mode, DELAYS)
        self.backup = RouterCore(self.mode, DELAYS)
        self.source = self.primary.peer("ea", "a")
        self.primary.set_topic(1, "t", self.qos, {"eb": "b"}, NOW, backup="r2")
        self.backup.set_topic(1, "t", self.qos, {"eb": "b"}, NOW)
        self.link = Outbox()
        self.primary.backup_up("r2", self.link, NOW)
        self.backup.backup_up("r1", Outbox(), NOW)
        self.received = 0
        self.edge = self.primary.peers["eb"].outbox

    def replicate(self):
        frames = self.link.take_frames(10**9, NOW)
        for data in frames:
            self.received += 1
            self.backup.keep("r1", self.received, data[5:], 0)
        return sequences(frames)

    def dispatch(self):
        return sequences(self.edge.take_frames(10**9, NOW))

    def acknowledge(self):
        self.primary.acknowledged(self.edge.acknowledge(self.edge._sent))

    def prune(self):
        self.backup.prune("r1", self.primary.take_prunes().get("r2", []))

    def recover(self):
        self.backup.recover("r1", NOW)
        return sequences(self.backup.peers["eb"].outbox.take_frames(10**9, NOW))

    def validate(self):
        self.primary.validate()
        self.backup.validate()


def test_a_copy_is_replicated_dispatched_and_pruned():
    pair = Pair()
    pair.primary.admit(pair.source, body_of(1, 1, 2), 0, NOW)
    assert pair.replicate() == [1, 2]
    assert pair.backup.statistics().copies_kept == 2
    assert pair.dispatch() == [1, 2]
    pair.prune()
    assert pair.backup.statistics().copies_kept == 2, "written is not dispatched"
    pair.acknowledge()
    pair.prune()
    pair.validate()
    assert pair.backup.statistics().copies_kept == 0
    assert pair.recover() == [], "what was dispatched is not recovered"


def test_a_message_dispatched_first_is_not_replicated():
    pair = Pair()
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    assert pair.dispatch() == [1]
    pair.acknowledge()
    assert pair.replicate() == []
    assert pair.primary.statistics().copies_cancelled == 1
    pair.validate()


def test_what_is_not_dispatched_is_recovered():
    pair = Pair()
    pair.primary.admit(pair.source, body_of(1, 1, 2), 0, NOW)
    pair.replicate()
    pair.dispatch()
    pair.acknowledge()
    pair.prune()
    pair.primary.admit(pair.source, body_of(1, 3), 0, NOW)
    pair.replicate()
    assert pair.recover() == [3]
    assert pair.backup.statistics().messages_recovered == 1
    pair.validate()


def test_what_is_proven_of_the_way_to_subscribers_spares_copies_and_demands_them_again():
    pair = Pair()
    pair.primary.set_topic(1, "t", CATEGORY_2, {"eb": "b", "ec": "c"}, NOW, backup="r2")
    replicated = []
    for sequence, least_ns in enumerate(
        ({"eb": 60 * MS}, {"eb": 60 * MS, "ec": 55 * MS}, {"ec": 55 * MS}), 1
    ):
        pair.primary.set_least_delays(least_ns)
        pair.primary.admit(pair.source, body_of(1, sequence), 0, NOW)
        replicated.append(pair.replicate())
        pair.validate()
    # Dispatch within 100 - 55 ms comes before replication within 100 - 50 ms, but only if it holds for all.
    assert replicated == [[1], [], [3]]


def test_recovered_messages_are_as_urgent_as_they_are_old():
    pair = Pair()
    old, new = body_of(1, 1, born_ns=NOW - 80 * MS), body_of(1, 9, publisher=78, born_ns=NOW)
    pair.primary.admit(pair.source, old, 0, NOW)
    pair.replicate()
    source = pair.backup.peer("ea", "a")
    pair.backup.admit(source, new, 0, NOW)
    assert pair.recover() == [1, 9], "the old one overtakes the new one"


@pytest.mark.parametrize(
    ("mode", "qos", "replicates"),
    [
        (Mode.FRAME, CATEGORY_2, True),
        (Mode.FRAME, CATEGORY_3, False),
        (Mode.FRAME, BEST_EFFORT, False),
        (Mode.FCFS, CATEGORY_3, True),
        (Mode.FCFS_MINUS, CATEGORY_3, True),
    ],
)
def test_each_mode_replicates_what_it_should(mode, qos, replicates):
    pair = Pair(mode, qos)
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    assert pair.replicate() == ([1] if replicates else [])


def test_without_coordination_the_backup_recovers_what_was_dispatched():
    pair = Pair(Mode.FCFS_MINUS)
    for sequence in range(1, 31):
        pair.primary.admit(pair.source, body_of(1, sequence), 0, NOW)
        pair.replicate()
        pair.dispatch()
        pair.acknowledge()
        pair.prune()
    assert pair.recover() == list(range(21, 31)), "its buffer of ten per topic is full"


def test_an_edge_that_cannot_be_reached_costs_nothing_when_the_primary_is_lost():
    """Copies of all that waits for it, not only of the last ten."""
    pair = Pair()
    for sequence in range(1, 101):
        pair.primary.admit(pair.source, body_of(1, sequence), 0, NOW)
        pair.replicate()
    pair.validate()
    assert pair.recover() == list(range(1, 101))


def test_a_new_backup_is_brought_up_to_date():
    pair = Pair()
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    pair.replicate()
    pair.primary.backup_down("r2")
    pair.primary.admit(pair.source, body_of(1, 2), 0, NOW)
    third = Outbox()
    pair.primary.backup_up("r3", third, NOW)
    pair.primary.set_topic(1, "t", CATEGORY_2, {"eb": "b"}, NOW, backup="r3")
    assert sequences(third.take_frames(10**9, NOW)) == [1, 2]
    pair.validate()


def test_an_edge_that_leaves_does_not_keep_copies_alive():
    pair = Pair()
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    pair.replicate()
    pair.primary.remove_peer("eb")
    pair.prune()
    assert pair.primary.statistics().copies_undispatched == 0
    assert pair.backup.statistics().copies_kept == 0


def test_urgent_messages_leave_first_and_fcfs_keeps_the_order():
    for mode, expected in ((Mode.FRAME, [2, 1]), (Mode.FCFS, [1, 2])):
        core = RouterCore(mode, DELAYS)
        core.set_topic(1, "bulk", TopicQos(500, 500, 0, 1), {"eb": "b"}, NOW)
        core.set_topic(2, "alarm", TopicQos(50, 50, 0, 2), {"eb": "b"}, NOW)
        source = core.peer("ea", "a")
        core.admit(source, body_of(1, 1), 0, NOW)
        core.admit(source, body_of(2, 2, publisher=78), 0, NOW)
        assert sequences(core.peers["eb"].outbox.take_frames(10**9, NOW)) == expected


def test_an_old_message_gets_a_tighter_deadline():
    core = RouterCore(Mode.FRAME, DELAYS)
    core.set_topic(1, "t", TopicQos(100, 100, 0, 2), {"eb": "b"}, NOW)
    source = core.peer("ea", "a")
    core.admit(source, body_of(1, 1, born_ns=NOW - 1 * MS), 0, NOW)
    core.admit(source, body_of(1, 2, publisher=78, born_ns=NOW - 60 * MS), 0, NOW)
    assert sequences(core.peers["eb"].outbox.take_frames(10**9, NOW)) == [2, 1]


STEPS = st.lists(
    st.sampled_from(["admit", "replicate", "dispatch", "acknowledge", "prune"]), min_size=1, max_size=60
)


@settings(max_examples=200)
@given(STEPS)
def test_recovery_finds_everything_that_was_replicated_and_not_dispatched(steps):
    """Whatever the interleaving, crash or not: a copy is at the backup until the edge has the message."""
    pair = Pair()
    sequence = 0
    replicated, acknowledged, in_flight = set(), set(), []
    for step in steps:
        if step == "admit":
            sequence += 1
            pair.primary.admit(pair.source, body_of(1, sequence), 0, NOW)
        elif step == "replicate":
            replicated.update(pair.replicate())
        elif step == "dispatch":
            in_flight.extend(pair.dispatch())
        elif step == "acknowledge":
            acknowledged.update(in_flight)
            in_flight.clear()
            pair.acknowledge()
        else:
            pair.prune()
        pair.validate()
    recovered = pair.recover()
    assert recovered == sorted(recovered)
    assert replicated - acknowledged <= set(recovered)


def test_the_buffer_is_a_ring_and_prunes_ranges():
    buffer = BackupBuffer(capacity_messages=5)
    for number in range(1, 5):
        buffer.keep(number, Kept(bytes(10), 0, 2))
        buffer.validate()
    assert len(buffer) == 4
    assert buffer.evicted == 4
    buffer.prune([(1, 3)])
    assert len(buffer) == 2
    buffer.prune([(0, 10**15)])
    assert len(buffer) == 0
    assert to_ranges([5, 1, 2, 3, 9]) == [(1, 3), (5, 5), (9, 9)]


def test_the_buffer_pushes_nothing_out_while_there_is_memory():
    buffer = BackupBuffer(capacity_messages=2, capacity_bytes=40)
    for number in range(1, 5):
        buffer.keep(number, Kept(bytes(10), 0, 1))
        buffer.validate()
    assert (len(buffer), buffer.evicted) == (4, 0)
    buffer.keep(5, Kept(bytes(30), 0, 1))
    buffer.validate()
    assert (len(buffer), buffer.evicted) == (2, 3), "the messages it has room for whatever they take"
    buffer.prune([(4, 4)])
    buffer.keep(6, Kept(bytes(10), 0, 1))
    buffer.validate()
    assert [kept.body for kept in buffer.recover()] == [bytes(30), bytes(10)]
    buffer.validate()


# Changing backups


def kept_by(core, router):
    """Sequences of the copies a core holds for a router."""
    return [
        message.sequence
        for kept in core._kept[router]._frames.values()
        for message in decode_messages(kept.body)
    ]


class Backup:
    """One more routing broker the primary of a pair is linked to."""

    def __init__(self, pair, name):
        self.name = name
        self.pair = pair
        self.core = RouterCore(pair.mode, DELAYS)
        for topic_id in (1, 2):
            self.core.set_topic(topic_id, f"t{topic_id}", CATEGORY_2, {"eb": "b"}, NOW)
        self.core.backup_up("r1", Outbox(), NOW)
        self.link = Outbox()
        self.received = 0

    def up(self):
        self.pair.primary.backup_up(self.name, self.link, NOW)

    def replicate(self):
        frames = self.link.take_frames(10**9, NOW)
        for data in frames:
            self.received += 1
            self.core.keep("r1", self.received, data[5:], 0)
        return sequences(frames)

    def prune(self, prunes):
        self.core.prune("r1", prunes.get(self.name, []))


def test_a_new_backup_of_one_topic_takes_over_its_copies_and_no_others():
    pair = Pair()
    third = Backup(pair, "r3")
    third.up()
    pair.primary.set_topic(2, "u", CATEGORY_2, {"eb": "b"}, NOW, backup="r2")
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    pair.primary.admit(pair.source, body_of(2, 2), 0, NOW)
    pair.primary.set_topic(1, "t", CATEGORY_2, {"eb": "b"}, NOW, backup="r3")
    assert third.replicate() == [1]
    pair.replicate()
    assert pair.dispatch() == [1, 2]
    prunes = pair.primary.take_prunes()
    pair.backup.prune("r1", prunes.get("r2", []))
    assert 2 in kept_by(pair.backup, "r1")
    pair.acknowledge()
    prunes = pair.primary.take_prunes()
    third.prune(prunes)
    pair.backup.prune("r1", prunes.get("r2", []))
    pair.validate()
    assert kept_by(pair.backup, "r1") == kept_by(third.core, "r1") == []


def test_what_waits_for_a_backup_is_not_put_there_again_when_another_topic_joins():
    pair = Pair()
    pair.primary.set_topic(2, "u", CATEGORY_2, {"eb": "b"}, NOW, backup="r9")
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    pair.primary.set_topic(2, "u", CATEGORY_2, {"eb": "b"}, NOW, backup="r2")
    assert pair.replicate() == [1]


def test_copies_at_a_backup_that_was_replaced_move_to_the_new_one():
    """Else they are gone when the old backup goes, although the new one is there."""
    pair = Pair()
    third = Backup(pair, "r3")
    third.up()
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    assert pair.replicate() == [1]
    pair.primary.set_topic(1, "t", CATEGORY_2, {"eb": "b"}, NOW, backup="r3")
    assert third.replicate() == [1]
    pair.prune()
    assert kept_by(pair.backup, "r1") == [], "the old one need not keep it"
    pair.primary.backup_down("r2")
    pair.dispatch()
    pair.acknowledge()
    third.prune(pair.primary.take_prunes())
    assert kept_by(third.core, "r1") == []
    pair.validate()


def test_copies_for_a_backup_that_is_not_there_yet_stay_where_they_are():
    pair = Pair()
    third = Backup(pair, "r3")
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    pair.replicate()
    pair.primary.set_topic(1, "t", CATEGORY_2, {"eb": "b"}, NOW, backup="r3")
    pair.prune()
    assert kept_by(pair.backup, "r1") == [1]
    third.up()
    assert third.replicate() == [1]
    pair.prune()
    assert kept_by(pair.backup, "r1") == []
    pair.validate()


@pytest.mark.parametrize("sent_before", [True, False])
def test_a_prune_never_hits_a_frame_of_a_later_connection(sent_before):
    pair = Pair()
    third = Backup(pair, "r3")
    third.up()
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    if sent_before:
        pair.replicate()
    pair.primary.set_topic(1, "t", CATEGORY_2, {"eb": "b"}, NOW, backup="r3")
    third.replicate()
    pair.replicate()
    pair.primary.backup_down("r2")
    pair.backup.recover("r1", NOW)
    # r2 is back as a new process and counts from one; it becomes the backup again.
    pair.backup.backup_up("r1", Outbox(), NOW)
    pair.received = 0
    pair.link = Outbox()
    pair.primary.backup_up("r2", pair.link, NOW)
    pair.primary.set_topic(1, "t", CATEGORY_2, {"eb": "b"}, NOW, backup="r2")
    pair.dispatch()
    pair.primary.admit(pair.source, body_of(1, 2), 0, NOW)
    pair.replicate()
    pair.acknowledge()  # of the first
    pair.prune()
    assert 2 in kept_by(pair.backup, "r1")
    pair.validate()


MOVES = st.lists(
    st.sampled_from(
        ["admit 1", "admit 2", "admit 1 2", "send r2", "send r3", "dispatch", "acknowledge", "prune"]
        + [f"topic {topic} at {backup}" for topic in (1, 2) for backup in ("r2", "r3")]
        + ["r2 down", "r3 down", "r2 up", "r3 up"]
    ),
    max_size=60,
)


class Moving:
    """A primary with two topics, and two backups that come and go; each word of MOVES is a method."""

    def __init__(self):
        self.pair = Pair()
        self.pair.primary.backup_down("r2")
        self.backups = {}
        self.assigned = {}
        self.topic_of = {}
        self.in_flight, self.acknowledged = [], set()
        for topic in ("1", "2"):
            self.topic(topic, "at", "r2")
        self.up("r2")

    def step(self, words):
        first, *rest = words.split()
        if first in ("r2", "r3"):
            getattr(self, rest[0])(first)
        else:
            getattr(self, first)(*rest)
        self.pair.primary.validate()

    def up(self, name):
        """A new process each time."""
        if name not in self.backups:
            self.backups[name] = Backup(self.pair, name)
            self.backups[name].up()

    def down(self, name):
        if self.backups.pop(name, None) is not None:
            self.pair.primary.backup_down(name)

    def topic(self, topic, _at, name):
        self.assigned[int(topic)] = name
        self.pair.primary.set_topic(int(topic), f"t{topic}", CATEGORY_2, {"eb": "b"}, NOW, backup=name)

    def admit(self, *topics):
        runs = []
        for topic in map(int, topics):
            sequence = len(self.topic_of) + 1
            self.topic_of[sequence] = topic
            runs.append(Run(1, encode_message(topic, 70 + topic, sequence, NOW, b"p")))
        self.pair.primary.admit(self.pair.source, encode_batch(3, 5, 0, runs)[5:], 0, NOW)

    def send(self, name):
        if name in self.backups:
            self.backups[name].replicate()

    def dispatch(self):
        self.in_flight += self.pair.dispatch()

    def acknowledge(self):
        self.acknowledged.update(self.in_flight)
        self.in_flight.clear()
        self.pair.acknowledge()

    def prune(self):
        prunes = self.pair.primary.take_prunes()
        assert prunes.keys() <= self.backups.keys()
        for backup in self.backups.values():
            backup.prune(prunes)

    def held(self):
        """What the backups hold, by name."""
        return {name: set(kept_by(backup.core, "r1")) for name, backup in self.backups.items()}


@settings(max_examples=300)
@given(MOVES)
def test_whatever_backups_do_copies_that_are_needed_stay_and_others_go(steps):
    moving = Moving()
    for step in steps:
        moving.step(step)
    for backup in moving.backups.values():
        backup.replicate()
    moving.prune()
    held = moving.held()
    if len(set(moving.assigned.values())) == 1:
        (name,) = set(moving.assigned.values())
        if name in held:
            assert moving.topic_of.keys() - moving.acknowledged <= held[name]
    moving.dispatch()
    moving.acknowledge()
    moving.prune()
    assert not any(moving.held().values()), "all is dispatched, nothing need be kept"
    assert moving.pair.primary.statistics().copies_undispatched == 0


def test_what_a_stalled_backup_does_not_take_is_not_kept_for_ever():
    pair = Pair()
    size = 400_000
    count = OUTBOX_MAX_BYTES // size + 20
    for sequence in range(1, count + 1):
        message = encode_message(1, 77, sequence, NOW, bytes(size))
        pair.primary.admit(pair.source, encode_batch(3, 5, 0, [Run(1, message)])[5:], 0, NOW)
        pair.validate()
    assert pair.link.take_lost_tickets() == []
    assert pair.link.statistics().messages_dropped >= 20
    again = Outbox()
    pair.primary.backup_down("r2")
    pair.primary.backup_up("r2", again, NOW)
    assert again.statistics().waiting_messages == pair.primary.statistics().copies_undispatched > 0


def test_a_copy_nobody_can_read_does_not_keep_the_others_from_being_recovered():
    pair = Pair()
    whole = body_of(1, 1, 2)
    for number, body in enumerate((whole[:-1], body_of(1, 3), whole + b"x"), start=1):
        pair.backup.keep("r1", number, body, 0)
    assert pair.recover() == [3]
    assert pair.backup.statistics().messages_recovered == 1
    pair.validate()


def test_a_backup_dispatches_what_a_replaced_primary_left_with_it():
    # Found by simulation: a topic moved away from a living primary that could not reach an edge, and
    # what waited there for that edge was lost although copies of it were at the new primary.
    pair = Pair()
    pair.backup.set_topic(1, "t", pair.qos, {"eb": "b"}, NOW, primary="r1")
    pair.primary.admit(pair.source, body_of(1, 1, 2), 0, NOW)
    pair.replicate()
    touched = pair.backup.set_topic(1, "t", pair.qos, {"eb": "b"}, NOW, backup="r1")
    assert "eb" in {peer.name for peer in touched}
    assert sequences(pair.backup.peers["eb"].outbox.take_frames(10**9, NOW)) == [1, 2]
    pair.validate()


def test_what_was_accepted_without_a_backup_is_copied_when_one_comes():
    # Found by simulation: a backup lost its session for a while, and what was accepted meanwhile was
    # never copied; later messages overtook it by way of the backup.
    pair = Pair()
    pair.primary.set_topic(1, "t", pair.qos, {"eb": "b"}, NOW)
    pair.primary.admit(pair.source, body_of(1, 1), 0, NOW)
    assert pair.replicate() == []
    pair.primary.set_topic(1, "t", pair.qos, {"eb": "b"}, NOW, backup="r2")
    assert pair.replicate() == [1]
    pair.dispatch()
    pair.acknowledge()
    pair.prune()
    assert pair.recover() == []
    pair.validate()
