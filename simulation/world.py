"""Virtual time: one schedule of everything that happens, and an event loop for every process.

Nothing waits. The world takes the next thing that is due, sets the time to when it is due, and does
it; a simulated minute takes as long as the work in it. What is due at the same time happens in the
order it was asked for, so one seed gives one history.

A process is an event loop (`SimulatedLoop`) with a clock of its own, offset and drifting. All code
of the process runs on that loop, as it would on asyncio's. A frozen process does nothing, and what
happens to it meanwhile happens when it thaws; a dead one does nothing any more.
"""

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from overlay.limits import SECOND_NS

if TYPE_CHECKING:
    from simulation.network import Machine

_logger = logging.getLogger(__name__)

_MILLION: Final = 1_000_000
_STEPS_AT_ONCE_MAX: Final = 100_000
"""More steps than this without time passing are a loop without an end."""


class LivelockError(RuntimeError):
    """Steps follow each other without time passing."""


class Life(Enum):
    """Whether a process does anything."""

    RUNNING = auto()
    FROZEN = auto()
    DEAD = auto()


class Step(asyncio.TimerHandle):
    """Something a process is to do, now or at some time."""

    __slots__ = ()

    _loop: "SimulatedLoop"

    def __init__(
        self,
        loop: "SimulatedLoop",
        callback: Callable[..., object] | None,
        args: tuple[Any, ...],
        context: Context | None,
        due_ns: int = 0,
    ) -> None:
        # Handles are made by the hundred thousand: the parents' constructors do much that is not needed.
        self._loop = loop
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._when = due_ns
        self._repr = None
        self._source_traceback = None
        self._scheduled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = None
        self._args = ()

    def when(self) -> float:
        return self._loop.local_ns(int(self._when)) / SECOND_NS

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
            _logger.debug("a callback of %s failed", self._loop.name, exc_info=True)
            self._loop.fail(f"callback {callback!r} failed", error)

    def orphaned(self) -> None:
        """The process is dead; nobody is left to do it."""

    def __repr__(self) -> str:
        return f"<Step of {self._loop.name}: {self._callback!r}>"


class World:
    """The schedule of everything."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.steps = 0
        self._at_once = 0
        self.failures: list[str] = []
        """Exceptions that nobody caught: bugs."""
        self._ready: deque[Step] = deque()
        self._heap: list[tuple[int, int, int, Step]] = []
        self._count = 0
        self._running: SimulatedLoop | None = None
        self.graveyard: list[object] = []
        """Keeps dead processes, so that their coroutines are not torn down in the middle of a run."""

    def soon(self, step: Step) -> None:
        """Do it after everything else that is due now."""
        self._ready.append(step)

    def at(self, when_ns: int, step: Step, rank: int = 0) -> None:
        """Do it at a time; of several at one time, by rank and then in the order they were asked for."""
        self._count += 1
        heapq.heappush(self._heap, (max(when_ns, self.now_ns), rank, self._count, step))

    def run_until(self, end_ns: int) -> None:
        """Let everything happen that is due until then."""
        heap = self._heap
        try:
            self._empty_ready()
            while heap and heap[0][0] <= end_ns:
                when_ns, _, _, step = heapq.heappop(heap)
                if when_ns > self.now_ns:
                    self.now_ns = when_ns
                    self._at_once = 0
                if not step._cancelled:
                    self._do(step)
                    if self._ready:
                        self._empty_ready()
        finally:
            self._running = None
            asyncio._set_running_loop(None)
        self.now_ns = end_ns

    def _empty_ready(self) -> None:
        ready = self._ready
        while ready:
            step = ready.popleft()
            if not step._cancelled:
                self._do(step)

    def _do(self, step: Step) -> None:
        loop = step._loop
        if loop.life is not Life.RUNNING:
            if loop.life is Life.FROZEN:
                loop.held.append(step)
            else:
                step.orphaned()
            return
        if loop is not self._running:
            self._running = loop
            asyncio._set_running_loop(loop)
        self.steps += 1
        self._at_once += 1
        if self._at_once > _STEPS_AT_ONCE_MAX:
            raise LivelockError(f"{loop.name} at {self.now_ns / SECOND_NS:.3f} s: {step!r}")
        step.run()


class SimulatedLoop(asyncio.BaseEventLoop):
    """The event loop of one simulated process."""

    def __init__(
        self,
        world: World,
        name: str,
        machine: "Machine | None" = None,
        offset_ns: int = 0,
        drift_ppm: int = 0,
    ) -> None:
        self.world = world
        self.name = name
        self.machine = machine
        self.life = Life.RUNNING
        self.held: list[Step] = []
        """What was due while the process was frozen."""
        self._offset_ns = offset_ns
        self._drift_ppm = drift_ppm

    def __del__(self) -> None:
        """Nothing has to be freed."""

    # Life

    def freeze(self) -> None:
        """Do nothing from now on."""
        if self.life is Life.RUNNING:
            self.life = Life.FROZEN

    def thaw(self) -> None:
        """Go on; what was due meanwhile is done now."""
        if self.life is Life.FROZEN:
            self.life = Life.RUNNING
            held, self.held = self.held, []
            for step in held:
                self.world.soon(step)

    def kill(self) -> None:
        """Do nothing any more."""
        self.life = Life.DEAD
        self.held.clear()

    def fail(self, what: str, error: BaseException | None) -> None:
        """Something went wrong that nobody expected."""
        if self.life is not Life.DEAD:
            self.world.failures.append(f"{self.name}: {what}: {error!r}")
            _logger.debug("%s", what, exc_info=error)

    # Time

    def clock_ns(self) -> int:
        """This process's monotonic clock."""
        now_ns = self.world.now_ns
        return self._offset_ns + now_ns + now_ns * self._drift_ppm // _MILLION

    def local_ns(self, true_ns: int) -> int:
        """What this process's clock shows at a true time."""
        return self._offset_ns + true_ns + true_ns * self._drift_ppm // _MILLION

    def time(self) -> float:
        return self.clock_ns() / SECOND_NS

    def true_ns(self, local_ns: int) -> int:
        """How long something takes that takes `local_ns` on this process's clock.

        Rounded up, and a bit: who is called at a time must find its clock there, not just before it.
        """
        return 2 - (-local_ns * _MILLION // (_MILLION + self._drift_ppm))

    # Scheduling

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        step = Step(self, callback, args, context)
        self.world._ready.append(step)
        return step

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        world = self.world
        due_ns = world.now_ns + self.true_ns(int(delay * SECOND_NS)) if delay > 0 else world.now_ns
        step = Step(self, callback, args, context, due_ns)
        world.at(due_ns, step)
        return step

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        if self.life is Life.DEAD:
            coro.close()
            raise RuntimeError(f"{self.name} is dead")
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """There are no threads: the work is done as a step of its own."""

        async def work() -> Any:
            return func(*args)

        return self.create_task(work())

    # Network

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        assert self.machine is not None and not options.get("ssl"), "links are not encrypted here"
        return await self.machine.network.connect(self, protocol_factory, str(host), int(port))

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        assert self.machine is not None and not options.get("ssl"), "links are not encrypted here"
        return self.machine.network.listen(self, protocol_factory, int(port))

    # What asyncio asks besides

    async def create_datagram_endpoint(self, *arguments: Any, **options: Any) -> Any:
        """There is no UDP in this world: nodes do without datagrams."""
        raise NotImplementedError("the simulated network carries connections only")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.life is Life.DEAD

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        message = context.get("message", "")
        if "was destroyed but it is pending" not in message:
            self.fail(message, context.get("exception"))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: cancelled steps are skipped when they are due."""
