"""How far apart the nodes of the ring are, as in Figures 5 and 6 of Fail-Aware Publish/Subscribe."""

from dataclasses import dataclass
from typing import Final

DRIFT_PPM: Final = 50
"""Most that clocks drift; those of the ring drift by as much as they may, half of them each way."""
CHANGE_EVERY_S: Final = 0.005
"""How often the delay of every link changes."""


@dataclass(frozen=True, slots=True)
class Region:
    """Delays of the links between nodes."""

    name: str
    base_ms: tuple[float, float]
    """Between which the delays of links lie when nothing is in the way; each way has its own."""
    jitter_ms: float
    """What comes on top on average."""
    spike_ms: float
    """The most that comes on top of that, now and then."""
    spikes: float = 0.02
    """How often."""


REGIONS: Final = (Region("national", (4, 9), 1.5, 60), Region("global", (60, 160), 12, 500))
