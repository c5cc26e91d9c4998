"""Virtual time: order, clocks, freezing and dying."""

import asyncio

import pytest

from overlay.limits import MILLISECOND_NS, SECOND_NS
from simulation.schedule import LivelockError, Step, World
from simulation.world import SimulatedLoop


def _run(loop: SimulatedLoop, work: object) -> None:
    loop.world.soon(Step(loop.actor, loop.create_task, (work,), None))


def test_time_passes_only_between_steps() -> None:
    world = World()
    loop = SimulatedLoop(world, "one")
    seen: list[tuple[str, int]] = []

    async def work(name: str, pause_s: float) -> None:
        for _ in range(2):
            await asyncio.sleep(pause_s)
            seen.append((name, world.now_ns // MILLISECOND_NS))

    _run(loop, work("slow", 3.0))
    _run(loop, work("fast", 1.0))
    world.run_until(10 * SECOND_NS)
    assert seen == [("fast", 1000), ("fast", 2000), ("slow", 3000), ("slow", 6000)]
    assert world.now_ns == 10 * SECOND_NS


def test_every_process_has_its_own_clock() -> None:
    world = World()
    fast = SimulatedLoop(world, "fast", offset_ns=5 * SECOND_NS, drift_ppm=100)
    woken_ns: list[int] = []

    async def sleep() -> None:
        due_s = fast.time() + 1000.0
        await asyncio.sleep(1000.0)
        assert fast.time() >= due_s
        woken_ns.append(world.now_ns)

    _run(fast, sleep())
    world.run_until(2000 * SECOND_NS)
    # A clock that is fast by 100 ppm is there a tenth of a second earlier.
    assert woken_ns[0] == pytest.approx(999.9 * SECOND_NS, abs=MILLISECOND_NS)
    assert fast.clock_ns() == 5 * SECOND_NS + 2000 * SECOND_NS + 200 * MILLISECOND_NS


def test_a_frozen_process_catches_up_and_a_dead_one_does_not() -> None:
    world = World()
    frozen, dead = SimulatedLoop(world, "frozen"), SimulatedLoop(world, "dead")
    seen: list[tuple[str, int]] = []
    for loop in (frozen, dead):
        for delay_s in (1.0, 2.0):
            loop.call_later(delay_s, lambda name=loop.name: seen.append((name, world.now_ns // SECOND_NS)))
    frozen.actor.freeze()
    world.run_until(SECOND_NS * 3 // 2)
    dead.actor.kill()
    world.run_until(5 * SECOND_NS)
    frozen.actor.thaw()
    world.run_until(6 * SECOND_NS)
    assert seen == [("dead", 1), ("frozen", 5), ("frozen", 5)]


def test_steps_without_end_are_noticed() -> None:
    world = World()
    loop = SimulatedLoop(world, "busy")

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(LivelockError, match=r"busy at 0\.000 s"):
        world.run_until(SECOND_NS)


def test_what_nobody_catches_is_a_finding() -> None:
    world = World()
    loop = SimulatedLoop(world, "faulty")

    def fail() -> None:
        raise ValueError("by mistake")

    loop.call_soon(fail)
    world.run_until(SECOND_NS)
    assert "by mistake" in world.failures[0]
