"""`isthmus up`: a whole topology on this machine, and a live view of who is where."""

import asyncio
import json
import signal
import time
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.errors import CoordinationError
from runtime.tracing import TraceSettings
from topology.driver import Driver, DriverSettings, running
from topology.errors import TopologyError
from topology.load_runner import LoadRunner
from topology.model import Topology, load_topology
from topology.process_driver import ProcessDriver
from topology.snapshot import BrokerView, Snapshot, TopicView, take_snapshot

_LIVE_EVERY_S = 1.0
_PLAIN_EVERY_S = 5.0
_PLAIN_WIDTH = 120


@click.command()
@click.argument("topology", default="two-lans")
@click.option("--no-clients", is_flag=True, help="Start no publishers and subscribers.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Stop after this long.")
@click.option("--every", "every_s", type=click.FloatRange(0.2, 3600), help="Seconds between two views.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per view, on a line of its own.")
@click.option("--keep", is_flag=True, help="Keep the logs.")
@click.option(
    "--trace-dir", type=click.Path(path_type=Path, file_okay=False), help="Write traces of messages here."
)
@click.option("--trace-sample", type=click.FloatRange(0, 1), default=1.0, show_default=True)
def up(
    topology: str,
    no_clients: bool,
    seconds: float | None,
    every_s: float | None,
    as_json: bool,
    keep: bool,
    trace_dir: Path | None,
    trace_sample: float,
) -> None:
    """Run TOPOLOGY: ZooKeeper, brokers, publishers and subscribers, until Ctrl-C.

    TOPOLOGY is a YAML file or the name of one that comes with Isthmus, see `isthmus topology list`.
    """
    console = open_console(stderr=as_json)
    try:
        described = load_topology(topology)
        view = _View(console, described, as_json, every_s)
        trace = None if trace_dir is None else TraceSettings(trace_dir.absolute(), trace_sample)
        asyncio.run(
            _run(described, view, with_clients=not no_clients, seconds=seconds, keep=keep, trace=trace)
        )
    except (TopologyError, CoordinationError) as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped, nothing is left running")


def open_console(*, stderr: bool = False) -> Console:
    """Where people read; a file or pipe has no width of its own, so it gets a comfortable one."""
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=_PLAIN_WIDTH)


class _View:
    """Shows snapshots: a live table on a terminal, a table every few seconds elsewhere, or JSON lines."""

    def __init__(self, console: Console, topology: Topology, as_json: bool, every_s: float | None) -> None:
        self.console = console
        self._topology = topology
        self._as_json = as_json
        self.is_live = console.is_terminal and not as_json
        self.every_s = every_s or (_LIVE_EVERY_S if self.is_live or as_json else _PLAIN_EVERY_S)
        self._previous: tuple[float, Snapshot] | None = None
        self._started_s = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(
            Text(f"{time.monotonic() - self._started_s:5.1f} s  ", style="dim").append(text, style="none"),
            soft_wrap=not self.console.is_terminal,
        )

    def show(self, driver: Driver, snapshot: Snapshot, live: Live | None) -> None:
        """Show what is now; rates are since the view before."""
        now_s = time.monotonic()
        rates = self._rates(now_s, snapshot)
        self._previous = (now_s, snapshot)
        if self._as_json:
            record = snapshot.to_record()
            record["zookeeper"] = driver.zookeeper_hosts
            record["uptime_s"] = round(now_s - self._started_s, 3)
            for topic in record["topics"]:
                topic["published_per_s"], topic["delivered_per_s"] = rates[topic["topic"]]
            click.echo(json.dumps(record))
        else:
            view = self._render(driver, snapshot, rates)
            if live is not None:
                live.update(view, refresh=True)
            else:
                self.console.print(view)

    def _rates(self, now_s: float, snapshot: Snapshot) -> dict[str, tuple[float, float]]:
        rates: dict[str, tuple[float, float]] = {}
        for topic in snapshot.topics:
            before = self._previous[1].topic(topic.topic) if self._previous is not None else None
            if before is None or self._previous is None:
                rates[topic.topic] = (0.0, 0.0)
                continue
            elapsed_s = now_s - self._previous[0]
            # An edge that was started again counts from zero.
            published = max(0, topic.published - before.published)
            delivered = max(0, topic.delivered - before.delivered)
            rates[topic.topic] = (round(published / elapsed_s, 1), round(delivered / elapsed_s, 1))
        return rates

    def _render(
        self, driver: Driver, snapshot: Snapshot, rates: dict[str, tuple[float, float]]
    ) -> RenderableType:
        head = Text(f"{self._topology.name}", style="bold")
        head.append(f"   up {time.monotonic() - self._started_s:.0f} s", style="not bold dim")
        head.append(f"   ZooKeeper {driver.zookeeper_hosts}", style="not bold")
        head.append("   leader ", style="not bold").append(snapshot.leader or "none", style="bold yellow")
        return Group(
            Text(),
            head,
            Text(),
            _brokers_table(snapshot),
            Text(),
            _topics_table(snapshot, rates),
            Text(),
            *_hints(driver, self._topology),
        )


async def _run(
    topology: Topology,
    view: _View,
    *,
    with_clients: bool,
    seconds: float | None,
    keep: bool,
    trace: TraceSettings | None,
) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with running(
        topology, ProcessDriver, DriverSettings(say=view.say, trace=trace), keep=keep
    ) as driver:
        if with_clients and (topology.publishers or topology.subscribers):
            load = LoadRunner(driver)
            await load.start()
            view.say(
                f"{len(topology.publishers)} publishers and {len(topology.subscribers)} subscribers connected"
            )
        view.say("everything runs; Ctrl-C stops it")
        if view.is_live:
            with Live(console=view.console, auto_refresh=False) as live:
                await _watch(driver, view, live, seconds)
        else:
            await _watch(driver, view, None, seconds)


async def _watch(driver: Driver, view: _View, live: Live | None, seconds: float | None) -> None:
    loop = asyncio.get_running_loop()
    end_s = None if seconds is None else loop.time() + seconds
    while True:
        view.show(driver, await take_snapshot(driver), live)
        dead = driver.died_unasked()
        if dead:
            raise TopologyError(f"{', '.join(dead)} ended unexpectedly: see the logs in {driver.directory}")
        if end_s is not None and loop.time() >= end_s:
            return
        await asyncio.sleep(
            view.every_s if end_s is None else min(view.every_s, max(0.0, end_s - loop.time()))
        )


def _brokers_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for name in ("broker", "where", "address", "http", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("topics", "clients"):
        table.add_column(name, justify="right")
    for broker in snapshot.brokers:
        is_router = broker.role == "router"
        table.add_row(
            broker.name,
            broker.host if is_router else f"LAN {broker.lan}",
            broker.locator,
            broker.http,
            _state(broker),
            f"{broker.topics}",
            "" if is_router else f"{broker.clients}",
        )
    return table


def _state(broker: BrokerView) -> Text:
    if not broker.alive:
        return Text("dead", style="bold red")
    if broker.leader:
        return Text(f"leader, epoch {broker.epoch}", style="bold yellow")
    return Text("ready", style="green") if broker.ready else Text("not ready", style="red")


def _topics_table(snapshot: Snapshot, rates: dict[str, tuple[float, float]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for name in ("topic", "from", "to", "primary", "backup"):
        table.add_column(name, no_wrap=True)
    for name in ("published/s", "delivered/s"):
        table.add_column(name, justify="right")
    for topic in snapshot.topics:
        published, delivered = rates[topic.topic]
        table.add_row(
            topic.topic,
            ", ".join(topic.lans_publishing) or "nobody",
            ", ".join(topic.lans_subscribing) or "nobody",
            *_routers(topic),
            f"{published:.0f}",
            f"{delivered:.0f}",
        )
    return table


def _routers(topic: TopicView) -> tuple[Text, Text]:
    # A topic wanted in one LAN has its routing brokers all the same, but sends them nothing.
    style = "none" if topic.targets else "dim"
    return Text(topic.primary or "none", style=style), Text(topic.backup or "none", style=style)


def _hints(driver: Driver, topology: Topology) -> list[Text]:
    lines = [Text("Join in from another terminal:", style="bold")]
    width = max(len(lan.name) for lan in topology.lans)
    for lan in topology.lans:
        subscribed = [item.topic for item in topology.subscribers if item.lan == lan.name]
        topic = subscribed[0] if subscribed else "hello"
        edge = driver.nodes[lan.edges[0]].locator
        lines.append(Text(f"  LAN {lan.name:<{width}}  isthmus sub {topic} --edge {edge}"))
        lines.append(Text(f"      {'':<{width}}  isthmus pub hello 'from {lan.name}' --edge {edge}"))
    return lines
