"""One direction of a link without sockets, for tests of pure cores: frames move when told to."""

from collections import deque
from collections.abc import Callable, Iterable

from overlay.batch import Run, decode_messages, encode_batch, encode_message
from overlay.framing import FRAME_HEADER_BYTES, FrameReader
from overlay.messages import FrameKind, Message
from overlay.outbox import Outbox, Ticket

Receive = Callable[[bytes], object]


def body_of(
    messages: Iterable[Message],
    *,
    urgency: int = 0,
    origin: int = 1,
    clock_shift_ns: int = 0,
    sent_ns: int = 0,
) -> bytes:
    """The body of a data frame with these messages."""
    runs = [
        Run(1, encode_message(each.topic_id, each.publisher, each.sequence, each.born_ns, each.payload))
        for each in messages
    ]
    return encode_batch(urgency, origin, clock_shift_ns, runs, sent_ns)[FRAME_HEADER_BYTES:]


def bodies_of(frames: list[bytes]) -> list[bytes]:
    """The bodies of whole data frames."""
    reader = FrameReader()
    reader.open_up()
    reader.feed(b"".join(frames))
    found = reader.take_frames()
    assert reader.pending_bytes == 0
    assert all(kind == FrameKind.DATA for kind, _ in found)
    return [body for _, body in found]


def drain(outbox: Outbox, now_ns: int = 0) -> list[Message]:
    """Everything that waits in an outbox, taken as a peer that acknowledges at once would."""
    messages: list[Message] = []
    wire = Wire(outbox, lambda body: messages.extend(decode_messages(body)), clock=lambda: now_ns)
    wire.received = outbox.statistics().frames_sent
    wire.run()
    return messages


class Wire:
    """Carries the frames of an outbox to a receiver that counts them, as `runtime.link` does."""

    def __init__(
        self,
        outbox: Outbox,
        receive: Receive,
        *,
        clock: Callable[[], int] = lambda: 0,
        on_acknowledged: Callable[[list[Ticket]], object] = lambda tickets: None,
    ) -> None:
        self.outbox = outbox
        self.received = 0
        self.in_flight: deque[bytes] = deque()
        self.is_up = True
        self._receive = receive
        self._clock = clock
        self._on_acknowledged = on_acknowledged

    def send(self, budget_bytes: int = 2**62) -> list[bytes]:
        """Move what waits onto the wire, as far as the budget and the window allow; returns the bodies."""
        if not self.is_up:
            return []
        bodies = bodies_of(self.outbox.take_frames(budget_bytes, self._clock()))
        self.in_flight.extend(bodies)
        return bodies

    def arrive(self, most: int | None = None) -> None:
        """Let frames arrive, at most that many."""
        count = len(self.in_flight) if most is None else min(most, len(self.in_flight))
        for _ in range(count):
            self.received += 1
            self._receive(self.in_flight.popleft())

    def acknowledge(self, now_ns: int = 0) -> None:
        """A heartbeat comes back with the receiver's count; given the time, the window learns from it."""
        if self.is_up:
            self._on_acknowledged(self.outbox.acknowledge(self.received, now_ns))

    def run(self) -> None:
        """Send, arrive, acknowledge, as often as the window demands."""
        self.send()
        self.arrive()
        self.acknowledge()
        while self.is_up and self.outbox.has_waiting:
            self.send()
            self.arrive()
            self.acknowledge()

    def cut(self) -> None:
        """The connection breaks; what was on the wire is lost."""
        self.in_flight.clear()
        self.is_up = False
        self.outbox.disconnected()

    def reconnect(self) -> None:
        """The same two processes connect again: go on after what the receiver has."""
        self.is_up = True
        frames, tickets = self.outbox.resume(self.received)
        self.in_flight = deque(bodies_of(frames))
        self._on_acknowledged(tickets)

    def reconnect_to_another(self, receive: Receive) -> None:
        """The receiver is a new process that has seen nothing."""
        self.is_up = True
        self.received = 0
        self._receive = receive
        self.in_flight = deque(bodies_of(self.outbox.restart()))
