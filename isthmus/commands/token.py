"""`isthmus token`: tokens of clients that have no certificate, in the file edge brokers read."""

import json
from pathlib import Path

import click

from isthmus.commands.cluster import add_row, open_console, open_table
from isthmus.errors import explain_errors
from runtime.tokens import Tokens

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
_json = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


@click.group()
def token() -> None:
    """Make, list and revoke tokens in FILE, which edge brokers are given with --tokens.

    Edge brokers read the file again within a second of a change.
    """


@token.command()
@_file
@click.argument("principal")
@_json
@explain_errors
def add(file: Path, principal: str, as_json: bool) -> None:
    """Make a token for PRINCIPAL and print it. It is shown this once; the file keeps a hash."""
    text = Tokens.change(file, lambda tokens: tokens.add(principal))
    click.echo(json.dumps({"token": text, "principal": principal}) if as_json else text)


@token.command(name="list")
@_file
@_json
@explain_errors
def list_tokens(file: Path, as_json: bool) -> None:
    """List tokens by id, with whose they are."""
    records = Tokens.load(file).records
    if as_json:
        shown = [
            {"id": each.id, "principal": each.principal, "created": each.created, "revoked": each.revoked}
            for each in records
        ]
        click.echo(json.dumps({"tokens": shown}, indent=2))
        return
    table = open_table("", ("token", "principal", "created", "revoked"))
    for each in records:
        add_row(table, each.id, each.principal, each.created, each.revoked or "no")
    open_console().print(table)


@token.command()
@_file
@click.argument("token_id")
@_json
@explain_errors
def revoke(file: Path, token_id: str, as_json: bool) -> None:
    """Let a token not count any more, by its id or the token itself; who uses it is disconnected."""
    token_id = token_id.partition(".")[0]
    Tokens.load(file)  # says so if there is no such file
    Tokens.change(file, lambda tokens: (tokens.revoke(token_id), None))
    click.echo(json.dumps({"revoked": token_id}) if as_json else f"token {token_id} is revoked")
