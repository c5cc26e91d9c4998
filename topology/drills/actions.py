"""What each action does to a testbed, and how it is undone."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from topology.drills.script import Action
from topology.driver import Driver
from topology.gateway import Way

SLOWER: Final = 10
"""A slow link takes so many times as long."""
CLOCK_JUMP_S: Final = -3600.0
"""Back, because time that runs backwards is what programs expect least."""

Deed = Callable[[Driver, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Deeds:
    """An action and how it is undone, with what is told to people."""

    inject: Deed
    undo: Deed
    happened: str
    """With a place for who it was."""
    undone: str


async def _kill(driver: Driver, broker: str) -> None:
    driver.kill_nowait(broker)


async def _start_again(driver: Driver, broker: str) -> None:
    await driver.kill(broker)
    await driver.start_node(broker)


async def _freeze(driver: Driver, broker: str) -> None:
    await driver.freeze(broker)


async def _thaw(driver: Driver, broker: str) -> None:
    await driver.thaw(broker)


async def _drain(driver: Driver, broker: str) -> None:
    await driver.drain(broker)


async def _start(driver: Driver, broker: str) -> None:
    await driver.start_node(broker)


async def _add(driver: Driver, broker: str) -> None:
    await driver.add_router(broker, f"host-of-{broker}")


async def _remove(driver: Driver, broker: str) -> None:
    await driver.remove_router(broker)


async def _kill_zookeeper(driver: Driver, servers: str) -> None:
    await asyncio.gather(*(driver.kill_zookeeper(server) for server in servers.split(",")))


async def _start_zookeeper(driver: Driver, servers: str) -> None:
    for server in servers.split(","):
        await driver.start_zookeeper(server)


async def _cut(driver: Driver, lan: str) -> None:
    await driver.cut(lan)


async def _heal(driver: Driver, lan: str) -> None:
    await driver.heal(lan)


async def _cut_out(driver: Driver, lan: str) -> None:
    await driver.cut(lan, [Way.OUT])


async def _cut_back(driver: Driver, lan: str) -> None:
    await driver.cut(lan, [Way.BACK])


async def _cut_zookeeper(driver: Driver, broker: str) -> None:
    await driver.cut_zookeeper(broker)


async def _heal_zookeeper(driver: Driver, broker: str) -> None:
    await driver.heal_zookeeper(broker)


async def _cut_routers(driver: Driver, both: str) -> None:
    await driver.cut_routers(*both.split(","))


async def _heal_routers(driver: Driver, both: str) -> None:
    await driver.heal_routers(*both.split(","))


async def _slow_down(driver: Driver, lan: str) -> None:
    await driver.delay(lan, SLOWER * max(1.0, driver.topology.lan(lan).wan.delay_ms))


async def _speed_up(driver: Driver, lan: str) -> None:
    await driver.delay(lan, None)


async def _shift_clock(driver: Driver, _: str) -> None:
    await driver.shift_wall_clock(CLOCK_JUMP_S)


async def _shift_back(driver: Driver, _: str) -> None:
    await driver.shift_wall_clock(0.0)


DEEDS: Final[dict[Action, Deeds]] = {
    Action.KILL: Deeds(_kill, _start_again, "killed {}", "{} runs again"),
    Action.FREEZE: Deeds(_freeze, _thaw, "froze {}", "{} goes on"),
    Action.RESTART: Deeds(_drain, _start, "drained and ended {}", "{} runs again"),
    Action.ADD: Deeds(_add, _remove, "added {}", "{} has drained and left"),
    Action.KILL_ZOOKEEPER: Deeds(_kill_zookeeper, _start_zookeeper, "killed {}", "started {} again"),
    Action.CUT: Deeds(_cut, _heal, "cut off {}", "joined {} again"),
    Action.CUT_OUT: Deeds(_cut_out, _heal, "nothing leaves {} any more", "joined {} again"),
    Action.CUT_BACK: Deeds(_cut_back, _heal, "nothing comes into {} any more", "joined {} again"),
    Action.CUT_ZOOKEEPER: Deeds(
        _cut_zookeeper, _heal_zookeeper, "cut off from ZooKeeper: {}", "{} has ZooKeeper again"
    ),
    Action.CUT_ROUTERS: Deeds(_cut_routers, _heal_routers, "cut off from each other: {}", "joined again: {}"),
    Action.SLOW: Deeds(_slow_down, _speed_up, "slowed down the link of {}", "{} has its link as before"),
    Action.SHIFT_CLOCK: Deeds(_shift_clock, _shift_back, "set {} back by an hour", "set {} right again"),
}
