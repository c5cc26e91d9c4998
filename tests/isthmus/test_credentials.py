"""`isthmus certs` and `isthmus token`: files that brokers and clients can use."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from click.testing import CliRunner

from isthmus.main import cli
from overlay.messages import Role
from runtime.tls import Tls
from runtime.tokens import Tokens


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_certificates_of_an_authority_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    assert run("certs", "init", folder) == f"{folder}/authority.pem\n{folder}/authority.key\n"
    made = json.loads(run("certs", "broker", folder, "edge", "plant-1", "--host", "127.0.0.1", "--json"))
    assert made == {"certificate": f"{folder}/edge-plant-1.pem", "key": f"{folder}/edge-plant-1.key"}
    run("certs", "broker", folder, "router", "r1")
    run("certs", "client", folder, "alice")
    run("certs", "zookeeper", folder, "zk1.example", "10.0.0.1")
    Tls.of_broker(folder, Role.EDGE, "plant-1")
    Tls.of_broker(folder, Role.ROUTER, "r1")
    Tls.of_client(folder, "alice")
    assert (folder / "zookeeper.pem").is_file()
    assert "exists: choose another folder" in run("certs", "init", folder, status=1)
    assert "has no authority" in run("certs", "client", tmp_path / "other", "alice", status=1)


def test_tokens_are_made_listed_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = run("token", "add", file, "alice").strip()
    other = json.loads(run("token", "add", file, "bob", "--json"))["token"]
    assert Tokens.load(file).check(token) is not None
    listed = json.loads(run("token", "list", file, "--json"))["tokens"]
    assert [(each["principal"], each["revoked"]) for each in listed] == [("alice", ""), ("bob", "")]
    assert "alice" in run("token", "list", file)
    token_id = token.partition(".")[0]
    assert run("token", "revoke", file, token) == f"token {token_id} is revoked\n"
    assert Tokens.load(file).check(token) is None
    assert Tokens.load(file).check(other) is not None
    assert "there is no token 'x'" in run("token", "revoke", file, "x", status=1)
    assert "cannot be read" in run("token", "list", tmp_path / "missing", status=1)


def test_tokens_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"

    def add(number: int) -> str:
        return Tokens.change(file, lambda tokens: tokens.add(f"user-{number}"))

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(add, range(40)))
    tokens = Tokens.load(file)
    assert {record.principal for record in tokens.records} == {f"user-{number}" for number in range(40)}
    assert all(tokens.check(token) is not None for token in made)
