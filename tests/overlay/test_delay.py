"""The bound on the age of messages is never below the truth, whatever the clocks do within their drift.

All times are whole milliseconds and rates whole ppm, so that clock readings are exact.
"""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from overlay.delay import (
    LINKS_MAX,
    SHIFT_STEP_NS,
    LinkClock,
    add_shifts,
    age_bound_ns,
    link_bound_ns,
    said_at_ns,
)
from overlay.equations import (
    Helper,
    at_most_ns,
    improved_lower_bound_ns,
    is_better,
    total_ns,
    upper_bound_ns,
)
from overlay.limits import DRIFT_PPM, MILLISECOND_NS, SECOND_NS
from overlay.messages import UNKNOWN_CLOCK_SHIFT

HORIZON_MS = 60_000


class SkewedClock:
    """A clock with an offset and a drift that changes every few seconds, always within the bound."""

    def __init__(self, offset_ns, drifts_ppm, segment_ms):
        self.offset_ns = offset_ns
        self.drifts_ppm = drifts_ppm
        self.segment_ms = segment_ms

    def read(self, true_ms):
        """The reading, in ns, at a true time."""
        gained_ns = 0
        left_ms, number = true_ms, 0
        while left_ms > 0:
            step_ms = min(left_ms, self.segment_ms)
            gained_ns += step_ms * self.drifts_ppm[number % len(self.drifts_ppm)]
            left_ms -= step_ms
            number += 1
        return self.offset_ns + true_ms * MILLISECOND_NS + gained_ns


def clocks(drift_ppm):
    return st.builds(
        SkewedClock,
        st.integers(10**12, 10**15),
        st.lists(st.integers(-drift_ppm, drift_ppm), min_size=1, max_size=6),
        st.integers(500, 20_000),
    )


delays_ms = st.integers(0, 500)
exchanges = st.lists(
    st.tuples(st.integers(0, HORIZON_MS), delays_ms, delays_ms, st.booleans()), min_size=0, max_size=8
)
"""Helpers of one link: sent when, how long there, how long until we know, lost or not."""


def teach(clock, ours, theirs, helpers, until_ms, floor_ms=0):
    """Give a link clock all helpers that have come back by then; returns those, oldest answer first."""
    back = sorted(
        (sent + floor_ms + there + back, sent, sent + floor_ms + there)
        for sent, there, back, lost in helpers
        if not lost and sent + floor_ms + there + back <= until_ms
    )
    for known_ms, sent_ms, arrived_ms in back:
        clock.helper(ours.read(sent_ms), theirs.read(arrived_ms), ours.read(known_ms))
    return back


@st.composite
def journeys(draw, links_most=LINKS_MAX, drift_most=5_000):
    """A message over several links: clocks, helpers, when it reached and left each node."""
    drift_ppm = draw(st.sampled_from((1, 50, DRIFT_PPM, 1_000, drift_most)))
    links = draw(st.integers(1, links_most))
    nodes = draw(st.lists(clocks(drift_ppm), min_size=links + 1, max_size=links + 1))
    helpers = draw(st.lists(exchanges, min_size=links, max_size=links))
    born_ms = draw(st.integers(0, HORIZON_MS))
    stays = draw(
        st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 2_000)), min_size=links, max_size=links)
    )
    stages, now_ms = [], born_ms
    for waits_ms, travels_ms in stays:
        sent_ms = now_ms + waits_ms
        now_ms = sent_ms + travels_ms
        stages.append((sent_ms, now_ms))
    return drift_ppm, nodes, helpers, born_ms, stages


@given(journeys())
def test_the_bound_is_never_below_the_true_age(journey):
    drift_ppm, nodes, helpers, born_ms, stages = journey
    shift_ns, all_known = 0, True
    for number, (_, arrived_ms) in enumerate(stages, 1):
        clock = LinkClock(drift_ppm)
        known = teach(clock, nodes[number], nodes[number - 1], helpers[number - 1], arrived_ms)
        all_known &= bool(known)
        assert clock.is_known == bool(known)
        shift_ns = add_shifts(shift_ns, clock.shift_at(nodes[number].read(arrived_ms)))
    assert (shift_ns != UNKNOWN_CLOCK_SHIFT) == all_known
    if all_known:
        seen_ms = stages[-1][1]
        elapsed_ns = nodes[-1].read(seen_ms) - nodes[0].read(born_ms) + shift_ns
        assert age_bound_ns(elapsed_ns, drift_ppm) >= (seen_ms - born_ms) * MILLISECOND_NS


@given(journeys(links_most=1))
def test_the_bound_of_a_link_is_never_below_the_time_spent_on_it(journey):
    drift_ppm, (sender, receiver), helpers, _, ((sent_ms, arrived_ms),) = journey
    clock = LinkClock(drift_ppm)
    known = teach(clock, receiver, sender, helpers[0], arrived_ms)
    now_ns = receiver.read(arrived_ms)
    bound_ns = link_bound_ns(sender.read(sent_ms), clock.shift_at(now_ns), now_ns, drift_ppm)
    assert (bound_ns > 0) == bool(known)
    if known:
        assert bound_ns >= (arrived_ms - sent_ms) * MILLISECOND_NS
        # It errs by no more than the best helper took, and drift: that of a message does not.
        took_ms = min(arrived - sent for _, sent, arrived in known)
        drifted_ms = (2 * LINKS_MAX + 5) * drift_ppm * (HORIZON_MS + 20_000) / 1e6
        assert bound_ns <= (arrived_ms - sent_ms + took_ms + drifted_ms + 1) * MILLISECOND_NS
    assert link_bound_ns(0, clock.shift_at(now_ns), now_ns, drift_ppm) == 0


def test_a_message_born_long_before_the_first_helper_is_not_made_younger_by_drift():
    """The worst case of one link: their clock slow, ours fast, and a helper that knows nothing of before."""
    ours, theirs = SkewedClock(10**12, [DRIFT_PPM], 1_000), SkewedClock(10**13, [-DRIFT_PPM], 1_000)
    clock = LinkClock()
    clock.helper(ours.read(HORIZON_MS), theirs.read(HORIZON_MS), ours.read(HORIZON_MS))
    elapsed_ns = ours.read(HORIZON_MS) - theirs.read(0) + clock.shift_at(ours.read(HORIZON_MS))
    true_ns = HORIZON_MS * MILLISECOND_NS
    assert elapsed_ns < true_ns  # what the factor of the age is for
    assert true_ns <= age_bound_ns(elapsed_ns, DRIFT_PPM) < true_ns * 1.002


@given(
    ours=clocks(DRIFT_PPM),
    theirs=clocks(DRIFT_PPM),
    helpers=exchanges,
    floor_ms=st.integers(0, 100),
    uses=st.lists(st.tuples(st.integers(0, 2_000), delays_ms), min_size=1, max_size=8),
)
def test_a_floor_and_shifts_used_between_helpers_keep_the_bound(ours, theirs, helpers, floor_ms, uses):
    """A shift is used for a while after it was reckoned, and a floor takes nothing off that it should not."""
    clock = LinkClock(DRIFT_PPM, floor_ms * MILLISECOND_NS)
    plain = LinkClock(DRIFT_PPM)
    now_ms = HORIZON_MS
    if not teach(clock, ours, theirs, helpers, now_ms, floor_ms):
        return
    teach(plain, ours, theirs, helpers, now_ms, floor_ms)
    for pause_ms, way_ms in uses:
        now_ms += pause_ms
        now_ns = ours.read(now_ms)
        shift_ns = clock.shift_at(now_ns)
        bound_ns = age_bound_ns(now_ns - theirs.read(now_ms - way_ms) + shift_ns, DRIFT_PPM)
        assert bound_ns >= way_ms * MILLISECOND_NS
        assert shift_ns == plain.shift_at(now_ns) - floor_ms * MILLISECOND_NS


@given(journeys(links_most=1, drift_most=1_000))
def test_optimised_is_never_above_unoptimised(journey):
    """Against a clock that only ever knows the latest helper."""
    drift_ppm, nodes, helpers, _, stages = journey
    arrived_ms = stages[0][1]
    clock, latest_only = LinkClock(drift_ppm), LinkClock(drift_ppm)
    known = teach(clock, nodes[1], nodes[0], helpers[0], arrived_ms)
    if known:
        known_ms, sent_ms, there_ms = known[-1]
        latest_only.helper(nodes[1].read(sent_ms), nodes[0].read(there_ms), nodes[1].read(known_ms))
        now_ns = nodes[1].read(arrived_ms)
        now_ns += 2 * SHIFT_STEP_NS  # so that both reckon anew
        assert clock.shift_at(now_ns) <= latest_only.shift_at(now_ns)


@given(journeys(drift_most=1_000))
def test_telescoped_equals_the_sum_over_hops_but_for_drift(journey):
    """Equation 7 with the helpers that each link clock has chosen; the difference is drift alone."""
    drift_ppm, nodes, helpers, born_ms, stages = journey
    shift_ns, drift_ns, link_bounds_ns, inside_ns = 0, 0, [], []
    here_ms = born_ms
    for number, (sent_ms, arrived_ms) in enumerate(stages, 1):
        ours, theirs = nodes[number], nodes[number - 1]
        clock = LinkClock(drift_ppm)
        known = teach(clock, ours, theirs, helpers[number - 1], arrived_ms)
        if not known:
            return
        now_ns = ours.read(arrived_ms)
        hop_ns = clock.shift_at(now_ns)
        shift_ns += hop_ns
        pairs = [Helper(ours.read(sent), theirs.read(there)) for _, sent, there in known]
        chosen = min(pairs, key=lambda pair: abs(_shift_of(pair, now_ns, drift_ppm) - hop_ns))
        link_bounds_ns.append(upper_bound_ns(chosen, theirs.read(sent_ms), now_ns, drift_ppm))
        inside_ns.append(theirs.read(sent_ms) - theirs.read(here_ms))
        drift_ns += 2 * _drift_of(now_ns + SHIFT_STEP_NS - chosen.sent_ns, drift_ppm) + 4
        here_ms = arrived_ms
    elapsed_ns = nodes[-1].read(here_ms) - nodes[0].read(born_ms) + shift_ns
    telescoped_ns = age_bound_ns(elapsed_ns, drift_ppm)
    drift_ns += telescoped_ns - elapsed_ns
    difference_ns = telescoped_ns - total_ns(link_bounds_ns, inside_ns, drift_ppm)
    assert -4 * len(stages) <= difference_ns <= drift_ns


def _drift_of(elapsed_ns, drift_ppm):
    return at_most_ns(elapsed_ns, drift_ppm) - elapsed_ns


def _shift_of(pair, now_ns, drift_ppm):
    return pair.received_ns - pair.sent_ns + 2 * _drift_of(now_ns - pair.sent_ns, drift_ppm)


@given(ours=clocks(DRIFT_PPM), theirs=clocks(DRIFT_PPM), helpers=exchanges, way_ms=delays_ms)
def test_improved_lower_bounds_add_nothing_to_the_smallest_shift(ours, theirs, helpers, way_ms):
    """Equations 3-6 as published, against the link clock: never better by more than drift, and sound."""
    now_ms = HORIZON_MS + 1_000
    clock = LinkClock(DRIFT_PPM)
    known = teach(clock, ours, theirs, helpers, now_ms)
    assume(known)
    now_ns, sent_ns = ours.read(now_ms), theirs.read(now_ms - way_ms)
    best = None
    for _, sent_ms, there_ms in sorted(known, key=lambda item: item[1]):
        pair = Helper(ours.read(sent_ms), theirs.read(there_ms))
        if best is not None:
            # A message from p that reached us just as the helper left, having left as it arrived here first.
            upper_ns = upper_bound_ns(best, theirs.read(sent_ms), ours.read(sent_ms), DRIFT_PPM)
            lower_ns = improved_lower_bound_ns(
                pair, theirs.read(sent_ms), ours.read(sent_ms), upper_ns, DRIFT_PPM
            )
            assert lower_ns <= (there_ms - sent_ms) * MILLISECOND_NS
            pair = pair._replace(lower_bound_ns=lower_ns)
        if best is None or not is_better(best, pair, DRIFT_PPM):
            best = pair
    published_ns = upper_bound_ns(best, sent_ns, now_ns, DRIFT_PPM)
    assert published_ns >= way_ms * MILLISECOND_NS
    ours_ns = age_bound_ns(now_ns - sent_ns + clock.shift_at(now_ns), DRIFT_PPM)
    drift_ns = 6 * _drift_of(2 * HORIZON_MS * MILLISECOND_NS, DRIFT_PPM)
    assert abs(ours_ns - published_ns) <= drift_ns


@given(ours=clocks(DRIFT_PPM), theirs=clocks(DRIFT_PPM), there=st.lists(delays_ms, min_size=1, max_size=8))
def test_the_best_helper_is_kept(ours, theirs, there):
    clock = LinkClock()
    now = 1_000
    for delay in there:
        clock.helper(ours.read(now), theirs.read(now + delay), ours.read(now + delay))
        now += delay + 1
    error = clock.shift_at(ours.read(now)) - (theirs.read(now) - ours.read(now))
    drift = 4 * DRIFT_PPM * (now * MILLISECOND_NS + SECOND_NS) // 1_000_000 + len(there) + 2
    assert min(there) * MILLISECOND_NS - drift <= error <= min(there) * MILLISECOND_NS + drift


@given(
    ours=clocks(DRIFT_PPM),
    theirs=clocks(DRIFT_PPM),
    there=st.lists(delays_ms, min_size=64, max_size=200),
    floor_ms=st.integers(0, 50),
)
def test_the_least_delay_is_never_above_the_fastest_helper(ours, theirs, there, floor_ms):
    clock = LinkClock(DRIFT_PPM, floor_ms * MILLISECOND_NS)
    now = 1_000
    for number, extra in enumerate(there):
        delay = floor_ms + extra
        clock.helper(ours.read(now), theirs.read(now + delay), ours.read(now + delay))
        now += 10
        recent = [floor_ms + each for each in there[max(0, number - 63) : number + 1]]
        assert floor_ms * MILLISECOND_NS <= clock.least_delay_ns <= min(recent) * MILLISECOND_NS


def test_a_way_that_became_longer_is_proven_to_be():
    """Fifty more milliseconds, seen against clocks that stay put; forgotten when the way is short again."""
    clock = LinkClock()
    now_ns, ahead_ns = SECOND_NS, 10**12

    def exchange(count, delay_ms):
        nonlocal now_ns
        for _ in range(count):
            arrived_ns = now_ns + delay_ms * MILLISECOND_NS
            clock.helper(now_ns, arrived_ns + ahead_ns, arrived_ns)
            now_ns += 100 * MILLISECOND_NS

    exchange(200, 10)
    assert clock.least_delay_ns == 0
    exchange(200, 60)
    assert 40 * MILLISECOND_NS < clock.least_delay_ns <= 50 * MILLISECOND_NS
    exchange(1, 10)
    assert clock.least_delay_ns == 0


def test_what_we_never_sent_is_not_believed():
    clock = LinkClock()
    clock.helper(2 * SECOND_NS, 0, SECOND_NS)
    clock.helper(-5, 0, SECOND_NS)
    clock.helper(5, 2**61, SECOND_NS)
    assert not clock.is_known
    assert clock.shift_at(SECOND_NS) == UNKNOWN_CLOCK_SHIFT


def test_a_clock_found_to_be_worse_widens_what_is_known():
    clock = LinkClock(drift_ppm=100)
    clock.helper(SECOND_NS, SECOND_NS, SECOND_NS)
    later_ns = 11 * SECOND_NS
    before_ns = clock.shift_at(later_ns)
    clock.assume_drift(50)
    assert clock.shift_at(later_ns) == before_ns
    clock.assume_drift(200)
    assert clock.drift_ppm == 200
    assert clock.shift_at(later_ns) - before_ns > 1_990_000  # 200 ppm more of ten seconds


def test_shifts_add_up_and_the_unknown_stays_unknown():
    assert add_shifts(5, -7) == -2
    assert add_shifts(UNKNOWN_CLOCK_SHIFT, 7) == UNKNOWN_CLOCK_SHIFT
    assert add_shifts(7, UNKNOWN_CLOCK_SHIFT) == UNKNOWN_CLOCK_SHIFT
    assert add_shifts(2**61 - 1, 1) == UNKNOWN_CLOCK_SHIFT


def test_what_was_heard_late_was_said_when_the_peers_clock_says():
    clock = LinkClock()
    clock.helper(SECOND_NS, 7 * SECOND_NS + 2 * MILLISECOND_NS, SECOND_NS + 4 * MILLISECOND_NS)
    way_ns, now_ns = 4 * MILLISECOND_NS, 3 * SECOND_NS
    shift_ns = clock.shift_at(now_ns)
    prompt_ns = now_ns + 6 * SECOND_NS - 2 * MILLISECOND_NS
    assert said_at_ns(prompt_ns, shift_ns, way_ns, now_ns) == pytest.approx(now_ns, abs=MILLISECOND_NS)
    unread_ns = prompt_ns - 80 * MILLISECOND_NS
    said_ns = said_at_ns(unread_ns, shift_ns, way_ns, now_ns)
    assert said_ns == pytest.approx(now_ns - 80 * MILLISECOND_NS, abs=MILLISECOND_NS)
    assert said_at_ns(unread_ns, UNKNOWN_CLOCK_SHIFT, way_ns, now_ns) == now_ns
    assert said_at_ns(2**61 - 1, shift_ns, way_ns, now_ns) == now_ns, "nobody says things in the future"
