"""What processes use: read from /proc, and a leak is told from noise."""

import os
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.drills.resources import MIB, Record, Use, flat, grown, look
from topology.promises import Promise

COUNT = 300
TIMES = [2.0 * number for number in range(COUNT)]
KEY = ("router-1", 7)


def judge(
    memory: Sequence[float], descriptors: Sequence[float] = (), threads: Sequence[float] = ()
) -> Promise:
    uses = [
        Use(int(memory[i]), int(descriptors[i]) if descriptors else 30, int(threads[i]) if threads else 5)
        for i in range(COUNT)
    ]
    return flat({KEY: TIMES}, {KEY: uses})


def test_this_process_is_seen() -> None:
    use = look(os.getpid())
    assert use is not None
    assert use.memory_bytes > 10 * MIB and use.descriptors >= 3 and use.threads >= 1
    assert look(2**22 + 1) is None
    record = Record()
    record.add(0.0, {"me": os.getpid(), "gone": 2**22 + 1})
    record.add(1.0, {"me": os.getpid()})
    assert record.promise().held and "1 processes" in record.promise().detail


@given(st.integers(0, 1000), st.floats(0, 4))
def test_noise_is_no_leak(seed: int, noise_mib: float) -> None:
    randomness = random.Random(seed)
    memory = [50 * MIB + randomness.uniform(-noise_mib, noise_mib) * MIB for _ in range(COUNT)]
    assert judge(memory, descriptors=[30 + randomness.randrange(8) for _ in range(COUNT)]).held


def test_warming_up_is_no_leak_and_a_leak_is() -> None:
    warm = [min(50 * MIB, 20 * MIB + number * MIB) for number in range(COUNT)]
    assert judge(warm).held
    leak = [50 * MIB + number * 15 * MIB / COUNT for number in range(COUNT)]
    broken = judge(leak)
    assert not broken.held and "memory_bytes of router-1 grew by" in broken.detail
    assert not judge(warm, descriptors=[30 + number / 8 for number in range(COUNT)]).held
    assert not judge(warm, threads=[5 + number / 60 for number in range(COUNT)]).held


def test_without_evidence_nothing_is_flat() -> None:
    assert not flat({}, {}).held
    late = {KEY: TIMES, ("router-4", 9): TIMES[-20:]}
    uses = {key: [Use(MIB, 3, 1)] * len(times) for key, times in late.items()}
    assert flat(late, uses).held and "of 1 processes" in flat(late, uses).detail


@given(st.floats(-5, 5), st.floats(0, 100))
def test_growth_is_that_of_a_line(slope: float, level: float) -> None:
    values = [level + slope * at_s for at_s in TIMES]
    growth, begins = grown(TIMES, values, 100.0)
    assert growth == pytest.approx(slope * (TIMES[-1] - 100.0), abs=1e-6)
    assert begins == pytest.approx(level + slope * 100.0, abs=1e-6)
