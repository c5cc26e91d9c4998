"""What one lost packet costs: the same stream over TCP, several TCP connections, and datagrams.

On one emulated link (250 ms and 1 % loss unless told otherwise) small messages with a number and the time of
sending flow at a fixed rate, over four transports at once and with nothing of Isthmus in between:

    tcp             one connection: what follows a lost packet waits until it has been sent again
    tcp by class    three connections, each with a third of the messages, as if by urgency
    datagrams       each message once; what is lost is lost
    copies          each message as three datagrams, four milliseconds apart; the first to come counts

It is the measurement behind the choice of datagrams for urgent frames (docs/multipath.md).
"""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks import machine
from overlay.limits import MILLISECOND_NS
from topology.checker import percentile
from topology.conditions import LinkConditions
from topology.driver import Say
from topology.emulation import EmulatedNetwork, two_sites
from topology.namespaces import open_socket

MESSAGE: Final = struct.Struct("<QQ48x")
"""Number and time of sending; 64 bytes."""
CLASSES: Final = 3
COPIES: Final = 3
COPY_EVERY_S: Final = 0.004
DEADLINES_MS: Final = (300, 600, 1_000)
_PORT: Final = 9_100
_DRAIN_S: Final = 4.0

Send = Callable[[int, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    delay_ms: float = 250.0
    loss: float = 0.01
    rate_per_s: float = 100.0
    seconds: float = 60.0


class Arrivals:
    """What came over one transport, and when first."""

    def __init__(self) -> None:
        self.latency_ns: dict[int, int] = {}

    def take(self, data: bytes) -> None:
        """One message."""
        number, sent_ns = MESSAGE.unpack(data)
        self.latency_ns.setdefault(number, time.monotonic_ns() - sent_ns)

    def summary(self, sent: int) -> dict[str, Any]:
        """Latencies of what came; deadlines of everything."""
        ordered = sorted(self.latency_ns.values())
        return {
            "sent": sent,
            "lost": sent - len(ordered),
            "p50_ms": round(percentile(ordered, 0.5) / 1e6, 1),
            "p99_ms": round(percentile(ordered, 0.99) / 1e6, 1),
            "max_ms": round(ordered[-1] / 1e6, 1),
            "deadline_hit_pct": {
                str(deadline): round(
                    100 * sum(each <= deadline * MILLISECOND_NS for each in ordered) / sent, 3
                )
                for deadline in DEADLINES_MS
            },
        }


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run all transports at once on one link."""
    description = machine.describe()
    conditions = LinkConditions(delay_ms=settings.delay_ms, loss=settings.loss)
    with TemporaryDirectory() as directory:
        network = EmulatedNetwork(two_sites(conditions, conditions), Path(directory))
        try:
            await network.start()
            say(f"the link is up: {conditions.describe()}")
            transports = await _run(network, settings)
            statistics = await network.statistics()
        finally:
            await network.stop()
    return {
        "valid": statistics["invalid"] is None,
        "invalid": statistics["invalid"],
        "transports": transports,
        "settings": asdict(settings),
        "machine": description,
    }


async def _run(network: EmulatedNetwork, settings: Settings) -> dict[str, Any]:
    arrivals = {name: Arrivals() for name in ("tcp", "tcp by class", "datagrams", "copies")}
    async with contextlib.AsyncExitStack() as stack:
        one = await _tcp(network, stack, 1, arrivals["tcp"])
        by_class = await _tcp(network, stack, CLASSES, arrivals["tcp by class"])
        once = await _udp(network, stack, 1, arrivals["datagrams"])
        copies = await _udp(network, stack, COPIES, arrivals["copies"])
        count = round(settings.rate_per_s * settings.seconds)
        started_s = time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, started_s + number / settings.rate_per_s - time.monotonic()))
            message = MESSAGE.pack(number, time.monotonic_ns())
            for send in (one, by_class, once, copies):
                await send(number, message)
        await asyncio.sleep(_DRAIN_S)
    return {name: found.summary(count) for name, found in arrivals.items()}


async def _tcp(
    network: EmulatedNetwork, stack: contextlib.AsyncExitStack, connections: int, arrivals: Arrivals
) -> Send:
    """Messages in turn over some connections."""
    loop = asyncio.get_running_loop()
    address = (network.plan.host("b").address, _PORT + connections)
    listening = stack.enter_context(open_socket(network.path("b"), socket.AF_INET, socket.SOCK_STREAM))
    listening.bind(address)
    listening.listen()
    listening.setblocking(False)
    writers: list[asyncio.StreamWriter] = []
    for _ in range(connections):
        sock = open_socket(network.path("a"), socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        (accepted, _), _ = await asyncio.gather(loop.sock_accept(listening), loop.sock_connect(sock, address))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _, writer = await asyncio.open_connection(sock=sock)
        reader, other = await asyncio.open_connection(sock=accepted)
        task = asyncio.create_task(_read(reader, arrivals))
        stack.push_async_callback(_end, task, writer, other)
        writers.append(writer)

    async def send(number: int, message: bytes) -> None:
        writers[number % connections].write(message)

    return send


async def _read(reader: asyncio.StreamReader, arrivals: Arrivals) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            arrivals.take(await reader.readexactly(MESSAGE.size))


async def _end(task: "asyncio.Task[None]", *writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.transport.abort()
    await task


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._arrivals.take(data)


async def _udp(
    network: EmulatedNetwork, stack: contextlib.AsyncExitStack, copies: int, arrivals: Arrivals
) -> Send:
    """Every message as some datagrams."""
    loop = asyncio.get_running_loop()
    address = (network.plan.host("b").address, _PORT + 10 + copies)
    receiving = open_socket(network.path("b"), socket.AF_INET, socket.SOCK_DGRAM)
    receiving.bind(address)
    transport, _ = await loop.create_datagram_endpoint(lambda: _Receiver(arrivals), sock=receiving)
    stack.callback(transport.close)
    sending = stack.enter_context(open_socket(network.path("a"), socket.AF_INET, socket.SOCK_DGRAM))
    sending.setblocking(False)
    sending.connect(address)

    async def send(_: int, message: bytes) -> None:
        sending.send(message)
        for number in range(1, copies):
            loop.call_later(number * COPY_EVERY_S, sending.send, message)

    return send


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        "| transport | p50, ms | p99, ms | maximum, ms | within 300 ms, % | 600 ms | 1 s | lost |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in result["transports"].items():
        hits = " | ".join(f"{share:g}" for share in row["deadline_hit_pct"].values())
        lines.append(
            f"| {name} | {row['p50_ms']:g} | {row['p99_ms']:g} | {row['max_ms']:g} | {hits} | {row['lost']} |"
        )
    return "\n".join(lines if result["valid"] else [*lines, "", f"INVALID: {result['invalid']}"])
