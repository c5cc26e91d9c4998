"""`isthmus doctor --config FILE`: what of a broker's configuration is secured, and what is not."""

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cryptography import x509

from isthmus.commands.findings import Finding, Level
from overlay.messages import Role
from runtime.access import AccessRules
from runtime.config import BrokerConfig, EdgeConfig, RouterConfig, is_loopback, listen_address, load_config
from runtime.errors import ConfigurationError
from runtime.tls import CertificateName, Tls
from runtime.tokens import Tokens

_EXPIRES_SOON_DAYS: Final = 30


def check_security(file: Path) -> list[Finding]:
    """Findings for each broker the file configures."""
    findings: list[Finding] = []
    kinds: dict[Role, type[BrokerConfig]] = {Role.EDGE: EdgeConfig, Role.ROUTER: RouterConfig}
    sections = _sections(file)
    for role, kind in kinds.items():
        if role in sections:
            try:
                config = load_config(kind, role, file)
            except ConfigurationError as error:
                findings.append(Finding(f"{role}: configuration", Level.PROBLEM, str(error)))
                continue
            findings += _broker(role, config)
    return findings or [
        Finding(
            "configuration", Level.WARNING, f"{file} has no section edge or router", "name a broker's file"
        )
    ]


def _sections(file: Path) -> set[str]:
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    words = {line.strip().strip("[]:") for line in text.splitlines()}
    return words & {Role.EDGE, Role.ROUTER}


def _broker(role: Role, config: BrokerConfig) -> Iterator[Finding]:
    yield _links(role, config)
    if isinstance(config, EdgeConfig):
        yield _clients(config)
    yield _operators(role, config)
    yield _zookeeper(role, config)


def _links(role: Role, config: BrokerConfig) -> Finding:
    check = f"{role}: links"
    host, _ = listen_address("listen", config.listen)
    if not config.certificates:
        if is_loopback(host):
            return Finding(check, Level.OK, f"not encrypted; {host} can be reached from this host only")
        return Finding(
            check,
            Level.WARNING,
            f"not encrypted, and {host} can be reached from other hosts: whoever reaches it may be a broker",
            "give certificates: isthmus certs init FOLDER",
        )
    if not config.id:
        return Finding(check, Level.PROBLEM, "no id is set, so no certificate can be chosen", "set id")
    folder, name = Path(config.certificates), CertificateName(role, config.id)
    try:
        Tls.of_broker(folder, role, config.id)
        certificate = x509.load_pem_x509_certificate((folder / f"{name.file_name}.pem").read_bytes())
    except (ConfigurationError, ValueError) as error:
        return Finding(check, Level.PROBLEM, str(error), f"isthmus certs broker {folder} {role} {config.id}")
    days = (certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)).total_seconds() / 86_400
    found = f"TLS 1.3 as {name}, certificate valid for {days:.0f} days"
    if days <= _EXPIRES_SOON_DAYS:
        level = Level.PROBLEM if days <= 0 else Level.WARNING
        return Finding(check, level, found, f"isthmus certs broker FOLDER {role} {config.id}, then restart")
    if (folder / f"{name.file_name}.key").stat().st_mode & 0o077:
        return Finding(check, Level.WARNING, f"{found}, but others can read its key", "chmod 600 *.key")
    if (folder / "authority.key").exists():
        remedy = "keep authority.key where certificates are made, not at brokers"
        return Finding(check, Level.WARNING, f"{found}; the authority's key lies beside it", remedy)
    return Finding(check, Level.OK, found)


def _clients(config: EdgeConfig) -> Finding:
    check = "edge: clients"
    if not config.access:
        return Finding(
            check,
            Level.WARNING if not is_loopback(listen_address("listen", config.listen)[0]) else Level.OK,
            "whoever can connect may publish, subscribe and change every topic",
            "give certificates and a file of rules: docs/security.md",
        )
    try:
        rules = AccessRules.load(Path(config.access))
        tokens = Tokens.load(Path(config.tokens)).records if config.tokens else ()
    except ConfigurationError as error:
        return Finding(check, Level.PROBLEM, str(error))
    valid = sum(not token.revoked for token in tokens)
    found = f"{len(rules)} rules, everything else is denied; certificates" + (
        f" or one of {valid} tokens" if config.tokens else " only"
    )
    return Finding(check, Level.OK if len(rules) else Level.WARNING, found, "" if len(rules) else "add rules")


def _operators(role: Role, config: BrokerConfig) -> Finding:
    check = f"{role}: HTTP"
    host, _ = listen_address("http", config.http)
    if is_loopback(host):
        return Finding(check, Level.OK, "plain; it can be reached from this host only")
    if config.certificates:
        return Finding(check, Level.OK, "HTTPS, for holders of a certificate")
    return Finding(
        check, Level.WARNING, f"plain, and {host} can be reached from other hosts", "use 127.0.0.1"
    )


def _zookeeper(role: Role, config: BrokerConfig) -> Finding:
    check = f"{role}: ZooKeeper"
    local = all(is_loopback(host.rpartition(":")[0]) for host in config.zookeeper.split(","))
    encrypted = "encrypted" if config.zookeeper_tls else "not encrypted"
    closed = (
        "znodes for its credentials alone" if config.zookeeper_credentials else "znodes open to everybody"
    )
    missing = [
        name
        for name, given in (
            ("zookeeper_credentials", bool(config.zookeeper_credentials)),
            ("zookeeper_tls", config.zookeeper_tls),
        )
        if not given
    ]
    level = Level.OK if local or not missing else Level.WARNING
    remedy = f"set {' and '.join(missing)}" if missing and not local else ""
    return Finding(check, level, f"{encrypted}, {closed}{', on this host' if local else ''}", remedy)
