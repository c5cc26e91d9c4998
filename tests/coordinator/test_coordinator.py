"""The coordinator a broker uses, against a real server, with the faults a broker meets."""

import asyncio
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from coordinator import (
    ClusterFormatError,
    CoordinationTimeoutError,
    Coordinator,
    DuplicateBrokerError,
    EdgeRecord,
    Endpoint,
    EndpointKind,
    FlagRecord,
    RouterRecord,
    SessionState,
    TopicExistsError,
    TopicInUseError,
    TopicView,
    UnknownTopicError,
)
from overlay.errors import InvalidNameError, QosError
from overlay.qos import SubscriptionQos, TopicQos
from tests.coordinator.faults import (
    FaultProxy,
    Fleet,
    eventually,
    expire_session,
)

pytestmark = pytest.mark.integration

_endpoint_ids = itertools.count(1)


def publisher(edge: str = "e1") -> Endpoint:
    return Endpoint(EndpointKind.PUBLISHER, "lan-1", edge, next(_endpoint_ids))


def router(name: str, port: int = 1, **fields: Any) -> RouterRecord:
    return RouterRecord(name, f"host-{name}:{port}", f"host-{name}", **fields)


# The tree


async def test_all_coordinators_agree_on_the_cluster(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        one, other = await fleet.coordinator(), await fleet.coordinator()
        await one.start()
        assert len(one.cluster) == 32
        assert one.cluster == other.cluster
        data, _ = await one.session.get("/cluster")
        assert json.loads(data) == {"cluster": one.cluster, "format": 1}


async def test_another_format_is_refused(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        await session.create("/cluster", b'{"cluster": "x", "format": 2}')
        with pytest.raises(ClusterFormatError, match="has format 2, this needs 1: use the version"):
            await Coordinator(session).start()


async def test_a_call_gives_up_when_there_is_no_server(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        coordinator = await fleet.coordinator(proxy.hosts, operation_timeout_s=0.2)
        proxy.refuse(True)
        proxy.cut()
        await eventually(lambda: coordinator.session.state is SessionState.SUSPENDED)
        with pytest.raises(CoordinationTimeoutError, match=r"topic 't' was not answered within 0\.2 s"):
            await coordinator.declare_topic("t")
        proxy.refuse(False)
        await coordinator.session.wait_connected()
        assert (await coordinator.declare_topic("t")).id == 1


# Brokers


async def test_routers_and_edges_are_seen_with_every_change(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        routers: list[dict[str, RouterRecord]] = []
        edges: list[dict[str, EdgeRecord]] = []
        observer.watch_routers(routers.append)
        observer.watch_edges(edges.append)
        await eventually(lambda: routers == [{}] and edges == [{}], "called back once to begin with")
        registration = await coordinator.register_router(router("r1"))
        await eventually(lambda: routers[-1] == {"r1": router("r1")})
        await registration.update(messages_per_s=5.0, draining=True)
        await eventually(lambda: routers[-1] == {"r1": router("r1", messages_per_s=5.0, draining=True)})
        edge = EdgeRecord("e1", "host:2", "lan-1", "host")
        await coordinator.register_edge(edge)
        await eventually(lambda: edges[-1] == {"e1": edge})
        await registration.close()
        await eventually(lambda: routers[-1] == {})
        assert len(routers) <= 4


async def test_a_registration_comes_back_after_expiry_and_deletion(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        registration = await coordinator.register_router(router("r1"))
        seen: list[dict[str, RouterRecord]] = []
        observer.watch_routers(seen.append)
        await eventually(lambda: seen and "r1" in seen[-1])
        await expire_session(coordinator.session, zookeeper_hosts)
        await eventually(lambda: {} in seen and seen[-1] == {"r1": router("r1")})
        deleted = await observer.session.exists("/brokers/routing/r1")
        assert deleted is not None
        await observer.session.delete("/brokers/routing/r1")
        while (stat := await observer.session.exists("/brokers/routing/r1")) is None:
            await observer.session.wait_connected()
        assert stat.created_zxid > deleted.created_zxid
        await registration.update(messages_per_s=1.0)
        await eventually(lambda: seen[-1] == {"r1": router("r1", messages_per_s=1.0)})
        assert registration.failure is None


async def test_a_restarted_broker_replaces_its_own_entry_at_once(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=20.0) as fleet:
        proxy = await fleet.proxy()
        before = await fleet.coordinator(proxy.hosts)
        await before.register_router(router("r1"))
        proxy.refuse(True)
        proxy.cut()
        after = await fleet.coordinator()
        async with asyncio.timeout(5):
            await after.register_router(router("r1", messages_per_s=1.0))
        stat = await after.session.exists("/brokers/routing/r1")
        assert stat is not None
        assert stat.ephemeral_owner == after.session.session_id


async def test_a_moved_broker_waits_for_its_previous_session(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=1.0) as fleet:
        proxy = await fleet.proxy()
        before = await fleet.coordinator(proxy.hosts)
        await before.register_router(router("r1", port=1))
        proxy.refuse(True)
        proxy.cut()
        after = await fleet.coordinator()
        registration = await after.register_router(router("r1", port=2))
        assert registration.record.locator == "host-r1:2"


async def test_a_second_broker_of_the_same_name_is_refused(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=1.0) as fleet:
        first, second = await fleet.coordinator(), await fleet.coordinator()
        registration = await first.register_router(router("r1", port=1))
        with pytest.raises(DuplicateBrokerError, match=r"host-r1:1.*Give this broker another id"):
            await second.register_router(router("r1", port=2))
        assert registration.failure is None
        stat = await second.session.exists("/brokers/routing/r1")
        assert stat is not None
        assert stat.ephemeral_owner == first.session.session_id


async def test_a_broker_that_wakes_up_gives_way_to_its_successor(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=1.0) as fleet:
        proxy = await fleet.proxy()
        sleeper, successor = await fleet.coordinator(proxy.hosts), await fleet.coordinator()
        asleep = await sleeper.register_router(router("r1"))
        proxy.stall()
        awake = await successor.register_router(router("r1"))
        proxy.resume()
        failure = await asyncio.wait_for(asleep.wait_failure(), 10)
        assert isinstance(failure, DuplicateBrokerError)
        assert awake.failure is None
        with pytest.raises(DuplicateBrokerError):
            await asleep.update(draining=True)


async def test_registering_survives_a_lost_answer(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        coordinator = await fleet.coordinator(proxy.hosts)
        await losing_the_answer(proxy, coordinator.register_router(router("r1")))
        stat = await coordinator.session.exists("/brokers/routing/r1")
        assert stat is not None
        assert stat.ephemeral_owner == coordinator.session.session_id


async def losing_the_answer(proxy: FaultProxy, call: Any) -> Any:
    """Run `call` such that its first request is applied and the answer is lost."""
    already = proxy.swallowed_bytes
    proxy.swallow_answers()
    work = asyncio.ensure_future(call)
    await eventually(lambda: proxy.swallowed_bytes > already)
    proxy.cut()
    proxy.resume()
    return await work


# Topics


async def test_topics_get_ids_that_are_never_used_again(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        one, other = await fleet.coordinator(), await fleet.coordinator()
        names = [".", "..", "a/b", "/", "wind farm/ü/🚀", "100%"]
        declared = await asyncio.gather(
            *(each.declare_topic(name) for name in names for each in (one, other))
        )
        by_name = {record.name: record.id for record in declared}
        assert all(by_name[record.name] == record.id for record in declared)
        assert len(set(by_name.values())) == len(names)
        assert await other.topics() == {record.name: record for record in declared}
        await one.delete_topic("a/b")
        again = await one.declare_topic("a/b")
        assert again.id > max(by_name.values())
        assert (again.primary, again.backup, again.epoch) == (None, None, 0)


async def test_a_topic_keeps_its_quality_of_service(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        qos = TopicQos(deadline_ms=20.0)
        record = await coordinator.declare_topic("t", qos)
        assert await coordinator.declare_topic("t", qos) == record
        assert await coordinator.declare_topic("t", None) == record
        assert await coordinator.topic("t") == record
        with pytest.raises(TopicExistsError, match=r"deadline_ms is 20\.0, asked for 30\.0"):
            await coordinator.declare_topic("t", TopicQos(deadline_ms=30.0))
        with pytest.raises(InvalidNameError):
            await coordinator.declare_topic("")


async def test_a_topic_is_changed_with_what_its_subscribers_ask_for_in_view(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        record = await coordinator.declare_topic("t", TopicQos(retention=1))
        request = SubscriptionQos(deadline_ms=20)
        await coordinator.add_endpoint("t", publisher(), {})
        await coordinator.add_endpoint("t", Endpoint(EndpointKind.SUBSCRIBER, "b", "e2", 7, request), {})
        seen: list[tuple[TopicQos, frozenset[SubscriptionQos]]] = []

        def decide(qos: TopicQos, requests: frozenset[SubscriptionQos]) -> TopicQos:
            seen.append((qos, requests))
            return replace(qos, retention=5)

        changed = await coordinator.change_qos("t", decide)
        assert seen == [(TopicQos(retention=1), frozenset({request}))]
        assert changed == replace(record, qos=TopicQos(retention=5)) == await coordinator.topic("t")
        assert await coordinator.declare_topic("t", TopicQos(retention=9), must_match=False) == changed

        def refuse(qos: TopicQos, requests: frozenset[SubscriptionQos]) -> TopicQos:
            raise QosError("no")

        with pytest.raises(QosError):
            await coordinator.change_qos("t", refuse)
        assert await coordinator.topic("t") == changed
        with pytest.raises(UnknownTopicError):
            await coordinator.change_qos("other", decide)


async def test_changes_at_the_same_time_are_all_made_one_after_the_other(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinators = [await fleet.coordinator() for _ in range(3)]
        await coordinators[0].declare_topic("t", TopicQos(retention=0))
        await asyncio.gather(
            *(
                each.change_qos("t", lambda qos, _: replace(qos, retention=qos.retention + 1))
                for each in coordinators * 5
            )
        )
        assert (await coordinators[0].topic("t")).qos.retention == 15


async def test_flags_are_seen_by_all_until_lowered_or_their_router_is_gone(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        one, other, reader = [await fleet.coordinator() for _ in range(3)]
        odd = FlagRecord("wind farm/ü.x", "r1", "too far")
        await one.raise_flag(odd)
        await other.raise_flag(FlagRecord("t", "r2", "late"))
        assert await reader.flags() == {"wind farm/ü.x": odd, "t": FlagRecord("t", "r2", "late")}
        await one.lower_flag("r1", "wind farm/ü.x")
        await one.lower_flag("r1", "never flagged")
        assert set(await reader.flags()) == {"t"}
        await expire_session(other.session, zookeeper_hosts)
        await eventually(lambda: other.session.state is SessionState.CONNECTED)

        await other.raise_flag(FlagRecord("later", "r2", "late"))  # comes after what is made again
        assert set(await reader.flags()) == {"t", "later"}, "a flag outlives the session, not the router"
        await other.close()
        await other.session.close()
        assert await reader.flags() == {}


async def test_declaring_survives_lost_answers(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        coordinator = await fleet.coordinator(proxy.hosts)
        record = await losing_the_answer(proxy, coordinator.declare_topic("t", TopicQos(retention=1)))
        assert await coordinator.topics() == {"t": record}


async def test_a_topic_in_use_cannot_be_deleted(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        await coordinator.declare_topic("t")
        endpoint = publisher()
        await coordinator.add_endpoint("t", endpoint, {})
        with pytest.raises(TopicInUseError, match="topic 't' still has 1 endpoints"):
            await coordinator.delete_topic("t")
        await coordinator.remove_endpoint("t", endpoint)
        await coordinator.delete_topic("t")
        for call in (coordinator.delete_topic("t"), coordinator.topic("t"), coordinator.endpoints("t")):
            with pytest.raises(UnknownTopicError, match="declare it first"):
                await call


# Endpoints


async def test_endpoints_are_added_and_removed_any_number_of_times(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        await coordinator.declare_topic("t")
        endpoint, other = publisher(), publisher()
        for _ in range(2):
            await coordinator.add_endpoint("t", endpoint, {"filter": "x < 5"})
            await coordinator.add_endpoint("t", other, {})
            assert await coordinator.endpoints("t") == (endpoint, other)
        data, stat = await coordinator.session.get(f"/topics/t/{endpoint.name}")
        assert json.loads(data) == {"filter": "x < 5"}
        assert stat.ephemeral_owner == coordinator.session.session_id
        for _ in range(2):
            await coordinator.remove_endpoint("t", endpoint)
            assert await coordinator.endpoints("t") == (other,)
        with pytest.raises(UnknownTopicError):
            await coordinator.add_endpoint("nothing", endpoint, {})
        assert coordinator.statistics().endpoints_kept == 1


async def test_adding_and_removing_at_once_ends_as_asked_last(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        await coordinator.declare_topic("t")
        chance = random.Random(7)
        endpoints = [publisher() for _ in range(30)]
        wanted: dict[Endpoint, bool] = {}
        calls = []
        for _ in range(300):
            endpoint = chance.choice(endpoints)
            wanted[endpoint] = chance.random() < 0.5
            change = coordinator.add_endpoint("t", endpoint, {}) if wanted[endpoint] else None
            calls.append(asyncio.ensure_future(change or coordinator.remove_endpoint("t", endpoint)))
            if chance.random() < 0.1:
                await asyncio.sleep(0)
        await asyncio.gather(*calls)
        present = {endpoint for endpoint, present in wanted.items() if present}
        assert set(await coordinator.endpoints("t")) == present


async def test_endpoints_come_back_after_expiry(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        await coordinator.declare_topic("t")
        endpoints = [publisher() for _ in range(500)]
        await asyncio.gather(*(coordinator.add_endpoint("t", endpoint, {}) for endpoint in endpoints))
        dropped = endpoints.pop()
        await coordinator.remove_endpoint("t", dropped)
        views: list[TopicView] = []
        observer.watch_topic("t", views.append)
        await eventually(lambda: views and len(views[-1].endpoints) == 499)
        await expire_session(coordinator.session, zookeeper_hosts)
        await eventually(lambda: views[-1].endpoints == frozenset(endpoints) and len(views) > 1)


async def test_adding_survives_a_lost_answer(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        coordinator = await fleet.coordinator(proxy.hosts)
        await coordinator.declare_topic("t")
        one, two, three = publisher(), publisher(), publisher()
        await losing_the_answer(proxy, coordinator.add_endpoint("t", one, {}))
        both = asyncio.gather(
            coordinator.add_endpoint("t", two, {}), coordinator.add_endpoint("t", three, {})
        )
        await losing_the_answer(proxy, both)
        assert set(await coordinator.endpoints("t")) == {one, two, three}
        await losing_the_answer(proxy, coordinator.remove_endpoint("t", two))
        assert set(await coordinator.endpoints("t")) == {one, three}


async def test_an_endpoint_left_by_the_previous_process_is_replaced(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=20.0) as fleet:
        before, after = await fleet.coordinator(), await fleet.coordinator()
        await before.declare_topic("t")
        endpoint = publisher()
        await before.add_endpoint("t", endpoint, {"old": True})
        await after.add_endpoint("t", endpoint, {"new": True})
        data, stat = await after.session.get(f"/topics/t/{endpoint.name}")
        assert json.loads(data) == {"new": True}
        assert stat.ephemeral_owner == after.session.session_id


async def test_an_endpoint_added_while_the_server_is_away_appears_later(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        coordinator = await fleet.coordinator(proxy.hosts, operation_timeout_s=0.1)
        observer = await fleet.coordinator()
        await observer.declare_topic("t")
        proxy.refuse(True)
        proxy.cut()
        await eventually(lambda: coordinator.session.state is SessionState.SUSPENDED)
        endpoint = publisher()
        with pytest.raises(CoordinationTimeoutError, match=r"was not answered within 0\.1 s"):
            await coordinator.add_endpoint("t", endpoint, {})
        views: list[TopicView] = []
        observer.watch_topic("t", views.append)
        proxy.refuse(False)
        await eventually(lambda: views and views[-1].endpoints == {endpoint})
