"""`isthmus certs`: an authority of one's own, and certificates for brokers and clients."""

import json
from pathlib import Path

import click

from isthmus.errors import explain_errors
from overlay.messages import Role
from runtime.certificates import (
    AUTHORITY_DAYS,
    CERTIFICATE_DAYS,
    make_authority,
    make_certificate,
    make_server_certificate,
)

_folder = click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
_days = click.option("--days", type=click.FloatRange(0, min_open=True), default=CERTIFICATE_DAYS)
_json = click.option("--json", "as_json", is_flag=True, help="Print the files as JSON.")


@click.group()
def certs() -> None:
    """Make certificates for encrypted links, in a FOLDER with an authority of their own."""


@certs.command()
@_folder
@click.option("--name", default="Isthmus", show_default=True, help="For people who look at a certificate.")
@click.option("--days", type=click.FloatRange(0, min_open=True), default=AUTHORITY_DAYS, show_default=True)
@_json
@explain_errors
def init(folder: Path, name: str, days: float, as_json: bool) -> None:
    """Make the authority that signs all certificates. Keep authority.key off the brokers."""
    _say(make_authority(folder, name, days), as_json)


@certs.command()
@_folder
@click.argument("role", type=click.Choice([Role.EDGE.value, Role.ROUTER.value]))
@click.argument("name")
@click.option("--host", "hosts", multiple=True, help="Name or address its HTTPS is asked for by; repeat.")
@_days
@_json
@explain_errors
def broker(folder: Path, role: str, name: str, hosts: tuple[str, ...], days: float, as_json: bool) -> None:
    """Make the certificate of the broker with this ROLE and NAME, its --id."""
    _say(make_certificate(folder, Role(role), name, hosts, days), as_json)


@certs.command()
@_folder
@click.argument("principal")
@_days
@_json
@explain_errors
def client(folder: Path, principal: str, days: float, as_json: bool) -> None:
    """Make a certificate for clients that are this PRINCIPAL in the rules of access."""
    _say(make_certificate(folder, Role.CLIENT, principal, days=days), as_json)


@certs.command()
@_folder
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@_days
@_json
@explain_errors
def zookeeper(folder: Path, hosts: tuple[str, ...], days: float, as_json: bool) -> None:
    """Make the certificate of the ZooKeeper servers at these HOSTs, names or addresses."""
    _say(make_server_certificate(folder, hosts, days), as_json)


def _say(certificate: Path, as_json: bool) -> None:
    files = {"certificate": str(certificate), "key": str(certificate.with_suffix(".key"))}
    click.echo(json.dumps(files) if as_json else "\n".join(files.values()))
