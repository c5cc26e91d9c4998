"""What tracing costs real brokers, sockets and disk included: `benchmarks.switching` with their tracing.

Turns are too short to have the writing of records, four times a second, in the right ones. That is
measured alone, as the processor time of a `TraceRecorder` that gets as many records as a broker with
nothing but messages to do, and added. What a paused tracer costs is a look at each run of messages
that leaves: `benchmarks.instructions` compares with none at all.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import machine, switching
from benchmarks.processes import ProcessorUse
from benchmarks.switching import VERDICTS, Plan, Say, compare, table
from benchmarks.switching_worker import HEARTBEAT_MS
from overlay.qos import TopicQos
from overlay.trace import RECORD_BYTES
from runtime.compiled import compiled_modules
from runtime.tracing import FLUSH_INTERVAL_S, TraceRecorder, TraceSettings

FLUSHES: Final = 20
ALLOWED_PERCENT: Final = 3.0
"""Of a broker's throughput, with `JUDGED` of the messages traced."""
JUDGED: Final = 0.01
OTHERS_SHARE: Final = 0.25
TOPIC: Final = ("load", TopicQos())


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    seconds: float = 120.0
    """For the share that is judged; others have `OTHERS_SHARE` of it."""
    messages: int = 8_000
    """Per turn."""
    sampling: tuple[float, ...] = (JUDGED, 1.0)


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run it; `ok` tells whether the judged share costs no broker more than it may, None if that is open."""
    description = machine.describe()
    before = ProcessorUse.now()
    costs: list[dict[str, Any]] = []
    for sampling in settings.sampling:
        with tempfile.TemporaryDirectory(prefix="isthmus-tracing-") as folder:
            beds = await switching.measure(_plan(settings, sampling, folder), say)
            places = compare([bed.turns for bed in beds], writing_us(sampling, Path(folder) / "alone"))
        rounds = sum(len(bed.turns["on"]) for bed in beds)
        costs.append({"sampling": sampling, "rounds": rounds, "beds": len(beds), "places": places})
    return {
        "ok": judge(costs),
        "allowed_pct": ALLOWED_PERCENT,
        "compiled": bool(compiled_modules()),
        "costs": costs,
        "settings": asdict(settings),
        "stolen_pct": ProcessorUse.now().stolen_pct(before),
        "heartbeat_ms": HEARTBEAT_MS,
        "machine": description,
    }


def _plan(settings: Settings, sampling: float, folder: str) -> Plan:
    share = 1.0 if sampling == JUDGED else OTHERS_SHARE
    return Plan(
        f"{100 * sampling:g} % traced",
        "trace",
        "pause",
        (TOPIC,),
        settings.seconds * share,
        settings.messages,
        {"trace_dir": folder, "trace_sample": sampling},
    )


def writing_us(sampling: float, folder: Path) -> float:
    """Microseconds of processor time per message for getting records to disk, one per traced message.

    At the rate of a broker that takes a microsecond for each message, or as many as a log holds.
    """
    recorder = TraceRecorder.here(TraceSettings(folder, sampling), f"writer-{sampling:g}", "edge")
    log = recorder.log
    records = min(round(sampling * FLUSH_INTERVAL_S * 1e6), log.limit_bytes // RECORD_BYTES)
    spent_s = 0.0
    for flush in range(FLUSHES + 1):
        log.append(bytes(RECORD_BYTES) * records)
        began_s = time.process_time()
        recorder.flush()
        while recorder.is_behind:
            time.sleep(0.001)
        if flush:  # the first one opens the segment
            spent_s += time.process_time() - began_s
    recorder.close()
    return 1e6 * spent_s / FLUSHES / (records / sampling)


def judge(costs: Sequence[dict[str, Any]]) -> bool | None:
    """Whether the judged share costs no broker more than it may; None if this run cannot tell."""
    judged = [place for cost in costs if cost["sampling"] == JUDGED for place in cost["places"]]
    return switching.judge(judged, ALLOWED_PERCENT)


def summary(result: dict[str, Any]) -> str:
    """A result as text for people."""
    lines = [
        f"{'compiled' if result['compiled'] else 'interpreted'}, turns of "
        f"{result['settings']['messages']:,} messages: {100 * JUDGED:g} % traced {VERDICTS[result['ok']]} "
        f"{result['allowed_pct']:g} %",
        "",
        *table(
            [
                (f"{100 * cost['sampling']:g} % traced", cost["rounds"], cost["places"])
                for cost in result["costs"]
            ]
        ),
        "",
    ]
    lines.extend(
        f"Writing what is traced of {100 * cost['sampling']:g} % is {place['added_pct']:.2f} % of it at the "
        f"{place['place']}."
        for cost in result["costs"]
        for place in cost["places"]
        if place["place"] != switching.ALL
    )
    return "\n".join(lines)
