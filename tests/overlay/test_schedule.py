"""The calendar against a plain sort."""

from hypothesis import given
from hypothesis import strategies as st

from overlay.schedule import BUCKET_SHIFT, Calendar

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
