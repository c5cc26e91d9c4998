"""The applications of one LAN as one process: all its publishers and subscribers, a client each.

Publishers send at fixed rates. A payload is text, so that `isthmus sub` shows it: the publisher's
number, a sequence and the time of sending in ns on the machine's monotonic clock. All processes of
the testbed share that clock, so the latency a subscriber sees is the truth. The phases, each entered
by a command of the testbed:

    declare   connect, declare every endpoint, wait until every publisher knows of all subscribers
    warm up   publish with sequence 0 until every subscriber has heard every publisher of its topic
    measure   publish with sequences from 1; subscribers record each message
    stop      publishers stop and say how many they sent
    drain     subscribers wait for the last sequence of every publisher, or a deadline; results as a file

A testbed that only wants traffic leaves it in the second phase; nothing is recorded then.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import signal
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, Final

from clients import Client, Publisher, ReceivedMessage, Subscription
from overlay.limits import MILLISECOND_NS
from runtime.logs import configure_logging
from runtime.tracing import DEFAULT_SAMPLING, TraceSettings
from topology.endpoints import PublisherSpec, SubscriberSpec
from topology.lines import read_commands, say
from topology.model import Topology, load_topology

CONNECT_TIMEOUT_S: Final = 15.0
MATCH_TIMEOUT_S: Final = 20.0
CATCH_UP_MAX_S: Final = 0.5
"""A publisher that was held up longer than this does not send what it missed."""
RECORDS_MAX: Final = 5_000_000
"""Messages recorded by one subscriber of one publisher; more end the process."""


def write_payload(publisher: int, sequence: int, sent_ns: int, size: int) -> bytes:
    """A payload of `size` bytes; the sequence is 0 while warming up."""
    return (b"%d %d %d" % (publisher, sequence, sent_ns)).ljust(size)


def read_payload(payload: bytes) -> tuple[int, int, int]:
    """Publisher, sequence and time of sending of a payload."""
    publisher, sequence, sent_ns = payload.split()
    return int(publisher), int(sequence), int(sent_ns)


def pack(values: "array[int]") -> str:
    """Numbers for JSON, small and fast to read; `unpack` reads them."""
    return base64.b64encode(values.tobytes()).decode()


def unpack(text: str, code: str = "Q") -> "array[int]":
    """What `pack` wrote: unsigned numbers of 64 bits, or signed ones with code q."""
    values = array(code)
    values.frombytes(base64.b64decode(text))
    return values


def _age_bound_ns(message: ReceivedMessage, now_ns: int) -> int:
    if message.age_bound_ms is None:
        return -1
    return round(message.age_bound_ms * MILLISECOND_NS) + now_ns - message.received_ns


class Source:
    """One publishing application."""

    def __init__(self, number: int, spec: PublisherSpec, publisher: Publisher) -> None:
        self.number = number
        self.topic = spec.topic
        self.topic_id = publisher.topic_id
        self.accepted_ns = array("Q")
        """When each message that counts was accepted; the first is number 1."""
        self.measuring = False
        self._period_s = 1 / spec.rate_per_s
        self._size = spec.payload_bytes
        self._publisher = publisher

    @property
    def sent(self) -> int:
        """Messages that count."""
        return len(self.accepted_ns)

    @property
    def published(self) -> int:
        """All messages, with those that warmed up."""
        return self._publisher.sequence

    async def run(self) -> None:
        """Publish at the fixed rate until cancelled."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            late_s = loop.time() - next_s
            if late_s < 0:
                await asyncio.sleep(-late_s)
            elif late_s > CATCH_UP_MAX_S:
                next_s += late_s
            next_s += self._period_s
            sequence = self.sent + 1 if self.measuring else 0
            await self._publisher.publish(
                write_payload(self.number, sequence, time.monotonic_ns(), self._size)
            )
            if sequence:
                assert sequence <= RECORDS_MAX, "too many messages to record"
                # Taken afterwards: no message is older than its publisher's log says.
                self.accepted_ns.append(time.monotonic_ns())


class Record:
    """What one subscriber got from one publisher, in the order it came."""

    def __init__(self) -> None:
        self.heard = False
        self.sequences = array("Q")
        self.sent_ns = array("Q")
        self.received_ns = array("Q")
        self.age_bound_ns = array("q")
        """How old it was at most when it was received; -1 if that was not known."""


class Sink:
    """One subscribing application."""

    def __init__(
        self, number: int, spec: SubscriberSpec, streams: list[int], subscription: Subscription
    ) -> None:
        self.number = number
        self.topic = spec.topic
        self.records = {stream: Record() for stream in streams}
        """By the publisher's number."""
        self.subscription = subscription
        self.progress = asyncio.Event()

    @property
    def is_warm(self) -> bool:
        """Every publisher of the topic has been heard."""
        return all(record.heard for record in self.records.values())

    def has_all(self, sent: dict[int, int]) -> bool:
        """The last message of every publisher is here; nothing comes after it."""
        return all(
            not sent[stream] or (record.sequences and record.sequences[-1] >= sent[stream])
            for stream, record in self.records.items()
        )

    async def run(self) -> None:
        """Take messages until cancelled."""
        while True:
            messages = await self.subscription.receive_many()
            now_ns = time.monotonic_ns()
            for message in messages:
                stream, sequence, sent_ns = read_payload(message.payload)
                record = self.records[stream]
                record.heard = True
                if sequence:
                    assert len(record.sequences) < RECORDS_MAX, "too many messages to record"
                    record.sequences.append(sequence)
                    record.sent_ns.append(sent_ns)
                    record.received_ns.append(now_ns)
                    record.age_bound_ns.append(_age_bound_ns(message, now_ns))
            self.progress.set()

    def result(self) -> dict[str, Any]:
        """Everything recorded, as JSON has it."""
        statistics = self.subscription.statistics()
        return {
            "subscriber": self.number,
            "topic": self.topic,
            "duplicates_dropped": statistics.duplicates,
            "late_dropped": statistics.late,
            "streams": {
                str(stream): {
                    "sequences": pack(record.sequences),
                    "sent_ns": pack(record.sent_ns),
                    "received_ns": pack(record.received_ns),
                    "age_bound_ns": pack(record.age_bound_ns),
                }
                for stream, record in self.records.items()
            },
        }


class Load:
    """All applications of one LAN."""

    def __init__(
        self, topology: Topology, lan: str, edges: dict[str, str], trace: TraceSettings | None = None
    ) -> None:
        self._trace = trace
        self._topology = topology
        self._lan = lan
        self._edges = edges
        self._clients: list[Client] = []
        self._sources: list[Source] = []
        self._sinks: list[Sink] = []
        self._publishing: list[asyncio.Task[None]] = []
        self._receiving: list[asyncio.Task[None]] = []

    async def declare(self) -> None:
        """Connect and declare everything; returns when publishers and subscribers know of each other."""
        topology = self._topology
        await asyncio.gather(
            *(self._add_sink(i, s) for i, s in enumerate(topology.subscribers) if s.lan == self._lan),
            *(self._add_source(i, p) for i, p in enumerate(topology.publishers) if p.lan == self._lan),
        )
        self._publishing = [asyncio.create_task(source.run()) for source in self._sources]

    async def wait_warm(self) -> None:
        """Wait until every subscriber has heard every publisher."""
        for sink in self._sinks:
            while not sink.is_warm:
                sink.progress.clear()
                await self._unless_failed(sink.progress.wait())

    def measure(self) -> None:
        """Messages count from now on."""
        for source in self._sources:
            source.measuring = True

    async def stop(self) -> dict[str, Any]:
        """Publish no more; gives what was sent."""
        self._check()
        for task in self._publishing:
            task.cancel()
        await asyncio.wait(self._publishing or {asyncio.ensure_future(asyncio.sleep(0))})
        return {
            "sent": {str(source.number): source.sent for source in self._sources},
            "topic_ids": {source.topic: source.topic_id for source in self._sources},
            "published": self._published(),
        }

    async def drain(self, sent: dict[int, int], timeout_s: float) -> bool:
        """Wait for the last messages; says whether all came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for sink in self._sinks:
                    while not sink.has_all(sent):
                        sink.progress.clear()
                        await self._unless_failed(sink.progress.wait())
        return all(sink.has_all(sent) for sink in self._sinks)

    def received(self) -> list[list[int]]:
        """Subscriber, publisher and how many messages came so far."""
        return [
            [sink.number, stream, len(record.sequences)]
            for sink in self._sinks
            for stream, record in sink.records.items()
        ]

    def results(self) -> dict[str, Any]:
        """The log of every publisher and of every subscriber."""
        return {
            "lan": self._lan,
            "publishers": {str(source.number): pack(source.accepted_ns) for source in self._sources},
            "reconnects": sum(client.reconnects for client in self._clients),
            "subscribers": [sink.result() for sink in self._sinks],
        }

    async def close(self) -> None:
        """Leave."""
        for task in (*self._publishing, *self._receiving):
            task.cancel()
        await asyncio.gather(*(client.close(flush_timeout_s=0.5) for client in self._clients))

    async def _connect(self, edge: str) -> Client:
        others = [locator for name, locator in self._edges.items() if name != edge]
        client = Client([self._edges[edge], *others], lan=self._lan, trace=self._trace)
        self._clients.append(client)
        await client.start(CONNECT_TIMEOUT_S)
        return client

    async def _add_sink(self, number: int, spec: SubscriberSpec) -> None:
        streams = [i for i, item in enumerate(self._topology.publishers) if item.topic == spec.topic]
        client = await self._connect(spec.edge)
        subscription = await client.subscribe(spec.topic, self._topology.topics[spec.topic])
        sink = Sink(number, spec, streams, subscription)
        self._sinks.append(sink)
        self._receiving.append(asyncio.create_task(sink.run()))

    async def _add_source(self, number: int, spec: PublisherSpec) -> None:
        client = await self._connect(spec.edge)
        publisher = await client.publisher(spec.topic, self._topology.topics[spec.topic])
        subscribers = sum(item.topic == spec.topic for item in self._topology.subscribers)
        await publisher.wait_for_subscribers(subscribers, MATCH_TIMEOUT_S)
        self._sources.append(Source(number, spec, publisher))

    def _published(self) -> dict[str, int]:
        """Messages by topic, with those that warmed up."""
        counts: Counter[str] = Counter()
        for source in self._sources:
            counts[source.topic] += source.published
        return dict(counts)

    async def _unless_failed(self, work: Any) -> None:
        """Wait for something, but not past the failure of a publisher or subscriber."""
        waiting = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                {waiting, *self._publishing, *self._receiving}, return_when=asyncio.FIRST_COMPLETED
            )
            self._check()
        finally:
            waiting.cancel()

    def _check(self) -> None:
        for task in (*self._publishing, *self._receiving):
            if task.done() and not task.cancelled():
                task.result()


async def _serve(
    topology: Topology, lan: str, edges: dict[str, str], results: Path, trace: TraceSettings | None
) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    load = Load(topology, lan, edges, trace)
    try:
        await load.declare()
        say("declared")
        warming = asyncio.create_task(_warm_up(load))
        async for command in read_commands():
            await _obey(load, command, warming, results)
    finally:
        await load.close()


async def _warm_up(load: Load) -> None:
    await load.wait_warm()
    say("warm")


async def _obey(load: Load, command: dict[str, Any], warming: "asyncio.Task[None]", results: Path) -> None:
    name = command["command"]
    if name == "measure":
        await warming
        load.measure()
        say(name, now_ns=time.monotonic_ns())
    elif name == "received":
        say(name, counts=load.received())
    elif name == "stop":
        say(name, **await load.stop())
    elif name == "drain":
        sent = {int(stream): count for stream, count in command["sent"].items()}
        complete = await load.drain(sent, command["timeout_s"])
        await asyncio.to_thread(results.write_text, json.dumps(load.results()))
        say(name, complete=complete)
    else:
        raise AssertionError(f"unknown command {name}")


def main() -> None:
    """Be the applications of a LAN until the testbed is done."""
    parser = argparse.ArgumentParser(prog="load")
    parser.add_argument("topology", type=Path)
    parser.add_argument("lan")
    parser.add_argument("results", type=Path)
    parser.add_argument("edges", nargs="+", help="NAME=HOST:PORT")
    parser.add_argument("--trace-dir", type=Path)
    parser.add_argument("--trace-sample", type=float, default=DEFAULT_SAMPLING)
    arguments = parser.parse_args()
    configure_logging(f"load-{arguments.lan}")
    edges = dict(item.split("=", 1) for item in arguments.edges)
    folder = arguments.trace_dir
    trace = None if folder is None else TraceSettings(folder, arguments.trace_sample)
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        topology = load_topology(arguments.topology)
        asyncio.run(_serve(topology, arguments.lan, edges, arguments.results, trace))


if __name__ == "__main__":
    main()
