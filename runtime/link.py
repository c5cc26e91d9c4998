"""The lasting relation to one peer; connections come and go under it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from overlay.delay import LinkClock
from overlay.express import Express, ExpressStatistics, Numbers
from overlay.limits import DRIFT_PPM
from overlay.messages import ControlMessage, Role
from overlay.outbox import Outbox, OutboxStatistics, Ticket
from overlay.quality import DelayHistogram

if TYPE_CHECKING:
    from runtime.connection import Connection


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """One link, for /status and /metrics."""

    peer: str
    role: str
    lan: str
    up: bool
    connects: int
    round_trip_ms: float
    frames_received: int
    messages_received: int
    bytes_received: int
    outbox: OutboxStatistics
    clock_shift_ms: float | None = None
    """Added to the age of what the peer stamped to bound it; none before the first helper."""
    least_delay_ms: float = 0.0
    """What lately everything took to the peer at least, as far as can be proven."""
    datagrams: ExpressStatistics | None = None
    """None if there is no channel for them."""
    datagram_bytes_sent: int = 0
    """Copies, reports and headers included."""


class MeasuredLink(NamedTuple):
    """What the heartbeats of a link tell of the network."""

    one_way_ns: int
    """Half of the lowest recent round trip: clocks are not compared, so ways there and back count alike."""
    least_ns: int
    """What lately everything took there at least, as far as can be proven."""
    noticed_late_ns: int
    """How much longer than nearby a peer that falls silent goes unnoticed."""


class Principal(NamedTuple):
    """Who a client has proven to be; nobody where nobody asks."""

    name: str = ""
    token: str = ""
    """Id of the token it was let in with; empty for a certificate."""


class Link:
    """A peer, its outbox, and the count of what it has sent us.

    Both outlive a connection: when the peer comes back with the same incarnation, each side
    goes on after the last frame the other has acknowledged.
    """

    def __init__(self, peer: str, role: Role, lan: str = "", outbox: Outbox | None = None) -> None:
        self.peer = peer
        self.role = role
        self.lan = lan
        self.outbox = outbox or Outbox()
        self.peer_incarnation = 0
        self.numbers = Numbers()
        """Of the data frames received from `peer_incarnation`."""
        self.messages_received = 0
        self.bytes_received = 0
        self.connects = 0
        self.connection: Connection | None = None
        self.principal: Principal | None = None
        """Of a peer that has introduced itself: who it has proven to be."""
        self.holds_data = False
        """Data waits although the link is up: the peer must be told something first."""
        self._again: list[bytes] = []
        self.clock = LinkClock()
        """Bounds the age of what the peer has stamped with its clock."""
        self.worse_drift_ppm = 0
        """What the peer says that its clock drifts, if that is more than ours; else 0."""
        self.on_acknowledged: Callable[[list[Ticket]], None] | None = None
        """Called when the peer has acknowledged frames: the outbox may have room again."""
        self.delays: DelayHistogram | None = None
        """Set if the link's delays are to be measured: half of every round trip."""
        self.context: Any = None
        """What the broker's core keeps for this peer."""

    @property
    def key(self) -> str:
        """Tells links apart: an edge and a router may have the same name."""
        return f"{self.role}:{self.peer}"

    @property
    def received(self) -> int:
        """Data frames received without a gap."""
        return self.numbers.received

    @property
    def is_up(self) -> bool:
        """A connection is open and the handshake is done."""
        return self.connection is not None

    @property
    def express(self) -> Express | None:
        """The datagrams beside the connection, if there are any."""
        channel = self.connection.channel if self.connection is not None else None
        return channel.express if channel is not None else None

    @property
    def measured(self) -> MeasuredLink | None:
        """How far away the peer is; None while that is not known."""
        liveness = self.connection.liveness if self.connection is not None else None
        if liveness is None or not liveness.recent_round_trip_ns:
            return None
        return MeasuredLink(
            liveness.recent_round_trip_ns // 2, self.clock.least_delay_ns, liveness.silence_beyond_floor_ns
        )

    def send(self, message: ControlMessage) -> bool:
        """Send a control message if the link is up; says whether it was handed over."""
        if self.connection is None:
            return False
        self.connection.send_control(message)
        return True

    def flush_soon(self) -> None:
        """Write what waits in the outbox before the loop goes to sleep."""
        if self.connection is not None:
            self.connection.flush_soon()

    def flush_now(self) -> None:
        """Write what waits in the outbox, as far as the socket takes it."""
        if self.connection is not None:
            self.connection.flush_now()

    def release_data(self) -> None:
        """Data may flow: first the frames the peer has not got yet, then what waits."""
        self.holds_data = False
        if self.connection is not None:
            if self._again:
                self.connection.write_again(self._again)
                self._again = []
            self.connection.flush_soon()

    def withdraw(self) -> list[bytes]:
        """Take back everything the peer has not acknowledged: bodies of data frames, oldest first."""
        self._again = []
        return self.outbox.withdraw()

    def check_resume(self, incarnation: int, received: int) -> None:
        """Raise ProtocolError if a peer cannot go on after `received` frames; then nothing has changed."""
        if incarnation == self.peer_incarnation:
            self.outbox.check_received(received)

    def attach(
        self,
        connection: "Connection",
        incarnation: int,
        received: int,
        drift_ppm: int = DRIFT_PPM,
        worse_drift_ppm: int = 0,
    ) -> None:
        """A new connection is ready: find the frames the peer has not got yet.

        `received` is the peer's own count of our frames, even if we have forgotten sending them;
        `drift_ppm` is the worse clock's of both sides, `worse_drift_ppm` the same if that is the peer's.
        """
        if incarnation == self.peer_incarnation:
            self._again, tickets = self.outbox.resume(received)
            self.acknowledged(tickets)
        else:
            self._again = self.outbox.restart(received)
            self.peer_incarnation = incarnation
            self.numbers = Numbers()
            self.clock = LinkClock(drift_ppm)
        self.clock.assume_drift(drift_ppm)
        self.worse_drift_ppm = worse_drift_ppm
        # The peer sends again all that follows what was received without a gap.
        self.numbers.ahead.clear()
        self.connection = connection
        self.connects += 1

    def acknowledged(self, tickets: list[Ticket]) -> None:
        """The peer has acknowledged frames with these tickets."""
        if self.on_acknowledged is not None:
            self.on_acknowledged(tickets)

    def detach(self, connection: "Connection") -> bool:
        """A connection is gone; False if a newer one has taken its place already."""
        if self.connection is not connection:
            return False
        self.connection = None
        self.outbox.is_express = False
        self.outbox.disconnected()
        return True

    def statistics(self) -> LinkStatistics:
        """One link, for /status and /metrics."""
        liveness = self.connection.liveness if self.connection is not None else None
        channel = self.connection.channel if self.connection is not None else None
        return LinkStatistics(
            peer=self.peer,
            role=self.role,
            lan=self.lan,
            up=self.is_up,
            connects=self.connects,
            round_trip_ms=liveness.round_trip_ns / 1e6 if liveness is not None else 0.0,
            clock_shift_ms=self.clock.shift_ns / 1e6 if self.clock.is_known else None,
            least_delay_ms=self.clock.least_delay_ns / 1e6,
            frames_received=self.received,
            messages_received=self.messages_received,
            bytes_received=self.bytes_received,
            outbox=self.outbox.statistics(),
            datagrams=self.express.statistics() if self.express is not None else None,
            datagram_bytes_sent=channel.bytes_sent if channel is not None else 0,
        )
