"""Counts of shared topics are what counting anew would give, whatever came and went."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.partners import Partners

_role = st.sampled_from([None, "us", "a", "b"])
_change = st.tuples(st.sampled_from(["t1", "t2", "t3"]), st.none() | st.tuples(_role, _role))


@given(st.lists(_change))
def test_partners_follow_every_change(
    changes: list[tuple[str, tuple[str | None, str | None] | None]],
) -> None:
    partners = Partners("us")
    assigned: dict[str, tuple[str | None, str | None]] = {}
    for topic, roles in changes:
        if roles is None:
            assigned.pop(topic, None)
            partners.forget_topic(topic)
        else:
            assigned[topic] = roles
            partners.set_topic(topic, *roles)
        partners.validate()
        assert set(partners.names) == {name for roles in assigned.values() for name in roles} - {None, "us"}
        assert partners.primaries == sum(primary == "us" for primary, _ in assigned.values())
