"""Which lower bounds on delays the replication decision counts on."""

from hypothesis import given
from hypothesis import strategies as st

from overlay.limits import MILLISECOND_NS, SECOND_NS
from routing_broker.proven import MARGIN_PERCENT, RISE_AFTER_NS, ProvenDelays

MS = MILLISECOND_NS


def test_a_bound_counts_only_after_it_has_held_for_a_while_and_less_a_margin():
    proven = ProvenDelays()
    now_ns = SECOND_NS
    while now_ns < SECOND_NS + RISE_AFTER_NS:
        assert not proven.update({"eb": 50 * MS}, now_ns)
        now_ns += SECOND_NS
    assert proven.update({"eb": 60 * MS}, now_ns)
    assert proven.counted_ns == {"eb": 45 * MS}


def test_it_falls_at_once_and_is_forgotten_with_its_edge():
    proven = ProvenDelays()
    for now_ns in (0, RISE_AFTER_NS):
        proven.update({"eb": 50 * MS, "ec": 20 * MS}, now_ns)
    assert proven.counted_ns == {"eb": 45 * MS, "ec": 18 * MS}
    assert proven.update({"eb": 10 * MS}, RISE_AFTER_NS + 1)
    assert proven.counted_ns == {"eb": 9 * MS}
    assert not proven.update({"eb": 10 * MS}, RISE_AFTER_NS + 2)
    assert proven.update({}, RISE_AFTER_NS + 3)
    assert not proven.counted_ns


def test_a_dip_starts_the_wait_again():
    proven = ProvenDelays()
    for second, bound in enumerate((50, 50, 50, 0, 50, 50, 50, 50, 50)):
        assert not proven.update({"eb": bound * MS}, second * SECOND_NS)
    assert proven.update({"eb": 50 * MS}, 9 * SECOND_NS)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 200 * MS), max_size=3), max_size=40))
def test_nothing_is_counted_on_that_is_not_proven_now(measurements):
    proven = ProvenDelays()
    for second, measured in enumerate(measurements):
        proven.update(measured, second * SECOND_NS)
        for edge, counted_ns in proven.counted_ns.items():
            assert 0 < counted_ns <= measured[edge] * (100 - MARGIN_PERCENT) // 100
