"""Quality of service on the command line: `--qos NAME=VALUE`, and how it is shown."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import click

from overlay.qos import TopicQos


def parse_qos(items: Iterable[str]) -> dict[str, Any]:
    """Read `name=value` pairs; the fields are not checked yet."""
    record: dict[str, Any] = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator:
            raise click.BadParameter(f"{item!r} is not NAME=VALUE, for example deadline_ms=50")
        if value.lower() in {"none", "null"}:
            record[name] = None
        else:
            try:
                record[name] = json.loads(value)
            except ValueError:
                record[name] = value
    return record


def describe_qos(qos: Mapping[str, Any]) -> str:
    """What differs from the default, in the form that `isthmus pub --qos` takes."""
    usual = TopicQos().to_record()
    special = [f"{name}={value}" for name, value in qos.items() if value != usual.get(name)]
    return " ".join(special) or "default"
