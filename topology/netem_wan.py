"""The emulated WAN where the kernel does the work: bridges, `tc netem`, and a look at what passes.

    python -m topology.netem_wan SPECIFICATION

The counterpart of `topology.ferry`, with the same commands (`topology.wan_server`), as one process in a
network namespace of its own that has no name: it goes with the process, however that ends, and with it
every device. In it there is a bridge per site and one that joins them:

    wan0 in a host ═══ h<host> ── s<site> ── u<site> ═══ d<site> ── hub ── ... the other sites
                                             └ htb, netem and tbf per other site (`topology.netem`)

All hosts of a site send through its `u<site>`, so that they share the link's rate. A packet passes one
netem on its way. Whom an address belongs to is found out by ARP, which is not delayed: as with the ferry,
hosts have one address and reach others over `wan0` with it.

`attach` takes the file of a host's namespace. A packet socket on `h<host>` sees what the host sends before
anything is done to it, counts it and looks into it for messages. If that socket overflows nobody knows what
passed, and the run is invalid. Whether the kernel was late nobody knows either; the calibration before a run
is what there is.
"""

import contextlib
import json
import select
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from topology.conditions import LinkConditions
from topology.errors import DriverError
from topology.flow_tap import FlowTap
from topology.lines import say
from topology.namespaces import enter_new, inside, run_ip, speak_ipv4_only
from topology.netem import change_lines, forget_line, host_line, run_tc, set_up_lines
from topology.tun import DEVICE
from topology.wan_server import ControlServer, Wan

READ_BATCH: Final = 64
"""Packets looked at from one host before others get their turn."""
BUFFER_BYTES: Final = 32 * 1024 * 1024
PACKET_MAX_BYTES: Final = 65_536

_ETH_P_ALL: Final = 0x0003
_SOL_PACKET: Final = 263
_PACKET_STATISTICS: Final = 6
_PACKET_IGNORE_OUTGOING: Final = 23
_SO_RCVBUFFORCE: Final = 33
_IPV4_HEADER_BYTES: Final = 20


class NetemLane:
    """One direction between two sites: a netem at the source's end."""

    def __init__(self, device: str, number: int, conditions: LinkConditions) -> None:
        """`number` is the target's; the netem with its conditions is there already."""
        self.device = device
        self.number = number
        self.conditions = conditions
        self.packets = self.bytes = 0
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        """Nothing passes."""
        return self._is_cut

    @is_cut.setter
    def is_cut(self, cut: bool) -> None:
        run_tc(batch=change_lines(self.device, self.number, self.conditions, cut=cut))
        self._is_cut = cut

    def change(self, conditions: LinkConditions) -> None:
        """Other conditions for what enters from now on."""
        run_tc(batch=change_lines(self.device, self.number, conditions, cut=self._is_cut))
        self.conditions = conditions

    def record(self) -> dict[str, Any]:
        """What has entered, and what the kernel dropped: by loss, queue or cut, it does not say which."""
        found = json.loads(run_tc("-s", "-j", "qdisc", "show", "dev", self.device))
        handle = f"{10 + self.number}:"
        dropped = next(item["drops"] for item in found if item.get("handle") == handle)
        return {"packets": self.packets, "bytes": self.bytes, "dropped": dropped}


@dataclass(slots=True)
class Port:
    """A host on the WAN."""

    name: str
    number: int
    site: str
    address: bytes
    tap: socket.socket
    overflowed: int = 0

    @property
    def device(self) -> str:
        """Its end of the cable."""
        return f"h{self.number}"


class NetemWan:
    """The namespace with its bridges, and the loop that counts what passes."""

    def __init__(self, links: list[dict[str, Any]], untapped: list[str], control: str) -> None:
        """Everything is made here; the calling thread must be in a namespace of its own."""
        sites = list(dict.fromkeys(link["from"] for link in links))
        self._numbers = {site: number for number, site in enumerate(sites, 1)}
        run_ip(batch=["link set lo up", *_bridge("hub")])
        for site, number in self._numbers.items():
            run_ip(
                batch=[
                    *_bridge(f"s{number}"),
                    f"link add u{number} type veth peer name d{number}",
                    f"link set u{number} master s{number} up",
                    f"link set d{number} master hub up",
                ]
            )
            lanes = {
                self._numbers[link["to"]]: LinkConditions(**link["conditions"])
                for link in links
                if link["from"] == site
            }
            run_tc(batch=set_up_lines(f"u{number}", lanes))
        self._lanes = {
            (link["from"], link["to"]): NetemLane(
                f"u{self._numbers[link['from']]}",
                self._numbers[link["to"]],
                LinkConditions(**link["conditions"]),
            )
            for link in links
        }
        self._wan = Wan(self._lanes, untapped)
        self._ports: dict[int, Port] = {}
        """By the descriptor of the socket that sees what they send."""
        self._by_address: dict[bytes, Port] = {}
        self._routes: dict[bytes, tuple[NetemLane, FlowTap | None] | None] = {}
        """By source and destination address."""
        self._attached = 0
        self._passed = self._passed_before = 0
        self._stray = 0
        self._overflowed = self._overflowed_before = 0
        """At hosts that are gone; and at all before `watch`."""
        self._epoll = select.epoll()
        self._control = ControlServer(control, self._epoll, self._answer)

    def run(self) -> None:
        """Count and obey until killed."""
        while True:
            for descriptor, _ in self._epoll.poll():
                if port := self._ports.get(descriptor):
                    self._look(port)
                else:
                    self._control.handle(descriptor)

    def statistics(self) -> dict[str, Any]:
        """What has passed. Lateness is not known."""
        return {
            "forwarded": self._passed - self._passed_before,
            "late": 0,
            "late_p99_ms": None,
            "late_max_ms": None,
            "kernel_dropped": self._overflowed_in_all() - self._overflowed_before,
            "stray": self._stray,
            "lanes": self._wan.statistics(),
        }

    def _answer(self, request: Mapping[str, Any], _: list[int]) -> dict[str, Any]:
        command = request.get("command")
        if command == "statistics":
            return self.statistics()
        if command == "watch":
            self._passed_before = self._passed
            self._overflowed_before = self._overflowed_in_all()
        elif command == "attach":
            where = (request["name"], request["site"], request["address"])
            self._attach(*where, Path(request["namespace"]))
        elif command == "detach":
            self._detach(request["name"])
        else:
            return self._wan.obey(request)
        return {}

    # Hosts

    def _attach(self, name: str, site: str, address: str, namespace: Path) -> None:
        self._wan.check_site(site)
        if any(name == port.name for port in self._ports.values()):
            raise DriverError(f"{name} is attached already: detach it first")
        self._attached += 1
        number = self._attached
        run_ip(
            batch=[
                f"link add h{number} type veth peer name {DEVICE} netns {namespace}",
                f"link set h{number} master s{self._numbers[site]} up",
            ]
        )
        with inside(namespace):
            # A packet is what the wire would carry, not what a network card would cut up later.
            run_ip("link", "set", DEVICE, "gso_max_segs", "1")
        tap = _open_tap(f"h{number}")
        port = Port(name, number, site, socket.inet_aton(address), tap)
        self._for_others(port, [host_line("{}", number, address, self._numbers[site])])
        self._ports[tap.fileno()] = self._by_address[port.address] = port
        self._routes.clear()
        self._epoll.register(tap.fileno(), select.EPOLLIN)

    def _detach(self, name: str) -> None:
        for port in [port for port in self._ports.values() if port.name == name]:
            self._look(port)
            self._overflowed += self._overflows(port)
            self._for_others(port, [forget_line("{}", port.number)])
            self._epoll.unregister(port.tap.fileno())
            del self._ports[port.tap.fileno()], self._by_address[port.address]
            self._routes.clear()
            port.tap.close()
            # Gone already if its namespace is.
            with contextlib.suppress(DriverError):
                run_ip("link", "del", port.device)

    def _for_others(self, port: Port, lines: list[str]) -> None:
        """Tell all other sites about a host; `{}` stands for their devices."""
        devices = [f"u{number}" for site, number in self._numbers.items() if site != port.site]
        if devices:
            run_tc(batch=[line.format(device) for device in devices for line in lines])

    # Packets

    def _look(self, port: Port) -> None:
        for _ in range(READ_BATCH):
            try:
                packet = port.tap.recv(PACKET_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # Its device went down with its namespace.
                return
            if len(packet) < _IPV4_HEADER_BYTES or packet[0] >> 4 != 4:
                # ARP, for example.
                continue
            key = packet[12:20]
            if key not in self._routes:
                self._routes[key] = self._route(port, key[:4], key[4:])
            route = self._routes[key]
            if route is None:
                self._stray += 1
                continue
            lane, tap = route
            lane.packets += 1
            lane.bytes += len(packet)
            self._passed += 1
            if tap is not None:
                tap.feed(packet)

    def _route(
        self, port: Port, source: bytes, destination: bytes
    ) -> tuple[NetemLane, FlowTap | None] | None:
        target = self._by_address.get(destination)
        if source != port.address or target is None or (port.site, target.site) not in self._lanes:
            return None
        pair = (port.site, target.site)
        return self._lanes[pair], self._wan.tap(pair, source, destination)

    def _overflowed_in_all(self) -> int:
        return self._overflowed + sum(self._overflows(port) for port in self._ports.values())

    @staticmethod
    def _overflows(port: Port) -> int:
        # The kernel forgets what it has told.
        told = port.tap.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        port.overflowed += int.from_bytes(told[4:8], sys.byteorder)
        return port.overflowed


def _bridge(name: str) -> list[str]:
    # Snooping wants a querier to tell who listens to a group; a switch without it floods.
    return [f"link add {name} type bridge mcast_snooping 0", f"link set {name} up"]


def _open_tap(device: str) -> socket.socket:
    """Sees what comes in at a device. Of all kinds: the bridge takes IP before who asks for that alone."""
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    tap.setblocking(False)
    tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
    tap.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    tap.bind((device, _ETH_P_ALL))
    return tap


def main() -> None:
    """Be the WAN until killed."""
    specification = json.loads(Path(sys.argv[1]).read_text())
    enter_new()
    speak_ipv4_only()
    wan = NetemWan(specification["links"], specification["untapped"], specification["control"])
    say("serving")
    wan.run()


if __name__ == "__main__":
    main()
