"""`isthmus doctor --config`: what of a configuration is secured, in words."""

import json
from pathlib import Path

from click.testing import CliRunner

from isthmus.main import cli
from overlay.messages import Role
from runtime.certificates import make_certificate


def levels(file: Path, text: str, status: int = 0) -> dict[str, tuple[str, str]]:
    file.write_text(text)
    result = CliRunner().invoke(cli, ["doctor", "--config", str(file), "--json"])
    assert result.exit_code == status, result.output
    return {check["check"]: (check["level"], check["found"]) for check in json.loads(result.output)["checks"]}


def test_what_is_open_is_said(tmp_path: Path) -> None:
    found = levels(
        tmp_path / "edge.toml",
        '[edge]\nid = "e1"\nlan = "a"\nlisten = "0.0.0.0:7400"\nhttp = "0.0.0.0:7401"\n'
        'zookeeper = "zk1:2181"\ninsecure = true\n',
    )
    assert {check: level for check, (level, _) in found.items()} == {
        "edge: links": "warning",
        "edge: clients": "warning",
        "edge: HTTP": "warning",
        "edge: ZooKeeper": "warning",
    }
    assert "whoever can connect may publish" in found["edge: clients"][1]


def test_on_one_host_nothing_needs_to_be_secured(tmp_path: Path) -> None:
    found = levels(tmp_path / "router.toml", '[router]\nid = "r1"\n')
    assert {level for level, _ in found.values()} == {"ok"}


def test_what_is_secured_is_said(tmp_path: Path, certificates: Path) -> None:
    for name in ("authority.pem", "edge-ea.pem", "edge-ea.key"):
        (tmp_path / name).write_bytes((certificates / name).read_bytes())
    (tmp_path / "edge-ea.key").chmod(0o600)
    (tmp_path / "access.toml").write_text('[[rule]]\nprincipals = ["*"]\nsubscribe = ["**"]\n')
    text = (
        f'[edge]\nid = "ea"\nlan = "a"\nlisten = "0.0.0.0:7400"\nhttp = "0.0.0.0:7401"\n'
        f'certificates = "{tmp_path}"\naccess = "{tmp_path}/access.toml"\n'
        'zookeeper = "zk1:2281"\nzookeeper_tls = true\nzookeeper_credentials = "/etc/zookeeper"\n'
    )
    found = levels(tmp_path / "edge.toml", text)
    assert {level for level, _ in found.values()} == {"ok"}, found
    assert "TLS 1.3 as isthmus:edge/ea, certificate valid for" in found["edge: links"][1]
    assert "1 rules, everything else is denied" in found["edge: clients"][1]
    (tmp_path / "edge-ea.key").chmod(0o644)
    assert levels(tmp_path / "edge.toml", text)["edge: links"][0] == "warning"
    (tmp_path / "authority.key").write_bytes((certificates / "authority.key").read_bytes())
    make_certificate(tmp_path, Role.EDGE, "ea", days=3)
    assert levels(tmp_path / "edge.toml", text)["edge: links"][0] == "warning"
    make_certificate(tmp_path, Role.EDGE, "ea", days=-1)
    assert levels(tmp_path / "edge.toml", text, status=1)["edge: links"][0] == "problem"
    (tmp_path / "edge-ea.pem").unlink()
    assert levels(tmp_path / "edge.toml", text, status=1)["edge: links"][0] == "problem"
