"""Waiting until an overlay is whole: every topic served, every edge connected to those who serve it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar

from topology.driver import Driver
from topology.errors import DriverError
from topology.model import Topology
from topology.observer import Observer
from topology.snapshot import Snapshot, take_snapshot

SETTLE_POLL_S: Final = 0.1
SETTLE_TIMEOUT_S: Final = 20.0
STABLE_S: Final = 1.5
"""An assignment that has not changed for this long is not about to; longer than the leader's steps."""

Result = TypeVar("Result")


class NotWholeError(DriverError):
    """The overlay is not whole, however long one waits."""


def missing(snapshot: Snapshot, topology: Topology, avoid: Collection[str] = ()) -> str:
    """What an overlay lacks to be whole; empty if it is.

    Every topic has a primary and a backup, none of those to avoid, and its edges reach both.
    """
    brokers = [broker for broker in snapshot.brokers if broker.name not in avoid]
    if snapshot.leader in {"", *avoid}:
        return "there is no leader"
    for broker in brokers:
        if broker.alive and not broker.ready:
            return f"{broker.name} is not ready"
    alive = {broker.name for broker in brokers if broker.alive}
    links = {broker.name: set(broker.links_up) for broker in brokers}
    used = {item.topic for item in topology.publishers} | {item.topic for item in topology.subscribers}
    for name in sorted(used):
        topic = snapshot.topic(name)
        if topic is None:
            return f"no edge knows {name}"
        serving = {topic.primary, topic.backup}
        if len(serving) < 2 or not serving <= alive:
            return f"{name} has primary {topic.primary or 'none'} and backup {topic.backup or 'none'}"
        for edge, target in topic.targets.items():
            if target != topic.primary:
                return f"{edge} sends {name} to {target or 'nobody'}, its primary is {topic.primary}"
        for edge in topic.edges:
            if not serving <= links[edge]:
                return f"{edge} is not connected to {', '.join(sorted(serving - links[edge]))} for {name}"
    return ""


async def wait_settled(
    driver: Driver,
    observer: Observer,
    when: str,
    *,
    avoid: Collection[str] = (),
    stable_s: float = 0.0,
    timeout_s: float = SETTLE_TIMEOUT_S,
) -> Snapshot:
    """Wait until every topic has a primary and a backup and all its edges are connected to both.

    The assignment must also not have changed for a while: the leader moves topics to a broker that
    joined. Raises NotWholeError if it takes too long.
    """
    since_s = 0.0
    previous: dict[str, tuple[str, str]] = {}
    lacks = ""

    async def settled() -> Snapshot | None:
        nonlocal since_s, previous, lacks
        snapshot = await take_snapshot(driver, avoid)
        if lacks := missing(snapshot, driver.topology, avoid):
            previous = {}
            return None
        now_s = time.monotonic()
        # Others may use topics of their own, which come and go.
        assignment = {n: pair for n, pair in snapshot.assignment.items() if n in driver.topology.topics}
        if assignment != previous:
            previous, since_s = assignment, now_s
        return snapshot if now_s - since_s >= stable_s else None

    what = f"primary and backup of every topic {when}"
    try:
        return await wait_for(settled, timeout_s, SETTLE_POLL_S, what, driver, observer)
    except NotWholeError as error:
        raise NotWholeError(f"{error}; at last {lacks or 'topics were still being moved'}") from None


async def wait_for(
    condition: Callable[[], Awaitable[Result | None]],
    timeout_s: float,
    every_s: float,
    what: str,
    driver: Driver,
    observer: Observer,
) -> Result:
    """Ask again and again until there is an answer; raises NotWholeError if there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while (found := await condition()) is None:
        if time.monotonic() > deadline_s:
            raise NotWholeError(
                f"waited for {what} for {timeout_s:g} s in vain: see the logs in {driver.directory}"
            )
        observer.progress(f"waiting for {what}")
        await asyncio.sleep(every_s)
    return found
