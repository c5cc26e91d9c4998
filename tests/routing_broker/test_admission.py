"""Flags: which topics no longer pass, with which words, and that flags do not flap."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from overlay.bounds import Delays
from overlay.limits import MILLISECOND_NS, SECOND_NS
from overlay.qos import TopicQos
from routing_broker.admission import (
    CHANGES_PER_CHECK,
    CLEAR_AFTER_NS,
    FLAG_AFTER_NS,
    AdmissionWatch,
    FlagChange,
    Interest,
    Network,
)

MS = MILLISECOND_NS
CONFIGURED = Delays(0, 0, 1 * MS, 50 * MS)
PLANT, OFFICE, SHIP = ("ea", "a"), ("eb", "b"), ("ec", "c")
URGENT = TopicQos(deadline_ms=50)
CLOSE = TopicQos(period_ms=10, loss_tolerance=0, retention=8)
"""Covers a failover of 79 ms."""


def interest(qos=URGENT, publishers=(PLANT,), subscribers=(OFFICE,), backup="r2"):
    return Interest(qos, frozenset(publishers), frozenset(subscribers), backup)


def network(a_ms=1.0, b_ms=1.0, c_ms=1.0, backup_ms=0.1, late_ms=0.0):
    return Network(
        {"ea": round(a_ms * MS), "eb": round(b_ms * MS), "ec": round(c_ms * MS)},
        {"r2": round(backup_ms * MS)},
        {"ea": round(late_ms * MS), "eb": 0, "ec": 0},
    )


class Watched:
    """A watch that is asked every second."""

    def __init__(self, **topics):
        self.watch = AdmissionWatch(CONFIGURED)
        self.now_ns = 10**12
        for name, wanted in topics.items():
            self.watch.set_topic(name, wanted)
        self.watch.validate()

    def check(self, measured, seconds=1):
        changes = []
        for _ in range(seconds):
            self.now_ns += SECOND_NS
            changes += self.watch.check(measured, self.now_ns)
            self.watch.validate()
        return changes

    def flag(self, measured):
        return self.check(measured, 1 + FLAG_AFTER_NS // SECOND_NS)

    def clear(self, measured):
        return self.check(measured, 1 + CLEAR_AFTER_NS // SECOND_NS)


def test_a_topic_is_flagged_with_the_numbers_and_the_remedy_when_the_way_gets_too_long():
    watched = Watched(t=interest())
    assert watched.flag(network(a_ms=20, b_ms=25)) == []
    (change,) = watched.flag(network(a_ms=20, b_ms=40))
    assert change.topic == "t"
    assert change.reason == (
        "deadline_ms is 50, but 20 ms to the routing broker and 40 ms from it leave nothing: "
        "set deadline_ms to at least 60"
    )
    assert watched.watch.flags == {"t": change.reason}
    assert watched.flag(network(a_ms=30, b_ms=90)) == [], "it is said once"
    assert watched.clear(network()) == [FlagChange("t", "")]
    assert watched.watch.flags == {}


def test_a_topic_is_flagged_when_a_crash_would_cost_too_many_messages():
    watched = Watched(t=interest(CLOSE))
    assert watched.flag(network(late_ms=25)) == []
    (change,) = watched.flag(network(late_ms=200))
    assert "do not cover a failover of 250 ms" in change.reason
    assert "set retention to at least 26, or loss_tolerance to at least 18" in change.reason
    (change,) = Watched(t=interest(CLOSE)).flag(network(backup_ms=40))
    assert "set retention to at least 10" in change.reason
    assert Watched(t=interest(CLOSE, backup=None)).flag(network(backup_ms=40)) == []


def test_only_ways_between_lans_that_are_used_count():
    far = network(a_ms=1, b_ms=100, c_ms=1)
    assert Watched(t=interest(publishers=[OFFICE], subscribers=[OFFICE])).flag(far) == []
    assert Watched(t=interest(publishers=[PLANT, OFFICE], subscribers=[SHIP])).flag(far) != []
    assert Watched(t=interest(publishers=[PLANT], subscribers=[SHIP])).flag(far) == []
    assert Watched(t=interest(publishers=[], subscribers=[OFFICE])).flag(far) == []
    unknown = Network({"ea": 1 * MS}, {}, {})
    assert Watched(t=interest()).flag(unknown) == [], "who is not connected is not judged"
    # From the farthest LAN to the farthest other one: 45 + 1, not 45 + 45.
    pair = interest(publishers=[OFFICE, PLANT], subscribers=[OFFICE, PLANT])
    assert Watched(t=pair).flag(network(a_ms=1, b_ms=45)) == []
    assert Watched(t=pair).flag(network(a_ms=6, b_ms=45)) != []


def test_a_blink_flags_nothing_and_a_short_relief_clears_nothing():
    watched = Watched(t=interest())
    far, near = network(b_ms=60), network()
    for _ in range(10):
        assert watched.check(far, FLAG_AFTER_NS // SECOND_NS) == []
        assert watched.check(near) == []
    assert len(watched.flag(far)) == 1
    for _ in range(10):
        assert watched.check(near, CLEAR_AFTER_NS // SECOND_NS) == []
        assert watched.check(far) == []
    # Passing with nothing to spare does not lower a flag either.
    assert watched.clear(network(a_ms=10, b_ms=39)) == []
    assert watched.clear(network(a_ms=10, b_ms=35)) == [FlagChange("t", "")]


@given(st.lists(st.booleans(), max_size=100))
def test_a_flag_changes_at_most_as_often_as_its_patience_allows(far):
    watched = Watched(t=interest())
    changed = []
    for second, is_far in enumerate(far):
        changed += [(second, change) for change in watched.check(network(b_ms=60 if is_far else 1))]
    for (before, raised), (after, lowered) in pairwise(changed):
        assert bool(raised.reason) != bool(lowered.reason)
        assert after - before >= (CLEAR_AFTER_NS if raised.reason else FLAG_AFTER_NS) // SECOND_NS
    for second, change in changed:
        patience = (FLAG_AFTER_NS if change.reason else CLEAR_AFTER_NS) // SECOND_NS
        assert far[second - patience : second + 1] == [bool(change.reason)] * (patience + 1)


def test_a_flag_stays_when_a_subscriber_comes_and_goes_when_the_topic_is_helped():
    watched = Watched(t=interest())
    far = network(b_ms=60)
    assert len(watched.flag(far)) == 1
    watched.watch.set_topic("t", interest(subscribers=[OFFICE, SHIP]))
    assert watched.check(far, 10) == []
    watched.watch.set_topic("t", interest(replace(URGENT, deadline_ms=80), subscribers=[OFFICE, SHIP]))
    assert watched.clear(far) == [FlagChange("t", "")]


def test_a_topic_that_leaves_takes_its_flag_with_it():
    watched = Watched(t=interest(), other=interest())
    far = network(b_ms=60)
    assert {change.topic for change in watched.flag(far)} == {"t", "other"}
    watched.watch.set_topic("t", None)
    watched.watch.set_topic("t", None)
    assert watched.check(far) == [FlagChange("t", "")]
    assert list(watched.watch.flags) == ["other"]
    watched.watch.set_topic("t", interest())
    assert [change.topic for change in watched.check(far)] == ["t"], "it is as the others like it"


def test_many_flags_are_raised_a_few_at_a_time():
    count = 2 * CHANGES_PER_CHECK + 1
    watched = Watched(**{f"t{number}": interest() for number in range(count)})
    far = network(b_ms=60)
    assert watched.check(far, FLAG_AFTER_NS // SECOND_NS) == []
    assert [len(watched.check(far)) for _ in range(4)] == [CHANGES_PER_CHECK, CHANGES_PER_CHECK, 1, 0]
    assert len(watched.watch.flags) == count
