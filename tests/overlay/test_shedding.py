"""Shedding keeps within what a topic allows, wherever and however often it happens."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from overlay.batch import MESSAGE_HEADER, Run, encode_message
from overlay.bounds import Delays, needs_replication
from overlay.limits import MILLISECOND_NS
from overlay.outbox import OVERLOADED_AFTER_NS, Outbox
from overlay.qos import BEST_EFFORT, TopicQos
from overlay.shedding import crash_losses, keep_every, relieve, sift
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


TOLERANT = {
    "period_ms": st.none() | st.integers(1, 200),
    "deadline_ms": st.none() | st.integers(1, 500),
    "tolerance": st.integers(0, 20),
    "retention": st.integers(0, 5),
    "failover_ms": st.integers(0, 100),
}


def requirements(period_ms, deadline_ms, tolerance, retention, failover_ms):
    delays = Delays(0, 0, MILLISECOND_NS, failover_ms * MILLISECOND_NS)
    return TopicQos(period_ms, deadline_ms, tolerance, retention), delays


@given(**TOLERANT, seed=st.integers(0, 2**32))
def test_what_all_hops_shed_and_what_a_crash_takes_stay_within_the_tolerance(seed, **values):
    """Three hops are overloaded or not at any message, and a crash takes some neighbours at any place."""
    qos, delays = requirements(**values)
    every, taken = keep_every(qos, delays), crash_losses(qos, delays)
    rng = random.Random(seed)
    crash = rng.randrange(1, 60)
    delivered = [0]
    for sequence in range(1, 80):
        run = run_of((1, sequence))
        for _ in range(3):
            if run is not None and rng.random() < 0.7:
                run = sift(run, every)
        if run is not None and not crash <= sequence < crash + taken:
            delivered.append(sequence)
    gaps = [after - before - 1 for before, after in itertools.pairwise(delivered)]
    assert max(gaps, default=0) <= qos.loss_tolerance


@given(**TOLERANT)
def test_as_much_may_be_shed_as_the_tolerance_allows(**values):
    qos, delays = requirements(**values)
    every, taken = keep_every(qos, delays), crash_losses(qos, delays)
    if needs_replication(qos, delays):
        assert (taken, every) == (qos.loss_tolerance, 1)
    else:
        assert not needs_replication(replace(qos, loss_tolerance=taken), delays)
        assert taken == 0 or needs_replication(replace(qos, loss_tolerance=taken - 1), delays)
    for more in range(every + 1, qos.loss_tolerance + 2):
        # A crash that takes one of those that pass, and as many of them as it can.
        passing = math.ceil(taken / more)
        assert (passing + 1) * more - 1 > qos.loss_tolerance


def test_best_effort_may_be_shed_whole_and_of_frames_tolerant_categories_every_other_message():
    delays = Delays(0, MILLISECOND_NS, MILLISECOND_NS // 20, 50 * MILLISECOND_NS)
    assert keep_every(BEST_EFFORT, delays) is None
    assert keep_every(TopicQos(50, 50, 3, 0), delays) == 2
    assert keep_every(TopicQos(100, 100, 3, 0), delays) == 2
    assert keep_every(TopicQos(100, 100, 0, 1), delays) == 1


def test_best_effort_goes_first_and_topics_without_tolerance_pass():
    run = run_of((1, 1), (2, 1))
    assert sift(run, None) is None
    assert sift(run, 1) is run


def test_what_is_kept_is_byte_for_byte_what_came():
    assert contents(sift(run_of((1, 1), (1, 2), (1, 3), (1, 4)), 3)) == [(1, 3)]
    assert contents(sift(run_of((1, 5), (1, 6), (2, 9), (1, 7)), 3)) == [(1, 6), (2, 9)]
    assert sift(run_of((1, 7), (1, 8)), 3) is None


def test_only_an_overloaded_outbox_is_relieved_and_what_is_shed_is_counted():
    dropped = Counter()
    outbox = Outbox()
    run = run_of((1, 1), (1, 2))
    assert relieve(outbox, run, 2, dropped, 0) is run
    outbox.take_frames(1, 0)
    outbox.append(1, 1, 1, 0, run_of((9, 9)), 0)
    late_ns = OVERLOADED_AFTER_NS + 1
    assert contents(relieve(outbox, run, 2, dropped, late_ns)) == [(1, 2)]
    assert relieve(outbox, run, None, dropped, late_ns) is None
    assert dropped == {"shed_tolerated": 1, "shed_best_effort": 2}


def test_urgency_orders_deadlines_and_marks_best_effort():
    classes = [urgency(TopicQos(deadline_ms=deadline)) for deadline in (5, 20, 50, 100, 500, 5000)]
    assert classes == sorted(set(classes))
    assert urgency(TopicQos()) > max(classes)
    assert urgency(BEST_EFFORT) & SHEDDABLE
    assert not any(level & SHEDDABLE for level in classes)
