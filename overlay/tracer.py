"""Recording messages that pass a node: which of a frame are sampled, when they came, when they left.

A core that traces asks `Tracer.admit` for the `Passage` of each data frame: None if no message of
it is sampled, and nothing more happens then. Runs cut from a frame carry its passage and where
their sampled messages are, if they have any (`overlay.batch.cut_run`). What leaves is recorded by
the outbox at the moment the run goes into a frame for the socket, so the record has both times
and there is one per link.

Without tracing a core pays for one comparison per frame and per run.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le

from overlay.batch import (
    BATCH_HEADER_BYTES,
    BORN_OFFSET,
    LENGTH_WORD_OFFSET,
    MESSAGE_HEADER_BYTES,
    PUBLISHER_OFFSET,
    SEQUENCE_OFFSET,
    U32,
    Passage,
    Run,
)
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from overlay.qos import TopicQos
from overlay.trace import (
    RECORD,
    SAMPLING_MASK,
    SAMPLING_STEP,
    UNKNOWN_SLACK,
    Event,
    Reason,
    TraceLog,
)

if TYPE_CHECKING:
    from mypy_extensions import i64

ARRIVALS_MAX: Final = 65_536
"""Sampled messages whose arrival an ingress edge remembers, in case it sends them again."""

_RECEIVED: Final = int(Event.RECEIVED)
_DISPATCHED: Final = int(Event.DISPATCHED)
_DUPLICATE: Final = int(Event.DUPLICATE)
_DROPPED: Final = int(Event.DROPPED)
_RESENT: Final = int(Reason.RESENT)


def sampled_offsets(data: bytes, first: int, threshold: int) -> list[int]:
    """Where the sampled messages of some neighbouring ones start; `overlay.trace.Sampling` for many.

    Nothing is assumed of the bytes but that they are there: a frame may not have been checked yet.
    """
    found: list[int] = []
    offset: i64 = first
    last_start: i64 = len(data) - MESSAGE_HEADER_BYTES
    mask: i64 = SAMPLING_MASK
    step: i64 = SAMPLING_STEP
    below: i64 = threshold
    while offset <= last_start:
        publisher: i64 = read_i64_le(data, offset + PUBLISHER_OFFSET)
        sequence: i64 = read_i64_le(data, offset + SEQUENCE_OFFSET)
        # Masked before they are added, so that nothing exceeds 64 bits.
        place: i64 = (((publisher & mask) + (sequence & mask)) & mask) * step
        if place & mask < below:
            found.append(offset)
        length: i64 = read_i64_le(data, offset + LENGTH_WORD_OFFSET) >> 32
        offset += MESSAGE_HEADER_BYTES + (length & U32)
    return found


class Tracer:
    """Records the sampled messages of one node."""

    __slots__ = ("_arrivals", "_deadlines_ns", "_threshold", "log")

    def __init__(self, log: TraceLog) -> None:
        self.log = log
        self._threshold = log.sampling.threshold
        self._deadlines_ns: dict[int, int] = {}
        self._arrivals: OrderedDict[tuple[int, int], Passage] = OrderedDict()

    def define_topic(self, topic_id: int, name: str, qos: TopicQos) -> None:
        """Say what a topic id stands for; again when its quality of service changes."""
        self._deadlines_ns[topic_id] = qos.deadline_ns or 0
        self.log.define_topic(topic_id, name, qos)

    def link(self, peer: str, event: int = _DISPATCHED) -> "LinkTrace":
        """For the outbox of a peer, by the peer's bare node name."""
        return LinkTrace(self, self.log.peer(peer), event)

    def admit(self, body: bytes, peer: str, clock_shift_ns: int, now_ns: int) -> Passage | None:
        """A data frame came; `clock_shift_ns` is that of its messages here. None if none is sampled."""
        offsets = sampled_offsets(body, BATCH_HEADER_BYTES, self._threshold)
        if not offsets:
            return None
        return Passage(offsets, now_ns, self.log.peer(peer) if peer else 0, clock_shift_ns)

    def publish(self, run: Run, now_ns: int) -> None:
        """Messages start their way at this node."""
        self._mark(run, now_ns, UNKNOWN_CLOCK_SHIFT)

    def remember(self, data: bytes, came: Passage) -> None:
        """Keep when the messages of a frame came, in case they are sent again later."""
        arrivals = self._arrivals
        for offset in came.offsets:
            arrivals[_name_of(data, offset)] = came
        while len(arrivals) > ARRIVALS_MAX:
            arrivals.popitem(last=False)

    def send_again(self, run: Run) -> None:
        """A run is made of messages that came at different times, some while ago."""
        self._mark(run, 0, 0)

    def message(
        self, event: int, reason: int, data: bytes, offset: int, came: Passage, now_ns: int, peer_out: int = 0
    ) -> None:
        """One event of one message, if it is sampled; `came` is of the frame that `data` is."""
        if came.covers(offset, offset + 1):
            self._record(event, reason, data, offset, came, now_ns, peer_out)

    def frame(self, event: int, body: bytes, came: Passage, now_ns: int) -> None:
        """The same event of all sampled messages of a frame."""
        for offset in came.offsets:
            self._record(event, 0, body, offset, came, now_ns, 0)

    def run(self, event: int, reason: int, run: Run, now_ns: int, peer_out: int = 0) -> None:
        """The same event of all sampled messages of a run."""
        if run.came is not None and run.traced is not None:
            for offset in run.traced:
                self._record(event, reason, run.data, offset, run.came, now_ns, peer_out)

    def received(self, run: Run) -> None:
        """A run came and waits here, or goes no further."""
        self.run(_RECEIVED, 0, run, 0)

    def rejected(self, reason: int, data: bytes, offset: int, came: Passage, now_ns: int) -> None:
        """A message goes no further; without a reason it had come before."""
        self.message(_DROPPED if reason else _DUPLICATE, reason, data, offset, came, now_ns)

    def _mark(self, run: Run, in_ns: int, clock_shift_ns: int) -> None:
        offsets = sampled_offsets(run.data, 0, self._threshold)
        if offsets:
            run.came = Passage(offsets, in_ns, 0, clock_shift_ns)
            run.traced = offsets

    def shed(self, run: Run, kept: Run | None, reason: int, now_ns: int, peer_out: int) -> None:
        """Of a run only the kept part is sent on, or nothing."""
        came = run.came
        if came is None or run.traced is None:
            return
        passed: set[tuple[int, int]] = set()
        if kept is not None:
            kept.traced = sampled_offsets(kept.data, 0, self._threshold)
            if kept.traced:
                kept.came = came
            passed = {_name_of(kept.data, offset) for offset in kept.traced}
        for offset in run.traced:
            if _name_of(run.data, offset) not in passed:
                self._record(_DROPPED, reason, run.data, offset, came, now_ns, peer_out)

    def _record(
        self, event: int, reason: int, data: bytes, offset: int, came: Passage, out_ns: int, peer_out: int
    ) -> None:
        publisher = read_i64_le(data, offset + PUBLISHER_OFFSET)
        sequence = read_i64_le(data, offset + SEQUENCE_OFFSET)
        topic_id = read_i64_le(data, offset) & U32
        born_ns = read_i64_le(data, offset + BORN_OFFSET)
        if not came.in_ns:
            came = self._arrivals.get((publisher, sequence), came)
            reason = reason or _RESENT
        in_ns = came.in_ns
        deadline_ns = self._deadlines_ns.get(topic_id, 0)
        age_ns = 0
        slack_ns = UNKNOWN_SLACK
        if born_ns and in_ns and came.clock_shift_ns != UNKNOWN_CLOCK_SHIFT:
            age_ns = max(1, in_ns - born_ns + came.clock_shift_ns)
            if deadline_ns:
                slack_ns = deadline_ns - age_ns
        self.log.append(
            RECORD.pack(
                event,
                reason,
                came.peer_in,
                peer_out,
                topic_id,
                publisher,
                sequence,
                born_ns,
                in_ns,
                out_ns,
                age_ns,
                0,
                slack_ns,
                deadline_ns,
            )
        )


class LinkTrace:
    """Records what an outbox does with runs that hold sampled messages."""

    __slots__ = ("_event", "_tracer", "peer")

    def __init__(self, tracer: Tracer, peer: int, event: int) -> None:
        self._tracer = tracer
        self._event = event
        self.peer = peer
        """Id of the peer in the trace."""

    def sent(self, run: Run, now_ns: int) -> None:
        """A run goes into a frame for the socket."""
        self._tracer.run(self._event, 0, run, now_ns, self.peer)

    def dropped(self, run: Run, reason: int, now_ns: int) -> None:
        """A run that waited is dropped. Of copies that is no loss."""
        if self._event == _DISPATCHED:
            self._tracer.run(_DROPPED, reason, run, now_ns, self.peer)

    def shed(self, run: Run, kept: Run | None, reason: int, now_ns: int) -> None:
        """Of a run only some messages are sent, or none."""
        self._tracer.shed(run, kept, reason, now_ns, self.peer)


def reason_named(name: str) -> int:
    """The trace's number for a broker's own reason to drop a message; 0 for a duplicate."""
    return 0 if name == "DUPLICATE" else int(Reason[name])


def _name_of(data: bytes, offset: int) -> tuple[int, int]:
    return read_i64_le(data, offset + PUBLISHER_OFFSET), read_i64_le(data, offset + SEQUENCE_OFFSET)
