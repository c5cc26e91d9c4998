"""A throttled process gets the share of a core it is given, and its old life back afterwards."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.machine import processor_time_s
from benchmarks.throttle import throttled


@pytest.fixture
def spinning() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="real-time priorities need root")
def test_a_process_gets_no_more_than_its_share(spinning: int) -> None:
    with throttled(spinning, max(os.sched_getaffinity(0))) as throttle:
        throttle.set_share(0.08)
        before_s, began_s = processor_time_s(spinning), time.monotonic()
        while processor_time_s(spinning) - before_s < 0.1:
            assert time.monotonic() - began_s < 60
            time.sleep(0.05)
        took_s = time.monotonic() - began_s
        used_s = processor_time_s(spinning) - before_s
        # Ticks of 10 ms, and waking up takes a moment.
        assert used_s / took_s < 0.12
        throttle.set_share(0.5)
