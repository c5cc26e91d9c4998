"""Age bounds against the truth, which processes on one host know: they share one monotonic clock.

Three LANs at different distances from the cloud, a client in each; every client publishes to the
two others, in batches of changing size. Now and then a LAN is cut off for a moment, so that
messages arrive late, some hundreds of milliseconds old. Every message carries when it was
published; its bound must not be below what has really passed when it arrives. Because there is
only one clock, the shift of a link *is* the error of its bound, and every broker's `/status` tells
it: it must be at most half the link's round trip and 0.2 ms.

What bounds cost is measured in the same run on the brokers' cores alone (`benchmarks.cores`), in
turns: *on*, with the clock of every link asked for every frame; *off*, with no helper ever, so that
every age is unknown all the way and deadlines count from when a message came. For comparison also with
stamps *trusted* as they are, as if all clocks were one.
"""

import asyncio
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks import machine
from benchmarks.comparison import median_interval
from benchmarks.cores import Chain
from benchmarks.frame_workload import TOPICS_LEAST
from clients import Client, Publisher, ReceivedMessage, Subscription
from overlay.delay import LinkClock
from overlay.limits import MILLISECOND_NS
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from runtime.compiled import compiled_modules
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
COST_ALLOWED_PERCENT: Final = 5.0
COST_TOPICS: Final = max(TOPICS_LEAST, 1_525)
COST_ROUNDS: Final = 300
QUIET_S: Final = 20.0
"""Give up if nothing arrives for this long."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    messages: int = 1_000_000
    """Deliveries to be checked."""
    seed: int = 1
    cost_rounds: int = COST_ROUNDS
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
    """Run it; `ok` says whether no bound was below the truth and none too loose."""
    description = machine.describe()
    cost = measure_cost(settings.cost_rounds)
    say(cost_summary(cost))
    async with running(topology(), ProcessDriver, keep=settings.keep_logs) as driver:
        tallies, links = await _run(driver, settings, say)
        if dead := driver.died_unasked():
            raise DriverError(f"{', '.join(dead)} ended unasked; logs are in {driver.directory}")
    ways = [_way(tally) for tally in tallies]
    below = sum(tally.below for tally in tallies)
    return {
        "ok": not below and all(link["ok"] for link in links) and cost["percent"] <= COST_ALLOWED_PERCENT,
        "messages": sum(tally.checked for tally in tallies),
        "below_truth": below,
        "unknown": sum(tally.unknown for tally in tallies),
        "ways": ways,
        "links": links,
        "cost": cost,
        "settings": asdict(settings),
        "machine": description,
    }


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
            await _until_enough(tallies, settings.messages, [*work, *receiving], say)
        finally:
            for task in (*work, *receiving):
                task.cancel()
            await asyncio.gather(*work, *receiving, return_exceptions=True)
    return tallies, [_link(*names, values) for names, values in sorted(samples.items())]


async def _until_enough(
    tallies: Sequence[Tally], wanted: int, tasks: Sequence["asyncio.Task[None]"], say: Say
) -> None:
    checked, told, since_s = 0, 0, time.monotonic()
    while checked < wanted:
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


def measure_cost(rounds: int) -> dict[str, Any]:
    """Processor time of all cores per message with and without bounds, in turns in the same process."""
    clock = LinkClock()
    clock.helper(time.monotonic_ns(), time.monotonic_ns(), time.monotonic_ns())
    chains = {
        "on": Chain(COST_TOPICS, shift_at=clock.shift_at),
        "off": Chain(COST_TOPICS, shift_at=lambda now_ns: UNKNOWN_CLOCK_SHIFT),
        "trusted": Chain(COST_TOPICS, shift_at=lambda now_ns: 0),
    }
    spent_s: dict[str, list[float]] = {which: [] for which in chains}
    gc.collect()
    gc.disable()
    randomness = random.Random(1)
    for number in range(rounds + 1):
        # In random order: whoever follows itself finds its own data in the caches.
        for which in randomness.sample(list(chains), len(chains)):
            took_s = chains[which].turn()
            if number:  # the first round makes the routes
                spent_s[which].append(took_s)
    gc.enable()
    off_us = 1e6 * statistics.median(spent_s["off"]) / COST_TOPICS
    more = _more_percent(spent_s["on"], spent_s["off"])
    return {
        "topics": COST_TOPICS,
        "rounds": rounds,
        "compiled": bool(compiled_modules()),
        "off_us_per_message": round(off_us, 3),
        "percent": round(statistics.median(more), 2),
        "interval_percent": [round(end, 2) for end in median_interval(more)],
        "percent_over_trusted": round(statistics.median(_more_percent(spent_s["on"], spent_s["trusted"])), 2),
    }


def _more_percent(on_s: Sequence[float], off_s: Sequence[float]) -> list[float]:
    """Rounds next to each other: what changes over time, and with whatever else runs, cancels out."""
    return [100 * (on / off - 1) for on, off in zip(on_s, off_s, strict=True)]


def cost_summary(cost: Mapping[str, Any]) -> str:
    """What bounds cost, as a line for people."""
    way = "compiled" if cost["compiled"] else "interpreted"
    low, high = cost["interval_percent"]
    return (
        f"{way}: bounds cost {cost['percent']:+.1f} % of the cores' time (95 % sure between {low:+.1f} and "
        f"{high:+.1f} %), over {cost['off_us_per_message']:.2f} µs per message without; "
        f"{cost['percent_over_trusted']:+.1f} % over stamps trusted as they are"
    )


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        f"{result['messages']} messages, {result['below_truth']} bounds below the true age, "
        f"{result['unknown']} unknown: {'as promised' if result['ok'] else 'A PROMISE BROKEN'}",
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
