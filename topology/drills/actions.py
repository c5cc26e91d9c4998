"""What each action does to a testbed, and how it is undone."""

from collections.abc import Awaitable, Callable
from typing import Final

from topology.drills.script import Action
from topology.process_driver import ProcessDriver

Deed = Callable[[ProcessDriver, str], Awaitable[None]]


async def _kill(driver: ProcessDriver, broker: str) -> None:
    driver.kill_nowait(broker)


async def _start_again(driver: ProcessDriver, broker: str) -> None:
    await driver.kill(broker)
    await driver.start_node(broker)


async def _freeze(driver: ProcessDriver, broker: str) -> None:
    driver.freeze(broker)


async def _thaw(driver: ProcessDriver, broker: str) -> None:
    driver.thaw(broker)


INJECT: Final[dict[Action, Deed]] = {Action.KILL: _kill, Action.FREEZE: _freeze}
UNDO: Final[dict[Action, Deed]] = {Action.KILL: _start_again, Action.FREEZE: _thaw}

HAPPENED: Final[dict[Action, str]] = {Action.KILL: "killed", Action.FREEZE: "froze"}
UNDONE: Final[dict[Action, str]] = {Action.KILL: "started again", Action.FREEZE: "thawed"}
"""What is told to people, with the name behind it."""
