"""What commands share that look at a running overlay: options, and reading ZooKeeper without changing it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator import CoordinationError, Coordinator, Session, Watch

Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")

CONNECT_TIMEOUT_S = 5.0
PLAIN_WIDTH = 160


class NoOverlayError(CoordinationError):
    """ZooKeeper is there, the overlay is not."""


def quiet_logs() -> None:
    """Let errors through and nothing else: what cannot be reached is reported in the answer."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")


def zookeeper_options(command: Command) -> Command:
    """Which overlay to look at; the same environment variables as for brokers."""
    for option in (
        click.option(
            "--chroot",
            default="/isthmus",
            show_default=True,
            envvar="ISTHMUS_CHROOT",
            metavar="PATH",
            help="Where in ZooKeeper the overlay lives.",
        ),
        click.option(
            "--zookeeper",
            default="127.0.0.1:2181",
            show_default=True,
            envvar="ISTHMUS_ZOOKEEPER",
            metavar="HOST:PORT,...",
            help="The ZooKeeper ensemble.",
        ),
    ):
        command = option(command)
    return command


@asynccontextmanager
async def open_cluster(zookeeper: str, chroot: str) -> AsyncIterator[Coordinator]:
    """Access to an overlay that exists. Raises NoOverlayError rather than make an empty one."""
    await _check_there(zookeeper, chroot)
    session = Session(zookeeper, chroot)
    await session.start(CONNECT_TIMEOUT_S)
    try:
        coordinator = Coordinator(session, operation_timeout_s=CONNECT_TIMEOUT_S)
        await coordinator.start()
        try:
            yield coordinator
        finally:
            await coordinator.close()
    finally:
        await session.close()


async def _check_there(zookeeper: str, chroot: str) -> None:
    # A session below a chroot creates the chroot; looking must leave no traces, so look from the root.
    session = Session(zookeeper, "/")
    await session.start(CONNECT_TIMEOUT_S)
    try:
        there = await session.exists(f"/{chroot.strip('/')}/cluster".replace("//", "/"))
    finally:
        await session.close()
    if there is None:
        raise NoOverlayError(
            f"there is no overlay at {chroot} in ZooKeeper {zookeeper}: "
            "start a broker first, or say --chroot and --zookeeper"
        )


async def read_once(watch: Callable[[Callable[[Value], None]], Watch]) -> Value:
    """The first value that a watch of the coordinator calls back with."""
    found: asyncio.Future[Value] = asyncio.get_running_loop().create_future()

    def deliver(value: Value) -> None:
        if not found.done():
            found.set_result(value)

    watching = watch(deliver)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await found
    except TimeoutError:
        raise CoordinationError(
            f"ZooKeeper did not answer within {CONNECT_TIMEOUT_S:g} s: check that it is not overloaded"
        ) from None
    finally:
        watching.cancel()


def open_console() -> Console:
    """Where tables are printed; a file or pipe has no width of its own, so it gets a comfortable one."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def open_table(title: str, columns: Sequence[str]) -> Table:
    """A table with these columns."""
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row. Names may hold any text, also what rich would take for markup."""
    table.add_row(*(Text(cell) for cell in cells))
