"""Clients of one LAN that come and go, on topics that come and go: one process, for soaks.

Every client connects, subscribes to a topic, publishes on another one and leaves, some with a goodbye
and some without. Topics are few and come up again and again, so that what a broker keeps of them is
bounded; whatever grows all the same is a leak.
"""

import argparse
import asyncio
import contextlib
import random
import signal
from typing import Final

from clients import Client, ClientError
from runtime.logs import configure_logging
from topology.lines import read_commands, say

TOPICS: Final = 50
AT_ONCE: Final = 4
"""Clients that are there at a time."""
MESSAGES: Final = 5
STAY_S: Final = 0.5
ANSWER_TIMEOUT_S: Final = 15.0


class Churn:
    """Counts who came and went."""

    def __init__(self, lan: str, edges: list[str], randomness: random.Random) -> None:
        self._lan = lan
        self._edges = edges
        self._randomness = randomness
        self.clients = 0
        self.failures = 0
        """Clients that could not connect or declare, because of a broker that was just gone."""

    async def run(self) -> None:
        """One client after the other, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._visit()
                self.clients += 1
            except (ClientError, TimeoutError):
                self.failures += 1

    async def _visit(self) -> None:
        randomness = self._randomness
        edges = randomness.sample(self._edges, len(self._edges))
        client = Client(edges, lan=self._lan)
        try:
            await client.start(ANSWER_TIMEOUT_S)
            await client.subscribe(f"churn/{randomness.randrange(TOPICS)}")
            publisher = await client.publisher(f"churn/{randomness.randrange(TOPICS)}")
            for _ in range(MESSAGES):
                await publisher.publish(b"here and gone")
            await asyncio.sleep(randomness.uniform(0, STAY_S))
        finally:
            # Without time to send what waits, it leaves as a client that was killed does.
            await client.close(flush_timeout_s=randomness.choice([0.0, 1.0]))


async def _serve(lan: str, edges: list[str], seed: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    churn = Churn(lan, edges, random.Random(seed))
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(churn.run())
        async for command in read_commands():
            say(command["command"], clients=churn.clients, failures=churn.failures)


def main() -> None:
    """Be the visitors of a LAN until the testbed is done."""
    parser = argparse.ArgumentParser(prog="churn")
    parser.add_argument("lan")
    parser.add_argument("seed", type=int)
    parser.add_argument("edges", nargs="+", help="HOST:PORT")
    arguments = parser.parse_args()
    configure_logging(f"churn-{arguments.lan}")
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(_serve(arguments.lan, arguments.edges, arguments.seed))


if __name__ == "__main__":
    main()
