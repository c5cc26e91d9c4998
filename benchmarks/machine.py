"""What a result was measured with: commit, machine, versions. Saved beside every raw result."""

import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from runtime.compiled import compiled_modules


def describe() -> dict[str, Any]:
    """Commit and machine, as far as they can be found out."""
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD") or "unknown",
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "compiled": bool(compiled_modules()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": available_cores(),
        "memory_gib": memory_gib(),
        "load_average_before": os.getloadavg()[0],
    }


def processor() -> str:
    """The processor's own name for itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def available_cores() -> int:
    """How many cores this process may use."""
    return len(core_numbers()) or os.cpu_count() or 1


def core_numbers() -> list[int]:
    """The cores this process may use; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def confine(cores: Collection[int]) -> None:
    """Use these cores and no others; none means all."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def raise_file_limit() -> int:
    """Allow as many open files as the system lets us; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def memory_gib() -> float:
    """Physical memory."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def processor_time_s(pid: int) -> float:
    """Processor time a process has used so far; 0 where the system does not tell."""
    try:
        # The command's name, in parentheses, may hold spaces: count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_time_s() -> float:
    """Processor time that all processes of the machine have used so far; 0 where it is not told."""
    try:
        user, nice, system, _, _, interrupts, soft_interrupts = map(
            int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
        )
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    print(json.dumps(describe(), indent=1))
