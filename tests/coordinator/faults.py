"""Faults against a real ZooKeeper, on purpose and at a chosen moment.

`FaultProxy` stands between a session and the server: it can stall, cut, refuse, and swallow answers.
`expire_session` ends a session the way the server does. `Fleet` makes sessions and coordinators
and takes them down again; `Resources` counts what must not leak.
"""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kazoo.client import KazooClient

from coordinator import Coordinator, Session, SessionState
from coordinator.fourletter import four_letter, parse_mntr

DEADLINE_S = 15.0
"""Longer than anything takes; a test that waits this long has failed."""
POLL_S = 0.005


async def eventually(condition: Callable[[], Any], what: str = "", deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `condition` holds, and return what it returned."""
    end_s = time.monotonic() + deadline_s
    while not (result := condition()):
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {deadline_s} s: {what or condition}")
        await asyncio.sleep(POLL_S)
    return result


class FaultProxy:
    """A TCP relay to the server, with switches."""

    def __init__(self, hosts: str) -> None:
        host, port = hosts.split(",", maxsplit=1)[0].rsplit(":", 1)
        self._target = (host, int(port))
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._swallowing = False
        self._refusing = False
        self._garbage: bytes | None = None
        self.swallowed_bytes = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.hosts = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._refusing = True
        self.resume()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def stall(self) -> None:
        """Let nothing through, in either direction, without closing anything."""
        self._open.clear()

    def resume(self) -> None:
        """Let everything through again, what was held back first."""
        self._swallowing = False
        self._open.set()

    def cut(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def refuse(self, refusing: bool) -> None:
        """Close new connections at once."""
        self._refusing = refusing

    def swallow_answers(self) -> None:
        """Let requests through and lose the answers."""
        self._swallowing = True

    def inject(self, garbage: bytes) -> None:
        """Put these bytes before the next answer."""
        self._garbage = garbage

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self._refusing:
                return
            answers, upstream = await asyncio.open_connection(*self._target)
            self._writers.add(upstream)
            pumps = [
                asyncio.ensure_future(self._pump(reader, upstream, answers=False)),
                asyncio.ensure_future(self._pump(answers, writer, answers=True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            for end in (writer, upstream):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._open.wait()
                if answers and self._swallowing:
                    self.swallowed_bytes += len(data)
                    continue
                if answers and self._garbage is not None:
                    writer.write(self._garbage)
                    self._garbage = None
                writer.write(data)
                await writer.drain()


def _end_session(hosts: str, credentials: tuple[int, bytes]) -> None:
    thief = KazooClient(hosts=hosts, client_id=credentials, timeout=4.0)
    thief.start(timeout=DEADLINE_S)
    thief.stop()
    thief.close()


async def expire_session(session: Session, hosts: str) -> None:
    """End the session at the server, and wait until the session has found out and has a new one."""
    assert session._client is not None
    before = session.statistics().expiries
    await asyncio.to_thread(_end_session, hosts, session._client.credentials)
    await eventually(lambda: session.statistics().expiries > before, "the session is lost")
    await eventually(lambda: session.state is SessionState.CONNECTED, "there is a new session")


async def lose_connection(session: Session) -> None:
    """Cut the TCP connection of a session, and wait until it is connected again."""
    assert session._client is not None
    before = session.statistics().reconnects
    session._client.drop_connection()
    await eventually(lambda: session.statistics().reconnects > before, "the session has reconnected")


async def server_watches(hosts: str) -> int:
    """How many watches the server holds, for everyone."""
    host, port = hosts.split(",", maxsplit=1)[0].rsplit(":", 1)
    # `wchs` leaves out watches on children, `mntr` counts all.
    return int(parse_mntr(await four_letter(host, int(port), "mntr"))["zk_watch_count"])


async def watches_become(hosts: str, expected: int) -> None:
    """Wait until the server holds so many watches."""
    end_s = time.monotonic() + DEADLINE_S
    while (held := await server_watches(hosts)) != expected:
        assert time.monotonic() < end_s, f"the server holds {held} watches, expected {expected}"


class Resources:
    """What a process holds that can leak."""

    def __init__(self) -> None:
        gc.collect()
        # Threads of the default executor belong to the test's own helpers and stay with the loop.
        self.threads = sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())
        self.tasks = len(asyncio.all_tasks())
        self.files = len(list(Path("/proc/self/fd").iterdir()))

    def within(self, other: "Resources") -> bool:
        """Whether nothing is held that was not held then."""
        return all(held <= vars(other)[name] for name, held in vars(self).items())

    def __repr__(self) -> str:
        return f"Resources({vars(self)})"


class Fleet:
    """Sessions and coordinators of one test, closed at its end in reverse order."""

    def __init__(self, hosts: str, chroot: str, *, session_timeout_s: float = 2.0) -> None:
        self.hosts = hosts
        self.chroot = chroot
        self._session_timeout_s = session_timeout_s
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def session(self, hosts: str | None = None, **options: Any) -> Session:
        options = {"session_timeout_s": self._session_timeout_s, **options}
        session = Session(hosts or self.hosts, self.chroot, **options)
        await session.start()
        self._stack.push_async_callback(session.close)
        return session

    async def coordinator(self, hosts: str | None = None, **options: Any) -> Coordinator:
        coordinator = Coordinator(await self.session(hosts), **options)
        await coordinator.start()
        self._stack.push_async_callback(coordinator.close)
        return coordinator

    async def proxy(self) -> FaultProxy:
        return await self._stack.enter_async_context(FaultProxy(self.hosts))


@contextlib.asynccontextmanager
async def no_leaks() -> AsyncIterator[None]:
    """Fail if threads, tasks or files are left over at the end."""
    before = Resources()
    yield
    try:
        await eventually(lambda: Resources().within(before))
    except AssertionError:
        raise AssertionError(f"not everything is freed: had {before}, have {Resources()}") from None
