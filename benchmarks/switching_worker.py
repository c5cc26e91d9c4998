"""A process of the benchmarks that switch something in running brokers: one broker.

    python -m benchmarks.switching_worker JSON

Lines on standard input are commands, and each is answered: `trace` and `pause` let the broker trace messages
or not, `sharp` and `blind` let it use what it knows of its peers' clocks or not.
It serves until standard input ends, however the parent died.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from typing import Any, Final, cast

from benchmarks import machine
from edge_broker import EdgeBroker
from overlay.delay import LinkClock
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from routing_broker import RoutingBroker
from runtime.config import EdgeConfig, RouterConfig

HEARTBEAT_MS: Final = 250.0
SILENCE_MS: Final = 20_000.0
"""What is not of messages should cost little, and a busy machine is no reason to fail over."""
SESSION_TIMEOUT_S: Final = 30.0

Broker = EdgeBroker | RoutingBroker


class BlindClock:
    """The clock of a link that goes on learning but says that nothing is known."""

    def __init__(self, clock: LinkClock) -> None:
        self.clock = clock
        self.helper = clock.helper
        self.assume_drift = clock.assume_drift
        self.is_known = False
        self.shift_ns = UNKNOWN_CLOCK_SHIFT

    @property
    def least_delay_ns(self) -> int:
        """As far as is known: it is not of messages."""
        return self.clock.least_delay_ns

    def shift_at(self, now_ns: int) -> int:
        """Unknown."""
        return UNKNOWN_CLOCK_SHIFT


def blind(broker: Broker) -> None:
    """No age can be bounded from now on."""
    for link in broker.hub.links:
        if not isinstance(link.clock, BlindClock):
            link.clock = cast("LinkClock", BlindClock(link.clock))


def sharp(broker: Broker) -> None:
    """Ages are bounded again, with what has been learnt meanwhile."""
    for link in broker.hub.links:
        if isinstance(link.clock, BlindClock):
            link.clock = link.clock.clock


def _trace(broker: Broker, traces: bool) -> None:
    assert broker.tracer is not None
    broker.tracer.pause(not traces)


COMMANDS: Final[dict[str, Callable[[Broker], None]]] = {
    "trace": lambda broker: _trace(broker, True),
    "pause": lambda broker: _trace(broker, False),
    "sharp": sharp,
    "blind": blind,
}


def _broker(options: dict[str, Any], zookeeper: str) -> Broker:
    common: dict[str, Any] = {
        "zookeeper": zookeeper,
        "session_timeout_s": SESSION_TIMEOUT_S,
        "heartbeat_ms": HEARTBEAT_MS,
        "silence_ms": SILENCE_MS,
    }
    if options.get("lan"):
        edge = EdgeConfig(**common, **options, discovery=False)
        edge.check()
        return EdgeBroker(edge)
    router = RouterConfig(**common, **options)
    router.check()
    return RoutingBroker(router)


async def _serve(task: dict[str, Any]) -> None:
    machine.confine(task["cores"])
    broker = _broker(task["broker"], task["zookeeper"])
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    try:
        await broker.start()
        print(broker.locator, flush=True)
        while command := (await commands.readline()).decode().strip():
            COMMANDS[command](broker)
            print(command, flush=True)
    finally:
        await broker.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(json.loads(sys.argv[1])))
