"""The committed docker-compose.yml runs as it is: health, isolation, a dead ZooKeeper server, the report."""

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest

from coordinator.member import CLIENT_PORT
from tests.compose.projects import ROOT, addresses_of, container_of, docker, everything_of, reached, wait_for
from topology.compose import HTTP_PORT, LISTEN_PORT, zookeeper_check
from topology.model import load_topology

pytestmark = pytest.mark.compose

PROJECT = f"isthmus-test-{os.getpid()}"
TOPOLOGY = load_topology("two-lans")
TOOLS = (("docker", "compose"), ("docker-compose",))


def compose(tool: tuple[str, ...], *words: str) -> None:
    done = subprocess.run(
        [*tool, "--project-name", PROJECT, *words],
        cwd=ROOT,
        env={**os.environ, "REPORT_EVERY_S": "10"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=TOOLS, ids=" ".join)
def project(request: pytest.FixtureRequest) -> Iterator[str]:
    """The file, up with one of the tools."""
    tool: tuple[str, ...] = request.param
    try:
        works = subprocess.run([*tool, "version"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip(f"{' '.join(tool)} is not installed")
    try:
        compose(tool, "up", "--detach", "--no-build")
        yield PROJECT
    finally:
        compose(tool, "down", "--volumes", "--timeout", "2")
        assert everything_of(PROJECT) == []


def test_runs_as_it_is(project: str) -> None:
    containers = {
        name: container_of(project, name)
        for name in (
            *("zookeeper-1", "zookeeper-2", "zookeeper-3"),
            *(router.name for router in TOPOLOGY.routers),
            *(edge for lan in TOPOLOGY.lans for edge in lan.edges),
            *(lan.client_host for lan in TOPOLOGY.lans),
            "report",
        )
    }
    # Every subscriber has heard every publisher of its topic.
    for lan in TOPOLOGY.lans:
        wait_for(partial(_is_warm, containers[lan.client_host]), 60, "warm clients")
    _clients_reach_their_own_lan_only(containers)
    _two_of_three_zookeepers_serve(containers)
    _the_report_is_written(containers["report"])


def _is_warm(clients: str) -> bool:
    return '"warm"' in docker("logs", clients)


def _clients_reach_their_own_lan_only(containers: dict[str, str]) -> None:
    def targets(name: str) -> set[str]:
        """By name and by every address, at every port it serves."""
        ports = (CLIENT_PORT,) if name.startswith("zookeeper") else (LISTEN_PORT, HTTP_PORT)
        hosts = (name, *addresses_of(containers[name]))
        return {f"{host}:{port}" for host in hosts for port in ports}

    brokers = [name for name in containers if name != "report" and not name.endswith("-clients")]
    for lan in TOPOLOGY.lans:
        clients = containers[lan.client_host]
        assert len(addresses_of(clients)) == 1
        assert all(len(addresses_of(containers[edge])) == 2 for edge in lan.edges)
        own = {f"{edge}:{LISTEN_PORT}" for edge in lan.edges}
        assert reached(clients, own) == own
        others = set().union(*(targets(name) for name in brokers if name not in lan.edges))
        assert len(others) > len(brokers)
        assert reached(clients, others) == set()
    # What clients do not reach is there: an edge reaches it.
    there = {f"router-1:{LISTEN_PORT}", f"router-1:{HTTP_PORT}", f"zookeeper-1:{CLIENT_PORT}"}
    assert reached(containers["plant-1"], there) == there


def _two_of_three_zookeepers_serve(containers: dict[str, str]) -> None:
    docker("kill", containers["zookeeper-1"])

    def serves(keeper: str) -> bool:
        check = (
            "exec",
            containers[keeper],
            "bash",
            "-c",
            f"{zookeeper_check(keeper, CLIENT_PORT)} && echo serves",
        )
        return docker(*check, check=False) == "serves"

    for keeper in ("zookeeper-2", "zookeeper-3"):
        wait_for(partial(serves, keeper), 30, f"{keeper} without zookeeper-1")


def _the_report_is_written(report: str) -> None:
    def written() -> dict[str, dict[str, object]]:
        text = docker("exec", report, "cat", "/report/report.json", check=False)
        return {item["topic"]: item for item in json.loads(text)["topics"]} if text else {}

    def is_complete() -> bool:
        topics = written()
        return set(TOPOLOGY.topics) <= set(topics) and all(item["deliveries"] for item in topics.values())

    wait_for(is_complete, 240, "a report with messages of every topic")
    assert "<html" in docker("exec", report, "head", "-c", "2000", "/report/report.html")
