"""Connections as kernels have them: both directions and both ends.

A pipe is one direction: when bytes arrive, and what the sender's kernel knows of it. Bytes arrive in
order, or not at all. A window limits what is on its way. What is sent while the path is blocked arrives
after it has opened. An end is what one process reads from and writes to. Compiled where hot modules are,
like the schedule.
"""

import logging
import random
import zlib
from collections import deque
from typing import Any, Final

from overlay.limits import KIB, MILLISECOND_NS
from simulation.schedule import Actor, Step, World

_logger = logging.getLogger(__name__)

WINDOW_BYTES: Final = 256 * KIB
"""Bytes on their way or in the receiver's kernel, per direction."""
_RETRANSMISSION_NS: Final = 200 * MILLISECOND_NS
"""How long after a path has opened again the first bytes arrive, at most."""
_ARRIVALS_KEPT: Final = 64


class Path:
    """The way from one machine to another, in one direction."""

    def __init__(self, delay_ns: int, jitter_ns: int) -> None:
        self.delay_ns = delay_ns
        self.jitter_ns = jitter_ns
        self.blocks = 0
        """How many faults block it now."""
        self.slow_ns = 0
        """Delay on top while it is congested."""
        self.blocked_since_ns = 0

    @property
    def is_blocked(self) -> bool:
        """Nothing gets through now."""
        return self.blocks > 0

    def draw_delay_ns(self, randomness: random.Random) -> int:
        """How long the next packet takes."""
        return self.delay_ns + self.slow_ns + int(randomness.random() * self.jitter_ns)


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, world: World, path: Path, back: Path, key: str, randomness: random.Random, to: Actor
    ) -> None:
        self._world = world
        self._to = to
        self.path = path
        self.back = back
        """The other direction of the way, on which acknowledgements come."""
        self.rank = zlib.crc32(key.encode())
        self.key = key
        self.sender: End | None = None
        self.receiver: End | None = None
        self._randomness = randomness
        self._unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        """Handed over and still in the sender's process."""
        self._stalled: deque[bytes | None] = deque()
        """What the kernel repeats until the path is open; None for the end."""
        self.outstanding_bytes = 0
        self._last_arrival_ns = 0
        self._arrivals: deque[int] = deque()
        self._acknowledged_ns = 0
        self._held = False
        self._cut_ns: int | None = None
        """Nothing arrives after this: the sender has died."""

    def write(self, data: bytes) -> None:
        """The sender hands over bytes."""
        if self._unsent or self.outstanding_bytes >= WINDOW_BYTES:
            self._unsent.append(data)
            self.unsent_bytes += len(data)
        else:
            self._transmit(data)

    def end(self) -> None:
        """Nothing follows what has been handed over."""
        if self.is_held_up:
            self._stalled.append(None)
        else:
            self._schedule(None)

    def discard_unsent(self) -> None:
        """Forget what has not left the sender's process."""
        self._unsent.clear()
        self.unsent_bytes = 0

    def cut(self) -> None:
        """What has not arrived yet never will."""
        self._stalled.clear()
        self._cut_ns = self._world.now_ns

    @property
    def is_held_up(self) -> bool:
        """What is sent now does not arrive before the path opens."""
        return self.path.is_blocked or self._held or bool(self._stalled)

    def hold(self) -> None:
        """Keep back what is written from now on, however open the path is, until `release`."""
        self._held = True

    def release(self) -> None:
        """The path is open again."""
        held, self._held = self._held, False
        if self._stalled:
            pause_ns = 0 if held else int(self._randomness.random() * _RETRANSMISSION_NS)
            self._last_arrival_ns = max(self._last_arrival_ns, self._world.now_ns + pause_ns)
            stalled, self._stalled = self._stalled, deque()
            for data in stalled:
                self._schedule(data)
        self.pump()

    def consumed(self, count: int) -> None:
        """The receiver's process has read bytes."""
        self.outstanding_bytes -= count
        if self._unsent:
            self.pump()

    def pump(self) -> None:
        """Send what waits, as far as the window allows and the sender hears of it."""
        if self.back.is_blocked:
            return
        while self._unsent and self.outstanding_bytes < WINDOW_BYTES:
            data = self._unsent.popleft()
            self.unsent_bytes -= len(data)
            self._transmit(data)
        assert self.sender is not None
        self.sender.sent()

    def acknowledgements(self) -> tuple[int, int]:
        """What the sender's kernel knows: segments not acknowledged, milliseconds since the last one was."""
        now_ns = self._world.now_ns
        until_ns = min(now_ns, self.back.blocked_since_ns) if self.back.is_blocked else now_ns
        arrivals = self._arrivals
        while arrivals and arrivals[0] + self.back.delay_ns <= until_ns:
            self._acknowledged_ns = arrivals.popleft() + self.back.delay_ns
        waiting = len(arrivals) + len(self._stalled)
        return waiting, (now_ns - self._acknowledged_ns) // MILLISECOND_NS

    def _transmit(self, data: bytes) -> None:
        self.outstanding_bytes += len(data)
        if self.is_held_up:
            self._stalled.append(data)
        else:
            self._schedule(data)

    def _schedule(self, data: bytes | None) -> None:
        world = self._world
        when_ns = world.now_ns + self.path.draw_delay_ns(self._randomness)
        when_ns = max(when_ns, self._last_arrival_ns)
        self._last_arrival_ns = when_ns
        arrivals = self._arrivals
        arrivals.append(when_ns)
        if len(arrivals) > _ARRIVALS_KEPT:
            self.acknowledgements()
        world.at(when_ns, _Arrival(self._to, self, data), self.rank)

    def arrive(self, data: bytes | None, when_ns: int) -> None:
        """A segment, or the end, has reached the receiver's machine."""
        if self._cut_ns is not None and when_ns > self._cut_ns and data is not None:
            return
        assert self.receiver is not None
        self.receiver.arrived(data)

    def note(self, data: bytes) -> None:
        """The receiver's process reads this now."""
        self._world.note(str(zlib.crc32(data)), self.key, data)


class _Arrival(Step):
    """A segment reaches the receiver's machine."""

    __slots__ = ("_data", "_pipe")

    def __init__(self, actor: Actor, pipe: Pipe, data: bytes | None) -> None:
        super().__init__(actor, None, ())
        self._pipe = pipe
        self._data = data

    def run(self) -> None:
        try:
            self._pipe.arrive(self._data, self.due_ns)
        except Exception as error:
            # Whatever a process fails with is a finding of the run.
            _logger.debug("%s failed on what it read", self.actor.name, exc_info=True)
            self.actor.fail(f"reading from {self._pipe.key} failed", error)

    def orphaned(self) -> None:
        # A dead process's kernel answers for it.
        self._pipe.arrive(self._data, self.due_ns)

    def __repr__(self) -> str:
        return f"<Arrival at {self.actor.name} from {self._pipe.key}>"


class End:
    """One end of a connection: what the kernel does for the process that has it."""

    def __init__(
        self,
        world: World,
        actor: Actor,
        peer_name: str,
        outward: Pipe,
        inward: Pipe,
        siblings: dict["End", None],
    ) -> None:
        self.actor = actor
        self.peer_name = peer_name
        self.outward = outward
        self.is_reading = True
        self._world = world
        self._inward = inward
        self._siblings = siblings
        """All ends of its machine."""
        self._siblings[self] = None
        self._protocol: Any = None
        """Of the process; None until it has the connection."""
        self._received: deque[bytes | None] = deque()
        self._closing = False
        self._gone = False
        self._high = 64 * KIB
        self._paused = False
        outward.sender = self
        inward.receiver = self

    # Called by the process

    def open(self, protocol: Any, transport: Any) -> None:
        """The process has the connection now."""
        self._protocol = protocol
        protocol.connection_made(transport)
        self._read()

    def change_protocol(self, protocol: Any) -> None:
        """Someone else reads from now on."""
        self._protocol = protocol

    def write(self, data: Any) -> None:
        """Hand over bytes."""
        if self._closing or self._gone:
            return
        outward = self.outward
        outward.write(data if isinstance(data, bytes) else bytes(data))
        if outward.unsent_bytes > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def unsent_bytes(self) -> int:
        """Handed over and still in the process."""
        return self.outward.unsent_bytes

    def limit_unsent(self, high: int | None) -> None:
        """Ask the process to pause when more than this has not been sent."""
        self._high = 64 * KIB if high is None else high

    def is_closing(self) -> bool:
        """Nothing can be written any more."""
        return self._closing or self._gone

    def close(self) -> None:
        """End the connection when everything has been sent."""
        if not self._closing and not self._gone:
            self._closing = True
            self.is_reading = False
            self._end_when_sent()

    def abort(self) -> None:
        """End the connection now."""
        if not self._gone:
            self._closing = True
            self.outward.discard_unsent()
            self.outward.end()
            self._lose(None)

    def pause_reading(self) -> None:
        """Leave what comes in the kernel."""
        self.is_reading = False

    def resume_reading(self) -> None:
        """Take what has come, and what comes."""
        if not self._closing:
            self.is_reading = True
            self.actor.soon(self._read)

    # Called by the network

    def arrived(self, data: bytes | None) -> None:
        """Bytes are in our kernel, or the news that the peer has ended the connection."""
        if self._gone:
            if data is not None:
                self._reset_peer()
            return
        if data is not None and self.is_reading and not self._received and self._protocol is not None:
            self._take(data)
            return
        self._received.append(data)
        if self.is_reading or data is None:
            self._read()

    def reset(self) -> None:
        """Something on the way has ended the connection, for both sides."""
        self.outward.cut()
        self._inward.cut()
        for end in (self, self._peer()):
            self._world.at(self._world.now_ns, Step(end.actor, end.broken, ()), end.outward.rank)

    def broken(self) -> None:
        """The connection has been reset."""
        if not self._gone:
            self._lose(ConnectionResetError(104, "connection reset by peer"))

    def sent(self) -> None:
        """Bytes have left the process."""
        if self._gone:
            return
        if self._paused and self.outward.unsent_bytes <= self._high // 4:
            self._paused = False
            self.actor.soon(self._protocol.resume_writing)
        self._end_when_sent()

    def die(self, drop_in_flight: bool) -> None:
        """The process was killed: its kernel ends the connection."""
        self._leave()
        self.outward.discard_unsent()
        if drop_in_flight:
            self.outward.cut()
        self.outward.end()

    def vanish(self) -> None:
        """The machine has lost power: the peer hears nothing, until the machine is back."""
        self._leave()
        self.outward.discard_unsent()
        self.outward.cut()

    # Details

    def _peer(self) -> "End":
        peer = self.outward.receiver
        assert peer is not None
        return peer

    def _reset_peer(self) -> None:
        """Tell a peer that still sends that nobody listens any more."""
        # What is held up comes first; the end of the connection follows it anyway.
        if not self.outward.is_held_up:
            peer = self._peer()
            when_ns = self._world.now_ns + self.outward.path.delay_ns
            self._world.at(when_ns, Step(peer.actor, peer.broken, ()), peer.outward.rank)

    def _read(self) -> None:
        if self._protocol is None:
            return
        while self._received and not self._gone:
            if self._received[0] is not None and not self.is_reading:
                return
            data = self._received.popleft()
            if data is None:
                self._closing = True
                self.outward.discard_unsent()
                self._lose(None)
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._inward.note(data)
        self._protocol.data_received(data)
        self._inward.consumed(len(data))

    def _end_when_sent(self) -> None:
        if self._closing and not self._gone and not self.outward.unsent_bytes:
            self.outward.end()
            self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        self._leave()
        if self._protocol is not None:
            self.actor.soon(self._protocol.connection_lost, error)

    def _leave(self) -> None:
        self._gone = True
        self._siblings.pop(self, None)
