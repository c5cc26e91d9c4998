"""The drivers by name. Each is imported when it is used: not all need what containers need."""

import importlib
from typing import Final

from topology.driver import Driver

DRIVERS: Final = {
    # name: (module, class)
    "process": ("topology.process_driver", "ProcessDriver"),
    "netns": ("topology.netns_driver", "NetnsDriver"),
    "compose": ("topology.compose_driver", "ComposeDriver"),
}

DRIVERS_HELP: Final = (
    "process: on loopback; netns: network namespaces with an emulated WAN, needs root; "
    "compose: containers with an emulated WAN, needs root and a Docker engine."
)


def driver_kind(name: str) -> type[Driver]:
    """The class of a driver."""
    module, attribute = DRIVERS[name]
    kind = getattr(importlib.import_module(module), attribute)
    assert isinstance(kind, type) and issubclass(kind, Driver)
    return kind
