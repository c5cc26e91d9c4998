"""The same report on a real cluster: a master and two workers on loopback, from the pyspark package."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from coordinator.java import find_java
from tests.spark_analysis.nodes import MS, QOS, Overlay

SPARK_CLASS = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
TIMEOUT_S = 120.0


def environment() -> dict[str, str]:
    return {**os.environ, "JAVA_HOME": str(find_java().home), "SPARK_LOCAL_IP": "127.0.0.1"}


@contextlib.contextmanager
def running(log: Path, *arguments: str) -> Iterator[None]:
    """A Spark daemon; its words go to a file."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [SPARK_CLASS, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment()
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def wait_for(log: Path, pattern: str, count: int = 1) -> str:
    """The last of `count` matches in a log; fails after a while."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = re.findall(pattern, log.read_text()) if log.exists() else []
        if len(found) >= count:
            return str(found[-1])
        time.sleep(0.05)
    raise AssertionError(f"{pattern} is not in {log.read_text()[-2_000:]}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The URL of a master with two workers."""
    log = tmp_path / "master.log"
    at_loopback = ("--host", "127.0.0.1", "--webui-port", "0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            running(log, "org.apache.spark.deploy.master.Master", *at_loopback, "--port", "0")
        )
        url = wait_for(log, r"Starting Spark master at (spark://\S+)")
        for number in (1, 2):
            worker = ("org.apache.spark.deploy.worker.Worker", *at_loopback, "-c", "1", "-m", "1g")
            folder = str(tmp_path / f"worker-{number}")
            stack.enter_context(running(tmp_path / f"worker-{number}.log", *worker, "-d", folder, url))
        wait_for(log, r"Registering worker", count=2)
        yield url


@pytest.mark.slow
def test_the_report_runs_on_a_cluster(cluster: str, tmp_path: Path):
    overlay = Overlay(QOS)
    for sequence in range(1, 51):
        overlay.carry(sequence, sequence * 10 * MS, lost_at="router-1" if sequence == 20 else "")
    overlay.write(tmp_path / "traces")
    command = [sys.executable, "-m", "isthmus", "report", str(tmp_path / "traces")]
    command += ["--master", cluster, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "summary.json")]
    for setting in ("shuffle.partitions=2", "adaptive.enabled=false", "codegen.wholeStage=false"):
        command += ["--conf", f"spark.sql.{setting}"]
    # Four cold JVMs on small data: compiling thoroughly would take most of the time.
    for side in ("driver", "executor"):
        command += ["--conf", f"spark.{side}.extraJavaOptions=-XX:TieredStopAtLevel=1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(), timeout=2 * TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["messages"], summary["deliveries"], summary["lost"]) == (50, 49, 1)
    assert "50 messages, 49 deliveries, 1 lost" in done.stdout
    # Both workers ran a part of it.
    assert all(list((tmp_path / f"worker-{number}").glob("app-*/*/stderr")) for number in (1, 2))
