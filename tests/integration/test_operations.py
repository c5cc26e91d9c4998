"""What an operator asks a broker, and what the documents say of it."""

import re
from pathlib import Path

import aiohttp
import pytest

from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"


async def get(http, path):
    async with aiohttp.ClientSession() as session, session.get(f"http://{http}{path}") as response:
        return response.status, await response.text()


async def test_health_status_and_metrics_of_both_brokers(zookeeper_hosts, chroot):
    documented = set(re.findall(r"`(isthmus_[a-z_]+)", DOCUMENT.read_text()))
    exposed = set()
    async with overlay(zookeeper_hosts, chroot) as testbed:
        router = await testbed.router("r1")
        edge = await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        subscription = await (await testbed.client("eb")).subscribe("door")
        publisher = await (await testbed.client("ea")).publisher("door")
        await publisher.wait_for_subscribers(1, 10)
        await testbed.wait_for_route("door", "ea", "eb")
        await publisher.publish(b"open")
        await subscription.receive(10)
        for broker in (router, edge):
            assert await get(broker.http, "/healthz") == (200, "ok\n")
            assert await get(broker.http, "/readyz") == (200, "ready\n")
            status, text = await get(broker.http, "/status")
            assert status == 200
            assert f'"id": "{broker.id}"' in text
            status, text = await get(broker.http, "/metrics")
            assert status == 200
            exposed |= set(re.findall(r"^(isthmus_[a-z_]+)[ {]", text, re.MULTILINE))
        _, metrics = await get(edge.http, "/metrics")
        assert 'isthmus_topic_messages_total{topic="door"} 1.0' in metrics
        assert 'isthmus_link_up{peer="r1"} 1.0' in metrics
    with_labels_unseen = {
        "isthmus_access_denied_total",
        "isthmus_messages_dropped_total",
        "isthmus_connections_closed_total",
        "isthmus_topic_flagged",
    }
    assert exposed - with_labels_unseen == documented - with_labels_unseen


async def test_a_draining_router_is_not_ready(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        router = await testbed.router("r1")
        await router.drain()
        assert await get(router.http, "/readyz") == (503, "draining\n")


async def test_an_edge_without_a_router_says_for_which_topics(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        edge = await testbed.edge("ea", "a")
        await testbed.edge("eb", "b")
        await (await testbed.client("eb")).subscribe("door")
        await (await testbed.client("ea")).publisher("door")
        await eventually(lambda: bool(edge.missing()), "it sees that another LAN is interested")
        assert await get(edge.http, "/readyz") == (503, "no routing broker for door\n")
