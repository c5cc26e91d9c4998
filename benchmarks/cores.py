"""What a message costs in each broker's core: no sockets, no event loop, no other process.

FRAME's workload goes through the real cores in the order of its journey: ingress edge, routing
broker, egress edge. What each core took is timed apart, in processor time of this thread, the
cutting into frames for the next hop included. What is left of a broker's cost is its runtime:
system calls, the event loop, heartbeats.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from benchmarks import machine
from benchmarks.frame_workload import (
    BACKUP_DELAY_MS,
    CATEGORIES,
    FAILOVER_MS,
    PAYLOAD_BYTES,
    SUBSCRIBER_DELAY_MS,
    categories_of,
    proxies,
    topic_name,
)
from edge_broker.core import EdgeCore
from overlay.batch import BATCH_HEADER_BYTES, FRAME_OVERHEAD_BYTES, Run, encode_batch, encode_message
from overlay.bounds import Delays
from overlay.limits import ENDPOINT_ID_MAX, MIB, MILLISECOND_NS
from overlay.messages import EndpointKind
from overlay.outbox import Outbox, Ticket
from overlay.trace import RECORD_BYTES, Sampling, TraceLog
from overlay.tracer import Tracer
from overlay.urgency import urgency
from routing_broker.core import RouterCore
from runtime.compiled import compiled_modules

FRAMES_PER_TURN: Final = 4
"""Frames a broker reads before it writes: an event loop under load behaves about like this."""
SUBSCRIBING_CLIENTS: Final = 4
_STEP_NS: Final = MILLISECOND_NS
_APART_NS: Final = 1_000
"""Between the births of two neighbouring messages: each was published by a call of its own."""
_SPREAD: Final = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per message in one core."""

    core: str
    microseconds: float
    messages: int
    frames: int


class _Stage:
    """One core with its clock: frames in, frames out."""

    def __init__(self, core: str) -> None:
        self.core = core
        self.spent_s = 0.0
        self.messages = 0
        self.frames = 0

    def run(
        self,
        bodies: list[bytes],
        admit: Callable[[bytes, int], int],
        outboxes: list[Outbox],
        after: Callable[[Outbox, int], object],
    ) -> list[bytes]:
        """Admit frames a few at a time; what goes into the first outbox is returned as bodies."""
        onward: list[bytes] = []
        now_ns = time.monotonic_ns()
        began_s = time.thread_time()
        for start in range(0, len(bodies), FRAMES_PER_TURN):
            now_ns += _STEP_NS
            for body in bodies[start : start + FRAMES_PER_TURN]:
                self.messages += admit(body, now_ns)
            for number, outbox in enumerate(outboxes):
                frames = outbox.take_frames(MIB, now_ns)
                after(outbox, len(frames))
                if not number:
                    onward.extend(frames)
        self.spent_s += time.thread_time() - began_s
        self.frames += len(bodies)
        return [_body(frame) for frame in onward]

    def cost(self) -> Cost:
        """What has been measured."""
        return Cost(self.core, 1e6 * self.spent_s / max(1, self.messages), self.messages, self.frames)


def _publisher(number: int) -> int:
    """The id of a topic's publisher; real ones are drawn at random."""
    return (number + 1) * _SPREAD & ENDPOINT_ID_MAX


def _body(frame: bytes) -> bytes:
    return frame[FRAME_OVERHEAD_BYTES - BATCH_HEADER_BYTES :]


class _Acknowledger:
    """Peers that take everything at once and say so."""

    def __init__(self) -> None:
        self._received: dict[int, int] = {}

    def __call__(self, outbox: Outbox, frames: int) -> list[Ticket]:
        received = self._received[id(outbox)] = self._received.get(id(outbox), 0) + frames
        return outbox.acknowledge(received)


class Chain:
    """An ingress edge, a routing broker with a backup, an egress edge: only their cores."""

    def __init__(
        self,
        topics: int,
        sampling: float | None = None,
        shift_at: Callable[[int], int] = lambda now_ns: 0,
    ) -> None:
        """Trace a share of the messages in every core; None: no tracing.

        `shift_at` gives the clock shift of every link at a time.
        """
        self._shift_at = shift_at
        self._delays = Delays(
            0,
            *(
                round(delay_ms * MILLISECOND_NS)
                for delay_ms in (SUBSCRIBER_DELAY_MS, BACKUP_DELAY_MS, FAILOVER_MS)
            ),
        )
        self._topics = topics
        rate = Sampling(0.0 if sampling is None else sampling)
        self._logs = [TraceLog(rate) for _ in range(3)]
        traced = [None if sampling is None else Tracer(log) for log in self._logs]
        self._ingress = EdgeCore("edge-a", "lan-a", origin=1, delays=self._delays, tracer=traced[0])
        self._egress = EdgeCore("edge-b", "lan-b", origin=2, delays=self._delays, tracer=traced[1])
        self._router = RouterCore(delays=self._delays, tracer=traced[2])
        self._to_router = Outbox()
        self._to_backup = Outbox()
        self._publisher = self._ingress.client("publishers", Outbox())
        self._subscribers = [
            self._egress.client(f"subscriber {number}", Outbox()) for number in range(SUBSCRIBING_CLIENTS)
        ]
        self._source = self._router.peer("edge-a", "lan-a")
        self._acknowledge = _Acknowledger()
        self._sequence = 0
        self._declare()

    def _declare(self) -> None:
        categories = categories_of(self._topics)
        subscribers = [("lan-b", "edge-b")]
        self._ingress.router_up("router", self._to_router, 1)
        self._router.backup_up("backup", self._to_backup, 1)
        for number in range(self._topics):
            qos = CATEGORIES[categories[number]].qos()
            name = topic_name(number, categories[number])
            known = frozenset({_publisher(number)})
            for core, client, kind in (
                (self._ingress, self._publisher, EndpointKind.PUBLISHER),
                (self._egress, self._subscribers[number % SUBSCRIBING_CLIENTS], EndpointKind.SUBSCRIBER),
            ):
                topic = core.ensure_topic(number, name, qos)
                core.add_endpoint(client, kind, _publisher(number), topic)
                core.set_interest(
                    topic,
                    primary="router",
                    backup="backup",
                    subscribers=subscribers,
                    publishers=known,
                    now_ns=1,
                )
            self._router.set_topic(number, name, qos, {"edge-b": "lan-b"}, 1, "backup")

    def turn(self) -> float:
        """Send one message of every topic; the seconds of processor time all three cores took."""
        stages = [_Stage("ingress edge"), _Stage("routing broker"), _Stage("egress edge")]
        self._round(stages)
        return sum(stage.spent_s for stage in stages)

    def warm_up(self) -> None:
        """A round that is not counted."""
        self._round([_Stage("warm-up") for _ in range(3)])

    def round(self) -> list[Cost]:
        """Send one message of every topic through all cores."""
        stages = [_Stage("ingress edge"), _Stage("routing broker"), _Stage("egress edge")]
        self._round(stages)
        costs = [stage.cost() for stage in stages]
        assert len({cost.messages for cost in costs}) == 1, "messages were lost on the way"
        return costs

    def take_records(self) -> int:
        """Records written since this was last called; what a node's recorder takes off its hands."""
        return sum(len(log.take()[1]) // RECORD_BYTES for log in self._logs)

    def fail_over(self) -> dict[str, float]:
        """Milliseconds each core works when the primary dies."""
        backup = RouterCore(delays=self._delays)
        backup.backup_up("router", Outbox(), 1)
        self._ingress.router_up("backup", Outbox(), 1)
        # Nothing is acknowledged any more: the primary dies with all of this unread or undispatched.
        now_ns = time.monotonic_ns()
        for body in self._publish():
            self._ingress.admit_from_client(self._publisher, body, 0, now_ns)
        for frame in self._to_router.take_frames(MIB, now_ns):
            self._router.admit(self._source, _body(frame), 0, now_ns)
        for number, frame in enumerate(self._to_backup.take_frames(MIB, now_ns), 1):
            backup.keep("router", number, _body(frame), 0)
        began_s = before_s = time.thread_time()
        longest_s = 0.0
        self._ingress.router_down("router", now_ns)
        while self._ingress.is_turning:
            self._ingress.turn_some(now_ns)
            now_s = time.thread_time()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
        turned_s = time.thread_time()
        backup.recover("router", now_ns)
        recovered_s = time.thread_time()
        return {
            "ingress edge turns to the backup": 1e3 * (turned_s - began_s),
            "the longest step of that": 1e3 * longest_s,
            "backup recovers copies": 1e3 * (recovered_s - turned_s),
        }

    def _round(self, stages: list[_Stage]) -> None:
        ingress, router, egress = stages
        to_egress = self._router.peer("edge-b", "lan-b").outbox
        bodies = ingress.run(
            self._publish(),
            lambda body, now_ns: self._ingress.admit_from_client(
                self._publisher, body, self._shift_at(now_ns), now_ns
            )[0],
            [self._to_router],
            self._acknowledge,
        )
        bodies = router.run(
            bodies,
            lambda body, now_ns: self._router.admit(self._source, body, self._shift_at(now_ns), now_ns)[0],
            [to_egress, self._to_backup],
            self._router_wrote,
        )
        egress.run(
            bodies,
            lambda body, now_ns: self._egress.admit_from_broker(
                body, self._shift_at(now_ns), now_ns, "router"
            )[0],
            [client.outbox for client in self._subscribers],
            self._acknowledge,
        )

    def _router_wrote(self, outbox: Outbox, frames: int) -> None:
        tickets = self._acknowledge(outbox, frames)
        if outbox is self._to_backup:
            self._router.take_prunes()
        else:
            self._router.acknowledged(tickets)

    def _publish(self) -> list[bytes]:
        """One frame of each proxy, each with a message of each of its topics."""
        self._sequence += 1
        first_ns = time.monotonic_ns() - self._topics * _APART_NS
        payload = bytes(PAYLOAD_BYTES)
        bodies = []
        for proxy in proxies(self._topics):
            messages = [
                encode_message(number, _publisher(number), self._sequence, born_ns, payload)
                for born_ns, number in zip(count(first_ns, _APART_NS), proxy.topics, strict=False)
            ]
            first_ns += len(messages) * _APART_NS
            run = Run(len(messages), b"".join(messages))
            frame = encode_batch(urgency(proxy.category.qos()), 1, 0, (run,))
            bodies.append(_body(frame))
        return bodies


def measure(topics: int, rounds: int, sampling: float | None = None) -> dict[str, Any]:
    """Costs per core, as JSON has them; with a sampling rate also with tracing, in alternating rounds."""
    chains = [Chain(topics), *([] if sampling is None else [Chain(topics, sampling)])]
    for chain in chains:
        chain.warm_up()
    gc.collect()
    gc.freeze()
    costs: list[list[list[Cost]]] = [[] for _ in chains]
    records = 0
    for number in range(rounds):
        # Whoever goes first finds colder caches: take turns.
        order = range(len(chains)) if number % 2 else reversed(range(len(chains)))
        for which in order:
            costs[which].append(chains[which].round())
            records += chains[which].take_records()
    failover_ms = chains[0].fail_over()
    plain = [_typical(rounds_of) for rounds_of in zip(*costs[0], strict=True)]
    result: dict[str, Any] = {
        "topics": topics,
        "rounds": rounds,
        "compiled": bool(compiled_modules()),
        "cores": [
            {"core": cost.core, "us_per_message": round(cost.microseconds, 3), "messages": cost.messages}
            for cost in plain
        ],
        "failover_ms": {what: round(took_ms, 1) for what, took_ms in failover_ms.items()},
        "machine": machine.describe(),
    }
    if sampling is not None:
        traced = [_typical(rounds_of) for rounds_of in zip(*costs[1], strict=True)]
        result["tracing"] = {
            "sampling": sampling,
            "records": records,
            "cores": [
                {
                    "core": cost.core,
                    "us_per_message": round(cost.microseconds, 3),
                    "overhead_pct": round(100 * (cost.microseconds / before.microseconds - 1), 2),
                }
                for before, cost in zip(plain, traced, strict=True)
            ],
        }
    return result


def _typical(rounds: Sequence[Cost]) -> Cost:
    """The median of the rounds: one that was disturbed does not count."""
    return Cost(
        rounds[0].core,
        statistics.median(cost.microseconds for cost in rounds),
        sum(cost.messages for cost in rounds),
        sum(cost.frames for cost in rounds),
    )


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    way = "compiled" if result["compiled"] else "interpreted"
    lines = [f"{result['topics']} topics, {way}", "", "| core | µs per message |", "|---|---:|"]
    lines.extend(f"| {row['core']} | {row['us_per_message']:.2f} |" for row in result["cores"])
    if "tracing" in result:
        share = 100 * result["tracing"]["sampling"]
        lines += ["", f"| {share:g} % traced | µs per message | more |", "|---|---:|---:|"]
        lines.extend(
            f"| {row['core']} | {row['us_per_message']:.2f} | {row['overhead_pct']:.1f} % |"
            for row in result["tracing"]["cores"]
        )
    lines += ["", "| when the primary dies | ms |", "|---|---:|"]
    lines.extend(f"| {what} | {took_ms:.0f} |" for what, took_ms in result["failover_ms"].items())
    return "\n".join(lines)
