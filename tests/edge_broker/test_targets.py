"""Which routing broker an edge sends to, what it sends again to another, what it keeps without one."""

import pytest

from edge_broker.model import DropReason
from overlay.limits import FRAME_MAX_BYTES, MIB, MILLISECOND_NS, SECOND_NS
from overlay.outbox import Outbox
from overlay.qos import BEST_EFFORT
from tests.edge_broker.lan import (
    HERE,
    NOW,
    PUB,
    RELIABLE,
    REMOTE,
    RETENTION,
    Lan,
    a_message,
)
from tests.wires import bodies_of, body_of, drain

PLENTY = 2**40
MS = MILLISECOND_NS


@pytest.fixture
def lan() -> Lan:
    return Lan()


# Target choice


def test_the_primary_is_the_target_if_it_is_up_else_the_backup_else_none(lan: Lan) -> None:
    lan.interest(REMOTE)
    assert lan.topic.target is None
    lan.router_up("r2")
    assert lan.core.statistics().topics[0].target == "r2"
    lan.router_up("r1")
    assert lan.core.statistics().topics[0].target == "r1"
    lan.router_down("r1")
    assert lan.core.statistics().topics[0].target == "r2"
    lan.router_down("r2")
    assert lan.core.statistics().topics[0].target == ""
    assert lan.core.statistics().target_changes == 3


def test_a_router_that_is_neither_primary_nor_backup_is_no_target(lan: Lan) -> None:
    lan.interest(REMOTE, backup=None)
    lan.router_up("r2")
    lan.router_up("r3")
    lan.publish()
    assert lan.topic.target is None
    assert lan.sent_to("r2") == lan.sent_to("r3") == []
    assert lan.interest(REMOTE, primary=None, backup="r3") == {"router:r3"}
    assert lan.sent_to("r3") == [1]


def test_only_the_target_gets_messages(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r2")
    assert lan.publish(2) == {"router:r1"}
    assert lan.sent_to("r1") == [1, 2]
    assert lan.sent_to("r2") == []


def test_a_router_that_was_never_up_going_down_changes_nothing(lan: Lan) -> None:
    lan.interest(REMOTE)
    assert lan.router_down("r7") == set()


def test_a_router_that_was_restarted_is_the_target_once_it_is_trusted(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r2")
    lan.publish(2)
    lan.router_down("r1")
    assert lan.sent_to("r2") == [1, 2]
    lan.core.router_restarted("r1")
    assert lan.router_up("r1") == set()
    assert lan.publish() == {"router:r2"}
    assert lan.router_trusted("r1") == {"router:r1"}
    assert lan.sent_to("r1") == [1, 2, 3]


def test_a_router_that_was_restarted_is_better_than_none(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r2")
    for router in ("r1", "r2"):
        lan.router_down(router)
        lan.core.router_restarted(router)
    assert lan.router_up("r2") == set()
    assert lan.core.statistics().topics[0].target == "r2"
    lan.router_up("r1")
    assert lan.core.statistics().topics[0].target == "r1"
    lan.router_trusted("r2")
    assert lan.core.statistics().topics[0].target == "r2"


def test_a_router_that_was_restarted_and_lost_its_topic_is_no_target(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r2")
    lan.router_down("r1")
    lan.core.router_restarted("r1")
    lan.router_up("r1")
    lan.interest(REMOTE, primary="r2", backup="r3")
    assert lan.router_trusted("r1") == set()
    assert lan.core.statistics().topics[0].target == "r2"


def test_news_that_change_nothing_send_nothing_again(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.publish(2)
    assert lan.sent_to("r1") == [1, 2]
    assert lan.interest(REMOTE, ("shop", "e8")) == set()
    assert lan.router_up("r2") == set()
    assert lan.router_down("r2") == set()
    assert lan.sent_to("r1") == []


# Sending again


def test_a_new_target_gets_everything_retained_in_order_before_newer_messages(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r2")
    lan.publish(6)
    assert lan.sent_to("r1") == [1, 2, 3, 4, 5, 6]
    assert lan.router_down("r1") == {"router:r2"}
    lan.publish(1)
    assert lan.sent_to("r2") == [3, 4, 5, 6, 7]
    assert lan.core.statistics().messages_resent == RETENTION


def test_what_the_lost_router_never_acknowledged_is_sent_again_beyond_retention(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r2")
    lan.publish(10)
    lan.outboxes["r1"].take_frames(1, NOW)  # sent, and lost with the connection
    lan.publish(3)
    lan.router_down("r1")
    assert lan.outboxes["r1"].is_idle
    assert lan.sent_to("r2") == list(range(1, 14))


def test_a_router_whose_link_blinked_gets_everything_retained_again(lan: Lan) -> None:
    lan.interest(REMOTE, backup=None)
    lan.router_up("r1")
    lan.publish(2)
    lan.sent_to("r1")
    lan.router_down("r1")
    lan.publish(1)
    assert lan.router_up("r1") == {"router:r1"}
    assert lan.sent_to("r1") == [1, 2, 3]


def test_a_reassigned_topic_is_sent_again_to_its_new_primary(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r3")
    lan.publish(2)
    assert lan.interest(REMOTE, primary="r3", backup="r1") == {"router:r3"}
    lan.publish(1)
    assert lan.sent_to("r3") == [1, 2, 3]
    assert lan.sent_to("r1") == [1, 2]


def test_a_new_primary_gets_what_still_waits_for_the_old_one_beyond_retention(lan: Lan) -> None:
    """After a cut more waits than is retained. If only the newest went the new way, they would come first."""
    lan.interest(REMOTE)
    lan.publish(3 * RETENTION)
    for router in ("r1", "r2"):
        lan.router_up(router)
    lan.outboxes["r1"].take_frames(1, lan.now_ns)  # on their way, not acknowledged
    lan.publish(RETENTION)
    assert lan.interest(REMOTE, primary="r2", backup="r1") == {"router:r2"}
    assert lan.sent_to("r2") == list(range(1, 4 * RETENTION + 1))
    lan.publish()
    assert lan.sent_to("r2") == [4 * RETENTION + 1]


def test_what_is_sent_again_fits_frames_however_large_the_messages(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r2")
    for _ in range(RETENTION):
        lan.publish(1, size=500_000)
    lan.sent_to("r1")
    lan.router_down("r1")
    outbox = lan.outboxes["r2"]
    frames: list[bytes] = []
    while outbox.has_waiting:
        frames += outbox.take_frames(PLENTY, NOW)
        outbox.acknowledge(len(frames))
    assert all(len(frame) <= FRAME_MAX_BYTES for frame in frames)
    assert len(bodies_of(frames)) == RETENTION


def test_every_publisher_of_a_topic_is_sent_again(lan: Lan) -> None:
    other = lan.core.client("client:q", Outbox())
    lan.core.add_endpoint(other, PUB, 101, lan.topic)
    lan.interest(REMOTE)
    lan.publish(2)
    lan.core.admit_from_client(other, body_of([a_message(1, publisher=101)]), 0, NOW)
    lan.router_up("r1")
    assert [(m.publisher, m.sequence) for m in drain(lan.outboxes["r1"])] == [(100, 1), (100, 2), (101, 1)]


def test_a_publisher_that_left_is_still_sent_again_for_a_while(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.router_up("r2")
    lan.publish(2)
    lan.sent_to("r1")
    assert lan.core.remove_endpoint(lan.publisher, 100, 0) == (lan.topic, PUB)
    lan.core.remove_client(lan.publisher)
    assert lan.core.expire(10 * SECOND_NS) == []
    lan.core.validate()
    lan.router_down("r1")
    assert lan.sent_to("r2") == [1, 2]
    assert lan.core.statistics().topics[0].publishers == 0
    assert lan.core.expire(10 * SECOND_NS + 1) == [lan.topic]
    assert not lan.core.topics
    lan.core.validate()


def test_unsent_messages_of_a_publisher_that_left_wait_longer_and_are_counted_when_given_up(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.publish(3)
    lan.core.remove_endpoint(lan.publisher, 100, 0)
    assert lan.core.expire(60 * SECOND_NS) == []
    assert lan.dropped == {}
    assert lan.core.expire(60 * SECOND_NS + 1) == [lan.topic]
    assert lan.dropped == {DropReason.NO_ROUTER: 3}


# No routing broker


def test_unsent_messages_are_kept_beyond_retention_and_sent_when_a_router_comes_up(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.publish(3 * RETENTION)
    assert lan.dropped == {}
    assert lan.router_up("r2") == {"router:r2"}
    lan.publish(1)
    assert lan.sent_to("r2") == list(range(1, 3 * RETENTION + 2))


def test_best_effort_messages_are_dropped_and_counted_while_no_router_is_up() -> None:
    lan = Lan(BEST_EFFORT)
    lan.interest(REMOTE)
    lan.publish(2)
    assert lan.dropped == {DropReason.NO_ROUTER: 2}
    assert lan.router_up("r1") == set()
    lan.publish(1)
    assert lan.sent_to("r1") == [3]


def test_beyond_the_limit_of_unsent_messages_the_oldest_are_lost_and_counted() -> None:
    lan = Lan(unsent_most=6)
    lan.interest(REMOTE)
    lan.publish(8)
    assert lan.dropped == {DropReason.NO_ROUTER: 2}
    lan.router_up("r1")
    assert lan.sent_to("r1") == [3, 4, 5, 6, 7, 8]


def test_what_waits_for_a_router_takes_no_more_memory_than_it_may() -> None:
    """And few large messages do not push out many small ones."""
    lan = Lan(retained_most_bytes=MIB)
    other = lan.core.ensure_topic(2, "pictures", RELIABLE)
    lan.core.add_endpoint(lan.publisher, PUB, 101, other)
    lan.interest(REMOTE)
    lan.interest(REMOTE, publishers=(101,), topic=other)
    for number in range(1, 201):
        lan.publish(1)
        picture = a_message(number, 20_000, publisher=101, topic_id=2)
        lan.core.admit_from_client(lan.publisher, body_of([picture], origin=55), 0, NOW)
        lan.core.validate()
        kept = [len(message) for message in other.publishers[101].retention.messages]
        assert sum(kept) < MIB
    lost = 200 - len(kept)
    assert lan.dropped == {DropReason.NO_ROUTER: lost}
    lan.router_up("r1")
    sent = [(message.publisher, message.sequence) for message in drain(lan.outboxes["r1"])]
    assert sorted(sent) == [
        *((100, number) for number in range(1, 201)),
        *((101, number) for number in range(lost + 1, 201)),
    ]
    lan.router_down("r1")
    lan.core.validate()
    lan.core.remove_endpoint(lan.publisher, 101, NOW)
    lan.core.expire(NOW + 1_000 * SECOND_NS)
    lan.core.validate()
    assert not other.publishers


def test_what_is_too_much_to_take_back_from_a_lost_router_is_counted() -> None:
    lan = Lan(unsent_most=6)
    lan.interest(REMOTE, backup=None)
    lan.router_up("r1")
    lan.publish(9)
    lan.router_down("r1")
    assert lan.dropped == {DropReason.NO_ROUTER: 3}
    lan.router_up("r1")
    assert lan.sent_to("r1") == [4, 5, 6, 7, 8, 9]


def test_when_the_last_remote_subscriber_leaves_nothing_is_kept(lan: Lan) -> None:
    lan.interest(REMOTE)
    lan.publish(3)
    lan.interest(HERE)
    lan.publish(2)
    lan.interest(REMOTE)
    lan.router_up("r1")
    lan.publish(1)
    assert lan.sent_to("r1") == [6]
