"""Hostile input: whatever the bytes, a reader raises its declared errors only and stays within bounds.

`make fuzz` gives 100,000 inputs, `make test` a small part of them. The seed of a run is printed with a
failure; `ISTHMUS_FUZZ_SEED` has it again, `ISTHMUS_FUZZ_INPUTS` sets the number.
"""

import os
import random
import resource
import tracemalloc
from collections import Counter
from contextlib import suppress

import pytest

from overlay.errors import CloseReason
from simulation.nodes import ClientProcess, EdgeProcess, RouterProcess
from tests.fuzz.connections import ConnectionFuzzer
from tests.fuzz.mutation import INPUT_MAX_BYTES, Mutator
from tests.fuzz.overlays import OverlayFuzzer
from tests.fuzz.targets import STREAMS, TARGETS, Target

SEED = int(os.environ.get("ISTHMUS_FUZZ_SEED", "1"))
INPUTS = int(os.environ.get("ISTHMUS_FUZZ_INPUTS", "4000"))
CONNECTION_SHARE = 12
OVERLAY_SHARE = 6
SHARES = sum(target.share for target in TARGETS) + CONNECTION_SHARE + 2 * OVERLAY_SHARE
INPUTS_PER_OVERLAY = 150
MEMORY_MAX_BYTES = 96 * 2**20
"""What all inputs of a target together may add to the process."""
PEAK_MAX_BYTES = 64 * INPUT_MAX_BYTES
"""What reading one input may take."""


def count_of(share: int) -> int:
    return max(20, -(-INPUTS * share // SHARES))


def memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_readers_raise_nothing_but_their_declared_errors(target: Target) -> None:
    rng = random.Random(f"{SEED}/{target.name}")
    mutator = Mutator(target.corpus, rng)
    before = memory_bytes()
    refused = 0
    for number in range(count_of(target.share)):
        data = mutator.next()
        try:
            target.read(data, rng)
        except target.errors:
            refused += 1
        except BaseException as error:
            error.add_note(f"target {target.name}, input {number} of seed {SEED}: {data[:4096]!r}")
            raise
    assert memory_bytes() - before < MEMORY_MAX_BYTES
    assert refused or not target.errors, "no input was refused: the target reads nothing"


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_reading_an_input_takes_memory_within_bounds(target: Target) -> None:
    rng = random.Random(f"{SEED}/{target.name}/memory")
    mutator = Mutator(target.corpus, rng)
    tracemalloc.start()
    try:
        for number in range(min(60, count_of(target.share))):
            data = mutator.next()
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with suppress(*target.errors):
                target.read(data, rng)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < PEAK_MAX_BYTES, f"input {number} of seed {SEED}: {data[:200]!r}"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_connection_does_the_same_however_the_bytes_arrive(encrypted: bool, certificates) -> None:
    rng = random.Random(f"{SEED}/connection/{encrypted}")
    mutator = Mutator(STREAMS, rng)
    with ConnectionFuzzer(certificates if encrypted else None) as fuzzer:
        # A handshake takes so long that encrypted connections get fewer inputs, but every example.
        for number in range(max(len(STREAMS), count_of(CONNECTION_SHARE) // (8 if encrypted else 1))):
            data = mutator.next()
            try:
                fuzzer.check(data, rng)
            except BaseException as error:
                error.add_note(f"connection, input {number} of seed {SEED}: {data[:4096]!r}")
                raise
        assert fuzzer.opened and fuzzer.refused


@pytest.mark.parametrize("well_formed", [True, False], ids=["frames", "bytes"])
def test_brokers_and_clients_survive_what_their_peers_say(well_formed: bool) -> None:
    rng = random.Random(f"{SEED}/overlay/{well_formed}")
    mutator = Mutator(STREAMS, rng)
    reached: Counter[type] = Counter()
    closed = 0
    count = count_of(OVERLAY_SHARE)
    for first in range(0, count, INPUTS_PER_OVERLAY):
        with OverlayFuzzer(SEED + first) as fuzzer:
            for number in range(first, min(count, first + INPUTS_PER_OVERLAY)):
                data = fuzzer.message(rng) if well_formed else mutator.next()
                try:
                    fuzzer.say(data, rng)
                except BaseException as error:
                    error.add_note(f"overlay, input {number} of seed {SEED}: {data[:4096]!r}")
                    raise
            fuzzer.go_on(5_000)  # what was begun comes to its end
            fuzzer.validate()
            reached += fuzzer.reached
            closed += fuzzer.closes(CloseReason.BAD_MESSAGE if well_formed else CloseReason.BAD_FRAME)
            # Nobody lets another send what its peers refuse.
            assert not well_formed or not fuzzer.closes(CloseReason.FRAME_TOO_LARGE)
    assert reached.keys() == {RouterProcess, EdgeProcess, ClientProcess} and closed
