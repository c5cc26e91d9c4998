"""`isthmus bench frame --all`: FRAME's runs one after the other, their tables and the plot."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import frame
from benchmarks.frame_report import CONFIGS, tables
from benchmarks.frame_testbed import Say
from topology.errors import DriverError


@dataclass(frozen=True, slots=True)
class Matrix:
    """What to run: every size with every configuration, with and without a crash."""

    topics: Sequence[int]
    configs: Sequence[str] = CONFIGS
    crashes: Sequence[bool] = (True, False)
    resume: bool = False
    """Take results that are there already instead of running them again."""
    at_most_s: float | None = None
    """Begin no run after this time."""


async def measure(
    matrix: Matrix, settings: frame.Settings, directory: Path, say: Say
) -> list[dict[str, Any]]:
    """Do all runs and write each result; a run that fails is told and left out."""
    results: list[dict[str, Any]] = []
    began_s = time.monotonic()
    for crash in matrix.crashes:
        for topics in matrix.topics:
            for config in matrix.configs:
                name = f"{topics}-{config}-{'crash' if crash else 'calm'}"
                file = directory / f"{name}.json"
                if matrix.resume and file.exists():
                    results.append(json.loads(await asyncio.to_thread(file.read_text, "utf-8")))
                    continue
                if matrix.at_most_s is not None and time.monotonic() - began_s > matrix.at_most_s:
                    say(f"{name} is left for the next time")
                    continue
                say(f"== {name}")
                chosen = replace(
                    settings, crash=crash, setup=replace(settings.setup, topics=topics, mode=config)
                )
                try:
                    result = await frame.measure(chosen, say)
                except DriverError as error:
                    say(f"{name} failed: {error}")
                    continue
                await asyncio.to_thread(file.write_text, json.dumps(result, indent=1) + "\n", "utf-8")
                say(frame.summary(result))
                results.append(result)
    return results


async def report(results: Sequence[dict[str, Any]], directory: Path, say: Say) -> str:
    """Write the tables and, for the size nearest the paper's 7,525 topics, the plot."""
    text = tables(results)
    plotted = min((item["topics"] for item in results), key=lambda topics: abs(topics - 7_525))
    await asyncio.to_thread((directory / "frame.md").write_text, text, "utf-8")
    sources = [
        f"{plotted}-{item['config']}-crash.json"
        for item in results
        if item["topics"] == plotted and item["crash"]
    ]
    if sources:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.frame_plot"),
            *(str(directory / source) for source in sources),
            str(directory / "frame-recovery.png"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            say(f"no plot ({last}): it needs matplotlib, pip install 'isthmus[bench]'")
    return text
