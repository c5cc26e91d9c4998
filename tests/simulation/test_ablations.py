"""Each safeguard is missed: without it, a run that otherwise holds breaks the promise it stands for.

The seeds are the smallest that notice; `isthmus sim --seeds 1000 --without NAME` finds others.
"""

import pytest

from runtime.compiled import compiled_modules
from simulation import simulate
from simulation.ablations import Ablation

SMALLEST = (
    (Ablation.DEDUPE, 1, "duplicate"),
    (Ablation.PRUNING, 1, "copies"),
    (Ablation.RESEND, 1, "loss"),
    (Ablation.LEASE, 2, "one leader"),
    (Ablation.FENCING, 4, "fencing"),
    (Ablation.REPLICATION, 23, "loss"),
    (Ablation.RESUME, 133, "loss"),
)


@pytest.mark.skipif(bool(compiled_modules()), reason="methods of compiled classes cannot be replaced")
@pytest.mark.parametrize(("ablation", "seed", "promise"), SMALLEST)
def test_a_safeguard_is_missed(ablation: Ablation, seed: int, promise: str) -> None:
    outcome = simulate(seed, ablation)
    assert outcome.verdict == "broken"
    assert promise in {violation.promise for violation in outcome.violations}
    assert simulate(seed).verdict == "held"
