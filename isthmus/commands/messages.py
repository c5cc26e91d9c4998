"""`isthmus pub` and `isthmus sub`: the overlay in a shell pipe."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from clients import (
    Client,
    Gap,
    MissedPeriod,
    ReceivedMessage,
    SlowMessage,
    Subscription,
    SubscriptionQos,
    TopicQos,
)
from isthmus.commands.qos import parse_qos
from isthmus.errors import explain_errors, run_async
from overlay.discovery import DISCOVERY_GROUP, DISCOVERY_PORT

Command = TypeVar("Command", bound=Callable[..., Any])


def _client_options(command: Command) -> Command:
    for option in reversed(
        (
            click.option(
                "--edge",
                "edges",
                multiple=True,
                metavar="HOST:PORT",
                envvar="ISTHMUS_EDGE",
                help="An edge broker; repeat for more. Without it one is found by multicast.",
            ),
            click.option("--lan", default="", help="Only edge brokers of this LAN."),
            click.option("--discovery-group", default=DISCOVERY_GROUP, show_default=True),
            click.option("--discovery-port", default=DISCOVERY_PORT, show_default=True),
            click.option("--interface", default="0.0.0.0", help="Address of the interface to discover on."),
            click.option("--connect-timeout-s", default=5.0, show_default=True),
            click.option(
                "--certificates",
                metavar="FOLDER",
                envvar="ISTHMUS_CERTIFICATES",
                help="Encrypt, trusting authority.pem in here.",
            ),
            click.option(
                "--principal",
                default="",
                envvar="ISTHMUS_PRINCIPAL",
                help="Prove who we are with this client's certificate in the folder.",
            ),
            click.option(
                "--token-file",
                type=click.Path(path_type=Path, dir_okay=False),
                help="Prove who we are with the token in this file, or in ISTHMUS_TOKEN.",
            ),
        )
    ):
        command = option(command)
    return command


def _client(options: dict[str, Any]) -> Client:
    return Client(
        options["edges"],
        lan=options["lan"],
        group=options["discovery_group"],
        port=options["discovery_port"],
        interface=options["interface"],
        certificates=options["certificates"],
        principal=options["principal"],
        token=_token(options["token_file"]),
    )


def _token(file: Path | None) -> str:
    """Not from the command line, which everybody on this host can read."""
    if file is None:
        return os.environ.get("ISTHMUS_TOKEN", "")
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise click.ClickException(f"{file}: the token cannot be read: {error}") from error


@click.command(name="pub")
@click.argument("topic")
@click.argument("messages", nargs=-1)
@_client_options
@click.option("--qos", "qos_items", multiple=True, metavar="NAME=VALUE", help="For a new topic; repeat.")
@click.option("--wait-for-subscribers", type=int, default=0, metavar="N", help="Wait for N before sending.")
@click.option("--repeat", type=click.IntRange(1), default=1, help="Send the arguments this many times.")
@click.option("--rate", type=float, help="At most this many messages a second.")
@click.option("--flush-timeout-s", default=10.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON on standard error.")
@explain_errors
@run_async
async def publish(
    topic: str,
    messages: tuple[str, ...],
    qos_items: tuple[str, ...],
    wait_for_subscribers: int,
    repeat: int,
    rate: float | None,
    flush_timeout_s: float,
    as_json: bool,
    connect_timeout_s: float,
    **options: Any,
) -> None:
    """Publish MESSAGES, or each line of standard input, on TOPIC."""
    qos = TopicQos.from_record(parse_qos(qos_items)) if qos_items else None
    client = _client(options)
    await client.start(connect_timeout_s)
    try:
        publisher = await client.publisher(topic, qos)
        if wait_for_subscribers:
            await publisher.wait_for_subscribers(wait_for_subscribers)
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        async for payload in _payloads(messages, repeat):
            await publisher.publish(payload)
            if rate:
                next_s += 1 / rate
                await asyncio.sleep(max(0.0, next_s - loop.time()))
        try:
            await client.flush(flush_timeout_s)
        except TimeoutError:
            raise click.ClickException(
                f"the edge broker has not acknowledged everything within {flush_timeout_s:g} s: "
                "messages may be lost"
            ) from None
        if as_json:
            click.echo(
                json.dumps({"topic": topic, "sent": publisher.sequence, "edge": client.edge}), err=True
            )
    finally:
        await client.close()


async def _payloads(messages: tuple[str, ...], repeat: int) -> AsyncIterator[bytes]:
    if messages:
        for _ in range(repeat):
            for message in messages:
                yield message.encode()
        return
    # Standard input may be a pipe, a file or a terminal: a thread reads any of them.
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        yield line.rstrip(b"\r\n")


_EVENT_NAMES: Final = {SlowMessage: "slow", Gap: "gap", MissedPeriod: "missed_period"}


@dataclass(frozen=True, slots=True)
class _Style:
    """How messages are printed."""

    as_json: bool
    topic_names: bool
    ages: bool


@click.command(name="sub")
@click.argument("topics", nargs=-1, required=True)
@_client_options
@click.option("--deadline-ms", type=float, help="Ask for messages within this time from the publisher.")
@click.option("--loss-tolerance", type=int, help="Ask for no more consecutive losses than this.")
@click.option("--count", type=click.IntRange(1), help="Exit after this many messages.")
@click.option("--timeout-s", type=float, help="Exit with status 1 if no message comes for this long.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per message.")
@click.option("--topic-names", is_flag=True, help="Print the topic before each message.")
@click.option("--limit-ms", type=float, help="Slow is what may be older; the topic's deadline without it.")
@click.option(
    "--ages/--no-ages",
    default=None,
    help="Print before each message how old it is at most, and whether it is slow. Without either, "
    "ages are printed to a terminal and not into a pipe.",
)
@click.option(
    "--events", is_flag=True, help="Tell on standard error of slow and missing messages and of silence."
)
@explain_errors
@run_async
async def subscribe(
    topics: tuple[str, ...],
    deadline_ms: float | None,
    loss_tolerance: int | None,
    count: int | None,
    timeout_s: float | None,
    as_json: bool,
    topic_names: bool,
    limit_ms: float | None,
    ages: bool | None,
    events: bool,
    connect_timeout_s: float,
    **options: Any,
) -> None:
    """Print each message of TOPICS as a line, until Ctrl-C or --count."""
    request = SubscriptionQos(deadline_ms, loss_tolerance)
    style = _Style(as_json, topic_names, sys.stdout.isatty() if ages is None else ages)
    client = _client(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await client.start(connect_timeout_s)
    arrived: asyncio.Queue[ReceivedMessage] = asyncio.Queue(maxsize=1024)
    subscriptions = await _subscribe(client, topics, request, limit_ms, events)
    pumps = [asyncio.create_task(_pump(subscription, arrived)) for subscription in subscriptions]
    pumps += [asyncio.create_task(_tell(item, as_json)) for item in subscriptions if events]
    stopped = asyncio.create_task(stop.wait())
    try:
        seen = 0
        while count is None or seen < count:
            getting = asyncio.create_task(arrived.get())
            done, _ = await asyncio.wait(
                {getting, stopped, *pumps}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if getting not in done:
                getting.cancel()
                for pump in done & set(pumps):
                    pump.result()
                if stopped in done:
                    break
                raise click.ClickException(f"no message within {timeout_s:g} s")
            _print(getting.result(), style)
            seen += 1
    except BrokenPipeError:
        # The reader of our pipe is gone (`isthmus sub … | head`): that is a normal end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        for task in (*pumps, stopped):
            task.cancel()
        await client.close()


async def _subscribe(
    client: Client,
    topics: tuple[str, ...],
    request: SubscriptionQos,
    limit_ms: float | None,
    aware: bool,
) -> list[Subscription]:
    try:
        return [
            await client.subscribe(topic, request=request, limit_ms=limit_ms, aware=aware)
            for topic in dict.fromkeys(topics)
        ]
    except BaseException:
        await client.close()
        raise


async def _pump(subscription: Subscription, arrived: "asyncio.Queue[ReceivedMessage]") -> None:
    async for message in subscription:
        await arrived.put(message)


async def _tell(subscription: Subscription, as_json: bool) -> None:
    """Tell of what is slow or missing, where it does not get in the way of messages."""
    async for event in subscription.events():
        record = {"event": _EVENT_NAMES[type(event)], **asdict(event)}
        record["publisher"] = f"{event.publisher:016x}"
        if as_json:
            click.echo(json.dumps(record), err=True)
        else:
            numbers = (f"{value:.1f}" if isinstance(value, float) else value for value in record.values())
            click.echo(
                " ".join(f"{name}={number}" for name, number in zip(record, numbers, strict=True)), err=True
            )


def _print(message: ReceivedMessage, style: _Style) -> None:
    if style.as_json:
        record: dict[str, Any] = {
            "topic": message.topic,
            "publisher": f"{message.publisher:016x}",
            "sequence": message.sequence,
            "age_bound_ms": message.age_bound_ms,
            "limit_ms": message.limit_ms,
            "slow": message.slow,
            "fast": message.fast,
        }
        with contextlib.suppress(UnicodeDecodeError):
            record["payload"] = message.payload.decode()
        if "payload" not in record:
            record["payload_base64"] = base64.b64encode(message.payload).decode()
        line = json.dumps(record).encode()
    else:
        line = (message.topic.encode() + b" " if style.topic_names else b"") + message.payload
        if style.ages:
            line = _age(message).encode() + line
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _age(message: ReceivedMessage) -> str:
    """How old a message is at most, in a column of its own."""
    if message.age_bound_ms is None:
        return "age unknown      "
    return f"{message.age_bound_ms:8.1f} ms {'SLOW' if message.slow else '':4}  "
