"""`isthmus bench frame --all`: FRAME's runs one after the other, their tables and the plot."""

import asyncio
import json
import sys
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


async def measure(
    matrix: Matrix, settings: frame.Settings, directory: Path, say: Say
) -> list[dict[str, Any]]:
    """Do all runs and write each result; a run that fails is told and left out."""
    results: list[dict[str, Any]] = []
    for topics in matrix.topics:
        for config in matrix.configs:
            for crash in matrix.crashes:
                name = f"{topics}-{config}-{'crash' if crash else 'calm'}"
                say(f"== {name}")
                chosen = replace(
                    settings, crash=crash, setup=replace(settings.setup, topics=topics, mode=config)
                )
                try:
                    result = await frame.measure(chosen, say)
                except DriverError as error:
                    say(f"{name} failed: {error}")
                    continue
                file = directory / f"{name}.json"
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
