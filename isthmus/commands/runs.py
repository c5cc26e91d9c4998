"""What commands that run something on a testbed share: options, and how people follow the run."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from isthmus.narrator import Narrator
from topology.drivers import DRIVERS, DRIVERS_HELP
from topology.wan_kind import WanKind

Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")


def run_options(report_dir: str, report_dir_help: str) -> Callable[[Command], Command]:
    """Where it runs, and what is left of it."""

    def add(command: Command) -> Command:
        for option in (
            click.option(
                "--report-dir",
                type=click.Path(path_type=Path, file_okay=False),
                default=Path(report_dir),
                show_default=True,
                help=report_dir_help,
            ),
            click.option(
                "--report/--no-report", default=True, help="Trace every message and end with a report."
            ),
            click.option("--keep", is_flag=True, help="Keep logs and records of the run."),
            click.option(
                "--json",
                "json_file",
                type=click.Path(path_type=Path, dir_okay=False, writable=True),
                metavar="FILE",
                help="Write the result as JSON.",
            ),
            click.option(
                "--driver",
                type=click.Choice(list(DRIVERS)),
                default="process",
                show_default=True,
                help=DRIVERS_HELP,
            ),
            click.option(
                "--wan",
                type=click.Choice([kind.value for kind in WanKind]),
                default=WanKind.AUTO.value,
                show_default=True,
                help="Who emulates the WAN of netns and compose: auto is tc netem where the kernel has it.",
            ),
        ):
            command = option(command)
        return command

    return add


async def narrated(console: Console, run: Callable[[Narrator], Awaitable[Result]]) -> Result:
    """Tell how a run goes while it does; SIGTERM ends it as Ctrl-C would."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    narrator = Narrator(console)
    with narrator.spinner():
        return await run(narrator)
