"""Recording messages that pass a node: which of a frame are sampled, when they came, when they left.

`overlay.batch.check_messages` finds the sampled messages of a frame. For a frame that has some, a core
asks `Tracer.admit` for its `Passage`; for any other nothing more happens. Runs cut from a frame carry
its passage and where their sampled messages are, if they have any (`overlay.batch.cut_run`). What
leaves is recorded by the outbox at the moment the run goes into a frame for the socket, so the record
has both times and there is one per link.

What a message costs that is not sampled is one word read, multiplied and compared. A record is
written field by field into the log's buffer, because compiled that is machine code and `struct` is not.
"""

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter, read_i64_le, write_i32_le, write_i64_le

from overlay.batch import (
    BORN_OFFSET,
    LENGTH_WORD_OFFSET,
    MESSAGE_HEADER_BYTES,
    NOTHING_SAMPLED,
    PUBLISHER_OFFSET,
    SAMPLED_WORD_OFFSET,
    SAMPLING_MASK,
    SAMPLING_SHIFT,
    SAMPLING_STEP,
    SEQUENCE_OFFSET,
    U32,
    Passage,
    Run,
)
from overlay.delay import age_bound_ns, link_bound_ns
from overlay.limits import DRIFT_PPM
from overlay.messages import UNKNOWN_CLOCK_SHIFT
from overlay.qos import TopicQos
from overlay.trace import (
    UNKNOWN_SLACK,
    Event,
    Reason,
    TraceLog,
)

if TYPE_CHECKING:
    from mypy_extensions import i64

ARRIVALS_MAX: Final = 65_536
"""Sampled messages whose arrival an ingress edge remembers, in case it sends them again."""

_I32_MAX: Final = 2**31 - 1
_U32_VALUES: Final = 2**32
_I64_BYTES: Final = 8
_RECEIVED: Final = int(Event.RECEIVED)
_DISPATCHED: Final = int(Event.DISPATCHED)
_DUPLICATE: Final = int(Event.DUPLICATE)
_DROPPED: Final = int(Event.DROPPED)
_RESENT: Final = int(Reason.RESENT)
_NO_TOPIC: Final = -1


def sampled_offsets(data: bytes, first: int, threshold: int) -> list[int]:
    """Where the sampled messages of some neighbouring ones start; as `overlay.batch.check_messages`.

    Nothing is assumed of the bytes but that they are there: a frame may not have been checked yet.
    """
    found: list[int] = []
    offset: i64 = first
    last_start: i64 = len(data) - MESSAGE_HEADER_BYTES
    below: i64 = threshold
    while offset <= last_start:
        word: i64 = read_i64_le(data, offset + SAMPLED_WORD_OFFSET)
        if word * SAMPLING_STEP >> SAMPLING_SHIFT & SAMPLING_MASK < below:
            found.append(offset)
        length: i64 = read_i64_le(data, offset + LENGTH_WORD_OFFSET) >> 32
        offset += MESSAGE_HEADER_BYTES + (length & U32)
    return found


class Tracer:
    """Records the sampled messages of one node."""

    __slots__ = (
        "_arrived",
        "_buffer",
        "_deadline_ns",
        "_deadlines_ns",
        "_drift_ppm",
        "_earlier",
        "_limit_bytes",
        "_peers",
        "_topic_id",
        "log",
        "threshold",
    )

    def __init__(self, log: TraceLog, drift_ppm: int = DRIFT_PPM) -> None:
        self.log = log
        self.threshold = log.sampling.threshold
        """What `check_messages` finds sampled messages by; `NOTHING_SAMPLED` while it is paused."""
        self._buffer: BytesWriter = log.buffer
        self._limit_bytes = log.limit_bytes
        self._drift_ppm = drift_ppm
        self._deadlines_ns: dict[int, int] = {}
        self._topic_id = _NO_TOPIC
        self._deadline_ns = 0
        """Of the topic recorded last: often that of the next record too."""
        self._peers: dict[str, int] = {"": 0}
        # The older ones are forgotten all at once: to forget one by one costs more than to remember.
        self._arrived = _Arrived()
        self._earlier = _Arrived()

    def pause(self, paused: bool) -> None:
        """Record nothing more of messages that come from now on, or go on with it."""
        self.threshold = NOTHING_SAMPLED if paused else self.log.sampling.threshold

    def define_topic(self, topic_id: int, name: str, qos: TopicQos) -> None:
        """Say what a topic id stands for; again when its quality of service changes."""
        self._deadlines_ns[topic_id] = qos.deadline_ns or 0
        self._topic_id = _NO_TOPIC
        self.log.define_topic(topic_id, name, qos)

    def link(self, peer: str, event: int = _DISPATCHED) -> "LinkTrace":
        """For the outbox of a peer, by the peer's bare node name."""
        return LinkTrace(self, self.log.peer(peer), event)

    def admit(
        self,
        offsets: list[int],
        peer: str,
        clock_shift_ns: int,
        now_ns: int,
        sent_ns: int = 0,
        link_shift_ns: int = UNKNOWN_CLOCK_SHIFT,
    ) -> Passage:
        """A data frame with sampled messages came; `clock_shift_ns` is that of its messages here.

        `sent_ns` is when its sender says it left, `link_shift_ns` what is known of that clock.
        """
        bound_ns = link_bound_ns(sent_ns, link_shift_ns, now_ns, self._drift_ppm)
        number = self._peers.get(peer)
        if number is None:
            number = self._peers[peer] = self.log.peer(peer)
        return Passage(offsets, now_ns, number, clock_shift_ns, bound_ns)

    def publish(self, run: Run, now_ns: int) -> None:
        """Messages start their way at this node."""
        self._mark(run, now_ns, UNKNOWN_CLOCK_SHIFT)

    def remember(self, data: bytes, came: Passage) -> None:
        """Keep when the messages of a frame came, in case they are sent again later."""
        if self._arrived.messages >= ARRIVALS_MAX // 2:
            self._earlier, self._arrived = self._arrived, _Arrived()
        self._arrived.add(data, came)

    def send_again(self, run: Run) -> None:
        """A run is made of messages that came at different times, some while ago."""
        self._mark(run, 0, 0)

    def message(
        self, event: int, reason: int, data: bytes, offset: int, came: Passage, now_ns: int, peer_out: int = 0
    ) -> None:
        """One event of one message, if it is sampled; `came` is of the frame that `data` is."""
        if came.within(offset, offset + 1):
            self._record(event, reason, data, offset, came, now_ns, peer_out)

    def frame(self, event: int, body: bytes, came: Passage, now_ns: int) -> None:
        """The same event of all sampled messages of a frame."""
        for offset in came.offsets:
            self._record(event, 0, body, offset, came, now_ns, 0)

    def run(self, event: int, reason: int, run: Run, now_ns: int, peer_out: int = 0) -> None:
        """The same event of all sampled messages of a run."""
        came = run.came
        if came is not None:
            start = run.start
            for offset in came.within(start, start + len(run.data)):
                self._record(event, reason, run.data, offset - start, came, now_ns, peer_out)

    def received(self, run: Run) -> None:
        """A run came and waits here, or goes no further."""
        self.run(_RECEIVED, 0, run, 0)

    def rejected(self, reason: int, data: bytes, offset: int, came: Passage, now_ns: int) -> None:
        """A message goes no further; without a reason it had come before."""
        self.message(_DROPPED if reason else _DUPLICATE, reason, data, offset, came, now_ns)

    def _mark(self, run: Run, in_ns: int, clock_shift_ns: int) -> None:
        offsets = sampled_offsets(run.data, 0, self.threshold)
        if offsets:
            run.came = Passage(offsets, in_ns, 0, clock_shift_ns)

    def shed(self, run: Run, kept: Run | None, reason: int, now_ns: int, peer_out: int) -> None:
        """Of a run only the kept part is sent on, or nothing."""
        came = run.came
        if came is None:
            return
        passed: set[tuple[int, int]] = set()
        if kept is not None:
            offsets = sampled_offsets(kept.data, 0, self.threshold)
            if offsets:
                kept.came = came.with_offsets(offsets)
            passed = {_name_of(kept.data, offset) for offset in offsets}
        for offset in came.within(run.start, run.start + len(run.data)):
            if _name_of(run.data, offset - run.start) not in passed:
                self._record(_DROPPED, reason, run.data, offset - run.start, came, now_ns, peer_out)

    def _record(
        self, event: int, reason: int, data: bytes, offset: int, came: Passage, out_ns: int, peer_out: int
    ) -> None:
        at: i64 = offset
        publisher: i64 = read_i64_le(data, at + PUBLISHER_OFFSET)
        sequence: i64 = read_i64_le(data, at + SEQUENCE_OFFSET)
        topic_id: i64 = read_i64_le(data, at) & U32
        born_ns: i64 = read_i64_le(data, at + BORN_OFFSET)
        if not came.in_ns:
            key = publisher ^ sequence
            came = self._arrived.find(key) or self._earlier.find(key) or came
            reason = reason or _RESENT
        if len(self._buffer) >= self._limit_bytes:
            self.log.lose()
            return
        if topic_id != self._topic_id:
            self._topic_id = topic_id
            self._deadline_ns = self._deadlines_ns.get(topic_id, 0)
        deadline_ns: i64 = self._deadline_ns
        in_ns: i64 = came.in_ns
        age_ns: i64 = 0
        if born_ns and in_ns and came.clock_shift_ns != UNKNOWN_CLOCK_SHIFT:
            elapsed_ns: i64 = in_ns - born_ns + came.clock_shift_ns
            age_ns = age_bound_ns(max(0, elapsed_ns), self._drift_ppm)
        slack_ns: i64 = deadline_ns - age_ns if age_ns and deadline_ns else UNKNOWN_SLACK
        # As `overlay.trace.RECORD` has it.
        buffer = self._buffer
        buffer.append(event)
        buffer.append(reason)
        buffer.append(came.peer_in & 255)
        buffer.append(came.peer_in >> 8)
        buffer.append(peer_out & 255)
        buffer.append(peer_out >> 8)
        signed_topic: int = topic_id if topic_id <= _I32_MAX else topic_id - _U32_VALUES
        write_i32_le(buffer, signed_topic)
        write_i64_le(buffer, publisher)
        write_i64_le(buffer, sequence)
        write_i64_le(buffer, born_ns)
        write_i64_le(buffer, in_ns)
        write_i64_le(buffer, out_ns)
        write_i64_le(buffer, age_ns)
        write_i64_le(buffer, came.link_bound_ns)
        write_i64_le(buffer, slack_ns)
        write_i64_le(buffer, deadline_ns)


class _Arrived:
    """When sampled messages came: written down as they come, put in order when one is looked for.

    Messages are hardly ever sent again, and objects that are kept cost a broker more than their making.
    """

    __slots__ = ("_by_key", "_frames", "_keys", "messages")

    def __init__(self) -> None:
        self.messages = 0
        self._keys: BytesWriter = BytesWriter()
        """Of each message, in the order they came."""
        self._frames: BytesWriter = BytesWriter()
        """Of each frame: how many of those came with it, and what a `Passage` says of them."""
        self._by_key: dict[int, Passage] = {}
        """What has been put in order so far, and is not written there any more."""

    def add(self, data: bytes, came: Passage) -> None:
        """The sampled messages of a frame came."""
        keys = self._keys
        for offset in came.offsets:
            # Publishers' ids are random, so no two messages share this.
            publisher = read_i64_le(data, offset + PUBLISHER_OFFSET)
            write_i64_le(keys, publisher ^ read_i64_le(data, offset + SEQUENCE_OFFSET))
        frames = self._frames
        write_i64_le(frames, len(came.offsets))
        write_i64_le(frames, came.in_ns)
        write_i64_le(frames, came.peer_in)
        write_i64_le(frames, came.clock_shift_ns)
        write_i64_le(frames, came.link_bound_ns)
        self.messages += len(came.offsets)

    def find(self, key: int) -> Passage | None:
        """How this message came; None if that is not known."""
        if len(self._keys):
            self._put_in_order()
        return self._by_key.get(key)

    def _put_in_order(self) -> None:
        keys, frames = self._keys.getvalue(), self._frames.getvalue()
        self._keys.truncate(0)
        self._frames.truncate(0)
        key_at: i64 = 0
        for frame_at in range(0, len(frames), 5 * _I64_BYTES):
            fields = [read_i64_le(frames, frame_at + at * _I64_BYTES) for at in range(5)]
            came = Passage([0], fields[1], fields[2], fields[3], fields[4])
            for _ in range(fields[0]):
                self._by_key[read_i64_le(keys, key_at)] = came
                key_at += _I64_BYTES


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


def threshold_of(tracer: Tracer | None) -> int:
    """What a node looks for sampled messages by that may not trace at all."""
    return NOTHING_SAMPLED if tracer is None else tracer.threshold


def reason_named(name: str) -> int:
    """The trace's number for a broker's own reason to drop a message; 0 for a duplicate."""
    return 0 if name == "DUPLICATE" else int(Reason[name])


def _name_of(data: bytes, offset: int) -> tuple[int, int]:
    return read_i64_le(data, offset + PUBLISHER_OFFSET), read_i64_le(data, offset + SEQUENCE_OFFSET)
