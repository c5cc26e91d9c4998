"""The publishers and subscribers of FRAME's experiment: one process each, driven by JSON lines.

    python -m benchmarks.frame_load publish|subscribe TOPICS EDGE

A message's payload begins with the time it was sent on the machine's monotonic clock, which all
processes share, so latencies are the truth. Commands (`topology.lines`):

    declare   connect, declare every endpoint; news: progress, declared
    start     publish (publisher); say `warm` once every topic has been heard (subscriber)
    measure   what is sent between two times counts
    stop      publish no more; gives the last sequences of the measured time
    results   write what was recorded to a file
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from heapq import heapify, heapreplace
from pathlib import Path
from struct import Struct
from typing import Any, Final

from benchmarks.frame_client import LoadClient
from benchmarks.frame_record import Record
from benchmarks.frame_workload import CATEGORIES, PAYLOAD_BYTES, Proxy, categories_of, proxies, topic_name
from overlay.batch import BATCH_HEADER_BYTES, MESSAGE_HEADER_BYTES, Run, encode_batch
from overlay.limits import ENDPOINTS_MAX_PER_CLIENT, MILLISECOND_NS, SECOND_NS
from overlay.locator import Locator
from overlay.messages import EndpointKind
from runtime.process import wait_until
from topology.lines import read_commands, say

DECLARATIONS_IN_FLIGHT: Final = 400
PROGRESS_S: Final = 1.0
PUBLISHER_TICK_NS: Final = 100 * MILLISECOND_NS
SUBSCRIBER_TICK_NS: Final = 10 * MILLISECOND_NS
_PREFIX: Final = Struct("<IQ")
_SUFFIX: Final = Struct("<QQIQ8x")
"""Of a message: sequence, born, length; of its payload: when it was sent."""
_RECEIVED: Final = Struct("<I8xQ12xQ8x")
"""Topic, sequence and time of sending of a message."""

assert _PREFIX.size + _SUFFIX.size == _RECEIVED.size == MESSAGE_HEADER_BYTES + PAYLOAD_BYTES


async def declare_all(
    declarations: Iterable[Callable[[], Awaitable[None]]], total: int, in_flight: int = DECLARATIONS_IN_FLIGHT
) -> None:
    """Declare everything, so many at a time, and tell how far it is."""
    waiting = iter(declarations)
    done = 0
    told_s = time.monotonic()

    async def work() -> None:
        nonlocal done, told_s
        for declaration in waiting:
            await declaration()
            done += 1
            if time.monotonic() - told_s > PROGRESS_S:
                told_s = time.monotonic()
                say("progress", done=done, total=total)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(work())


class PublishingProxy:
    """One publishing client of the workload."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.client = LoadClient(PUBLISHER_TICK_NS)
        self.sequence = 0
        self.last_measured = 0
        self.topic_ids: dict[int, int] = {}
        """Topic ids by topic number."""
        self._prefixes: dict[int, bytes] = {}
        self._parts: list[bytes] = []

    async def declare(self, number: int) -> None:
        """Declare the publisher of one topic."""
        category = self.proxy.category
        endpoint, topic_id = await self.client.declare(
            EndpointKind.PUBLISHER, topic_name(number, category.number), category.qos()
        )
        self.topic_ids[number] = topic_id
        self._prefixes[number] = _PREFIX.pack(topic_id, endpoint)

    def prepare(self) -> None:
        """Everything is declared."""
        self._parts = [*(self._prefixes[number] for number in self.proxy.topics), b""]

    def publish(self, now_ns: int) -> None:
        """Send one message of every topic, in one frame."""
        self.sequence += 1
        # All messages of a batch differ in topic and publisher only.
        data = _SUFFIX.pack(self.sequence, now_ns, PAYLOAD_BYTES, now_ns).join(self._parts)
        run = Run(len(self.proxy.topics), data)
        self.client.send(encode_batch(0, self.client.incarnation, 0, (run,)))


class Publishers:
    """All publishing clients."""

    def __init__(self, topics: int, edge: Locator) -> None:
        self._topics = topics
        self._edge = edge
        self._proxies = [PublishingProxy(proxy) for proxy in proxies(topics)]
        self._loop = asyncio.get_running_loop()
        self._start_ns = self._end_ns = 2**63
        self._due: list[tuple[int, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._offered = [0] * len(CATEGORIES)
        self._slipped = 0
        self._latest_ns = 0

    async def declare(self) -> None:
        """Connect and declare everything."""
        for proxy in self._proxies:
            await proxy.client.open(self._edge)
        await declare_all(
            (partial(proxy.declare, number) for proxy in self._proxies for number in proxy.proxy.topics),
            self._topics,
        )
        for proxy in self._proxies:
            proxy.prepare()

    def start(self) -> None:
        """Begin to publish."""
        now_ns = time.monotonic_ns()
        self._due = [(now_ns + proxy.proxy.phase_ns, index) for index, proxy in enumerate(self._proxies)]
        heapify(self._due)
        self._publish_due()

    def measure(self, start_ns: int, end_ns: int) -> None:
        """Count what is sent from `start_ns` until before `end_ns`."""
        self._start_ns = start_ns
        self._end_ns = end_ns

    def stop(self) -> dict[str, Any]:
        """Publish no more."""
        if self._timer is not None:
            self._timer.cancel()
        return {
            "offered": self._offered,
            "last": {
                str(topic_id): proxy.last_measured
                for proxy in self._proxies
                for topic_id in proxy.topic_ids.values()
            },
            "slipped_periods": self._slipped,
            "latest_send_ms": self._latest_ns / 1e6,
            "backlog_most_bytes": max(proxy.client.backlog_most_bytes for proxy in self._proxies),
        }

    def check(self) -> None:
        """Raise if a connection has failed."""
        for proxy in self._proxies:
            if proxy.client.failed.done():
                proxy.client.failed.result()

    def close(self) -> None:
        """Leave."""
        for proxy in self._proxies:
            proxy.client.close()

    def _publish_due(self) -> None:
        now_ns = time.monotonic_ns()
        due = self._due
        while due[0][0] <= now_ns:
            due_ns, index = due[0]
            proxy = self._proxies[index]
            category = proxy.proxy.category
            proxy.publish(now_ns)
            if self._start_ns <= now_ns < self._end_ns:
                proxy.last_measured = proxy.sequence
                self._offered[category.number] += len(proxy.proxy.topics)
                self._latest_ns = max(self._latest_ns, now_ns - due_ns)
            next_ns = due_ns + category.period_ns
            if next_ns - now_ns < category.period_ns // 2:
                # Held up: messages of a topic closer than its period would be another workload.
                self._slipped += 1
                next_ns = now_ns + category.period_ns
            heapreplace(due, (next_ns, index))
            now_ns = time.monotonic_ns()
        self._timer = self._loop.call_later((due[0][0] - now_ns) / SECOND_NS, self._publish_due)


class Subscribers:
    """All subscriptions, of as few clients as are allowed to hold them."""

    def __init__(self, topics: int, edge: Locator) -> None:
        self._topics = topics
        self._edge = edge
        self._numbers: dict[int, int] = {}
        """Topic numbers by topic id."""
        self._record: Record | None = None
        count = -(-topics // ENDPOINTS_MAX_PER_CLIENT)
        self._clients = [LoadClient(SUBSCRIBER_TICK_NS, self._on_data) for _ in range(count)]

    async def declare(self) -> None:
        """Connect and declare everything."""
        for client in self._clients:
            await client.open(self._edge)
        categories = categories_of(self._topics)

        async def declare(number: int) -> None:
            category = CATEGORIES[categories[number]]
            _, topic_id = await self._clients[number % len(self._clients)].declare(
                EndpointKind.SUBSCRIBER, topic_name(number, category.number), category.qos()
            )
            self._numbers[topic_id] = number

        await declare_all((partial(declare, number) for number in range(self._topics)), self._topics)
        self._record = Record(
            {topic_id: categories[number] for topic_id, number in self._numbers.items()},
            [category.deadline_ns for category in CATEGORIES],
            [
                topic_id
                for topic_id, number in self._numbers.items()
                if number == categories.index(categories[number])
            ],
        )

    async def wait_warm(self) -> None:
        """Wait until every topic has been heard."""
        await wait_until(lambda: self._record is not None and not self._record.unheard, 3_600.0)

    def measure(self, start_ns: int, end_ns: int) -> None:
        """Count what is sent from `start_ns` until before `end_ns`."""
        assert self._record is not None
        self._record.measure(start_ns, end_ns)

    async def results(self, last: dict[str, int], crash_ns: int | None, patience_s: float) -> dict[str, Any]:
        """Wait for the last messages, then give everything recorded."""
        assert self._record is not None
        wanted = {int(topic_id): sequence for topic_id, sequence in last.items()}
        latest = self._record.latest
        await wait_until(
            lambda: all(latest[topic] >= sequence for topic, sequence in wanted.items()), patience_s, 0.1
        )
        self._record.finish(wanted, time.monotonic_ns())
        return {
            **self._record.to_result(crash_ns),
            "numbers": {str(topic_id): number for topic_id, number in self._numbers.items()},
        }

    def check(self) -> None:
        """Raise if a connection has failed."""
        for client in self._clients:
            if client.failed.done():
                client.failed.result()

    def close(self) -> None:
        """Leave."""
        for client in self._clients:
            client.close()

    def _on_data(self, body: bytes, now_ns: int) -> None:
        assert self._record is not None
        self._record.take(_RECEIVED.iter_unpack(memoryview(body)[BATCH_HEADER_BYTES:]), now_ns)


async def _publish(load: Publishers) -> None:
    async for command in read_commands():
        load.check()
        name = command["command"]
        if name == "declare":
            await load.declare()
            _settle_memory()
            say("declared")
        elif name == "start":
            load.start()
        elif name == "measure":
            load.measure(command["start_ns"], command["end_ns"])
        elif name == "stop":
            say("stop", **load.stop())
    load.close()


async def _subscribe(load: Subscribers) -> None:
    async for command in read_commands():
        load.check()
        name = command["command"]
        if name == "declare":
            await load.declare()
            _settle_memory()
            say("declared")
        elif name == "start":
            await load.wait_warm()
            say("warm")
        elif name == "measure":
            load.measure(command["start_ns"], command["end_ns"])
        elif name == "results":
            results = await load.results(command["last"], command["crash_ns"], command["patience_s"])
            await asyncio.to_thread(Path(command["file"]).write_text, json.dumps(results), "utf-8")
            say("results")
    load.close()


def _settle_memory() -> None:
    """Nothing that exists now will be garbage: a collection should not look at it again."""
    gc.collect()
    gc.freeze()


async def _main(role: str, topics: int, edge: Locator) -> None:
    if role == "publish":
        await _publish(Publishers(topics, edge))
    else:
        await _subscribe(Subscribers(topics, edge))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), Locator.parse(sys.argv[3])))
