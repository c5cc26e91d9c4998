"""What encryption costs: the chain LAN, cloud, LAN as fast as it goes, plain and with TLS in turns.

Two chains of three brokers each, an edge, a routing broker and an edge, run at the same time; one of them
is encrypted, ZooKeeper is shared. A publisher and a subscriber in this process use one chain at a time.
Messages per second say what a user gets on this machine, where publisher, brokers and subscriber share
the cores; the processor time of the brokers per message says what TLS takes.
"""

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks import machine
from benchmarks.processes import ProcessorUse, processor_s
from clients import Client, Publisher, Subscription
from coordinator import EmbeddedZooKeeper
from overlay.messages import Role
from overlay.qos import TopicQos
from runtime.certificates import make_authority, make_certificate
from topology.driver import Say

BATCH: Final = 50
QOS: Final = TopicQos(retention=64)
_START_TIMEOUT_S: Final = 30.0
_RULES: Final = '[[rule]]\nprincipals = ["*"]\npublish = ["**"]\nsubscribe = ["**"]\ndeclare = ["**"]\n'


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    payload_bytes: tuple[int, ...] = (16, 1_024)
    rounds: int = 5
    window_s: float = 3.0


@dataclass(frozen=True, slots=True)
class _Chain:
    pids: tuple[int, ...]
    publisher: Publisher
    subscription: Subscription
    client: Client

    async def window(self, seconds: float, payload: bytes) -> tuple[float, float]:
        """Publish as fast as it goes; returns messages delivered a second and brokers' µs per message."""
        before_s, began_s = self._processor_s(), time.monotonic()
        first = self.publisher.sequence
        publishing = asyncio.create_task(self._publish(began_s + seconds, payload))
        received = 0
        while not publishing.done() or received < self.publisher.sequence - first:
            await self.subscription.receive(10.0)
            received += 1
        await publishing
        took_s = time.monotonic() - began_s
        return received / took_s, (self._processor_s() - before_s) / received * 1e6

    async def _publish(self, until_s: float, payload: bytes) -> None:
        while time.monotonic() < until_s:
            await self.publisher.publish_many([payload] * BATCH)
            await asyncio.sleep(0)

    def _processor_s(self) -> float:
        return sum(map(processor_s, self.pids))


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run both chains in turns; `ratio` is encrypted over plain."""
    description, before = machine.describe(), ProcessorUse.now()
    rows = []
    with TemporaryDirectory() as name, EmbeddedZooKeeper() as zookeeper:
        folder = Path(name)
        _prepare(folder)
        async with contextlib.AsyncExitStack() as stack:
            chains = {
                "plain": await _start(stack, zookeeper.hosts, "/plain", None),
                "tls": await _start(stack, zookeeper.hosts, "/tls", folder),
            }
            for size in settings.payload_bytes:
                found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in chains}
                for _ in range(settings.rounds):
                    for kind, chain in chains.items():
                        found[kind].append(await chain.window(settings.window_s, bytes(size)))
                rows.append(_row(size, found))
                say(_line(rows[-1]))
    return {
        "rows": rows,
        "stolen_pct": ProcessorUse.now().stolen_pct(before),
        "settings": asdict(settings),
        "machine": description,
    }


def _prepare(folder: Path) -> None:
    make_authority(folder)
    make_certificate(folder, Role.ROUTER, "r1")
    for name in ("ea", "eb"):
        make_certificate(folder, Role.EDGE, name)
    make_certificate(folder, Role.CLIENT, "bench")
    (folder / "access.toml").write_text(_RULES)


async def _start(
    stack: contextlib.AsyncExitStack, zookeeper: str, chroot: str, certificates: Path | None
) -> _Chain:
    common = [f"--zookeeper={zookeeper}", f"--chroot={chroot}", "--json", "--log-level=warning"]
    access: list[str] = []
    options: dict[str, Any] = {}
    if certificates is not None:
        common.append(f"--certificates={certificates}")
        access.append(f"--access={certificates / 'access.toml'}")
        options = {"certificates": certificates, "principal": "bench"}
    pids = [(await _broker(stack, "router", "--id=r1", *common))[0]]
    locators = {}
    for lan in ("a", "b"):
        arguments = (f"--id=e{lan}", f"--lan={lan}", "--no-discovery", *common, *access)
        pid, locators[lan] = await _broker(stack, "edge", *arguments)
        pids.append(pid)
    sender, receiver = Client([locators["a"]], **options), Client([locators["b"]], **options)
    for client in (sender, receiver):
        await client.start()
        stack.push_async_callback(client.close)
    subscription = await receiver.subscribe("t", QOS)
    publisher = await sender.publisher("t", QOS)
    await publisher.wait_for_subscribers(1, _START_TIMEOUT_S)
    chain = _Chain(tuple(pids), publisher, subscription, sender)
    await chain.window(1.0, b"warm")
    return chain


async def _broker(stack: contextlib.AsyncExitStack, *arguments: str) -> tuple[int, str]:
    """A broker as a process; returns its pid and where it serves."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "isthmus", *arguments, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    stack.push_async_callback(_end, process)
    assert process.stdout is not None
    async with asyncio.timeout(_START_TIMEOUT_S):
        started = json.loads(await process.stdout.readline())
    return process.pid, started["locator"]


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _row(size: int, found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"payload_bytes": size}
    for kind, windows in found.items():
        row[kind] = {
            "messages_per_s": round(statistics.median(rate for rate, _ in windows)),
            "broker_us_per_message": round(statistics.median(cost for _, cost in windows), 2),
            "windows": [{"messages_per_s": round(rate), "us": round(cost, 2)} for rate, cost in windows],
        }
    pairs = zip(found["plain"], found["tls"], strict=True)
    row["rate_ratio"] = round(statistics.median(tls[0] / plain[0] for plain, tls in pairs), 3)
    pairs = zip(found["plain"], found["tls"], strict=True)
    row["cost_ratio"] = round(statistics.median(tls[1] / plain[1] for plain, tls in pairs), 3)
    return row


def _line(row: dict[str, Any]) -> str:
    plain, tls = row["plain"], row["tls"]
    return (
        f"| {row['payload_bytes']} | {plain['messages_per_s']:,} | {tls['messages_per_s']:,} "
        f"| {row['rate_ratio']:.2f} | {plain['broker_us_per_message']:.1f} "
        f"| {tls['broker_us_per_message']:.1f} | {row['cost_ratio']:.2f} |"
    )


def summary(result: dict[str, Any]) -> str:
    """A result as a table."""
    return "\n".join(
        [
            f"stolen {result['stolen_pct']:g} %",
            "",
            "| payload, bytes | plain, msg/s | TLS, msg/s | ratio | plain, µs | TLS, µs | ratio |",
            "|---:|---:|---:|---:|---:|---:|---:|",
            *map(_line, result["rows"]),
        ]
    )
