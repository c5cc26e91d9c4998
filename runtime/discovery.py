"""Finding edge brokers in a LAN by UDP multicast, without configuration."""

import asyncio
import contextlib
import ipaddress
import logging
import socket
from typing import Final

from overlay.discovery import (
    DISCOVERY_GROUP,
    DISCOVERY_PORT,
    Announcement,
    Query,
    decode_datagram,
    encode_datagram,
)
from overlay.errors import ProtocolError

log = logging.getLogger("isthmus.discovery")

ANNOUNCE_INTERVAL_S: Final = 1.0
QUERY_INTERVAL_S: Final = 0.2


def multicast_interface(listen_host: str) -> str:
    """The address of the interface to multicast on, for a broker that listens on `listen_host`."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(listen_host)
        if address.version == 4:
            return "127.0.0.1" if address.is_loopback else listen_host
    return "0.0.0.0"


def _receiving_socket(group: str, port: int, interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((group, port))
        membership = socket.inet_aton(group) + socket.inet_aton(interface)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    except OSError:
        sock.close()
        raise
    return sock


def _sending_socket(interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        sock.bind((interface, 0))
    except OSError:
        sock.close()
        raise
    return sock


class Announcer(asyncio.DatagramProtocol):
    """Tells the LAN about an edge broker, every second and whenever a client asks."""

    def __init__(self, announcement: Announcement, group: str, port: int) -> None:
        self.announcement = announcement
        self.queries_answered = 0
        self.datagrams_ignored = 0
        self._target = (group, port)
        self._receiving: asyncio.DatagramTransport | None = None
        self._sending: asyncio.DatagramTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls,
        announcement: Announcement,
        *,
        interface: str,
        group: str = DISCOVERY_GROUP,
        port: int = DISCOVERY_PORT,
    ) -> "Announcer":
        """Join the group and begin to announce. Raises OSError where multicast is not possible."""
        loop = asyncio.get_running_loop()
        announcer = cls(announcement, group, port)
        receiving = _receiving_socket(group, port, interface)
        try:
            sending = _sending_socket(interface)
        except OSError:
            receiving.close()
            raise
        announcer._receiving, _ = await loop.create_datagram_endpoint(lambda: announcer, sock=receiving)
        announcer._sending, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, sock=sending)
        announcer._announce()
        return announcer

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        """Answer a query; ignore everything else."""
        try:
            message = decode_datagram(data)
        except ProtocolError:
            self.datagrams_ignored += 1
            return
        if isinstance(message, Query) and message.lan in ("", self.announcement.lan):
            self.queries_answered += 1
            self._send(addr)

    def error_received(self, exc: Exception) -> None:
        """A datagram could not be sent; the next one may."""
        log.debug("discovery datagram not sent", extra={"error": str(exc)})

    def close(self) -> None:
        """Leave the group."""
        if self._timer is not None:
            self._timer.cancel()
        for transport in (self._receiving, self._sending):
            if transport is not None:
                transport.close()

    def _announce(self) -> None:
        self._send(self._target)
        self._timer = asyncio.get_running_loop().call_later(ANNOUNCE_INTERVAL_S, self._announce)

    def _send(self, address: tuple[str | object, int]) -> None:
        if self._sending is not None and not self._sending.is_closing():
            self._sending.sendto(encode_datagram(self.announcement), address)


class _Asker(asyncio.DatagramProtocol):
    """Collects the announcements that come back."""

    def __init__(self) -> None:
        self.found: dict[str, Announcement] = {}
        self.answered = asyncio.Event()

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        try:
            message = decode_datagram(data)
        except ProtocolError:
            return
        if isinstance(message, Announcement):
            self.found[message.edge] = message
            self.answered.set()

    def error_received(self, exc: Exception) -> None:
        log.debug("discovery query not sent", extra={"error": str(exc)})


async def discover(
    *,
    lan: str = "",
    interface: str = "0.0.0.0",
    group: str = DISCOVERY_GROUP,
    port: int = DISCOVERY_PORT,
    timeout_s: float = 3.0,
) -> list[Announcement]:
    """Ask the LAN for edge brokers; returns those that answered, as soon as one has."""
    loop = asyncio.get_running_loop()
    transport, asker = await loop.create_datagram_endpoint(_Asker, sock=_sending_socket(interface))
    try:
        async with asyncio.timeout(timeout_s):
            while not asker.found:
                transport.sendto(encode_datagram(Query(lan)), (group, port))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asker.answered.wait(), QUERY_INTERVAL_S)
    except TimeoutError:
        return []
    finally:
        transport.close()
    return sorted(asker.found.values(), key=lambda announcement: announcement.edge)
