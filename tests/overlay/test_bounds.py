"""FRAME's timing bounds: the paper's worked example, and Lemma 1 against simulated crashes."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from overlay.bounds import (
    UNBOUNDED,
    AdmissionError,
    Delays,
    admit,
    admit_request,
    check_admission,
    dispatch_within_ns,
    needs_replication,
    replicate_within_ns,
    retention_without_replication,
    smallest_retention,
)
from overlay.errors import QosError
from overlay.limits import MILLISECOND_NS
from overlay.qos import BEST_EFFORT, Reliability, SubscriptionQos, TopicQos

MS = MILLISECOND_NS
EDGE = Delays(0, 1 * MS, MS // 20, 50 * MS)
CLOUD = Delays(0, 20 * MS, MS // 20, 50 * MS)


def category(period, deadline, loss_tolerance, retention):
    reliability = Reliability.RELIABLE if loss_tolerance is not None else Reliability.BEST_EFFORT
    return TopicQos(period, deadline, loss_tolerance, retention, reliability)


# FRAME, Table 2
TABLE_2 = {
    0: (category(50, 50, 0, 2), EDGE),
    1: (category(50, 50, 3, 0), EDGE),
    2: (category(100, 100, 0, 1), EDGE),
    3: (category(100, 100, 3, 0), EDGE),
    4: (category(100, 100, None, 0), EDGE),
    5: (category(500, 500, 0, 1), CLOUD),
}


def test_the_eleven_deadlines_of_table_2_are_in_the_papers_order():
    dispatch = {number: dispatch_within_ns(*topic) for number, topic in TABLE_2.items()}
    replicate = {number: replicate_within_ns(*topic) for number, topic in TABLE_2.items()}
    assert replicate.pop(4) == UNBOUNDED, "best effort needs no replication"
    assert dispatch[0] == dispatch[1] == 49 * MS
    assert replicate[0] == replicate[2] == 49.95 * MS
    assert dispatch[2] == dispatch[3] == dispatch[4] == 99 * MS
    assert (
        dispatch[0]
        == dispatch[1]
        < replicate[0]
        == replicate[2]
        < dispatch[2]
        == dispatch[3]
        == dispatch[4]
        < replicate[1]
        < replicate[3]
        < replicate[5]
        < dispatch[5]
    )
    assert (replicate[1], replicate[3], replicate[5], dispatch[5]) == (
        99.95 * MS,
        249.95 * MS,
        449.95 * MS,
        480 * MS,
    )


def test_only_categories_2_and_5_need_replication():
    assert {number for number, topic in TABLE_2.items() if needs_replication(*topic)} == {2, 5}


def test_one_more_retained_message_spares_all_replication():
    for number in (2, 5):
        qos, delays = TABLE_2[number]
        assert retention_without_replication(qos, delays) == 2
        assert not needs_replication(replace(qos, retention=2), delays)
    for number in (0, 1, 3, 4):
        qos, delays = TABLE_2[number]
        assert retention_without_replication(qos, delays) == qos.retention


def test_table_2_has_the_smallest_admissible_retention():
    for qos, delays in TABLE_2.values():
        check_admission(qos, delays)
        assert smallest_retention(qos, delays) == qos.retention


def test_the_condition_of_proposition_1_as_the_paper_rewrites_it():
    for number in (0, 1, 2, 3, 5):
        qos, delays = TABLE_2[number]
        left = delays.failover_ns + delays.primary_to_backup_ns - delays.primary_to_subscriber_ns
        right = (qos.retention + qos.loss_tolerance) * qos.period_ms * MS - qos.deadline_ms * MS
        assert needs_replication(qos, delays) == (left > right)


def test_refusals_name_the_numbers_and_the_remedy():
    with pytest.raises(AdmissionError, match=r"set retention to at least 2") as refusal:
        check_admission(category(50, 50, 0, 1), EDGE)
    assert refusal.value.retention == 2
    with pytest.raises(AdmissionError, match=r"deadline_ms is 10.*20 ms from it.*at least 20"):
        check_admission(category(500, 10, 0, 2), CLOUD)
    with pytest.raises(AdmissionError, match="set retention to at least 1"):
        check_admission(TopicQos(loss_tolerance=0, retention=0), EDGE)
    check_admission(TopicQos(), CLOUD)


counts = st.integers(0, 6)
milliseconds = st.integers(1, 300)


@given(milliseconds, counts, st.integers(0, 60), st.integers(0, 20), st.integers(0, 200))
def test_the_smallest_retention_is_admitted_and_one_less_is_not(
    period, tolerance, to_primary, to_backup, failover
):
    delays = Delays(to_primary * MS, 0, to_backup * MS, failover * MS)
    qos = TopicQos(period, None, tolerance, 0)
    least = smallest_retention(qos, delays)
    check_admission(replace(qos, retention=least), delays)
    if least:
        with pytest.raises(AdmissionError):
            check_admission(replace(qos, retention=least - 1), delays)


@given(
    period=milliseconds,
    tolerance=counts,
    retention=counts,
    to_primary=st.integers(0, 50),
    to_backup=st.integers(0, 20),
    failover=st.integers(0, 200),
    promptness=st.integers(1, 4),
    crash_us=st.integers(0, 20_000_000),
    stretch=st.lists(st.integers(0, 100), min_size=1, max_size=8),
)
def test_lemma_1_holds_for_any_crash_time_and_arrival_phase(
    period, tolerance, retention, to_primary, to_backup, failover, promptness, crash_us, stretch
):
    """Replicated within the bound, never more than `loss_tolerance` messages in a row are lost.

    Messages are created at least a period apart. The primary dies at some time; from then on
    nothing of it survives but copies that have reached the backup by then. The publisher's edge
    finds out after the failover time and then sends what it has retained, and everything later, to
    the backup. Times are in microseconds.
    """
    qos = TopicQos(period, None, tolerance, retention)
    delays = Delays(to_primary * MS, 0, to_backup * MS, failover * MS)
    within_ns = replicate_within_ns(qos, delays)
    assume(within_ns >= 0)
    response_us = within_ns // 1000 // promptness
    created = [0]
    for index in range(60):
        created.append(created[-1] + period * 1000 + stretch[index % len(stretch)])
    crash_us %= created[50]
    detected_us = crash_us + failover * 1000
    before = [index for index, time in enumerate(created) if time <= detected_us]
    resent = set(before[max(0, len(before) - retention) :])
    run = longest = 0
    for index, time in enumerate(created):
        copied_us = time + to_primary * 1000 + response_us + to_backup * 1000
        alive = copied_us <= crash_us or index in resent or time > detected_us
        run = 0 if alive else run + 1
        longest = max(longest, run)
    assert longest <= tolerance


def test_the_bound_of_lemma_1_is_not_larger_than_it_may_be():
    """A response just above the bound loses one message too many for some crash."""
    qos = TopicQos(100, None, 1, 1)
    delays = Delays(5 * MS, 0, 3 * MS, 40 * MS)
    bound_ms = replicate_within_ns(qos, delays) / MS
    response = bound_ms + 1
    created = [100 * index for index in range(40)]
    worst = 0
    for crash_at in range(1000, 1200):
        detected_at = crash_at + 40
        resent = max(index for index, time in enumerate(created) if time <= detected_at)
        run = longest = 0
        for index, time in enumerate(created):
            alive = time + 5 + response + 3 < crash_at or index == resent or time > detected_at
            run = 0 if alive else run + 1
            longest = max(longest, run)
        worst = max(worst, longest)
    assert worst > qos.loss_tolerance


# What subscribers ask for


def test_a_request_is_refused_with_the_numbers_and_the_remedy():
    topic = TopicQos(period_ms=10, deadline_ms=100, loss_tolerance=5, retention=1)
    check_admission(topic, CLOUD)
    with pytest.raises(AdmissionError, match=r"deadline_ms is 15, .* 20 ms from it leave nothing"):
        admit_request(topic, SubscriptionQos(deadline_ms=15), CLOUD)
    with pytest.raises(
        AdmissionError, match=r"do not cover a failover of 50 ms .* retention to at least 6, .* at least 5"
    ):
        admit_request(topic, SubscriptionQos(loss_tolerance=0), CLOUD)
    with pytest.raises(QosError, match="best_effort"):
        admit_request(BEST_EFFORT, SubscriptionQos(loss_tolerance=0), CLOUD)
    admit_request(topic, SubscriptionQos(deadline_ms=25, loss_tolerance=5), CLOUD)


def test_the_remedies_named_do_help():
    topic = TopicQos(period_ms=10, loss_tolerance=1, retention=2)
    with pytest.raises(AdmissionError, match="retention to at least 5, or loss_tolerance to at least 4"):
        check_admission(topic, EDGE)
    for better in (replace(topic, retention=5), replace(topic, loss_tolerance=4)):
        check_admission(better, EDGE)
    for worse in (replace(topic, retention=4), replace(topic, loss_tolerance=3)):
        with pytest.raises(AdmissionError):
            check_admission(worse, EDGE)


def test_a_subscriber_is_not_refused_for_what_the_topic_itself_cannot_keep():
    topic = TopicQos(period_ms=10, deadline_ms=100, loss_tolerance=0, retention=1)
    with pytest.raises(AdmissionError):
        check_admission(topic, CLOUD)
    admit_request(topic, SubscriptionQos(deadline_ms=30), CLOUD)
    admit_request(topic, SubscriptionQos(loss_tolerance=0), CLOUD)


offers = st.builds(
    TopicQos,
    period_ms=st.none() | st.integers(1, 200),
    deadline_ms=st.none() | st.integers(1, 200),
    loss_tolerance=st.none() | st.integers(0, 9),
    retention=st.integers(0, 9),
)
wishes = st.builds(
    SubscriptionQos, deadline_ms=st.none() | st.integers(1, 200), loss_tolerance=st.none() | st.integers(0, 9)
)


@given(offers, st.lists(wishes, max_size=4))
def test_requests_that_are_each_admitted_are_admitted_together(offered, requests):
    """So subscribers at different edges need not agree before they are let in."""
    try:
        check_admission(offered, CLOUD)
        for request in requests:
            admit_request(offered, request, CLOUD)
    except QosError:
        assume(False)
    admit(offered, requests, CLOUD)


@given(offers, wishes)
def test_a_request_is_admitted_exactly_if_the_topic_served_so_is(offered, request):
    try:
        check_admission(offered, CLOUD)
    except QosError:
        assume(False)
    try:
        admit(offered, [request], CLOUD)
    except QosError:
        with pytest.raises(QosError):
            admit_request(offered, request, CLOUD)
    else:
        admit_request(offered, request, CLOUD)


def test_longer_delays():
    delays = Delays(10, 20, 30, 40)
    assert delays.at_least(Delays(5, 25, 35, 1)) == Delays(10, 25, 35, 40)
    assert delays.longer_by(10) == Delays(11, 22, 33, 44)
