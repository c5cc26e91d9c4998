"""Ages of messages from clients whose clocks are worse than all others: true, because their edge knows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.delay import LinkClock, age_bound_ns
from overlay.limits import DRIFT_MAX_PPM, DRIFT_PPM, MILLISECOND_NS, SECOND_NS
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from tests.edge_broker.lan import NOW, Lan, a_message
from tests.overlay.journeys import HORIZON_MS, SkewedClock
from tests.wires import body_of, drain

LINKS = 4
"""Client, edge, routing broker, edge, client."""


class Overlay:
    """Brokers that all state the same drift, between two clients that state their own."""

    def __init__(self, publisher_ppm: int, brokers_ppm: int, subscriber_ppm: int, signs: list[int]) -> None:
        self.stated_ppm = [publisher_ppm, *[brokers_ppm] * (LINKS - 1), subscriber_ppm]
        self.clocks = [
            SkewedClock(10**13 * (1 + node), [sign * ppm], 10**9)
            for node, (sign, ppm) in enumerate(zip(signs, self.stated_ppm, strict=True))
        ]

    def _link_ppm(self, receiver: int) -> int:
        return max(self.stated_ppm[receiver - 1 : receiver + 1])

    def _shift_ns(self, receiver: int, helper_ms: int, now_ms: int) -> int:
        clock = LinkClock(self._link_ppm(receiver))
        ours, theirs = self.clocks[receiver], self.clocks[receiver - 1]
        clock.helper(ours.read(helper_ms), theirs.read(helper_ms), ours.read(helper_ms))
        return clock.shift_at(ours.read(now_ms))

    def bound_ns(
        self, born_ms: int, helpers_ms: list[int], arrivals_ms: list[int], knows: bool = True
    ) -> int:
        """What the subscriber is told; `knows` if the edge heeds what the publisher states."""
        publisher_ppm, edge_ppm = self.stated_ppm[:2]
        worse_ppm = publisher_ppm if knows and publisher_ppm > edge_ppm else 0
        lan = Lan()
        local = lan.subscribe()
        edge_ns = self.clocks[1].read(arrivals_ms[0])
        shift_ns = self._shift_ns(1, helpers_ms[0], arrivals_ms[0])
        body = body_of([a_message(1, born_ns=self.clocks[0].read(born_ms))])
        lan.core.admit_from_client(lan.publisher, body, shift_ns, edge_ns, worse_ppm)
        (message,) = drain(local.outbox)
        shift_ns = sum(
            self._shift_ns(number, helpers_ms[number - 1], arrivals_ms[number - 1])
            for number in range(2, LINKS + 1)
        )
        elapsed_ns = self.clocks[-1].read(arrivals_ms[-1]) - message.born_ns + shift_ns
        return age_bound_ns(max(0, elapsed_ns), self._link_ppm(LINKS))


drifts = st.sampled_from((1, DRIFT_PPM, 5_000, DRIFT_MAX_PPM))


@given(
    publisher_ppm=drifts,
    brokers_ppm=drifts,
    subscriber_ppm=drifts,
    signs=st.lists(st.sampled_from((-1, 1)), min_size=LINKS + 1, max_size=LINKS + 1),
    born_ms=st.integers(0, HORIZON_MS),
    ways=st.lists(
        st.tuples(st.just(0) | st.integers(0, HORIZON_MS), st.just(0) | st.integers(0, HORIZON_MS)),
        min_size=LINKS,
        max_size=LINKS,
    ),
)
def test_the_bound_is_never_below_the_true_age_whoever_has_the_worst_clock(
    publisher_ppm: int,
    brokers_ppm: int,
    subscriber_ppm: int,
    signs: list[int],
    born_ms: int,
    ways: list[tuple[int, int]],
) -> None:
    """Of each link: how long until the message has crossed it, how long before that its helper did."""
    overlay = Overlay(publisher_ppm, brokers_ppm, subscriber_ppm, signs)
    now_ms, helpers_ms, arrivals_ms = born_ms, [], []
    for takes_ms, ago_ms in ways:
        now_ms += takes_ms
        arrivals_ms.append(now_ms)
        helpers_ms.append(max(0, now_ms - ago_ms))
    assert overlay.bound_ns(born_ms, helpers_ms, arrivals_ms) >= (now_ms - born_ms) * MILLISECOND_NS


def test_a_client_with_a_bad_clock_does_not_make_its_messages_younger() -> None:
    """Ten seconds in the client by a clock that is slow by half a per cent, as it says."""
    overlay = Overlay(5_000, DRIFT_PPM, DRIFT_PPM, [-1] * (LINKS + 1))
    at_once = [10_000] * LINKS
    true_ns = 10 * SECOND_NS
    assert overlay.bound_ns(0, at_once, at_once, knows=False) < true_ns, "what births are put back for"
    assert true_ns <= overlay.bound_ns(0, at_once, at_once) < 1.002 * true_ns


@pytest.mark.parametrize(
    ("born_ns", "shift_ns", "stamp_ns"),
    [(0, 0, 0), (NOW, UNKNOWN_CLOCK_SHIFT, 0), (NOW, SECOND_NS, NOW - SECOND_NS - SECOND_NS // 99 - 1)],
    ids=["not stamped", "unknown link", "a second old"],
)
def test_births_are_put_back_only_as_far_as_they_are_known(
    born_ns: int, shift_ns: int, stamp_ns: int
) -> None:
    lan = Lan()
    local = lan.subscribe()
    body = body_of([a_message(1, born_ns=born_ns)])
    lan.core.admit_from_client(lan.publisher, body, shift_ns, NOW, 10_000)
    assert drain(local.outbox) == [a_message(1, born_ns=stamp_ns)]


@pytest.mark.parametrize("worse_ppm", [0, 5_000])
def test_what_is_older_than_our_clock_stays_known(worse_ppm: int) -> None:
    """A client that has just started has small readings; put back, they are before its time."""
    lan = Lan()
    local = lan.subscribe()
    body = body_of([a_message(1, born_ns=1)])
    lan.core.admit_from_client(lan.publisher, body, -5, 100, worse_ppm)
    (message,) = drain(local.outbox)
    assert message.born_ns == (4 if worse_ppm else 6)  # 0 on the client's clock would be no birth
