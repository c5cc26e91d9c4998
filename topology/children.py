"""A process of the testbed, as the testbed sees it: its log, its news, its end."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from topology.errors import DriverError
from topology.lines import LINE_MAX_BYTES, encode_line

STOP_TIMEOUT_S: Final = 5.0
HURRY_AFTER_S: Final = 0.3
"""A broker drains on the first SIGTERM; after this long a second one tells it that all others end too."""
LOG_TAIL_LINES: Final = 15
LOG_TAIL_MAX_BYTES: Final = 64 * 1024
EVENTS_MAX: Final = 1_000


def child_environment() -> dict[str, str]:
    """The environment of every process of the testbed: ours, without settings meant for one broker."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS_")}
    # The sources may be a checkout that is not installed, and the working directory is another one.
    sources = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sources))
    return environment


class Child:
    """One process. Ends with the testbed at the latest, however the testbed ends."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        directory: Path,
        namespace: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """With `namespace`, the file of a network namespace, the process lives in that."""
        self.name = name
        self._environment = environment
        self._place = ("--namespace", str(namespace)) if namespace is not None else ()
        self.log_path = directory / f"{name}.log"
        self._module = module
        self._arguments = list(arguments)
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=EVENTS_MAX)
        self._ended_by_us = False
        self._handle = -1
        """A pidfd. Signals go through it: a pid may be somebody else's once its process has ended."""

    async def start(self) -> None:
        """Start the process; what it logs is appended to its log."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "topology.launcher", str(os.getpid()), *self._place, self._module),
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self._directory,
                env={**child_environment(), **self._environment},
                # Ctrl-C reaches every process of the terminal's group; these end when we say so.
                start_new_session=True,
                limit=LINE_MAX_BYTES,
            )
        self._handle = os.pidfd_open(self._process.pid)
        self._reader = asyncio.create_task(self._read_events(self._process), name=f"read {self.name}")

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_alive(self) -> bool:
        """Whether the process runs (or is frozen)."""
        return self._process is not None and self._process.returncode is None

    @property
    def died_unasked(self) -> bool:
        """The process ended and we did not make it end."""
        return self._process is not None and self._process.returncode is not None and not self._ended_by_us

    async def next_event(self, timeout_s: float) -> dict[str, Any]:
        """The next line the process prints. Raises DriverError if it ends or takes too long."""
        assert self._reader is not None
        getting = asyncio.ensure_future(self._events.get())
        done, _ = await asyncio.wait(
            {getting, self._reader}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if getting in done:
            return getting.result()
        getting.cancel()
        if not self._events.empty():
            return self._events.get_nowait()
        if self._reader in done:
            await self._wait(STOP_TIMEOUT_S)
            raise self.failure(f"ended with {self._exit_text()}")
        raise self.failure(f"said nothing for {timeout_s:.1f} s", "the machine may be overloaded")

    async def send(self, command: str, **fields: Any) -> None:
        """Give a helper process a command."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(encode_line({"command": command, **fields}))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            await self._wait(STOP_TIMEOUT_S)
            raise self.failure(f"ended with {self._exit_text()}") from None

    async def ask(self, command: str, answer_within_s: float, **fields: Any) -> dict[str, Any]:
        """Give a command and wait for its answer, the event of the same name."""
        await self.send(command, **fields)
        return await self.wait_for(command, answer_within_s)

    async def wait_for(self, event: str, timeout_s: float) -> dict[str, Any]:
        """Wait for an event, passing over others."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while (left_s := deadline_s - loop.time()) > 0:
            content = await self.next_event(left_s)
            if content.get("event") == event:
                return content
        raise self.failure(f"did not say {event!r} within {timeout_s:.1f} s", "the machine may be overloaded")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self._handle >= 0:
            if number is signal.SIGKILL and self.is_alive:
                self._ended_by_us = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    async def kill(self) -> None:
        """End the process as a crash would and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self._wait(STOP_TIMEOUT_S)

    async def drain(self, timeout_s: float) -> None:
        """Ask the process to hand over and end; raises DriverError if it does not in time, or had before."""
        if not self.is_alive:
            raise self.failure(f"had ended with {self._exit_text()} before it was asked to")
        self._ended_by_us = True
        self.signal(signal.SIGTERM)
        if not await self._wait(timeout_s):
            raise self.failure(f"did not end within {timeout_s:g} s after SIGTERM")

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask the process to end, then insist; returns when it is gone."""
        if self._process is None:
            return
        if self.is_alive:
            self._ended_by_us = True
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            if not await self._wait(min(HURRY_AFTER_S, timeout_s)):
                self.signal(signal.SIGTERM)
                if not await self._wait(timeout_s):
                    self.signal(signal.SIGKILL)
        await self._wait(STOP_TIMEOUT_S)
        assert self._reader is not None and self._process.stdin is not None
        self._process.stdin.close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._reader.cancel()
        await asyncio.wait({self._reader})

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> list[str]:
        """The last lines of the log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_MAX_BYTES))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except FileNotFoundError:
            return []

    def failure(self, what: str, remedy: str = "") -> DriverError:
        """An error about this process, with its last words."""
        tail = "\n".join(f"  {line}" for line in self.log_tail()) or "  (nothing was logged)"
        return DriverError(
            f"{self.name} {what}{': ' + remedy if remedy else ''}. Its log {self.log_path} ends with\n{tail}"
        )

    async def _read_events(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, Mapping):
                await self._events.put(dict(content))

    async def _wait(self, timeout_s: float) -> bool:
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _exit_text(self) -> str:
        status = self._process.returncode if self._process is not None else None
        if status is not None and status < 0:
            return signal.Signals(-status).name
        return f"status {status}"
