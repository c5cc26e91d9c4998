"""What commands share that look at a running overlay: options, and reading ZooKeeper without changing it."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator import CoordinationError, Coordinator, Session, Watch, ZooKeeperSecurity
from overlay.messages import Role
from runtime.tls import CertificateName, Tls

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
            "--zookeeper-credentials",
            type=click.Path(path_type=Path, dir_okay=False),
            envvar="ISTHMUS_ZOOKEEPER_CREDENTIALS",
            expose_value=False,
            callback=_remember,
            metavar="FILE",
            help="File with user:password for ZooKeeper.",
        ),
        click.option(
            "--zookeeper-tls",
            is_flag=True,
            envvar="ISTHMUS_ZOOKEEPER_TLS",
            expose_value=False,
            callback=_remember,
            help="Encrypt towards ZooKeeper.",
        ),
        click.option(
            "--certificates",
            type=click.Path(path_type=Path, file_okay=False),
            envvar="ISTHMUS_CERTIFICATES",
            expose_value=False,
            callback=_remember,
            metavar="FOLDER",
            help="Certificates for ZooKeeper and for brokers' HTTPS.",
        ),
        click.option(
            "--principal",
            envvar="ISTHMUS_PRINCIPAL",
            default="",
            expose_value=False,
            callback=_remember,
            help="Whose certificate in the folder is used.",
        ),
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


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keep what only `open_cluster` needs out of the signatures of all commands."""
    context.meta[f"{__name__}.{parameter.name}"] = value


def _given(name: str) -> Any:
    context = click.get_current_context(silent=True)
    return context.meta.get(f"{__name__}.{name}") if context is not None else None


def _security() -> ZooKeeperSecurity:
    principal = _given("principal")
    return ZooKeeperSecurity.load(
        _given("zookeeper_credentials"),
        _given("certificates") if _given("zookeeper_tls") else None,
        CertificateName(Role.CLIENT, principal) if principal else None,
    )


def https() -> ssl.SSLContext | None:
    """How to ask brokers that serve HTTPS; None without certificates."""
    folder = _given("certificates")
    return Tls.of_client(folder, _given("principal") or "").dialling if folder else None


@asynccontextmanager
async def open_cluster(zookeeper: str, chroot: str) -> AsyncIterator[Coordinator]:
    """Access to an overlay that exists. Raises NoOverlayError rather than make an empty one."""
    security = _security()
    await _check_there(zookeeper, chroot, security)
    session = Session(zookeeper, chroot, make_client=security.make_client)
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


async def _check_there(zookeeper: str, chroot: str, security: ZooKeeperSecurity) -> None:
    # A session below a chroot creates the chroot; looking must leave no traces, so look from the root.
    session = Session(zookeeper, "/", make_client=security.make_client)
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
