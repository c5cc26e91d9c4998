"""The emulated WAN: carries packets between TUN devices, as late and as few as it is told.

    python -m topology.ferry SPECIFICATION

One process, one thread. Each host of the WAN has a TUN device in its namespace (`topology.tun`); what the
host sends there is read here, admitted to the lane between the two sites (`topology.lane`), held until it
is due, and written to the other host's device.

**Its own lag.** A packet that comes out more than `LATE_NS` after it was due is late. So is one read
after this process had not looked for that long: nobody knows when it came. Packets that the kernel
dropped because we did not read them are counted too. `lag_reason` judges; a run that lagged is invalid.

**Control.** See `topology.wan_server`. `attach` takes a host's device, whose descriptors come along
(SCM_RIGHTS); `detach` lets go of it. A container that is started again has a new namespace and gets another
device. Who hands devices over makes and ends them: both take longer than a packet may be late.
"""

import contextlib
import ctypes
import gc
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from overlay.limits import MILLISECOND_NS
from topology.errors import DriverError
from topology.flow_tap import FlowTap
from topology.lane import Lane
from topology.lines import say
from topology.tun import TunDevice
from topology.wan_server import ControlServer, Wan, seeded_lanes

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

_BUCKET_NS: Final = MILLISECOND_NS // 10
_BUCKETS: Final = 1_000
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
    """A host and its device."""

    def __init__(self, name: str, site: str, address: str, device: TunDevice) -> None:
        self.name = name
        self.site = site
        self.address = socket.inet_aton(address)
        self.device = device
        self.descriptor = device.packets


class Ferry:
    """The loop: read, admit, hold, write."""

    def __init__(self, wan: Wan, control: str) -> None:
        """`control` is where it takes commands."""
        self._wan = wan
        self._ports: dict[int, Port] = {}
        """By the descriptor of the device."""
        self._by_address: dict[bytes, Port] = {}
        self._epoll = select.epoll()
        self._control = ControlServer(control, self._epoll, self._answer)
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
                else:
                    self._control.handle(descriptor)

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
        return self._kernel_dropped + sum(port.device.dropped() for port in self._ports.values())

    def _attach(self, name: str, site: str, address: str, descriptors: list[int]) -> None:
        """Carry what comes from and goes to this host. The descriptors are ours from now on."""
        self._wan.check_site(site)
        if any(name == port.name for port in self._ports.values()):
            raise DriverError(f"{name} is attached already: detach it first")
        try:
            packets, counters = descriptors
        except ValueError:
            raise DriverError(f"{len(descriptors)} descriptors came with attach: hand over two") from None
        port = Port(name, site, address, TunDevice(packets, counters))
        self._ports[port.descriptor] = self._by_address[port.address] = port
        self._routes.clear()
        self._epoll.register(port.descriptor, select.EPOLLIN)
        descriptors.clear()

    def _detach(self, name: str) -> None:
        for port in [port for port in self._ports.values() if port.name == name]:
            self._kernel_dropped += port.device.dropped()
            self._epoll.unregister(port.descriptor)
            del self._ports[port.descriptor], self._by_address[port.address]
            self._routes.clear()
            self._held = [item for item in self._held if item[2] != port.descriptor]
            heapq.heapify(self._held)
            # Whoever handed it over has it open too: this ends nothing and takes no time.
            port.device.close()

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
        lane = self._wan.lanes[pair]
        assert isinstance(lane, Lane)
        return lane, self._wan.tap(pair, source, destination), target.descriptor

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

    def _answer(self, request: Mapping[str, Any], descriptors: list[int]) -> dict[str, Any]:
        command = request.get("command")
        if command == "statistics":
            return self.statistics()
        if command == "watch":
            self.watch()
        elif command == "attach":
            self._attach(request["name"], request["site"], request["address"], descriptors)
        elif command == "detach":
            self._detach(request["name"])
        else:
            return self._wan.obey(request)
        return {}


def main() -> None:
    """Carry packets until killed."""
    specification = json.loads(Path(sys.argv[1]).read_text())
    lanes = seeded_lanes(specification["links"], specification["seed"])
    ferry = Ferry(Wan(lanes, specification["untapped"]), specification["control"])
    _hurry()
    say("serving")
    ferry.run()


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
