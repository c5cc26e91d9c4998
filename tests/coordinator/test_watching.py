"""What a broker follows of the tree: topics, brokers and the leader, through every fault, without leaks."""

import asyncio
import gc
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from coordinator import (
    Coordinator,
    Endpoint,
    EndpointKind,
    RouterRecord,
    Session,
    SessionState,
    TopicView,
)
from runtime.host import Host
from tests.coordinator.faults import (
    Fleet,
    eventually,
    expire_session,
    lose_connection,
    no_leaks,
    server_watches,
    watches_become,
)

pytestmark = pytest.mark.integration

_endpoint_ids = itertools.count(1)


def publisher(edge: str = "e1") -> Endpoint:
    return Endpoint(EndpointKind.PUBLISHER, "lan-1", edge, next(_endpoint_ids))


def router(name: str, port: int = 1, **fields: Any) -> RouterRecord:
    return RouterRecord(name, f"host-{name}:{port}", f"host-{name}", **fields)


# Watches


async def test_a_topic_is_followed_from_before_it_exists_until_after_it_is_gone(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        views: list[TopicView] = []
        observer.watch_topic("t", views.append)
        await eventually(lambda: observer.session.statistics().watches == 1)
        assert views == []
        record = await coordinator.declare_topic("t")
        await eventually(lambda: views == [TopicView(record, frozenset())])
        endpoint = publisher()
        await coordinator.add_endpoint("t", endpoint, {})
        await eventually(lambda: views[-1] == TopicView(record, frozenset({endpoint})))
        await coordinator.session.create("/topics/t/no-endpoint", b"")
        await coordinator.remove_endpoint("t", endpoint)
        await eventually(lambda: views[-1] == TopicView(record, frozenset()))
        await coordinator.session.delete("/topics/t/no-endpoint")
        await coordinator.delete_topic("t")
        await eventually(lambda: views[-1] == TopicView(record, frozenset(), exists=False))
        again = await coordinator.declare_topic("t")
        await eventually(lambda: views[-1] == TopicView(again, frozenset()))
        assert again.id != record.id


async def test_mirrors_follow_through_lost_connections_and_sessions(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        await coordinator.declare_topic("t")
        views: list[TopicView] = []
        names: list[frozenset[str]] = []
        routers: list[dict[str, RouterRecord]] = []
        observer.watch_topic("t", views.append)
        observer.watch_assignments("r1", lambda topics, _: names.append(topics))
        observer.watch_routers(routers.append)
        await eventually(lambda: views and names and routers)
        faults: list[Callable[[], Any]] = [
            lambda: lose_connection(observer.session),
            lambda: expire_session(observer.session, zookeeper_hosts),
        ]
        await coordinator.session.create("/assignments/r1")
        for number, fault in enumerate(faults):
            await fault()
            await coordinator.add_endpoint("t", publisher(), {})
            await coordinator.session.create(f"/assignments/r1/t{number}")
            await coordinator.register_router(router(f"r{number}"))
            count = number + 1
            await eventually(lambda count=count: len(views[-1].endpoints) == count)
            await eventually(lambda count=count: len(names[-1]) == count)
            await eventually(lambda count=count: len(routers[-1]) == count)
        assert names[0] == frozenset()


async def test_who_has_caught_up_has_read_what_was_written_before(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator(proxy.hosts)
        await coordinator.declare_topic("t")
        views: list[TopicView] = []
        observer.watch_topic("t", views.append)
        await observer.catch_up()
        assert len(views) == 1
        for count in range(1, 21):
            await coordinator.add_endpoint("t", publisher(), {})
            await observer.catch_up()
            assert len(views[-1].endpoints) == count
        proxy.refuse(True)
        proxy.cut()
        caught_up = asyncio.ensure_future(observer.catch_up())
        await coordinator.add_endpoint("t", publisher(), {})
        await eventually(lambda: observer.session.state is SessionState.SUSPENDED)
        assert not caught_up.done()
        proxy.refuse(False)
        await caught_up
        assert len(views[-1].endpoints) == 21


async def test_catching_up_does_not_wait_for_a_moment_in_which_nothing_changes(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        views: dict[str, TopicView] = {}
        for name in ("busy", "t"):
            await coordinator.declare_topic(name)
            observer.watch_topic(name, lambda view: views.update({view.record.name: view}))
        await eventually(lambda: views.keys() == {"busy", "t"})
        busy = observer._mirrors[-2]

        async def never_rest() -> None:
            while True:
                busy.refresh()
                await asyncio.sleep(0)

        restless = asyncio.ensure_future(never_rest())
        try:
            for count in range(1, 6):
                for name in ("busy", "t"):
                    await coordinator.add_endpoint(name, publisher(), {})
                await asyncio.wait_for(observer.catch_up(), 10)
                assert busy.is_behind
                assert [len(views[name].endpoints) for name in ("busy", "t")] == [count, count]
        finally:
            restless.cancel()


async def test_requests_and_watches_leave_next_to_nothing_to_the_garbage_collector(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        session = coordinator.session
        await coordinator.declare_topic("t")
        gc.collect()
        gc.disable()
        try:
            for number in range(50):
                path = await session.create(f"/node-{number}", b"x", ephemeral=True)
                await session.get(path)
                await session.set(path, b"y")
                await session.children("/")
                await session.exists(path)
                await session.delete(path)
                seen: list[object] = []
                watch = coordinator.watch_topic("t", seen.append)
                await eventually(lambda seen=seen: bool(seen))
                watch.cancel()
            del watch
            left = gc.collect()
        finally:
            gc.enable()
        assert left < 50


async def test_a_change_nobody_hinted_at_is_found_by_the_resync(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        observer = await fleet.coordinator(resync_s=0.2, host=Host(randomness=random.Random(1)))
        await coordinator.declare_topic("t")
        observer.session._fire = lambda *arguments: None  # type: ignore[method-assign]
        views: list[TopicView] = []
        routers: list[dict[str, RouterRecord]] = []
        observer.watch_topic("t", views.append)
        observer.watch_routers(routers.append)
        await eventually(lambda: views and routers)
        await coordinator.add_endpoint("t", publisher(), {})
        registration = await coordinator.register_router(router("r1"))
        await eventually(lambda: len(views[-1].endpoints) == 1 and "r1" in routers[-1])
        await registration.update(draining=True)
        await eventually(lambda: routers[-1]["r1"].draining)


async def test_many_changes_are_answered_by_few_reads(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        await coordinator.declare_topic("t")
        views: list[TopicView] = []
        observer.watch_topic("t", views.append)
        await eventually(lambda: views)
        reads = observer.statistics().mirror_reads
        for _ in range(200):
            await coordinator.add_endpoint("t", publisher(), {})
        await eventually(lambda: len(views[-1].endpoints) == 200)
        assert observer.statistics().mirror_reads - reads < 100
        assert observer.statistics().mirror_changes == len(views)


async def test_a_mirror_survives_records_and_callbacks_that_fail(
    zookeeper_hosts: str, chroot: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        await coordinator.declare_topic("t")
        views: list[TopicView] = []

        def fail_first(view: TopicView) -> None:
            views.append(view)
            if len(views) == 1:
                raise ValueError("a defect")

        routers: list[dict[str, RouterRecord]] = []
        coordinator.watch_topic("t", fail_first)
        coordinator.watch_routers(routers.append)
        await eventually(lambda: views and routers)
        assert "the callback of a TopicMirror failed" in caplog.text
        data, _ = await coordinator.session.get("/topics/t")
        await coordinator.session.set("/topics/t", b"garbage")
        await eventually(lambda: coordinator.statistics().mirror_failures == 1)
        await coordinator.session.create("/brokers/routing/odd", b"garbage")
        await coordinator.session.create("/brokers/routing/not.r2", router("r2").to_json())
        await coordinator.session.create("/topics/%0A", b"garbage")
        await coordinator.register_router(router("r1"))
        await eventually(lambda: routers[-1] == {"r1": router("r1")})
        await coordinator.session.set("/topics/t", data)
        await coordinator.add_endpoint("t", publisher(), {})
        await eventually(lambda: len(views) == 2)
        assert list(await coordinator.topics()) == ["t"]


async def test_a_cancelled_watch_leaves_nothing_at_the_server(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator = await fleet.coordinator()
        await coordinator.declare_topic("t")
        await coordinator.register_router(router("r1"))
        await eventually(lambda: coordinator.session.statistics().watches == 1, "the registration's own")
        held = await server_watches(zookeeper_hosts)
        calls: list[object] = []
        watches = [
            coordinator.watch_topic("t", calls.append),
            coordinator.watch_topic("t", calls.append),
            coordinator.watch_topic("missing", calls.append),
            coordinator.watch_routers(calls.append),
            coordinator.watch_edges(calls.append),
            coordinator.watch_assignments("r1", lambda topics, _: calls.append(topics)),
            coordinator.watch_leader(lambda leader, epoch: calls.append((leader, epoch))),
        ]
        await eventually(lambda: len(calls) == 6)
        watches.append(coordinator.watch_topic("t", calls.append))
        tasks = len(asyncio.all_tasks())
        for watch in watches:
            watch.cancel()
            watch.cancel()
        await watches_become(zookeeper_hosts, held)
        await coordinator.add_endpoint("t", publisher(), {})
        assert len(calls) == 6
        assert coordinator.statistics().mirrors == 1
        assert coordinator.session.statistics().watches == 1
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_many_faults_leak_nothing(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        helper = await fleet.coordinator()
        await helper.declare_topic("t")
        held = await server_watches(zookeeper_hosts)
        async with no_leaks():
            session = Session(zookeeper_hosts, chroot, session_timeout_s=2.0)
            await session.start()
            coordinator = Coordinator(session)
            await coordinator.start()
            await coordinator.register_router(router("r1"))
            endpoint = publisher()
            await coordinator.add_endpoint("t", endpoint, {})
            views: list[TopicView] = []
            for number in range(100):
                watch = coordinator.watch_topic("t", views.append)
                if number % 10 == 0:
                    await expire_session(session, zookeeper_hosts)
                else:
                    await lose_connection(session)
                await eventually(lambda: views and endpoint in views[-1].endpoints)
                watch.cancel()
                views.clear()
            assert coordinator.statistics().mirrors == 1
            await coordinator.close()
            await session.close()
        await watches_become(zookeeper_hosts, held)
