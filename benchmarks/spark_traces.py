"""Shipped traces of any size whose answers are known, made whole columns at a time.

Every topic has some publishers in one LAN and one subscriber in another; each message goes
publisher, edge, router, edge, subscriber, all on one host's clock. Some messages are lost behind
the router in runs of known length, some come twice, some bounds are planted too small. The stream of
the first publisher of each topic dies before its end. The last publisher sends one more message long after
that, which tells that the subscriber lives; of the last topic it does not, and what became
of the others cannot be known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_analysis.schema import ARROW_ROWS, ARROW_SEGMENTS, ROWS_FOLDER, SEGMENTS_FOLDER

TOPICS: Final = 20
PUBLISHERS_PER_TOPIC: Final = 5
LANS: Final = ("plant", "office", "harbour", "ship")
HOPS: Final = 5
LOSS_RUN_MAX: Final = 4
DEADLINE_NS: Final = 60_000_000
PERIOD_NS: Final = 1_000_000
WALL_NS: Final = 1_700_000_000_000_000_000
ROWS_MIN: Final = TOPICS * PUBLISHERS_PER_TOPIC * HOPS * 20
LOST_AT_END: Final = LOSS_RUN_MAX + 1
"""Messages of the first publisher of a topic, to its end."""
PAUSE_NS: Final = 10_000_000_000
"""Before the one last message of the last publisher; longer than anything is on its way."""
_MEDIANS_NS: Final = (300_000, 100_000, 12_000_000, 200_000, 18_000_000, 100_000, 300_000)
"""To the edge, in it, to the router, in it, to the edge, in it, to the subscriber."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class TopicAnswer:
    """What the report must say of a topic."""

    messages: int = 0
    deliveries: int = 0
    lost: int = 0
    longest_loss_run: int = 0
    unaccounted: int = 0
    duplicates_dropped: int = 0
    bound_violations: int = 0
    in_time: int = 0
    ages_ns: list[Numbers] = field(default_factory=list)


@dataclass
class Answers:
    """What the report must say."""

    rows: int = 0
    topics: dict[str, TopicAnswer] = field(default_factory=dict)
    links: dict[str, list[Numbers]] = field(default_factory=dict)


def generate(folder: Path, rows: int, seed: int) -> Answers:
    """Write about that many rows; returns what is in them."""
    answers = Answers()
    draw = np.random.default_rng(seed)
    per_publisher = max(20, rows // (HOPS * TOPICS * PUBLISHERS_PER_TOPIC))
    date = datetime.fromtimestamp(WALL_NS / 1e9, UTC).date()
    parts = folder / ROWS_FOLDER / f"date={date}"
    parts.mkdir(parents=True)
    for topic in range(TOPICS):
        with pq.ParquetWriter(parts / f"topic-{topic:02}.parquet", ARROW_ROWS, compression="zstd") as writer:
            for publisher in range(PUBLISHERS_PER_TOPIC):
                for table in _publish(answers, draw, topic, publisher, per_publisher):
                    writer.write_table(table)
    (folder / SEGMENTS_FOLDER).mkdir()
    facts = {"segment": "generated", "schema": 1, "records": answers.rows, "sampling": 1.0, "salvaged": False}
    pq.write_table(
        pa.Table.from_pylist([facts], ARROW_SEGMENTS), folder / SEGMENTS_FOLDER / "generated.parquet"
    )
    return answers


def _publish(
    answers: Answers, draw: np.random.Generator, topic: int, publisher: int, count: int
) -> list[pa.Table]:
    name = f"topic-{topic:02}"
    answer = answers.topics.setdefault(name, TopicAnswer())
    sequence = np.arange(1, count + 1)
    born_ns = 10**12 + sequence * PERIOD_NS + draw.integers(0, 1_000, count)
    took_ns = [
        np.maximum(1, (median * draw.lognormal(0, 0.35, count)).astype(np.int64)) for median in _MEDIANS_NS
    ]
    lost = _losses(draw, count)
    dead = np.zeros(count, dtype=bool)
    if publisher == 0:
        dead[-LOST_AT_END:] = True
    if publisher == PUBLISHERS_PER_TOPIC - 1 and topic < TOPICS - 1:
        born_ns[-1] += PAUSE_NS
    came = ~lost & ~dead
    age_ns = sum(took_ns[1:], took_ns[0])
    error_ns = draw.integers(1_000, 500_000, count)
    broken = np.zeros(count, dtype=bool)
    broken[draw.choice(np.flatnonzero(came), 1)] = True
    error_ns[broken] = -1
    twice = came & (draw.random(count) < 0.01)

    answer.messages += count
    answer.deliveries += int(came.sum())
    if topic < TOPICS - 1:
        lost |= dead
    else:
        answer.unaccounted += int(dead.sum())
    answer.lost += int(lost.sum())
    answer.longest_loss_run = max(answer.longest_loss_run, longest_run(lost))
    answer.duplicates_dropped += int(twice.sum())
    answer.bound_violations += 1
    answer.in_time += int((age_ns[came] <= DEADLINE_NS).sum())
    answer.ages_ns.append(age_ns[came])

    start, end = LANS[topic % len(LANS)], LANS[(topic + 1) % len(LANS)]
    names = (
        f"pub-{topic}-{publisher}",
        f"edge-{start}",
        f"router-{topic % 3}",
        f"edge-{end}",
        f"sub-{topic}",
    )
    roles = ("client", "edge", "router", "edge", "client")
    lans = (start, start, "", end, end)
    tables = []
    in_ns = born_ns
    for hop in range(HOPS):
        last = hop + 1 == HOPS
        if hop:
            link_ns = took_ns[2 * hop - 2]
            in_ns = in_ns + link_ns
        wait_ns = took_ns[2 * hop - 1] if 0 < hop < HOPS - 1 else np.zeros(count, dtype=np.int64)
        here = came if hop >= 3 else np.ones(count, dtype=bool)
        columns = {
            "sequence": sequence,
            "in_ns": in_ns,
            "out_ns": None if last else in_ns + wait_ns,
            "born_ns": born_ns,
            # The planted violation is the subscriber's; elsewhere every bound holds.
            "age_bound_ns": in_ns - born_ns + (error_ns if last else np.abs(error_ns)) if hop else None,
            "link_bound_ns": link_ns + np.abs(error_ns) if hop else None,
        }
        texts = {
            "node": names[hop],
            "role": roles[hop],
            "lan": lans[hop],
            "event": "delivered" if last else "dispatched",
            "peer_in": names[hop - 1] if hop else None,
            "peer_out": None if last else names[hop + 1],
            "topic": name,
        }
        tables.append(_table(columns, texts, here, topic * PUBLISHERS_PER_TOPIC + publisher + 1))
        if hop:
            answers.links.setdefault(f"{names[hop - 1]} → {names[hop]}", []).append(link_ns[here])
        if hop == 3:
            copies = {"sequence": sequence, "in_ns": in_ns + 5_000_000}
            again = {**texts, "event": "duplicate", "peer_out": None}
            tables.append(_table(copies, again, twice, topic * PUBLISHERS_PER_TOPIC + publisher + 1))
        in_ns = in_ns + wait_ns
    answers.rows += sum(table.num_rows for table in tables)
    return tables


def _table(
    columns: Mapping[str, Numbers | None], texts: dict[str, str | None], here: Any, publisher: int
) -> pa.Table:
    count = int(here.sum())
    numbers = {name: values[here] for name, values in columns.items() if values is not None}
    constants: dict[str, Any] = {
        **texts,
        "host": "boot-1",
        "clock": "boot-1/1",
        "publisher": publisher,
        "deadline_ns": DEADLINE_NS,
        "loss_tolerance": LOSS_RUN_MAX,
        "period_ns": PERIOD_NS,
    }
    at_us = pa.array((numbers["in_ns"] + WALL_NS) // 1_000, pa.int64())
    found = {"at": at_us.cast(pa.timestamp("us", tz="UTC"))}
    for name in ARROW_ROWS.names[1:]:
        kind = ARROW_ROWS.field(name).type
        if name in numbers:
            found[name] = pa.array(numbers[name], pa.int64())
        else:
            found[name] = pa.repeat(pa.scalar(constants.get(name), kind), count)
    return pa.table(found, schema=ARROW_ROWS)


def _losses(draw: np.random.Generator, count: int) -> Any:
    """Messages that get lost, in runs; never the first nor the last ten: those show where a stream ends."""
    lost = np.zeros(count, dtype=bool)
    for start in draw.integers(10, max(11, count - 14), max(1, count // 1_000)):
        lost[start : start + int(draw.integers(1, LOSS_RUN_MAX + 1))] = True
    lost[:10] = lost[-10:] = False
    return lost


def longest_run(flags: Any) -> int:
    """Most flags in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max(initial=0))
