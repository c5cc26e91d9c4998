"""`isthmus zookeeper`: the real ZooKeeper server, as a child of this process."""

import json
import signal
import threading
from pathlib import Path

import click

from coordinator.embedded import EmbeddedZooKeeper
from coordinator.member import become_member
from isthmus.errors import explain_errors


@click.command()
@click.option("--servers", type=click.Choice(["1", "3"]), default="1", help="One server or an ensemble.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to keep data and logs; a private directory that goes with the server if not given.",
)
@click.option("--port", type=int, help="Client port (of the first server); a free one if not given.")
@click.option("--ensemble", metavar="HOST,...", help="Run one server of an ensemble on these hosts.")
@click.option("--member", type=int, metavar="NUMBER", help="Which server of the ensemble; the first is 1.")
@click.option(
    "--certificates",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="ISTHMUS_CERTIFICATES",
    help="Folder with zookeeper.pem and .key: serve an encrypted port too.",
)
@click.option("--insecure", is_flag=True, help="Serve other hosts without TLS.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
@explain_errors
def zookeeper(
    servers: str,
    directory: Path | None,
    port: int | None,
    ensemble: str | None,
    member: int | None,
    certificates: Path | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Run a ZooKeeper server, or an ensemble of three, until Ctrl-C.

    All servers run on this machine, unless --ensemble and --member make this process one server of an
    ensemble on several machines. Such a server listens at the address of its host, port 2181, with
    --certificates port 2281, and logs to standard output.
    """
    if ensemble is not None or member is not None:
        _become_member(ensemble, member, directory, certificates, insecure)
    count = int(servers)
    ports = [port + index for index in range(count)] if port is not None else None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with EmbeddedZooKeeper(count, directory, client_ports=ports, certificates=certificates) as server:
        secure = server.secure_hosts if certificates is not None else ""
        if as_json:
            addresses = {"hosts": server.hosts, **({"secure_hosts": secure} if secure else {})}
            click.echo(json.dumps({**addresses, "directory": str(server.directory)}))
        else:
            encrypted = f", encrypted at {secure}" if secure else ""
            click.echo(f"ZooKeeper serves at {server.hosts}{encrypted}, data and logs in {server.directory}")
        stop.wait()


def _become_member(
    ensemble: str | None,
    member: int | None,
    directory: Path | None,
    certificates: Path | None,
    insecure: bool,
) -> None:
    if ensemble is None or member is None or directory is None:
        raise click.UsageError("a server of an ensemble needs --ensemble, --member and --directory")
    if not insecure and certificates is None:
        raise click.UsageError(
            "a server of an ensemble talks to other hosts, and links are not encrypted: "
            "give --certificates, or say --insecure if the network is trusted"
        )
    become_member(member, [host.strip() for host in ensemble.split(",")], directory, certificates)
