"""What tracing costs real brokers, sockets and disk included: `benchmarks.switching` with their tracing.

Turns are too short to have the writing of records, four times a second, in the right ones. That is
measured alone, as the processor time of a `TraceRecorder` that gets as many records as a broker with
nothing but messages to do, and added. What a paused tracer costs is a look at each run of messages
that leaves: `benchmarks.instructions` compares with none at all.
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import machine, switching
from benchmarks.processes import ProcessorUse
from benchmarks.switching import VERDICTS, WAYS, Bed, Say, compare, table
from benchmarks.switching_worker import HEARTBEAT_MS
from overlay.qos import TopicQos
from overlay.trace import Event
from runtime.compiled import compiled_modules
from runtime.tracing import FLUSH_INTERVAL_S, TraceRecorder, TraceSettings

FLUSHES: Final = 20
ALLOWED_PERCENT: Final = 3.0
"""Of a broker's throughput, with `JUDGED` of the messages traced."""
JUDGED: Final = 0.01
TOPIC: Final = ("load", TopicQos())


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    seconds: float = 120.0
    """For the share that is judged; others have a quarter of it."""
    messages: int = 8_000
    """Per turn."""
    sampling: tuple[float, ...] = (JUDGED, 1.0)
    seed: int = 1


async def measure(settings: Settings, say: Say) -> dict[str, Any]:
    """Run it; `ok` tells whether the judged share costs no broker more than it may, None if that is open."""
    description = machine.describe()
    before = ProcessorUse.now()
    costs: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        traces = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-tracing-")))
        traced = [_traced(sampling, traces) for sampling in settings.sampling]
        workers = await stack.enter_async_context(switching.workers_for(lambda place: traced))
        for number, sampling in enumerate(settings.sampling):
            bed = Bed(workers, "trace", "pause", settings.seed)
            await bed.connect(stack, number, dict.fromkeys(WAYS, TOPIC))
            seconds = settings.seconds if sampling == JUDGED else settings.seconds / 4
            say(f"{100 * sampling:g} % traced, {seconds:g} s")
            await bed.measure(seconds, settings.messages)
            places = compare(bed.turns, writing_us(sampling, traces / "alone"))
            costs.append({"sampling": sampling, "rounds": len(bed.turns["on"]), "places": places})
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


def _traced(sampling: float, traces: Path) -> dict[str, Any]:
    return {
        "chroot": f"/tracing-{sampling:g}",
        "trace_dir": str(traces / f"{sampling:g}"),
        "trace_sample": sampling,
    }


def writing_us(sampling: float, folder: Path) -> float:
    """Microseconds of processor time per message for getting records to disk, one per traced message.

    At the rate of a broker that takes a microsecond for each message.
    """
    records = round(sampling * FLUSH_INTERVAL_S * 1e6)
    recorder = TraceRecorder.here(TraceSettings(folder, sampling), f"writer-{sampling:g}", "edge")
    spent_s = 0.0
    for flush in range(FLUSHES + 1):
        for sequence in range(records):
            recorder.log.record(Event.DISPATCHED, 1, 1, sequence)
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
