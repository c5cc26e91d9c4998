"""A wall clock that is shifted for one process: that process sees it at once, its timing does not."""

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from topology.errors import DriverError
from topology.model import load_topology
from topology.severable_driver import ShiftableDriver
from topology.wall_clock import WallClock

ASK = """
import sys, time, datetime
for line in sys.stdin:
    print(time.time(), datetime.datetime.now().timestamp(), time.monotonic(), flush=True)
"""
NEAR_S = 30.0
"""A busy machine may take its time; a shift is much longer."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
async def test_only_the_wall_clock_of_that_process_is_shifted(tmp_path: Path) -> None:
    clock = await WallClock.make(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ASK),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **clock.environment},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for shift_s in (0.0, -3600.0, 86_400.0, 0.0):
            clock.shift(shift_s)
            process.stdin.write(b"\n")
            answer = await asyncio.wait_for(process.stdout.readline(), 20.0)
            wall_s, datetime_s, monotonic_s = map(float, answer.split())
            assert wall_s - time.time() == pytest.approx(shift_s, abs=NEAR_S)
            assert datetime_s - time.time() == pytest.approx(shift_s, abs=NEAR_S)
            assert monotonic_s == pytest.approx(time.monotonic(), abs=NEAR_S)
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 20.0)


async def test_a_broker_that_does_not_see_the_shift_is_told_of(tmp_path: Path, monkeypatch) -> None:
    """Else a drill would hold because nothing happened."""
    driver = ShiftableDriver(load_topology("two-lans"))
    (tmp_path / "offset").touch()
    driver._clock = WallClock(tmp_path / "none.so", tmp_path / "offset")
    monkeypatch.setattr(ShiftableDriver, "nodes", {"edge-1": SimpleNamespace(is_alive=True)})

    async def time_of_day_s(name: str) -> float:
        return time.time() - shown_s

    monkeypatch.setattr(driver, "time_of_day_s", time_of_day_s)
    shown_s = 3600.0
    await driver.shift_wall_clock(-3600.0)
    shown_s = 0.0
    with pytest.raises(DriverError, match=r"edge-1 is -?[01] s ahead of the machine's clock, not -3600"):
        await driver.shift_wall_clock(-3600.0)
