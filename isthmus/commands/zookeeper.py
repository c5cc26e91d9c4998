"""`isthmus zookeeper`: the real ZooKeeper server, as a child of this process."""

import json
import signal
import threading
from pathlib import Path

import click

from coordinator.embedded import EmbeddedZooKeeper
from isthmus.errors import explain_errors


@click.command()
@click.option("--servers", type=click.Choice(["1", "3"]), default="1", help="One server or an ensemble.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to keep data and logs; a private directory that goes with the server if not given.",
)
@click.option("--port", type=int, help="Client port (of the first server); a free one if not given.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
@explain_errors
def zookeeper(servers: str, directory: Path | None, port: int | None, as_json: bool) -> None:
    """Run a ZooKeeper server, or an ensemble of three, until Ctrl-C."""
    count = int(servers)
    ports = [port + index for index in range(count)] if port is not None else None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with EmbeddedZooKeeper(count, directory, client_ports=ports) as server:
        if as_json:
            click.echo(json.dumps({"hosts": server.hosts, "directory": str(server.directory)}))
        else:
            click.echo(f"ZooKeeper serves at {server.hosts}, data and logs in {server.directory}")
        stop.wait()
