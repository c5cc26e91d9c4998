"""A listening socket that takes connections in, but no crowd at once: messages go first.

Each connection costs a broker time before anybody knows who it is. When as many as are taken at a time
have come, more probably wait; they wait in the kernel for a while, so that a crowd at the door gets a
share of the broker's time and not all of it. Who is honest waits a second at worst: the kernel holds no
more than are taken in that time.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from overlay.limits import CONNECTIONS_AT_A_TIME, CONNECTIONS_MAX_WAITING, CONNECTIONS_REST_NS, SECOND_NS

log = logging.getLogger("isthmus.door")

REST_S: Final = CONNECTIONS_REST_NS / SECOND_NS
_EXHAUSTED_REST_S: Final = 1.0


class Door:
    """Takes connections from one listening socket until closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        factory: Callable[[], asyncio.Protocol],
    ) -> None:
        """The socket is bound, does not block, and is the door's from now on."""
        self._loop = loop
        self._listening = listening
        self._factory = factory
        self._entering: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        listening.listen(CONNECTIONS_MAX_WAITING)
        self._open()

    async def close(self) -> None:
        """Take nobody any more; returns when those who were taken have been handed over."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        elif self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._entering:
            await asyncio.wait(self._entering)

    def _open(self) -> None:
        self._resting = None
        self._loop.add_reader(self._listening, self._take)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening)
        self._resting = self._loop.call_later(seconds, self._open)

    def _take(self) -> None:
        for _ in range(CONNECTIONS_AT_A_TIME):
            try:
                sock, _address = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("cannot take connections", extra={"error": str(error), "rest_s": _EXHAUSTED_REST_S})
                self._rest(_EXHAUSTED_REST_S)
                return
            sock.setblocking(False)
            entering = self._loop.create_task(self._enter(sock))
            self._entering.add(entering)
            entering.add_done_callback(self._entering.discard)
        self._rest(REST_S)

    async def _enter(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._factory, sock)
        except OSError as error:
            sock.close()
            log.debug("a connection went at once", extra={"error": str(error)})
