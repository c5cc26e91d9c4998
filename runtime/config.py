"""Settings of a broker: one file, overridden by the environment, overridden by flags.

A file is TOML or YAML with a section per role:

    [edge]
    id = "edge-a"
    lan = "plant"
    zookeeper = "zk1:2181,zk2:2181,zk3:2181"

The environment names a setting `ISTHMUS_<SETTING>`, for example `ISTHMUS_ZOOKEEPER`.
"""

import ipaddress
import math
import os
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from overlay.bounds import Delays
from overlay.discovery import DISCOVERY_GROUP, DISCOVERY_PORT
from overlay.errors import InvalidNameError
from overlay.limits import (
    CONNECTIONS_MAX_PER_ADDRESS,
    CONNECTIONS_MAX_PER_BROKER,
    DRIFT_MAX_PPM,
    DRIFT_PPM,
    FRAME_MAX_BYTES,
    HEARTBEAT_INTERVAL_MAX_NS,
    HEARTBEAT_INTERVAL_NS,
    HEARTBEAT_SILENCE_NS,
    MIB,
    MILLISECOND_NS,
    OUTBOX_MAX_BYTES,
    RETAINED_MAX_BYTES,
    RETAINED_MIN_BYTES,
    SUBSCRIBER_PENDING_BYTES,
)
from overlay.locator import Locator
from overlay.messages import Role
from overlay.names import check_name
from overlay.paths import IN_TIME_WANTED, Policy
from runtime.errors import ConfigurationError
from runtime.hub import Pace
from runtime.tls import Tls
from runtime.tracing import DEFAULT_SAMPLING, QUOTA_BYTES, QUOTA_MIN_BYTES, TraceSettings

_PREFIX = "ISTHMUS_"


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Settings both kinds of broker have."""

    id: str = ""
    """Name of the broker, unique in the cluster; made from the host name if empty."""
    listen: str = "127.0.0.1:0"
    """Where to accept connections; port 0 takes a free one."""
    advertise: str = ""
    """What other nodes dial to reach `listen`, if that differs (NAT, containers)."""
    http: str = "127.0.0.1:0"
    """Where /healthz, /readyz, /status and /metrics are served."""
    zookeeper: str = "127.0.0.1:2181"
    chroot: str = "/isthmus"
    zookeeper_credentials: str = ""
    """File with user:password for ZooKeeper; znodes are made for them alone."""
    zookeeper_tls: bool = False
    """Encrypt the connection to ZooKeeper, with `certificates`."""
    session_timeout_s: float = 4.0
    heartbeat_ms: float = HEARTBEAT_INTERVAL_NS / MILLISECOND_NS
    silence_ms: float = HEARTBEAT_SILENCE_NS / MILLISECOND_NS
    drain_timeout_s: float = 10.0
    proxy: str = ""
    """An HTTP proxy (host:port) to reach routing brokers through, by CONNECT."""
    failover_ms: float = HEARTBEAT_SILENCE_NS / MILLISECOND_NS
    """How long edges may take to turn to the backup: what loss tolerances are checked against."""
    subscriber_delay_ms: float = 0.0
    """Least time a message takes from a routing broker to a subscriber; spares some replication."""
    backup_delay_ms: float = 1.0
    """Most time a copy takes from a primary to its backup."""
    clock_drift_ppm: int = DRIFT_PPM
    """Most that this host's monotonic clock drifts against real time (`isthmus doctor --clock`)."""
    log_level: str = "info"
    log_style: str = "text"
    certificates: str = ""
    """Folder with authority.pem and this broker's certificate and key: all links are encrypted, and other
    brokers must prove their names. `isthmus certs` makes one."""
    insecure: bool = False
    """Accept connections from other hosts without TLS."""
    connections_per_address: int = CONNECTIONS_MAX_PER_ADDRESS
    """Most connections from one address; many clients may share the address of a NAT."""
    trace_dir: str = ""
    """Folder for traces; nothing is traced if empty."""
    trace_sample: float = DEFAULT_SAMPLING
    """Share of messages that are traced; must be the same at all nodes."""
    trace_quota_mb: int = QUOTA_BYTES // MIB
    """Most that segments of this broker may take in `trace_dir`, in MiB, and those that no broker which runs
    there has written; the oldest are deleted beyond it."""

    @property
    def pace(self) -> Pace:
        """Heartbeats between brokers."""
        return Pace(round(self.heartbeat_ms * MILLISECOND_NS), round(self.silence_ms * MILLISECOND_NS))

    @property
    def delays(self) -> Delays:
        """What FRAME's bounds assume to lie between the parties; a message's own age comes on top."""
        return Delays(
            publisher_to_primary_ns=0,
            primary_to_subscriber_ns=round(self.subscriber_delay_ms * MILLISECOND_NS),
            primary_to_backup_ns=round(self.backup_delay_ms * MILLISECOND_NS),
            failover_ns=round(self.failover_ms * MILLISECOND_NS),
        )

    @property
    def tracing(self) -> TraceSettings | None:
        """Where and how much to trace; None if nothing is traced."""
        if not self.trace_dir:
            return None
        return TraceSettings(Path(self.trace_dir), self.trace_sample, self.trace_quota_mb * MIB)

    def tls(self, role: Role) -> Tls | None:
        """The broker's certificate, once it has its name; None without encryption."""
        return Tls.of_broker(Path(self.certificates), role, self.id) if self.certificates else None

    @property
    def host(self) -> str:
        """The host this broker counts as; primary and backup go to different ones."""
        return socket.gethostname()

    def check(self) -> None:
        """Raise ConfigurationError for settings that contradict each other or the limits."""
        for name in ("listen", "http"):
            host, port = listen_address(name, getattr(self, name))
            if not (self.insecure or self.certificates or is_loopback(host)):
                raise ConfigurationError(
                    f"{name} is {host}:{port}, which other hosts can reach, and links are not encrypted: "
                    "give --certificates, listen on a loopback address, "
                    "or say --insecure if the network is trusted"
                )
        if self.zookeeper_tls and not self.certificates:
            raise ConfigurationError("zookeeper_tls is set and certificates are not: give their folder")
        if not 1 <= self.connections_per_address <= CONNECTIONS_MAX_PER_BROKER:
            raise ConfigurationError(
                f"connections_per_address is {self.connections_per_address}: "
                f"it must be from 1 to {CONNECTIONS_MAX_PER_BROKER}"
            )
        slowest_ms = HEARTBEAT_INTERVAL_MAX_NS // MILLISECOND_NS
        if not 1 <= self.heartbeat_ms <= slowest_ms or self.silence_ms < 3 * self.heartbeat_ms:
            raise ConfigurationError(
                f"heartbeat_ms is {self.heartbeat_ms:g} and silence_ms {self.silence_ms:g}: heartbeats "
                f"must be 1 to {slowest_ms} ms apart, and silence must allow three of them"
            )
        if not 1 <= self.clock_drift_ppm <= DRIFT_MAX_PPM:
            raise ConfigurationError(
                f"clock_drift_ppm is {self.clock_drift_ppm}: it must be from 1 to {DRIFT_MAX_PPM}; "
                "`isthmus doctor --clock` measures it"
            )
        if not 1 <= self.session_timeout_s <= 60:
            raise ConfigurationError(
                f"session_timeout_s is {self.session_timeout_s:g}: it must be between 1 and 60"
            )
        self._check_tracing()
        if self.log_style not in {"text", "json"}:
            raise ConfigurationError(f"log_style is {self.log_style!r}: use text or json")
        if self.log_level.lower() not in {"debug", "info", "warning", "error"}:
            raise ConfigurationError(f"log_level is {self.log_level!r}: use debug, info, warning or error")
        try:
            for locator in filter(None, (self.advertise, self.proxy)):
                Locator.parse(locator)
            if self.id:
                check_name("broker", self.id)
        except InvalidNameError as error:
            raise ConfigurationError(str(error)) from error

    def _check_tracing(self) -> None:
        if not 0 <= self.trace_sample <= 1:
            raise ConfigurationError(
                f"trace_sample is {self.trace_sample:g}: give a share of the messages between 0 and 1"
            )
        if self.trace_quota_mb < QUOTA_MIN_BYTES // MIB:
            raise ConfigurationError(
                f"trace_quota_mb is {self.trace_quota_mb}: it must be at least {QUOTA_MIN_BYTES // MIB}, "
                "or segments do not fit; trace a smaller share with trace_sample if the disk is small"
            )


class SlowSubscriber(StrEnum):
    """What an edge does with a client that takes its messages too slowly. Both are counted."""

    DROP_OLDEST = "drop-oldest"
    DISCONNECT = "disconnect"


@dataclass(frozen=True, slots=True)
class EdgeConfig(BrokerConfig):
    """Settings of an edge broker."""

    lan: str = ""
    """Name of the LAN this edge serves."""
    access: str = ""
    """File with the rules of what clients may do (runtime/access.py); all others are turned away."""
    subscriber_pending_bytes: int = SUBSCRIBER_PENDING_BYTES
    """Most that may wait for one client that takes its messages too slowly."""
    slow_subscriber: str = SlowSubscriber.DROP_OLDEST
    """What happens beyond that: drop-oldest drops what is due first, disconnect ends the connection."""
    tokens: str = ""
    """File with the tokens of clients that have no certificate; `isthmus token` keeps it."""
    paths: str = Policy.SINGLE
    """Ways that messages with a deadline take to other LANs, unless their topic says: single (by routing
    broker), both (also straight to the other edge) or adaptive."""
    in_time: float = IN_TIME_WANTED
    """Share of messages that should keep their deadline; the adaptive choice of paths goes by it."""
    retained_mb: int = RETAINED_MAX_BYTES // MIB
    """Memory for messages that are kept for sending again or wait for a routing broker."""
    retain_more: bool = False
    """Keep one message more of topics where that spares replication (FRAME+)."""
    discovery: bool = True
    discovery_group: str = DISCOVERY_GROUP
    discovery_port: int = DISCOVERY_PORT

    def check(self) -> None:
        """Raise ConfigurationError for settings that contradict each other or the limits."""
        BrokerConfig.check(self)
        if self.paths not in set(Policy):
            raise ConfigurationError(f"paths is {self.paths!r}: use one of {', '.join(Policy)}")
        if not 0.5 <= self.in_time < 1:
            raise ConfigurationError(f"in_time is {self.in_time:g}: give a share from 0.5 to below 1")
        if self.access and not self.certificates:
            raise ConfigurationError(
                "access is given and certificates are not: without them any client could call itself a broker"
            )
        if self.certificates and not self.access:
            raise ConfigurationError(
                "certificates are given and access is not: name a file with the rules of "
                "what clients may do; docs/security.md shows one"
            )
        if self.slow_subscriber not in list(SlowSubscriber):
            raise ConfigurationError(
                f"slow_subscriber is {self.slow_subscriber!r}: use {' or '.join(SlowSubscriber)}"
            )
        if not FRAME_MAX_BYTES <= self.subscriber_pending_bytes <= OUTBOX_MAX_BYTES:
            raise ConfigurationError(
                f"subscriber_pending_bytes is {self.subscriber_pending_bytes}: "
                f"it must be from {FRAME_MAX_BYTES} to {OUTBOX_MAX_BYTES}"
            )
        if self.retained_mb < RETAINED_MIN_BYTES // MIB:
            raise ConfigurationError(
                f"retained_mb is {self.retained_mb}: it must be at least {RETAINED_MIN_BYTES // MIB}"
            )
        if self.tokens and not self.access:
            raise ConfigurationError("tokens are given and access is not: without rules nobody asks for them")
        if not self.lan:
            raise ConfigurationError("lan is not set: say which LAN this edge serves, with --lan NAME")
        if not 0 < self.discovery_port < 65536:
            raise ConfigurationError(f"discovery_port is {self.discovery_port}: it must be from 1 to 65535")
        if not _is_multicast(self.discovery_group):
            raise ConfigurationError(
                f"discovery_group is {self.discovery_group!r}: give an IPv4 multicast address, "
                f"for example {DISCOVERY_GROUP}"
            )
        try:
            check_name("LAN", self.lan)
        except InvalidNameError as error:
            raise ConfigurationError(str(error)) from error


@dataclass(frozen=True, slots=True)
class RouterConfig(BrokerConfig):
    """Settings of a routing broker."""

    host_label: str = ""
    """Counts as the host for spreading primary and backup; the host name if empty."""
    policy: str = "fewest-topics"
    """How the leader shares out topics: fewest-topics or message-rate."""
    mode: str = "frame"
    """frame, frame+, fcfs or fcfs-: order of dispatch and replication."""
    capacity: float = 1.0
    """Share of the load this broker takes, relative to the others."""

    @property
    def host(self) -> str:
        """The host this broker counts as; primary and backup go to different ones."""
        return self.host_label or socket.gethostname()


Config = TypeVar("Config", bound=BrokerConfig)


def load_config(
    kind: type[Config],
    section: str,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Settings from file, environment and flags, later ones winning; checked."""
    values: dict[str, Any] = {}
    known = {field.name: _type_name(field.type) for field in fields(kind)}
    if file is not None:
        for name, value in _read_section(file, section).items():
            if name not in known:
                raise ConfigurationError(
                    f"{file}: [{section}] has unknown setting {name!r}: known are {', '.join(known)}"
                )
            values[name] = _convert(f"{file}: {section}.{name}", value, known[name])
    for name, kind_name in known.items():
        text = (os.environ if environment is None else environment).get(_PREFIX + name.upper())
        if text is not None:
            values[name] = _convert(f"environment {_PREFIX}{name.upper()}", text, kind_name)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = _convert(f"--{name.replace('_', '-')}", value, known[name])
    config = kind(**values)
    config.check()
    return config


def listen_address(name: str, text: str) -> tuple[str, int]:
    """Split `host:port`, where port 0 is allowed."""
    host, separator, port = text.rpartition(":")
    usable_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536
    if not (separator and host and usable_port):
        raise ConfigurationError(f"{name} is {text!r}: give host:port, for example 127.0.0.1:7400")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_multicast(text: str) -> bool:
    try:
        return ipaddress.IPv4Address(text).is_multicast
    except ValueError:
        return False


def _read_section(file: Path, section: str) -> Mapping[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{file}: not TOML or YAML: {error}") from error
    found = content.get(section, {}) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{file}: [{section}] must be a table of settings")
    return found


def _type_name(kind: type | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def _convert(source: str, value: Any, kind_name: str) -> Any:
    try:
        if kind_name == "bool":
            if isinstance(value, bool):
                return value
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                str(value).lower()
            ]
        if kind_name == "int":
            if isinstance(value, bool | float):
                raise TypeError
            return int(value)
        if kind_name == "float":
            if isinstance(value, bool) or not math.isfinite(number := float(value)):
                raise ValueError
            return number
    except (KeyError, OverflowError, TypeError, ValueError):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind_name]
        raise ConfigurationError(f"{source} is {value!r}: give {wanted}") from None
    if not isinstance(value, str):
        raise ConfigurationError(f"{source} is {value!r}: give text")
    return value
