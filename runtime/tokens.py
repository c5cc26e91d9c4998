"""Tokens: how a client without a certificate proves who it is.

A token is `<id>.<secret>`, both drawn at random here and shown once. The file keeps the secret only as a
salted hash. A slow hash, as passwords need, would guard nothing: 256 random bits cannot be guessed. It
would let anybody who knows an id keep a broker busy with wrong secrets, and a broker has heartbeats to send.
"""

import datetime as dt
import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final, TypeVar

from overlay.errors import InvalidNameError, show
from overlay.names import check_name
from runtime.errors import ConfigurationError

_SECRET_BYTES: Final = 32
TOKEN_MAX_CHARACTERS: Final = 128
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What is kept of a token."""

    id: str
    principal: str
    salt: str
    hash: str
    created: str
    revoked: str = ""
    """When it ceased to count; empty while it counts."""


class Tokens:
    """The tokens of a file."""

    def __init__(self, records: tuple[TokenRecord, ...] = ()) -> None:
        self.records = records
        self._by_id = {record.id: record for record in records}

    @classmethod
    def load(cls, path: Path) -> "Tokens":
        """Read a file; raises ConfigurationError if it is not one of ours."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}: not JSON: {error}") from error
        items = content.get("tokens") if isinstance(content, dict) else None
        if not isinstance(items, list):
            raise ConfigurationError(f"{path}: expected an object with a list `tokens`")
        return cls(tuple(_record(path, item) for item in items))

    @classmethod
    def change(cls, path: Path, change: "Callable[[Tokens], tuple[Tokens, Result]]") -> "Result":
        """Change the tokens of a file, one process at a time: none undoes what another one did meanwhile."""
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed
            tokens, result = change(cls.load(path) if path.exists() else cls())
            tokens.save(path)
        return result

    def save(self, path: Path) -> None:
        """Replace the file at once, so that no broker reads half of it."""
        draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        text = json.dumps({"tokens": [asdict(record) for record in self.records]}, indent=2) + "\n"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        draft.replace(path)

    def add(self, principal: str) -> tuple["Tokens", str]:
        """A new token for a principal; returns the tokens with it and the token itself."""
        try:
            check_name("principal", principal)
        except InvalidNameError as error:
            raise ConfigurationError(str(error)) from error
        token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(_SECRET_BYTES)
        salt = secrets.token_hex(16)
        record = TokenRecord(token_id, principal, salt, _hash(salt, secret), _now())
        return Tokens((*self.records, record)), f"{token_id}.{secret}"

    def revoke(self, token_id: str) -> "Tokens":
        """Without this token; raises ConfigurationError if there is none."""
        if token_id not in self._by_id:
            raise ConfigurationError(f"there is no token {token_id!r}: `isthmus token list` shows all")
        return Tokens(
            tuple(
                replace(record, revoked=record.revoked or _now()) if record.id == token_id else record
                for record in self.records
            )
        )

    def check(self, token: str) -> TokenRecord | None:
        """Whose token this is; None if it is none of ours or has been revoked."""
        token_id, _, secret = token[:TOKEN_MAX_CHARACTERS].partition(".")
        record = self._by_id.get(token_id)
        if record is None or not hmac.compare_digest(record.hash, _hash(record.salt, secret)):
            return None
        return record if not record.revoked else None

    def counts(self, token_id: str) -> bool:
        """Whether a token that was checked before still counts."""
        record = self._by_id.get(token_id)
        return record is not None and not record.revoked


def _hash(salt: str, secret: str) -> str:
    data = f"{salt}.{secret}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=32, person=b"isthmus token").hexdigest()


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _record(path: Path, item: object) -> TokenRecord:
    names = {field.name for field in fields(TokenRecord)}
    if (
        not isinstance(item, dict)
        or not item.keys() <= names
        or not names - {"revoked"} <= item.keys()
        or not all(isinstance(value, str) for value in item.values())
        or not item["hash"].isascii()
    ):
        raise ConfigurationError(
            f"{path}: {show(item)} is no token: expected texts {', '.join(sorted(names))}"
        )
    return TokenRecord(**item)
