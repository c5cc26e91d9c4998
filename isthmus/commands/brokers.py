"""What `isthmus edge` and `isthmus router` share: options, configuration, the line they print."""

import dataclasses
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from runtime.config import BrokerConfig, load_config
from runtime.logs import configure_logging
from runtime.operations import to_json

Command = TypeVar("Command", bound=Callable[..., Any])
Config = TypeVar("Config", bound=BrokerConfig)


def broker_options(command: Command) -> Command:
    """Options both brokers have. Defaults come from the configuration classes, not from here."""
    for option in reversed(
        (
            click.option("--id", help="Name of the broker, unique in the cluster."),
            click.option("--listen", metavar="HOST:PORT", help="Where to accept connections; port 0 is any."),
            click.option("--advertise", metavar="HOST:PORT", help="What others dial to reach it."),
            click.option("--http", metavar="HOST:PORT", help="Where to serve health, status and metrics."),
            click.option("--zookeeper", metavar="HOST:PORT,...", help="The ZooKeeper ensemble."),
            click.option("--chroot", metavar="PATH", help="Where in ZooKeeper this overlay lives."),
            click.option(
                "--zookeeper-credentials", metavar="FILE", help="File with user:password for ZooKeeper."
            ),
            click.option(
                "--zookeeper-tls/--no-zookeeper-tls", default=None, help="Encrypt towards ZooKeeper too."
            ),
            click.option("--session-timeout-s", type=float, help="ZooKeeper session timeout."),
            click.option("--heartbeat-ms", type=float, help="Time between heartbeats to other brokers."),
            click.option("--silence-ms", type=float, help="Least silence that counts as a broker's death."),
            click.option("--failover-ms", type=float, help="Time edges may need to turn to a backup."),
            click.option("--subscriber-delay-ms", type=float, help="Least time from router to subscriber."),
            click.option("--backup-delay-ms", type=float, help="Most time from a primary to its backup."),
            click.option("--clock-drift-ppm", type=int, help="Most that this host's clock drifts."),
            click.option("--proxy", metavar="HOST:PORT", help="HTTP proxy to reach routing brokers through."),
            click.option("--drain-timeout-s", type=float, help="How long SIGTERM may take to drain."),
            click.option("--trace-dir", metavar="DIR", help="Write traces of messages here."),
            click.option("--trace-sample", type=float, help="Share of messages traced.  [default: 0.01]"),
            click.option(
                "--trace-quota-mb", type=int, help="Most that its segments take on disk.  [default: 1024]"
            ),
            click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"])),
            click.option("--log-style", type=click.Choice(["text", "json"])),
            click.option(
                "--certificates", metavar="FOLDER", help="Encrypt all links with the certificates in here."
            ),
            click.option("--connections-per-address", type=int, help="Most connections from one address."),
            click.option(
                "--insecure", is_flag=True, default=None, help="Listen beyond loopback without TLS."
            ),
            click.option(
                "--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="TOML or YAML file."
            ),
            click.option("--json", "as_json", is_flag=True, help="Print where it serves as JSON."),
        )
    ):
        command = option(command)
    return command


def configure(kind: type[Config], section: str, file: Path | None, flags: dict[str, Any]) -> Config:
    """Settings from file, environment and flags; the broker gets a name if it has none."""
    config = load_config(kind, section, file, flags)
    if not config.id:
        host = "".join(character if character.isalnum() else "-" for character in socket.gethostname())
        config = dataclasses.replace(config, id=f"{section}-{host[:40].strip('-')}-{secrets.token_hex(2)}")
    configure_logging(config.id, config.log_level, config.log_style)
    return config


def say_started(as_json: bool, name: str, locator: str, http: str) -> None:
    """Tell people and scripts where the broker serves."""
    if as_json:
        click.echo(to_json({"id": name, "locator": locator, "http": http}))
    else:
        base = http if http.startswith("https://") else f"http://{http}"
        click.echo(f"{name} serves at {locator}, status at {base}/status")
