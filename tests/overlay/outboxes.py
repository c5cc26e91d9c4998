"""Runs with numbered messages, and a plain model of what waits in an outbox."""

from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import strategies as st

from overlay.batch import (
    Run,
    decode_batch_header,
    decode_messages,
    encode_message,
)
from overlay.limits import FRAME_TARGET_BYTES, MILLISECOND_NS, RUN_OVERHEAD_BYTES
from overlay.outbox import (
    Ticket,
)
from overlay.schedule import BUCKET_SHIFT

Header = tuple[int, int, int]
HEADER: Header = (0, 7, 0)
NOW = 10**12
MS = MILLISECOND_NS
PLENTY = 2**40

headers = st.tuples(st.integers(0, 1), st.integers(7, 8), st.sampled_from([0, -5]))
sizes_of_messages = st.lists(st.sampled_from([0, 1, 100, 20_000, FRAME_TARGET_BYTES]), min_size=1, max_size=3)
deadlines = st.integers(0, 3).map(lambda bucket: bucket << BUCKET_SHIFT)


@dataclass
class Numbered:
    """Makes runs whose messages are numbered on and carry their batch header, to be checked at the end."""

    last: int = 0

    def run(self, header: Header, sizes: list[int]) -> Run:
        data = b""
        for size in sizes:
            self.last += 1
            urgency, origin, clock_shift_ns = header
            data += encode_message(urgency, origin, self.last, clock_shift_ns % 2**61, bytes(size))
        return Run(len(sizes), data)


def numbers_of(body: bytes) -> list[int]:
    """The numbers of the messages in a frame, which must all belong under its header."""
    header = decode_batch_header(body)
    numbers = []
    for message in decode_messages(body):
        carried = (message.topic_id, message.publisher, message.born_ns)
        assert carried == (header.urgency, header.origin, header.clock_shift_ns % 2**61)
        numbers.append(message.sequence)
    return numbers


class Waiting(NamedTuple):
    """A run in the model of what waits."""

    deadline_ns: int
    numbers: list[int]
    ticket: Ticket | None
    data_bytes: int
    urgency: int = 0

    @property
    def level(self) -> int:
        return self.urgency if self.deadline_ns else 0

    @property
    def is_cancelled(self) -> bool:
        return self.ticket is not None and self.ticket.cancelled


@dataclass
class Queue:
    """The model of what waits: a plain list, by level and deadline, that is sorted again and again."""

    runs: list[Waiting] = field(default_factory=list)

    def push(self, run: Waiting) -> None:
        self.runs.append(run)
        self.runs.sort(key=lambda each: (each.level, each.deadline_ns))  # stable: ties stay in order

    def earliest(self) -> Waiting:
        """What is due first; of the same millisecond, the most urgent."""
        return min(self.runs, key=lambda each: (each.deadline_ns >> BUCKET_SHIFT, each.level))

    def _next(self, below: int, now_ns: int) -> Waiting | None:
        """What should leave next, if only levels below this one have room in the window."""
        runs = [run for run in self.runs if run.level < below]
        if not runs:
            return None
        earliest = min(runs, key=lambda each: (each.deadline_ns >> BUCKET_SHIFT, each.level))
        is_late = (earliest.deadline_ns >> BUCKET_SHIFT) + 1 << BUCKET_SHIFT <= now_ns
        return runs[0] if is_late else earliest

    def pop_sent(self, numbers: list[int], waiting_messages: int, now_ns: int = 0) -> list[Waiting]:
        """These numbers have left and that many still wait; returns the runs that are gone.

        Whole runs leave from the front of a level. A cancelled one vanishes when it is met, at the latest
        when something behind it leaves.
        """
        gone = []
        left = list(numbers)
        while left or self.messages() > waiting_messages:
            may_be_next = [run for below in (2, 1) if (run := self._next(below, now_ns)) is not None]
            first = next(
                run for run in may_be_next if run.is_cancelled or run.numbers == left[: len(run.numbers)]
            )
            self.runs.remove(first)
            gone.append(first)
            if not first.is_cancelled:
                assert left[: len(first.numbers)] == first.numbers
                del left[: len(first.numbers)]
        return gone

    def messages(self) -> int:
        return sum(len(run.numbers) for run in self.runs)

    def memory_bytes(self) -> int:
        return sum(run.data_bytes + RUN_OVERHEAD_BYTES for run in self.runs)

    def numbers(self) -> list[int]:
        return [number for run in self.runs if not run.is_cancelled for number in run.numbers]
