"""The checker finds every fault that is planted in a history, and finds none where there is none."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.drills.histories import (
    LATENCY_NS,
    MS,
    PERIOD_NS,
    START_NS,
    change,
    flawless,
    lengths,
    pick,
    without,
)
from topology.checker import Stream, loss_runs
from topology.drills.history import Phases, TopicHistory, judge_history, longest_gap_ms
from topology.errors import LoadError

CALM = Phases(START_NS - 1, START_NS)
"""Everything is after the fault."""


def judge(*streams: Stream, tolerance: int | None = 0, phases: Phases = CALM) -> TopicHistory:
    return judge_history("t", streams, tolerance, 20.0, phases)


def faults(history: TopicHistory) -> dict[str, int]:
    verdict = history.verdict
    return {
        "lost": verdict.lost,
        "run": verdict.longest_loss_run,
        "duplicates": verdict.duplicates,
        "reordered": verdict.reordered,
        "bounds_broken": history.bounds_broken,
        "forged": history.forged,
    }


def found(history: TopicHistory) -> dict[str, int]:
    return {name: count for name, count in faults(history).items() if count}


@given(lengths, lengths)
def test_a_flawless_history_has_no_faults(one: int, other: int) -> None:
    history = judge(flawless(one), flawless(other, publisher=1))
    assert found(history) == {}
    assert history.verdict.within_tolerance
    assert (history.verdict.sent, history.bounds) == (one + other, one + other)
    assert history.deadline_hits.after == 100 and history.deadline_hits.before is None


@given(lengths, st.data())
def test_a_planted_loss_is_found(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, count - 1))
    last = data.draw(st.integers(first, min(count, first + 9)))
    tolerance = data.draw(st.integers(0, 10))
    length = last - first + 1
    # One subscriber lost them, another did not: the worst counts.
    history = judge(flawless(count, subscriber=1), without(flawless(count), first, last), tolerance=tolerance)
    assert found(history) == {"lost": length, "run": length}
    assert history.verdict.within_tolerance is (length <= tolerance)


@given(lengths, st.data())
def test_a_planted_duplicate_is_found(count: int, data: st.DataObject) -> None:
    twice = data.draw(st.integers(0, count - 1))
    later = data.draw(st.integers(twice + 1, count))
    indices = list(range(count))
    indices.insert(later, twice)
    assert found(judge(without_bounds(pick(flawless(count), indices)))) == {"duplicates": 1}


@given(lengths, st.data())
def test_a_planted_step_back_is_found(count: int, data: st.DataObject) -> None:
    moved = data.draw(st.integers(0, count - 2))
    later = data.draw(st.integers(moved + 1, min(count - 1, moved + 5)))
    indices = list(range(count))
    indices.insert(later, indices.pop(moved))
    assert found(judge(without_bounds(pick(flawless(count), indices)))) == {"reordered": 1}


def without_bounds(stream: Stream) -> Stream:
    """What came at another time had another age: its bound is not what is planted."""
    for index in range(len(stream.sequences)):
        stream = change(stream, "age_bound_ns", index, -1)
    return stream


@given(lengths, st.data())
def test_an_understated_age_is_found(count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, count - 1))
    true_ns = LATENCY_NS - 1000
    assert found(judge(change(flawless(count), "age_bound_ns", index, true_ns))) == {}
    assert found(judge(change(flawless(count), "age_bound_ns", index, true_ns - 1))) == {"bounds_broken": 1}


@given(lengths, st.data())
def test_a_message_with_the_content_of_another_is_found(count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, count - 1))
    other = data.draw(st.integers(0, index)) if index else 1
    if other == index:
        return
    stream = flawless(count)
    forged = change(stream, "sent_ns", index, min(stream.sent_ns[other], stream.received_ns[index]))
    assert judge(forged).forged == 1


@given(lengths, st.data())
def test_a_missed_deadline_counts_in_its_phase(count: int, data: st.DataObject) -> None:
    """What comes late and what never comes missed its deadline, when it was published."""
    fault = data.draw(st.integers(1, count - 2))
    whole = data.draw(st.integers(fault + 1, count - 1))
    late = data.draw(st.integers(0, count - 1))
    stream = flawless(count)
    phases = Phases(stream.accepted_ns[fault], stream.accepted_ns[whole])
    sizes = {"before": fault, "during": whole - fault, "after": count - whole}
    where = "before" if late < fault else "during" if late < whole else "after"
    for planted in (
        change(stream, "received_ns", late, stream.sent_ns[late] + 21 * MS),
        without(stream, late + 1, late + 1),
    ):
        hits = judge(planted, tolerance=None, phases=phases).deadline_hits
        for phase, size in sizes.items():
            expected = 100 * (size - (phase == where)) / size
            assert getattr(hits, phase) == pytest.approx(expected)


@given(lengths, st.data())
def test_a_silence_during_the_fault_is_measured(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(2, count - 10))
    length = data.draw(st.integers(1, 8))
    stream = without(flawless(count), first, first + length - 1)
    at_ns = stream.accepted_ns[first - 1]
    phases = Phases(at_ns, at_ns + 1_000 * MS)
    stopped_ns = stream.accepted_ns[-1] + LATENCY_NS
    assert longest_gap_ms([stream], phases, stopped_ns) == pytest.approx(length * PERIOD_NS / MS)
    near = flawless(count, crosses_wan=False)
    assert longest_gap_ms([near, stream], phases, stopped_ns) == pytest.approx(length * PERIOD_NS / MS)
    assert longest_gap_ms([], phases, stopped_ns) is None


def test_records_that_cannot_be_are_no_verdict() -> None:
    stream = flawless(20)
    with pytest.raises(LoadError, match="came 1 ns before it was sent"):
        judge(change(stream, "received_ns", 3, stream.sent_ns[3] - 1))
    with pytest.raises(LoadError, match="message 21 arrived but only 1 to 20 were sent"):
        judge(change(stream, "sequences", 19, 21))
    with pytest.raises(LoadError, match="no subscriber of t"):
        judge()
    with pytest.raises(LoadError, match="no message of t arrived"):
        judge(without(stream, 1, 20))


@given(lengths, st.data())
def test_losses_in_a_row_beyond_the_tolerance_are_counted(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, count - 12))
    last = data.draw(st.integers(first, first + 9))
    tolerance = data.draw(st.integers(0, 12))
    stream = without(flawless(count), first, last)
    history = judge_history("t", [stream], tolerance, None, CALM)
    assert history.lost == last - first + 1
    assert history.lost_beyond_tolerance == max(0, last - first + 1 - tolerance)


@given(st.integers(1, 40).flatmap(lambda sent: st.tuples(st.just(sent), st.lists(st.integers(1, sent)))))
def test_runs_of_losses_agree_with_a_naive_model(case: tuple[int, list[int]]) -> None:
    sent, arrived = case
    runs = loss_runs(sent, arrived)
    assert {s for first, last in runs for s in range(first, last + 1)} == set(range(1, sent + 1)) - {*arrived}
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(runs)), "neighbours would be one run"
