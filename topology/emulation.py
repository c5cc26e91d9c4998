"""A network of namespaces with its emulated WAN, for as long as it is started.

    python -m topology.emulation [--delay-ms 30] [--jitter-ms 0] [--loss 0.01] [--burst 4] [--rate-mbit 10]
        [--wan ferry|netem]

emulates one link with these conditions both ways, measures it (`topology.calibration`) and prints the
record as JSON; the exit status is 0 if it is what was asked for.

    python -m topology.emulation --table [--wan ferry|netem]

does that with four links, one after the other, and prints the table of docs/testbed.md.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from topology.calibration import LOSS_PACKETS, Calibration, End, calibrate
from topology.conditions import CONDITION_NAMES, LinkConditions
from topology.emulated_wan import EmulatedWan
from topology.errors import TopologyError
from topology.namespaces import Namespaces, require_available, sweep
from topology.network import NETWORK, Host, Link, NetworkPlan, ferry_specification, lay_out
from topology.tun import set_up_device
from topology.wan_kind import WanKind

SEED: Final = 1
TABLE_LINKS: Final = (
    LinkConditions(delay_ms=30),
    LinkConditions(delay_ms=250, loss=0.01),
    LinkConditions(delay_ms=80, jitter_ms=10, loss=0.02, burst=4),
    LinkConditions(delay_ms=15, rate_mbit=20),
)
"""Those of the table in docs/testbed.md: a clean one, a far lossy one, one with everything, a narrow one."""


class EmulatedNetwork(EmulatedWan):
    """Namespaces, switches and cables, with the WAN between. `stop` also after a `start` that failed."""

    def __init__(
        self,
        plan: NetworkPlan,
        directory: Path,
        *,
        seed: int = SEED,
        untapped: Iterable[str] = (),
        wan: WanKind = WanKind.AUTO,
    ) -> None:
        """`directory` takes the WAN's log; messages from and to `untapped` addresses are not counted."""
        super().__init__(plan.links, directory, wan)
        self.plan = plan
        self.seed = seed
        self.namespaces = Namespaces()
        self.swept: list[str] = []
        """Runs of killed runners whose leftovers were removed at the start."""
        self._untapped = tuple(untapped)

    async def start(self) -> None:
        """Make everything; returns when packets are carried. Raises DriverError."""
        require_available()
        self.swept = sweep()
        self.namespaces.claim(directory=str(self._directory))
        lay_out(self.plan, self.namespaces)
        await self.launch(
            ferry_specification(self.plan.links, self.namespaces.control, self.seed, self._untapped)
        )
        for host in self.plan.hosts:
            if host.has_wan:
                namespace = self.namespaces.path(host.name)
                await self.attach(host.name, host.site, host.address, namespace)
                await asyncio.to_thread(set_up_device, namespace, host.address, [NETWORK])

    async def stop(self) -> None:
        """Remove everything. Processes inside must have ended."""
        await self.end()
        self.namespaces.remove_all()

    def path(self, host: str) -> Path:
        """The namespace of a host."""
        return self.namespaces.path(self.plan.host(host).name)

    async def calibrate(
        self, *, packets: int = LOSS_PACKETS, links: Iterable[Link] | None = None
    ) -> Calibration:
        """Measure whether the WAN does what it was told; nothing else may use it meanwhile."""
        ends = {}
        for site in {link.source for link in self.plan.links}:
            host = self.plan.on_wan(site)
            ends[site] = End(self.path(host.name), host.address)
        chosen = None if links is None else tuple(links)
        return await calibrate(self.plan, ends, packets=packets, links=chosen)


def two_sites(there: LinkConditions, back: LinkConditions) -> NetworkPlan:
    """The smallest network: a host at each end of one link, to measure conditions by themselves."""
    hosts = tuple(
        Host(site, site, f"198.18.{number}.1", is_switch=True, has_wan=True)
        for number, site in enumerate(("a", "b"), 1)
    )
    return NetworkPlan(hosts, (Link("a", "b", there), Link("b", "a", back)))


async def calibrate_conditions(
    there: LinkConditions,
    back: LinkConditions | None = None,
    *,
    directory: Path,
    packets: int = LOSS_PACKETS,
    seed: int = SEED,
    wan: WanKind = WanKind.AUTO,
) -> dict[str, Any]:
    """Emulate one link and measure it; a JSON-able record. `back` is as `there` if not given.

    The ferry's own lag is part of the verdict: what it could not carry in time was not measured.
    """
    plan = two_sites(there, there if back is None else back)
    network = EmulatedNetwork(plan, directory, seed=seed, wan=wan)
    try:
        await network.start()
        calibration = await network.calibrate(packets=packets)
        statistics = await network.statistics()
    finally:
        await network.stop()
    record = calibration.to_record()
    return {
        **record,
        "ok": calibration.ok and statistics["invalid"] is None,
        "invalid": statistics["invalid"],
        "emulated_by": statistics["emulated_by"],
        "forwarded": statistics["forwarded"],
        "late_p99_ms": statistics["late_p99_ms"],
        "late_max_ms": statistics["late_max_ms"],
    }


async def calibrate_table(directory: Path, *, packets: int, seed: int, wan: WanKind) -> bool:
    """Measure the links of the table and print it as they are done; whether all are what was asked for."""
    print("| link | round trip | loss, each way | rate, each way | as asked for |\n|---|---|---|---|---|")
    oks = []
    for conditions in TABLE_LINKS:
        record = await calibrate_conditions(
            conditions, directory=directory, packets=packets, seed=seed, wan=wan
        )
        print(table_row(conditions, record), flush=True)
        oks.append(record["ok"])
    return all(oks)


def table_row(conditions: LinkConditions, record: Mapping[str, Any]) -> str:
    """What `calibrate_conditions` found, as a line of a Markdown table."""

    def measured(what: str, form: str) -> str:
        values = [item["measured"] for item in record["measurements"] if item["what"] == what]
        return ", ".join(form.format(value) for value in values)

    verdict = "yes" if record["ok"] else "no" if record["invalid"] is None else f"no: {record['invalid']}"
    cells = [
        conditions.describe(),
        measured("rtt_ms", "{:.2f} ms"),
        measured("loss", "{:.3%}"),
        measured("rate_mbit", "{:.3f} Mbit/s"),
        verdict,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Calibrate one link, or those of the table."""
    parser = argparse.ArgumentParser(prog="emulation")
    for name in CONDITION_NAMES:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=getattr(LinkConditions(), name)
        )
    parser.add_argument("--table", action="store_true", help="the links of docs/testbed.md")
    parser.add_argument("--packets", type=int, default=LOSS_PACKETS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--wan", type=WanKind, choices=list(WanKind), default=WanKind.AUTO)
    arguments = parser.parse_args()
    how = {"packets": arguments.packets, "seed": arguments.seed, "wan": arguments.wan}
    try:
        with tempfile.TemporaryDirectory() as directory:
            if arguments.table:
                raise SystemExit(0 if asyncio.run(calibrate_table(Path(directory), **how)) else 1)
            conditions = LinkConditions(**{name: getattr(arguments, name) for name in CONDITION_NAMES})
            record = asyncio.run(calibrate_conditions(conditions, directory=Path(directory), **how))
    except TopologyError as error:
        parser.error(str(error))
    print(json.dumps({"conditions": conditions.describe(), **record}, indent=1))
    raise SystemExit(0 if record["ok"] else 1)


if __name__ == "__main__":
    main()
