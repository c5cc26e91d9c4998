"""The outcome of a drill: held, broken or unknown, and the record that says so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from topology.drills.history import TopicHistory
from topology.promises import Promise


class Verdict(StrEnum):
    """Whether everything promised was kept. Without evidence the answer is unknown, never held."""

    HELD = "held"
    BROKEN = "broken"
    UNKNOWN = "unknown"

    @property
    def exit_status(self) -> int:
        """How a command ends that found this."""
        return {Verdict.HELD: 0, Verdict.BROKEN: 1, Verdict.UNKNOWN: 2}[self]


def verdict_of(promises: Sequence[Promise]) -> Verdict:
    """Held only if something was promised and all of it was kept."""
    if not promises:
        return Verdict.UNKNOWN
    return Verdict.HELD if all(promise.held for promise in promises) else Verdict.BROKEN


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Of several drills: broken if one is, else unknown if one is or there are none."""
    found = set(verdicts)
    for verdict in (Verdict.BROKEN, Verdict.UNKNOWN):
        if verdict in found:
            return verdict
    return Verdict.HELD if found else Verdict.UNKNOWN


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault as it happened; times since messages count."""

    action: str
    target: str
    at_s: float
    healed_s: float | None
    """None: it was not undone."""

    def to_record(self) -> dict[str, Any]:
        """The plain form, for JSON."""
        healed_s = None if self.healed_s is None else round(self.healed_s, 3)
        return {
            "fault": self.action,
            "target": self.target,
            "at_s": round(self.at_s, 3),
            "healed_s": healed_s,
        }


@dataclass(frozen=True, slots=True)
class DrillResult:
    """How a drill went."""

    drill: str
    driver: str
    seed: int
    verdict: Verdict
    failover_ms: float | None = None
    """Longest silence of a stream between the first fault and the overlay's recovery, beyond its period."""
    faults: tuple[InjectedFault, ...] = ()
    topics: tuple[TopicHistory, ...] = ()
    promises: tuple[Promise, ...] = ()
    reason: str = ""
    """Why the verdict is unknown."""

    @property
    def delivered(self) -> int:
        """Messages that reached the worst subscriber of each topic."""
        return sum(topic.verdict.delivered for topic in self.topics)

    def to_record(self) -> dict[str, Any]:
        """The plain form, for JSON."""
        return {
            "drill": self.drill,
            "driver": self.driver,
            "seed": self.seed,
            "verdict": str(self.verdict),
            "failover_ms": _rounded(self.failover_ms),
            "faults": [fault.to_record() for fault in self.faults],
            "topics": [_topic_record(topic) for topic in self.topics],
        }

    def reasons(self) -> list[str]:
        """Why the drill did not hold."""
        broken = [f"{promise.name}: {promise.detail}" for promise in self.promises if not promise.held]
        return [self.reason, *broken] if self.reason else broken


def unknown(drill: str, driver: str, seed: int, reason: str) -> DrillResult:
    """Nothing can be said."""
    return DrillResult(drill, driver, seed, Verdict.UNKNOWN, reason=reason)


def _topic_record(topic: TopicHistory) -> Mapping[str, Any]:
    verdict, hits = topic.verdict, topic.deadline_hits
    return {
        "topic": verdict.topic,
        "sent": verdict.sent,
        "delivered": verdict.delivered,
        "lost": verdict.lost,
        "longest_loss_run": verdict.longest_loss_run,
        "loss_tolerance": verdict.loss_tolerance,
        "duplicates": verdict.duplicates,
        "reordered": verdict.reordered,
        "deadline_hit_pct": {
            "before": _rounded(hits.before),
            "during": _rounded(hits.during),
            "after": _rounded(hits.after),
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
