"""The bound on the age of messages is never below the truth, whatever the clocks do within their drift."""

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from overlay import delay
from overlay.delay import (
    HOP_ROUNDING_NS,
    LINKS_MAX,
    SHIFT_STEP_NS,
    LinkClock,
    add_shifts,
    age_bound_ns,
    drift_allowance_ns,
    link_bound_ns,
    put_back_ns,
    said_at_ns,
    telescoping_loss_ns,
)
from overlay.equations import (
    Helper,
    at_most_ns,
    improved_lower_bound_ns,
    is_better,
    total_ns,
    upper_bound_ns,
)
from overlay.limits import DRIFT_MAX_PPM, DRIFT_PPM, MILLISECOND_NS, SECOND_NS
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from runtime.compiled import compiled_modules
from tests.overlay.journeys import (
    HORIZON_MS,
    KEPT_MS,
    WORST,
    SkewedClock,
    clocks,
    delays_ms,
    elapsed_of,
    exchanges,
    journeys,
    long_after_the_helper,
    margin_of,
    teach,
    waits_at_slow_clocks,
    worst_journeys,
)

assert KEPT_MS * MILLISECOND_NS < SHIFT_STEP_NS


@given(journeys())
def test_the_bound_is_never_below_the_true_age(journey):
    assert margin_of(journey) >= 0


@given(worst_journeys())
def test_the_bound_is_never_below_the_true_age_where_nothing_hides_drift(journey):
    assert margin_of(journey) >= 0


@given(journeys(heard=False))
def test_the_age_is_unknown_if_any_link_had_no_helper_and_bounded_else(journey):
    heard = all(
        any(not lost and sent + there + back <= arrived_ms for sent, there, back, lost in of_link)
        for of_link, (_, arrived_ms) in zip(journey.helpers, journey.stages, strict=True)
    )
    event(f"every link had a helper: {heard}")
    assert (elapsed_of(journey) is not None) == heard
    if heard:
        assert margin_of(journey) >= 0


@pytest.mark.parametrize("drift_ppm", [DRIFT_PPM, DRIFT_MAX_PPM])
def test_five_links_with_the_worst_clocks_are_bounded_and_not_by_much_more_than_must_be(drift_ppm):
    old = long_after_the_helper(LINKS_MAX, drift_ppm, HORIZON_MS)
    every_link_ns = LINKS_MAX * 2 * drift_ppm * HORIZON_MS  # a millisecond is a million ns
    assert old.true_ns == 0
    # Each link allows for its own two clocks: that all but the first and the last cancel nobody can know.
    assert 0 <= margin_of(old) <= (every_link_ns * 4 // 5) * 1.2 + MILLISECOND_NS

    waiting = waits_at_slow_clocks(LINKS_MAX, drift_ppm)
    assert waiting.true_ns == 3 * HORIZON_MS * MILLISECOND_NS
    assert elapsed_of(waiting) < waiting.true_ns, "what the factor of the age is for"
    assert 0 <= margin_of(waiting) <= waiting.true_ns * (2 * LINKS_MAX + 1) * drift_ppm // 900_000


def test_the_worst_cases_are_bounded():
    assert min(margin_of(journey) for journey in WORST) >= 0


@given(worst_journeys() | journeys())
def test_one_drift_would_be_factor_enough_if_clocks_are_as_good_as_they_say(journey):
    """Shifts make up for all clocks but those that measured the age: the rest of the factor is reserve."""
    assert at_most_ns(elapsed_of(journey), journey.drift_ppm) >= journey.true_ns


# Safeguards: without any one of them some worst case is broken.


def _no_drift(monkeypatch):
    monkeypatch.setattr(LinkClock, "_apart_ns", lambda self, elapsed_ns: 0)


def _half_the_drift(monkeypatch):
    whole = LinkClock._apart_ns
    monkeypatch.setattr(LinkClock, "_apart_ns", lambda self, elapsed_ns: whole(self, elapsed_ns) // 2)


def _no_factor(monkeypatch):
    monkeypatch.setattr(delay, "age_bound_ns", lambda elapsed_ns, drift_ppm: elapsed_ns + 1)


def _half_a_drift_as_factor(monkeypatch):
    monkeypatch.setattr(
        delay,
        "age_bound_ns",
        lambda elapsed_ns, drift_ppm: elapsed_ns + elapsed_ns * drift_ppm // 2_000_000 + 1,
    )


def _shift_kept(monkeypatch, kept_ns):
    def shift_at(self, now_ns):
        if now_ns > self._valid_until_ns and self._best_sent_ns >= 0:
            self._valid_until_ns = now_ns + kept_ns
            self.shift_ns = self._reckon(now_ns)  # and not for so long ahead
        return self.shift_ns

    monkeypatch.setattr(LinkClock, "shift_at", shift_at)


def _shift_kept_for_ten_seconds(monkeypatch):
    _shift_kept(monkeypatch, 10 * SECOND_NS)


def _no_look_ahead(monkeypatch):
    _shift_kept(monkeypatch, SHIFT_STEP_NS)


def _a_millisecond_too_little(monkeypatch):
    whole = LinkClock._reckon
    monkeypatch.setattr(LinkClock, "_reckon", lambda self, until_ns: whole(self, until_ns) - MILLISECOND_NS)


@pytest.mark.skipif(bool(compiled_modules()), reason="functions of compiled modules cannot be replaced")
@pytest.mark.parametrize(
    "leave_out",
    [
        _no_drift,
        _half_the_drift,
        _no_factor,
        _half_a_drift_as_factor,
        _shift_kept_for_ten_seconds,
        _no_look_ahead,
        _a_millisecond_too_little,
    ],
    ids=lambda leave_out: leave_out.__name__.strip("_"),
)
def test_a_safeguard_that_is_left_out_is_missed(leave_out, monkeypatch):
    leave_out(monkeypatch)
    assert min(margin_of(journey) for journey in WORST) < 0


@given(journeys(links_most=1, heard=False))
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
    assume(teach(clock, ours, theirs, helpers, now_ms, floor_ms))
    teach(plain, ours, theirs, helpers, now_ms, floor_ms)
    for pause_ms, way_ms in uses:
        now_ms += pause_ms
        now_ns = ours.read(now_ms)
        shift_ns = clock.shift_at(now_ns)
        bound_ns = age_bound_ns(now_ns - theirs.read(now_ms - way_ms) + shift_ns, DRIFT_PPM)
        assert bound_ns >= way_ms * MILLISECOND_NS
        assert shift_ns == plain.shift_at(now_ns) - floor_ms * MILLISECOND_NS


@st.composite
def hops(draw):
    """A journey, and the order in which the helpers of each link come back."""
    journey = draw(journeys(drift_most=1_000) | worst_journeys())
    orders = [draw(st.permutations(of_link)) for of_link in journey.helpers]
    return journey, orders


def _latest_helpers(journey, orders):
    """The link clocks, taught in that order, with each the latest helper it was told of."""
    for number, (order, (_, arrived_ms)) in enumerate(zip(orders, journey.stages, strict=True), 1):
        ours, theirs = journey.nodes[number], journey.nodes[number - 1]
        clock, latest = LinkClock(journey.drift_ppm), None
        for sent, there, back, lost in order:
            if not lost and sent + there + back <= arrived_ms:
                latest = Helper(ours.read(sent), theirs.read(sent + there))
                clock.helper(*latest[:2], ours.read(arrived_ms))
        assert latest is not None
        assert (clock.latest_sent_ns, clock.latest_received_ns) == latest[:2]
        yield clock, latest


@given(hops())
def test_optimised_is_never_above_unoptimised_but_for_the_drift_allowed(drawn):
    """The bound as deployed, against equations 1 and 7 as published with the latest helper of each link."""
    journey, orders = drawn
    shift_ns, link_bounds_ns, inside_ns, since_helpers_ns = 0, [], [], []
    here_ms = journey.born_ms
    for number, (clock, latest) in enumerate(_latest_helpers(journey, orders), 1):
        ours, theirs = journey.nodes[number], journey.nodes[number - 1]
        sent_ms, arrived_ms = journey.stages[number - 1]
        now_ns = ours.read(arrived_ms)
        shift_ns = add_shifts(shift_ns, clock.shift_at(now_ns))
        link_bounds_ns.append(upper_bound_ns(latest, theirs.read(sent_ms), now_ns, journey.drift_ppm))
        inside_ns.append(theirs.read(sent_ms) - theirs.read(here_ms))
        since_helpers_ns.append(now_ns - latest.sent_ns)
        here_ms = arrived_ms
    elapsed_ns = journey.nodes[-1].read(here_ms) - journey.nodes[0].read(journey.born_ms) + shift_ns
    optimised_ns = age_bound_ns(elapsed_ns, journey.drift_ppm)
    unoptimised_ns = total_ns(link_bounds_ns, inside_ns, journey.drift_ppm)
    assert unoptimised_ns >= journey.true_ns
    event("optimised is below" if optimised_ns < unoptimised_ns else "the allowance is used")
    assert optimised_ns <= unoptimised_ns + drift_allowance_ns(
        since_helpers_ns, elapsed_ns, journey.drift_ppm
    )


def test_the_drift_allowed_is_small():
    """Helpers a second old on five links, a message of a second: what is said of it in docs/bounds.md."""
    allowed_ns = drift_allowance_ns([SECOND_NS] * LINKS_MAX, SECOND_NS, DRIFT_PPM)
    assert 2 * MILLISECOND_NS < allowed_ns < 2.2 * MILLISECOND_NS
    assert drift_allowance_ns([], 0, DRIFT_PPM) == 1


def test_what_telescoping_loses_is_a_few_nanoseconds():
    lost_ns = telescoping_loss_ns([SECOND_NS] * LINKS_MAX, DRIFT_PPM)
    assert LINKS_MAX * HOP_ROUNDING_NS < lost_ns < 150
    assert telescoping_loss_ns([0], DRIFT_PPM) == HOP_ROUNDING_NS


@given(journeys(drift_most=1_000) | worst_journeys())
def test_telescoped_equals_the_sum_over_hops_but_for_drift_and_rounding(journey):
    """Equation 7 with the helpers that each link clock has chosen."""
    drift_ppm, nodes, helpers, born_ms, stages = journey
    shift_ns, link_bounds_ns, inside_ns, since_helpers_ns = 0, [], [], []
    here_ms = born_ms
    for number, (sent_ms, arrived_ms) in enumerate(stages, 1):
        ours, theirs = nodes[number], nodes[number - 1]
        clock = LinkClock(drift_ppm)
        known = teach(clock, ours, theirs, helpers[number - 1], arrived_ms)
        now_ns = ours.read(arrived_ms)
        hop_ns = clock.shift_at(now_ns)
        shift_ns += hop_ns
        pairs = [Helper(ours.read(sent), theirs.read(there)) for _, sent, there in known]
        chosen = min(pairs, key=lambda pair: abs(_shift_of(pair, now_ns, drift_ppm) - hop_ns))
        link_bounds_ns.append(upper_bound_ns(chosen, theirs.read(sent_ms), now_ns, drift_ppm))
        inside_ns.append(theirs.read(sent_ms) - theirs.read(here_ms))
        since_helpers_ns.append(now_ns - chosen.sent_ns)
        here_ms = arrived_ms
    elapsed_ns = nodes[-1].read(here_ms) - nodes[0].read(born_ms) + shift_ns
    difference_ns = age_bound_ns(elapsed_ns, drift_ppm) - total_ns(link_bounds_ns, inside_ns, drift_ppm)
    assert -telescoping_loss_ns(since_helpers_ns, drift_ppm) <= difference_ns
    assert difference_ns <= drift_allowance_ns(since_helpers_ns, elapsed_ns, drift_ppm)


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
    for there_ms in there:
        clock.helper(ours.read(now), theirs.read(now + there_ms), ours.read(now + there_ms))
        now += there_ms + 1
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


def test_from_a_clock_that_is_not_to_be_known_nothing_is_learnt():
    clock = LinkClock()
    clock.helper(SECOND_NS, SECOND_NS, SECOND_NS)
    assert clock.is_known
    clock.stay_unknown()
    clock.helper(SECOND_NS, SECOND_NS, SECOND_NS)
    assert not clock.is_known
    assert clock.shift_at(2 * SECOND_NS) == clock.shift_ns == UNKNOWN_CLOCK_SHIFT


@given(
    drift_ppm=st.integers(1, DRIFT_MAX_PPM),
    worst=st.booleans(),
    waits_ms=st.integers(0, HORIZON_MS),
    shift_ns=st.integers(-(10**15), 10**15),
)
def test_a_birth_that_was_put_back_needs_no_more_drift(drift_ppm, worst, waits_ms, shift_ns):
    """Their clock has measured the time until now, as slowly as it may."""
    ppm = -drift_ppm if worst else drift_ppm
    measured_ns = waits_ms * (MILLISECOND_NS + ppm)
    now_ns = 10**15
    born_ns = now_ns + shift_ns - measured_ns
    age_ns = now_ns - put_back_ns(born_ns, shift_ns, now_ns, drift_ppm) + shift_ns
    assert waits_ms * MILLISECOND_NS <= age_ns <= at_most_ns(measured_ns, drift_ppm)


def test_what_is_not_known_is_not_put_back():
    assert put_back_ns(0, 5, 10, 100) == 0
    assert put_back_ns(7, UNKNOWN_CLOCK_SHIFT, 10, 100) == 7
    assert put_back_ns(7, 5, 10, 0) == 7
    assert put_back_ns(1, 5, 10, 100) == -1, "0 would be unknown"


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
