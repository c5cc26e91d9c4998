"""Messages on their way over links between skewed clocks, and what is known of those clocks by then.

All times are whole milliseconds and rates whole ppm, so that clock readings are exact.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from overlay import delay
from overlay.delay import LINKS_MAX, LinkClock, add_shifts
from overlay.limits import DRIFT_MAX_PPM, DRIFT_PPM, MILLISECOND_NS
from overlay.messages import UNKNOWN_CLOCK_SHIFT

HORIZON_MS = 60_000


class SkewedClock:
    """A clock with an offset and a drift that changes every few seconds, always within the bound."""

    def __init__(self, offset_ns: int, drifts_ppm: Sequence[int], segment_ms: int) -> None:
        self.offset_ns = offset_ns
        self.drifts_ppm = drifts_ppm
        self.segment_ms = segment_ms

    def __repr__(self) -> str:
        return f"SkewedClock({self.offset_ns}, {self.drifts_ppm}, {self.segment_ms})"

    def read(self, true_ms: int) -> int:
        """The reading, in ns, at a true time."""
        gained_ns = 0
        left_ms, number = true_ms, 0
        while left_ms > 0:
            step_ms = min(left_ms, self.segment_ms)
            gained_ns += step_ms * self.drifts_ppm[number % len(self.drifts_ppm)]
            left_ms -= step_ms
            number += 1
        return self.offset_ns + true_ms * MILLISECOND_NS + gained_ns


class Exchange(NamedTuple):
    """A helper: sent when, how long there, how long until we know, lost or not."""

    sent_ms: int
    there_ms: int
    back_ms: int
    lost: bool = False


class Known(NamedTuple):
    """A helper that has come back: when, when it had been sent, when it had arrived."""

    known_ms: int
    sent_ms: int
    arrived_ms: int


class Journey(NamedTuple):
    """A message over several links."""

    drift_ppm: int
    nodes: Sequence[SkewedClock]
    helpers: Sequence[Sequence[Exchange]]
    """Of each link."""
    born_ms: int
    stages: Sequence[tuple[int, int]]
    """Of each link: when the message left the node before it, when it reached the node after it."""

    @property
    def seen_ms(self) -> int:
        return self.stages[-1][1]

    @property
    def true_ns(self) -> int:
        return (self.seen_ms - self.born_ms) * MILLISECOND_NS


def clocks(drift_ppm: int) -> st.SearchStrategy[SkewedClock]:
    return st.builds(
        SkewedClock,
        st.integers(10**12, 10**15),
        st.lists(st.integers(-drift_ppm, drift_ppm), min_size=1, max_size=6),
        st.integers(500, 20_000),
    )


delays_ms = st.integers(0, 500)
exchanges = st.lists(
    st.builds(Exchange, st.integers(0, HORIZON_MS), delays_ms, delays_ms, st.booleans()), max_size=8
)
"""Helpers of one link, perhaps none."""


def teach(
    clock: LinkClock,
    ours: SkewedClock,
    theirs: SkewedClock,
    helpers: Iterable[Exchange],
    until_ms: int,
    floor_ms: int = 0,
) -> list[Known]:
    """Give a link clock all helpers that have come back by then; returns those, oldest answer first."""
    back = sorted(
        Known(sent + floor_ms + there + back, sent, sent + floor_ms + there)
        for sent, there, back, lost in helpers
        if not lost and sent + floor_ms + there + back <= until_ms
    )
    for known_ms, sent_ms, arrived_ms in back:
        clock.helper(ours.read(sent_ms), theirs.read(arrived_ms), ours.read(known_ms))
    return back


@st.composite
def journeys(
    draw: Callable[..., Any], links_most: int = LINKS_MAX, drift_most: int = 5_000, heard: bool = True
) -> Journey:
    """A message over several links; if `heard`, each of them has had a helper by then."""
    drift_ppm = draw(st.sampled_from((1, 50, DRIFT_PPM, 1_000, drift_most)))
    links = draw(st.integers(1, links_most))
    nodes = draw(st.lists(clocks(drift_ppm), min_size=links + 1, max_size=links + 1))
    born_ms = draw(st.integers(0, HORIZON_MS))
    stages, helpers, now_ms = [], [], born_ms
    for _ in range(links):
        sent_ms = now_ms + draw(st.integers(0, 5_000))
        now_ms = sent_ms + draw(st.integers(0, 2_000))
        stages.append((sent_ms, now_ms))
        of_link = draw(exchanges)
        if heard:
            of_link = [*of_link, draw(_heard_by(now_ms, 500))]
        helpers.append(of_link)
    return Journey(drift_ppm, nodes, helpers, born_ms, stages)


@st.composite
def _heard_by(draw: Callable[..., Any], until_ms: int, delay_most_ms: int) -> Exchange:
    """A helper that has come back by then: just now, long ago or at any time between."""
    ago_ms = draw(st.integers(0, 20) | st.integers(5_000, 10_000) | st.integers(0, HORIZON_MS))
    back_ms = draw(st.integers(0, min(delay_most_ms, until_ms)))
    there_ms = draw(st.integers(0, min(delay_most_ms, until_ms - back_ms)))
    return Exchange(max(0, until_ms - back_ms - there_ms - ago_ms), there_ms, back_ms)


@st.composite
def worst_journeys(draw: Callable[..., Any]) -> Journey:
    """Nothing that could hide drift: fast helpers, clocks as wrong as they may be, long waits.

    Neighbours drift against each other all the time; all of them may turn round once.
    """
    drift_ppm = draw(st.sampled_from((DRIFT_PPM, 1_000, DRIFT_MAX_PPM)))
    links = draw(st.integers(1, LINKS_MAX))
    sign = draw(st.sampled_from((1, -1)))
    turn_ms = draw(st.sampled_from((10**9, HORIZON_MS)))
    nodes = []
    for _ in range(links + 1):
        ppm = sign * drift_ppm
        nodes.append(SkewedClock(draw(st.integers(10**12, 10**15)), [ppm, -ppm], turn_ms))
        sign = -sign
    # The age's own factor hides what shifts lack, so half of all messages take no time at all.
    at_once_or_late_ms = st.just(0) if draw(st.booleans()) else st.just(0) | st.integers(0, HORIZON_MS)
    born_ms = now_ms = draw(st.integers(0, 2 * HORIZON_MS))
    stages, helpers = [], []
    for _ in range(links):
        sent_ms = now_ms + draw(at_once_or_late_ms)
        now_ms = sent_ms + draw(at_once_or_late_ms)
        stages.append((sent_ms, now_ms))
        helpers.append(draw(st.lists(_heard_by(now_ms, 1), min_size=1, max_size=2)))
    return Journey(drift_ppm, nodes, helpers, born_ms, stages)


def _alternating(links: int, drift_ppm: int, first: int) -> list[SkewedClock]:
    return [
        SkewedClock(10**12 * (3 + node), [drift_ppm * (first if node % 2 == 0 else -first)], 10**9)
        for node in range(links + 1)
    ]


def long_after_the_helper(links: int, drift_ppm: int, pause_ms: int) -> Journey:
    """All helpers are so old, and the first clock has gained on the last one ever since. No time passes."""
    nodes = _alternating(links, drift_ppm, 1)
    helpers = [[Exchange(HORIZON_MS, 0, 0)]] * links
    born_ms = HORIZON_MS + pause_ms
    return Journey(drift_ppm, nodes, helpers, born_ms, [(born_ms, born_ms)] * links)


def waits_at_slow_clocks(links: int, drift_ppm: int) -> Journey:
    """The message waits wherever the clock is slow; helpers come with it, and know nothing of before."""
    nodes = _alternating(links, drift_ppm, -1)
    stages, helpers, now_ms = [], [], 0
    for number in range(links):
        sent_ms = now_ms + (HORIZON_MS if number % 2 == 0 else 0)
        helpers.append([Exchange(sent_ms, 0, 0)])
        stages.append((sent_ms, sent_ms))
        now_ms = sent_ms
    return Journey(drift_ppm, nodes, helpers, 0, stages)


KEPT_MS = 9
"""Less than a shift is used for without being reckoned again."""
WORST = [
    journey
    for links in (1, 3, LINKS_MAX)
    for drift_ppm in (DRIFT_PPM, DRIFT_MAX_PPM)
    for journey in (
        long_after_the_helper(links, drift_ppm, HORIZON_MS),
        long_after_the_helper(links, drift_ppm, 9_900),
        long_after_the_helper(links, drift_ppm, KEPT_MS),
        waits_at_slow_clocks(links, drift_ppm),
    )
]
"""What no safeguard may be missing for. With an even number of links the first and the last clock agree."""


def shift_of(journey: Journey) -> int:
    """What the shifts of all links add up to."""
    shift_ns = 0
    for number, (_, arrived_ms) in enumerate(journey.stages, 1):
        ours, theirs = journey.nodes[number], journey.nodes[number - 1]
        clock = LinkClock(journey.drift_ppm)
        known = teach(clock, ours, theirs, journey.helpers[number - 1], arrived_ms)
        assert clock.is_known == bool(known)
        shift_ns = add_shifts(shift_ns, clock.shift_at(ours.read(arrived_ms)))
    return shift_ns


def elapsed_of(journey: Journey) -> int | None:
    """What the last node reckons has passed; None if it cannot know."""
    shift_ns = shift_of(journey)
    if shift_ns == UNKNOWN_CLOCK_SHIFT:
        return None
    return journey.nodes[-1].read(journey.seen_ms) - journey.nodes[0].read(journey.born_ms) + shift_ns


def margin_of(journey: Journey) -> int:
    """By how much the bound is above the true age."""
    elapsed_ns = elapsed_of(journey)
    assert elapsed_ns is not None
    return delay.age_bound_ns(elapsed_ns, journey.drift_ppm) - journey.true_ns
