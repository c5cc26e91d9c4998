"""`isthmus router`: a routing broker as this process."""

from pathlib import Path
from typing import Any

import click

from isthmus.commands.brokers import broker_options, configure, say_started
from isthmus.errors import explain_errors, run_async
from routing_broker import RoutingBroker
from routing_broker.mode import Mode
from runtime.config import RouterConfig
from runtime.process import serve


@click.command()
@broker_options
@click.option("--host-label", help="Host this broker counts as when backups are spread over hosts.")
@click.option("--policy", help="How the leader shares out topics: fewest-topics or message-rate.")
@click.option(
    "--mode", type=click.Choice([mode.value for mode in Mode]), help="Order of dispatch and replication."
)
@click.option("--capacity", type=float, help="Share of the load, relative to other routing brokers.")
@explain_errors
@run_async
async def router(file: Path | None, as_json: bool, **flags: Any) -> None:
    """Run a routing broker. SIGTERM moves its topics away first, a second one ends it at once."""
    broker = RoutingBroker(configure(RouterConfig, "router", file, flags))
    await serve(broker, started=lambda: say_started(as_json, broker.id, broker.locator, broker.http))
