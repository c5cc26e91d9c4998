"""An emulated WAN as those see it who use it: its process, its links, what passed and how well.

A process carries packets between sites, in namespaces of our own or of containers: the ferry
(`topology.ferry`), or the kernel at the behest of `topology.netem_wan`. This is the other end of its
control socket. Drivers with such a WAN hand it the faults of their LANs.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from topology.children import Child
from topology.errors import DriverError
from topology.ferry import lag_reason
from topology.gateway import GatewayStatistics, Way
from topology.netem import why_no_netem
from topology.network import Link, write_specification
from topology.tun import TunDevice, open_device
from topology.wan_control import ask
from topology.wan_kind import WanKind

START_TIMEOUT_S: Final = 20.0
_MODULES: Final = {WanKind.FERRY: "topology.ferry", WanKind.NETEM: "topology.netem_wan"}
BITS: Final = 8
MBIT: Final = 1e6


def choose(kind: WanKind) -> WanKind:
    """Who emulates a WAN here. Raises DriverError if that one cannot."""
    if kind is WanKind.FERRY:
        return kind
    reason = why_no_netem()
    if reason is None:
        return WanKind.NETEM
    if kind is WanKind.NETEM:
        raise DriverError(f"{reason}: use --wan ferry, or a kernel that has them")
    return WanKind.FERRY


class EmulatedWan:
    """The WAN of one run. `end` also after a `launch` that failed."""

    def __init__(self, links: Sequence[Link], directory: Path, kind: WanKind = WanKind.AUTO) -> None:
        """`directory` takes the log and the figures of its process."""
        self.links = tuple(links)
        self.kind = kind
        """Who emulates; NETEM or FERRY once it is launched."""
        self.control = Path()
        """Where it takes commands, once it is launched."""
        self._directory = directory
        self.process: Child | None = None
        self._devices: dict[str, TunDevice] = {}
        """Those that the ferry has. We hold them too, so that it is us for whom their end takes long."""
        self._attached: set[str] = set()

    async def launch(self, specification: dict[str, Any]) -> None:
        """Start it; returns when hosts can be attached. Raises DriverError."""
        self.kind = choose(self.kind)
        self.control = Path(specification["control"])
        file = self._directory / "wan.json"
        write_specification(file, specification)
        self.process = Child("wan", _MODULES[self.kind], [str(file)], self._directory)
        await self.process.start()
        await self.process.wait_for("serving", START_TIMEOUT_S)

    async def end(self) -> None:
        """End its process; its figures are left in `wan-statistics.json`."""
        if self.process is None:
            return
        if self.process.is_alive:
            # Nothing to write where the run was cancelled before it served.
            with contextlib.suppress(DriverError):
                found = await self.statistics()
                (self._directory / "wan-statistics.json").write_text(json.dumps(found, indent=1))
        await self.process.stop()
        for name in list(self._devices):
            await self._close_device(name)

    # Single links

    async def attach(self, name: str, site: str, address: str, namespace: Path) -> None:
        """Give a host a device to the WAN, instead of one it had; the device is still down then."""
        if name in self._attached:
            # First: both would have the same name, perhaps in the same namespace.
            await ask(self.control, "detach", name=name)
            await self._close_device(name)
        where: dict[str, Any] = {"name": name, "site": site, "address": address}
        self._attached.add(name)
        if self.kind is WanKind.NETEM:
            await ask(self.control, "attach", namespace=str(namespace), **where)
            return
        device = self._devices[name] = await asyncio.to_thread(open_device, namespace)
        await ask(self.control, "attach", descriptors=device.descriptors, **where)

    async def _close_device(self, name: str) -> None:
        if name in self._devices:
            await asyncio.to_thread(self._devices.pop(name).close)

    async def change(self, a: str, b: str, *, one_way: bool = False, **changes: Any) -> dict[str, Any]:
        """Change conditions between two sites; gives those that hold now."""
        return await ask(self.control, "link", a=a, b=b, one_way=one_way, changes=changes)

    async def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Let nothing through between two sites."""
        await ask(self.control, "cut", a=a, b=b, one_way=one_way)

    async def heal(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Let everything through again."""
        await ask(self.control, "heal", a=a, b=b, one_way=one_way)

    async def statistics(self) -> dict[str, Any]:
        """What has been carried, and how well; `invalid` says why the run is, or is None."""
        found = await ask(self.control, "statistics")
        return {**found, "emulated_by": self.kind.value, "invalid": lag_reason(found)}

    # All links of a LAN

    async def cut_site(self, site: str, ways: Iterable[Way]) -> None:
        """Cut a site off from all others."""
        for source, target in self._lanes(site, ways):
            await self.cut(source, target, one_way=True)

    async def heal_site(self, site: str, ways: Iterable[Way]) -> None:
        """Join a site to all others again."""
        for source, target in self._lanes(site, ways):
            await self.heal(source, target, one_way=True)

    async def limit_site(self, site: str, bytes_per_s: float | None, ways: Iterable[Way]) -> None:
        """Let each link of a site carry only so much in each of these directions; None: no limit."""
        rate_mbit = None if bytes_per_s is None else bytes_per_s * BITS / MBIT
        for source, target in self._lanes(site, ways):
            await self.change(source, target, one_way=True, rate_mbit=rate_mbit)

    async def delay_site(self, site: str, delay_ms: float | None) -> None:
        """Let each link of a site take so long each way; None: as it was at first."""
        lanes = set(self._lanes(site, tuple(Way)))
        for link in self.links:
            if (link.source, link.target) in lanes:
                changed_ms = link.conditions.delay_ms if delay_ms is None else delay_ms
                await self.change(link.source, link.target, one_way=True, delay_ms=changed_ms)

    async def site_statistics(self, site: str) -> GatewayStatistics:
        """What has passed between a site and all others; bytes are those of whole packets."""
        found = await self.statistics()
        out = [lane for lane in found["lanes"] if lane["from"] == site]
        back = [lane for lane in found["lanes"] if lane["to"] == site]
        return GatewayStatistics(
            connections=sum(lane["connections"] for lane in out),
            bytes_out=sum(lane["bytes"] for lane in out),
            bytes_back=sum(lane["bytes"] for lane in back),
            messages_out=_messages(out),
            messages_back=_messages(back),
            unreadable=sum(lane["unreadable"] for lane in (*out, *back)),
            late_max_ms=found["late_max_ms"] or 0.0,
        )

    async def watch(self) -> None:
        """Judge only what is carried from now on."""
        await ask(self.control, "watch")

    async def check(self) -> tuple[bool, str]:
        """Whether every packet was carried in time since `watch`, or since the start, as far as is known."""
        found = await self.statistics()
        if found["invalid"] is not None:
            return False, found["invalid"]
        if self.kind is WanKind.NETEM:
            return True, f"{found['forwarded']} packets passed tc netem, which does not say when it is late"
        return True, (
            f"{found['forwarded']} packets were carried, 99 % at most {found['late_p99_ms']:g} ms late, "
            f"the latest {found['late_max_ms']:g} ms"
        )

    def _lanes(self, site: str, ways: Iterable[Way]) -> list[tuple[str, str]]:
        wanted = set(ways)
        lanes = [
            (link.source, link.target)
            for link in self.links
            if (link.source == site and Way.OUT in wanted) or (link.target == site and Way.BACK in wanted)
        ]
        if not lanes:
            known = ", ".join(sorted({link.source for link in self.links}))
            raise DriverError(f"there is no site {site}: use one of {known}")
        return lanes


def _messages(lanes: list[dict[str, Any]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for lane in lanes:
        total.update(lane["messages"])
    return dict(total)
