"""The detection benchmark: what it reads in logs, how it sums up."""

from pathlib import Path

from benchmarks import detection


def test_times_of_losses_are_read_from_an_edges_log(tmp_path: Path) -> None:
    log = tmp_path / "edge.log"
    log.write_text(
        "2026-01-02T03:04:05.250+00:00 INFO    e edge: routing broker disconnected router=r-1 reason=lost\n"
        "2026-01-02T03:04:06.000+00:00 INFO    e edge: routing broker disconnected router=r-10 reason=lost\n"
        "2026-01-02T03:04:07.000+00:00 INFO    e edge: routing broker connected router=r-1\n"
    )
    (at_s,) = detection.losses_of("r-1", log)
    assert at_s % 60 == 5.25


def test_percentiles_are_times_that_were_measured() -> None:
    times = [float(number) for number in range(1, 101)]
    assert detection.spread(times) == {"noticed": 100, "p50_ms": 50.0, "p99_ms": 99.0, "max_ms": 100.0}
    assert detection.spread([]) == {"noticed": 0}
    result = {
        "false_alarms": 0,
        "busy_seconds": 5,
        "busy_cores": 2.0,
        "silence_ms": 50,
        "detection": {"SIGKILL": detection.spread([1.0]), "SIGSTOP": detection.spread([])},
    }
    assert "| SIGKILL | 1 | 1.0 | 1.0 | 1.0 |" in detection.summary(result)
    assert "| SIGSTOP | 0 | none | none | none |" in detection.summary(result)
