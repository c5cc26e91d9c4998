"""Quality of service: what is accepted, what is refused and with which words."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import QosError
from overlay.limits import (
    LIVELINESS_MAX_NS,
    MILLISECOND_NS,
    PERIOD_MAX_NS,
    RETENTION_DEFAULT,
    RETENTION_MAX,
)
from overlay.qos import (
    BEST_EFFORT,
    NO_REQUEST,
    Reliability,
    SubscriptionQos,
    TopicQos,
    check_compatible,
    explain_difference,
    strictest,
)

FIELDS = ("period_ms", "deadline_ms", "loss_tolerance", "retention", "reliability", "liveliness_ms")
_periods = (
    st.none() | st.floats(min_value=0.001, max_value=PERIOD_MAX_NS / MILLISECOND_NS) | st.integers(1, 10**6)
)
_reliable = st.builds(
    TopicQos,
    period_ms=_periods,
    deadline_ms=_periods,
    loss_tolerance=st.none() | st.integers(0, 2**31),
    retention=st.integers(0, RETENTION_MAX),
    liveliness_ms=st.floats(min_value=0.001, max_value=LIVELINESS_MAX_NS / MILLISECOND_NS),
)
_best_effort = st.builds(
    TopicQos,
    period_ms=_periods,
    loss_tolerance=st.none(),
    retention=st.integers(0, RETENTION_MAX),
    reliability=st.just(Reliability.BEST_EFFORT),
)
_anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.just(10**400)
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(list(Reliability)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def test_the_default_loses_nothing_and_retains() -> None:
    qos = TopicQos()
    assert (qos.loss_tolerance, qos.kept_messages) == (0, RETENTION_DEFAULT)
    assert qos.deadline_ns is None
    assert qos.liveliness_ns == 2_000_000_000


def test_best_effort_keeps_nothing() -> None:
    assert BEST_EFFORT.kept_messages == 0
    assert TopicQos(loss_tolerance=None, retention=9, reliability=Reliability.BEST_EFFORT).kept_messages == 0


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"period_ms": 0}, ["period_ms is 0", "above 0"]),
        ({"period_ms": -1.5}, ["period_ms is -1.5", "above 0"]),
        ({"period_ms": True}, ["period_ms is True", "number of milliseconds"]),
        ({"period_ms": "5"}, ["period_ms is '5'", "number of milliseconds"]),
        ({"period_ms": float("nan")}, ["period_ms is nan", "above 0"]),
        ({"deadline_ms": float("inf")}, ["deadline_ms is inf", "at most 31622400000"]),
        ({"deadline_ms": 10**400}, ["deadline_ms is 1000", "at most 31622400000"]),
        ({"deadline_ms": 1e305}, ["deadline_ms is 1e+305", "at most 31622400000"]),
        ({"liveliness_ms": None}, ["liveliness_ms is None", "number of milliseconds"]),
        ({"liveliness_ms": 3_600_001}, ["liveliness_ms is 3600001", "at most 3600000"]),
        ({"retention": -1}, ["retention is -1", "between 0 and 65536"]),
        ({"retention": 65_537}, ["retention is 65537", "between 0 and 65536"]),
        ({"retention": 1.0}, ["retention is 1.0", "whole number"]),
        ({"retention": None}, ["retention is None", "whole number"]),
        ({"loss_tolerance": -3}, ["loss_tolerance is -3", "between 0 and 2147483648"]),
        ({"loss_tolerance": False}, ["loss_tolerance is False", "whole number"]),
        ({"reliability": "sometimes"}, ["reliability is 'sometimes'", "best_effort, reliable"]),
        ({"reliability": ["reliable"]}, ["reliability is ['reliable']", "best_effort, reliable"]),
        (
            {"reliability": "best_effort"},
            ["best_effort", "loss_tolerance is 0", "set loss_tolerance to none"],
        ),
        ({"colour": 1, "age": 2}, ["unknown fields age, colour", "known are deadline_ms"]),
        (None, ["NoneType", "a map of fields"]),
        ([("retention", 1)], ["list", "a map of fields"]),
    ],
)
def test_a_bad_qos_is_refused_with_the_value_the_limit_and_the_remedy(
    record: object, words: list[str]
) -> None:
    with pytest.raises(QosError) as caught:
        TopicQos.from_record(record)
    for word in words:
        assert word in str(caught.value)


def test_a_value_nested_a_thousand_deep_is_refused_with_a_short_message() -> None:
    value: list[object] = []
    for _ in range(1000):
        value = [value]
    with pytest.raises(QosError) as caught:
        TopicQos.from_record({"retention": value})
    assert len(str(caught.value)) < 200


@given(_reliable | _best_effort)
def test_a_qos_survives_its_record(qos: TopicQos) -> None:
    assert TopicQos.from_record(qos.to_record()) == qos
    assert explain_difference(qos, TopicQos.from_record(qos.to_record())) == ""


@given(_reliable | _best_effort)
def test_times_in_nanoseconds_follow_from_any_accepted_qos(qos: TopicQos) -> None:
    assert 0 < qos.liveliness_ns <= LIVELINESS_MAX_NS
    assert qos.deadline_ns is None or 0 < qos.deadline_ns <= PERIOD_MAX_NS


@given(st.dictionaries(st.sampled_from(FIELDS), _anything) | _anything)
def test_whatever_the_record_it_is_a_qos_or_a_qos_error(record: Any) -> None:
    try:
        qos = TopicQos.from_record(record)
    except QosError as error:
        assert len(str(error)) < 2000 or isinstance(record, dict)
        return
    assert TopicQos.from_record(qos.to_record()) == qos
    assert isinstance(qos.liveliness_ns, int)
    assert 0 <= qos.kept_messages <= RETENTION_MAX


def test_a_difference_is_explained_field_by_field() -> None:
    text = explain_difference(TopicQos(), TopicQos(retention=3, deadline_ms=5))
    assert text == "deadline_ms is None, asked for 5; retention is 64, asked for 3"


# What subscribers ask for

_requests = st.builds(
    SubscriptionQos,
    deadline_ms=st.none() | st.floats(min_value=0.001, max_value=PERIOD_MAX_NS / MILLISECOND_NS),
    loss_tolerance=st.none() | st.integers(0, 2**31),
)


def _as_strict(value: float | None, limit: float | None) -> bool:
    return limit is None or (value is not None and value <= limit)


@given(_reliable, st.lists(_requests, max_size=5))
def test_the_strictest_satisfies_all_and_is_somebodys(
    offered: TopicQos, asked: list[SubscriptionQos]
) -> None:
    qos = strictest(offered, asked)
    for party in (offered, *asked):
        assert _as_strict(qos.deadline_ms, party.deadline_ms)
        assert _as_strict(qos.loss_tolerance, party.loss_tolerance)
    assert qos.deadline_ms in {party.deadline_ms for party in (offered, *asked)}
    assert qos.loss_tolerance in {party.loss_tolerance for party in (offered, *asked)}
    assert (qos.period_ms, qos.retention) == (offered.period_ms, offered.retention)


@given(_reliable, st.lists(_requests, max_size=5), st.data())
def test_requests_count_in_any_order_and_any_number_of_times(
    offered: TopicQos, asked: list[SubscriptionQos], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(asked))
    assert strictest(offered, asked) == strictest(offered, [*shuffled, *asked, NO_REQUEST])
    assert strictest(strictest(offered, asked[:2]), asked[2:]) == strictest(offered, asked)


def test_who_asks_for_nothing_or_less_changes_nothing() -> None:
    offered = TopicQos(deadline_ms=50, loss_tolerance=1)
    assert strictest(offered, ()) is offered
    assert strictest(offered, [NO_REQUEST, SubscriptionQos(60, 2)]) is offered


def test_best_effort_cannot_be_made_to_lose_less_but_to_hurry() -> None:
    request = SubscriptionQos(20, 3)
    with pytest.raises(QosError, match="asks for a loss_tolerance of 3, but the topic is best_effort"):
        check_compatible(BEST_EFFORT, [NO_REQUEST, request])
    served = strictest(BEST_EFFORT, [request])
    assert (served.deadline_ms, served.loss_tolerance) == (20, None)
    check_compatible(BEST_EFFORT, [SubscriptionQos(deadline_ms=20)])
    check_compatible(TopicQos(), [request])


@given(_requests)
def test_requests_survive_as_records(request: SubscriptionQos) -> None:
    assert SubscriptionQos.from_record(request.to_record()) == request


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"deadline_ms": 0}, "deadline_ms is 0: it must be above 0"),
        ({"deadline_ms": 0.0001}, "a subscriber can ask for 0.001 at least"),
        ({"loss_tolerance": -1}, "loss_tolerance is -1"),
        ({"retention": 3}, "request has unknown fields retention: known are deadline_ms, loss_tolerance"),
        ([], "request is list, expected a map"),
    ],
)
def test_other_requests_are_refused(record: object, match: str) -> None:
    with pytest.raises(QosError, match=match):
        SubscriptionQos.from_record(record)
