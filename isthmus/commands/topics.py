"""`isthmus topics`: every topic, who serves it and who uses it; changes a topic or deletes it."""

import asyncio
import json
from collections import Counter
from functools import reduce
from typing import Any

import click

from coordinator import (
    Coordinator,
    Endpoint,
    EndpointKind,
    FlagRecord,
    TopicRecord,
    UnknownTopicError,
    requests_of,
)
from isthmus.commands.cluster import (
    add_row,
    open_cluster,
    open_console,
    open_table,
    quiet_logs,
    read_once,
    zookeeper_options,
)
from isthmus.commands.qos import describe_qos, parse_qos
from isthmus.errors import explain_errors, run_async
from overlay.bounds import NO_DELAYS, Delays, admit
from overlay.qos import SubscriptionQos, TopicQos, strictest


@click.command()
@zookeeper_options
@click.option("--delete", "doomed", metavar="NAME", help="Delete this topic; it must have no endpoints.")
@click.option("--set", "changed", metavar="NAME", help="Change this topic as --qos says, while it is used.")
@click.option("--qos", "qos_items", multiple=True, metavar="NAME=VALUE", help="For --set; repeat.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@explain_errors
@run_async
async def topics(
    zookeeper: str,
    chroot: str,
    doomed: str | None,
    changed: str | None,
    qos_items: tuple[str, ...],
    as_json: bool,
) -> None:
    """List topics: quality of service, primary and backup, publishers and subscribers per LAN.

    What subscribers ask for beyond a topic's own quality of service stands behind an arrow, and
    under the table which topics cannot keep their promise as the network is, and why.
    """
    quiet_logs()
    if (changed is None) != (not qos_items):
        raise click.UsageError("--set NAME and --qos NAME=VALUE go together")
    async with open_cluster(zookeeper, chroot) as coordinator:
        if doomed is not None:
            await coordinator.delete_topic(doomed)
            click.echo(json.dumps({"deleted": doomed}) if as_json else f"topic {doomed} is deleted")
            return
        if changed is not None:
            qos = await _change(coordinator, changed, parse_qos(qos_items))
            shown = json.dumps({"topic": changed, "qos": qos.to_record()})
            click.echo(shown if as_json else f"topic {changed} has {describe_qos(qos.to_record())} now")
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
            _served_with(topic),
            topic["primary"] or "none",
            topic["backup"] or "none",
            str(topic["epoch"]),
            _per_lan(topic["publishers"]),
            _per_lan(topic["subscribers"]),
        )
    console = open_console()
    console.print(table)
    for topic in found:
        if topic["flag"]:
            console.print(f"topic {topic['topic']}: {topic['flag']}", markup=False, soft_wrap=True)


async def _change(coordinator: Coordinator, name: str, fields: dict[str, Any]) -> TopicQos:
    """Change some fields of a topic's quality of service, if the overlay can keep it then."""
    routers = await read_once(coordinator.watch_routers)
    delays = reduce(Delays.at_least, (router.delays for router in routers.values()), NO_DELAYS)

    def decide(current: TopicQos, requests: frozenset[SubscriptionQos]) -> TopicQos:
        qos = TopicQos.from_record({**current.to_record(), **fields})
        admit(qos, requests, delays)
        return qos

    return (await coordinator.change_qos(name, decide)).qos


async def collect(coordinator: Coordinator) -> list[dict[str, Any]]:
    """All topics in the order of their names, as plain values."""
    records = await coordinator.topics()
    endpoints = await asyncio.gather(*(_endpoints(coordinator, name) for name in records))
    flags = await coordinator.flags()
    return [
        _plain(record, found, flags.get(record.name))
        for record, found in zip(records.values(), endpoints, strict=True)
    ]


async def _endpoints(coordinator: Coordinator, name: str) -> tuple[Endpoint, ...]:
    try:
        return await coordinator.endpoints(name)
    except UnknownTopicError:
        # Deleted since the topics were listed.
        return ()


def _plain(record: TopicRecord, endpoints: tuple[Endpoint, ...], flag: FlagRecord | None) -> dict[str, Any]:
    counts = {kind: Counter[str]() for kind in EndpointKind}
    for endpoint in endpoints:
        counts[endpoint.kind][endpoint.lan] += 1
    return {
        "topic": record.name,
        "id": record.id,
        "qos": record.qos.to_record(),
        "served_with": strictest(record.qos, requests_of(endpoints)).to_record(),
        "flag": flag.reason if flag is not None else "",
        "primary": record.primary,
        "backup": record.backup,
        "epoch": record.epoch,
        "publishers": dict(sorted(counts[EndpointKind.PUBLISHER].items())),
        "subscribers": dict(sorted(counts[EndpointKind.SUBSCRIBER].items())),
    }


def _served_with(topic: dict[str, Any]) -> str:
    """The topic's quality of service, and what subscribers make of it."""
    stricter = [
        f"{name}={value}" for name, value in topic["served_with"].items() if value != topic["qos"][name]
    ]
    declared = describe_qos(topic["qos"])
    return f"{declared} → {' '.join(stricter)}" if stricter else declared


def _per_lan(counts: dict[str, int]) -> str:
    return ", ".join(f"{lan}: {count}" for lan, count in counts.items()) or "none"
