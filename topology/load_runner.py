"""Drives the load of a testbed: one process per LAN (`topology.load`), its phases, its results."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from overlay.limits import SECOND_NS
from topology.checker import Stream
from topology.driver import Driver, Load
from topology.errors import LoadError
from topology.load import unpack

DECLARE_TIMEOUT_S: Final = 40.0
WARM_TIMEOUT_S: Final = 20.0
COMMAND_TIMEOUT_S: Final = 10.0
DRAIN_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class LoadResults:
    """Everything sent and received."""

    sent: dict[int, int]
    """Messages by publisher's number."""
    published: dict[str, int]
    """By topic, with those that warmed up."""
    topic_ids: dict[str, int]
    streams: tuple[Stream, ...]
    drained: bool
    """Every subscriber got the last message of every publisher before the deadline."""
    reconnects: int
    duplicates_dropped: int
    """Duplicates that reached a client; it drops them, applications do not see them."""


class LoadRunner:
    """The publishers and subscribers of a running testbed."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._topology = driver.topology
        self._loads: dict[str, Load] = {}
        self._sent: dict[int, int] = {}
        self._topic_ids: dict[str, int] = {}
        self._published: Counter[str] = Counter()

    async def start(self) -> None:
        """Start all applications; returns when publishers and subscribers know of each other."""
        lans = [
            lan.name
            for lan in self._topology.lans
            if any(item.lan == lan.name for item in self._topology.publishers)
            or any(item.lan == lan.name for item in self._topology.subscribers)
        ]
        loads = await asyncio.gather(*(self._driver.start_load(lan) for lan in lans))
        self._loads = dict(zip(lans, loads, strict=True))
        await self._all("declared", DECLARE_TIMEOUT_S)

    async def wait_warm(self) -> None:
        """Wait until every subscriber has heard every publisher of its topic."""
        await self._all("warm", WARM_TIMEOUT_S)

    async def measure(self) -> None:
        """Messages count from now on."""
        await self._command("measure")

    async def received(self) -> dict[tuple[int, int], int]:
        """How many messages each subscriber has of each publisher (its number first)."""
        answers = await self._command("received")
        return {
            (subscriber, publisher): count
            for answer in answers
            for subscriber, publisher, count in answer["counts"]
        }

    async def stop(self) -> None:
        """Publish no more."""
        for answer in await self._command("stop"):
            self._sent.update((int(stream), count) for stream, count in answer["sent"].items())
            self._topic_ids.update(answer["topic_ids"])
            self._published.update(answer["published"])

    async def results(self) -> LoadResults:
        """Wait for the last messages and collect what everybody recorded."""
        if self._sent.keys() != set(range(len(self._topology.publishers))):
            raise LoadError("some publishers have not said how many messages they sent")
        sent = {str(stream): count for stream, count in self._sent.items()}
        answers = await self._command("drain", DRAIN_TIMEOUT_S, sent=sent, timeout_s=DRAIN_TIMEOUT_S)
        contents = await asyncio.gather(*(self._driver.load_results(lan) for lan in self._loads))
        found = [subscriber for content in contents for subscriber in content["subscribers"]]
        if {item["subscriber"] for item in found} != set(range(len(self._topology.subscribers))):
            raise LoadError("some subscribers have left no results")
        logs = {
            int(number): unpack(text)
            for content in contents
            for number, text in content["publishers"].items()
        }
        if {number: len(log) for number, log in logs.items()} != self._sent:
            raise LoadError("what publishers logged is not what they said they sent")
        return LoadResults(
            sent=dict(self._sent),
            published=dict(self._published),
            topic_ids=dict(self._topic_ids),
            streams=tuple(stream for item in found for stream in self._streams(item, logs)),
            drained=all(answer["complete"] for answer in answers),
            reconnects=sum(content["reconnects"] for content in contents),
            duplicates_dropped=sum(item["duplicates_dropped"] for item in found),
        )

    def _streams(self, item: dict[str, Any], logs: Mapping[int, Sequence[int]]) -> list[Stream]:
        topology = self._topology
        subscriber = topology.subscribers[item["subscriber"]]
        streams = []
        for name, record in item["streams"].items():
            publisher = topology.publishers[int(name)]
            streams.append(
                Stream(
                    publisher=int(name),
                    subscriber=item["subscriber"],
                    topic=subscriber.topic,
                    crosses_wan=publisher.lan != subscriber.lan,
                    accepted_ns=logs[int(name)],
                    period_ns=round(SECOND_NS / publisher.rate_per_s),
                    sequences=unpack(record["sequences"]),
                    sent_ns=unpack(record["sent_ns"]),
                    received_ns=unpack(record["received_ns"]),
                    age_bound_ns=unpack(record["age_bound_ns"], "q"),
                )
            )
        return streams

    async def _all(self, event: str, timeout_s: float) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(load.wait_for(event, timeout_s) for load in self._loads.values())))

    async def _command(self, name: str, extra_s: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
        return list(
            await asyncio.gather(
                *(load.ask(name, COMMAND_TIMEOUT_S + extra_s, **fields) for load in self._loads.values())
            )
        )
