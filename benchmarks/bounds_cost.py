"""What age bounds cost: real brokers, switched while they run, and their cores alone.

*On*, the clock of every link is asked for every frame. *Off*, there never is a helper: every age is unknown
all the way, and deadlines count from when a message came. In `brokers` both take turns in the same running
processes, sockets and all (`benchmarks.switching`); in `cores` there is nothing but the cores
(`benchmarks.cores`), and for comparison stamps *trusted* as they are, as if all clocks were one.
Every message is published by a call of its own and so has a stamp of its own, on topics with a short
deadline: the shorter it is, the more births are told apart (`overlay.schedule.granule_ns`), which is what
costs most.
"""

import gc
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import switching
from benchmarks.comparison import median_interval
from benchmarks.cores import Chain
from benchmarks.frame_workload import TOPICS_LEAST
from benchmarks.processes import ProcessorUse
from benchmarks.switching import VERDICTS, WAYS, Plan, Say, compare, table
from overlay.delay import LinkClock
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from overlay.qos import TopicQos
from runtime.compiled import compiled_modules

ALLOWED_PERCENT: Final = 5.0
"""Of a broker's throughput."""
CORE_TOPICS: Final = max(TOPICS_LEAST, 1_525)
CORE_ROUNDS: Final = 300
BROKER_SECONDS: Final = 60.0
BROKER_MESSAGES: Final = 8_000
_DEADLINE_MS: Final = 51
_TOPICS: Final = tuple((f"load-{at}", TopicQos(deadline_ms=_DEADLINE_MS + at)) for at in range(len(WAYS)))
"""Each way has a topic and a deadline of its own: messages of known age queue behind those of unknown age."""


async def measure_brokers(seconds: float, messages: int, say: Say) -> dict[str, Any]:
    """Processor time of three brokers per message, with bounds and without in turns."""
    before = ProcessorUse.now()
    plan = Plan("bounds on and off", "sharp", "blind", _TOPICS, seconds, messages)
    measured = await switching.measure(plan, say)
    places = compare([bed.turns for bed in measured])
    rounds = sum(len(bed.turns["on"]) for bed in measured)
    unknown_pct = {
        way: round(100 * sum(bed.unknown[way] for bed in measured) / messages / rounds, 2) for way in WAYS
    }
    switched = (unknown_pct["off"], unknown_pct["control"], unknown_pct["on"]) == (100, 100, 0)
    return {
        "ok": switching.judge(places, ALLOWED_PERCENT) if switched else None,
        "unknown_pct": unknown_pct,
        "allowed_pct": ALLOWED_PERCENT,
        "compiled": bool(compiled_modules()),
        "beds": len(measured),
        "rounds": rounds,
        "messages_per_turn": messages,
        "places": places,
        "stolen_pct": ProcessorUse.now().stolen_pct(before),
    }


def brokers_summary(cost: Mapping[str, Any]) -> str:
    """What bounds cost real brokers, as text for people."""
    way = "compiled" if cost["compiled"] else "interpreted"
    lines = [
        f"{way}, {cost['beds']} beds, turns of {cost['messages_per_turn']:,} messages: bounding ages "
        f"{VERDICTS[cost['ok']]} "
        f"{cost['allowed_pct']:g} %; ages were unknown of {cost['unknown_pct']['off']:g} % of the messages "
        f"without, {cost['unknown_pct']['on']:g} % with",
        "",
        *table([("bounds", cost["rounds"], cost["places"])]),
    ]
    return "\n".join(lines)


def measure_cores(rounds: int) -> dict[str, Any]:
    """Processor time of all cores per message with and without bounds, in turns in the same process."""
    clock = LinkClock()
    clock.helper(time.monotonic_ns(), time.monotonic_ns(), time.monotonic_ns())
    chains = {
        "on": Chain(CORE_TOPICS, shift_at=clock.shift_at),
        "off": Chain(CORE_TOPICS, shift_at=lambda now_ns: UNKNOWN_CLOCK_SHIFT),
        "trusted": Chain(CORE_TOPICS, shift_at=lambda now_ns: 0),
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
    off_us = 1e6 * statistics.median(spent_s["off"]) / CORE_TOPICS
    more = _more_percent(spent_s["on"], spent_s["off"])
    return {
        "topics": CORE_TOPICS,
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


def cores_summary(cost: Mapping[str, Any]) -> str:
    """What bounds cost the cores, as a line for people."""
    way = "compiled" if cost["compiled"] else "interpreted"
    low, high = cost["interval_percent"]
    return (
        f"{way}: bounds cost {cost['percent']:+.1f} % of the cores' time (95 % sure between {low:+.1f} and "
        f"{high:+.1f} %), over {cost['off_us_per_message']:.2f} µs per message without; "
        f"{cost['percent_over_trusted']:+.1f} % over stamps trusted as they are"
    )
