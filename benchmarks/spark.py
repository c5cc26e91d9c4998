"""`isthmus report` on generated traces: is every number right, how long, how much memory."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.machine import describe
from benchmarks.spark_traces import ROWS_MIN, Answers, generate
from overlay.errors import IsthmusError
from spark_analysis.histograms import PERCENTILES, RELATIVE_ERROR

REPORT_TIMEOUT_S: Final = 1_800
POLL_S: Final = 0.2


class SparkBenchmarkError(IsthmusError):
    """The benchmark cannot be run, or the report failed."""


@dataclass(frozen=True, slots=True)
class Point:
    """One size."""

    rows: int
    messages: int
    generate_s: float
    report_s: float
    """The whole command, from the start of its process to its end."""
    us_per_row: float
    traces_mib: float
    jvm_peak_mib: float
    python_peak_mib: float
    numbers_checked: int
    wrong: list[str] = field(default_factory=list)
    worst_percentile_error_pct: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """All sizes."""

    points: list[Point]
    master: str
    allowed_percentile_error_pct: float
    machine: dict[str, Any]

    def to_record(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def measure(sizes: Sequence[int], master: str, seed: int, tell: Callable[[str], None]) -> Result:
    """Generate, report and check each size. Raises SparkBenchmarkError."""
    if min(sizes) < ROWS_MIN:
        raise SparkBenchmarkError(
            f"{min(sizes)} rows are too few for known answers: give at least {ROWS_MIN}"
        )
    machine = describe()
    points = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as name:
            points.append(_measure_size(Path(name), size, master, seed, tell))
    return Result(points, master, round(100 * RELATIVE_ERROR, 4), machine)


def _measure_size(folder: Path, size: int, master: str, seed: int, tell: Callable[[str], None]) -> Point:
    tell(f"{size:,} rows: generating")
    started = time.monotonic()
    answers = generate(folder / "traces", size, seed)
    generate_s = time.monotonic() - started
    traces_bytes = sum(path.stat().st_size for path in (folder / "traces").rglob("*.parquet"))
    tell(f"{answers.rows:,} rows: reporting")
    started = time.monotonic()
    peaks = _run_report(folder, master)
    report_s = time.monotonic() - started
    checker = Checker(answers, json.loads((folder / "report.json").read_text()))
    checker.check()
    return Point(
        rows=answers.rows,
        messages=sum(topic.messages for topic in answers.topics.values()),
        generate_s=round(generate_s, 1),
        report_s=round(report_s, 1),
        us_per_row=round(report_s * 1e6 / answers.rows, 3),
        traces_mib=round(traces_bytes / 2**20, 1),
        jvm_peak_mib=peaks.get("java", 0.0),
        python_peak_mib=peaks.get("python", 0.0),
        numbers_checked=checker.checked,
        wrong=checker.wrong,
        worst_percentile_error_pct=round(100 * checker.worst_error, 4),
    )


def _run_report(folder: Path, master: str) -> dict[str, float]:
    """Run the command; returns the peak memory in MiB of its Java and Python processes."""
    command = [sys.executable, "-m", "isthmus", "report", str(folder / "traces"), "--master", master]
    command += ["--out", str(folder / "out"), "--json", str(folder / "report.json")]
    environment = {**os.environ, "SPARK_LOCAL_DIRS": str(folder / "spark")}
    peaks: dict[str, float] = {}
    with (folder / "log").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                for pid in (process.pid, *_children(process.pid)):
                    name, peak_mib = _peak(pid)
                    peaks[name] = max(peaks.get(name, 0.0), peak_mib)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            output.seek(0)
            raise SparkBenchmarkError(
                f"isthmus report ended with status {process.returncode}: {output.read()[-2_000:]}"
            )
    return peaks


def _children(pid: int) -> list[int]:
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []
    return found + [below for child in found for below in _children(child)]


def _peak(pid: int) -> tuple[str, float]:
    """What kind of process it is, and its largest resident memory so far."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone", 0.0
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    name = "python" if "python" in fields.get("Name", "") else fields.get("Name", "").strip()
    return name, round(int(fields.get("VmHWM", "0 kB").split()[0]) / 1024, 1)


class Checker:
    """Compares a report with what is known."""

    def __init__(self, answers: Answers, report: dict[str, Any]) -> None:
        self._answers = answers
        self._report = report
        self.checked = 0
        self.wrong: list[str] = []
        self.worst_error = 0.0

    def check(self) -> None:
        """Look at every number that is known."""
        known = self._answers
        topics = {row["topic"]: row for row in self._report["topics"]}
        links = {row["link"]: row for row in self._report["links"]}
        exact = (
            "messages",
            "deliveries",
            "lost",
            "longest_loss_run",
            "unaccounted",
            "duplicates_dropped",
            "bound_violations",
        )
        for name, topic in known.topics.items():
            row = topics.get(name, {})
            for field_name in (*exact, "in_time"):
                self._exactly(f"{name} {field_name}", row.get(field_name), getattr(topic, field_name))
            share = round(100 * topic.in_time / (topic.deliveries + topic.lost), 4)
            self._exactly(f"{name} deadline_hit_pct", row.get("deadline_hit_pct"), share)
            self._percentiles(name, row, np.concatenate(topic.ages_ns))
        for name, parts in known.links.items():
            crossings = np.concatenate(parts)
            row = links.get(name, {})
            # Messages that came twice crossed the link from the router twice: the first crossing counts.
            self._exactly(f"{name} count", row.get("count"), len(crossings))
            self._percentiles(name, row, crossings)
        for total in ("messages", "lost", "unaccounted", "bound_violations"):
            wanted = sum(getattr(topic, total) for topic in known.topics.values())
            self._exactly(total, self._report[total], wanted)
        self._exactly("problems", len([text for text in self._report["problems"] if "read" in text]), 0)

    def _exactly(self, what: str, found: Any, wanted: Any) -> None:
        self.checked += 1
        if found != wanted:
            self.wrong.append(f"{what} is {found}, must be {wanted}")

    def _percentiles(self, what: str, row: dict[str, Any], durations_ns: Any) -> None:
        ordered = np.sort(durations_ns)
        for name, share in PERCENTILES.items():
            wanted_ms = ordered[int(np.ceil(share * len(ordered))) - 1] / 1e6
            found_ms = row.get(name)
            self.checked += 1
            error = abs(found_ms - wanted_ms) / wanted_ms if found_ms is not None else 1.0
            self.worst_error = max(self.worst_error, error)
            # Six decimals of a millisecond are written.
            if error > RELATIVE_ERROR + 1e-6:
                self.wrong.append(
                    f"{what} {name} is {found_ms}, must be {wanted_ms} within {RELATIVE_ERROR:.2%}"
                )


def table(result: Result) -> str:
    """For people."""
    heads = ("rows", "report s", "µs/row", "JVM MiB", "Python MiB", "checked", "wrong")
    widths = (12, 9, 8, 8, 10, 8, 6)
    lines = [" ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    lines += [
        f"{point.rows:>12,} {point.report_s:>9.1f} {point.us_per_row:>8.2f} {point.jvm_peak_mib:>8.0f} "
        f"{point.python_peak_mib:>10.0f} {point.numbers_checked:>8} {len(point.wrong):>6}"
        for point in result.points
    ]
    wrong = [text for point in result.points for text in point.wrong]
    return "\n".join([*lines, *wrong[:20]])
