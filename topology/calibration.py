"""Whether the emulated WAN does what it was told, measured before an experiment.

For each pair of sites, with real packets between their namespaces:

    RTT    ICMP echoes, which the other host's kernel answers at once and ours stamps as they arrive, so
           that a busy machine is not taken for a slow link; the median must lie within 1 ms of the two
           delays (with jitter: of the two delays plus or minus their jitter)
    loss   numbered UDP packets one way, counted at the other end; within 0.2 points over 50,000
           packets. Over fewer packets, or with long bursts, chance alone may be further off: then
           four standard deviations are allowed
    rate   where a rate is set: UDP at 1.3 times the rate; what arrives, within 5 %

What is compared is what was asked for, never what the emulator says about itself.
"""

import asyncio
import math
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from overlay.limits import MILLISECOND_NS, SECOND_NS
from topology.conditions import LinkConditions
from topology.namespaces import open_socket
from topology.network import Link, NetworkPlan

RTT_TOLERANCE_MS: Final = 1.0
LOSS_TOLERANCE: Final = 0.002
RATE_TOLERANCE: Final = 0.05
LOSS_PACKETS: Final = 50_000
ECHOES: Final = 50
ECHO_EVERY_NS: Final = 5 * MILLISECOND_NS
LOSS_PACKETS_PER_S: Final = 10_000
RATE_SECONDS: Final = 2.0
RATE_OVERDRIVE: Final = 1.3
DRAIN_NS: Final = SECOND_NS
"""How long after the last packet can have arrived stragglers are waited for."""

_PORT: Final = 9_999
_NUMBER: Final = struct.Struct("!Q")
_UDP_OVERHEAD_BYTES: Final = 28
_RATE_PAYLOAD_BYTES: Final = 1_172
_BUFFER_BYTES: Final = 32 * 1024 * 1024
_SO_RCVBUFFORCE: Final = 33
_SO_TIMESTAMPNS: Final = 35
_TIMESTAMP: Final = struct.Struct("qq")
_ECHO_REQUEST: Final = 8
_ECHO_REPLY: Final = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One quantity of one link."""

    what: str
    """rtt_ms, loss or rate_mbit."""
    source: str
    target: str
    wanted: float
    measured: float
    tolerance: float
    """How far off it may be."""
    packets: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """All measurements."""

    measurements: tuple[Measurement, ...]

    @property
    def ok(self) -> bool:
        """Everything was measured to be what was asked for."""
        return bool(self.measurements) and all(item.ok for item in self.measurements)

    def failures(self) -> list[str]:
        """What is off, for people."""
        return [
            f"{item.what} {item.source} > {item.target} is {item.measured:.4g}, wanted {item.wanted:.4g} "
            f"± {item.tolerance:.3g}"
            for item in self.measurements
            if not item.ok
        ]

    def to_record(self) -> dict[str, Any]:
        """The plain form, for JSON."""
        return {"ok": self.ok, "measurements": [asdict(item) for item in self.measurements]}


@dataclass(frozen=True, slots=True)
class End:
    """Where a site can be measured."""

    namespace: Path
    address: str


async def calibrate(
    plan: NetworkPlan,
    ends: dict[str, End],
    *,
    packets: int = LOSS_PACKETS,
    links: Sequence[Link] | None = None,
) -> Calibration:
    """Measure links (all by default) between the ends of their sites; nothing else may be on the WAN.

    `packets` of 0 leaves loss and rate out: what is quick enough for every start.
    """
    chosen = plan.links if links is None else links
    conditions = {(link.source, link.target): link.conditions for link in plan.links}
    found = []
    for link in chosen:
        source, target = ends[link.source], ends[link.target]
        back = conditions[link.target, link.source]
        if link.source < link.target or (link.target, link.source) not in {
            (other.source, other.target) for other in chosen
        }:
            found.append(await asyncio.to_thread(measure_rtt, link, back, source, target))
        if packets:
            found.append(await asyncio.to_thread(measure_loss, link, source, target, packets))
            if link.conditions.rate_mbit is not None:
                found.append(await asyncio.to_thread(measure_rate, link, source, target))
    return Calibration(tuple(found))


def measure_rtt(link: Link, back: LinkConditions, source: End, target: End) -> Measurement:
    """The median of echoes; lost ones are not waited for longer than the link could take."""
    wanted_ms = link.conditions.delay_ms + back.delay_ms
    limit_ns = round((4 * wanted_ms + 1_000) * MILLISECOND_NS)
    identifier = os.getpid() & 0xFFFF
    sent_ns: dict[int, int] = {}
    """On the wall clock, as the kernel stamps arrivals."""
    times_ms: dict[int, float] = {}
    last_sent_ns = 0
    with open_socket(source.namespace, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sock:
        sock.connect((target.address, 0))
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        started_ns = time.monotonic_ns()
        while len(times_ms) < ECHOES:
            now_ns = time.monotonic_ns()
            number = len(sent_ns)
            due_ns = started_ns + number * ECHO_EVERY_NS
            if number < ECHOES and now_ns >= due_ns:
                sent_ns[number] = time.time_ns()
                sock.send(_echo(identifier, number))
                last_sent_ns = time.monotonic_ns()
                continue
            end_ns = due_ns if number < ECHOES else last_sent_ns + limit_ns
            if now_ns >= end_ns:
                break
            if select.select([sock], [], [], (end_ns - now_ns) / SECOND_NS)[0]:
                packet, arrived_ns = _receive_stamped(sock)
                answered = _read_reply(packet, identifier)
                if answered in sent_ns:
                    times_ms.setdefault(answered, (arrived_ns - sent_ns[answered]) / MILLISECOND_NS)
    measured = statistics.median(times_ms.values()) if times_ms else math.inf
    tolerance = RTT_TOLERANCE_MS + link.conditions.jitter_ms + back.jitter_ms
    return Measurement(
        *("rtt_ms", link.source, link.target, wanted_ms, measured, tolerance, len(times_ms)),
        ok=abs(measured - wanted_ms) <= tolerance,
    )


def measure_loss(link: Link, source: End, target: End, packets: int) -> Measurement:
    """The part of numbered packets that does not arrive."""
    per_s = float(LOSS_PACKETS_PER_S)
    if link.conditions.rate_mbit is not None:
        # Half the rate: what the queue before the rate drops is not loss.
        per_s = min(per_s, link.conditions.rate_mbit * 1e6 / 8 / (_UDP_OVERHEAD_BYTES + _NUMBER.size) / 2)
    arrived, _ = _stream(link, source, target, packets, per_s, _NUMBER.size)
    wanted = link.conditions.loss
    burst = link.conditions.burst or 1.0
    # Losses in bursts of b vary as if there were b times fewer packets, and a little more.
    deviation = math.sqrt(wanted * (1 - wanted) * (2 * burst - 1) / packets)
    tolerance = max(LOSS_TOLERANCE, 4 * deviation)
    measured = 1 - arrived / packets
    return Measurement(
        *("loss", link.source, link.target, wanted, measured, tolerance, packets),
        ok=abs(measured - wanted) <= tolerance,
    )


def measure_rate(link: Link, source: End, target: End) -> Measurement:
    """What arrives of more than fits, headers included."""
    rate_mbit = link.conditions.rate_mbit
    assert rate_mbit is not None
    size = _RATE_PAYLOAD_BYTES + _UDP_OVERHEAD_BYTES
    per_s = RATE_OVERDRIVE * rate_mbit * 1e6 / 8 / size
    packets = max(20, round(per_s * RATE_SECONDS))
    arrived, took_ns = _stream(link, source, target, packets, per_s, _RATE_PAYLOAD_BYTES)
    measured = (arrived - 1) * size * 8 / took_ns * SECOND_NS / 1e6 if took_ns else 0.0
    # Loss comes before the rate and may leave less than the rate can carry.
    wanted = rate_mbit * min(1.0, RATE_OVERDRIVE * (1 - link.conditions.loss))
    return Measurement(
        *("rate_mbit", link.source, link.target, wanted, measured, RATE_TOLERANCE * wanted, packets),
        ok=abs(measured - wanted) <= RATE_TOLERANCE * wanted,
    )


def _stream(link: Link, source: End, target: End, packets: int, per_s: float, size: int) -> tuple[int, int]:
    """Send packets evenly; gives how many arrived, and the time from the first to the last of them."""
    with (
        open_socket(target.namespace, socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        open_socket(source.namespace, socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        receiver.bind((target.address, _PORT))
        receiver.setblocking(False)
        sender.connect((target.address, _PORT))
        padding = bytes(size - _NUMBER.size)
        seen: set[int] = set()
        first_ns = last_ns = 0
        started_ns = time.monotonic_ns()
        sent = 0
        end_ns = 0
        while not end_ns or (time.monotonic_ns() < end_ns and len(seen) < packets):
            due = min(packets, 1 + int((time.monotonic_ns() - started_ns) * per_s / SECOND_NS))
            while sent < due:
                sender.send(_NUMBER.pack(sent) + padding)
                sent += 1
            if sent == packets and not end_ns:
                ways_ms = link.conditions.delay_ms + link.conditions.jitter_ms
                end_ns = time.monotonic_ns() + round(ways_ms * MILLISECOND_NS) + DRAIN_NS
            if select.select([receiver], [], [], 0.0005)[0]:
                before = len(seen)
                _receive(receiver, seen)
                if len(seen) > before:
                    last_ns = time.monotonic_ns()
                    first_ns = first_ns or last_ns
    return len(seen), last_ns - first_ns


def _receive(receiver: socket.socket, seen: set[int]) -> None:
    while True:
        try:
            seen.add(_NUMBER.unpack_from(receiver.recv(2_048))[0])
        except BlockingIOError:
            return


def _receive_stamped(sock: socket.socket) -> tuple[bytes, int]:
    """A packet, and when the kernel got it, on the wall clock."""
    packet, extras, _, _ = sock.recvmsg(2_048, socket.CMSG_SPACE(_TIMESTAMP.size))
    for _, kind, content in extras:
        if kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESTAMP.unpack_from(content)
            return packet, seconds * SECOND_NS + nanoseconds
    return packet, time.time_ns()


def _echo(identifier: int, number: int) -> bytes:
    body = struct.pack("!HH", identifier, number)
    # The checksum of eight bytes with the type first and the code zero.
    total = (_ECHO_REQUEST << 8) + identifier + number
    total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!BBH", _ECHO_REQUEST, 0, ~(total + (total >> 16)) & 0xFFFF) + body


def _read_reply(packet: bytes, identifier: int) -> int | None:
    start = (packet[0] & 0x0F) * 4
    kind, _, _, found, number = struct.unpack_from("!BBHHH", packet, start)
    return number if (kind, found) == (_ECHO_REPLY, identifier) else None
