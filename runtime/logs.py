"""Structured logs: one line per event, as text with key=value pairs or as JSON."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

_STANDARD_FIELDS: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD_FIELDS}


def _wall_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _quoted(text: str) -> str:
    """Text that ends where it seems to end: peers choose some of it, and an event has one line."""
    return text if text.isprintable() and text and " " not in text else json.dumps(text)


class TextFormatter(logging.Formatter):
    """`time level node event key=value ...`."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback if there is one."""
        pairs = "".join(f" {name}={_quoted(str(value))}" for name, value in _extra(record).items())
        line = (
            f"{_wall_time(record)} {record.levelname:<7} {self._node} "
            f"{record.name.removeprefix('isthmus.')}: {record.getMessage()}{pairs}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        content = {
            "time": _wall_time(record),
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "event": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


def configure_logging(node: str, level: str = "info", style: str = "text") -> None:
    """Send all logs of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(node) if style == "json" else TextFormatter(node))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # These libraries speak at INFO of every connection; ours say what matters.
    for noisy in ("kazoo", "aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
