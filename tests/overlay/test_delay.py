"""The bound on the age of messages is never below the truth."""

from hypothesis import given
from hypothesis import strategies as st

from overlay.delay import DRIFT_PPM, LinkClock, add_shifts
from overlay.limits import MILLISECOND_NS, SECOND_NS
from overlay.messages import UNKNOWN_CLOCK_SHIFT


class SkewedClock:
    """A clock with an offset and a constant drift within the bound."""

    def __init__(self, offset_ns, drift_ppm):
        self.offset_ns = offset_ns
        self.drift_ppm = drift_ppm

    def read(self, true_ns):
        return self.offset_ns + true_ns + true_ns * self.drift_ppm // 1_000_000


clocks = st.builds(SkewedClock, st.integers(10**12, 10**15), st.integers(-DRIFT_PPM, DRIFT_PPM))
delays = st.integers(0, 500 * MILLISECOND_NS)


@given(
    ours=clocks,
    theirs=clocks,
    helpers=st.lists(st.tuples(st.integers(0, SECOND_NS), delays, delays), min_size=1, max_size=8),
    messages=st.lists(st.tuples(st.integers(0, 5 * SECOND_NS), delays), min_size=1, max_size=8),
    valid_for_ns=st.integers(0, SECOND_NS),
)
def test_the_bound_is_never_below_the_true_age(ours, theirs, helpers, messages, valid_for_ns):
    clock = LinkClock()
    assert clock.shift_ns == UNKNOWN_CLOCK_SHIFT
    now = SECOND_NS
    for pause, there, back in helpers:
        sent = now
        arrived = sent + there
        now = arrived + back + pause
        clock.helper(ours.read(sent), theirs.read(arrived), ours.read(now))
    clock.refresh(ours.read(now), valid_for_ns)
    for pause, on_the_way in messages:
        born = now - pause
        received = now + min(on_the_way, valid_for_ns * 999 // 1000)
        bound = ours.read(received) - theirs.read(max(born, 0)) + clock.shift_ns
        true_age = received - max(born, 0)
        # A clock that runs slow measures less of the same time: allow the drift of the age itself.
        assert bound >= true_age - 2 * DRIFT_PPM * true_age // 1_000_000 - 1


@given(ours=clocks, theirs=clocks, there=st.lists(delays, min_size=1, max_size=8))
def test_the_best_helper_is_kept(ours, theirs, there):
    clock = LinkClock()
    now = SECOND_NS
    for delay in there:
        clock.helper(ours.read(now), theirs.read(now + delay), ours.read(now + delay))
        now += delay + MILLISECOND_NS
    clock.refresh(ours.read(now), 0)
    error = clock.shift_ns - (theirs.read(now) - ours.read(now))
    drift = 4 * DRIFT_PPM * (now + SECOND_NS) // 1_000_000 + len(there) + 2
    assert min(there) - drift <= error <= min(there) + drift


def test_shifts_add_up_and_the_unknown_stays_unknown():
    assert add_shifts(5, -7) == -2
    assert add_shifts(UNKNOWN_CLOCK_SHIFT, 7) == UNKNOWN_CLOCK_SHIFT
    assert add_shifts(7, UNKNOWN_CLOCK_SHIFT) == UNKNOWN_CLOCK_SHIFT
