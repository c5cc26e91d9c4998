"""A soak: hours of load while clients, topics and brokers come and go, and nothing may grow.

A routing broker joins, takes topics over, drains and leaves, again and again; in every LAN clients visit
topics that come and go (`topology.churn`). The verdict of a drill comes on top of what is said about
resources (`topology.drills.resources`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from topology.children import Child
from topology.drills.resources import Record
from topology.drills.script import Action, Drill, Fault, Whom
from topology.driver import Driver
from topology.errors import DriverError
from topology.local_driver import LocalDriver
from topology.promises import Promise

LOOK_EVERY_S: Final = 2.0
JOIN_EVERY_S: Final = 20.0
STAY_S: Final = 8.0
COMMAND_TIMEOUT_S: Final = 10.0
TURNED_AWAY_MAX: Final = 0.001
"""Share of the clients that may find no answer in time: no edge broker ever leaves."""


def soak(seconds: float) -> Drill:
    """The script of a soak."""
    joins = max(1, int((seconds - STAY_S) / JOIN_EVERY_S))
    return Drill(
        "soak",
        f"clients, topics and a routing broker come and go for {seconds:g} s",
        "memory, descriptors and threads of all other brokers stay flat",
        tuple(
            Fault(Action.ADD, Whom.NEW_ROUTER, lasts_s=STAY_S, at_s=number * JOIN_EVERY_S)
            for number in range(joins)
        ),
        seconds=seconds,
        settled_s=0.3,
        churns=True,
    )


class Soak:
    """The visitors of a running testbed, and what its brokers use."""

    def __init__(self, driver: LocalDriver, seed: int) -> None:
        self._driver = driver
        self._seed = seed
        self._visitors: list[Child] = []
        self._record = Record()
        self._started_s = time.monotonic()

    async def start(self) -> None:
        """Let clients come and go in every LAN."""
        for number, lan in enumerate(self._driver.topology.lans):
            edges = self._driver.edges_of(lan.name)
            arguments = [lan.name, str(self._seed + number), *edges]
            self._visitors.append(
                await self._driver.start_helper(f"churn-{lan.name}", "topology.churn", arguments, lan.name)
            )

    async def watch(self) -> None:
        """Look at all brokers regularly, until cancelled."""
        while True:
            self._record.add(time.monotonic() - self._started_s, self._driver.broker_pids())
            await asyncio.sleep(LOOK_EVERY_S)

    async def promises(self) -> list[Promise]:
        """What is to be said at the end."""
        answers = [await visitor.ask("report", COMMAND_TIMEOUT_S) for visitor in self._visitors]
        came = sum(answer["clients"] for answer in answers)
        failed = sum(answer["failures"] for answer in answers)
        visits = Promise(
            "clients come and go",
            came > 0 and failed <= TURNED_AWAY_MAX * came,
            f"{came} came and went, {failed} were turned away",
        )
        return [visits, self._record.promise()]


@contextlib.asynccontextmanager
async def soaking(driver: Driver, seed: int) -> AsyncIterator[Soak]:
    """Visitors and a watch over all brokers for as long as the block lasts."""
    if not isinstance(driver, LocalDriver):
        raise DriverError(f"{type(driver).__name__} has no processes to look at: use the process testbed")
    soak_ = Soak(driver, seed)
    await soak_.start()
    watching = asyncio.create_task(soak_.watch())
    try:
        yield soak_
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    if not watching.cancelled():
        # It looked no further: what was not seen may have grown.
        watching.result()
