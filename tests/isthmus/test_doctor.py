"""`isthmus doctor`: every check runs here, and what is missing is named with a remedy."""

import json
import resource

import pytest

from isthmus.commands import doctor
from isthmus.commands.doctor import Level
from runtime.clock import Drift
from tests.isthmus.run import isthmus


@pytest.mark.integration
async def test_this_machine_can_run_the_testbed(zookeeper_hosts: str) -> None:
    done = await isthmus("doctor", f"--zookeeper={zookeeper_hosts}", "--json")
    report = json.loads(done.output)
    assert done.status == 0, report
    assert report["ok"]
    levels = {check["check"]: check["level"] for check in report["checks"]}
    assert levels.keys() >= {"Python", "Java", "ZooKeeper jars", "ZooKeeper", "loopback addresses", "ports"}
    assert levels.keys() >= {"multicast, loopback", "privileges", "Docker", "clock", "open files", "size"}
    assert Level.PROBLEM not in levels.values()


@pytest.mark.integration
async def test_without_an_ensemble_the_embedded_server_is_tried() -> None:
    finding = await doctor.check_zookeeper(None)
    assert finding.level is Level.OK, finding


async def test_an_ensemble_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ZOOKEEPER_TIMEOUT_S", 0.2)
    finding = await doctor.check_zookeeper("127.0.0.1:1")
    assert finding.level is Level.PROBLEM
    assert "127.0.0.1:1" in finding.found
    assert finding.remedy


def test_java_is_needed_only_for_the_embedded_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> None:
        raise doctor.JavaNotFoundError("no Java 17 or newer: no java on PATH. Remedy: install one")

    monkeypatch.setattr(doctor, "find_java", nowhere)
    assert doctor.check_java(needed=True).level is Level.PROBLEM
    finding = doctor.check_java(needed=False)
    assert (finding.level, finding.remedy) == (Level.WARNING, "install one")


def test_an_address_that_cannot_be_bound_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    # 192.0.2.0/24 is for documentation: no machine has such an address on purpose.
    monkeypatch.setattr(doctor, "TESTBED_ADDRESSES", ("127.0.0.1", "192.0.2.200"))
    finding = doctor.check_addresses()
    assert finding.level is Level.PROBLEM
    assert "192.0.2.200" in finding.found


async def test_no_multicast_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = await doctor.check_multicast("multicast", "192.0.2.200")
    assert finding.level is Level.WARNING
    assert "--edge" in finding.remedy


def test_too_few_open_files_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert doctor.check_files().level is Level.PROBLEM
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert doctor.check_files().level is Level.WARNING


async def test_the_clock_alone_is_measured_for_as_long_as_asked() -> None:
    done = await isthmus("doctor", "--clock", "--clock-seconds=0.2", "--json")
    report = json.loads(done.output)
    assert done.status == 0, report
    assert [check["check"] for check in report["checks"]] == ["clock", "clock drift"]
    assert "ppm against the wall clock" in report["checks"][1]["found"]


@pytest.mark.parametrize(
    ("ppm", "uncertainty_ppm", "stepped", "level", "remedy"),
    [
        (30.0, 1.0, False, Level.OK, ""),
        (-30.0, 90.0, False, Level.WARNING, "--clock-seconds"),
        (250.0, 1.5, False, Level.WARNING, "--clock-drift-ppm 252"),
        (-250.0, 1.5, False, Level.WARNING, "--clock-drift-ppm 252"),
        (250.0, 1.5, False, Level.WARNING, "connect(..., drift_ppm=252)"),
        (-20_000.0, 1.5, False, Level.WARNING, "at most 10000 ppm"),
        (0.0, 1.0, True, Level.WARNING, "measure again"),
    ],
)
def test_a_drift_beyond_what_brokers_assume_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    ppm: float,
    uncertainty_ppm: float,
    stepped: bool,
    level: Level,
    remedy: str,
) -> None:
    monkeypatch.setattr(
        doctor, "measure_drift", lambda seconds, read: Drift(0.0, ppm, uncertainty_ppm, seconds, stepped)
    )
    finding = doctor.check_drift(1.0)
    assert finding.level is level
    assert remedy in finding.remedy
