"""Counts the messages in packets that pass a lane of the WAN, by topic.

The ferry sees packets before it delays or loses any, in the order the sender's kernel made them. What
is sent again repeats bytes seen before and is skipped. A hole means that the kernel dropped packets
before the ferry read them; what was in them is unknown, so the connection counts as unreadable.
"""

from typing import Final

from runtime.datagrams import Seal
from topology.tap import Tap, TapStream

FLOWS_MAX: Final = 4_096
_TCP: Final = 6
_UDP: Final = 17
_UDP_HEADER_BYTES: Final = 8
_FIN_OR_RST: Final = 0x01 | 0x04
_SYN: Final = 0x02
_SEQUENCE_MASK: Final = 0xFFFFFFFF
_HALF: Final = 1 << 31


class _Flow:
    """One direction of one connection."""

    def __init__(self, stream: TapStream, expected: int) -> None:
        self.stream = stream
        self.expected = expected


class FlowTap:
    """One lane."""

    def __init__(self, seals: dict[int, Seal] | None = None) -> None:
        """`seals` are shared by the lanes of a WAN: the two directions of a link are lanes of their own."""
        self.tap = Tap(seals)
        self._flows: dict[bytes, _Flow | None] = {}
        """By addresses and ports; None once unreadable."""

    @property
    def connections(self) -> int:
        """Connections under observation."""
        return len(self._flows)

    def feed(self, packet: bytes) -> None:
        """Count what an IPv4 packet holds; anything but TCP and UDP is passed over."""
        start = (packet[0] & 0x0F) * 4
        if packet[9] == _UDP:
            self.tap.feed_datagram(packet[start + _UDP_HEADER_BYTES : int.from_bytes(packet[2:4])])
            return
        if packet[9] != _TCP:
            return
        key = packet[12:20] + packet[start : start + 4]
        sequence = int.from_bytes(packet[start + 4 : start + 8])
        flags = packet[start + 13]
        if flags & _SYN:
            if len(self._flows) < FLOWS_MAX:
                self._flows[key] = _Flow(self.tap.stream(), (sequence + 1) & _SEQUENCE_MASK)
            return
        payload = packet[start + (packet[start + 12] >> 4) * 4 : int.from_bytes(packet[2:4])]
        if payload:
            self._feed(key, sequence, payload)
        if flags & _FIN_OR_RST:
            self._flows.pop(key, None)

    def _feed(self, key: bytes, sequence: int, payload: bytes) -> None:
        if key not in self._flows:
            # It began before we looked, or was closed and is sent again.
            return
        flow = self._flows[key]
        if flow is None:
            return
        known = (flow.expected - sequence) & _SEQUENCE_MASK
        if known >= _HALF:
            self.tap.unreadable += 1
            self._flows[key] = None
            return
        if known < len(payload):
            flow.stream.feed(payload[known:])
            flow.expected = (sequence + len(payload)) & _SEQUENCE_MASK
