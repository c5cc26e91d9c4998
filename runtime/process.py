"""Running one broker as a process: until a signal, then drain, then close."""

import asyncio
import contextlib
import logging
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol

from runtime.garbage import Garbage

log = logging.getLogger("isthmus.process")

SWITCH_INTERVAL_S: Final = 0.0005


class Service(Protocol):
    """Something with a life: brokers, mostly."""

    async def start(self) -> None:
        """Begin; returns when it serves."""
        ...

    async def drain(self) -> None:
        """Hand over what it holds; returns when others have it or the time is up."""
        ...

    async def close(self) -> None:
        """End; returns when everything it opened is gone."""
        ...


async def serve(service: Service, *, started: Callable[[], None] | None = None) -> None:
    """Run a service until SIGTERM or SIGINT: the first one drains, a second one ends at once."""
    # ZooKeeper's client has threads of its own: messages should not wait long for them.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _raise_file_limit()
    garbage = Garbage()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await service.start()
        if started is not None:
            started()
        garbage.start()
        setting_aside = loop.create_task(every(1.0, garbage.set_aside), name="garbage")
        try:
            await stop.wait()
        finally:
            setting_aside.cancel()
        log.info("draining")
        await _first_of(service.drain(), hurry.wait())
    finally:
        await service.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _raise_file_limit() -> None:
    """Every connection is an open file, and the usual limit of 1,024 is for programs that use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _first_of(*work: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(item) for item in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in pending:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()


async def wait_until(condition: Callable[[], bool], timeout_s: float, every_s: float = 0.02) -> bool:
    """Wait for a condition that nothing signals; says whether it came true in time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not condition():
        if loop.time() >= deadline_s:
            return False
        await asyncio.sleep(every_s)
    return True


class Background:
    """Background tasks of a broker: none is lost, none fails silently, all end with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run in the background; an exception is logged with its traceback."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Cancel what still runs and wait for it."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", extra={"task": task.get_name()}, exc_info=error)


async def every(interval_s: float, work: Callable[[], Awaitable[None] | None]) -> None:
    """Do something regularly, for ever.

    An error is logged and the next time comes: a broker that did no housekeeping any more would, among
    other things, never hear of a revoked token.
    """
    while True:
        await asyncio.sleep(interval_s)
        try:
            result = work()
            if result is not None:
                await result
        except Exception as error:
            log.error("regular work failed", exc_info=error)
