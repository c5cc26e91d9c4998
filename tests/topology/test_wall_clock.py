"""A wall clock that is shifted for one process: that process sees it at once, its timing does not."""

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

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
