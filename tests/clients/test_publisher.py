"""What a publisher keeps for an edge broker that takes over."""

from typing import Any

import pytest

from clients.publisher import Publisher
from overlay.batch import SEQUENCE_OFFSET, Run
from overlay.qos import TopicQos

KEPT = 4


class Connection:
    """As much of a client as a publisher needs, with an outbox that only counts."""

    has_room = True

    def __init__(self) -> None:
        self.is_connected = True
        self.waiting: dict[int, bytes] = {}
        """What no edge has acknowledged."""
        self.again: list[int] = []
        self.publisher = Publisher(self._as_client(), 7, "t", None)
        self.publisher.set_qos(TopicQos(retention=KEPT, loss_tolerance=0))

    def _as_client(self) -> Any:
        return self

    def clock(self) -> int:
        return 1

    def send(self, run: Run) -> None:
        self.waiting[self.publisher.sequence] = run.data

    def send_again(self, run: Run) -> None:
        sequence = int.from_bytes(run.data[SEQUENCE_OFFSET : SEQUENCE_OFFSET + 8], "little")
        self.waiting[sequence] = run.data
        self.again.append(sequence)

    def publish(self, count: int) -> None:
        self.publisher.publish_many_nowait([b""] * count)

    def acknowledged(self) -> None:
        self.waiting.clear()

    def lost(self) -> None:
        self.is_connected = False
        self.publisher.connection_lost()

    def taken_over(self) -> list[int]:
        """Another edge is there: what it is sent."""
        self.is_connected = True
        self.again.clear()
        undelivered, self.waiting = self.waiting, {}
        self.publisher.publish_again(undelivered)
        return self.again


@pytest.mark.parametrize("meanwhile", [0, 1, KEPT, 10 * KEPT])
async def test_what_is_published_without_an_edge_takes_no_place_of_what_the_last_one_may_have_lost(
    meanwhile: int,
) -> None:
    client = Connection()
    client.publish(10)
    client.acknowledged()
    client.lost()
    for _ in range(meanwhile):
        client.publish(1)
    assert client.taken_over() == list(range(10 - KEPT + 1, 10 + meanwhile + 1))


async def test_an_edge_that_comes_back_itself_has_what_it_acknowledged() -> None:
    client = Connection()
    client.publish(10)
    client.lost()
    client.publish(20)
    client.is_connected = True
    client.acknowledged()
    client.publish(1)
    assert len(client.publisher._retention) == KEPT
    client.lost()
    assert client.taken_over() == list(range(31 - KEPT + 1, 32))


async def test_a_second_edge_that_is_lost_before_it_took_anything_costs_nothing() -> None:
    client = Connection()
    client.publish(10)
    client.acknowledged()
    client.lost()
    client.publish(20)
    assert client.taken_over() == list(range(10 - KEPT + 1, 31))
    client.lost()
    client.publish(1)
    assert client.taken_over() == list(range(10 - KEPT + 1, 32))
