"""The device of a host on the emulated WAN: a TUN device in the host's network namespace.

Whoever opens it holds it: it is there for as long as one of its descriptors is open. Opening and the last
closing take the kernel some 10 ms each, so the ferry, which has packets to carry, does neither: it is
handed descriptors that the testbed keeps open as well (`topology.emulated_wan`).
"""

import fcntl
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from topology.namespaces import TUN_DEVICE, inside, run_ip

DEVICE: Final = "wan0"
MTU: Final = 1_500
KERNEL_QUEUE_PACKETS: Final = 10_000
"""How many packets may wait in a device until they are read."""

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x0001 | 0x1000


@dataclass(frozen=True, slots=True)
class TunDevice:
    """An open device."""

    packets: int
    """The descriptor to read and write packets."""
    counters: int
    """The descriptor of its namespace's counters; an open file stays with its namespace."""

    @property
    def descriptors(self) -> tuple[int, int]:
        """Both, in the order in which they are handed over."""
        return self.packets, self.counters

    def dropped(self) -> int:
        """Packets the host sent and nobody read before the device's queue was full."""
        lines = os.pread(self.counters, 65_536, 0).decode().splitlines()
        line = next(line for line in lines if line.strip().startswith(f"{DEVICE}:"))
        return int(line.split(":", 1)[1].split()[11])

    def close(self) -> None:
        """Give it up; with its last descriptor the device goes, and with it the routes over it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def open_device(namespace: Path) -> TunDevice:
    """Make the device of a host; it is still down."""
    with inside(namespace):
        packets = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(packets, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_NO_PI))
            return TunDevice(packets, os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            os.close(packets)
            raise


def set_up_device(namespace: Path, address: str, networks: Iterable[str]) -> None:
    """Bring a host's device up; these networks are reached over it."""
    with inside(namespace):
        run_ip(
            batch=[
                f"link set {DEVICE} mtu {MTU} txqueuelen {KERNEL_QUEUE_PACKETS} up",
                *(f"route replace {network} dev {DEVICE} src {address}" for network in networks),
            ]
        )
