"""Who a client is, and what it may do: rules from a file, deny by default.

    [[rule]]
    principals = ["sensor-*"]
    publish = ["plant/*/temperature"]

    [[rule]]
    principals = ["control"]
    subscribe = ["plant/**"]
    publish = ["plant/valves/**"]
    declare = ["plant/**"]

`publish` and `subscribe` allow to use a topic, `declare` to make one and to change its quality of service.
In a pattern `*` stands for any characters but `/`, `**` for any characters at all. What no rule allows is
denied. Rules and tokens are read again when their files change; a file that cannot be read leaves
everything as it was, and is reported.
"""

import logging
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import yaml

from overlay.errors import AccessDeniedError, CloseReason, ProtocolError, show
from overlay.messages import Hello, Role
from runtime.errors import ConfigurationError
from runtime.link import Principal
from runtime.tls import CertificateName
from runtime.tokens import Tokens

log = logging.getLogger("isthmus.access")

_REMEMBERED_MAX: Final = 65_536
"""Decisions remembered; forgetting them costs time, nothing else."""
RULES_MAX: Final = 10_000
PATTERN_MAX_CHARACTERS: Final = 512


class Action(StrEnum):
    """What a principal may be allowed to do with a topic."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    DECLARE = "declare"


@dataclass(frozen=True, slots=True)
class Rule:
    """Some principals may do some things with some topics."""

    principals: re.Pattern[str]
    topics: dict[Action, re.Pattern[str]]


class AccessRules:
    """All rules of a file. No rule at all denies everything."""

    def __init__(self, rules: tuple[Rule, ...] = ()) -> None:
        self._rules = rules
        self._decided: dict[tuple[str, Action, str], bool] = {}

    def __len__(self) -> int:
        return len(self._rules)

    @classmethod
    def load(cls, path: Path) -> "AccessRules":
        """Read a TOML or YAML file; raises ConfigurationError if it holds anything but rules."""
        try:
            text = path.read_text(encoding="utf-8")
            content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigurationError(f"{path}: not TOML or YAML: {error}") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: object, source: str) -> "AccessRules":
        """Rules from the content of a file."""
        if content is None:  # an empty YAML file
            content = {}
        if not isinstance(content, dict) or not content.keys() <= {"rule"}:
            raise ConfigurationError(f"{source}: expected a list of `rule` and nothing else")
        rules = content.get("rule", [])
        if not isinstance(rules, list) or len(rules) > RULES_MAX:
            raise ConfigurationError(f"{source}: `rule` must be a list of at most {RULES_MAX} rules")
        return cls(tuple(_rule(f"{source}: rule {number}", item) for number, item in enumerate(rules, 1)))

    def allow(self, principal: str, action: Action, topic: str) -> bool:
        """Whether some rule lets the principal do this."""
        key = (principal, action, topic)
        decided = self._decided.get(key)
        if decided is None:
            if len(self._decided) >= _REMEMBERED_MAX:
                self._decided.clear()
            decided = self._decided[key] = any(
                action in rule.topics
                and rule.principals.fullmatch(principal) is not None
                and rule.topics[action].fullmatch(topic) is not None
                for rule in self._rules
            )
        return decided


@dataclass(frozen=True, slots=True)
class AccessStatistics:
    """For /status and /metrics."""

    rules: int
    tokens: int
    reloads: int
    problem: str
    """Why the files as they are now are not in force; empty if they are."""
    denied: dict[str, int]
    """What clients were not let do, by action; `connect` for strangers."""


class Access:
    """The rules and tokens an edge broker goes by."""

    def __init__(self, rules_file: Path, tokens_file: Path | None = None) -> None:
        """Raises ConfigurationError if a file cannot be used: a broker must not start without its rules."""
        self._rules_file = rules_file
        self._tokens_file = tokens_file
        self._seen = self._look()
        self._rules = AccessRules.load(rules_file)
        self._tokens = Tokens.load(tokens_file) if tokens_file is not None else Tokens()
        self._reloads = 0
        self._problem = ""
        self._denied: Counter[str] = Counter()

    def authenticate(self, hello: Hello, certificate: CertificateName | None) -> Principal:
        """Who a client is; raises ProtocolError for a stranger."""
        if certificate is not None and certificate.role is Role.CLIENT:
            return Principal(certificate.name)
        record = self._tokens.check(hello.token) if hello.token else None
        if record is None:
            self._denied["connect"] += 1
            raise ProtocolError(
                CloseReason.WRONG_IDENTITY,
                "this token is not known or has been revoked: ask for another"
                if hello.token
                else "clients must prove who they are: give a client's certificate or a token",
            )
        return Principal(record.principal, record.id)

    def counts(self, principal: Principal) -> bool:
        """Whether what a client was let in with still counts."""
        return not principal.token or self._tokens.counts(principal.token)

    def may(self, principal: Principal, action: Action, topic: str) -> bool:
        """Whether the principal may do this."""
        return self._rules.allow(principal.name, action, topic)

    def check(self, principal: Principal, action: Action, topic: str) -> None:
        """Raise AccessDeniedError unless the principal may do this."""
        if not self.may(principal, action, topic):
            raise self.denial(
                action, f"{principal.name} may not {action} {topic}: no rule of this edge broker allows it"
            )

    def denial(self, action: Action, reason: str) -> AccessDeniedError:
        """The error for something a client may not do; counts it."""
        self._denied[action] += 1
        return AccessDeniedError(reason)

    def refresh(self) -> bool:
        """Read the files again if they have changed; says whether other rules are in force now."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            rules = AccessRules.load(self._rules_file)
            tokens = Tokens.load(self._tokens_file) if self._tokens_file is not None else Tokens()
        except ConfigurationError as error:
            self._problem = str(error)
            log.error("rules of access stay as they were", extra={"error": str(error)})
            return False
        self._rules, self._tokens, self._problem = rules, tokens, ""
        self._reloads += 1
        log.info("rules of access read again", extra={"rules": len(rules), "tokens": len(tokens.records)})
        return True

    def statistics(self) -> AccessStatistics:
        """For /status and /metrics."""
        return AccessStatistics(
            rules=len(self._rules),
            tokens=sum(not record.revoked for record in self._tokens.records),
            reloads=self._reloads,
            problem=self._problem,
            denied=dict(self._denied),
        )

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._rules_file, self._tokens_file) if path is not None)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _rule(source: str, item: Any) -> Rule:
    known = {"principals", *Action}
    if not isinstance(item, dict) or not item.keys() <= known:
        raise ConfigurationError(f"{source} is {show(item)}: expected {', '.join(sorted(known))}")
    if "principals" not in item:
        raise ConfigurationError(f"{source} names no principals: whom does it allow something?")
    return Rule(
        _patterns(f"{source}: principals", item["principals"]),
        {action: _patterns(f"{source}: {action}", item[action]) for action in Action if action in item},
    )


def _patterns(source: str, value: Any) -> re.Pattern[str]:
    if not isinstance(value, list) or not all(
        isinstance(text, str) and 0 < len(text) <= PATTERN_MAX_CHARACTERS for text in value
    ):
        raise ConfigurationError(
            f"{source} is {show(value)}: expected a list of patterns of at most {PATTERN_MAX_CHARACTERS} "
            'characters, for example ["plant/**"]'
        )
    return re.compile("|".join(map(_pattern, value)) or r"(?!)", re.DOTALL)


def _pattern(text: str) -> str:
    parts: Iterable[str] = re.split(r"(\*+)", text)
    return "".join(
        ".*" if part.startswith("**") else "[^/]*" if part == "*" else re.escape(part) for part in parts
    )
