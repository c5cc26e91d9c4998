"""Who judges a run notices what was planted."""

from types import SimpleNamespace

import pytest

from overlay.limits import SECOND_NS
from overlay.qos import TopicQos
from simulation.checkers import Excuse, check_messages
from simulation.handovers import Handovers
from simulation.nodes import History, Published, Received, Subscribed

QOS = {"t": TopicQos(period_ms=1_000, deadline_ms=500, loss_tolerance=1)}
SENT = 20


def _lost(
    *missing: int,
    since_s: int = 0,
    excuses: tuple[Excuse, ...] = (),
    handovers: tuple[tuple[int, int], ...] = (),
) -> list[str]:
    """Message n is born after n seconds; what is promised, broken by a subscriber that misses some."""
    born_ns = [number * SECOND_NS for number in range(1, SENT + 1)]
    got = [
        Received(1, number, at_ns, at_ns, None)
        for number, at_ns in enumerate(born_ns, 1)
        if number not in missing
    ]
    history = History(
        {1: Published("t", "a", 1, born_ns)}, [Subscribed("t", "b", 1, since_s * SECOND_NS, got)]
    )
    handed = Handovers()
    for from_s, until_s in handovers:
        handed.add("a", from_s * SECOND_NS, until_s * SECOND_NS)
    judgement = check_messages(history, QOS, {"a": 1, "b": 1}, excuses, handed)
    return [item.promise for item in judgement.violations]


@pytest.mark.parametrize(
    "missing", [(5, 6), (1, 2), (19, 20), tuple(range(1, SENT + 1))], ids=["middle", "first", "last", "all"]
)
def test_losses_beyond_the_tolerance_are_noticed(missing: tuple[int, ...]) -> None:
    assert _lost(*missing) == ["loss"]


def test_what_is_tolerated_or_came_before_the_subscriber_is_no_loss() -> None:
    assert not _lost()
    assert not _lost(1, 5, 20)
    assert not _lost(1, 2, 3, since_s=4)


def test_what_a_client_did_before_it_died_is_judged_up_to_its_end() -> None:
    born_ns = [number * SECOND_NS for number in range(1, SENT + 1)]
    got = [Received(1, number, at_ns, at_ns, None) for number, at_ns in enumerate(born_ns, 1) if number < 9]
    history = History({1: Published("t", "a", 1, born_ns)}, [Subscribed("t", "b", 1, 0, got)])
    assert not check_messages(history, QOS, {"a": 1, "b": 2}, (), Handovers()).violations
    del got[3:6]
    judgement = check_messages(history, QOS, {"a": 1, "b": 2}, (), Handovers())
    assert [item.promise for item in judgement.violations] == ["loss"]
    assert (judgement.owed, judgement.judged) == (8, 8)


def test_what_was_published_before_a_subscription_is_not_owed_to_it() -> None:
    """Even if some of it still came."""
    assert not _lost(2, 3, 4, since_s=6)
    assert _lost(2, 3, 4, 8, 9, since_s=6) == ["loss"]


def test_an_excuse_covers_its_time_and_no_more() -> None:
    excuse = Excuse(frozenset({"b"}), 0, 6 * SECOND_NS)
    assert not _lost(1, 2, 3, 4, 5, 6, excuses=(excuse,))
    assert _lost(1, 2, 3, 4, 5, 6, 7, 8, excuses=(excuse,)) == ["loss"]
    assert _lost(*range(1, SENT + 1), excuses=(excuse,)) == ["loss"]


def test_what_waited_in_a_client_is_excused_by_when_it_entered_the_overlay() -> None:
    excuse = Excuse(frozenset({"b"}), 8 * SECOND_NS, 12 * SECOND_NS)
    assert _lost(4, 5, 6, excuses=(excuse,)) == ["loss"]
    assert not _lost(4, 5, 6, excuses=(excuse,), handovers=((4, 9),))
    assert _lost(4, 5, 6, excuses=(excuse,), handovers=((4, 7),)) == ["loss"], "it was over before"
    assert _lost(3, 4, 5, 6, excuses=(excuse,), handovers=((5, 9),)) == ["loss"], "3 and 4 did not wait"
    assert _lost(13, 14, 15, excuses=(excuse,), handovers=((13, 15),)) == ["loss"], "it waited afterwards"


def test_a_client_without_an_edge_hands_over_when_it_has_one() -> None:
    edge = SimpleNamespace(name="e", is_running=True)
    client = SimpleNamespace(edge="e", is_connected=True, _is_idle=True)
    process = SimpleNamespace(name="a", is_running=True, client=client)
    handovers = Handovers()

    def look(at_s: float) -> None:
        handovers.look([process], [edge], round(at_s * SECOND_NS))

    def waited_s(born_s: float) -> float:
        return handovers.entered_ns("a", round(born_s * SECOND_NS)) / SECOND_NS - born_s

    look(9.75)
    edge.is_running = False
    look(10)
    assert waited_s(8) == 0
    assert waited_s(9) > 1_000_000, "the edge may not have passed it on"
    client.is_connected, client._is_idle = False, False
    look(11)
    edge.is_running = client.is_connected = True
    look(12)
    assert waited_s(11) > 1_000_000, "not everything has been handed over"
    client._is_idle = True
    look(13)
    assert (waited_s(8), waited_s(9), waited_s(12.5), waited_s(14)) == (0, 4, 0.5, 0)
    edge.is_running = False
    look(20)
    process.client = None
    look(21)
    assert waited_s(20) == 0, "it has died, and all that it kept with it"
