"""The planner: what it must always do, and what it must never do to topics that work."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.assignment import (
    BOUNDED,
    Placement,
    Reason,
    check_placements,
    moves_allowed,
    plan,
    settle,
)
from coordinator.errors import UnknownPolicyError
from coordinator.policy import POLICIES, FewestTopics, LoadPolicy, MessageRate, policy_by_name
from coordinator.records import RouterRecord

ROUNDS_MAX = 200


def router(name: str, host: str = "h1", **fields: object) -> RouterRecord:
    return RouterRecord(name, f"{host}:1", host, **fields)  # type: ignore[arg-type]


def fleet(*records: RouterRecord) -> dict[str, RouterRecord]:
    return {record.id: record for record in records}


def converge(
    topics: dict[str, Placement], routers: dict[str, RouterRecord], policy: LoadPolicy
) -> dict[str, Placement]:
    """Rounds until the planner is content, every change settled by the next round."""
    for _ in range(ROUNDS_MAX):
        changes = plan(topics, routers, policy)
        if not changes:
            return topics
        topics = settle(topics, changes)
    raise AssertionError(f"still changing after {ROUNDS_MAX} rounds: {changes[:5]}")


def primaries(topics: dict[str, Placement]) -> Counter[str | None]:
    return Counter(placement.primary for placement in topics.values())


NAMES = [f"r{number}" for number in range(6)]
routers_strategy = st.lists(
    st.builds(
        router,
        st.sampled_from(NAMES),
        st.sampled_from(["h1", "h2", "h3"]),
        capacity=st.sampled_from([0.5, 1.0, 2.0]),
        draining=st.booleans(),
        messages_per_s=st.sampled_from([0.0, 1.0, 50.0, 1000.0]),
        topics=st.integers(0, 30),
    ),
    max_size=6,
).map(lambda records: fleet(*records))
someone = st.one_of(st.none(), st.sampled_from([*NAMES, "gone"]))
topics_strategy = st.dictionaries(
    st.integers(0, 60).map("t{}".format), st.builds(Placement, someone, someone), max_size=60
)
policies = st.sampled_from(POLICIES)


@given(topics_strategy, routers_strategy, policies)
def test_one_round_leaves_no_topic_unserved(
    topics: dict[str, Placement], routers: dict[str, RouterRecord], policy: LoadPolicy
) -> None:
    after = settle(topics, plan(topics, routers, policy))
    assert [wrong for wrong in check_placements(after, routers) if "both on host" not in wrong] == []


@given(topics_strategy, routers_strategy, policies)
def test_it_converges_to_placements_without_fault(
    topics: dict[str, Placement], routers: dict[str, RouterRecord], policy: LoadPolicy
) -> None:
    after = converge(topics, routers, policy)
    assert list(check_placements(after, routers)) == []
    assert plan(after, routers, policy) == []


@given(topics_strategy, routers_strategy)
def test_fewest_topics_ends_even_within_one_topic(
    topics: dict[str, Placement], routers: dict[str, RouterRecord]
) -> None:
    counts = primaries(converge(topics, routers, FewestTopics()))
    usable = [record for record in routers.values() if not record.draining] or list(routers.values())
    for busy in usable:
        for idle in usable:
            after_a_move = (counts[idle.id] + 1) / idle.capacity
            assert counts[busy.id] / busy.capacity <= after_a_move + 1e-6 or busy is idle


@given(topics_strategy, routers_strategy, policies)
def test_working_topics_change_only_for_balance_and_only_so_many(
    topics: dict[str, Placement], routers: dict[str, RouterRecord], policy: LoadPolicy
) -> None:
    usable = {name for name, record in routers.items() if not record.draining} or set(routers)
    changes = plan(topics, routers, policy)
    assert sum(change.reason in BOUNDED for change in changes) <= moves_allowed(len(topics))
    for change in changes:
        before = topics[change.topic]
        assert change.placement != before
        alone = before.backup is None and len(usable) == 1
        works = before.primary in usable and before.primary != before.backup
        works = works and (alone or before.backup in usable)
        assert works == (change.reason in BOUNDED), change


@given(topics_strategy, routers_strategy, policies, st.sets(st.sampled_from(NAMES)))
def test_a_death_promotes_backups_and_leaves_the_rest(
    topics: dict[str, Placement], routers: dict[str, RouterRecord], policy: LoadPolicy, dead: set[str]
) -> None:
    before = converge(topics, routers, policy)
    alive = {name: record for name, record in routers.items() if name not in dead}
    usable = {name for name, record in alive.items() if not record.draining} or set(alive)
    for change in plan(before, alive, policy):
        was = before[change.topic]
        if change.reason is Reason.PRIMARY_GONE:
            assert was.primary not in usable
            if was.backup in usable:
                assert change.placement.primary == was.backup
        elif change.reason is Reason.BACKUP_GONE:
            assert change.placement.primary == was.primary


@given(topics_strategy, routers_strategy, policies)
def test_a_new_primary_of_a_move_was_the_settled_backup_or_is_on_the_same_host(
    topics: dict[str, Placement], routers: dict[str, RouterRecord], policy: LoadPolicy
) -> None:
    unsettled = {topic for number, topic in enumerate(topics) if number % 3 == 0}
    for change in plan(topics, routers, policy, unsettled=unsettled):
        if change.reason is Reason.MOVE:
            before = topics[change.topic]
            assert before.primary is not None
            assert change.placement.primary is not None
            direct = routers[before.primary].host == routers[change.placement.primary].host
            assert (before.backup == change.placement.primary and change.topic not in unsettled) or direct


@given(topics_strategy, routers_strategy, policies)
def test_moves_that_wait_to_settle_are_not_prepared_twice(
    topics: dict[str, Placement], routers: dict[str, RouterRecord], policy: LoadPolicy
) -> None:
    topics = settle(topics, plan(topics, routers, policy))
    first = plan(topics, routers, policy)
    prepared = {change.topic for change in first if change.reason is Reason.PREPARE_MOVE}
    if len(prepared) != len(first) or not first:
        return
    again = plan(settle(topics, first), routers, policy, unsettled=prepared)
    assert not {change.topic for change in again} & prepared


@given(topics_strategy, routers_strategy, policies, st.sets(st.sampled_from([*NAMES, "gone"])))
def test_topics_of_awaited_routers_stay(
    topics: dict[str, Placement], routers: dict[str, RouterRecord], policy: LoadPolicy, absent: set[str]
) -> None:
    awaited = absent - routers.keys()
    for change in plan(topics, routers, policy, awaited=awaited):
        before = topics[change.topic]
        assert before.primary not in awaited
        assert before.backup not in awaited


def test_a_joining_router_takes_its_share_in_bounded_rounds() -> None:
    old = fleet(router("a", "h1"), router("b", "h2"), router("c", "h3"))
    topics = converge({f"t{number}": Placement() for number in range(1000)}, old, FewestTopics())
    assert sorted(primaries(topics).values()) == [333, 333, 334]
    grown = {**old, **fleet(router("d", "h4"))}
    before = topics
    moved: set[str] = set()
    for _ in range(ROUNDS_MAX):
        changes = plan(topics, grown, FewestTopics())
        if not changes:
            break
        assert len(changes) <= moves_allowed(1000) == 64
        topics = settle(topics, changes)
        moved |= {change.topic for change in changes if change.reason is Reason.MOVE}
    assert sorted(primaries(topics).values()) == [250, 250, 250, 250]
    assert len(moved) == 250
    assert all(topics[topic].primary == before[topic].primary for topic in topics.keys() - moved)
    backups = Counter(placement.backup for placement in topics.values())
    assert max(backups.values()) - min(backups.values()) <= 1


def test_a_death_loads_all_others_alike() -> None:
    routers = fleet(*(router(f"r{number}", f"h{number}") for number in range(10)))
    topics = converge({f"t{number}": Placement() for number in range(1000)}, routers, FewestTopics())
    del routers["r3"]
    changes = plan(topics, routers, FewestTopics())
    moved = sum(change.reason in BOUNDED for change in changes)
    assert moved < 30
    counts = primaries(settle(topics, changes)).values()
    assert max(counts) - min(counts) <= 5


def test_draining_moves_everything_away_at_once() -> None:
    routers = fleet(router("a", "h1"), router("b", "h2"), router("c", "h3"))
    topics = converge({f"t{number}": Placement() for number in range(90)}, routers, FewestTopics())
    routers["a"] = router("a", "h1", draining=True)
    changes = plan(topics, routers, FewestTopics())
    after = settle(topics, changes)
    assert all("a" not in {placement.primary, placement.backup} for placement in after.values())
    for topic, placement in topics.items():
        if placement.primary == "a":
            assert after[topic].primary == placement.backup


def test_the_last_router_keeps_its_topics_while_it_drains() -> None:
    topics = {"t": Placement("a", None)}
    assert plan(topics, fleet(router("a", draining=True)), FewestTopics()) == []
    assert plan(topics, {}, FewestTopics()) == []


def test_message_rate_moves_topics_off_a_busy_router_once_per_report() -> None:
    policy = MessageRate()
    routers = fleet(
        router("a", "h1", messages_per_s=1000.0, topics=10),
        router("b", "h2", messages_per_s=100.0, topics=10),
    )
    topics = {f"a{number}": Placement("a", "b") for number in range(10)}
    topics |= {f"b{number}": Placement("b", "a") for number in range(10)}
    changes = plan(topics, routers, policy)
    assert {change.reason for change in changes} == {Reason.MOVE}
    assert 3 <= len(changes) <= 5
    topics = settle(topics, changes)
    assert plan(topics, routers, policy) == []
    counts = primaries(topics)
    routers = fleet(
        router("a", "h1", messages_per_s=100.0 * counts["a"], topics=counts["a"]),
        router("b", "h2", messages_per_s=1100.0 - 100.0 * counts["a"], topics=counts["b"]),
    )
    assert plan(topics, routers, policy) == []


def test_message_rate_without_reports_counts_topics() -> None:
    routers = fleet(router("a", "h1"), router("b", "h2"))
    after = converge({f"t{number}": Placement() for number in range(10)}, routers, MessageRate())
    assert primaries(after) == {"a": 5, "b": 5}


def test_capacity_scales_the_share() -> None:
    routers = fleet(router("a", "h1", capacity=3.0), router("b", "h2"))
    after = converge({f"t{number}": Placement() for number in range(100)}, routers, FewestTopics())
    assert primaries(after) == {"a": 75, "b": 25}


def test_a_same_host_move_keeps_the_backup_on_the_other_host() -> None:
    routers = fleet(router("a", "h1"), router("b", "h1"), router("c", "h2", capacity=0.01))
    topics = {f"t{number}": Placement("a", "c") for number in range(10)}
    changes = plan(topics, routers, FewestTopics())
    assert {change.placement for change in changes} == {Placement("b", "c")}


def test_policies_are_found_by_name() -> None:
    assert policy_by_name("fewest-topics").name == "fewest-topics"
    assert policy_by_name("message-rate").name == "message-rate"
    with pytest.raises(UnknownPolicyError, match="fewest-topics, message-rate"):
        policy_by_name("cpu")


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 3))
def test_ten_thousand_topics_are_planned_quickly(seed: int) -> None:
    routers = fleet(*(router(f"r{number}", f"h{number}") for number in range(20)))
    topics = {f"t{number}": Placement() for number in range(10_000 + seed)}
    after = settle(topics, plan(topics, routers, FewestTopics()))
    assert list(check_placements(after, routers)) == []
