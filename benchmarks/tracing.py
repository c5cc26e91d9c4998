"""What tracing costs real brokers: processes, sockets, the thread that writes segments.

Testbeds of the same topology stand side by side, one without tracing, the others with. They take
turns: one carries a burst of messages from LAN to LAN as fast as its client can send and another
receive, while the others idle. What counts is the processor time of all threads of each broker per
message, because that is what limits its throughput, and because it bears a machine with other work
better than time does. Turns are compared pair by pair, so that what changes over time cancels out.
"""

import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from clients import Client, Publisher, Subscription
from runtime.compiled import compiled_modules
from runtime.tracing import FLUSH_INTERVAL_S, TraceSettings
from topology.driver import Say, running
from topology.model import Topology, parse_topology
from topology.process_driver import ProcessDriver

BATCH: Final = 200
PAYLOAD: Final = bytes(16)
QUIET_S: Final = 30.0
"""Give up if nothing arrives for this long."""
ALLOWED_PERCENT: Final = 3.0
"""Of a broker's throughput, with `JUDGED` of the messages traced."""
JUDGED: Final = 0.01


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    rounds: int = 20
    messages: int = 40_000
    """Per turn."""
    sampling: tuple[float, ...] = (0.01, 1.0)


def topology() -> Topology:
    """Two LANs next to each other."""
    return parse_topology("lans: {a: {edges: 1}, b: {edges: 1}}\nrouters: 2\n")


class Bed:
    """A testbed and the two clients that load it."""

    def __init__(self, driver: ProcessDriver, sampling: float) -> None:
        self._driver = driver
        self.sampling = sampling
        self.turns: list[dict[str, float]] = []
        """Microseconds of processor time per message, by role."""
        self._publisher: Publisher
        self._subscription: Subscription

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect the clients."""
        clients = [Client(self._driver.edges_of(lan)) for lan in ("a", "b")]
        for client in clients:
            await client.start()
            stack.push_async_callback(client.close)
        self._publisher = await clients[0].publisher("load")
        self._subscription = await clients[1].subscribe("load")
        await self._publisher.wait_for_subscribers(1, QUIET_S)

    async def take_turn(self, messages: int) -> dict[str, float]:
        """Carry a burst; what each role took per message."""
        before = self._spent_ns()
        publishing = asyncio.create_task(self._publish(messages))
        received = 0
        while received < messages:
            received += len(await self._subscription.receive_many(QUIET_S))
        await publishing
        await asyncio.sleep(2 * FLUSH_INTERVAL_S)  # the last records are written
        after = self._spent_ns()
        return {role: (after[role] - before[role]) / messages / 1e3 for role in after}

    async def _publish(self, messages: int) -> None:
        for _ in range(messages // BATCH):
            await self._publisher.publish_many([PAYLOAD] * BATCH)

    def _spent_ns(self) -> dict[str, int]:
        """Processor time so far; the routers together, because either may be the primary."""
        spent = {"ingress edge": 0, "routing brokers": 0, "egress edge": 0}
        for name, node in self._driver.nodes.items():
            role = {"a": "ingress edge", "b": "egress edge"}.get(node.lan, "routing brokers")
            spent[role] += processor_ns(self._driver.pid_of(name))
        return spent


def processor_ns(pid: int) -> int:
    """Processor time of all threads of a process."""
    spent = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            spent += int((thread / "schedstat").read_text().split()[0])
    return spent


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run it; `ok` says whether tracing the judged share costs no broker more than it may."""
    description = machine.describe()
    async with AsyncExitStack() as stack:
        beds = []
        for sampling in (0.0, *settings.sampling):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-tracing-")))
            trace = TraceSettings(folder, sampling) if sampling else None
            driver = await stack.enter_async_context(running(topology(), ProcessDriver, trace=trace))
            beds.append(Bed(driver, sampling))
            await beds[-1].open(stack)
        for bed in beds:
            await bed.take_turn(settings.messages)  # makes routes, warms caches
        for number in range(settings.rounds):
            turn = number % len(beds)
            for bed in beds[turn:] + beds[:turn]:
                bed.turns.append(await bed.take_turn(settings.messages))
            if (number + 1) % 5 == 0:
                say(f"{number + 1} of {settings.rounds} rounds")
    costs = [_compare(beds[0], bed) for bed in beds[1:]]
    judged = [cost for cost in costs if cost["sampling"] == JUDGED]
    return {
        "ok": all(role["more_pct"] <= ALLOWED_PERCENT for cost in judged for role in cost["roles"]),
        "compiled": bool(compiled_modules()),
        "costs": costs,
        "settings": asdict(settings),
        "machine": description,
    }


def _compare(plain: Bed, traced: Bed) -> dict[str, Any]:
    roles = []
    for role in plain.turns[0]:
        off = [turn[role] for turn in plain.turns]
        on = [turn[role] for turn in traced.turns]
        more = sorted(100 * (b / a - 1) for a, b in zip(off, on, strict=True))
        roles.append(
            {
                "role": role,
                "off_us_per_message": round(statistics.median(off), 3),
                "on_us_per_message": round(statistics.median(on), 3),
                "more_pct": round(statistics.median(more), 2),
                "quartiles_pct": [round(more[len(more) // 4], 2), round(more[3 * len(more) // 4], 2)],
                "least_pct": round(100 * (min(on) / min(off) - 1), 2),
                "off_turns": [round(value, 4) for value in off],
                "on_turns": [round(value, 4) for value in on],
            }
        )
    return {"sampling": traced.sampling, "roles": roles}


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    way = "compiled" if result["compiled"] else "interpreted"
    lines = [
        f"{way}, {result['settings']['rounds']} rounds of {result['settings']['messages']:,} messages",
        "",
        "| traced | broker | µs per message off | on | more, median | quartiles | quickest turns |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    lines.extend(
        f"| {100 * cost['sampling']:g} % | {role['role']} | {role['off_us_per_message']:.2f} "
        f"| {role['on_us_per_message']:.2f} | {role['more_pct']:+.1f} % "
        f"| {role['quartiles_pct'][0]:+.1f} to {role['quartiles_pct'][1]:+.1f} % "
        f"| {role['least_pct']:+.1f} % |"
        for cost in result["costs"]
        for role in cost["roles"]
    )
    return "\n".join(lines)
