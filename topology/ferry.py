"""The emulated WAN: carries packets between TUN devices, as late and as few as it is told.

    python -m topology.ferry SPECIFICATION

One process, one thread. Each host of the WAN has a TUN device `wan0` in its namespace; what the host
sends there is read here, admitted to the lane between the two sites (`topology.lane`), held until it
is due, and written to the other host's device. The devices belong to open files of this process, so
they go when it does, however it ends.

**Its own lag.** A packet that comes out more than `LATE_NS` after it was due is late. So is one read
after this process had not looked for that long: nobody knows when it came. Packets that the kernel
dropped because we did not read them are counted too. `lag_reason` judges; a run that lagged is invalid.

**Control.** A Unix socket takes one JSON object per line and answers with one:

    {"command": "link", "a": SITE, "b": SITE, "one_way": false, "changes": {"delay_ms": 250, "loss": 0.01}}
    {"command": "cut" | "heal", "a": SITE, "b": SITE, "one_way": false}
    {"command": "attach", "name": HOST, "site": SITE, "address": ADDRESS, "namespace": FILE}
    {"command": "statistics"}
    {"command": "watch"}

`watch` begins the lateness anew: while everything starts at once, it says nothing about what comes after.
`attach` gives a host a device, or another one: a container that is started again has a new namespace.

An answer with `error` says what was wrong. Python calls `topology.wan_control`.
"""

import contextlib
import ctypes
import fcntl
import gc
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from overlay.limits import MILLISECOND_NS
from runtime.datagrams import Seal
from topology.conditions import CONDITION_NAMES, LinkConditions
from topology.errors import DriverError, TopologyError
from topology.flow_tap import FlowTap
from topology.lane import Lane
from topology.lines import say
from topology.namespaces import TUN_DEVICE, inside, run_ip

DEVICE: Final = "wan0"
MTU: Final = 1_500
KERNEL_QUEUE_PACKETS: Final = 10_000
"""How many packets may wait in a device until they are read."""
READ_BATCH: Final = 32
"""Packets read from one device before others, and what is due, get their turn."""
LOOK_EVERY_NS: Final = 2 * MILLISECOND_NS
"""The longest sleep. Short, so that a wake-up that comes late is noticed."""
LATE_NS: Final = 10 * MILLISECOND_NS
LATE_SHARE_MAX: Final = 0.001
"""More late packets than this and the emulation was not what was asked for."""
RUN_NS: Final = 4 * MILLISECOND_NS
"""The kernel gives us this much of a core, ..."""
RUN_EVERY_NS: Final = 5 * MILLISECOND_NS
"""... in each period of this length."""
REQUEST_MAX_BYTES: Final = 64 * 1024
CONTROLS_MAX: Final = 16

_BUCKET_NS: Final = MILLISECOND_NS // 10
_BUCKETS: Final = 1_000
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x0001 | 0x1000
_PR_SET_TIMERSLACK: Final = 29
_SCHED_DEADLINE: Final = 6
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""Number of the system call; the C library has no name for it."""
_ATTRIBUTES_BYTES: Final = 48
_IPV4_HEADER_BYTES: Final = 20


def lag_reason(statistics: Mapping[str, Any]) -> str | None:
    """Why a run with these statistics of the ferry is invalid; None if it is not."""
    if dropped := statistics["kernel_dropped"]:
        return f"the kernel dropped {dropped} packets that the ferry did not read in time"
    late, forwarded = statistics["late"], statistics["forwarded"]
    if late > LATE_SHARE_MAX * forwarded:
        return (
            f"{late} of {forwarded} packets were carried more than {LATE_NS / MILLISECOND_NS:g} ms late, "
            f"{statistics['late_max_ms']:g} ms at worst: the machine was too busy, run again"
        )
    return None


class Wan:
    """Sites and the lanes between them. Knows no device and no clock."""

    def __init__(self, links: Iterable[Mapping[str, Any]], seed: int, untapped: Iterable[str] = ()) -> None:
        """`links` have `from`, `to` and `conditions`; packets from and to `untapped` are not looked into."""
        self.lanes: dict[tuple[str, str], Lane] = {}
        self.taps: dict[tuple[str, str], FlowTap] = {}
        self.untapped = frozenset(socket.inet_aton(address) for address in untapped)
        seals: dict[int, Seal] = {}
        for link in links:
            pair = (link["from"], link["to"])
            self.lanes[pair] = Lane(LinkConditions(**link["conditions"]), f"{seed}:{pair[0]}>{pair[1]}")
            self.taps[pair] = FlowTap(seals)

    def obey(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command. Raises TopologyError if it makes no sense."""
        command = request.get("command")
        if command not in {"link", "cut", "heal"}:
            raise DriverError(f"{command!r} is no command: use link, cut, heal, attach, watch or statistics")
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
                **asdict(lane.statistics()),
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


class Lateness:
    """How late packets came out."""

    def __init__(self) -> None:
        self.forwarded = 0
        self.late = 0
        self.max_ns = 0
        self._buckets = [0] * (_BUCKETS + 1)

    def note(self, late_ns: int) -> None:
        """A packet came out this long after it was due."""
        self.forwarded += 1
        self._buckets[min(late_ns // _BUCKET_NS, _BUCKETS)] += 1
        if late_ns > LATE_NS:
            self.late += 1
        self.max_ns = max(self.max_ns, late_ns)

    def note_unseen(self, packets: int, gap_ns: int) -> None:
        """Packets were read after a gap in which nobody looked."""
        if packets and gap_ns > LATE_NS:
            self.late += packets
            self.max_ns = max(self.max_ns, gap_ns)

    def percentile_ms(self, share: float) -> float:
        """The lateness that this share of all packets did not exceed, rounded up to 0.1 ms."""
        wanted = share * self.forwarded
        passed = 0
        for index, count in enumerate(self._buckets):
            passed += count
            if passed and passed >= wanted:
                return (index + 1) * _BUCKET_NS / MILLISECOND_NS
        return 0.0


class Port:
    """The TUN device of one host."""

    def __init__(self, name: str, site: str, address: str, namespace: Path) -> None:
        self.name = name
        self.site = site
        self.address = socket.inet_aton(address)
        with inside(namespace):
            self.descriptor = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(self.descriptor, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_NO_PI))
            # An open file stays with its namespace and can be read again and again.
            self._counters = os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the device up; it goes, and with it the routes over it."""
        os.close(self.descriptor)
        os.close(self._counters)

    def kernel_dropped(self) -> int:
        """Packets the host sent and we did not read before the device's queue was full."""
        lines = os.pread(self._counters, 65_536, 0).decode().splitlines()
        line = next(line for line in lines if line.strip().startswith(f"{DEVICE}:"))
        return int(line.split(":", 1)[1].split()[11])


class Ferry:
    """The loop: read, admit, hold, write."""

    def __init__(self, wan: Wan, ports: Iterable[Port], control: socket.socket) -> None:
        self._wan = wan
        self._ports = {port.descriptor: port for port in ports}
        self._by_address = {port.address: port for port in self._ports.values()}
        self._control = control
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {control.fileno(): self._accept}
        self._routes: dict[bytes, tuple[Lane, FlowTap | None, int] | None] = {}
        """By source and destination address."""
        self._held: list[tuple[int, int, int, bytes]] = []
        """A heap of due time, number, descriptor, packet."""
        self._number = 0
        self._lateness = Lateness()
        self._stray = 0
        self._undeliverable = 0
        self._kernel_dropped = 0
        """At devices that were given up."""
        self._kernel_dropped_before = 0
        """At all devices before `watch`."""
        self._looked_ns = 0

    def run(self) -> None:
        """Carry packets until killed."""
        self._epoll.register(self._control.fileno(), select.EPOLLIN)
        for descriptor in self._ports:
            self._epoll.register(descriptor, select.EPOLLIN)
        waiting = [self._epoll.fileno()]
        self._looked_ns = time.monotonic_ns()
        while True:
            self._release()
            sleep_ns = LOOK_EVERY_NS
            if self._held:
                sleep_ns = min(sleep_ns, self._held[0][0] - time.monotonic_ns())
            # epoll itself sleeps in whole milliseconds; select on it does so in microseconds.
            ready = select.select(waiting, [], [], max(0, sleep_ns) / 1e9)[0] if sleep_ns > 0 else waiting
            events = self._epoll.poll(0) if ready else ()
            now_ns = time.monotonic_ns()
            gap_ns, self._looked_ns = now_ns - self._looked_ns - LOOK_EVERY_NS, now_ns
            for descriptor, _ in events:
                if descriptor in self._ports:
                    self._lateness.note_unseen(self._read(descriptor), gap_ns)
                    self._release()
                elif handler := self._handlers.get(descriptor):
                    handler()

    def watch(self) -> None:
        """Judge only what is carried from now on."""
        self._lateness = Lateness()
        self._kernel_dropped_before = self._kernel_dropped_in_all()

    def statistics(self) -> dict[str, Any]:
        """What has been carried, and how well."""
        lateness = self._lateness
        return {
            "forwarded": lateness.forwarded,
            "held": len(self._held),
            "late": lateness.late,
            "late_p99_ms": round(lateness.percentile_ms(0.99), 3),
            "late_max_ms": round(lateness.max_ns / MILLISECOND_NS, 3),
            "kernel_dropped": self._kernel_dropped_in_all() - self._kernel_dropped_before,
            "stray": self._stray,
            "undeliverable": self._undeliverable,
            "lanes": self._wan.statistics(),
        }

    def _kernel_dropped_in_all(self) -> int:
        return self._kernel_dropped + sum(port.kernel_dropped() for port in self._ports.values())

    def _attach(self, name: str, site: str, address: str, namespace: Path) -> None:
        """A device for a host, instead of the one it had; who asks sets it up, it takes long."""
        if site not in {pair[0] for pair in self._wan.lanes}:
            raise DriverError(f"there is no site {site}")
        given_up = [old for old in self._ports.values() if name == old.name]
        for old in given_up:
            # First: both would have the same name, perhaps in the same namespace.
            self._detach(old)
        port = Port(name, site, address, namespace)
        self._ports[port.descriptor] = self._by_address[port.address] = port
        self._routes.clear()
        self._epoll.register(port.descriptor, select.EPOLLIN)

    def _detach(self, port: Port) -> None:
        self._kernel_dropped += port.kernel_dropped()
        self._epoll.unregister(port.descriptor)
        del self._ports[port.descriptor], self._by_address[port.address]
        self._routes.clear()
        self._held = [item for item in self._held if item[2] != port.descriptor]
        heapq.heapify(self._held)
        port.close()

    def _read(self, descriptor: int) -> int:
        for count in range(READ_BATCH):
            try:
                packet = os.read(descriptor, 65_536)
            except BlockingIOError:
                return count
            if len(packet) < _IPV4_HEADER_BYTES or packet[0] >> 4 != 4:
                self._stray += 1
                continue
            key = packet[12:20]
            if key not in self._routes:
                self._routes[key] = self._route(key[:4], key[4:])
            route = self._routes[key]
            if route is None:
                self._stray += 1
                continue
            lane, tap, target = route
            if tap is not None:
                tap.feed(packet)
            due_ns = lane.admit(time.monotonic_ns(), len(packet))
            if due_ns is not None:
                self._number += 1
                heapq.heappush(self._held, (due_ns, self._number, target, packet))
        return READ_BATCH

    def _route(self, source: bytes, destination: bytes) -> tuple[Lane, FlowTap | None, int] | None:
        port, target = self._by_address.get(source), self._by_address.get(destination)
        if port is None or target is None or (port.site, target.site) not in self._wan.lanes:
            return None
        pair = (port.site, target.site)
        tap = None if self._wan.untapped & {source, destination} else self._wan.taps[pair]
        return self._wan.lanes[pair], tap, target.descriptor

    def _release(self) -> None:
        held = self._held
        now_ns = time.monotonic_ns()
        while held and held[0][0] <= now_ns:
            due_ns, _, target, packet = heapq.heappop(held)
            try:
                os.write(target, packet)
            except OSError:
                self._undeliverable += 1
            now_ns = time.monotonic_ns()
            self._lateness.note(now_ns - due_ns)

    # Control

    def _accept(self) -> None:
        connection, _ = self._control.accept()
        if len(self._handlers) > CONTROLS_MAX:
            connection.close()
            return
        # Answers are small; whoever does not read them is not waited for.
        connection.setblocking(False)
        received = bytearray()
        descriptor = connection.fileno()

        def close() -> None:
            self._epoll.unregister(descriptor)
            del self._handlers[descriptor]
            connection.close()

        def read() -> None:
            data = b""
            with contextlib.suppress(ConnectionError):
                data = connection.recv(REQUEST_MAX_BYTES)
            received.extend(data)
            if not data or len(received) > REQUEST_MAX_BYTES:
                close()
                return
            *lines, rest = bytes(received).split(b"\n")
            received[:] = rest
            try:
                for line in lines:
                    connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
            except OSError:
                close()

        self._handlers[descriptor] = read
        self._epoll.register(descriptor, select.EPOLLIN)

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise DriverError("a request is a JSON object")
            if request.get("command") == "statistics":
                return self.statistics()
            if request.get("command") == "watch":
                self.watch()
                return {}
            if request.get("command") == "attach":
                where = (request["name"], request["site"], request["address"])
                self._attach(*where, Path(request["namespace"]))
                return {}
            return self._wan.obey(request)
        except (TopologyError, KeyError, OSError, TypeError, ValueError) as error:
            return {"error": str(error)}


def set_up_device(namespace: Path, address: str, networks: Iterable[str]) -> None:
    """Bring a host's device up; these networks are reached over it."""
    with inside(namespace):
        run_ip(
            batch=[
                f"link set {DEVICE} mtu {MTU} txqueuelen {KERNEL_QUEUE_PACKETS} up",
                *(f"route replace {network} dev {DEVICE} src {address}" for network in networks),
            ]
        )


def main() -> None:
    """Carry packets until killed."""
    specification = json.loads(Path(sys.argv[1]).read_text())
    wan = Wan(specification["links"], specification["seed"], specification["untapped"])
    ports = []
    for host in specification["hosts"]:
        namespace = Path(host["namespace"])
        ports.append(Port(host["name"], host["site"], host["address"], namespace))
        set_up_device(namespace, host["address"], [specification["network"]])
    control = socket.socket(socket.AF_UNIX)
    control.bind(specification["control"])
    control.listen(CONTROLS_MAX)
    control.setblocking(False)
    _hurry()
    say("serving")
    Ferry(wan, ports, control).run()


def _hurry() -> None:
    """Be woken on time also on a busy machine, and do not stop to look for garbage: there are no cycles."""
    gc.disable()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, 1)
    # A deadline task also goes before the share that newer kernels keep for ordinary processes, which
    # holds up a real-time one for tens of milliseconds. Without the right to either we are late more
    # often, and say it.
    attributes = struct.pack(
        *("IIQiIQQQ", _ATTRIBUTES_BYTES, _SCHED_DEADLINE, 0, 0, 0, RUN_NS, RUN_EVERY_NS, RUN_EVERY_NS)
    )
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is None or libc.syscall(number, 0, attributes, 0):
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


if __name__ == "__main__":
    main()
