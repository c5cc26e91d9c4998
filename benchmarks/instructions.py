"""What bounds and tracing cost the brokers' cores, counted in instructions instead of time.

    python -m benchmarks.instructions [RESULT.json]

Time per message differs by more from run to run than what is to be found, on any machine with other
work. Valgrind counts the instructions that the compiled cores execute (`make compile` first), and counts
the same ones every time: those of `benchmarks.cores` within the functions that take and give frames.
An instruction is not a time, but the same code with a few more instructions takes a little more of it.
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.cores import Chain
from overlay.delay import LinkClock
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from runtime.compiled import compiled_modules

TOPICS: Final = 1_525
ROUNDS: Final = 20
# Whole names: of several patterns Valgrind heeds only the first.
COUNTED: Final = (
    "CPyPy_edge_broker___core___EdgeCore___admit_from_client",
    "CPyPy_edge_broker___core___EdgeCore___admit_from_broker",
    "CPyPy_routing_broker___core___RouterCore___admit",
    "CPyPy_outbox___Outbox___take_frames",
    "CPyPy_outbox___Outbox___acknowledge",
)
VARIANTS: Final = {
    "no bounds": (False, None),
    "bounds": (True, None),
    "bounds, 1 % traced": (True, 0.01),
    "bounds, 100 % traced": (True, 1.0),
}


def play(bounded: bool, sampling: float | None) -> None:
    """What is counted: some rounds of one message of every topic."""
    clock = LinkClock()
    now_ns = time.monotonic_ns()
    clock.helper(now_ns, now_ns, now_ns)
    chain = Chain(TOPICS, sampling, shift_at=clock.shift_at if bounded else _unknown)
    gc.disable()
    for _ in range(ROUNDS):
        chain.turn()
        chain.take_records()


def _unknown(_now_ns: int) -> int:
    return UNKNOWN_CLOCK_SHIFT


def count(variant: str) -> float:
    """Instructions per message of a variant, in all three cores together."""
    with tempfile.TemporaryDirectory(prefix="isthmus-instructions-") as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += [f"--toggle-collect={name}" for name in COUNTED]
        command += [sys.executable, "-m", "benchmarks.instructions", "--play", variant]
        # The same hashes every time, so that dictionaries are laid out alike.
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found.group(1)) / (TOPICS * ROUNDS)


def measure() -> dict[str, Any]:
    """All variants."""
    if not compiled_modules():
        raise SystemExit("the cores are interpreted: run make compile first")
    description = machine.describe()
    counts = {variant: count(variant) for variant in VARIANTS}
    return {
        "topics": TOPICS,
        "rounds": ROUNDS,
        "instructions_per_message": {variant: round(value, 1) for variant, value in counts.items()},
        "bounds_pct": round(100 * (counts["bounds"] / counts["no bounds"] - 1), 2),
        "traced_1_pct": round(100 * (counts["bounds, 1 % traced"] / counts["bounds"] - 1), 2),
        "traced_100_pct": round(100 * (counts["bounds, 100 % traced"] / counts["bounds"] - 1), 2),
        "machine": description,
    }


def main() -> None:
    """Count, or be counted."""
    if sys.argv[1:2] == ["--play"]:
        play(*VARIANTS[sys.argv[2]])
        return
    result = measure()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for variant, value in result["instructions_per_message"].items():
        sys.stdout.write(f"{variant:24} {value:8.0f} instructions per message\n")
    for name in ("bounds_pct", "traced_1_pct", "traced_100_pct"):
        sys.stdout.write(f"{name:24} {result[name]:+8.2f} %\n")


if __name__ == "__main__":
    main()
