"""Which testbed a drill is played on."""

from topology.drills.script import Drill
from topology.driver import Driver
from topology.drivers import driver_kind
from topology.severable_driver import SeverableDriver, ShiftableDriver


def testbed_for(drill: Drill, driver: str) -> type[Driver]:
    """The class of the testbed. One that cannot do what a drill needs makes the drill unknown."""
    if driver == "process":
        return ShiftableDriver if drill.shifts_clock else SeverableDriver
    return driver_kind(driver)
