"""What each action does to a testbed, and how it is undone."""

from collections.abc import Awaitable, Callable
from typing import Final

from topology.drills.script import Action
from topology.driver import Driver

Deed = Callable[[Driver, str], Awaitable[None]]


async def _kill(driver: Driver, broker: str) -> None:
    driver.kill_nowait(broker)


async def _start_again(driver: Driver, broker: str) -> None:
    await driver.kill(broker)
    await driver.start_node(broker)


async def _freeze(driver: Driver, broker: str) -> None:
    await driver.freeze(broker)


async def _thaw(driver: Driver, broker: str) -> None:
    await driver.thaw(broker)


INJECT: Final[dict[Action, Deed]] = {Action.KILL: _kill, Action.FREEZE: _freeze}
UNDO: Final[dict[Action, Deed]] = {Action.KILL: _start_again, Action.FREEZE: _thaw}

HAPPENED: Final[dict[Action, str]] = {Action.KILL: "killed", Action.FREEZE: "froze"}
UNDONE: Final[dict[Action, str]] = {Action.KILL: "started again", Action.FREEZE: "thawed"}
"""What is told to people, with the name behind it."""
