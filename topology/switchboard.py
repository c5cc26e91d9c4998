"""The lines inside the cloud, each of which can be cut: one process that relays them all.

Brokers of the process testbed are on one machine, where nothing lies between them that could break. For
drills their connections to ZooKeeper, and those between routing brokers, go through lines of this
process (`topology.gateway`, without a delay): a line to a ZooKeeper server relays to that server, a line
of a routing broker is an HTTP proxy, because it is the broker that knows where it wants to go.
"""

import argparse
import asyncio
import contextlib
import signal
from typing import Any

from overlay.locator import Locator
from topology.gateway import Gateway, Way
from topology.lines import read_commands, say


class Switchboard:
    """All lines by name."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lines: dict[str, Gateway] = {}

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what the testbed says; gives the answer."""
        name, line = command["command"], command["line"]
        target = Locator.parse(command["target"]) if command.get("target") else None
        if name == "open":
            gateway = self._lines[line] = Gateway(target=target)
            return {"locator": str(await gateway.start(self._host))}
        gateway = self._lines[line]
        ways = [Way(way) for way in command.get("ways", tuple(Way))]
        if name == "cut":
            gateway.cut_target(target) if target is not None else gateway.cut(ways)
        elif name == "heal":
            gateway.heal_target(target) if target is not None else gateway.heal(ways)
        else:
            raise AssertionError(f"unknown command {name}")
        return {}

    async def close(self) -> None:
        """End all lines."""
        await asyncio.gather(*(gateway.close() for gateway in self._lines.values()))


async def _serve(host: str) -> None:
    board = Switchboard(host)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async for command in read_commands():
            say(command["command"], **await board.obey(command))
    finally:
        await board.close()


def main() -> None:
    """Be the switchboard until the testbed is done."""
    parser = argparse.ArgumentParser(prog="switchboard")
    parser.add_argument("host")
    arguments = parser.parse_args()
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(_serve(arguments.host))


if __name__ == "__main__":
    main()
