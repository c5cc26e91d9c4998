"""One path or two (PubSubCoord, III.4.3, Table 3): latency, kept deadlines and bytes in eight cases.

A testbed in network namespaces with real emulated links: a direct link L1 between two LANs, and L2 and
L3 to the routing brokers, each either A (30 ms) or B (250 ms, 1 % loss). Three topics with deadlines of
100, 300 and 600 ms cross it, under each of the policies `single`, `both` and `adaptive`. A deadline is
hit by every message that arrives within it; what does not arrive at all has missed it.

*Can be kept.* A path can keep a deadline if what it cannot do faster, the sum of the set delays of its
links, and `NODES_MS` for the nodes on it, is within the deadline. Losses do not count here: they are
what redundancy is for. So the direct path with 250 ms can keep 300 ms, although it loses one of a
hundred packets and has no time to send one again.

*One path suffices* where some path can keep the deadline: then `adaptive` must need no more than 1.2
times the bytes of `single`. Bytes are those of all packets on the three links, whole, with heartbeats,
acknowledgements and what ZooKeeper says, while it is measured.
"""

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml

from benchmarks import machine
from overlay.paths import Policy
from topology.checker import Stream, percentile
from topology.conditions import LinkConditions
from topology.driver import Say, running
from topology.emulation import calibrate_conditions
from topology.errors import DriverError
from topology.load_runner import LoadRunner
from topology.model import Topology, library, parse_topology
from topology.netns_driver import NetnsDriver

TOPOLOGY: Final = "pubsubcoord-8-cases"
CASES: Final = tuple(range(1, 9))
DEADLINES_MS: Final = (100, 300, 600)
RATE_PER_S: Final = 100
PAYLOAD_BYTES: Final = 64
NODES_MS: Final = 10.0
"""Allowed for clients and brokers on a path."""
HITS_WANTED_PCT: Final = 99.9
BYTES_MOST: Final = 1.2
CALIBRATION_PACKETS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    seconds: float = 30.0
    settle_s: float = 12.0
    """Links are measured and paths chosen in this time, before messages count."""
    cases: tuple[int, ...] = CASES
    policies: tuple[Policy, ...] = tuple(Policy)
    calibration_packets: int = CALIBRATION_PACKETS
    keep_logs: bool = False


def topology(policy: Policy) -> Topology:
    """The library's topology, with more messages, so that one in a thousand can be seen."""
    content = yaml.safe_load(library()[TOPOLOGY])
    for qos in content["topics"].values():
        qos |= {"period_ms": 1_000 / RATE_PER_S, "retention": 256, "paths": policy.value}
    for publisher in content["publishers"]:
        publisher |= {"rate_per_s": RATE_PER_S, "payload_bytes": PAYLOAD_BYTES}
    return parse_topology(yaml.safe_dump(content, sort_keys=False))


def can_keep(layout: Topology, deadline_ms: float) -> list[str]:
    """The paths whose set delays are within the deadline."""
    cloud = layout.routers[0].host
    direct_ms = layout.conditions("west", "east").delay_ms
    routing_ms = layout.conditions("west", cloud).delay_ms + layout.conditions(cloud, "east").delay_ms
    return [
        path
        for path, delay_ms in (("direct", direct_ms), ("routing", routing_ms))
        if delay_ms + NODES_MS <= deadline_ms
    ]


async def measure(
    settings: Settings,
    say: Say,
    *,
    earlier: dict[str, Any] | None = None,
    at_most_s: float = math.inf,
    store: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Run everything; `ok` says whether both demands were met wherever they apply.

    In pieces: rows of an `earlier` result that are valid are not run again, no row but the first is
    begun after `at_most_s`, and `store` gets the result so far after every row.
    """
    before = _usable(earlier, settings) if earlier is not None else []
    description = machine.describe()
    began_s = time.monotonic()
    calibrations = [await _calibrate(name, settings, say) for name in ("A", "B")]
    piece = {**description, "calibration": calibrations}
    result: dict[str, Any] = {
        "cases": list(before),
        "pieces": [*(earlier["pieces"] if earlier is not None else []), piece],
        "settings": asdict(settings),
    }
    for case, policy in itertools.product(settings.cases, settings.policies):
        if any((row["case"], row["policy"]) == (case, policy.value) for row in before):
            continue
        if len(result["cases"]) > len(before) and time.monotonic() - began_s > at_most_s:
            say(f"case {case} {policy.value} is left for the next time")
            continue
        row = await _measure_case(case, policy, settings)
        say(_line(row))
        row["commit"] = description["commit"]
        result["cases"] = sorted([*result["cases"], row], key=_order)
        store(_judged(result))
    return _judged(result)


def _order(row: dict[str, Any]) -> tuple[int, int]:
    return row["case"], list(Policy).index(Policy(row["policy"]))


def _usable(earlier: dict[str, Any], settings: Settings) -> list[dict[str, Any]]:
    """The rows that need not be run again. Raises DriverError if they were measured otherwise."""
    for name in ("seconds", "settle_s"):
        there, wanted = earlier["settings"][name], getattr(settings, name)
        if there != wanted:
            raise DriverError(
                f"the result to go on with has {name} {there:g}, not {wanted:g}: "
                f"give --{name.replace('_', '-')} {there:g}, or begin anew without --resume"
            )
    return [row for row in earlier["cases"] if row["valid"]]


def _judged(result: dict[str, Any]) -> dict[str, Any]:
    calibrated = all(item["ok"] for piece in result["pieces"] for item in piece["calibration"])
    valid = all(row["valid"] for row in result["cases"])
    judged = {"calibration_ok": calibrated and valid, **result}
    return {"ok": not failures(judged), **judged}


def failures(result: dict[str, Any]) -> list[str]:
    """What was demanded and is not so."""
    found = [] if result["calibration_ok"] else ["the emulated links were not what was asked for"]
    measured = {(row["case"], row["policy"]) for row in result["cases"]}
    wanted = itertools.product(result["settings"]["cases"], result["settings"]["policies"])
    found += [
        f"case {case}, {policy}: not measured" for case, policy in wanted if (case, policy) not in measured
    ]
    single = {row["case"]: row for row in result["cases"] if row["policy"] == Policy.SINGLE}
    for row in result["cases"]:
        where = f"case {row['case']}, {row['policy']}"
        if row["policy"] == Policy.SINGLE:
            continue
        for deadline, paths in row["can_keep"].items():
            hits = row["deadline_hit_pct"][deadline]
            if paths and hits < HITS_WANTED_PCT:
                found.append(f"{where}: {hits:g} % within {deadline} ms, wanted {HITS_WANTED_PCT:g}")
        if row["policy"] == Policy.ADAPTIVE and row["case"] in single:
            ratio = row["wire_bytes"] / single[row["case"]]["wire_bytes"]
            if ratio > BYTES_MOST:
                found.append(f"{where}: {ratio:.2f} times the bytes of single, wanted {BYTES_MOST:g}")
    return found


async def _calibrate(name: str, settings: Settings, say: Say) -> dict[str, Any]:
    conditions = LinkConditions(**yaml.safe_load(library()[TOPOLOGY])["conditions"][name])
    with TemporaryDirectory() as directory:
        record = await calibrate_conditions(
            conditions, directory=Path(directory), packets=settings.calibration_packets
        )
    say(f"{name} ({conditions.describe()}) is {'as' if record['ok'] else 'NOT as'} it should be")
    return {"conditions": name, **record}


async def _measure_case(case: int, policy: Policy, settings: Settings) -> dict[str, Any]:
    layout = topology(policy).under(f"case-{case}")
    async with running(layout, NetnsDriver, keep=settings.keep_logs) as driver:
        load = LoadRunner(driver)
        await load.start()
        await load.wait_warm()
        await asyncio.sleep(settings.settle_s)
        bytes_before, began_s = await _bytes(driver), time.monotonic()
        await load.measure()
        await asyncio.sleep(settings.seconds)
        wire_bytes, took_s = await _bytes(driver) - bytes_before, time.monotonic() - began_s
        await load.stop()
        results = await load.results()
        edges = {
            name: await driver.status(name) for name in driver.nodes if driver.nodes[name].role == "edge"
        }
        network = await driver.network.statistics()
    by_topic = {topic: [item for item in results.streams if item.topic == topic] for topic in layout.topics}
    latencies = sorted(_latencies(results.streams))
    return {
        "case": case,
        "policy": policy.value,
        "avg_ms": round(statistics.fmean(latencies) / 1e6, 2),
        "p99_ms": round(percentile(latencies, 0.99) / 1e6, 2),
        "max_ms": round(latencies[-1] / 1e6, 2),
        "deadline_hit_pct": {
            str(deadline): round(_hits_pct(by_topic[f"deadline/{deadline}"], deadline), 3)
            for deadline in DEADLINES_MS
        },
        "wire_bytes": round(wire_bytes * settings.seconds / took_s),
        "valid": network["invalid"] is None,
        "invalid": network["invalid"],
        "sent": sum(results.sent.values()),
        "lost": sum(stream.sent - len(set(stream.sequences)) for stream in results.streams),
        "can_keep": {str(deadline): can_keep(layout, deadline) for deadline in DEADLINES_MS},
        "paths": {
            item["topic"]: item["paths"].get("east-edge-1", next(iter(item["paths"].values()), ""))
            for item in edges[next(name for name in edges if "west" in name)]["core"]["topics"]
        },
        "by_deadline": {
            str(deadline): _summary_of(by_topic[f"deadline/{deadline}"]) for deadline in DEADLINES_MS
        },
        "ferry_late_p99_ms": network["late_p99_ms"],
        "ferry_late_max_ms": network["late_max_ms"],
        "links": {name: [_link(link) for link in status["links"]] for name, status in edges.items()},
        "dropped": {name: status["core"]["dropped"] for name, status in edges.items()},
    }


def _link(link: dict[str, Any]) -> dict[str, Any]:
    kept = ("peer", "up", "connects", "round_trip_ms", "datagrams", "datagram_bytes_sent")
    return {name: link[name] for name in kept}


def _latencies(streams: Sequence[Stream]) -> list[int]:
    return [
        received_ns - sent_ns
        for stream in streams
        for sent_ns, received_ns in zip(stream.sent_ns, stream.received_ns, strict=True)
    ]


def _hits_pct(streams: Sequence[Stream], deadline_ms: int) -> float:
    sent = sum(stream.sent for stream in streams)
    return 100 * sum(latency <= deadline_ms * 1e6 for latency in _latencies(streams)) / max(1, sent)


def _summary_of(streams: Sequence[Stream]) -> dict[str, float]:
    ordered = sorted(_latencies(streams))
    return {
        "avg_ms": round(statistics.fmean(ordered) / 1e6, 2),
        "p99_ms": round(percentile(ordered, 0.99) / 1e6, 2),
        "max_ms": round(ordered[-1] / 1e6, 2),
    }


async def _bytes(driver: NetnsDriver) -> int:
    """All that the links were given to carry, in all directions."""
    return sum(lane["bytes"] for lane in (await driver.network.statistics())["lanes"])


def _line(row: dict[str, Any]) -> str:
    hits = ", ".join(f"{value:g} % within {deadline}" for deadline, value in row["deadline_hit_pct"].items())
    return (
        f"case {row['case']} {row['policy']}: {row['avg_ms']:g} ms on average, p99 {row['p99_ms']:g}, "
        f"max {row['max_ms']:g}; {hits}; {row['wire_bytes'] / 1e6:.2f} MB"
        f"{'' if row['valid'] else ' INVALID: ' + row['invalid']}"
    )


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        "| case | policy | average, ms | p99 | maximum | within 100 ms, % | 300 ms | 600 ms | MB | paths |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["cases"]:
        hits = " | ".join(
            f"{row['deadline_hit_pct'][deadline]:g}{'' if paths else ' (cannot be)'}"
            for deadline, paths in row["can_keep"].items()
        )
        paths = "; ".join(dict.fromkeys(row["paths"].values()))
        lines.append(
            f"| {row['case']} | {row['policy']} | {row['avg_ms']:g} | {row['p99_ms']:g} | {row['max_ms']:g} "
            f"| {hits} | {row['wire_bytes'] / 1e6:.2f} | {paths} |"
        )
    wrong = failures(result)
    return "\n".join([*lines, "", *(wrong or ["every demand met"])])
