"""Putting retained messages together for a new routing broker."""

from librt.strings import read_i64_le

from edge_broker.model import Route
from overlay.batch import BORN_OFFSET, Run
from overlay.limits import FRAME_TARGET_BYTES


class Resending:
    """Retained messages on their way to a new routing broker, put together into runs.

    Messages of one route born in the same granule of time make one run, in the order they were added.
    Those of unknown age stay alone and in their place, because what follows must not overtake them.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[Route, int], list[bytes]] = {}
        self._sizes: dict[tuple[Route, int], int] = {}
        self._done: list[tuple[Route, Run]] = []

    def add(self, route: Route, message: bytes) -> None:
        """Send this again, after what was added before it."""
        born_ns = read_i64_le(message, BORN_OFFSET)
        if not born_ns:
            self._finish()
            self._done.append((route, Run(1, message)))
            return
        key = (route, born_ns & -route.granule_ns)
        size = self._sizes.get(key, 0) + len(message)
        if size > FRAME_TARGET_BYTES:
            self._finish()
            size = len(message)
        self._sizes[key] = size
        self._runs.setdefault(key, []).append(message)

    def take(self) -> list[tuple[Route, Run]]:
        """All runs so far, in an order that keeps each publisher's."""
        self._finish()
        done, self._done = self._done, []
        return done

    def _finish(self) -> None:
        # The oldest first: the deadlines of two neighbouring granules may be the same for an outbox.
        for (route, _), messages in sorted(self._runs.items(), key=_born):
            self._done.append((route, Run(len(messages), b"".join(messages))))
        self._runs.clear()
        self._sizes.clear()


def _born(item: tuple[tuple[Route, int], list[bytes]]) -> int:
    (_, born_ns), _ = item
    return born_ns
