"""Virtual time: one schedule of everything that happens.

Nothing waits. The world takes the next thing that is due, sets the time to when it is due, and does
it; a simulated minute takes as long as the work in it. What is due at the same time happens in the
order it was asked for, so one seed gives one history.

Every step has an actor that does it: a process of the run, or the network. A frozen actor does nothing,
and what happens to it meanwhile happens when it thaws; a dead one does nothing any more.

A run is some hundred thousand steps, so this module is compiled where hot modules are.
"""

import logging
import zlib
from asyncio import _set_running_loop
from collections import deque
from collections.abc import Callable
from contextvars import Context
from enum import Enum, auto
from typing import Any, Final

from overlay.limits import SECOND_NS

_logger = logging.getLogger(__name__)

_MILLION: Final = 1_000_000
_STEPS_AT_ONCE_MAX: Final = 100_000
"""More steps than this without time passing are a loop without an end."""


class LivelockError(Exception):
    """Steps follow each other without time passing."""


class Life(Enum):
    """Whether an actor does anything."""

    RUNNING = auto()
    FROZEN = auto()
    DEAD = auto()


class Actor:
    """Who does steps: its life, and its monotonic clock, offset and drifting."""

    __slots__ = ("_drift_ppm", "_offset_ns", "held", "is_running", "life", "loop", "name", "world")

    def __init__(self, world: "World", name: str, loop: Any, offset_ns: int, drift_ppm: int) -> None:
        self.world = world
        self.name = name
        self.loop = loop
        """The event loop that runs while it does something."""
        self.life = Life.RUNNING
        self.is_running = True
        self.held: list[Step] = []
        """What was due while it was frozen."""
        self._offset_ns = offset_ns
        self._drift_ppm = drift_ppm

    # Life

    def freeze(self) -> None:
        """Do nothing from now on."""
        if self.life is Life.RUNNING:
            self._enter(Life.FROZEN)

    def thaw(self) -> None:
        """Go on; what was due meanwhile is done now."""
        if self.life is Life.FROZEN:
            self._enter(Life.RUNNING)
            held, self.held = self.held, []
            for step in held:
                self.world.soon(step)

    def kill(self) -> None:
        """Do nothing any more."""
        self._enter(Life.DEAD)
        self.held.clear()

    def _enter(self, life: Life) -> None:
        self.life = life
        self.is_running = life is Life.RUNNING

    def fail(self, what: str, error: BaseException | None) -> None:
        """Something went wrong that nobody expected."""
        if self.life is not Life.DEAD:
            self.world.failures.append(f"{self.name}: {what}: {error!r}")
            _logger.debug("%s", what, exc_info=error)

    # Time

    def clock_ns(self) -> int:
        """What its clock shows now."""
        now_ns = self.world.now_ns
        return self._offset_ns + now_ns + now_ns * self._drift_ppm // _MILLION

    def time(self) -> float:
        """The same in seconds, as asyncio asks for it."""
        return self.clock_ns() / SECOND_NS

    def local_ns(self, true_ns: int) -> int:
        """What its clock shows at a true time."""
        return self._offset_ns + true_ns + true_ns * self._drift_ppm // _MILLION

    def true_ns(self, local_ns: int) -> int:
        """How long something takes that takes `local_ns` on its clock.

        Rounded up, and a bit: who is called at a time must find its clock there, not just before it.
        """
        return 2 - (-local_ns * _MILLION // (_MILLION + self._drift_ppm))

    # Scheduling

    def get_debug(self) -> bool:
        """Asyncio asks a loop with every future and task."""
        return False

    def soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> "Step":
        """Do this after everything else that is due now."""
        step = Step(self, callback, args, context)
        self.world.ready.append(step)
        return step

    def later(
        self, delay_s: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> "Step":
        """Do this when so much time has passed on the own clock."""
        world = self.world
        due_ns = world.now_ns
        if delay_s > 0:
            due_ns += self.true_ns(int(delay_s * SECOND_NS))
        step = Step(self, callback, args, context)
        world.at(due_ns, step)
        return step


class Step:
    """Something an actor is to do, now or at some time; asyncio's code takes it for a handle."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "actor", "count", "due_ns", "rank")

    def __init__(
        self,
        actor: Actor,
        callback: Callable[..., object] | None,
        args: tuple[Any, ...],
        context: Context | None = None,
    ) -> None:
        self.actor = actor
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        # Set when it is put on the agenda.
        self.due_ns = 0
        self.rank = 0
        self.count = 0

    def cancel(self) -> None:
        """Do not do it."""
        self._cancelled = True
        self._callback = None
        self._args = ()

    def cancelled(self) -> bool:
        """It is not to be done any more."""
        return self._cancelled

    def when(self) -> float:
        """When it is due, on the actor's clock."""
        return self.actor.local_ns(self.due_ns) / SECOND_NS

    def run(self) -> None:
        """Do it."""
        callback = self._callback
        assert callback is not None
        try:
            if self._context is None:
                callback(*self._args)
            else:
                self._context.run(callback, *self._args)
        except Exception as error:
            # Whatever a process fails with is a finding of the run.
            _logger.debug("a callback of %s failed", self.actor.name, exc_info=True)
            self.actor.fail(f"callback {callback!r} failed", error)

    def orphaned(self) -> None:
        """The actor is dead; nobody is left to do it."""

    def __repr__(self) -> str:
        return f"<Step of {self.actor.name}: {self._callback!r}>"


class Agenda:
    """Steps by time, rank and number: a binary heap, for which `heapq` would take a tuple per step."""

    def __init__(self) -> None:
        self._heap: list[Step] = []

    def push(self, step: Step) -> None:
        """One more."""
        self._heap.append(step)
        self._rise(len(self._heap) - 1, step)

    def pop_until(self, end_ns: int) -> Step | None:
        """Take the first one out if it is due by then."""
        heap = self._heap
        if not heap or heap[0].due_ns > end_ns:
            return None
        first = heap[0]
        last = heap.pop()
        count = len(heap)
        if count == 0:
            return first
        # The gap moves down to where there is nothing below it: where the last one goes is seldom far above.
        gap = 0
        below = 1
        while below < count:
            if below + 1 < count and _precedes(heap[below + 1], heap[below]):
                below += 1
            heap[gap] = heap[below]
            gap = below
            below = 2 * gap + 1
        self._rise(gap, last)
        return first

    def _rise(self, gap: int, step: Step) -> None:
        """Put a step into the gap, or as far above it as it belongs."""
        heap = self._heap
        while gap > 0:
            above = (gap - 1) >> 1
            if not _precedes(step, heap[above]):
                break
            heap[gap] = heap[above]
            gap = above
        heap[gap] = step


def _precedes(one: Step, other: Step) -> bool:
    """No two steps have the same number."""
    if one.due_ns != other.due_ns:
        return one.due_ns < other.due_ns
    if one.rank != other.rank:
        return one.rank < other.rank
    return one.count < other.count


class World:
    """The schedule of everything, and the record of what happened."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.steps = 0
        self._at_once = 0
        self.failures: list[str] = []
        """Exceptions that nobody caught: bugs."""
        self.ready: deque[Step] = deque()
        self._agenda = Agenda()
        self._count = 0
        self._running: Actor | None = None
        self.graveyard: list[object] = []
        """Keeps dead processes, so that their coroutines are not torn down in the middle of a run."""
        self.digest = 0
        """Checksum of everything that was noted."""
        self.log: list[str] | None = None

    def soon(self, step: Step) -> None:
        """Do it after everything else that is due now."""
        self.ready.append(step)

    def at(self, when_ns: int, step: Step, rank: int = 0) -> None:
        """Do it at a time; of several at one time, by rank and then in the order they were asked for."""
        self._count += 1
        step.due_ns = max(when_ns, self.now_ns)
        step.rank = rank
        step.count = self._count
        self._agenda.push(step)

    def note(self, what: str, where: str, data: bytes = b"") -> None:
        """Enter something that happened into the history; `data` is for who reads it."""
        entry = f"{self.now_ns} {where} {what}"
        self.digest = zlib.crc32(entry.encode(), self.digest)
        if self.log is not None:
            self.log.append(f"{entry} {data[:200]!r}")

    def run_until(self, end_ns: int) -> None:
        """Let everything happen that is due until then."""
        agenda = self._agenda
        try:
            self._empty_ready()
            while (step := agenda.pop_until(end_ns)) is not None:
                if step.due_ns > self.now_ns:
                    self.now_ns = step.due_ns
                    self._at_once = 0
                if not step._cancelled:
                    self._do(step)
                    if self.ready:
                        self._empty_ready()
        finally:
            self._running = None
            _set_running_loop(None)
        self.now_ns = end_ns

    def _empty_ready(self) -> None:
        ready = self.ready
        while ready:
            step = ready.popleft()
            if not step._cancelled:
                self._do(step)

    def _do(self, step: Step) -> None:
        actor = step.actor
        if not actor.is_running:
            if actor.life is Life.FROZEN:
                actor.held.append(step)
            else:
                step.orphaned()
            return
        if actor is not self._running:
            self._running = actor
            _set_running_loop(actor.loop)
        self.steps += 1
        self._at_once += 1
        if self._at_once > _STEPS_AT_ONCE_MAX:
            raise LivelockError(f"{actor.name} at {self.now_ns / SECOND_NS:.3f} s: {step!r}")
        step.run()
