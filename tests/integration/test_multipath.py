"""Messages with deadlines take the direct path between edges too, or instead, and none is lost over it."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from overlay.errors import CloseReason
from overlay.messages import Role
from overlay.paths import CHEAPER_AFTER_NS, Policy
from overlay.qos import TopicQos
from tests.integration.harness import Overlay, eventually
from tests.integration.harness import overlay as running

pytestmark = pytest.mark.integration

QOS = TopicQos(period_ms=5, deadline_ms=300, loss_tolerance=0, retention=64)


@pytest.fixture
async def overlay(zookeeper_hosts, chroot) -> AsyncIterator[Overlay]:
    async with running(zookeeper_hosts, chroot) as overlay:
        await overlay.router("r1")
        await overlay.router("r2")
        yield overlay


def _direct(overlay: Overlay, here: str, there: str):
    return overlay.edges[here].find_link(there, "edge")


def _paths(overlay: Overlay, edge: str, topic: str) -> dict[str, str]:
    statistics = overlay.edges[edge].core.statistics()
    return dict(next(item.paths for item in statistics.topics if item.topic == topic))


def _frames_to_routers(overlay: Overlay, edge: str) -> int:
    links = [link for link in overlay.edges[edge].broker_links() if link.role is Role.ROUTER]
    return sum(link.outbox.statistics().frames_sent for link in links)


class Stream:
    """One publisher in LAN a, one subscriber in LAN b; every payload is its number."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.sent = 0

    async def start(self, qos: TopicQos = QOS) -> "Stream":
        self.publisher = await (await self.overlay.client("ea")).publisher("valve", qos)
        self.subscription = await (await self.overlay.client("eb")).subscribe("valve")
        await self.overlay.wait_for_route("valve", "ea", "eb")
        return self

    async def publish(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            await self.publisher.publish(str(self.sent).encode())
            await asyncio.sleep(0.005)

    async def expect_all(self, after: int = 0) -> None:
        """Everything sent after this one arrives, once and in order."""
        async with asyncio.timeout(10):
            for number in range(after + 1, self.sent + 1):
                message = await self.subscription.receive()
                assert message.payload == str(number).encode()


async def test_both_paths_carry_every_message_and_subscribers_get_it_once(overlay):
    await overlay.edge("ea", "a", paths="both")
    await overlay.edge("eb", "b")
    stream = await Stream(overlay).start()
    await eventually(lambda: _paths(overlay, "ea", "valve") == {"eb": "both"}, "both paths are in use")
    await stream.publish(50)
    await stream.expect_all()
    await eventually(
        lambda: overlay.edges["eb"].core.statistics().dropped.get("duplicate", 0) >= 50, "copies are dropped"
    )
    sent = overlay.edges["ea"].status()["paths"]["bytes"]
    assert sent["direct"] > 50 * 32 and sent["routing"] > 50 * 32
    # The other way round the same link serves, and ages are bounded on it as on any other.
    message = await _one_more(stream)
    assert 0 < message.age_bound_ms < 300


async def _one_more(stream: Stream):
    await stream.publish(1)
    return await asyncio.wait_for(stream.subscription.receive(), 10)


async def test_adaptive_needs_one_path_where_one_suffices_and_falls_back_without_loss(overlay):
    await overlay.edge("ea", "a", paths="adaptive")
    await overlay.edge("eb", "b")
    stream = await Stream(overlay).start()
    await eventually(
        lambda: _paths(overlay, "ea", "valve") == {"eb": "direct, routing in reserve"},
        "the direct path alone is in use",
        timeout_s=20 + CHEAPER_AFTER_NS / 1e9,
    )
    routing_before = _frames_to_routers(overlay, "ea")
    await stream.publish(20)
    await stream.expect_all()
    assert _frames_to_routers(overlay, "ea") == routing_before

    # The link breaks while messages are on their way: they take the routing path, in order.
    publishing = asyncio.create_task(stream.publish(40))
    await eventually(lambda: stream.sent >= 40, "half of it is published")
    _direct(overlay, "eb", "ea").connection.abort(CloseReason.LOST, "cut by the test")
    await publishing
    await stream.expect_all(after=20)
    statistics = overlay.edges["eb"].core.statistics()
    assert sum(topic.lost for topic in statistics.topics) == 0
    await eventually(lambda: _direct(overlay, "ea", "eb").is_up, "the direct link is opened again")


async def test_a_direct_link_that_cannot_be_opened_costs_nothing(overlay):
    await overlay.edge("ea", "a", paths="both")
    # As behind NAT: the address that others know leads nowhere.
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    edge = await overlay.edge("eb", "b", listen=listen, advertise="127.0.0.1:1")
    edge.locator = listen  # for its own clients
    stream = await Stream(overlay).start()
    await stream.publish(20)
    await stream.expect_all()
    await eventually(lambda: _direct(overlay, "ea", "eb") is not None, "a direct link is tried")
    await stream.publish(20)
    await stream.expect_all(after=20)
    assert not _direct(overlay, "ea", "eb").is_up
    assert _paths(overlay, "ea", "valve") == {"eb": "routing"}


async def test_a_topic_decides_for_itself(overlay):
    await overlay.edge("ea", "a", paths="both")
    await overlay.edge("eb", "b")
    qos = TopicQos(period_ms=5, deadline_ms=300, loss_tolerance=0, retention=64, paths=Policy.SINGLE)
    stream = await Stream(overlay).start(qos)
    await stream.publish(20)
    await stream.expect_all()
    assert _direct(overlay, "ea", "eb") is None


async def test_without_a_deadline_there_is_no_direct_path(overlay):
    await overlay.edge("ea", "a", paths="both")
    await overlay.edge("eb", "b")
    stream = await Stream(overlay).start(TopicQos())
    await stream.publish(20)
    await stream.expect_all()
    assert _direct(overlay, "ea", "eb") is None
