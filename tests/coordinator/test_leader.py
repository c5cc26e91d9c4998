"""The leader's work against a real server: every topic served, through joins, deaths and drains."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator import (
    Candidacy,
    Coordinator,
    FewestTopics,
    Placement,
    Registration,
    RouterRecord,
    TopicRecord,
    check_placements,
)
from tests.coordinator.faults import Fleet, eventually, expire_session, lose_connection

pytestmark = pytest.mark.integration


class Router:
    """A routing broker as far as the control plane is concerned."""

    def __init__(self, coordinator: Coordinator, record: RouterRecord) -> None:
        self.coordinator = coordinator
        self.record = record
        self.topics: frozenset[str] = frozenset()
        self.version = 0
        self.confirms = True

    async def join(self) -> "Router":
        self.registration: Registration[RouterRecord] = await self.coordinator.register_router(self.record)
        self.coordinator.watch_assignments(self.record.id, self._assigned)
        self.candidacy: Candidacy = self.coordinator.join_election(self.record.id, FewestTopics())
        return self

    def _assigned(self, topics: frozenset[str], version: int) -> None:
        self.topics = topics
        self.version = version
        if self.confirms and version:
            self.coordinator.session.spawn(self.confirm())

    async def confirm(self) -> None:
        await self.coordinator.confirm_assignments(self.record.id, self.version)

    async def die(self) -> None:
        """End the session without a farewell from the parts above it."""
        await self.coordinator.session.close()


async def start_router(fleet: Fleet, name: str, host: str | None = None, hosts: str | None = None) -> Router:
    record = RouterRecord(name, f"{host or name}:1", host or name)
    return await Router(await fleet.coordinator(hosts), record).join()


class Observer:
    """Reads the tree and judges it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.routers: dict[str, RouterRecord] = {}
        coordinator.watch_routers(self._note)

    def _note(self, routers: dict[str, RouterRecord]) -> None:
        self.routers = routers

    async def settled(
        self, condition: Callable[[dict[str, TopicRecord]], Any] = lambda _: True, deadline_s: float = 15.0
    ) -> dict[str, TopicRecord]:
        """Wait until all topics are placed without fault, the folders agree, and `condition` holds."""
        end_s = time.monotonic() + deadline_s
        while True:
            records = await self.coordinator.topics()
            placements = placed(records)
            wrong = list(check_placements(placements, self.routers)) or await self._folders_wrong(placements)
            if not wrong and condition(records):
                return records
            assert time.monotonic() < end_s, wrong or "the condition does not hold"

    async def _folders_wrong(self, placements: dict[str, Placement]) -> list[str]:
        wanted: dict[str, set[str]] = {}
        for topic, placement in placements.items():
            for name in (placement.primary, placement.backup):
                if name is not None:
                    wanted.setdefault(name, set()).add(topic)
        session = self.coordinator.session
        wrong = []
        for name in await session.children("/assignments"):
            if name == "no.router":
                continue
            listed = set(await session.children(f"/assignments/{name}"))
            if listed != wanted.pop(name, set()):
                wrong.append(f"folder {name} has {sorted(listed)[:5]}")
        return wrong + [f"folder {name} is missing" for name in wanted]


def placed(records: dict[str, TopicRecord]) -> dict[str, Placement]:
    return {name: Placement(record.primary, record.backup) for name, record in records.items()}


def primaries(records: dict[str, TopicRecord]) -> Counter[str | None]:
    return Counter(record.primary for record in records.values())


async def start(fleet: Fleet, *names: str) -> tuple[Observer, list[Router]]:
    observer = Observer(await fleet.coordinator())
    routers = [await start_router(fleet, name) for name in names]
    await eventually(lambda: len(observer.routers) == len(names))
    await eventually(lambda: any(router.candidacy.is_leader for router in routers))
    return observer, routers


def leader_of(routers: list[Router]) -> Router:
    (leader,) = [router for router in routers if router.candidacy.is_leader]
    return leader


async def declare(observer: Observer, count: int) -> None:
    await asyncio.gather(*(observer.coordinator.declare_topic(f"t{number}") for number in range(count)))


async def test_topics_are_assigned_evenly_and_routers_learn_of_it(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2", "r3")
        await declare(observer, 30)
        records = await observer.settled()
        assert primaries(records) == {"r1": 10, "r2": 10, "r3": 10}
        assert {record.epoch for record in records.values()} == {1}
        for router in routers:
            served = {
                topic
                for topic, record in records.items()
                if router.record.id in {record.primary, record.backup}
            }
            await eventually(lambda router=router, served=served: router.topics == served)
        await observer.coordinator.delete_topic("t0")
        await eventually(lambda: all("t0" not in router.topics for router in routers))
        await observer.settled()


async def test_a_topic_deleted_and_declared_again_at_once_is_assigned(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, _ = await start(fleet, "r1", "r2")
        await declare(observer, 3)
        before = await observer.settled()
        session = observer.coordinator.session
        again = replace(before["t1"], id=99, primary=None, backup=None, epoch=0)
        # Both on their way at once, so that the leader sees the same names before and after.
        await asyncio.gather(session.delete("/topics/t1"), session.create("/topics/t1", again.to_json()))
        after = await observer.settled(lambda records: len(records) == 3, deadline_s=3.0)
        assert after["t1"].id == 99


async def test_a_thousand_topics_are_assigned_within_seconds(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=8.0) as fleet:
        observer, routers = await start(fleet, "r1", "r2")
        await declare(observer, 1000)
        await eventually(lambda: all(len(router.topics) == 1000 for router in routers))
        records = await observer.settled()
        assert primaries(records) == {"r1": 500, "r2": 500}
        # What makes it quick on any machine: few transactions, and every record read once.
        statistics = leader_of(routers).coordinator.statistics()
        assert statistics.assignments_changed < 1100
        assert statistics.assignment_transactions < 150
        assert statistics.session.requests < 2500


async def test_one_router_alone_serves_without_backup_until_another_comes(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, _ = await start(fleet, "r1")
        await declare(observer, 10)
        records = await observer.settled()
        assert set(placed(records).values()) == {Placement("r1", None)}
        await start_router(fleet, "r2")
        await eventually(lambda: len(observer.routers) == 2)
        await observer.settled(lambda records: primaries(records) == {"r1": 5, "r2": 5})


async def test_the_death_of_a_router_moves_its_topics_and_no_others(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2", "r3")
        await declare(observer, 30)
        before = await observer.settled()
        victim = next(router for router in routers if not router.candidacy.is_leader)
        await victim.die()
        await eventually(lambda: len(observer.routers) == 2)
        after = await observer.settled()
        for topic, record in before.items():
            if record.primary == victim.record.id:
                assert after[topic].primary == record.backup
            else:
                assert after[topic].primary == record.primary


async def test_a_new_topic_does_not_wait_for_those_that_are_still_served(
    zookeeper_hosts: str, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.leader.CHANGES_PER_WAVE", 4)
    monkeypatch.setattr("coordinator.leader.REST_PER_WORK", 200.0)  # a second and more between two waves
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2", "r3")
        await declare(observer, 60)
        await observer.settled()
        victim = next(router for router in routers if not router.candidacy.is_leader)
        await victim.coordinator.session.close()

        def waiting(records: dict[str, TopicRecord]) -> int:
            return sum(victim.record.id in {record.primary, record.backup} for record in records.values())

        records = await observer.coordinator.topics()
        while waiting(records) > 36:  # forty to begin with: the first waves are written
            records = await observer.coordinator.topics()
        await observer.coordinator.declare_topic("new")
        while (records := await observer.coordinator.topics())["new"].primary is None:
            pass
        assert waiting(records) > 10, "it was assigned only after all others"
        monkeypatch.setattr("coordinator.leader.REST_PER_WORK", 0.0)
        await observer.coordinator.declare_topic("newer")  # wakes the leader from its rest
        await observer.settled()


async def test_the_death_of_the_leader_changes_nothing_for_the_others(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2", "r3", "r4")
        await declare(observer, 40)
        before = await observer.settled()
        leader = leader_of(routers)
        routers.remove(leader)
        await leader.die()
        await eventually(lambda: any(router.candidacy.is_leader for router in routers))
        await eventually(lambda: len(observer.routers) == 3)
        after = await observer.settled()
        gone = leader.record.id
        for topic, record in before.items():
            if gone not in {record.primary, record.backup}:
                assert after[topic].primary == record.primary
            elif record.primary == gone:
                assert after[topic].primary == record.backup
                assert after[topic].epoch == 2


async def test_a_graceful_change_of_leader_writes_nothing(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2", "r3")
        await declare(observer, 30)
        before = await observer.settled()
        leader = leader_of(routers)
        routers.remove(leader)
        await leader.candidacy.close()
        await eventually(lambda: any(router.candidacy.is_leader for router in routers))
        successor = leader_of(routers)
        rounds = successor.coordinator.statistics().leader_rounds
        await eventually(lambda: successor.coordinator.statistics().leader_rounds >= rounds + 3)
        assert await observer.settled() == before
        assert successor.coordinator.statistics().assignments_changed == 0


async def test_a_joining_router_gets_its_share_without_a_gap(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, _ = await start(fleet, "r1", "r2")
        await declare(observer, 30)
        before = await observer.settled()
        history: dict[str, list[Placement]] = {topic: [] for topic in before}
        for topic in before:
            observer.coordinator.watch_topic(
                topic,
                lambda view, topic=topic: history[topic].append(
                    Placement(view.record.primary, view.record.backup)
                ),
            )
        await eventually(lambda: all(history.values()))
        await start_router(fleet, "r3")
        await eventually(lambda: len(observer.routers) == 3)
        await observer.settled(lambda records: primaries(records) == {"r1": 10, "r2": 10, "r3": 10})
        for steps in history.values():
            for old, new in itertools.pairwise(steps):
                # Whoever becomes primary was the backup before.
                assert new.primary in {old.primary, old.backup}


async def test_a_router_becomes_primary_only_of_what_it_has_confirmed(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, (first,) = await start(fleet, "r1")
        await declare(observer, 10)
        await observer.settled()
        slow = Router(await fleet.coordinator(), RouterRecord("r2", "r2:1", "r2"))
        slow.confirms = False
        await slow.join()
        await eventually(lambda: len(slow.topics) == 10)
        rounds = first.coordinator.statistics().leader_rounds
        await eventually(lambda: first.coordinator.statistics().leader_rounds >= rounds + 4)
        assert primaries(await observer.settled()) == {"r1": 10}
        # What it is given later need not be confirmed for what it knows to be moved.
        version = slow.version
        await observer.coordinator.declare_topic("later")
        await eventually(lambda: "later" in slow.topics)
        await slow.coordinator.confirm_assignments("r2", version)
        await observer.settled(lambda records: primaries(records)["r2"] >= 5)


async def test_a_draining_router_hands_everything_over(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2", "r3")
        await declare(observer, 30)
        before = await observer.settled()
        await routers[0].registration.update(draining=True)
        await eventually(lambda: observer.routers["r1"].draining)
        after = await observer.settled()
        assert "r1" not in primaries(after)
        await eventually(lambda: routers[0].topics == frozenset())
        for topic, record in before.items():
            if record.primary == "r1":
                assert after[topic].primary == record.backup


async def test_a_leader_goes_on_after_lost_connections_and_sessions(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2")
        for number in range(10):
            leader = leader_of(routers)
            declaring = asyncio.ensure_future(declare(observer, 10 * (number + 1)))
            if number % 3 == 0:
                await expire_session(leader.coordinator.session, zookeeper_hosts)
            else:
                await lose_connection(leader.coordinator.session)
            await declaring
            await eventually(lambda: any(router.candidacy.is_leader for router in routers))
        await eventually(lambda: len(observer.routers) == 2)
        records = await observer.settled(lambda records: len(records) == 100)
        assert len({record.id for record in records.values()}) == 100


async def test_a_frozen_leader_writes_nothing_when_it_wakes(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=1.5) as fleet:
        observer = Observer(await fleet.coordinator())
        proxy = await fleet.proxy()
        old = await start_router(fleet, "r1", hosts=proxy.hosts)
        await eventually(lambda: old.candidacy.is_leader)
        new = await start_router(fleet, "r2")
        await eventually(lambda: len(observer.routers) == 2)
        await declare(observer, 20)
        await observer.settled()
        proxy.stall()
        await eventually(lambda: new.candidacy.is_leader)
        written = old.coordinator.statistics().assignments_changed
        await eventually(lambda: list(observer.routers) == ["r2"])
        await observer.settled(lambda records: primaries(records) == {"r2": 20})
        proxy.resume()
        await eventually(lambda: len(observer.routers) == 2, "the old one is back as a router")
        records = await observer.settled(lambda records: primaries(records) == {"r1": 10, "r2": 10})
        assert old.coordinator.statistics().assignments_changed == written
        assert {record.epoch for record in records.values()} == {2}


async def test_what_others_broke_in_the_tree_is_mended(
    zookeeper_hosts: str, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.leader.REVIEW_S", 0.5)
    monkeypatch.setattr("coordinator.leader.FOLDER_KEPT_S", 0.0)
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2")
        await declare(observer, 10)
        records = await observer.settled()
        session = observer.coordinator.session
        await session.delete("/assignments/r1/t0")
        await session.create("/assignments/r2/nothing")
        await session.create("/assignments/long-gone/t1", makepath=True)
        await session.set("/topics/t2", replace(records["t2"], primary="x9", backup="x8").to_json())
        await session.create("/topics/odd", b"garbage")
        await session.create("/topics/%0A", b"no topic has this znode name")
        await session.create("/assignments/no.router/t1", makepath=True)
        await observer.coordinator.declare_topic("after")
        await observer.settled(lambda records: len(records) == 11)
        leader = leader_of(routers)
        assert leader.coordinator.statistics().leader_reloads >= 1
        while "long-gone" in await session.children("/assignments"):
            await leader.coordinator.session.wait_connected()


async def test_a_topic_changed_behind_the_leaders_back_is_moved_with_the_change(
    zookeeper_hosts: str, chroot: str
) -> None:
    """A leader that has old records in memory overwrites nothing, and needs not read all of them again."""
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer, routers = await start(fleet, "r1", "r2", "r3")
        await declare(observer, 30)
        before = await observer.settled()
        leader = leader_of(routers)
        victim = next(router for router in routers if router is not leader)
        reloads = leader.coordinator.statistics().leader_reloads
        moved = sorted(name for name, record in before.items() if record.primary == victim.record.id)[:5]
        for name in moved:
            await observer.coordinator.change_qos(name, lambda qos, _: replace(qos, retention=7))
        await victim.die()
        await eventually(lambda: len(observer.routers) == 2)
        after = await observer.settled()
        assert {name for name, record in after.items() if record.qos.retention == 7} == set(moved)
        assert all(after[name].primary != victim.record.id for name in moved)
        assert leader.coordinator.statistics().leader_reloads == reloads


async def test_several_missing_routers_are_given_time_after_an_election(
    zookeeper_hosts: str, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.leader.ABSENCE_GRACE_S", 6.0)  # the rule is tested, not the machine
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        observer = Observer(await fleet.coordinator())
        proxy = await fleet.proxy()
        routers = [await start_router(fleet, name, hosts=proxy.hosts) for name in ("r1", "r2", "r3")]
        await declare(observer, 30)
        await eventually(lambda: len(observer.routers) == 3)
        before = await observer.settled()
        # All are cut off from ZooKeeper together, for so long that the server gives up on all of them.
        proxy.stall()
        await eventually(lambda: not observer.routers)
        proxy.resume()
        proxy.cut()
        await eventually(lambda: any(router.candidacy.is_leader for router in routers))
        await eventually(lambda: len(observer.routers) == 3)
        leader = leader_of(routers)
        rounds = leader.coordinator.statistics().leader_rounds
        await eventually(lambda: leader.coordinator.statistics().leader_rounds >= rounds + 3)
        after = await observer.settled()
        moved = sum(after[topic].primary != record.primary for topic, record in before.items())
        assert moved == 0, "a router was taken for dead"
