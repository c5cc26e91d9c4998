"""Which testbed a drill is played on."""

from collections.abc import Mapping
from typing import Final

from topology.drills.script import Drill
from topology.driver import Driver
from topology.netns_driver import NetnsDriver
from topology.severable_driver import SeverableDriver, ShiftableDriver

KINDS: Final[Mapping[str, type[Driver]]] = {"process": SeverableDriver, "netns": NetnsDriver}
"""By the name of the driver. One that cannot do what a drill needs makes the drill unknown."""


def testbed_for(drill: Drill, driver: str) -> type[Driver]:
    """The class of the testbed."""
    return ShiftableDriver if drill.shifts_clock and driver == "process" else KINDS[driver]
