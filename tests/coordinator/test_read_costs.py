"""What coordination costs the server: reads per change, and reads when nothing changes."""

import pytest

from coordinator import EdgeRecord, Endpoint, EndpointKind, Session, TopicView
from coordinator.limits import RESYNC_READS
from tests.coordinator.faults import Fleet, eventually

pytestmark = pytest.mark.integration


def count_reads(session: Session, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count what `session` asks for from now on, by operation."""
    counts = {"get": 0, "children": 0}
    submit = session._at_client

    def counting(operation: str, *arguments: object) -> None:
        if operation in counts:
            counts[operation] += 1
        submit(operation, *arguments)

    monkeypatch.setattr(session, "_at_client", counting)
    return counts


async def test_a_new_endpoint_does_not_make_watchers_read_the_record(
    zookeeper_hosts: str, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        await coordinator.declare_topic("t")
        views: list[TopicView] = []
        observer.watch_topic("t", views.append)
        await eventually(lambda: views)
        counts = count_reads(observer.session, monkeypatch)
        for number in range(1, 6):
            await coordinator.add_endpoint("t", Endpoint(EndpointKind.SUBSCRIBER, "a", "ea", number), {})
            await eventually(lambda number=number: len(views[-1].endpoints) == number)
        assert counts == {"get": 0, "children": 5}


async def test_names_of_edges_cost_one_watch(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        coordinator, observer = await fleet.coordinator(), await fleet.coordinator()
        names: list[frozenset[str]] = []
        observer.watch_edge_names(names.append)
        for number in range(5):
            await coordinator.register_edge(EdgeRecord(f"e{number}", f"h:{number + 1}", f"lan{number}", "h"))
        await eventually(lambda: names and len(names[-1]) == 5)
        assert observer.session.watch_count == 1


async def test_who_watches_much_resyncs_less_often(zookeeper_hosts: str, chroot: str) -> None:
    topics = 2 * RESYNC_READS
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        few, many = await fleet.coordinator(resync_s=0.1), await fleet.coordinator(resync_s=0.1)
        views: list[TopicView] = []
        for number in range(topics):
            await few.declare_topic(f"t{number}")
            many.watch_topic(f"t{number}", views.append)
        few.watch_topic("t0", lambda _: None)
        await eventually(lambda: len(views) == topics)
        # Two watches a topic: four times what may be read in a period, so a quarter as often.
        before_few, before_many = few.statistics().mirror_reads, many.statistics().mirror_reads
        await eventually(lambda: few.statistics().mirror_reads >= before_few + 20)
        assert many.statistics().mirror_reads - before_many < 20 * topics / 2
