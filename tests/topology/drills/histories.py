"""Histories as subscribers and publishers record them: flawless ones, and faults to plant in them."""

import dataclasses
from typing import Any

from hypothesis import strategies as st

from topology.checker import Stream

MS = 1_000_000
PERIOD_NS = 10 * MS
LATENCY_NS = 15 * MS
START_NS = 1_000 * MS


def flawless(count: int, *, publisher: int = 0, subscriber: int = 0, crosses_wan: bool = True) -> Stream:
    """Everything comes once, in order, 15 ms after it was sent, with a bound 5 ms above the truth."""
    sent_ns = [START_NS + number * PERIOD_NS for number in range(count)]
    return Stream(
        publisher=publisher,
        subscriber=subscriber,
        topic="t",
        crosses_wan=crosses_wan,
        accepted_ns=[at_ns + 1000 for at_ns in sent_ns],
        period_ns=PERIOD_NS,
        sequences=list(range(1, count + 1)),
        sent_ns=sent_ns,
        received_ns=[at_ns + LATENCY_NS for at_ns in sent_ns],
        age_bound_ns=[LATENCY_NS + 5 * MS] * count,
    )


_COLUMNS = ("sequences", "sent_ns", "received_ns", "age_bound_ns")


def without(stream: Stream, first: int, last: int) -> Stream:
    """Messages `first` to `last` never came."""
    kept = [index for index, sequence in enumerate(stream.sequences) if not first <= sequence <= last]
    return pick(stream, kept)


def pick(stream: Stream, indices: list[int]) -> Stream:
    """Deliveries in this order; times of arrival stay as they were."""
    changes: dict[str, Any] = {name: [getattr(stream, name)[i] for i in indices] for name in _COLUMNS}
    changes["received_ns"] = sorted(changes["received_ns"])
    return dataclasses.replace(stream, **changes)


def change(stream: Stream, column: str, index: int, value: int) -> Stream:
    """One number of one delivery is another."""
    values = list(getattr(stream, column))
    values[index] = value
    changes: dict[str, Any] = {column: values}
    return dataclasses.replace(stream, **changes)


lengths = st.integers(20, 120)
