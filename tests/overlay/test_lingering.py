"""A set whose items stay for a while: a blink goes unnoticed, a departure takes effect late."""

from hypothesis import given
from hypothesis import strategies as st

from overlay.lingering import Lingering

LINGER_NS = 100


def test_what_is_there_is_in_it() -> None:
    items: Lingering[str] = Lingering(LINGER_NS)
    assert list(items) == []
    items.update(["a", "b", "a"], 0)
    assert sorted(items) == ["a", "b"]
    assert not items.expire(10**9)
    assert sorted(items) == ["a", "b"]


def test_what_is_gone_stays_for_a_while_and_then_goes_once() -> None:
    items: Lingering[str] = Lingering(LINGER_NS)
    items.update(["a", "b"], 0)
    items.update(["b"], 50)
    assert sorted(items) == ["a", "b"]
    assert not items.expire(50 + LINGER_NS - 1)
    assert sorted(items) == ["a", "b"]
    assert items.expire(50 + LINGER_NS)
    assert list(items) == ["b"]
    assert not items.expire(50 + LINGER_NS)


def test_what_is_back_in_time_was_never_gone() -> None:
    items: Lingering[str] = Lingering(LINGER_NS)
    items.update(["a"], 0)
    items.update([], 10)
    items.update(["a"], 90)
    assert not items.expire(10**9)
    assert list(items) == ["a"]


def test_news_of_others_do_not_prolong_a_departure() -> None:
    items: Lingering[str] = Lingering(LINGER_NS)
    items.update(["a", "b"], 0)
    for now_ns in (10, 50, 90):
        items.update(["b"], now_ns)
    assert items.expire(10 + LINGER_NS)
    assert list(items) == ["b"]


def test_a_second_departure_lingers_anew() -> None:
    items: Lingering[str] = Lingering(LINGER_NS)
    items.update(["a"], 0)
    items.update([], 10)
    items.update(["a"], 20)
    items.update([], 80)
    assert not items.expire(10 + LINGER_NS)
    assert list(items) == ["a"]
    assert items.expire(80 + LINGER_NS)
    assert list(items) == []


_names = st.frozensets(st.sampled_from("abcd"))


@given(st.lists(st.tuples(st.integers(0, 60), st.none() | _names), max_size=40))
def test_an_item_is_in_it_once_from_its_coming_until_it_has_been_gone_long_enough(
    steps: list[tuple[int, frozenset[str] | None]],
) -> None:
    """Each step lets time pass, and then either brings news or looks for what is late."""
    items: Lingering[str] = Lingering(LINGER_NS)
    present: frozenset[str] = frozenset()
    last_seen_ns: dict[str, int] = {}
    now_ns = 0
    for pause_ns, news in steps:
        now_ns += pause_ns
        if news is None:
            late = {name for name in last_seen_ns if now_ns - last_seen_ns[name] >= LINGER_NS}
            assert items.expire(now_ns) == bool(late)
            for name in late:
                del last_seen_ns[name]
        else:
            last_seen_ns |= dict.fromkeys(present - news, now_ns)
            last_seen_ns = {name: seen for name, seen in last_seen_ns.items() if name not in news}
            present = news
            items.update(news, now_ns)
        assert sorted(items) == sorted(present | last_seen_ns.keys())


def test_what_is_expected_is_there_until_it_fails_to_come() -> None:
    items: Lingering[str] = Lingering(LINGER_NS)
    items.expect("a", 10)
    items.expect("b", 10)
    assert sorted(items) == ["a", "b"]
    items.update(["a"], 50)
    items.expect("a", 60)  # it has come already
    assert sorted(items) == ["a", "b"]
    assert items.expire(10 + LINGER_NS)
    assert list(items) == ["a"]
    assert not items.expire(10**9)


def test_who_is_back_may_not_have_been_heard() -> None:
    items: Lingering[str] = Lingering(LINGER_NS)
    items.expect("a", 50)
    # Nothing has been heard after 60, however late it is by now.
    assert not items.expire(60)
    # Contact again since 500: whoever is back is heard of a little later.
    assert not items.expire(500, 500)
    assert not items.expire(500 + LINGER_NS - 1, 500)
    assert list(items) == ["a"]
    assert items.expire(500 + LINGER_NS, 500)
    assert list(items) == []
