"""What a link does to packets in one direction: delay, jitter, loss, rate.

Bursty loss follows Gilbert's two-state model: in the good state nothing is lost, in the bad state
everything. The link leaves the bad state with probability 1 / burst per packet, so a burst is `burst`
packets long on average, and enters it as often as makes the long-run loss come out as asked.
"""

import math
from dataclasses import dataclass, fields
from typing import Final

from topology.errors import InvalidTopologyError

DELAY_MAX_MS: Final = 10_000.0
JITTER_MAX_MS: Final = 10_000.0
LOSS_MAX: Final = 0.99
"""A link that loses everything is a cut link, which is a fault and no condition."""
BURST_MAX_PACKETS: Final = 10_000.0
RATE_MIN_MBIT: Final = 0.001
RATE_MAX_MBIT: Final = 100_000.0


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """One direction of a link. The defaults are a perfect link."""

    delay_ms: float = 0.0
    """One way."""
    jitter_ms: float = 0.0
    """Each packet's delay lies within this much of `delay_ms`, to either side."""
    loss: float = 0.0
    """The part of the packets that is lost, 0 to 0.99."""
    burst: float | None = None
    """How many packets are lost in a row on average; None: each is lost independently of the others."""
    rate_mbit: float | None = None
    """Megabits a second; None: no limit."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("delay_ms", 0.0, DELAY_MAX_MS),
            ("jitter_ms", 0.0, JITTER_MAX_MS),
            ("loss", 0.0, LOSS_MAX),
            ("burst", 1.0, BURST_MAX_PACKETS),
            ("rate_mbit", RATE_MIN_MBIT, RATE_MAX_MBIT),
        ):
            value = getattr(self, name)
            if value is None and name in {"burst", "rate_mbit"}:
                continue
            if not (math.isfinite(value) and least <= value <= most):
                raise InvalidTopologyError(f"{name} is {value:g}: it must be from {least:g} to {most:g}")
        if self.jitter_ms > self.delay_ms:
            raise InvalidTopologyError(
                f"jitter_ms is {self.jitter_ms:g}, more than delay_ms, {self.delay_ms:g}: a packet cannot "
                "arrive before it is sent; lower jitter_ms or raise delay_ms"
            )
        if self.burst is not None and self.loss > 0 and self.loss / (1 - self.loss) > self.burst:
            raise InvalidTopologyError(
                f"loss is {self.loss:g} in bursts of {self.burst:g}: so much cannot be lost in bursts that "
                f"short; raise burst to at least {self.loss / (1 - self.loss):.3g}"
            )

    @property
    def is_perfect(self) -> bool:
        """Nothing is delayed, lost or limited."""
        return self == PERFECT

    @property
    def leave_burst_probability(self) -> float:
        """Bad to good, per packet (Gilbert's r); 1 without bursts."""
        return 1.0 if self.burst is None else 1.0 / self.burst

    @property
    def enter_burst_probability(self) -> float:
        """Good to bad, per packet (Gilbert's p), so that p / (p + r) is the loss.

        Only meaningful with `burst`; independent loss has no states.
        """
        return self.leave_burst_probability * self.loss / (1.0 - self.loss)

    def describe(self) -> str:
        """For people, for example `30 ms ± 2, 1 % lost in bursts of 4, 10 Mbit/s`."""
        parts = [f"{self.delay_ms:g} ms" + (f" ± {self.jitter_ms:g}" if self.jitter_ms else "")]
        if self.loss:
            bursts = "" if self.burst is None else f" in bursts of {self.burst:g}"
            parts.append(f"{self.loss * 100:g} % lost{bursts}")
        if self.rate_mbit is not None:
            parts.append(f"{self.rate_mbit:g} Mbit/s")
        return ", ".join(parts)


CONDITION_NAMES: Final = tuple(field.name for field in fields(LinkConditions))
PERFECT: Final = LinkConditions()
