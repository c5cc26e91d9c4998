"""An emulated WAN as those see it who use it: its process, its links, what passed and how well.

The ferry (`topology.ferry`) carries packets between sites, in namespaces of our own or of containers;
this is the other end of its control socket. Drivers with such a WAN hand it the faults of their LANs.
"""

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
from topology.network import Link, write_specification
from topology.wan_control import ask

START_TIMEOUT_S: Final = 20.0
BITS: Final = 8
MBIT: Final = 1e6


class EmulatedWan:
    """The ferry of one run. `end` also after a `launch` that failed."""

    def __init__(self, links: Sequence[Link], directory: Path) -> None:
        """`directory` takes the ferry's log and its figures."""
        self.links = tuple(links)
        self.control = Path()
        """Where it takes commands, once it is launched."""
        self._directory = directory
        self.ferry: Child | None = None
        """What carries packets."""

    async def launch(self, specification: dict[str, Any]) -> None:
        """Start the ferry; returns when packets are carried. Raises DriverError."""
        self.control = Path(specification["control"])
        file = self._directory / "wan.json"
        write_specification(file, specification)
        self.ferry = Child("wan", "topology.ferry", [str(file)], self._directory)
        await self.ferry.start()
        await self.ferry.wait_for("serving", START_TIMEOUT_S)

    async def end(self) -> None:
        """End the ferry; its figures are left in `wan-statistics.json`."""
        if self.ferry is None:
            return
        if self.ferry.is_alive:
            # Nothing to write where the run was cancelled before the ferry served.
            with contextlib.suppress(DriverError):
                found = await self.statistics()
                (self._directory / "wan-statistics.json").write_text(json.dumps(found, indent=1))
        await self.ferry.stop()

    # Single links

    async def attach(self, name: str, site: str, address: str, namespace: Path) -> None:
        """Give a host a device to the WAN, instead of one it had; the device is still down then."""
        where = {"site": site, "address": address, "namespace": str(namespace)}
        await ask(self.control, "attach", name=name, **where)

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
        return {**found, "invalid": lag_reason(found)}

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
            late_max_ms=found["late_max_ms"],
        )

    async def watch(self) -> None:
        """Judge only what is carried from now on."""
        await ask(self.control, "watch")

    async def check(self) -> tuple[bool, str]:
        """Whether every packet was carried in time since `watch`, or since the start."""
        found = await self.statistics()
        if found["invalid"] is not None:
            return False, found["invalid"]
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
