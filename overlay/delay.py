"""How old a message can be at most, from local clocks alone (Fail-Aware Publish/Subscribe, 4 and 6).

Two nodes never compare their clocks. Node q sends a *helper* at A (its clock), node p gets it at
B (its clock). When p reads its clock as C and sends, and q receives at D, the time on the way is
at most (equation 1)

    (D - A)(1 + drift) - (C - B)(1 - drift) - floor

because the helper took at least `floor`. Rearranged,

    D - C + shift,    shift = (B - A) - floor + drift x ((D - A) + (C - B))

so all q has to know of p is one number, the *clock shift*, which depends on the link and the
moment and not on the message. Heartbeats are the helpers: each one echoes the last one received
with both times.

*Best helper.* The one with the smallest shift now (equation 2). The improved lower bound of a
helper's delay (3-5) is how much later it came than the best helper proves possible. Put into
equation 1 it turns the shift of any helper into that of the best, so choosing by equation 6 comes
to the same as keeping the smallest shift (`overlay.equations` has them as published, the tests
compare). What 3-5 add is the lower bound itself: how long our messages to the peer take at least,
`least_delay_ns`.

*Many hops.* Time inside a node is the node's own reading, so the sum over hops (7) telescopes:

    age  <=  (now - born + sum of shifts) x (1 + drift of all clocks compared)

Each hop adds its link's shift once per frame; only the end of the path multiplies (`age_bound_ns`).
A shift is never below what the two clocks are really apart when the frame is taken, so the sum is at
least what the nodes' own clocks have measured, each until the next node took the message. They may
have been slow: that is what the factor is for. Where no clock is worse than it says, once the drift
is enough; the factor counts all clocks compared, and what is more than once is a reserve.

*Unlike clocks.* Whoever bounds an age reckons with the drift that it and the node before it state. A
client whose clock is worse than its edge's has its births put back there (`put_back_ns`); from a
broker whose clock is worse than ours nothing is learnt (`stay_unknown`). So no clock on the way of a
known age is worse than the last one says.

*Against the equations.* The telescoped bound is below equation 7 with the same helpers by no more than
`telescoping_loss_ns`, which is rounding and what drift makes of drift, and above it, whichever helpers
that takes, by no more than `drift_allowance_ns`.
"""

from collections.abc import Iterable
from typing import Final

from overlay.limits import DRIFT_MAX_PPM, DRIFT_PPM, MILLISECOND_NS, WIRE_NUMBER_BITS
from overlay.messages import UNKNOWN_CLOCK_SHIFT

LINKS_MAX: Final = 5
"""Links on the longest way: client, edge, primary, its backup after a crash, edge, client."""
SHIFT_STEP_NS: Final = 10 * MILLISECOND_NS
"""A shift is reckoned for so far ahead, to be used as it is until then."""
HOP_ROUNDING_NS: Final = 4
"""What rounding makes of one hop: equation 1 rounds up twice and the time inside a node once, a shift is
rounded once for all of that."""

_WINDOW: Final = 64
"""Helpers per half of the rolling window whose smallest lower bound counts."""
_MILLION: Final = 1_000_000

assert (2 * LINKS_MAX + 1) * DRIFT_MAX_PPM < _MILLION // 2


class LinkClock:
    """What is known of one peer's clock, and of the way to it."""

    __slots__ = (
        "_best_difference_ns",
        "_best_sent_ns",
        "_drift_ppm",
        "_floor_ns",
        "_helpers",
        "_recent_least_ns",
        "_stays_unknown",
        "_valid_until_ns",
        "_window_least_ns",
        "latest_received_ns",
        "latest_sent_ns",
        "shift_ns",
    )

    def __init__(self, drift_ppm: int = DRIFT_PPM, floor_ns: int = 0) -> None:
        """`floor_ns` is what anything sent to the peer takes at least, by distance or bandwidth."""
        self.shift_ns = UNKNOWN_CLOCK_SHIFT
        """As `shift_at` gave it last."""
        self.latest_sent_ns = -1
        """When the last helper left, the best or not; it is only there to be compared with."""
        self.latest_received_ns = -1
        """The peer's clock when it got that one."""
        self._drift_ppm = drift_ppm
        self._floor_ns = floor_ns
        self._best_difference_ns = 0
        self._best_sent_ns = -1
        self._valid_until_ns = -1
        self._helpers = 0
        self._recent_least_ns = -1
        self._stays_unknown = False
        self._window_least_ns = -1

    @property
    def drift_ppm(self) -> int:
        """Most that the clocks on either side drift."""
        return self._drift_ppm

    def assume_drift(self, drift_ppm: int) -> None:
        """A clock may drift more than was thought: that holds for what is known already, too."""
        if drift_ppm > self._drift_ppm:
            self._drift_ppm = drift_ppm
            self._valid_until_ns = -1

    def stay_unknown(self) -> None:
        """Learn nothing: the peer's clock may be worse than those who get the messages reckon with."""
        self._stays_unknown = True
        self._best_sent_ns = self.latest_sent_ns = self.latest_received_ns = -1
        self.shift_ns = UNKNOWN_CLOCK_SHIFT

    @property
    def is_known(self) -> bool:
        """There has been a helper, so ages can be bounded."""
        return self._best_sent_ns >= 0

    def helper(self, sent_ns: int, received_ns: int, now_ns: int) -> None:
        """We sent a helper at `sent_ns`, the peer got it when its clock read `received_ns`."""
        if not 0 <= sent_ns <= now_ns or received_ns >> WIRE_NUMBER_BITS:
            return  # we never sent that; a peer that invents numbers is not believed
        if self._stays_unknown:
            return
        self.latest_sent_ns = sent_ns
        self.latest_received_ns = received_ns
        difference_ns = received_ns - sent_ns - self._floor_ns
        if self._best_sent_ns < 0 or difference_ns + self._apart_ns(now_ns - sent_ns) <= self._reckon(now_ns):
            self._best_difference_ns = difference_ns
            self._best_sent_ns = sent_ns
        self._valid_until_ns = -1
        self.shift_at(now_ns)
        least_ns = received_ns - sent_ns - self._reckon(now_ns)
        least_ns = max(self._floor_ns, least_ns - self._apart_ns(max(0, least_ns)))
        if self._recent_least_ns < 0 or least_ns < self._recent_least_ns:
            self._recent_least_ns = least_ns
        self._helpers += 1
        if self._helpers % _WINDOW == 0:
            self._window_least_ns = self._recent_least_ns
            self._recent_least_ns = -1

    def shift_at(self, now_ns: int) -> int:
        """What to add to `now - stamp` to bound the age of what the peer stamped."""
        if now_ns > self._valid_until_ns and self._best_sent_ns >= 0:
            self._valid_until_ns = now_ns + SHIFT_STEP_NS
            self.shift_ns = self._reckon(self._valid_until_ns)
        return self.shift_ns

    @property
    def least_delay_ns(self) -> int:
        """What our helpers have lately taken to the peer at least (equations 3 and 4).

        Proven, so it is usually no more than the floor: two nodes cannot tell a slow way there from a
        slow way back. It rises when a way becomes longer than it was, because the clocks stay put.
        """
        if self._window_least_ns < 0:
            return self._floor_ns  # not enough to go by
        if self._recent_least_ns < 0:
            return self._window_least_ns
        return min(self._window_least_ns, self._recent_least_ns)

    def _reckon(self, until_ns: int) -> int:
        return self._best_difference_ns + self._apart_ns(until_ns - self._best_sent_ns)

    def _apart_ns(self, elapsed_ns: int) -> int:
        return apart_ns(elapsed_ns, self._drift_ppm)


def apart_ns(elapsed_ns: int, drift_ppm: int) -> int:
    """What two clocks can have drifted apart while one of them measured this time, rounded up."""
    return 2 * drift_ppm * elapsed_ns // (_MILLION - drift_ppm) + 1


def age_bound_ns(elapsed_ns: int, drift_ppm: int) -> int:
    """How old a message can be at most; `elapsed_ns` is `now - born` plus all shifts on its way."""
    all_ppm = (2 * LINKS_MAX + 1) * drift_ppm
    return elapsed_ns + max(0, elapsed_ns) * all_ppm // (_MILLION - all_ppm) + 1


def drift_allowance_ns(since_helpers_ns: Iterable[int], elapsed_ns: int, drift_ppm: int) -> int:
    """Most that the bound is above equation 7, which bounds links with any helpers known to us.

    `since_helpers_ns` has for each link how long before the frame came that helper had left, on the
    receiver's clock; `elapsed_ns` is as in `age_bound_ns`. A shift takes both clocks to drift apart since
    the helper, and for `SHIFT_STEP_NS` more; the factor is for all the age.
    """
    links_ns = sum(
        apart_ns(since_ns + SHIFT_STEP_NS, drift_ppm) + HOP_ROUNDING_NS for since_ns in since_helpers_ns
    )
    return links_ns + age_bound_ns(elapsed_ns, drift_ppm) - elapsed_ns


def telescoping_loss_ns(since_helpers_ns: Iterable[int], drift_ppm: int) -> int:
    """Most that the bound is below equation 7 with the helpers that were chosen; times as above.

    Equation 1 measures the time since the helper with both clocks, a shift with the receiver's alone.
    The other one may have been fast: what it measures more is drift, and of that once more the drift.
    """
    return sum(
        apart_ns(apart_ns(since_ns, drift_ppm), drift_ppm) // 2 + HOP_ROUNDING_NS
        for since_ns in since_helpers_ns
    )


def put_back_ns(born_ns: int, clock_shift_ns: int, now_ns: int, drift_ppm: int) -> int:
    """A birth on a peer's clock, so much earlier that the drift of that clock until now is covered.

    What comes after us need not know of that drift, then. The shift is that to the peer; what is not
    known stays so, and a drift of 0 covers nothing.
    """
    if not born_ns or not drift_ppm or clock_shift_ns == UNKNOWN_CLOCK_SHIFT:
        return born_ns
    measured_ns = max(0, now_ns - born_ns + clock_shift_ns)
    earlier_ns = born_ns - measured_ns * drift_ppm // (_MILLION - drift_ppm) - 1
    return earlier_ns or -1  # 0 would say that nothing is known


def link_bound_ns(sent_ns: int, clock_shift_ns: int, now_ns: int, drift_ppm: int) -> int:
    """How long a frame was on its link at most (equation 1); 0 if that is not known.

    `sent_ns` is the sender's clock when the frame left, 0 if it did not say; the shift is the link's.
    """
    if not sent_ns or clock_shift_ns == UNKNOWN_CLOCK_SHIFT:
        return 0
    return age_bound_ns(max(0, now_ns - sent_ns + clock_shift_ns), drift_ppm)


def said_at_ns(sent_ns: int, clock_shift_ns: int, way_ns: int, now_ns: int) -> int:
    """When the peer said something that we hear now, as if it had come within a round trip of `way_ns`.

    Later than that it can only have waited, on the way back or unread at a node that is behind: whoever
    wants to know how long the peer took must not count that. `now_ns` if the peer's clock is not known.
    """
    if clock_shift_ns == UNKNOWN_CLOCK_SHIFT:
        return now_ns
    return min(now_ns, sent_ns - clock_shift_ns + way_ns)


def add_shifts(first_ns: int, second_ns: int) -> int:
    """The shift over two hops; unknown if either is, or if the sum is no number a clock can be apart."""
    if UNKNOWN_CLOCK_SHIFT in (first_ns, second_ns):
        return UNKNOWN_CLOCK_SHIFT
    both_ns = first_ns + second_ns
    return UNKNOWN_CLOCK_SHIFT if abs(both_ns) >> WIRE_NUMBER_BITS else both_ns
