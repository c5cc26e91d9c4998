"""The checker against a naive model, and the promises against data that must break them."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.checker import (
    Crash,
    Stream,
    TopicVerdict,
    failover_gap_ms,
    judge_sequences,
    judge_topic,
    longest_silence_ns,
    percentile,
)
from topology.demo import DemoResult
from topology.errors import LoadError
from topology.gateway import GatewayStatistics
from topology.load import read_payload, write_payload
from topology.model import parse_topology
from topology.promises import (
    Promise,
    healthy_keep_topics,
    leader_in_time,
    local_stays_local,
    losses_tolerated,
    messages_flow,
    no_duplicates,
    nothing_else_died,
    order_kept,
)

MS = 1_000_000


def stream(received_ns: Sequence[int], *, topic: str = "t", sent: int = 100, **changes: int) -> Stream:
    count = len(received_ns)
    return Stream(
        publisher=0,
        subscriber=changes.get("subscriber", 0),
        topic=topic,
        crosses_wan=True,
        accepted_ns=[at * 10 * MS for at in range(sent)],
        period_ns=10 * MS,
        sequences=range(1, count + 1),
        sent_ns=[at - 5 * MS for at in received_ns],
        received_ns=received_ns,
        age_bound_ns=[-1] * count,
    )


@given(st.integers(1, 40).flatmap(lambda sent: st.tuples(st.just(sent), st.lists(st.integers(1, sent)))))
def test_sequences_agree_with_a_naive_model(case: tuple[int, list[int]]) -> None:
    sent, arrived = case
    verdict = judge_sequences(sent, arrived)
    present = [sequence in arrived for sequence in range(1, sent + 1)]
    runs = "".join("." if here else "x" for here in present).split(".")
    firsts = [sequence for index, sequence in enumerate(arrived) if sequence not in arrived[:index]]
    assert verdict.delivered == sum(present)
    assert verdict.lost == sent - sum(present)
    assert verdict.longest_loss_run == max(map(len, runs))
    assert verdict.duplicates == len(arrived) - len(firsts)
    assert verdict.reordered == sum(any(b > s for b in firsts[:i]) for i, s in enumerate(firsts))


@given(st.integers(0, 50))
def test_everything_in_order_is_flawless(sent: int) -> None:
    verdict = judge_sequences(sent, range(1, sent + 1))
    assert (verdict.lost, verdict.longest_loss_run, verdict.duplicates, verdict.reordered) == (0, 0, 0, 0)


@pytest.mark.parametrize("sequence", [0, 4])
def test_a_message_nobody_sent_is_no_verdict(sequence: int) -> None:
    with pytest.raises(LoadError, match=f"message {sequence} arrived but only 1 to 3 were sent"):
        judge_sequences(3, [1, sequence])


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(0, 1000), st.integers(0, 500))
def test_silence_agrees_with_a_naive_model(received: list[int], start: int, length: int) -> None:
    end, until = start + length, 1001
    points = sorted({*received, until} if min(received) <= start else {*received, until, start})
    expected = max((b - a for a, b in pairwise(points) if b > start and a < end), default=0)
    assert longest_silence_ns(received, start, end, until) == expected


def test_silence_until_the_end_counts() -> None:
    assert longest_silence_ns([10, 20, 30], 25, 40, 100) == 70
    assert longest_silence_ns([], 25, 40, 100) == 75
    # What comes after the window is somebody else's silence.
    assert longest_silence_ns([10, 20, 30, 40, 90], 15, 35, 100) == 10


def test_failover_gap_takes_off_the_period() -> None:
    crash = Crash("r", at_ns=1000 * MS, until_ns=2000 * MS, topics=frozenset({"t"}))
    times = [at * MS for at in (980, 990, 1000, 1010, 1060, 1070)]
    assert failover_gap_ms([stream(times)], crash, 1080 * MS) == 40
    assert failover_gap_ms([stream(times, topic="u")], crash, 1080 * MS) is None


@given(st.lists(st.integers(0, 100), min_size=1), st.floats(0.01, 1))
def test_percentile_is_the_smallest_that_covers_the_share(values: list[int], share: float) -> None:
    ordered = sorted(values)
    value = percentile(ordered, share)
    assert sum(item <= value for item in ordered) >= share * len(ordered) - 1e-9
    assert value == ordered[0] or sum(item < value for item in ordered) < share * len(ordered)


def test_the_worst_subscriber_is_reported() -> None:
    good = stream([at * MS for at in range(10)], sent=10, subscriber=0)
    bad = stream([at * MS for at in range(7)], sent=10, subscriber=1)
    verdict = judge_topic("t", [good, bad], 10, loss_tolerance=2, deadline_ms=4, gap_ms=None)
    assert (verdict.delivered, verdict.lost, verdict.longest_loss_run) == (7, 3, 3)
    assert not verdict.within_tolerance
    assert verdict.p50_ms == verdict.max_ms == 5
    assert verdict.in_time == 0


def test_no_data_is_no_verdict() -> None:
    with pytest.raises(LoadError, match="no subscriber of t"):
        judge_topic("t", [], 10, 0, None, None)
    with pytest.raises(LoadError, match="no message of t arrived"):
        judge_topic("t", [stream([])], 10, 0, None, None)


FLAWLESS = TopicVerdict("t", 10, 10, 0, 0, 0, 0, 0, 1.0, 1.0, 1.0, None, None, None)


def verdict(**changes: Any) -> TopicVerdict:
    return dataclasses.replace(FLAWLESS, **changes)


def test_message_promises_hold_and_break() -> None:
    fine = [verdict()]
    assert losses_tolerated(fine).held and no_duplicates(fine, 3).held and order_kept(fine).held
    assert losses_tolerated([verdict(lost=9, longest_loss_run=9, loss_tolerance=None)]).held
    assert not losses_tolerated([verdict(lost=2, longest_loss_run=2, loss_tolerance=1)]).held
    assert not no_duplicates([verdict(duplicates=1)], 0).held
    assert not order_kept([verdict(reordered=1)]).held
    # Without data nothing holds.
    assert not losses_tolerated([]).held
    assert not no_duplicates([], 0).held
    assert not order_kept([]).held


def test_a_stream_that_dried_up_breaks_the_flow() -> None:
    flowing = stream([at * 10 * MS for at in range(100, 200)])
    assert messages_flow([flowing], 2000 * MS, 1.0).held
    assert not messages_flow([flowing], 3100 * MS, 1.0).held
    assert not messages_flow([flowing, stream([])], 2000 * MS, 1.0).held
    assert not messages_flow([], 2000 * MS, 1.0).held


def test_a_late_leader_breaks_the_promise() -> None:
    assert leader_in_time("a", "b", 5000.0, 5000.0).held
    assert not leader_in_time("a", "b", 5001.0, 5000.0).held


@pytest.mark.parametrize(
    ("after", "held"),
    [
        ({"x": ("b", "c"), "y": ("c", "b"), "z": ("b", "c")}, True),
        ({"x": ("c", "b"), "y": ("c", "b"), "z": ("b", "c")}, True),
        ({"x": ("a", "b"), "y": ("c", "b"), "z": ("b", "c")}, False),
        ({"x": ("b", "c"), "y": ("b", "c"), "z": ("b", "c")}, False),
        ({"x": ("b", "c"), "y": ("c", "b"), "z": ("c", "b")}, False),
        ({"x": ("b", "c"), "y": ("c", "b"), "z": ("b", "")}, False),
        ({"x": ("b", "c"), "y": ("c", "b")}, False),
    ],
)
def test_healthy_brokers_keep_their_topics(after: dict[str, tuple[str, str]], held: bool) -> None:
    before = {"x": ("a", "b"), "y": ("c", "a"), "z": ("b", "c")}
    assert healthy_keep_topics(before, after, "a").held is held
    assert not healthy_keep_topics({}, after, "a").held


def passed(out: dict[str, int], unreadable: int = 0) -> list[GatewayStatistics]:
    return [GatewayStatistics(1, 1, 1, out, {}, unreadable, 0.0)]


def test_a_leak_of_a_local_topic_is_seen() -> None:
    topology = parse_topology(
        "lans: {a: {}, b: {}}\nrouters: 1\ntopics: {near: {}, far: {}}\n"
        "publishers: [{lan: a, topic: near}, {lan: a, topic: far}]\n"
        "subscribers: [{lan: a, topic: near}, {lan: b, topic: far}]\n"
    )
    ids = {"near": 1, "far": 2}
    assert local_stays_local(topology, ids, passed({"2": 5})).held
    assert not local_stays_local(topology, ids, passed({"2": 5, "1": 1})).held
    assert not local_stays_local(topology, ids, passed({})).held, "a tap that sees nothing proves nothing"
    assert not local_stays_local(topology, ids, passed({"2": 5}, unreadable=1)).held
    assert not local_stays_local(topology, {}, passed({"2": 5})).held


def test_a_result_is_ok_only_if_every_promise_held() -> None:
    def result(*promises: Promise) -> DemoResult:
        return DemoResult("t", 1.0, 1.0, 1.0, "a", "b", "c", "x", 1.0, promises, (verdict(),))

    kept, broken = nothing_else_died([]), nothing_else_died(["edge"])
    assert result(kept).ok
    assert not result(kept, broken).ok
    assert not result().ok
    assert result(kept).to_record()["topics"][0]["topic"] == "t"


@given(st.integers(0, 1999), st.integers(0, 10**7), st.integers(0, 2**63), st.integers(48, 600))
def test_payloads_survive(publisher: int, sequence: int, sent_ns: int, size: int) -> None:
    payload = write_payload(publisher, sequence, sent_ns, size)
    assert len(payload) == size
    assert read_payload(payload) == (publisher, sequence, sent_ns)
