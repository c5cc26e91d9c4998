"""The demonstration: a topology under load loses its leader and a primary, and every promise is checked.

The scenario, while messages flow:

    at 1/3   the leader is killed with SIGKILL; another routing broker leads; the dead one is restarted
    at 2/3   the primary of the busiest topic that crosses the WAN is killed (of the next busiest, if
             that one is on the broker that crashed before); its backup takes over
    at the end the publishers stop, the last messages arrive, and what was received is compared with
    what was sent

Steps wait for what they need (a new leader, a settled assignment), so a slow machine makes the run
longer than asked for, never the verdict wrong. `leader_change_ms` is the time from the kill until
another routing broker says that it leads with a higher epoch. `failover_gap_ms` is the longest silence
after the kill of the primary, beyond the normal period, see `topology.checker.failover_gap_ms`.
"""

import asyncio
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Final

from overlay.limits import SECOND_NS
from runtime.tracing import TraceSettings
from topology.checker import Crash, TopicVerdict, failover_gap_ms, judge_topic
from topology.driver import Driver, DriverSettings, running
from topology.errors import DriverError, TopologyError
from topology.load_runner import LoadResults, LoadRunner
from topology.model import Topology
from topology.observer import Observer
from topology.promises import (
    Promise,
    healthy_keep_topics,
    leader_in_time,
    local_stays_local,
    losses_tolerated,
    messages_flow,
    no_duplicates,
    nothing_else_died,
    order_kept,
)
from topology.settling import STABLE_S, wait_for, wait_settled
from topology.snapshot import Snapshot
from topology.wan_kind import WanKind

LEADER_GRACE_S: Final = 1.0
"""A new leader must act within the session timeout and this long."""
POLL_S: Final = 0.02
PATIENCE_S: Final = 10.0
"""How much longer than promised something is waited for, so that the report can say how late it was."""
AFTERMATH_NS: Final = 8 * SECOND_NS
"""Silence that begins later than this after a crash is not put down to it."""
TAIL_S: Final = 1.0
"""Messages flow at least this long after the last repair."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """How the demonstration went."""

    topology: str
    seconds: float
    leader_change_ms: float
    failover_gap_ms: float
    leader_killed: str
    new_leader: str
    primary_killed: str
    primary_topic: str
    reassigned_ms: float
    """From the kill of the primary until every edge sent to the new one."""
    promises: tuple[Promise, ...]
    topics: tuple[TopicVerdict, ...]

    @property
    def ok(self) -> bool:
        """Every promise held."""
        return bool(self.promises) and all(promise.held for promise in self.promises)

    def to_record(self) -> dict[str, Any]:
        """The plain form, for JSON; times in ms with microseconds."""
        record: dict[str, Any] = _rounded(asdict(self))
        return {"ok": self.ok, **record}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def check_topology(topology: Topology) -> None:
    """Raise TopologyError if the scenario cannot be played on this topology."""
    if len(topology.routers) < 3 or len({router.host for router in topology.routers}) < 2:
        raise TopologyError(
            f"topology {topology.name} has {len(topology.routers)} routing brokers: the demonstration kills "
            "them one after the other and needs 3, on at least 2 hosts"
        )
    if not any(topology.crosses_wan(topic) for topic in topology.topics):
        raise TopologyError(
            f"no topic of topology {topology.name} has a publisher in one LAN and a subscriber in another: "
            "add a pair, so that there is something to lose"
        )


async def run_demo(
    topology: Topology,
    *,
    seconds: float,
    observer: Observer,
    keep: bool = False,
    kind: type[Driver],
    trace: TraceSettings | None = None,
    wan: WanKind = WanKind.AUTO,
) -> DemoResult:
    """Play the scenario. Raises TopologyError or CoordinationError if it cannot be played to its end."""
    check_topology(topology)
    settings = DriverSettings(say=observer.say, trace=trace, wan=wan)
    async with running(topology, kind, settings, keep=keep) as driver:
        result = await _Scenario(driver, observer, seconds).run()
        driver.keeps_directory |= not result.ok
        return result


class _Scenario:
    """One run, from the start of the load to the verdict."""

    def __init__(self, driver: Driver, observer: Observer, seconds: float) -> None:
        self._driver = driver
        self._topology = driver.topology
        self._observer = observer
        self._seconds = seconds
        self._started_s = 0.0
        self._promises: list[Promise] = []
        self._crashes: list[Crash] = []
        self._stopped_ns = 0
        self._leader_change_ms = 0.0
        self._new_leader = ""
        self._reassigned_ms = 0.0
        self._primary_topic = ""

    async def run(self) -> DemoResult:
        observer = self._observer
        load = LoadRunner(self._driver)
        await load.start()
        await load.wait_warm()
        await self._wait_settled("after the start")
        observer.say(
            f"{len(self._topology.publishers)} publishers and {len(self._topology.subscribers)} subscribers "
            f"on {len(self._topology.topics)} topics are connected: messages count from now on"
        )
        await load.measure()
        self._started_s = time.monotonic()
        await self._flow_until(self._seconds / 3, "the leader is killed")
        await self._kill_leader()
        await self._flow_until(2 * self._seconds / 3, "a primary is killed")
        await self._kill_primary()
        await self._flow_until(max(self._seconds, self._elapsed_s + TAIL_S), "the end")
        self._stopped_ns = time.monotonic_ns()
        await load.stop()
        observer.say("publishers stopped; collecting what arrived")
        results = await load.results()
        return await self._judge(results)

    # The scenario

    async def _kill_leader(self) -> None:
        before = await self._wait_settled("before the leader is killed")
        victim, epoch = before.leader, before.epoch
        crash = self._kill(victim, before)
        self._observer.say(f"killed {victim}, the leader (primary of {_topics(crash.topics)})")
        limit_s = self._driver.session_timeout_s + LEADER_GRACE_S
        survivors = [name for name in self._driver.routers if name != victim]

        async def led() -> str | None:
            statuses = await self._driver.statuses(survivors)
            leaders = [n for n, s in statuses.items() if s["leader"] and s["epoch"] > epoch]
            return leaders[0] if leaders else None

        self._new_leader = await wait_for(
            led, limit_s + PATIENCE_S, POLL_S, "a new leader", self._driver, self._observer
        )
        self._leader_change_ms = (time.monotonic_ns() - crash.at_ns) / 1e6
        self._promises.append(leader_in_time(victim, self._new_leader, self._leader_change_ms, limit_s * 1e3))
        self._observer.say(f"{self._new_leader} leads, {self._leader_change_ms:.0f} ms after the kill")
        after = await self._wait_settled(f"without {victim}", avoid=[victim])
        self._promises.append(healthy_keep_topics(before.assignment, after.assignment, victim))
        await self._restart(victim)

    async def _kill_primary(self) -> None:
        before = await self._wait_settled("before a primary is killed", stable_s=STABLE_S)
        victim, self._primary_topic = self._choose_primary(before)
        crash = self._kill(victim, before)
        rate = self._topology.rate_per_s(self._primary_topic)
        self._observer.say(
            f"killed {victim}, primary of {self._primary_topic} with {rate:g} messages/s across the WAN (and "
            f"of {_topics(crash.topics - {self._primary_topic})})"
        )
        await self._wait_settled(f"without {victim}", avoid=[victim])
        self._reassigned_ms = (time.monotonic_ns() - crash.at_ns) / 1e6
        self._observer.say(
            f"all edges send to the new primaries, {self._reassigned_ms:.0f} ms after the kill"
        )
        await self._restart(victim)

    def _choose_primary(self, snapshot: Snapshot) -> tuple[str, str]:
        """The primary of the busiest topic across the WAN that is not on a broker which crashed before."""
        crossing = [topic for topic in self._topology.topics if self._topology.crosses_wan(topic)]
        crossing.sort(key=self._topology.rate_per_s, reverse=True)
        primaries = [(snapshot.assignment[topic][0], topic) for topic in crossing]
        crashed = {crash.broker for crash in self._crashes}
        return next((pair for pair in primaries if pair[0] not in crashed), primaries[0])

    def _kill(self, broker: str, before: Snapshot) -> Crash:
        at_ns = time.monotonic_ns()
        self._driver.kill_nowait(broker)
        topics = frozenset(name for name, (primary, _) in before.assignment.items() if primary == broker)
        crash = Crash(broker, at_ns, at_ns + AFTERMATH_NS, topics)
        self._crashes.append(crash)
        return crash

    async def _restart(self, broker: str) -> None:
        await self._driver.kill(broker)
        await self._driver.start_node(broker)

    # Waiting

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s if self._started_s else 0.0

    async def _flow_until(self, elapsed_s: float, what: str) -> None:
        while (left_s := elapsed_s - self._elapsed_s) > 0:
            self._observer.progress(f"messages flow, {left_s:.0f} s until {what}")
            await asyncio.sleep(min(left_s, 0.25))

    async def _wait_settled(
        self, when: str, *, avoid: Collection[str] = (), stable_s: float = 0.0
    ) -> Snapshot:
        return await wait_settled(self._driver, self._observer, when, avoid=avoid, stable_s=stable_s)

    # The verdict

    async def _judge(self, results: LoadResults) -> DemoResult:
        seconds = (self._stopped_ns / SECOND_NS) - self._started_s
        verdicts = tuple(
            self._judge_topic(topic, results)
            for topic in self._topology.topics
            if self._topology.publishing_lans(topic) and self._topology.subscribing_lans(topic)
        )
        gap_ms = failover_gap_ms(results.streams, self._crashes[-1], self._stopped_ns)
        if gap_ms is None:
            raise DriverError(f"no stream went through {self._crashes[-1].broker}: no failover was measured")
        passed = await asyncio.gather(*(self._driver.wan_statistics(lan.name) for lan in self._topology.lans))
        self._promises += [
            losses_tolerated(verdicts),
            no_duplicates(verdicts, await self._dropped_duplicates()),
            order_kept(verdicts),
            messages_flow(results.streams, self._stopped_ns, self._reassigned_ms),
            local_stays_local(self._topology, results.topic_ids, passed),
            nothing_else_died(self._driver.died_unasked()),
        ]
        wan = await self._driver.check_wan()
        if wan is not None:
            self._promises.append(Promise("the WAN was emulated in time", *wan))
        return DemoResult(
            topology=self._topology.name,
            seconds=seconds,
            leader_change_ms=self._leader_change_ms,
            failover_gap_ms=gap_ms,
            leader_killed=self._crashes[0].broker,
            new_leader=self._new_leader,
            primary_killed=self._crashes[-1].broker,
            primary_topic=self._primary_topic,
            reassigned_ms=self._reassigned_ms,
            promises=tuple(self._promises),
            topics=verdicts,
        )

    def _judge_topic(self, topic: str, results: LoadResults) -> TopicVerdict:
        qos = self._topology.topics[topic]
        streams = [stream for stream in results.streams if stream.topic == topic]
        gaps = [failover_gap_ms(streams, crash, self._stopped_ns) for crash in self._crashes]
        numbers = [i for i, item in enumerate(self._topology.publishers) if item.topic == topic]
        return judge_topic(
            topic,
            streams,
            sent=sum(results.sent[number] for number in numbers),
            loss_tolerance=qos.loss_tolerance,
            deadline_ms=qos.deadline_ms,
            gap_ms=max((gap for gap in gaps if gap is not None), default=None),
        )

    async def _dropped_duplicates(self) -> int:
        statuses = await self._driver.statuses()
        return sum(
            status["core"]["dropped"].get("duplicate", 0)
            for status in statuses.values()
            if status["role"] == "edge"
        )


def _topics(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "no other topic"
