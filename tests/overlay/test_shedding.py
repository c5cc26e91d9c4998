"""Shedding keeps within what a topic allows, whatever was lost before."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import MESSAGE_HEADER, Run, encode_message
from overlay.bounds import Delays, needs_replication
from overlay.limits import MILLISECOND_NS
from overlay.qos import BEST_EFFORT, TopicQos
from overlay.shedding import Shedder, crash_losses, shares_of
from overlay.urgency import SHEDDABLE, urgency


def run_of(*messages):
    return Run(len(messages), b"".join(encode_message(1, pub, seq, 0, b"x") for pub, seq in messages))


def contents(run):
    found, offset = [], 0
    while run is not None and offset < len(run.data):
        _, publisher, sequence, _, length = MESSAGE_HEADER.unpack_from(run.data, offset)
        found.append((publisher, sequence))
        offset += MESSAGE_HEADER.size + length
    return found


@given(
    tolerance=st.integers(1, 5),
    arrivals=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), max_size=120),
)
def test_never_more_losses_in_a_row_than_tolerated(tolerance, arrivals):
    """Some messages are lost before this hop (at most the tolerance in a row), some meet no overload."""
    shedder = Shedder()
    sequences = {1: 0, 2: 0, 3: 0}
    lost_before = {1: 0, 2: 0, 3: 0}
    delivered = {1: [0], 2: [0], 3: [0]}
    for publisher, overloaded, loses in arrivals:
        sequences[publisher] += 1
        sequence = sequences[publisher]
        behind = sequence - delivered[publisher][-1]
        if loses and lost_before[publisher] + 1 < behind <= tolerance:
            continue
        run = run_of((publisher, sequence))
        kept = shedder.sift(run, tolerance) if overloaded else run
        if kept is not None:
            delivered[publisher].append(sequence)
    for passed in delivered.values():
        gaps = [after - before - 1 for before, after in itertools.pairwise(passed[1:])]
        assert max(gaps, default=0) <= tolerance


@given(
    period_ms=st.none() | st.integers(1, 200),
    deadline_ms=st.none() | st.integers(1, 500),
    tolerance=st.integers(0, 20),
    retention=st.integers(0, 5),
    failover_ms=st.integers(0, 100),
)
def test_what_all_hops_shed_and_what_a_crash_takes_add_up_to_the_tolerance(
    period_ms, deadline_ms, tolerance, retention, failover_ms
):
    qos = TopicQos(period_ms, deadline_ms, tolerance, retention)
    delays = Delays(0, 0, MILLISECOND_NS, failover_ms * MILLISECOND_NS)
    taken, shares = crash_losses(qos, delays), shares_of(qos, delays)
    assert taken + sum(shares) == tolerance
    assert max(shares) - min(shares) <= 1 and list(shares) == sorted(shares, reverse=True)
    if needs_replication(qos, delays):
        assert taken == tolerance
    else:
        assert not needs_replication(replace(qos, loss_tolerance=taken), delays)
        assert taken == 0 or needs_replication(replace(qos, loss_tolerance=taken - 1), delays)


def test_best_effort_may_be_shed_whole_and_frames_categories_leave_the_router_one_message():
    delays = Delays(0, MILLISECOND_NS, MILLISECOND_NS // 20, 50 * MILLISECOND_NS)
    assert shares_of(BEST_EFFORT, delays) is None
    assert shares_of(TopicQos(50, 50, 3, 0), delays) == (1, 0, 0)
    assert shares_of(TopicQos(100, 100, 3, 0), delays) == (1, 0, 0)


def test_best_effort_goes_first_and_topics_without_tolerance_pass():
    shedder = Shedder()
    run = run_of((1, 1), (2, 1))
    assert shedder.sift(run, None) is None
    assert shedder.sift(run, 0) is run


def test_what_is_kept_is_byte_for_byte_what_came():
    shedder = Shedder()
    assert contents(shedder.sift(run_of((1, 1), (1, 2), (1, 3), (1, 4)), 2)) == [(1, 1), (1, 4)]
    assert contents(shedder.sift(run_of((1, 5), (1, 6), (2, 9), (1, 7)), 2)) == [(2, 9), (1, 7)]
    shedder.calm()
    assert contents(shedder.sift(run_of((1, 8)), 2)) == [(1, 8)]


def test_a_resent_message_is_not_shed():
    """It may be the one that fills a gap."""
    shedder = Shedder()
    shedder.sift(run_of((1, 10)), 3)
    assert contents(shedder.sift(run_of((1, 8)), 3)) == [(1, 8)]


def test_urgency_orders_deadlines_and_marks_best_effort():
    classes = [urgency(TopicQos(deadline_ms=deadline)) for deadline in (5, 20, 50, 100, 500, 5000)]
    assert classes == sorted(set(classes))
    assert urgency(TopicQos()) > max(classes)
    assert urgency(BEST_EFFORT) & SHEDDABLE
    assert not any(level & SHEDDABLE for level in classes)
