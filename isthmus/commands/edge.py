"""`isthmus edge`: an edge broker as this process."""

from pathlib import Path
from typing import Any

import click

from edge_broker import EdgeBroker
from isthmus.commands.brokers import broker_options, configure, say_started
from isthmus.errors import explain_errors, run_async
from overlay.paths import Policy
from runtime.config import EdgeConfig, SlowSubscriber
from runtime.process import serve


@click.command()
@broker_options
@click.option("--lan", help="Name of the LAN this edge serves.")
@click.option("--access", metavar="FILE", help="Rules of what clients may do, TOML or YAML.")
@click.option("--tokens", metavar="FILE", help="Tokens of clients that have no certificate.")
@click.option("--subscriber-pending-bytes", type=int, help="Most that may wait for one slow client.")
@click.option(
    "--slow-subscriber",
    type=click.Choice(list(SlowSubscriber)),
    help="What happens beyond that.",
)
@click.option(
    "--retain-more",
    is_flag=True,
    default=None,
    help="Keep one message more of topics where that spares replication.",
)
@click.option(
    "--paths",
    type=click.Choice([policy.value for policy in Policy]),
    help="Ways of messages with a deadline to other LANs.  [default: single]",
)
@click.option("--in-time", type=float, help="Share of them that should be in time.  [default: 0.999]")
@click.option("--discovery/--no-discovery", default=None, help="Announce this edge by multicast.")
@click.option("--discovery-group", metavar="ADDRESS", help="Multicast group of this LAN.")
@click.option("--discovery-port", type=int)
@explain_errors
@run_async
async def edge(file: Path | None, as_json: bool, **flags: Any) -> None:
    """Run an edge broker for a LAN. SIGTERM drains it, a second one ends it at once."""
    broker = EdgeBroker(configure(EdgeConfig, "edge", file, flags))
    await serve(broker, started=lambda: say_started(as_json, broker.id, broker.locator, broker.http))
