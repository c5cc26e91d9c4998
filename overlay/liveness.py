"""Is the peer of a link alive, and how far away is it?

Heartbeats go both ways at a fixed interval and echo the latest one received, which gives the
round-trip time. Silence is counted only in time this node was awake: if our own process was
held up for a second, the peer gets its full grace again. A peer is dead after

    max(floor, 2 x round trip (upper end) + 4 x heartbeat interval)

of silence, so that a LAN peer is noticed in 50 ms and a WAN peer is not mistaken. Until the first echo
is back nobody knows which of them it is, and it gets a second.

A process that gets no processor time is silent too. If its host still acknowledges our heartbeats
(the caller asks the kernel), host and network are alive and the process has not ended, or the
connection would have: then it may be silent for as long as a frozen one, half a second.
"""

from typing import Final

from overlay.limits import HEARTBEAT_FROZEN_NS, HEARTBEAT_SILENCE_INTERVALS, HEARTBEAT_UNKNOWN_NS
from overlay.messages import Heartbeat

_ROUND_TRIP_WINDOW: Final = 64
"""Round trips per half of the rolling window whose maximum is the upper end."""


class Liveness:
    """Heartbeat state of one connection."""

    __slots__ = (
        "_echo_ns",
        "_echo_received_ns",
        "_floor_ns",
        "_last_tick_ns",
        "_lowest_before_ns",
        "_lowest_ns",
        "_recent_highest_ns",
        "_recent_lowest_ns",
        "_samples",
        "_window_highest_ns",
        "_window_lowest_ns",
        "interval_ns",
        "round_trip_ns",
        "sent_ns",
        "silent_ns",
    )

    def __init__(self, interval_ns: int, floor_ns: int, now_ns: int) -> None:
        self.interval_ns = interval_ns
        self.round_trip_ns = 0
        """Latest measured round trip; 0 before the first."""
        self.sent_ns = 0
        """When the last heartbeat was sent."""
        self._floor_ns = floor_ns
        self._last_tick_ns = now_ns
        self.silent_ns = 0
        """How long the peer has been silent, as far as this node was awake."""
        self._echo_ns = 0
        self._echo_received_ns = 0
        self._samples = 0
        self._lowest_ns = 0
        self._lowest_before_ns = 0
        self._window_highest_ns = 0
        self._recent_highest_ns = 0
        self._window_lowest_ns = 0
        self._recent_lowest_ns = 0

    @property
    def silence_limit_ns(self) -> int:
        """Silence after which the peer counts as dead."""
        if not self._samples:
            return max(self._floor_ns, HEARTBEAT_UNKNOWN_NS)
        upper_ns = max(self._window_highest_ns, self._recent_highest_ns)
        return max(self._floor_ns, 2 * upper_ns + HEARTBEAT_SILENCE_INTERVALS * self.interval_ns)

    @property
    def silence_beyond_floor_ns(self) -> int:
        """What the round trip adds to the silence after which the peer counts as dead."""
        return self.silence_limit_ns - self._floor_ns

    @property
    def is_frozen(self) -> bool:
        """The peer has been silent for so long that it makes no difference whether its host lives."""
        return self.silent_ns > max(self.silence_limit_ns, HEARTBEAT_FROZEN_NS)

    @property
    def has_received(self) -> bool:
        """The peer has sent a heartbeat on this connection."""
        return self._echo_received_ns > 0

    @property
    def lowest_round_trip_ns(self) -> int:
        """The way itself, without what queued on it: the lowest of the recent calm round trips.

        In a long overload none is calm. Then the last ones stand, or the queue itself would pass for
        the way, and nobody would shorten it.
        """
        if self._window_lowest_ns and self._recent_lowest_ns:
            return min(self._window_lowest_ns, self._recent_lowest_ns)
        return self._recent_lowest_ns or self._window_lowest_ns

    @property
    def recent_round_trip_ns(self) -> int:
        """The lowest of the recent round trips, calm or not; 0 before the first."""
        return min(self._lowest_ns, self._lowest_before_ns or self._lowest_ns)

    def heard(self) -> None:
        """Bytes arrived from the peer."""
        self.silent_ns = 0

    def received(self, heartbeat: Heartbeat, now_ns: int, calm: bool = True) -> None:
        """A heartbeat arrived; take its echo as a round-trip sample.

        `calm`: none of our data is on the way, behind which a heartbeat could have queued.
        """
        self._echo_ns = heartbeat.sent_ns
        self._echo_received_ns = now_ns
        if heartbeat.echo_ns == 0:
            return
        round_trip_ns = (now_ns - heartbeat.echo_ns) - (heartbeat.sent_ns - heartbeat.echo_received_ns)
        if round_trip_ns < 0:
            return  # a peer that invents numbers harms only its own liveness
        self.round_trip_ns = round_trip_ns
        self._lowest_ns = min(self._lowest_ns or round_trip_ns, round_trip_ns)
        self._recent_highest_ns = max(self._recent_highest_ns, round_trip_ns)
        if calm:
            self._recent_lowest_ns = min(self._recent_lowest_ns or round_trip_ns, round_trip_ns)
        self._samples += 1
        if self._samples % _ROUND_TRIP_WINDOW == 0:
            self._window_highest_ns = self._recent_highest_ns
            self._recent_highest_ns = round_trip_ns
            self._lowest_before_ns = self._lowest_ns
            self._lowest_ns = round_trip_ns
            self._window_lowest_ns = self._recent_lowest_ns or self._window_lowest_ns
            self._recent_lowest_ns = 0

    def heartbeat(self, now_ns: int, received: int) -> Heartbeat:
        """The heartbeat to send now; `received` data frames are acknowledged with it."""
        self.sent_ns = now_ns
        return Heartbeat(now_ns, self._echo_ns, self._echo_received_ns, received)

    def is_due(self, now_ns: int, tick_ns: int) -> bool:
        """A heartbeat should be sent at this tick; half a tick early rather than late."""
        return now_ns - self.sent_ns >= self.interval_ns - tick_ns // 2

    def tick(self, now_ns: int, tick_ns: int) -> bool:
        """Called about every `tick_ns`; True if the peer has been silent for too long."""
        elapsed_ns = now_ns - self._last_tick_ns
        self._last_tick_ns = now_ns
        self.silent_ns += min(elapsed_ns, 2 * tick_ns)
        return self.silent_ns > self.silence_limit_ns
