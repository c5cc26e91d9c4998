"""Hostile frames for the real handlers: whole overlays in virtual time, spoken to in the name of peers.

Whatever a decoder lets pass reaches brokers and clients as they are, with all their links, topics and
endpoints. They may end the connection; they may not fail.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self, get_type_hints

from overlay.codec import encode
from overlay.errors import CloseReason
from overlay.limits import FRAME_MAX_BYTES, MILLISECOND_NS, RESUME_PUBLISHERS_MAX, SECOND_NS
from overlay.messages import (
    Close,
    ControlMessage,
    Declare,
    Declared,
    Draining,
    EndpointKind,
    Matched,
    Measured,
    Prune,
    Publishers,
    QosChanged,
    QosIntent,
    Refused,
    Resume,
    Undeclare,
)
from overlay.qos import TopicQos
from runtime.connection import Connection
from simulation.nodes import Process
from simulation.overlay_model import Errors, SimulatedOverlay, bury, close
from simulation.schedule import Step

START_MAX_NS = 60 * SECOND_NS
LOGGERS = tuple(logging.getLogger(name) for name in ("isthmus", "coordinator", "asyncio"))
SPOKEN: tuple[type[ControlMessage], ...] = (
    # Clients may say the first three, and anybody can be a client.
    *(Declare, Declare, Declare, Undeclare, Resume, Prune, Measured, Draining, Close),
    *(Declared, Refused, Matched, QosChanged, Publishers),
)
NUMBERS = (0, 1, 2, 2**31, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1)
SCALARS = (None, True, -1, 0, 1e308, float("nan"), float("inf"), 2**64 - 1, "", "x", [], {}, [[]])


class OverlayFuzzer:
    """One overlay; every input goes to a random node as if a random peer of it had sent it."""

    def __init__(self, seed: int) -> None:
        self._overlay = SimulatedOverlay(seed)
        self._errors = Errors(self._overlay.world)
        self.reached: Counter[type] = Counter()
        """How often each kind of node was sent something."""

    def __enter__(self) -> Self:
        for logger in LOGGERS:
            logger.addHandler(self._errors)
        self._overlay.start()
        end_ns = self._overlay.world.now_ns + START_MAX_NS
        while wrong := self._overlay.what_is_wrong():
            assert self._overlay.world.now_ns < end_ns, wrong
            self.go_on(100)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for logger in LOGGERS:
            logger.removeHandler(self._errors)
        close(self._overlay)
        del self._overlay, self._errors
        bury()

    def say(self, data: bytes, rng: random.Random) -> None:
        """Let a random node hear this from one of its peers, between two frames."""
        found = [
            (process, connection)
            for process in self._overlay.processes
            for connection in self._connections(process)
            if connection.is_open and not connection._reader.pending_bytes
        ]
        if found:
            process, connection = rng.choice(found)
            assert process.loop is not None
            self._overlay.world.soon(Step(process.loop.actor, connection.data_received, (data,), None))
            self.reached[type(process)] += 1
        self.go_on(rng.choice((1, 5, 30)))

    def go_on(self, milliseconds: int) -> None:
        """Time passes; raises AssertionError if a node failed meanwhile."""
        world = self._overlay.world
        world.run_until(world.now_ns + milliseconds * MILLISECOND_NS)
        # An application whose endpoint is refused is told so, and gives up.
        failures = [what for what in world.failures if "the process ended: RefusedError(" not in what]
        assert not failures, failures[0][:2_000]

    def validate(self) -> None:
        """Assert the invariants of every core."""
        self._overlay.validate()

    def closes(self, reason: CloseReason) -> int:
        """How many connections have ended so, anywhere."""
        return sum(
            broker.broker.hub.closes[reason] for broker in self._overlay.brokers if broker.broker is not None
        )

    def message(self, rng: random.Random) -> bytes:
        """A well-formed frame about what there is, with hostile content."""
        message_type = rng.choice(SPOKEN)
        hints = get_type_hints(message_type)
        values = {
            field.name: self._value(message_type, hints[field.name], rng) for field in fields(message_type)
        }
        data = encode(message_type(**values))
        return data if len(data) <= FRAME_MAX_BYTES else self.message(rng)

    def _connections(self, process: Process) -> Sequence[Connection]:
        node = getattr(process, "broker", None) or getattr(process, "client", None)
        hub = getattr(node, "hub", None) or getattr(node, "_hub", None)
        return list(hub._connections) if hub is not None else []

    def _value(self, message_type: type, hint: Any, rng: random.Random) -> Any:
        text = str(hint)
        if "None" in text and rng.random() < 0.3:
            return None
        if hint is bool:
            return rng.random() < 0.5
        if hint is EndpointKind or hint is QosIntent:
            return rng.choice(list(hint))
        if "dict" in text:
            return self._links(rng) if message_type is Measured else self._quality(rng)
        if "tuple[int" in text:
            pairs = rng.choice((0, 1, 2, 8, RESUME_PUBLISHERS_MAX, 2 * RESUME_PUBLISHERS_MAX, 50_000))
            return tuple(self._number(rng) for _ in range(pairs + rng.randrange(2)))
        if "tuple[str" in text:
            return tuple(self._text(rng) for _ in range(rng.choice((0, 1, 3, 300))))
        return self._number(rng) if hint is int else self._text(rng)

    def _number(self, rng: random.Random) -> int:
        known = [*self._overlay.history.published, *range(1, len(self._overlay.topics) + 2)]
        return rng.choice(known) if known and rng.random() < 0.6 else rng.choice(NUMBERS)

    def _text(self, rng: random.Random) -> str:
        overlay = self._overlay
        known = (
            *(topic.name for topic in overlay.topics),
            *(process.name for process in overlay.processes),
            *("plant", "office", "new/topic", "edge-plant-1:7400"),
        )
        strange = ("", " ", "\x00", "/", "..", "*", "\ud7ff", "x" * 255, "x" * 256, "y" * 200_000)
        return rng.choice(known) if rng.random() < 0.7 else rng.choice(strange)

    def _quality(self, rng: random.Random) -> dict[str, Any]:
        record: dict[str, Any] = (
            TopicQos(10, 50, 2, 8).to_record() if rng.random() < 0.7 else {"deadline_ms": 5.0}
        )
        return self._spoilt(record, lambda: rng.choice(SCALARS), rng)

    def _links(self, rng: random.Random) -> dict[str, Any]:
        known = {
            name: [0.01, 1.5, 2, 1_000_000, 1.0] for name in ("router-1", "edge-plant-1", "edge-office-1")
        }
        return self._spoilt(known, lambda: [rng.choice(SCALARS) for _ in range(rng.randrange(7))], rng)

    def _spoilt(self, record: dict[str, Any], value: Callable[[], Any], rng: random.Random) -> dict[str, Any]:
        for name in list(record):
            if rng.random() < 0.2:
                record[name] = value()
            elif rng.random() < 0.1:
                del record[name]
        if rng.random() < 0.1:
            record[self._text(rng)] = value()
        return record
