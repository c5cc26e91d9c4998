"""What an operator gets over HTTP from a real server."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from overlay.errors import CloseReason
from overlay.messages import Role
from overlay.outbox import OutboxStatistics
from runtime.hub import Hub, Identity
from runtime.link import LinkStatistics
from runtime.operations import OperationsServer, counter, counters, gauge, gauges, hub_metrics, to_json
from tests.runtime.nodes import Node


class Colour(StrEnum):
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Statistics:
    messages: int
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass
class Broker:
    """What a broker would answer; tests change it."""

    missing: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    messages: int = 0
    fails: bool = False

    def get_status(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("no status today")
        return self.status

    def metrics(self) -> list[Any]:
        return [
            counter("isthmus_messages", "Messages.", self.messages),
            counters("isthmus_dropped", "Dropped.", "reason", {"late": 2, Colour.BLUE: 1}),
            gauge("isthmus_clients", "Clients.", 3),
            gauges("isthmus_link_up", "Links.", "peer", {"r1": True, 'odd "name"': False}),
        ]


class Operator:
    """Asks the server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def get(self, path: str, method: str = "GET") -> tuple[int, str, str]:
        async with self._session.request(method, self._url + path) as response:
            return response.status, await response.text(), response.headers.get("Content-Type", "")


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
async def operator(broker: Broker) -> AsyncIterator[Operator]:
    server = OperationsServer(broker.get_status, lambda: broker.missing, broker.metrics)
    locator = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        yield Operator(f"http://{locator}", session)
    await server.close()


async def test_a_running_broker_is_healthy(operator: Operator) -> None:
    assert (await operator.get("/healthz"))[:2] == (200, "ok\n")


async def test_a_broker_is_ready_or_says_what_is_missing(operator: Operator, broker: Broker) -> None:
    assert (await operator.get("/readyz"))[:2] == (200, "ready\n")
    broker.missing = "no answer from ZooKeeper"
    assert (await operator.get("/readyz"))[:2] == (503, "no answer from ZooKeeper\n")
    assert (await operator.get("/healthz"))[0] == 200


async def test_status_is_json_of_statistics(operator: Operator, broker: Broker) -> None:
    broker.status = {
        "id": "edge-a",
        "core": Statistics(3, {"late": 1}),
        "links": [Statistics(1)],
        "names": frozenset({"b", "a"}),
        "colour": Colour.BLUE,
    }
    code, text, content_type = await operator.get("/status")
    assert code == 200
    assert content_type.startswith("application/json")
    assert json.loads(text) == {
        "id": "edge-a",
        "core": {"messages": 3, "dropped": {"late": 1}},
        "links": [{"messages": 1, "dropped": {}}],
        "names": ["a", "b"],
        "colour": "blue",
    }


async def test_metrics_are_read_when_asked_for(operator: Operator, broker: Broker) -> None:
    for messages in (5, 9):
        broker.messages = messages
        code, text, content_type = await operator.get("/metrics")
        assert code == 200
        assert content_type.startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert [sample.value for sample in families["isthmus_messages"].samples] == [messages]
    assert families["isthmus_messages"].type == "counter"
    assert families["isthmus_clients"].type == "gauge"
    assert {sample.labels["reason"]: sample.value for sample in families["isthmus_dropped"].samples} == {
        "late": 2,
        "blue": 1,
    }
    assert {sample.labels["peer"]: sample.value for sample in families["isthmus_link_up"].samples} == {
        "r1": 1,
        'odd "name"': 0,
    }


async def test_unknown_paths_and_methods_are_refused(operator: Operator) -> None:
    assert (await operator.get("/secrets"))[0] == 404
    assert (await operator.get("/status", "POST"))[0] == 405


async def test_a_status_that_fails_is_an_error_of_that_request_only(
    operator: Operator, broker: Broker
) -> None:
    broker.fails = True
    assert (await operator.get("/status"))[0] == 500
    broker.fails = False
    assert (await operator.get("/status"))[0] == 200


async def test_a_server_that_never_started_can_be_closed(broker: Broker) -> None:
    await OperationsServer(broker.get_status, str, broker.metrics).close()


async def test_a_port_in_use_is_an_error_of_starting(operator: Operator, broker: Broker) -> None:
    port = int(operator._url.rpartition(":")[2])
    second = OperationsServer(broker.get_status, str, broker.metrics)
    with pytest.raises(OSError, match="address already in use"):
        await second.start("127.0.0.1", port)
    await second.close()
    assert (await operator.get("/healthz"))[0] == 200


async def test_metrics_of_a_hub_name_its_links_and_the_reasons_connections_ended() -> None:
    hub = Hub(Identity(Role.EDGE, "a", 1), Node("unused"))
    hub.closes[CloseReason.SILENT] = 2
    outbox = OutboxStatistics(
        messages_sent=4,
        frames_sent=3,
        bytes_sent=500,
        frames_resent=0,
        messages_dropped=0,
        waiting_messages=0,
        waiting_bytes=70,
        unacknowledged_bytes=0,
    )
    link = LinkStatistics("r1", "router", "", True, 1, 2.5, 0, 0, 0, outbox)
    values = {
        (family.name, *sample.labels.values()): sample.value
        for family in hub_metrics(hub, [link])
        for sample in family.samples
    }
    assert values == {
        ("isthmus_connections",): 0,
        ("isthmus_connections_closed", "silent"): 2,
        ("isthmus_datagrams_rejected",): 0,
        ("isthmus_link_up", "r1"): 1,
        ("isthmus_link_round_trip_seconds", "r1"): 0.0025,
        ("isthmus_link_waiting_bytes", "r1"): 70,
        ("isthmus_link_sent_bytes", "r1"): 500,
        ("isthmus_link_sent_messages", "r1"): 4,
    }


def test_json_of_anything_else_is_its_text() -> None:
    assert json.loads(to_json({"error": ValueError("x"), "kind": Colour.BLUE})) == {
        "error": "x",
        "kind": "blue",
    }
