"""A process of the tracing benchmark: the broker of one place of every bed.

    python -m benchmarks.tracing_worker JSON

Lines on standard input are `pause` or `trace`, for all of its brokers, and each is answered. It serves
until standard input ends, however the parent died.
"""

import asyncio
import json
import logging
import sys
from typing import Any, Final

from benchmarks import machine
from edge_broker import EdgeBroker
from routing_broker import RoutingBroker
from runtime.config import EdgeConfig, RouterConfig

HEARTBEAT_MS: Final = 250.0
SILENCE_MS: Final = 20_000.0
"""What is not of messages should cost little, and a busy machine is no reason to fail over."""
SESSION_TIMEOUT_S: Final = 30.0


def _broker(options: dict[str, Any], zookeeper: str) -> EdgeBroker | RoutingBroker:
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
    brokers = [_broker(options, task["zookeeper"]) for options in task["brokers"]]
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    try:
        for broker in brokers:
            await broker.start()
        print(json.dumps([broker.locator for broker in brokers]), flush=True)
        while command := (await commands.readline()).decode().strip():
            for broker in brokers:
                assert broker.tracer is not None
                broker.tracer.pause(command == "pause")
            print(command, flush=True)
    finally:
        for broker in brokers:
            await broker.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(json.loads(sys.argv[1])))
