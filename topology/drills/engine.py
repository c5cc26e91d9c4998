"""Plays a drill: warm up, calm, faults, recovery, drain, verdict.

    warm up    the testbed starts, every subscriber hears every publisher, the overlay is whole
    calm       messages count; each stream must have come at its rate, or nothing can be said
    faults     one after the other, each to an overlay that is whole; each is undone
    recovery   until the overlay is whole again, and a while longer
    drain      publishers stop, the last messages arrive
    verdict    every publisher's log against every subscriber's, `topology.drills.history`

Steps wait for what they need, so a slow machine makes a drill longer, not its verdict wrong. Whatever
keeps the drill from its end, be it the testbed, the load or the checker itself, makes it unknown.
"""

import asyncio
import json
import random
import time
import traceback
from dataclasses import dataclass, field
from typing import Final

from overlay.errors import IsthmusError
from overlay.limits import SECOND_NS
from runtime.tracing import TraceSettings
from topology.drills.actions import DEEDS
from topology.drills.history import Phases, judge_history, longest_gap_ms
from topology.drills.script import Action, Drill, Fault
from topology.drills.soak import Soak, soaking
from topology.drills.targets import choose
from topology.drills.verdict import DrillResult, InjectedFault, unknown, verdict_of
from topology.driver import Driver, DriverSettings, running
from topology.errors import DriverError, LoadError
from topology.load_runner import LoadResults, LoadRunner
from topology.model import Topology
from topology.observer import Observer
from topology.promises import (
    Promise,
    bounds_true,
    gets_topics,
    healthy_keep_topics,
    keeps_flowing,
    leader_in_time,
    losses_tolerated,
    messages_flow,
    messages_genuine,
    no_duplicates,
    nothing_else_died,
    order_kept,
    whole_again,
)
from topology.settling import STABLE_S, NotWholeError, wait_settled
from topology.snapshot import Snapshot
from topology.wan_kind import WanKind

CALM_S: Final = 2.0
PLAYS_MAX: Final = 2
"""Times a drill is played until something can be said, where many are played in a row."""
RATE_SHARE_LEAST: Final = 0.8
"""Of what its publisher is to send in the calm, so much must have reached each subscriber."""
LEADER_GRACE_S: Final = 1.0
"""A new leader must act within the session timeout and this long."""
LEADER_POLL_S: Final = 0.02
PATIENCE_S: Final = 10.0
"""How much longer than promised something is waited for, so that it can be said how late it was."""
RECOVERY_S: Final = 30.0
"""An overlay whose faults are undone is whole again within this long."""
SILENCE_MAX_MS: Final = 1_000.0
"""Messages that keep flowing are never silent for longer, beyond their period."""
STALL_MAX_MS: Final = 250.0
"""A machine that stands still for longer may have silenced a stream by itself."""
STALL_POLL_S: Final = 0.02
TAIL_S: Final = 1.5
"""Messages flow so long after the recovery."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of a drill."""

    drill: Drill
    topology: Topology
    driver: str
    kind: type[Driver]
    seed: int = 1
    seconds: float | None = None
    """How long messages flow, at least; None: as long as the drill says."""
    keep: bool = False
    trace: TraceSettings | None = None
    wan: WanKind = WanKind.AUTO


async def run_drill(plan: Plan, observer: Observer) -> DrillResult:
    """Play a drill; whatever fails on the way makes it unknown."""
    playing = asyncio.ensure_future(_play(plan, observer))
    try:
        await asyncio.wait({playing})
    except asyncio.CancelledError:
        playing.cancel()
        await asyncio.wait({playing})
        raise
    error = playing.exception()
    if error is None:
        return playing.result()
    # Our errors say what is wrong; anything else is a crash of the checker, with its story.
    story = str(error) if isinstance(error, IsthmusError) else "".join(traceback.format_exception(error))
    return unknown(plan.drill.name, plan.driver, plan.seed, story)


async def _play(plan: Plan, observer: Observer) -> DrillResult:
    settings = DriverSettings(say=observer.progress, trace=plan.trace, wan=plan.wan)
    async with running(plan.topology, plan.kind, settings, keep=plan.keep) as driver:
        result = await _Play(plan, driver, observer).run()
        driver.keeps_directory |= bool(result.reasons())
        if driver.keeps_directory:
            # What each broker counted, for whoever looks for the cause.
            statuses = json.dumps(await driver.statuses(), indent=1)
            (driver.directory / "statuses.json").write_text(statuses, encoding="utf-8")
            observer.say(f"logs and records are kept in {driver.directory}")
        return result


@dataclass(slots=True)
class _Happening:
    """A fault under way or past."""

    fault: Fault
    target: str
    at_ns: int
    orphans: list[str]
    """Topics whose primary was hit."""
    healed_ns: int | None = None


@dataclass(slots=True)
class _Play:
    plan: Plan
    driver: Driver
    observer: Observer
    randomness: random.Random = field(init=False)
    load: LoadRunner = field(init=False)
    promises: list[Promise] = field(default_factory=list)
    happened: list[_Happening] = field(default_factory=list)
    started_ns: int = 0
    whole_ns: int = 0
    stopped_ns: int = 0
    soak: Soak | None = None
    stall_ms: float = 0.0
    """The longest this process, which does little, was kept from running since messages count."""

    def __post_init__(self) -> None:
        self.randomness = random.Random(self.plan.seed)
        self.load = LoadRunner(self.driver)

    async def run(self) -> DrillResult:
        topology = self.driver.topology
        self.observer.progress("publishers and subscribers start")
        await self.load.start()
        await self.load.wait_warm()
        await wait_settled(self.driver, self.observer, "after the start", stable_s=STABLE_S)
        await self.driver.watch_wan()
        await self.load.measure()
        self.started_ns = time.monotonic_ns()
        rate = sum(topology.rate_per_s(topic) for topic in topology.topics)
        self.observer.say(
            f"{rate:g} messages/s from {len(topology.publishers)} publishers to "
            f"{len(topology.subscribers)} subscribers on {len(topology.topics)} topics"
        )
        watching = asyncio.create_task(self._watch_machine())
        try:
            if not self.plan.drill.churns:
                return await self._measured()
            async with soaking(self.driver, self.plan.seed) as self.soak:
                return await self._measured()
        finally:
            watching.cancel()

    async def _measured(self) -> DrillResult:
        await self._flow_until(CALM_S, "calm before the fault")
        await self._check_rates()
        if await self._suffer():
            await self._recover()
        seconds = self.plan.drill.seconds if self.plan.seconds is None else self.plan.seconds
        await self._flow_until(max(seconds, self._elapsed_s + TAIL_S), "calm after the fault")
        self.stopped_ns = time.monotonic_ns()
        await self.load.stop()
        self.observer.progress("publishers stopped, the last messages arrive")
        return await self._judge(await self.load.results())

    async def _watch_machine(self) -> None:
        while True:
            due_s = time.monotonic() + STALL_POLL_S
            await asyncio.sleep(STALL_POLL_S)
            self.stall_ms = max(self.stall_ms, 1e3 * (time.monotonic() - due_s))

    # What happens

    async def _suffer(self) -> bool:
        """Go through all faults; False if the overlay did not recover from one of them.

        Then the drill goes on without the others, for what it still shows.
        """
        try:
            for fault in self.plan.drill.faults:
                await self._go_through(fault)
            for happening in self.happened:
                if happening.healed_ns is None:
                    await self._undo(happening)
        except NotWholeError as error:
            if not self.happened:
                raise
            self.observer.say(f"{error}: no more faults")
            self.promises.append(whole_again(None, RECOVERY_S, str(error)))
            self.whole_ns = time.monotonic_ns()
            return False
        return True

    async def _check_rates(self) -> None:
        """Raise LoadError unless every stream flows: what is silent before a fault proves nothing."""
        elapsed_s = self._elapsed_s
        topology = self.driver.topology
        for (subscriber, publisher), count in (await self.load.received()).items():
            spec = topology.publishers[publisher]
            least = RATE_SHARE_LEAST * spec.rate_per_s * elapsed_s - 1
            if count < least:
                raise LoadError(
                    f"before any fault subscriber {subscriber} of {spec.topic} got {count} messages in "
                    f"{elapsed_s:.1f} s, at least {least:.0f} were due: the machine is too busy for a verdict"
                )

    async def _go_through(self, fault: Fault) -> None:
        await self._flow_until(CALM_S + fault.at_s, f"until {fault.whom} is hit")
        before = await self._wait_whole("before a fault")
        orphans = [topic for happening in self.happened for topic in happening.orphans]
        targets = await choose(fault.whom, self.driver, before, self.randomness, orphans)
        for number, target in enumerate(targets):
            if number:
                before = await self._wait_whole(f"before {target} is hit")
            happening = await self._inject(fault, target, before)
            if not fault.undone_last:
                await self._undo(happening)

    async def _inject(self, fault: Fault, target: str, before: Snapshot) -> _Happening:
        topics = [topic for topic, (primary, _) in before.assignment.items() if primary == target]
        happening = _Happening(fault, target, time.monotonic_ns(), topics)
        self.happened.append(happening)
        deeds = DEEDS[fault.action]
        await deeds.inject(self.driver, target)
        self.observer.say(deeds.happened.format(self._described(target, before)))
        if target == before.leader and fault.replaced:
            await self._see_leader_change(happening, before)
        if fault.replaced:
            after = await self._wait_whole(f"without {target}", stable_s=0.0)
            self.promises.append(healthy_keep_topics(before.assignment, after.assignment, target))
            self.observer.say(f"others have taken over, {_since_ms(happening.at_ns):.0f} ms after that")
        elif fault.action is Action.ADD:
            after = await self._wait_whole(f"with {target}")
            self.promises.append(gets_topics(after.assignment, target))
        since_s = (happening.at_ns - self.started_ns) / SECOND_NS
        await self._flow_until(since_s + fault.lasts_s, f"{fault.action} of {target}")
        return happening

    async def _undo(self, happening: _Happening) -> None:
        deeds = DEEDS[happening.fault.action]
        await deeds.undo(self.driver, happening.target)
        happening.healed_ns = time.monotonic_ns()
        self.observer.say(deeds.undone.format(happening.target))

    async def _wait_whole(self, when: str, stable_s: float | None = None) -> Snapshot:
        """Wait until the overlay is whole but for those who are hit right now."""
        if stable_s is None:
            stable_s = self.plan.drill.settled_s
        hit = [
            happening.target
            for happening in self.happened
            if happening.healed_ns is None and happening.fault.action is not Action.ADD
        ]
        return await wait_settled(
            self.driver, self.observer, when, avoid=hit, stable_s=stable_s, timeout_s=RECOVERY_S
        )

    async def _see_leader_change(self, happening: _Happening, before: Snapshot) -> None:
        limit_s = self.driver.session_timeout_s + LEADER_GRACE_S
        others = [name for name in self.driver.routers if name != happening.target]
        leader = ""
        self.observer.progress("waiting for a new leader")
        while not leader and _since_ms(happening.at_ns) < 1e3 * (limit_s + PATIENCE_S):
            statuses = await self.driver.statuses(others)
            leader = next((n for n, s in statuses.items() if s["leader"] and s["epoch"] > before.epoch), "")
            if not leader:
                await asyncio.sleep(LEADER_POLL_S)
        change_ms = _since_ms(happening.at_ns)
        self.promises.append(leader_in_time(happening.target, leader or "nobody", change_ms, 1e3 * limit_s))
        if leader:
            self.observer.say(f"{leader} leads, {change_ms:.0f} ms after that")

    async def _recover(self) -> None:
        """Wait until the overlay is whole; if that fails the drill goes on, for what it still shows."""
        undone_ns = max(happening.healed_ns or happening.at_ns for happening in self.happened)
        try:
            await wait_settled(self.driver, self.observer, "after all", timeout_s=RECOVERY_S)
        except NotWholeError as error:
            self.promises.append(whole_again(None, RECOVERY_S, str(error)))
        else:
            self.promises.append(whole_again(_since_ms(undone_ns), RECOVERY_S))
        self.whole_ns = time.monotonic_ns()

    @property
    def _elapsed_s(self) -> float:
        return (time.monotonic_ns() - self.started_ns) / SECOND_NS

    async def _flow_until(self, elapsed_s: float, what: str) -> None:
        while (left_s := elapsed_s - self._elapsed_s) > 0:
            self.observer.progress(f"{what}, {left_s:.0f} s left")
            await asyncio.sleep(min(left_s, 0.25))

    @staticmethod
    def _described(target: str, before: Snapshot) -> str:
        roles = ["the leader"] if target == before.leader else []
        primary = sorted(topic for topic, (primary, _) in before.assignment.items() if primary == target)
        backup = sorted(topic for topic, (_, backup) in before.assignment.items() if backup == target)
        roles += [f"primary of {', '.join(primary)}"] if primary else []
        roles += [f"backup of {', '.join(backup)}"] if backup else []
        return f"{target}, {'; '.join(roles)}" if roles else target

    # The verdict

    async def _judge(self, results: LoadResults) -> DrillResult:
        plan, topology = self.plan, self.driver.topology
        phases = Phases(self.happened[0].at_ns, self.whole_ns)
        topics = tuple(
            judge_history(
                topic,
                [stream for stream in results.streams if stream.topic == topic],
                qos.loss_tolerance,
                qos.deadline_ms,
                phases,
            )
            for topic, qos in topology.topics.items()
            if topology.publishing_lans(topic) and topology.subscribing_lans(topic)
        )
        verdicts = [topic.verdict for topic in topics]
        self.promises += [
            losses_tolerated(verdicts),
            no_duplicates(verdicts, await self._dropped_duplicates()),
            order_kept(verdicts),
            messages_genuine(sum(t.verdict.delivered for t in topics), sum(t.forged for t in topics)),
            bounds_true(sum(t.bounds for t in topics), sum(t.bounds_broken for t in topics)),
            messages_flow(results.streams, self.stopped_ns),
            nothing_else_died(self.driver.died_unasked()),
        ]
        if self.soak is not None:
            self.promises += await self.soak.promises()
        wan = await self.driver.check_wan()
        if wan is not None and not wan[0]:
            raise DriverError(f"the WAN was not what was asked for: {wan[1]}")
        gap_ms = longest_gap_ms(results.streams, phases, self.stopped_ns)
        if plan.drill.flows:
            flowing = keeps_flowing(gap_ms, SILENCE_MAX_MS)
            if not flowing.held and self.stall_ms > STALL_MAX_MS:
                raise DriverError(
                    f"{flowing.detail}; but the machine itself stood still for {self.stall_ms:.0f} ms: "
                    "it is too busy for a verdict"
                )
            self.promises.append(flowing)
        return DrillResult(
            drill=plan.drill.name,
            driver=plan.driver,
            seed=plan.seed,
            verdict=verdict_of(self.promises),
            failover_ms=gap_ms,
            faults=tuple(self._injected(happening) for happening in self.happened),
            topics=topics,
            promises=tuple(self.promises),
        )

    def _injected(self, happening: _Happening) -> InjectedFault:
        healed_ns = happening.healed_ns
        return InjectedFault(
            str(happening.fault.action),
            happening.target,
            (happening.at_ns - self.started_ns) / SECOND_NS,
            None if healed_ns is None else (healed_ns - self.started_ns) / SECOND_NS,
        )

    async def _dropped_duplicates(self) -> int:
        statuses = await self.driver.statuses()
        return sum(
            status["core"]["dropped"].get("duplicate", 0)
            for status in statuses.values()
            if status["role"] == "edge"
        )


def _since_ms(at_ns: int) -> float:
    return (time.monotonic_ns() - at_ns) / 1e6
