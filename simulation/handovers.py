"""When what clients have published without an edge has entered the overlay.

A client whose edge is dead or frozen keeps what it publishes, and hands it over when it has an edge again.
Whether anybody was there to receive it is asked then, not when it was published.
"""

from collections.abc import Iterable
from typing import Final

from overlay.limits import SECOND_NS
from simulation.nodes import ClientProcess, EdgeProcess

_TAKEN_BEFORE_NS: Final = SECOND_NS
"""What an edge took so long before it died it may not have passed on: that is handed over again."""
FOR_EVER_NS: Final = 2**63


class Handovers:
    """Remembers since when clients have had no edge, and when they had handed over everything."""

    def __init__(self) -> None:
        self._since_ns: dict[str, int] = {}
        """Clients that have something to hand over, and since when."""
        self._over: dict[str, list[tuple[int, int]]] = {}
        self._looked_ns = 0

    def look(self, clients: Iterable[ClientProcess], edges: Iterable[EdgeProcess], now_ns: int) -> None:
        """Called several times a second."""
        running = {edge.name for edge in edges if edge.is_running}
        for process in clients:
            client = process.client
            if client is None or not process.is_running:
                self._since_ns.pop(process.name, None)
            elif not client.is_connected or client.edge not in running:
                self._since_ns.setdefault(process.name, self._looked_ns - _TAKEN_BEFORE_NS)
            elif process.name in self._since_ns and client._is_idle:
                self.add(process.name, self._since_ns.pop(process.name), now_ns)
        self._looked_ns = now_ns

    def add(self, client: str, since_ns: int, until_ns: int) -> None:
        """What this client published in this time it had handed over at its end."""
        self._over.setdefault(client, []).append((since_ns, until_ns))

    def entered_ns(self, client: str, born_ns: int) -> int:
        """When a message of this client, born then, had entered the overlay at the latest."""
        if born_ns >= self._since_ns.get(client, FOR_EVER_NS):
            return FOR_EVER_NS
        spans = self._over.get(client, ())
        return max(
            (until_ns for since_ns, until_ns in spans if since_ns <= born_ns <= until_ns), default=born_ns
        )
