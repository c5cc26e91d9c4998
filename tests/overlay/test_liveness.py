"""Heartbeats: when a peer counts as dead, and how far away it is."""

from hypothesis import given
from hypothesis import strategies as st

from overlay.limits import (
    HEARTBEAT_FROZEN_NS,
    HEARTBEAT_INTERVAL_NS,
    HEARTBEAT_SILENCE_INTERVALS,
    HEARTBEAT_SILENCE_NS,
    HEARTBEAT_UNKNOWN_NS,
)
from overlay.liveness import Liveness
from overlay.messages import Heartbeat

MS = 1_000_000
TICK_NS = 10 * MS
START_NS = 10**12


def _new() -> Liveness:
    return Liveness(HEARTBEAT_INTERVAL_NS, HEARTBEAT_SILENCE_NS, START_NS)


def _lan() -> Liveness:
    """Of a peer whose round trip is known to be next to nothing."""
    liveness = _new()
    _sample_round_trip(liveness, 0, START_NS)
    return liveness


def _ticks_until_dead(liveness: Liveness, now_ns: int, at_most: int = 10_000) -> tuple[int, int]:
    """Regular ticks without a word from the peer: how many until it counts as dead, and the time then."""
    for count in range(1, at_most):
        now_ns += TICK_NS
        if liveness.tick(now_ns, TICK_NS):
            return count, now_ns
    raise AssertionError(f"still alive after {at_most} ticks")


def _sample_round_trip(liveness: Liveness, round_trip_ns: int, now_ns: int) -> None:
    liveness.received(Heartbeat(now_ns, now_ns - round_trip_ns, now_ns, 0), now_ns)


def test_a_silent_lan_peer_is_noticed_right_after_fifty_milliseconds() -> None:
    ticks, _ = _ticks_until_dead(_lan(), START_NS)
    assert ticks == HEARTBEAT_SILENCE_NS // TICK_NS + 1


@given(st.integers(0, HEARTBEAT_UNKNOWN_NS - 2 * TICK_NS))
def test_a_peer_however_far_away_lives_until_its_first_echo(round_trip_ns: int) -> None:
    # Nothing at all is heard before: the other side's first heartbeat was lost.
    liveness = _new()
    now_ns = START_NS
    while now_ns < START_NS + round_trip_ns + TICK_NS:
        now_ns += TICK_NS
        assert not liveness.tick(now_ns, TICK_NS)
    liveness.heard()
    _sample_round_trip(liveness, round_trip_ns, now_ns)
    _, dead_ns = _ticks_until_dead(liveness, now_ns)
    assert dead_ns - now_ns >= max(HEARTBEAT_SILENCE_NS, 2 * round_trip_ns)


def test_a_peer_that_never_echoes_is_noticed_after_a_second() -> None:
    ticks, _ = _ticks_until_dead(_new(), START_NS)
    assert ticks == HEARTBEAT_UNKNOWN_NS // TICK_NS + 1


def test_a_peer_that_is_heard_lives() -> None:
    liveness = _lan()
    now_ns = START_NS
    for _ in range(1000):
        now_ns += TICK_NS
        assert not liveness.tick(now_ns, TICK_NS)
        liveness.heard()
    assert _ticks_until_dead(liveness, now_ns)[0] == 6


@given(st.lists(st.integers(0, 3_600_000 * MS), max_size=2))
def test_the_time_this_node_was_held_up_is_not_counted_as_silence(stalls_ns: list[int]) -> None:
    liveness = _lan()
    now_ns = START_NS
    for stall_ns in stalls_ns:
        now_ns += stall_ns
        assert not liveness.tick(now_ns, TICK_NS)
    ticks, _ = _ticks_until_dead(liveness, now_ns)
    # A stall counts as two ticks at most, so the peer still gets a part of its grace.
    assert ticks >= 6 - 2 * len(stalls_ns)


@given(st.integers(1, 2000 * MS))
def test_a_wan_peer_may_be_silent_for_two_round_trips_and_four_intervals(round_trip_ns: int) -> None:
    liveness = _lan()
    _sample_round_trip(liveness, round_trip_ns, START_NS)
    limit_ns = max(
        HEARTBEAT_SILENCE_NS, 2 * round_trip_ns + HEARTBEAT_SILENCE_INTERVALS * HEARTBEAT_INTERVAL_NS
    )
    assert liveness.silence_limit_ns == limit_ns
    _, dead_ns = _ticks_until_dead(liveness, START_NS)
    assert limit_ns < dead_ns - START_NS <= limit_ns + TICK_NS


@given(
    offset_ns=st.integers(-(10**15), 10**15),
    there_ns=st.integers(0, 500 * MS),
    held_ns=st.integers(0, 100 * MS),
    back_ns=st.integers(0, 500 * MS),
)
def test_the_round_trip_is_right_whatever_the_offset_between_the_clocks(
    offset_ns: int, there_ns: int, held_ns: int, back_ns: int
) -> None:
    ours = _new()
    theirs = Liveness(HEARTBEAT_INTERVAL_NS, HEARTBEAT_SILENCE_NS, 0)
    base_ns = 10**16
    sent_ns = base_ns
    theirs.received(ours.heartbeat(sent_ns, 0), sent_ns + there_ns + offset_ns)
    answer = theirs.heartbeat(sent_ns + there_ns + held_ns + offset_ns, 0)
    ours.received(answer, sent_ns + there_ns + held_ns + back_ns)
    assert ours.round_trip_ns == there_ns + back_ns


def test_the_first_heartbeat_has_nothing_to_echo_and_gives_no_sample() -> None:
    ours, theirs = _new(), _new()
    first = theirs.heartbeat(START_NS, 5)
    assert (first.echo_ns, first.echo_received_ns, first.received) == (0, 0, 5)
    ours.received(first, START_NS + MS)
    assert ours.round_trip_ns == 0
    assert ours.silence_limit_ns == HEARTBEAT_UNKNOWN_NS


def test_an_impossible_echo_is_ignored() -> None:
    liveness = _lan()
    _sample_round_trip(liveness, 3 * MS, START_NS)
    liveness.received(Heartbeat(START_NS, START_NS + 10 * MS, START_NS, 0), START_NS)
    assert liveness.round_trip_ns == 3 * MS


@given(st.lists(st.integers(0, 300 * MS), min_size=1, max_size=400))
def test_the_limit_covers_every_recent_round_trip_and_forgets_old_ones(round_trips_ns: list[int]) -> None:
    liveness = _lan()
    for at, round_trip_ns in enumerate(round_trips_ns):
        _sample_round_trip(liveness, round_trip_ns, START_NS + at * TICK_NS)
    upper_ns = (liveness.silence_limit_ns - HEARTBEAT_SILENCE_INTERVALS * HEARTBEAT_INTERVAL_NS) // 2
    assert liveness.round_trip_ns == round_trips_ns[-1]
    assert liveness.silence_limit_ns == HEARTBEAT_SILENCE_NS or upper_ns in round_trips_ns[-128:]
    assert liveness.silence_limit_ns >= HEARTBEAT_SILENCE_NS
    assert upper_ns >= max(round_trips_ns[-64:])


def test_heartbeats_are_due_at_the_tick_nearest_to_the_interval() -> None:
    liveness = _lan()
    assert liveness.is_due(START_NS, HEARTBEAT_INTERVAL_NS)
    liveness.heartbeat(START_NS, 0)
    assert not liveness.is_due(START_NS + HEARTBEAT_INTERVAL_NS // 2 - 1, HEARTBEAT_INTERVAL_NS)
    assert liveness.is_due(START_NS + HEARTBEAT_INTERVAL_NS // 2, HEARTBEAT_INTERVAL_NS)


def test_a_peer_whose_host_lives_counts_as_frozen_after_half_a_second() -> None:
    liveness = _lan()
    _, now_ns = _ticks_until_dead(liveness, START_NS)
    assert not liveness.is_frozen
    while not liveness.is_frozen:
        now_ns += TICK_NS
        liveness.tick(now_ns, TICK_NS)
    assert HEARTBEAT_FROZEN_NS < now_ns - START_NS <= HEARTBEAT_FROZEN_NS + TICK_NS
    liveness.heard()
    assert not liveness.is_frozen


def test_a_peer_far_away_is_not_frozen_before_it_may_be_silent() -> None:
    liveness = _lan()
    _sample_round_trip(liveness, 2000 * MS, START_NS)
    _, dead_ns = _ticks_until_dead(liveness, START_NS)
    assert liveness.is_frozen
    assert dead_ns - START_NS > 2 * 2000 * MS


def test_the_way_is_measured_while_nothing_queues_on_it() -> None:
    liveness = _lan()
    _sample_round_trip(liveness, 3 * MS, START_NS)
    for at in range(1, 500):
        now_ns = START_NS + at * TICK_NS
        liveness.received(Heartbeat(now_ns, now_ns - 80 * MS, now_ns, 0), now_ns, calm=False)
        assert liveness.lowest_round_trip_ns == 3 * MS
    assert liveness.recent_round_trip_ns == 80 * MS, "what messages meet now, queue included"
    for at in range(500, 700):
        _sample_round_trip(liveness, 20 * MS, START_NS + at * TICK_NS)
    assert liveness.lowest_round_trip_ns == 20 * MS, "the way itself has become longer"
