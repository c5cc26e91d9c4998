"""The control socket of an emulated WAN, as its process sees it, and the commands all of them know.

A Unix socket takes one JSON object per line and answers with one:

    {"command": "link", "a": SITE, "b": SITE, "one_way": false, "changes": {"delay_ms": 250, "loss": 0.01}}
    {"command": "cut" | "heal", "a": SITE, "b": SITE, "one_way": false}
    {"command": "attach", "name": HOST, "site": SITE, "address": ADDRESS, ...}
    {"command": "detach", "name": HOST}
    {"command": "statistics"}
    {"command": "watch"}

`attach` puts a host on the WAN; `detach` takes it off. `watch` begins the lateness anew: while everything
starts at once, it says nothing about what comes after. An answer with `error` says what was wrong. Python
calls `topology.wan_control`.
"""

import contextlib
import json
import os
import select
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final, Protocol

from runtime.datagrams import Seal
from topology.conditions import CONDITION_NAMES, LinkConditions
from topology.errors import DriverError, TopologyError
from topology.flow_tap import FlowTap
from topology.lane import Lane

REQUEST_MAX_BYTES: Final = 64 * 1024
CONTROLS_MAX: Final = 16
DESCRIPTORS_MAX: Final = 2
"""That come with one request: those of a device."""

Answer = Callable[[Mapping[str, Any], list[int]], dict[str, Any]]
"""Carries out a request; of the descriptors that came along it removes those it keeps."""


class AnyLane(Protocol):
    """One direction between two sites, whoever emulates it."""

    conditions: LinkConditions

    @property
    def is_cut(self) -> bool:
        """Nothing passes."""

    @is_cut.setter
    def is_cut(self, cut: bool) -> None: ...

    def change(self, conditions: LinkConditions) -> None:
        """Other conditions for what enters from now on."""

    def record(self) -> dict[str, Any]:
        """What has passed: at least packets and bytes."""


class Wan:
    """Sites and the lanes between them. Knows no device and no clock."""

    def __init__(self, lanes: Mapping[tuple[str, str], AnyLane], untapped: Iterable[str] = ()) -> None:
        """Packets from and to `untapped` addresses are not looked into."""
        self.lanes = dict(lanes)
        seals: dict[int, Seal] = {}
        self.taps = {pair: FlowTap(seals) for pair in self.lanes}
        self._untapped = frozenset(socket.inet_aton(address) for address in untapped)

    def tap(self, pair: tuple[str, str], source: bytes, destination: bytes) -> FlowTap | None:
        """What looks into packets between these addresses of two sites; None: nobody."""
        return None if self._untapped & {source, destination} else self.taps[pair]

    def check_site(self, site: str) -> None:
        """Raise DriverError if there is no such site."""
        if site not in {pair[0] for pair in self.lanes}:
            raise DriverError(f"there is no site {site}")

    def obey(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command. Raises TopologyError if it makes no sense."""
        command = request.get("command")
        if command not in {"link", "cut", "heal"}:
            raise DriverError(
                f"{command!r} is no command: use link, cut, heal, attach, detach, watch or statistics"
            )
        pairs = self._pairs(request)
        if command == "link":
            changes = request.get("changes", {})
            if unknown := sorted(set(changes) - set(CONDITION_NAMES)):
                raise DriverError(
                    f"{', '.join(unknown)}: no such condition: use {', '.join(CONDITION_NAMES)}"
                )
            # Both directions are checked before one is changed.
            wanted = [replace(self.lanes[pair].conditions, **changes) for pair in pairs]
            for pair, conditions in zip(pairs, wanted, strict=True):
                self.lanes[pair].change(conditions)
        else:
            for pair in pairs:
                self.lanes[pair].is_cut = command == "cut"
        return {
            " > ".join(pair): {**asdict(self.lanes[pair].conditions), "cut": self.lanes[pair].is_cut}
            for pair in pairs
        }

    def statistics(self) -> list[dict[str, Any]]:
        """What has passed every lane."""
        return [
            {
                "from": pair[0],
                "to": pair[1],
                **lane.record(),
                "conditions": asdict(lane.conditions),
                "cut": lane.is_cut,
                "connections": self.taps[pair].connections,
                "messages": {str(topic): count for topic, count in self.taps[pair].tap.messages.items()},
                "unreadable": self.taps[pair].tap.unreadable,
            }
            for pair, lane in self.lanes.items()
        ]

    def _pairs(self, request: Mapping[str, Any]) -> list[tuple[str, str]]:
        pair = (str(request.get("a")), str(request.get("b")))
        if pair not in self.lanes:
            sites = sorted({site for known in self.lanes for site in known})
            raise DriverError(f"there is no link from {pair[0]} to {pair[1]}: sites are {', '.join(sites)}")
        return [pair] if request.get("one_way") else [pair, (pair[1], pair[0])]


def seeded_lanes(links: Iterable[Mapping[str, Any]], seed: int) -> dict[tuple[str, str], AnyLane]:
    """The lanes of `links`, which have `from`, `to` and `conditions`, each with chances of its own."""
    return {
        (link["from"], link["to"]): Lane(
            LinkConditions(**link["conditions"]), f"{seed}:{link['from']}>{link['to']}"
        )
        for link in links
    }


class ControlServer:
    """Answers on the control socket from within the loop of the process."""

    def __init__(self, path: str, epoll: select.epoll, answer: Answer) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(CONTROLS_MAX)
        self._socket.setblocking(False)
        self._epoll = epoll
        self._carry_out = answer
        self._handlers: dict[int, Callable[[], None]] = {self._socket.fileno(): self._accept}
        epoll.register(self._socket.fileno(), select.EPOLLIN)

    def handle(self, descriptor: int) -> None:
        """Something can be read from this descriptor; nothing happens if it is none of ours."""
        if handler := self._handlers.get(descriptor):
            handler()

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        if len(self._handlers) > CONTROLS_MAX:
            connection.close()
            return
        # Answers are small; whoever does not read them is not waited for.
        connection.setblocking(False)
        received = bytearray()
        number = connection.fileno()

        def close() -> None:
            self._epoll.unregister(number)
            del self._handlers[number]
            connection.close()

        def read() -> None:
            data, descriptors = b"", list[int]()
            with contextlib.suppress(ConnectionError):
                data, descriptors, _, _ = socket.recv_fds(
                    connection, REQUEST_MAX_BYTES, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            received.extend(data)
            try:
                if not data or len(received) > REQUEST_MAX_BYTES:
                    close()
                    return
                *lines, rest = bytes(received).split(b"\n")
                received[:] = rest
                for line in lines:
                    connection.sendall(json.dumps(self._answer(line, descriptors)).encode() + b"\n")
            except OSError:
                close()
            finally:
                # Those that nobody took.
                for descriptor in descriptors:
                    os.close(descriptor)

        self._handlers[number] = read
        self._epoll.register(number, select.EPOLLIN)

    def _answer(self, line: bytes, descriptors: list[int]) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise DriverError("a request is a JSON object")
            return self._carry_out(request, descriptors)
        except (TopologyError, KeyError, OSError, TypeError, ValueError) as error:
            return {"error": str(error)}
