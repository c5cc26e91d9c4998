"""`isthmus topics`: every topic, who serves it and who uses it."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import click

from coordinator import Coordinator, Endpoint, EndpointKind, TopicRecord, UnknownTopicError
from isthmus.commands.cluster import (
    add_row,
    open_cluster,
    open_console,
    open_table,
    quiet_logs,
    zookeeper_options,
)
from isthmus.errors import explain_errors, run_async
from overlay.qos import TopicQos


@click.command()
@zookeeper_options
@click.option("--delete", "doomed", metavar="NAME", help="Delete this topic; it must have no endpoints.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@explain_errors
@run_async
async def topics(zookeeper: str, chroot: str, doomed: str | None, as_json: bool) -> None:
    """List topics: quality of service, primary and backup, publishers and subscribers per LAN."""
    quiet_logs()
    async with open_cluster(zookeeper, chroot) as coordinator:
        if doomed is not None:
            await coordinator.delete_topic(doomed)
            click.echo(json.dumps({"deleted": doomed}) if as_json else f"topic {doomed} is deleted")
            return
        found = await collect(coordinator)
    if as_json:
        click.echo(json.dumps({"topics": found}, indent=2))
        return
    table = open_table(
        "", ("topic", "id", "quality of service", "primary", "backup", "epoch", "publishers", "subscribers")
    )
    for topic in found:
        add_row(
            table,
            topic["topic"],
            str(topic["id"]),
            describe_qos(topic["qos"]),
            topic["primary"] or "none",
            topic["backup"] or "none",
            str(topic["epoch"]),
            _per_lan(topic["publishers"]),
            _per_lan(topic["subscribers"]),
        )
    open_console().print(table)


async def collect(coordinator: Coordinator) -> list[dict[str, Any]]:
    """All topics in the order of their names, as plain values."""
    records = await coordinator.topics()
    endpoints = await asyncio.gather(*(_endpoints(coordinator, name) for name in records))
    return [_plain(record, found) for record, found in zip(records.values(), endpoints, strict=True)]


async def _endpoints(coordinator: Coordinator, name: str) -> tuple[Endpoint, ...]:
    try:
        return await coordinator.endpoints(name)
    except UnknownTopicError:
        # Deleted since the topics were listed.
        return ()


def _plain(record: TopicRecord, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    counts = {kind: Counter[str]() for kind in EndpointKind}
    for endpoint in endpoints:
        counts[endpoint.kind][endpoint.lan] += 1
    return {
        "topic": record.name,
        "id": record.id,
        "qos": record.qos.to_record(),
        "primary": record.primary,
        "backup": record.backup,
        "epoch": record.epoch,
        "publishers": dict(sorted(counts[EndpointKind.PUBLISHER].items())),
        "subscribers": dict(sorted(counts[EndpointKind.SUBSCRIBER].items())),
    }


def describe_qos(qos: dict[str, Any]) -> str:
    """What differs from the default, in the form that `isthmus pub --qos` takes."""
    usual = TopicQos().to_record()
    special = [f"{name}={value}" for name, value in qos.items() if value != usual.get(name)]
    return " ".join(special) or "default"


def _per_lan(counts: dict[str, int]) -> str:
    return ", ".join(f"{lan}: {count}" for lan, count in counts.items()) or "none"
