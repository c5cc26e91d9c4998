"""What a node asks of the machine it runs on: the time, and numbers nobody else has.

Everything else a node needs of its machine comes through its event loop. A simulation hands in a host
and a loop of its own and has the node in its hands; the node notices no difference.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], int]
"""A monotonic clock, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine of one node; this one by default."""

    clock: Clock = time.monotonic_ns
    randomness: random.Random = field(default_factory=random.SystemRandom)

    def new_incarnation(self) -> int:
        """A number that tells this process from any other; never 0."""
        return self.randomness.getrandbits(64) | 1

    def new_name(self) -> str:
        """A name that nobody else has."""
        return f"{self.randomness.getrandbits(128):032x}"
