"""`isthmus bench frame` and `isthmus bench crashes`: FRAME's experiment and a long row of crashes."""

import asyncio
import json
from pathlib import Path

import click

from benchmarks import frame as frame_benchmark
from benchmarks import frame_crashes, frame_matrix
from benchmarks.frame_testbed import PINNINGS, Setup
from benchmarks.frame_workload import TOPICS_LEAST
from isthmus.errors import explain_errors
from routing_broker.mode import Mode


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.option("--topics", type=click.IntRange(TOPICS_LEAST), default=1_525, show_default=True)
@click.option(
    "--config", "mode", type=click.Choice([mode.value for mode in Mode]), default="frame", show_default=True
)
@click.option(
    "--seconds", type=click.FloatRange(1), default=20.0, show_default=True, help="Time that is measured."
)
@click.option("--crash", is_flag=True, help="Kill the primary in the middle of the measured time.")
@click.option("--warm-up", "warm_up_s", type=click.FloatRange(0), default=5.0, show_default=True)
@click.option("--pin", "pinning", type=click.Choice(list(PINNINGS)), default="none", show_default=True)
@click.option("--nice", "niceness", type=click.IntRange(-20, 19), default=0, show_default=True)
@click.option("--session-timeout-s", type=click.FloatRange(1), default=4.0, show_default=True)
@click.option("--silence-ms", type=click.FloatRange(30), default=1_000.0, show_default=True)
@click.option("--keep-logs", is_flag=True, help="Leave the logs of all processes.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@click.option(
    "--all", "everything", is_flag=True, help="All configurations; tables beside the paper's, a plot."
)
@click.option(
    "--sizes",
    default="1525,7525",
    show_default=True,
    metavar="N,N,...",
    help="With --all: numbers of topics.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("frame-results"),
    help="With --all.",
)
@click.option("--resume", is_flag=True, help="With --all: keep the results that are in --out already.")
@click.option(
    "--at-most-s", type=click.FloatRange(0), help="With --all: begin no run after so long; --resume goes on."
)
@explain_errors
def frame(
    topics: int,
    mode: str,
    seconds: float,
    crash: bool,
    warm_up_s: float,
    pinning: str,
    niceness: int,
    session_timeout_s: float,
    silence_ms: float,
    keep_logs: bool,
    file: Path | None,
    everything: bool,
    sizes: str,
    out: Path,
    resume: bool,
    at_most_s: float | None,
) -> None:
    """Run FRAME's workload (Table 2) through real brokers and see which promises are kept."""
    settings = frame_benchmark.Settings(
        Setup(topics, mode, pinning, niceness, session_timeout_s, silence_ms, keep_logs),
        seconds,
        crash,
        warm_up_s,
    )
    if everything:
        matrix = frame_matrix.Matrix(
            [int(size) for size in sizes.split(",")], resume=resume, at_most_s=at_most_s
        )
        out.mkdir(parents=True, exist_ok=True)
        results = asyncio.run(frame_matrix.measure(matrix, settings, out, _say))
        if not results:
            raise click.ClickException("no run came to its end")
        click.echo(asyncio.run(frame_matrix.report(results, out, _say)))
        return
    result = asyncio.run(frame_benchmark.measure(settings, _say))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(frame_benchmark.summary(result))


@click.command()
@click.option("--count", type=click.IntRange(1), default=200, show_default=True, help="Crashes in a row.")
@click.option("--topics", type=click.IntRange(TOPICS_LEAST), default=115, show_default=True)
@click.option("--config", "mode", type=click.Choice([mode.value for mode in Mode]), default="frame")
@click.option("--seed", type=int, default=1, show_default=True, help="Decides whom and when.")
@click.option("--session-timeout-s", type=click.FloatRange(1), default=2.0, show_default=True)
@click.option("--silence-ms", type=click.FloatRange(30), default=1_000.0, show_default=True)
@click.option("--keep-logs", is_flag=True, help="Leave the logs of all processes.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the raw result here."
)
@explain_errors
def crashes(
    count: int,
    topics: int,
    mode: str,
    seed: int,
    session_timeout_s: float,
    silence_ms: float,
    keep_logs: bool,
    file: Path | None,
) -> None:
    """Kill routing brokers at random moments, again and again; fails if a promise is broken."""
    setup = Setup(
        topics,
        mode,
        session_timeout_s=session_timeout_s,
        silence_ms=silence_ms,
        keep_logs=keep_logs,
        equal_capacity=True,
    )
    result = asyncio.run(frame_crashes.measure(frame_crashes.Settings(setup, count, seed), _say))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(frame_crashes.summary(result))
    if not result["ok"]:
        raise SystemExit(1)
