"""Tells people how a run on the testbed goes."""

import time

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.text import Text

from topology.observer import Observer


class Narrator(Observer):
    """Tells the story line by line; on a terminal the last line says what is going on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[dim]{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def spinner(self) -> Progress:
        """Shows, on a terminal, what is going on; a context manager."""
        return self._bar

    def say(self, text: str) -> None:
        style = "bold red" if text.startswith("killed") else ""
        line = Text(f"{time.monotonic() - self._started_s:5.1f} s  ", style="dim").append(
            text, style=style or "none"
        )
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def progress(self, text: str) -> None:
        self._bar.update(self._task, description=text)
