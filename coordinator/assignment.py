"""Which router serves which topic: the leader's decisions, as a function of what is known.

`plan` is asked again whenever something changes, and keeps no memory: what it wants follows from
the present placement alone, so that a new leader goes on where the old one stopped. Three steps:

1. Repair. A topic whose primary is gone or draining gets its backup as primary; a topic without
   a usable backup gets one, on another host if there is one. All such topics at once.
2. Spread. A backup on its primary's host moves to another host, where there is one.
3. Balance. Topics move from the most to the least loaded router while that helps. A move takes
   two rounds: the new router becomes the backup first, and once that has settled, primary and
   backup change places. So the new primary is connected before it is needed, and knows the topic,
   for the leader asks it first. Between routers of one host the move is direct, because the backup
   must stay on the other host. When primaries are balanced, backups are balanced in the same way.

Steps 2 and 3 touch topics that work, so together they change a bounded number per round.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from coordinator.limits import MOVES_PER_ROUND, MOVES_PER_ROUND_SHARE, MOVES_PER_STEP, TOPICS_PER_STEP
from coordinator.policy import LoadPolicy
from coordinator.records import RouterRecord


@dataclass(frozen=True, slots=True)
class Placement:
    """Who serves a topic."""

    primary: str | None = None
    backup: str | None = None


class Reason(StrEnum):
    """Why a topic changes."""

    NEW = "new"
    PRIMARY_GONE = "primary_gone"
    BACKUP_GONE = "backup_gone"
    SPREAD = "spread"
    PREPARE_MOVE = "prepare_move"
    MOVE = "move"
    BALANCE_BACKUPS = "balance_backups"


BOUNDED = frozenset({Reason.SPREAD, Reason.PREPARE_MOVE, Reason.MOVE, Reason.BALANCE_BACKUPS})
"""Changes to topics that work: a bounded number per round."""


@dataclass(frozen=True, slots=True)
class Change:
    """A topic's new placement."""

    topic: str
    placement: Placement
    reason: Reason


def moves_allowed(topics: int) -> int:
    """How many working topics one round may touch."""
    return max(MOVES_PER_ROUND, int(topics * MOVES_PER_ROUND_SHARE))


def plan(
    topics: Mapping[str, Placement],
    routers: Mapping[str, RouterRecord],
    policy: LoadPolicy,
    *,
    unsettled: Collection[str] = frozenset(),
    awaited: Collection[str] = frozenset(),
) -> list[Change]:
    """What to change now.

    `routers` are those alive. `unsettled` are topics whose backup is too new to become primary.
    `awaited` are routers not alive that are expected back: their topics are left alone.
    """
    planner = Planner(topics, routers, policy, unsettled=unsettled, awaited=awaited)
    for _ in planner.steps():
        pass
    return planner.changes()


def settle(topics: Mapping[str, Placement], changes: Iterable[Change]) -> dict[str, Placement]:
    """The placements once `changes` have been made."""
    return {**topics, **{change.topic: change.placement for change in changes}}


class Planner:
    """One call of `plan`, in steps: the placements as they will be, and counts that follow every change."""

    def __init__(
        self,
        topics: Mapping[str, Placement],
        routers: Mapping[str, RouterRecord],
        policy: LoadPolicy,
        *,
        unsettled: Collection[str] = frozenset(),
        awaited: Collection[str] = frozenset(),
    ) -> None:
        """What is passed must not change before the last step."""
        routers = {name: router for name, router in routers.items() if not router.draining} or dict(routers)
        self._topics = topics
        self._routers = routers
        self._policy = policy
        self._unsettled = frozenset(unsettled)
        self._awaited = frozenset(awaited)
        self._costs = policy.topic_costs(routers)
        self._hosts = {router.host for router in routers.values()}
        self._primaries = dict.fromkeys(routers, 0)
        self._backups = dict.fromkeys(routers, 0)
        self._loads = dict.fromkeys(routers, 0.0)
        self._pairs: dict[tuple[str, str | None], list[str]] = defaultdict(list)
        """Topics that work, by primary and backup; what is taken for a change leaves it."""
        self._together: Counter[tuple[str, str]] = Counter()
        """How many topics of a primary are backed by the same router."""
        self._changes: dict[str, Change] = {}

    def steps(self) -> Iterator[None]:
        """Decide; the caller may do other things between two steps, a millisecond or two each."""
        if not self._routers:
            return
        yield from self._repair()
        budget = moves_allowed(len(self._topics))
        used = yield from self._spread(budget)
        budget -= used
        moved, waiting = yield from self._balance(budget)
        if moved == 0 and not waiting:
            yield from self._balance_backups(budget)

    def changes(self) -> list[Change]:
        """What was decided, without what came out as it was."""
        return [change for topic, change in self._changes.items() if change.placement != self._topics[topic]]

    # Repair

    def _repair(self) -> Iterator[None]:
        """Give every topic a usable primary and, where possible, a usable backup."""
        broken = []
        awaited = self._awaited
        for number, (topic, placement) in enumerate(self._topics.items(), 1):
            if number % TOPICS_PER_STEP == 0:
                yield
            primary, backup = placement.primary, placement.backup
            if primary in awaited or backup in awaited:
                self._count(primary, backup)
            elif primary is not None and self._stands(primary, backup):
                self._count(primary, backup)
                self._pairs[primary, backup].append(topic)
                if backup is not None:
                    self._together[primary, backup] += 1
            else:
                broken.append(topic)
                self._count(*self._what_stays(placement))
        for number, topic in enumerate(broken, 1):
            if number % MOVES_PER_STEP == 0:
                yield
            self._mend(topic, self._topics[topic])

    def _stands(self, primary: str, backup: str | None) -> bool:
        if primary not in self._routers:
            return False
        if backup is None:
            return len(self._routers) == 1
        return backup in self._routers and backup != primary

    def _what_stays(self, placement: Placement) -> tuple[str | None, str | None]:
        """The usable part of a broken placement; counted before anything new is chosen."""
        primary, backup = placement.primary, placement.backup
        if primary in self._routers:
            return primary, None
        return (backup, None) if backup in self._routers else (None, None)

    def _mend(self, topic: str, placement: Placement) -> None:
        primary, _ = self._what_stays(placement)
        reason = Reason.BACKUP_GONE
        if primary is None or primary != placement.primary:
            reason = Reason.NEW if placement.primary is None else Reason.PRIMARY_GONE
        if primary is None:
            primary = min(self._routers, key=self._load_with_one_more)
            self._count(primary, None)
        backup = self._choose_backup(primary)
        self._count(None, backup)
        # Not entered into the pairs: what has just been mended is not moved in the same round.
        self._decide(topic, primary, backup, reason)

    def _choose_backup(self, primary: str) -> str | None:
        others = [name for name in self._routers if name != primary]
        host = self._routers[primary].host
        elsewhere = [name for name in others if self._routers[name].host != host]

        def rank(name: str) -> tuple[float, float, float, str]:
            # A primary's topics are backed by all others alike, so that its death loads all others alike.
            shared = self._together[primary, name] / self._routers[name].capacity
            return (shared, *self._backup_load(name))

        backup = min(elsewhere or others, key=rank, default=None)
        if backup is not None:
            self._together[primary, backup] += 1
        return backup

    # Spread

    def _spread(self, budget: int) -> Generator[None, None, int]:
        """Move backups off their primary's host; returns how many."""
        if len(self._hosts) < 2:
            return 0
        together = [pair for pair in self._pairs if pair[1] is not None and self._same_host(pair[0], pair[1])]
        used = 0
        for primary, backup in together:
            names = self._pairs[primary, backup]
            while names and used < budget:
                better = self._choose_backup(primary)
                assert better is not None
                topic = names.pop()
                self._move_backup(topic, primary, backup, better, Reason.SPREAD)
                used += 1
                if used % MOVES_PER_STEP == 0:
                    yield
        return used

    # Balance

    def _balance(self, budget: int) -> Generator[None, None, tuple[int, bool]]:
        """Move primaries towards even load; returns changes made, and whether moves await settling."""
        trusted = [
            name
            for name, router in self._routers.items()
            if self._policy.trusts(router, self._primaries[name])
        ]
        used, looked, waiting = 0, 0, False
        while used < budget and (pair := self._worst_pair(trusted)) is not None:
            looked += 1
            if looked % MOVES_PER_STEP == 0:
                yield
            source, target = pair
            topic, backup, settled = self._pick(source, target)
            if topic is None:
                trusted.remove(source)
                continue
            self._shift_load(source, target)
            if not settled:
                waiting = True
                continue
            used += 1
            if backup == target:
                self._count_backup(target, -1)
                self._count_backup(source, +1)
                self._decide(topic, target, source, Reason.MOVE)
            elif len(self._hosts) > 1 and self._same_host(source, target):
                self._decide(topic, target, backup, Reason.MOVE)
            else:
                self._count_backup(backup, -1)
                self._count_backup(target, +1)
                self._decide(topic, source, target, Reason.PREPARE_MOVE)
        return used, waiting

    def _worst_pair(self, trusted: Collection[str]) -> tuple[str, str] | None:
        """From where to where moving one topic helps most, if it helps enough."""
        sources = [name for name in trusted if self._primaries[name] > 0]
        if not sources or len(trusted) < 2:
            return None
        source = max(sources, key=lambda name: (self._loads[name], name))
        cost = self._costs[source]
        target = min(
            (name for name in trusted if name != source),
            key=lambda name: (self._loads[name] + cost / self._routers[name].capacity, name),
        )
        after = self._loads[target] + cost / self._routers[target].capacity
        gain = self._loads[source] - after
        # The margin keeps rounding errors of floating point from moving topics forth and back.
        return (source, target) if gain > max(self._policy.tolerance, 1e-9) * self._loads[source] else None

    def _pick(self, source: str, target: str) -> tuple[str | None, str | None, bool]:
        """A topic of `source` to move: one that `target` backs already, if there is one."""
        names = self._pairs.get((source, target), [])
        for index in range(len(names) - 1, -1, -1):
            if names[index] not in self._unsettled:
                return names.pop(index), target, True
        if names:
            return names.pop(), target, False
        others = (pair for pair, found in self._pairs.items() if pair[0] == source and found)
        pair = max(others, key=lambda pair: len(self._pairs[pair]), default=None)
        return (self._pairs[pair].pop(), pair[1], True) if pair is not None else (None, None, False)

    def _balance_backups(self, budget: int) -> Iterator[None]:
        """Even out the backups, once primaries need no moves."""
        used = 0
        while used < budget and (found := self._backup_to_move()) is not None:
            primary, source, target = found
            topic = self._pairs[primary, source].pop()
            self._move_backup(topic, primary, source, target, Reason.BALANCE_BACKUPS)
            used += 1
            if used % MOVES_PER_STEP == 0:
                yield

    def _backup_to_move(self) -> tuple[str, str, str] | None:
        ranked = sorted(self._routers, key=self._backup_load)
        for source in reversed(ranked):
            for target in ranked:
                if not self._backups_uneven(source, target):
                    break
                for primary in self._routers:
                    if self._pairs.get((primary, source)) and self._may_back(target, primary):
                        return primary, source, target
        return None

    def _backups_uneven(self, source: str, target: str) -> bool:
        after = (self._backups[target] + 1) / self._routers[target].capacity
        return after + 1e-9 < self._backups[source] / self._routers[source].capacity

    def _may_back(self, backup: str, primary: str) -> bool:
        return backup != primary and (len(self._hosts) < 2 or not self._same_host(backup, primary))

    # Counts

    def _count(self, primary: str | None, backup: str | None) -> None:
        if primary is not None and primary in self._routers:
            self._primaries[primary] += 1
            self._loads[primary] += self._costs[primary] / self._routers[primary].capacity
        self._count_backup(backup, +1)

    def _count_backup(self, backup: str | None, step: int) -> None:
        if backup is not None and backup in self._routers:
            self._backups[backup] += step

    def _shift_load(self, source: str, target: str) -> None:
        cost = self._costs[source]
        self._primaries[source] -= 1
        self._primaries[target] += 1
        self._loads[source] -= cost / self._routers[source].capacity
        self._loads[target] += cost / self._routers[target].capacity

    def _move_backup(self, topic: str, primary: str, source: str | None, target: str, reason: Reason) -> None:
        self._count_backup(source, -1)
        self._count_backup(target, +1)
        self._decide(topic, primary, target, reason)

    def _decide(self, topic: str, primary: str, backup: str | None, reason: Reason) -> None:
        self._changes[topic] = Change(topic, Placement(primary, backup), reason)

    def _load_with_one_more(self, name: str) -> tuple[float, str]:
        return self._loads[name] + self._costs[name] / self._routers[name].capacity, name

    def _backup_load(self, name: str) -> tuple[float, float, str]:
        return self._backups[name] / self._routers[name].capacity, self._loads[name], name

    def _same_host(self, one: str, other: str) -> bool:
        return self._routers[one].host == self._routers[other].host


def check_placements(topics: Mapping[str, Placement], routers: Mapping[str, RouterRecord]) -> Iterator[str]:
    """Name everything that is wrong with placements once a leader has had its time; for tests and status."""
    usable = {name: router for name, router in routers.items() if not router.draining} or dict(routers)
    hosts = {router.host for router in usable.values()}
    wrong: Callable[[str, str], str] = "topic {!r}: {}".format
    for topic, placement in topics.items():
        primary, backup = placement.primary, placement.backup
        if primary not in usable:
            if usable:
                yield wrong(topic, f"primary {primary} is not usable")
        elif backup is None:
            if len(usable) > 1:
                yield wrong(topic, "there is no backup")
        elif backup == primary:
            yield wrong(topic, f"primary and backup are both {primary}")
        elif backup not in usable:
            yield wrong(topic, f"backup {backup} is not usable")
        elif len(hosts) > 1 and usable[backup].host == usable[primary].host:
            yield wrong(topic, f"primary and backup are both on host {usable[primary].host}")
