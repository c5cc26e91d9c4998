"""The calendar against a plain sort, and lanes against their rule."""

import weakref

from hypothesis import given
from hypothesis import strategies as st

from overlay.messages import UNKNOWN_CLOCK_SHIFT
from overlay.schedule import (
    BUCKET_NS,
    BUCKET_SHIFT,
    UNKNOWN_BIRTH,
    Calendar,
    Lanes,
    granule_born_ns,
    granule_ns,
)
from overlay.urgency import NO_DEADLINE_NS

pushes = st.integers(0, 40).map(lambda bucket: ("push", bucket << BUCKET_SHIFT))
steps = st.lists(st.one_of(pushes, st.just(("pop", 0))), max_size=200)


@given(steps)
def test_jobs_come_out_by_deadline_and_ties_in_order(steps):
    calendar = Calendar()
    model = []
    for number, (step, deadline_ns) in enumerate(steps):
        if step == "push":
            calendar.push(deadline_ns, number)
            model.append((deadline_ns, number))
            model.sort()
        elif model:
            assert calendar.first() == model[0][1]
            assert calendar.next_deadline_ns() == model[0][0]
            assert calendar.pop() == model.pop(0)[1]
        else:
            assert calendar.first() is None
            assert calendar.next_deadline_ns() is None
        calendar.validate()
        assert len(calendar) == len(model)
        assert list(calendar) == [job for _, job in model]


def test_deadlines_within_a_bucket_are_ties():
    calendar = Calendar()
    calendar.push((1 << BUCKET_SHIFT) + 5, "first")
    calendar.push(1 << BUCKET_SHIFT, "second")
    assert [calendar.pop(), calendar.pop()] == ["first", "second"]


class _Job:
    def __init__(self, number: int) -> None:
        self.number = number


def test_a_bucket_that_never_runs_empty_keeps_nothing_that_was_taken():
    """First come, first served is one bucket for ever."""
    calendar: Calendar[_Job] = Calendar()
    taken: list[weakref.ref[_Job]] = []
    for number in range(1_000):
        calendar.push(0, _Job(number))
        calendar.push(0, _Job(number))
        job = calendar.pop()
        assert job.number == number // 2
        taken.append(weakref.ref(job))
        del job
        assert not any(each() for each in taken)
        calendar.validate()
    (bucket,) = calendar._buckets.values()
    assert len(bucket.jobs) <= 2 * len(calendar) + 64


def test_clear_forgets_everything():
    calendar = Calendar()
    for deadline_ns in range(0, 1 << 24, 1 << 18):
        calendar.push(deadline_ns, deadline_ns)
    calendar.clear()
    calendar.validate()
    assert len(calendar) == 0
    calendar.push(0, "again")
    assert calendar.pop() == "again"


def test_a_push_and_pop_cost_the_same_however_many_jobs_wait():
    """Counted in heap entries, not in time: one per millisecond of deadlines, not one per job."""
    calendar = Calendar()
    for number in range(100_000):
        calendar.push((number % 50) << BUCKET_SHIFT, number)
    assert len(calendar._keys) == 50


def _take(lanes, now_ns, levels=9):
    lane = lanes.choose(now_ns, levels)
    return None if lane is None else lanes.pop(lane)


def _lanes(*pushes):
    lanes = Lanes()
    for level, deadline, job in pushes:
        lanes.push(level, deadline * BUCKET_NS, job)
        lanes.validate()
    return lanes


def test_in_time_the_earliest_deadline_comes_first_whatever_its_level():
    lanes = _lanes((3, 10, "bulk"), (1, 12, "urgent"), (3, 14, "later bulk"))
    assert [_take(lanes, 0) for _ in range(4)] == ["bulk", "urgent", "later bulk", None]


def test_once_something_is_late_the_most_urgent_level_comes_first_in_its_own_order():
    lanes = _lanes((3, 10, "bulk"), (1, 40, "urgent"), (1, 30, "more urgent"), (2, 5, "state"))
    assert _take(lanes, 5 * BUCKET_NS) == "state", "the millisecond it is due in is not over"
    assert [_take(lanes, 11 * BUCKET_NS) for _ in range(3)] == ["more urgent", "urgent", "bulk"]
    assert len(lanes) == 0


def test_only_levels_that_are_open_are_chosen_from():
    lanes = _lanes((3, 10, "bulk"), (1, 40, "urgent"))
    assert _take(lanes, 0, levels=3) == "urgent"
    assert _take(lanes, 0, levels=3) is None
    assert _take(lanes, 0, levels=4) == "bulk"


def test_what_is_due_first_can_be_taken_however_late_and_however_urgent():
    lanes = _lanes((3, 10, "bulk"), (1, 40, "urgent"))
    assert lanes.next_deadline_ns() == 10 * BUCKET_NS
    assert [lanes.pop_earliest(), lanes.pop_earliest()] == ["bulk", "urgent"]
    assert lanes.next_deadline_ns() is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.booleans()), max_size=80))
def test_within_a_level_jobs_keep_their_order_whatever_the_time(steps):
    lanes = Lanes()
    expected = {level: [] for level in range(4)}
    for number, (level, deadline, takes) in enumerate(steps):
        if takes:
            job = _take(lanes, 10 * BUCKET_NS)
            if job is not None:
                first = min(expected[job[0]])
                assert job == (job[0], first[1])
                expected[job[0]].remove(first)
        else:
            lanes.push(level, deadline * BUCKET_NS, (level, number))
            expected[level].append((deadline, number))
        lanes.validate()
        assert len(lanes) == len(list(lanes)) == sum(map(len, expected.values()))


births = st.integers(1, 2**50)


@given(st.integers(0, NO_DEADLINE_NS), births, births, st.integers(-(2**50), 2**50))
def test_births_count_by_granules_of_a_sixteenth_of_the_deadline(
    deadline_ns: int, one_ns: int, other_ns: int, shift_ns: int
) -> None:
    granule = granule_ns(deadline_ns)
    assert granule == BUCKET_NS or deadline_ns / 32 < granule <= deadline_ns / 16
    earlier_ns, later_ns = sorted((one_ns, other_ns))
    early_ns = granule_born_ns(earlier_ns, shift_ns, granule)
    assert 0 <= earlier_ns - shift_ns - early_ns < granule, "never later than the truth, and not by much"
    assert early_ns <= granule_born_ns(later_ns, shift_ns, granule), "no younger message is due before"
    assert granule_born_ns(earlier_ns, UNKNOWN_CLOCK_SHIFT, granule) == UNKNOWN_BIRTH
    assert granule_born_ns(0, shift_ns, granule) == UNKNOWN_BIRTH
