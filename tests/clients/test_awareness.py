"""Subscribers know how old messages can be, and learn of slow and missing ones."""

import asyncio
import time

import pytest

from clients import ClosedError, Gap, MissedPeriod, SlowMessage, TopicQos, connect_synchronously
from clients.awareness import EVENTS_MAX, Awareness
from overlay.batch import BATCH_HEADER_BYTES, FRAME_OVERHEAD_BYTES, Run, encode_batch, encode_message
from overlay.delay import LinkClock
from overlay.errors import CloseReason
from overlay.limits import MILLISECOND_NS
from tests.integration.harness import eventually, overlay


class ManualClock:
    """Time that passes when the test says so."""

    def __init__(self):
        self.now_ns = 10**9

    def __call__(self):
        return self.now_ns

    def advance(self, milliseconds):
        self.now_ns += milliseconds * MILLISECOND_NS


def events_of(awareness):
    found = []
    while awareness.has_events:
        found.append(awareness.take())
    return found


# Without brokers


async def test_silence_is_told_once_and_again_after_it_was_broken():
    clock = ManualClock()
    awareness = Awareness("door", clock)
    awareness.allow(100, 50)
    awareness.heard(7, 1)
    clock.advance(149)
    awareness._look()
    assert not awareness.has_events
    clock.advance(1)
    for _ in range(3):
        awareness._look()
    assert events_of(awareness) == [MissedPeriod("door", 7, 1, 150.0, 150.0)]
    awareness.heard(7, 2)
    clock.advance(200)
    awareness._look()
    assert events_of(awareness) == [MissedPeriod("door", 7, 2, 200.0, 150.0)]
    awareness.end()


async def test_publishers_that_left_and_topics_without_a_period_may_be_silent():
    clock = ManualClock()
    awareness = Awareness("door", clock)
    awareness.allow(100, 50)
    for publisher in (1, 2, 9):
        awareness.heard(publisher, 1)
    awareness.set_publishers(frozenset({1, 2}))
    awareness.set_publishers(frozenset({2, 3}))
    clock.advance(1_000)
    awareness._look()
    # Nobody has told of 9 yet: its message was faster than the news of it.
    assert [(event.publisher, event.sequence) for event in events_of(awareness)] == [(2, 1), (9, 1), (3, 0)]
    awareness.heard(2, 2)
    awareness.allow(None, 50)
    assert awareness._timer is None
    clock.advance(1_000)
    awareness._look()
    assert not awareness.has_events


async def test_a_live_publisher_that_was_never_heard_is_told_of_when_its_time_has_passed():
    clock = ManualClock()
    awareness = Awareness("door", clock)
    awareness.allow(100, 50)
    awareness.set_publishers(frozenset({7}))
    assert awareness._timer is not None
    clock.advance(149)
    awareness.set_publishers(frozenset({7, 8}))  # the news of another one gives the first no more time
    awareness._look()
    assert not awareness.has_events, "it has been declared and may still publish in time"
    clock.advance(1)
    for _ in range(3):
        awareness._look()
    assert events_of(awareness) == [MissedPeriod("door", 7, 0, 150.0, 150.0)]
    awareness.heard(7, 1)
    clock.advance(149)
    awareness._look()
    assert events_of(awareness) == [MissedPeriod("door", 8, 0, 150.0, 150.0)], "named 149 ms after the other"
    awareness.set_publishers(frozenset({8}))
    awareness.set_publishers(frozenset({7, 8}))
    clock.advance(150)
    awareness._look()
    assert events_of(awareness) == [MissedPeriod("door", 7, 0, 150.0, 150.0)], "it had left, and came back"
    awareness.end()


async def test_a_publisher_that_was_heard_before_it_was_named_keeps_its_time():
    clock = ManualClock()
    awareness = Awareness("door", clock)
    awareness.allow(100, 50)
    awareness.heard(7, 3)
    clock.advance(100)
    awareness.set_publishers(frozenset({7}))
    clock.advance(50)
    awareness._look()
    assert events_of(awareness) == [MissedPeriod("door", 7, 3, 150.0, 150.0)]
    awareness.end()


async def test_the_loop_wakes_up_by_itself_when_a_period_is_missed():
    awareness = Awareness("door", time.monotonic_ns)
    awareness.heard(7, 1)
    awareness.allow(5, 5)
    async with asyncio.timeout(5):
        await awareness.wait()
    (event,) = events_of(awareness)
    assert event.silent_ms >= event.allowed_ms == 10
    awareness.end()


async def test_a_subscriber_that_takes_no_events_loses_the_oldest_and_can_tell():
    awareness = Awareness("door", ManualClock())
    for number in range(EVENTS_MAX + 3):
        awareness.tell(Gap("door", 7, number, number))
    assert awareness.dropped == 3
    assert events_of(awareness)[0].first == 3


# With brokers


@pytest.fixture
async def lan(zookeeper_hosts, chroot):
    """Two LANs of one edge each, and a second edge in LAN a."""
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.edge("ea", "a")
        await testbed.edge("ea2", "a")
        await testbed.edge("eb", "b")
        await testbed.router("r1")
        yield testbed


async def clocks_known(*clients):
    """Wait until these clients can bound ages; their edges know theirs by then or soon after."""
    for client in clients:
        await eventually(
            lambda client=client: client._link.clock.is_known, "the client knows its edge's clock"
        )


def clocks_are_known_at(testbed, router, ingress, egress):
    """The router knows the ingress edge's clock, the egress edge knows the router's."""
    at_router = {link.peer: link.clock.is_known for link in testbed.routers[router].hub.links}
    at_egress = {link.peer: link.clock.is_known for link in testbed.edges[egress].hub.links}
    return at_router.get(ingress, False) and at_egress.get(router, False)


async def publish_stamped(client, publisher):
    """Publish the very reading the message is stamped with: an earlier one would count a pause twice."""
    born_ns = time.monotonic_ns()
    clock, client.clock = client.clock, lambda: born_ns
    try:
        await publisher.publish(born_ns.to_bytes(8, "little"))
    finally:
        client.clock = clock


def checked_against_the_truth(message):
    """Whether the age of a message is bounded; the bound must not be below the truth."""
    if message.age_bound_ms is None:
        return False
    true_ns = message.received_ns - int.from_bytes(message.payload, "little")
    margin_ns = message.age_bound_ms * MILLISECOND_NS - true_ns
    assert margin_ns >= 0, f"bound of {message.age_bound_ms} ms is {-margin_ns:.0f} ns below the true age"
    return True


@pytest.mark.integration
async def test_ages_are_bounded_across_lans_and_never_below_the_truth(lan):
    sender, receiver = await lan.client("ea"), await lan.client("eb")
    subscription = await receiver.subscribe("door", limit_ms=10_000)
    publisher = await sender.publisher("door")
    await lan.wait_for_route("door", "ea", "eb")
    await clocks_known(sender, receiver)
    bounded = 0
    while bounded < 200:
        await publisher.publish(time.monotonic_ns().to_bytes(8, "little"))
        message = await subscription.receive(10)
        if message.age_bound_ms is None:  # a link of the brokers had no helper yet
            assert not message.fast and not message.slow
            continue
        bounded += 1
        # This process has one clock: the age at arrival cannot be above what has passed until now.
        passed_ms = (time.monotonic_ns() - int.from_bytes(message.payload, "little")) / MILLISECOND_NS
        assert message.age_bound_ms < passed_ms + 100
        assert message.fast and not message.slow
    statistics = subscription.statistics()
    assert statistics.slow == 0
    assert statistics.delivered == bounded + statistics.age_unknown


@pytest.mark.integration
async def test_the_truth_is_never_above_the_bound_on_arrival(lan):
    """Birth and arrival are the readings that the clients took for them, so the comparison is exact."""
    sender, receiver = await lan.client("ea"), await lan.client("eb")
    subscription = await receiver.subscribe("door")
    publisher = await sender.publisher("door")
    await lan.wait_for_route("door", "ea", "eb")
    await clocks_known(sender, receiver)
    bounded = 0
    while bounded < 200:
        await publish_stamped(sender, publisher)
        bounded += checked_against_the_truth(await subscription.receive(10))


@pytest.mark.integration
async def test_bounds_survive_a_broken_connection_and_another_primary(lan):
    """On the new connection and the new path the bounds hold too, and come back without a pause."""
    await lan.router("r2")
    sender, receiver = await lan.client("ea"), await lan.client("eb")
    subscription = await receiver.subscribe("door")
    publisher = await sender.publisher("door")
    await lan.wait_for_route("door", "ea", "eb")
    await clocks_known(sender, receiver)

    async def bounded():
        await publish_stamped(sender, publisher)
        return checked_against_the_truth(await subscription.receive(10))

    await eventually(bounded, "ages are known")
    for client in (sender, receiver):
        connects = client.link_statistics().connects
        client._link.connection.abort(CloseReason.LOST, "a broken connection")
        # Published before anybody is connected again, so that it is the first on the new connection.
        assert await bounded(), "the first message after a reconnect has a bound"
        assert client.link_statistics().connects == connects + 1
    primary = lan.topic_at("ea", "door").primary
    other = lan.topic_at("ea", "door").backup
    await eventually(lambda: clocks_are_known_at(lan, other, "ea", "eb"), "the way by the backup is known")
    await lan.routers.pop(primary).close()
    for number in range(50):
        assert await bounded(), f"message {number} by the other routing broker"


@pytest.mark.integration
async def test_a_client_with_a_worse_clock_than_all_others_is_not_believed_to_be_younger(lan):
    """Its clock is slow by half a per cent, as it says, and its message ten seconds old."""
    sender, receiver = await lan.client("ea", drift_ppm=5_000), await lan.client("eb")
    subscription = await receiver.subscribe("door")
    publisher = await sender.publisher("door")
    await lan.wait_for_route("door", "ea", "eb")
    await clocks_known(sender, receiver)

    async def bounded():
        now_ns = sender.clock()
        clock, sender.clock = sender.clock, lambda: now_ns - 9_950 * MILLISECOND_NS
        try:
            await publisher.publish(b"open")
        finally:
            sender.clock = clock
        message = await subscription.receive(10)
        if message.age_bound_ms is None:
            return False
        passed_ms = (time.monotonic_ns() - now_ns) / MILLISECOND_NS
        assert 10_000 <= message.age_bound_ms < 10_000 + passed_ms + 100
        return True

    await eventually(bounded, "the age is known")


@pytest.mark.integration
async def test_bounds_survive_a_move_to_another_edge(lan):
    client = await lan.client("ea", "ea2")
    subscription = await client.subscribe("door")
    sender = await lan.client("eb")
    publisher = await sender.publisher("door")
    await lan.wait_for_route("door", "eb", "ea")
    await lan.vanish(lan.edges["ea"])
    await eventually(lambda: client.edge == "ea2", "the client has turned to the other edge")
    await lan.wait_for_route("door", "eb", "ea2")

    async def bounded():
        await publish_stamped(sender, publisher)
        return checked_against_the_truth(await subscription.receive(10))

    await eventually(bounded, "ages are known on the new path")


@pytest.mark.integration
async def test_without_a_helper_or_a_stamp_the_age_is_unknown(lan):
    client = await lan.client("ea")
    subscription = await client.subscribe("door", limit_ms=1)
    await clocks_known(client)
    now_ns = client.clock()

    def arrive(sequence, born_ns, shift_ns):
        data = encode_message(subscription.topic_id, 7, sequence, born_ns, b"open")
        frame = encode_batch(1, 1, shift_ns, [Run(1, data)])
        client.on_data(client._link, frame[FRAME_OVERHEAD_BYTES - BATCH_HEADER_BYTES :], now_ns)

    arrive(1, now_ns, 0)
    assert (await subscription.receive(1)).age_bound_ms is not None
    arrive(2, 0, 0)
    arrive(3, now_ns, -(2**63))
    client._link.clock = LinkClock()
    arrive(4, now_ns, 0)
    for _ in range(3):
        message = await subscription.receive(1)
        assert message.age_bound_ms is None
        assert not message.slow and not message.fast
    assert subscription.statistics().age_unknown == 3


@pytest.mark.integration
async def test_an_aware_subscriber_learns_of_slow_messages_gaps_and_silence(lan):
    client = await lan.client("ea")
    await clocks_known(client)
    qos = TopicQos(period_ms=500, deadline_ms=5_000)
    subscription = await client.subscribe("door", qos, limit_ms=0.0001, allowance_ms=200, aware=True)
    publisher = await client.publisher("door")
    await publisher.publish(b"open")
    event = await subscription.next_event(10)
    assert isinstance(event, SlowMessage)
    message = await subscription.receive(10)
    assert message.slow and not message.fast
    assert (event.publisher, event.sequence, event.age_bound_ms) == (
        publisher.endpoint_id,
        1,
        message.age_bound_ms,
    )
    event = await subscription.next_event(10)
    assert isinstance(event, MissedPeriod)
    assert (event.publisher, event.sequence, event.allowed_ms) == (publisher.endpoint_id, 1, 700)
    publisher.sequence += 3
    await publisher.publish(b"shut")
    gap = await subscription.next_event(10)
    assert gap == Gap("door", publisher.endpoint_id, 2, 4)
    await client.close()
    left = [event async for event in subscription.events()]
    assert all(isinstance(event, SlowMessage | MissedPeriod) for event in left)
    with pytest.raises(ClosedError):
        await subscription.next_event()


@pytest.mark.integration
async def test_an_aware_subscriber_learns_of_a_publisher_that_never_publishes(lan):
    sender, receiver = await lan.client("eb"), await lan.client("ea")
    qos = TopicQos(period_ms=50, deadline_ms=5_000)
    subscription = await receiver.subscribe("door", qos, allowance_ms=50, aware=True)
    publisher = await sender.publisher("door")
    event = await subscription.next_event(10)
    assert isinstance(event, MissedPeriod)
    assert (event.publisher, event.sequence, event.allowed_ms) == (publisher.endpoint_id, 0, 100)
    assert event.silent_ms >= 100


@pytest.mark.integration
async def test_a_publisher_that_leaves_is_not_waited_for(lan):
    sender, receiver = await lan.client("ea"), await lan.client("ea2")
    qos = TopicQos(period_ms=3_000, deadline_ms=5_000)
    subscription = await receiver.subscribe("door", qos, allowance_ms=1, aware=True)
    publishers = [await sender.publisher("door") for _ in range(2)]
    for publisher in publishers:
        await publisher.wait_for_subscribers(1, 10)
        await publisher.publish(b"open")
        await subscription.receive(10)
    known = subscription._awareness._heard
    everybody = {publisher.endpoint_id for publisher in publishers}
    assert known.keys() == everybody
    await eventually(lambda: subscription._awareness._live == everybody, "the overlay tells who is there")
    await publishers[0].close()
    await eventually(lambda: publishers[0].endpoint_id not in known, "the overlay tells who has left")
    event = await subscription.next_event(10)
    assert isinstance(event, MissedPeriod)
    assert event.publisher == publishers[1].endpoint_id


@pytest.mark.integration
async def test_the_limit_is_the_topics_deadline_unless_given(lan):
    client = await lan.client("ea")
    subscription = await client.subscribe("door", TopicQos(deadline_ms=250))
    assert subscription.limit_ms == 250
    assert (await client.subscribe("door", limit_ms=9)).limit_ms == 9
    assert (await client.subscribe("bell")).limit_ms is None
    with pytest.raises(ValueError, match="limit_ms is 0"):
        await client.subscribe("door", limit_ms=0)
    with pytest.raises(ClosedError, match="aware=True"):
        await subscription.next_event()


@pytest.mark.integration
async def test_the_synchronous_client_is_told_too(lan):
    locator = lan.edges["ea"].locator

    def script():
        with connect_synchronously(locator, drift_ppm=200) as client:
            door = client.subscribe("door", limit_ms=0.0001, aware=True)
            while True:
                client.publish("door", b"open")
                message = door.receive(5)
                if message.age_bound_ms is not None:
                    break
            event = door.next_event(5)
            with pytest.raises(TimeoutError):
                door.next_event(0.01)
        return message, event, list(door.events())

    message, event, rest = await asyncio.to_thread(script)
    assert message.slow
    assert isinstance(event, SlowMessage)
    assert event.sequence == message.sequence
    assert rest == []
    with pytest.raises(ValueError, match="drift_ppm is 0"):
        await asyncio.to_thread(lambda: connect_synchronously(locator, drift_ppm=0).__enter__())
