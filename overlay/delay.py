"""How old a message can be at most, from local clocks alone (Fail-Aware Publish/Subscribe, 4).

Two nodes never compare their clocks. Node q sends a *helper* at A (its clock), node p gets it at
B (its clock). When p reads its clock as C and sends, and q receives at D, the time on the way is
at most (equation 1, without a lower bound of the helper's own delay)

    (D - A)(1 + drift) - (C - B)(1 - drift)  =  D - C + (B - A) + drift x ((D - A) + (C - B))

because the helper cannot have arrived before it was sent. So all q has to know of p is one
number, the *clock shift*: the age of anything p stamped C is at most `now - C + shift`, with

    shift  =  (B - A) + 2 drift x (now - A)

which only depends on the link and the moment, not on the message. The best helper is the one
with the smallest shift now (equation 2). Heartbeats are the helpers: each one echoes the last
one received with both times.
"""

from typing import Final

from overlay.messages import UNKNOWN_CLOCK_SHIFT

DRIFT_PPM: Final = 100
"""Most a clock is assumed to drift against real time."""


class LinkClock:
    """The clock shift of one peer."""

    __slots__ = ("_best_difference_ns", "_best_sent_ns", "shift_ns")

    def __init__(self) -> None:
        self.shift_ns = UNKNOWN_CLOCK_SHIFT
        """As of the last `refresh`; add to `now - stamp` to bound the age of what the peer stamped."""
        self._best_difference_ns = 0
        self._best_sent_ns = -1

    def helper(self, sent_ns: int, received_ns: int, now_ns: int) -> None:
        """We sent a helper at `sent_ns`, the peer got it when its clock read `received_ns`."""
        difference_ns = received_ns - sent_ns
        if self._best_sent_ns < 0 or difference_ns + _drift_ns(now_ns - sent_ns) <= self._shift_ns(now_ns):
            self._best_difference_ns = difference_ns
            self._best_sent_ns = sent_ns

    def refresh(self, now_ns: int, valid_for_ns: int) -> None:
        """Make `shift_ns` hold until `now_ns + valid_for_ns`."""
        if self._best_sent_ns >= 0:
            self.shift_ns = self._shift_ns(now_ns + valid_for_ns)

    def _shift_ns(self, now_ns: int) -> int:
        return self._best_difference_ns + _drift_ns(now_ns - self._best_sent_ns)


def _drift_ns(elapsed_ns: int) -> int:
    """What two clocks can have drifted apart in this time, rounded up."""
    return 2 * DRIFT_PPM * elapsed_ns // 1_000_000 + 1


def add_shifts(first_ns: int, second_ns: int) -> int:
    """The shift over two hops; unknown if either is."""
    if UNKNOWN_CLOCK_SHIFT in (first_ns, second_ns):
        return UNKNOWN_CLOCK_SHIFT
    return first_ns + second_ns
