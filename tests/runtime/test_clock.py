"""How the drift of a clock is found out."""

from collections.abc import Callable, Iterator

import pytest

from runtime.clock import ClockReading, measure_drift, read_clocks


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], ClockReading]]:
    """Clocks of a simulated second each, with a given drift in ppm; nobody really sleeps."""
    monkeypatch.setattr("runtime.clock.time.sleep", lambda seconds: None)

    def made(
        ppm: int, raw_ppm: int = 0, uncertainty_ns: int = 100, set_after: int = 10**9
    ) -> Callable[[], ClockReading]:
        def run() -> Iterator[ClockReading]:
            for second in range(10**6):
                real_ns = second * 10**9
                wall_ns = real_ns + (3_600 * 10**9 if second >= set_after else 0)
                yield ClockReading(
                    real_ns + second * ppm * 1000, real_ns + second * raw_ppm * 1000, wall_ns, uncertainty_ns
                )

        values = run()
        return lambda: next(values)

    return made


@pytest.mark.parametrize("ppm", [-300, -20, 0, 50, 1_000])
def test_the_drift_is_what_the_clocks_show(readings, ppm: int) -> None:
    drift = measure_drift(10, readings(ppm, 2 * ppm))
    assert drift.ppm == pytest.approx(ppm, abs=1.1)
    assert drift.raw_ppm == pytest.approx(2 * ppm, abs=2.1)
    assert drift.uncertainty_ppm == pytest.approx(0.02, rel=0.2)
    assert drift.seconds >= 10
    assert not drift.stepped


def test_a_wall_clock_that_is_set_spoils_the_measurement(readings) -> None:
    assert measure_drift(10, readings(0, set_after=5)).stepped
    assert not measure_drift(10, readings(0, set_after=50)).stepped


def test_the_clocks_of_this_machine_can_be_read() -> None:
    first, second = read_clocks(), read_clocks()
    assert second.monotonic_ns > first.monotonic_ns
    assert second.raw_ns > first.raw_ns
    assert 0 < first.uncertainty_ns < 10**7
