"""A soak whose watch over the brokers ended early proves nothing."""

import asyncio
from pathlib import Path

import pytest

from topology.children import Child
from topology.drills.soak import soaking
from topology.driver import DriverSettings
from topology.model import parse_topology
from topology.process_driver import ProcessDriver


class _Blind(ProcessDriver):
    async def start_helper(self, name: str, module: str, arguments: list[str], lan: str) -> Child:
        return Child(name, module, arguments, self.directory)

    def broker_pids(self) -> dict[str, int]:
        raise ZeroDivisionError("a bug of the checker")


async def test_a_watch_that_crashed_is_told(tmp_path: Path) -> None:
    driver = _Blind(parse_topology("lans: {a: {}}\nrouters: 1\n"), DriverSettings(directory=tmp_path))
    with pytest.raises(ZeroDivisionError):
        async with soaking(driver, 1):
            await asyncio.sleep(0)  # it looks for the first time
