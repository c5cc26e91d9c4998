"""The way from kazoo's threads to the event loop."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger(__name__)


class Inbox:
    """Calls from other threads, made on the event loop in the order they came.

    Many calls wake the loop once: waking it is dear, and answers come by the hundred.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._noticed = False

    def put(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have something called on the loop; from any thread."""
        self._calls.append((call, arguments))
        if self._noticed:
            return
        self._noticed = True
        try:
            self._loop.call_soon_threadsafe(self._empty)
        except RuntimeError:
            # The loop was closed under a session nobody closed; there is no one left to tell.
            _logger.debug("a ZooKeeper event came after the event loop had closed")

    def _empty(self) -> None:
        # Cleared first: what is put in from now on is either seen below or noticed anew.
        self._noticed = False
        try:
            while self._calls:
                call, arguments = self._calls.popleft()
                call(*arguments)
        finally:
            if self._calls:
                self._loop.call_soon(self._empty)
