"""Age bounds against the truth, which processes on one host know: they share one monotonic clock.

Three LANs at different distances from the cloud, a client in each; every client publishes to the
two others, in batches of changing size. Now and then a LAN is cut off for a moment, so that
messages arrive late, some hundreds of milliseconds old. Every message carries when it was
published; its bound must not be below what has really passed when it arrives. Because there is
only one clock, the shift of a link *is* the error of its bound, and every broker's `/status` tells
it: it must be at most half the link's round trip and 0.2 ms.

What bounds cost is measured in the same run (`benchmarks.bounds_cost`).
"""

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Sized
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks import bounds_cost, machine
from clients import Client, Publisher, ReceivedMessage, Subscription
from overlay.limits import MILLISECOND_NS
from runtime.host import Host
from topology.driver import Driver, Say, running
from topology.errors import DriverError, LoadError
from topology.model import Topology, parse_topology
from topology.process_driver import ProcessDriver

DELAYS_MS: Final = {"near": 2.0, "middle": 8.0, "far": 30.0}
"""One way from a LAN to the cloud."""
BATCH_MOST: Final = 200
PAUSE_MOST_S: Final = 0.02
CUT_EVERY_S: Final = 3.0
CUT_MOST_S: Final = 0.15
SAMPLE_EVERY_S: Final = 1.0
ALLOWED_MS: Final = 0.2
"""What the error of a link's bound may be above half its round trip."""
_VERDICTS: Final = {
    True: "as promised",
    False: "A PROMISE BROKEN",
    None: "as promised, but for what they cost, which could not be told",
}
QUIET_S: Final = 20.0
"""Give up if nothing arrives for this long."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    messages: int = 1_000_000
    """Deliveries to be checked."""
    seed: int = 1
    core_rounds: int = bounds_cost.CORE_ROUNDS
    broker_seconds: float = bounds_cost.BROKER_SECONDS
    keep_logs: bool = False


class PinnedClock:
    """The host's clock; pinned while messages are stamped, so that their time of birth is known exactly."""

    def __init__(self) -> None:
        self.pinned_ns = 0

    def __call__(self) -> int:
        """The reading."""
        return self.pinned_ns or time.monotonic_ns()


@dataclass(slots=True)
class Tally:
    """What one subscription has seen."""

    way: str
    checked: int = 0
    unknown: int = 0
    below: int = 0
    errors_ms: list[float] = field(default_factory=list)
    ages_ms: list[float] = field(default_factory=list)

    def check(self, message: ReceivedMessage) -> None:
        """Compare a bound with the truth."""
        if message.age_bound_ms is None:
            self.unknown += 1
            return
        true_ms = (message.received_ns - int.from_bytes(message.payload, "little")) / MILLISECOND_NS
        self.checked += 1
        self.below += message.age_bound_ms < true_ms
        self.errors_ms.append(message.age_bound_ms - true_ms)
        self.ages_ms.append(true_ms)


def topology() -> Topology:
    """LANs near, middle and far."""
    lans = ", ".join(f"{lan}: {{edges: 1, wan: {{delay_ms: {ms:g}}}}}" for lan, ms in DELAYS_MS.items())
    return parse_topology(f"lans: {{{lans}}}\nrouters: 2\n")


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run it; `ok` says whether no bound was below the truth, none too loose, and none too dear.

    None if what they cost could not be told.
    """
    description = machine.describe()
    cost = await measure_cost(settings.core_rounds, settings.broker_seconds, say)
    async with running(topology(), ProcessDriver, keep=settings.keep_logs) as driver:
        tallies, links = await _run(driver, settings, say)
        if dead := driver.died_unasked():
            raise DriverError(f"{', '.join(dead)} ended unasked; logs are in {driver.directory}")
    ways = [_way(tally) for tally in tallies]
    below = sum(tally.below for tally in tallies)
    kept = not below and all(link["ok"] for link in links)
    return {
        "ok": kept and cost["brokers"]["ok"],
        "messages": sum(tally.checked for tally in tallies),
        "below_truth": below,
        "unknown": sum(tally.unknown for tally in tallies),
        "ways": ways,
        "links": links,
        "cost": cost,
        "settings": asdict(settings),
        "machine": description,
    }


async def measure_cost(core_rounds: int, broker_seconds: float, say: Say) -> dict[str, Any]:
    """What bounds cost the cores alone and real brokers."""
    cores = bounds_cost.measure_cores(core_rounds)
    say(bounds_cost.cores_summary(cores))
    brokers = await bounds_cost.measure_brokers(broker_seconds, bounds_cost.BROKER_MESSAGES, say)
    return {"cores": cores, "brokers": brokers}


def cost_summary(cost: Mapping[str, Any]) -> str:
    """What bounds cost, as text for people."""
    return f"{bounds_cost.cores_summary(cost['cores'])}\n\n{bounds_cost.brokers_summary(cost['brokers'])}"


async def _run(driver: Driver, settings: Settings, say: Say) -> tuple[list[Tally], list[dict[str, Any]]]:
    tallies: list[Tally] = []
    samples: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        senders: list[tuple[PinnedClock, Publisher]] = []
        subscriptions: list[Subscription] = []
        clients: dict[str, Client] = {}
        for lan in DELAYS_MS:
            clock = PinnedClock()
            client = clients[lan] = Client(driver.edges_of(lan), host=Host(clock))
            await client.start()
            stack.push_async_callback(client.close)
            senders.append((clock, await client.publisher(f"from-{lan}")))
        for lan, client in clients.items():
            for other in DELAYS_MS:
                if other != lan:
                    subscriptions.append(await client.subscribe(f"from-{other}"))
                    tallies.append(Tally(f"{other} to {lan}"))
        for _, publisher in senders:
            await publisher.wait_for_subscribers(len(DELAYS_MS) - 1, QUIET_S)
        randomness = random.Random(settings.seed)
        work = [asyncio.create_task(_publish(clock, publisher, randomness)) for clock, publisher in senders]
        work.append(asyncio.create_task(_disturb(driver, randomness)))
        work.append(asyncio.create_task(_sample(driver, clients, samples)))
        receiving = [
            asyncio.create_task(_receive(subscription, tally))
            for subscription, tally in zip(subscriptions, tallies, strict=True)
        ]
        try:
            await _until_enough(tallies, samples, settings.messages, [*work, *receiving], say)
        finally:
            for task in (*work, *receiving):
                task.cancel()
            await asyncio.gather(*work, *receiving, return_exceptions=True)
    return tallies, [_link(*names, values) for names, values in sorted(samples.items())]


async def _until_enough(
    tallies: Sequence[Tally],
    samples: Sized,
    wanted: int,
    tasks: Sequence["asyncio.Task[None]"],
    say: Say,
) -> None:
    """Wait for that many messages, and for the first look at the links."""
    checked, told, since_s = 0, 0, time.monotonic()
    while checked < wanted or not samples:
        done, _ = await asyncio.wait(tasks, timeout=SAMPLE_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # none of them ends but by an error
        now = sum(tally.checked for tally in tallies)
        if now > checked:
            checked, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > QUIET_S:
            raise LoadError(f"nothing arrived for {QUIET_S:g} s, after {checked} messages")
        if 10 * checked // wanted > told:
            told = 10 * checked // wanted
            say(f"{checked} messages, {sum(tally.below for tally in tallies)} bounds below the truth")


async def _publish(clock: PinnedClock, publisher: Publisher, randomness: random.Random) -> None:
    while True:
        await asyncio.sleep(randomness.uniform(0, PAUSE_MOST_S))
        count = randomness.randint(1, BATCH_MOST)
        clock.pinned_ns = time.monotonic_ns()
        payload = clock.pinned_ns.to_bytes(8, "little")
        try:
            publisher.publish_many_nowait([payload] * count)
        finally:
            clock.pinned_ns = 0


async def _receive(subscription: Subscription, tally: Tally) -> None:
    while True:
        for message in await subscription.receive_many():
            tally.check(message)


async def _disturb(driver: Driver, randomness: random.Random) -> None:
    """Cut LANs off for a moment, one after the other."""
    while True:
        await asyncio.sleep(CUT_EVERY_S)
        lan = randomness.choice(list(DELAYS_MS))
        await driver.cut(lan)
        await asyncio.sleep(randomness.uniform(0.01, CUT_MOST_S))
        await driver.heal(lan)


async def _sample(
    driver: Driver,
    clients: Mapping[str, Client],
    samples: defaultdict[tuple[str, str], list[tuple[float, float]]],
) -> None:
    """Note the shift and the round trip of every link at both its ends, every second.

    By the first time every link has exchanged more than three helpers.
    """
    while True:
        await asyncio.sleep(SAMPLE_EVERY_S)
        for name, status in (await driver.statuses()).items():
            for link in status["links"]:
                if link["up"] and link["clock_shift_ms"] is not None and link["round_trip_ms"]:
                    peer = "client" if link["role"] == "client" else link["peer"]
                    samples[name, peer].append((link["clock_shift_ms"], link["round_trip_ms"]))
        for lan, client in clients.items():
            seen = client.link_statistics()
            if seen.up and seen.clock_shift_ms is not None and seen.round_trip_ms:
                samples[f"client in {lan}", "its edge"].append((seen.clock_shift_ms, seen.round_trip_ms))


def _link(node: str, peer: str, values: Sequence[tuple[float, float]]) -> dict[str, Any]:
    error_ms = statistics.median(shift_ms for shift_ms, _ in values)
    # The shortest: others have queued behind data, which a helper that did not has nothing to do with.
    round_trip_ms = min(round_trip_ms for _, round_trip_ms in values)
    return {
        "node": node,
        "peer": peer,
        "samples": len(values),
        "median_error_ms": round(error_ms, 3),
        "round_trip_ms": round(round_trip_ms, 3),
        "ok": error_ms <= round_trip_ms / 2 + ALLOWED_MS,
    }


def _way(tally: Tally) -> dict[str, Any]:
    def at(values: list[float], share: float) -> float:
        return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 3) if values else 0.0

    return {
        "way": tally.way,
        "checked": tally.checked,
        "unknown": tally.unknown,
        "below_truth": tally.below,
        "least_error_ms": at(tally.errors_ms, 0),
        "median_error_ms": at(tally.errors_ms, 0.5),
        "p99_error_ms": at(tally.errors_ms, 0.99),
        "median_age_ms": at(tally.ages_ms, 0.5),
        "max_age_ms": at(tally.ages_ms, 1),
    }


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        f"{result['messages']} messages, {result['below_truth']} bounds below the true age, "
        f"{result['unknown']} unknown: {_VERDICTS[result['ok']]}",
        "",
        cost_summary(result["cost"]),
        "",
        "| way | messages | median age, ms | max age, ms | bound above it by: least | median | p99 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines.extend(
        f"| {way['way']} | {way['checked']} | {way['median_age_ms']:.1f} | {way['max_age_ms']:.1f} "
        f"| {way['least_error_ms']:.2f} | {way['median_error_ms']:.2f} | {way['p99_error_ms']:.2f} |"
        for way in result["ways"]
    )
    lines += ["", "| at | link to | median error, ms | half a round trip, ms | |", "|---|---|---:|---:|---|"]
    lines.extend(
        f"| {link['node']} | {link['peer']} | {link['median_error_ms']:.2f} "
        f"| {link['round_trip_ms'] / 2:.2f} | {'ok' if link['ok'] else 'too loose'} |"
        for link in result["links"]
    )
    return "\n".join(lines)
