"""The coordination benchmark in small: it converges, notices when it does not, and writes its JSON."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.coordination_worker import Worker
from benchmarks.workload import Workload
from coordinator import Coordinator, Session
from tests.integration.harness import eventually
from tests.isthmus.run import isthmus

pytestmark = pytest.mark.integration


async def test_a_small_run_converges_and_is_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "coordination.json"
    done = await isthmus(
        *("bench", "coordination", "--lans=6", "--routers=3", "--topics=20", "--subscribers=100,200"),
        *("--workers=2", f"--json={file}"),
        timeout_s=90.0,
    )
    assert done.status == 0, done.errors
    assert "| 200 |" in done.output
    result = json.loads(file.read_text())
    assert [point["subscribers"] for point in result["points"]] == [100, 200]
    for point in result["points"]:
        assert point["zk_latency_max_ms"] >= point["zk_latency_avg_ms"] >= 0
        # 3 routers twice (entry and candidate), 6 edges, 20 topics with their publishers, at the least.
        assert point["znodes"] > 6 + 6 + 2 * 20 + point["subscribers"]
        assert point["watches"] > 0
        assert point["converged_s"] >= point["join_s"] > 0
        assert point["links_up"] == 6 * 3
    assert result["machine"]["cores"] >= 1
    assert result["settings"]["lans"] == 6


@pytest.fixture
async def worker(zookeeper_hosts: str, chroot: str) -> AsyncIterator[Worker]:
    """All brokers of a tiny run, in this process, with publishers."""
    workload = Workload(lans=3, routers=2, topics=4)
    brokers = Worker(workload, workload.router_names, workload.edge_names)
    try:
        await brokers.start_routers(zookeeper_hosts, chroot)
        await brokers.start_edges(zookeeper_hosts, chroot)
        await brokers.declare(workload.publishers())
        yield brokers
    finally:
        await brokers.stop()


@pytest.fixture
async def coordinator(zookeeper_hosts: str, chroot: str) -> AsyncIterator[Coordinator]:
    """What the parent process reads ZooKeeper with."""
    session = Session(zookeeper_hosts, chroot)
    await session.start()
    reader = Coordinator(session)
    await reader.start()
    yield reader
    await reader.close()
    await session.close()


async def test_a_wrong_route_is_noticed(worker: Worker, coordinator: Coordinator) -> None:
    workload = Workload(lans=3, routers=2, topics=4)
    assignments: dict[str, Any] = {}

    async def assigned() -> bool:
        records = await coordinator.topics()
        assignments.update({name: [record.primary, record.backup] for name, record in records.items()})
        return len(records) == 4 and all(None not in pair for pair in assignments.values())

    await eventually(assigned, "all topics have a primary and a backup")
    worker.set_assignments(assignments)
    assert worker.check(8)["wrong"], "subscribers that have not joined cannot be routed to"

    answer = await worker.declare(workload.subscribers(0, 8))
    assert answer == {"declared": 8, "refused": []}
    await eventually(lambda: worker.check(8)["wrong"] == 0, "all routes are right")

    router = worker.routers[assignments["topic-0000"][0]]
    topic = next(topic for topic in router.core.topics.values() if topic.name == "topic-0000")
    router.core.set_topic(topic.topic_id, topic.name, topic.qos, {"edge-999": "lan-999"}, 0)
    found = worker.check(8)
    assert found["wrong"] == 1
    assert found["examples"][0].startswith(f"{router.id} routes topic-0000 to 1 edges")
