"""Fail-Aware Publish/Subscribe as published: equations 1-7, one function each.

`overlay.delay` computes the same in another order, because a broker cannot afford this per
message. These are what that is compared with, in the property tests and in the ring of
`isthmus bench ring`. Names are the paper's: q sends helper n to p at A, p gets it at B, p sends
message m at C, q gets it at D.
"""

from typing import NamedTuple

_MILLION = 1_000_000


class Helper(NamedTuple):
    """A helper from q to p."""

    sent_ns: int
    """A, on q's clock."""
    received_ns: int
    """B, on p's clock."""
    lower_bound_ns: int = 0
    """What it took at least: by size and bandwidth, or improved (4)."""


def at_most_ns(measured_ns: int, drift_ppm: int) -> int:
    """The longest real time that a clock may have measured as this, negative ones too."""
    return measured_ns + abs(measured_ns) * drift_ppm // (_MILLION - drift_ppm) + 1


def at_least_ns(measured_ns: int, drift_ppm: int) -> int:
    """The shortest real time that a clock may have measured as this, negative ones too."""
    return -at_most_ns(-measured_ns, drift_ppm)


def upper_bound_ns(helper: Helper, c_ns: int, d_ns: int, drift_ppm: int) -> int:
    """Equations 1 and 5: how long message m took at most."""
    return (
        at_most_ns(d_ns - helper.sent_ns, drift_ppm)
        - at_least_ns(c_ns - helper.received_ns, drift_ppm)
        - helper.lower_bound_ns
    )


def is_better(candidate: Helper, than: Helper, drift_ppm: int) -> bool:
    """Equations 2 and 6: an older `candidate` gives a smaller upper bound than a newer helper."""
    return (
        at_most_ns(than.sent_ns - candidate.sent_ns, drift_ppm) - candidate.lower_bound_ns
        < at_least_ns(than.received_ns - candidate.received_ns, drift_ppm) - than.lower_bound_ns
    )


def improved_lower_bound_ns(
    helper: Helper, left_p_ns: int, reached_q_ns: int, upper_ns: int, drift_ppm: int
) -> int:
    """Equations 3 and 4: how long the helper took at least, from a round trip.

    A message left p at `left_p_ns` and reached q at `reached_q_ns` before q sent the helper; it took
    at most `upper_ns`. What is left of the round trip is the helper's.
    """
    proven_ns = (
        at_least_ns(helper.received_ns - left_p_ns, drift_ppm)
        - at_most_ns(helper.sent_ns - reached_q_ns, drift_ppm)
        - upper_ns
    )
    return max(helper.lower_bound_ns, proven_ns)


def total_ns(link_bounds_ns: list[int], inside_nodes_ns: list[int], drift_ppm: int) -> int:
    """Equation 7: the whole way, from the bounds of its links and the times measured inside nodes."""
    return sum(link_bounds_ns) + sum(at_most_ns(inside_ns, drift_ppm) for inside_ns in inside_nodes_ns)
