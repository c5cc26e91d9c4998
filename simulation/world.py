"""The event loop of a simulated process: asyncio's interface on the world's schedule.

All code of a process runs on its loop, as it would on asyncio's; time is that of the process's own clock.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any

from simulation.schedule import Actor, Life, World

if TYPE_CHECKING:
    from simulation.network import Machine


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
        self.actor = Actor(world, name, self, offset_ns, drift_ppm)
        self.clock_ns = self.actor.clock_ns
        """This process's monotonic clock."""
        # Called all the time, hence without a detour: steps are handles as far as asyncio's code can tell.
        self.time = self.actor.time  # type: ignore[method-assign]
        self.get_debug = self.actor.get_debug  # type: ignore[method-assign]
        self.call_soon = self.actor.soon  # type: ignore[method-assign, assignment]
        self.call_soon_threadsafe = self.actor.soon  # type: ignore[method-assign, assignment]
        self.call_later = self.actor.later  # type: ignore[method-assign, assignment]
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]

    def __del__(self) -> None:
        """Nothing has to be freed."""

    @property
    def life(self) -> Life:
        """Whether the process does anything."""
        return self.actor.life

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.actor.later(when - self.time(), callback, *args, context=context)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        if self.actor.life is Life.DEAD:
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

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.actor.life is Life.DEAD

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        message = context.get("message", "")
        if "was destroyed but it is pending" not in message:
            self.actor.fail(message, context.get("exception"))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: cancelled steps are skipped when they are due."""
