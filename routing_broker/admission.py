"""Which topics no longer keep what was admitted, because the network is not what it was.

A topic is admitted when it is declared, against what is configured and measured then. Later the
ways between its parties may get longer. Its primary is connected to all of them, so it is the
primary that looks again, every second, with what its heartbeats measure:

    publisher to primary    half the lowest round trip to the publishers' edges
    primary to subscriber   the same to the subscribers' edges
    primary to backup       the same to the backup, or what is configured if that is longer
    failover                what is configured, and how much later than nearby a dead peer is noticed

Only pairs of a publisher and a subscriber in different LANs count: what stays in a LAN does not
come here. A topic that fails is *flagged*, with the numbers and the remedy; it is served on as
well as can be. To keep flags from flapping, a topic must fail for a while before it is flagged,
and to lose its flag it must pass for a longer while even if all delays were somewhat longer.

Topics whose requirements and parties are the same are judged together, so that a broker with ten
thousand topics between a few edges has a few judgements to make.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from overlay.bounds import AdmissionError, Delays, check_deadline, check_losses
from overlay.limits import SECOND_NS
from overlay.qos import TopicQos

FLAG_AFTER_NS: Final = 2 * SECOND_NS
"""How long a topic must fail before it is flagged."""
CLEAR_AFTER_NS: Final = 5 * SECOND_NS
"""How long a flagged topic must pass, with the margin, before its flag is lowered."""
CLEAR_MARGIN_PERCENT: Final = 10
"""A flagged topic passes if it would with delays this much longer."""
CHANGES_PER_CHECK: Final = 20
"""Most flags raised or lowered at a time; the others follow with the next checks."""

_Check = Callable[[TopicQos, Delays], None]
Party = tuple[str, str]
"""An edge and its LAN."""


class Interest(NamedTuple):
    """What the judgement of a topic depends on."""

    qos: TopicQos
    """What the topic is served with."""
    publishers: frozenset[Party]
    subscribers: frozenset[Party]
    backup: str | None


class FlagChange(NamedTuple):
    """A topic gets or loses its flag."""

    topic: str
    reason: str
    """Empty if the flag is lowered."""


@dataclass(frozen=True, slots=True)
class Network:
    """What is measured now; who is not connected is not in it."""

    to_edges_ns: Mapping[str, int]
    to_routers_ns: Mapping[str, int]
    noticed_late_ns: Mapping[str, int]
    """How much later than nearby an edge notices that we are gone."""


class _Group:
    """Topics that are judged together."""

    __slots__ = ("interest", "reason", "since_ns", "topics")

    def __init__(self, interest: Interest) -> None:
        self.interest = interest
        self.topics: set[str] = set()
        self.reason = ""
        """Why these topics are flagged; empty if they are not."""
        self.since_ns: int | None = None
        """Since when the judgement speaks against the flag being as it is."""


class AdmissionWatch:
    """The flags of all topics that one routing broker is the primary of."""

    def __init__(self, configured: Delays) -> None:
        self._configured = configured
        self._groups: dict[Interest, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._flags: dict[str, str] = {}
        self._undecided: dict[str, None] = {}
        """Topics whose flag may not be what their group says."""

    @property
    def flags(self) -> Mapping[str, str]:
        """The flagged topics and why."""
        return self._flags

    def set_topic(self, topic: str, interest: Interest | None) -> None:
        """Who uses a topic and what for; None if this broker is not its primary (any more)."""
        before = self._group_of.get(topic)
        if interest == (before.interest if before is not None else None):
            return
        self._undecided[topic] = None
        if before is not None:
            del self._group_of[topic]
            before.topics.discard(topic)
            if not before.topics:
                del self._groups[before.interest]
        if interest is None:
            return
        group = self._groups.get(interest)
        if group is None:
            group = self._groups[interest] = _Group(interest)
            if before is not None:  # a flag does not fall because a subscriber has come or gone
                group.reason = before.reason
        group.topics.add(topic)
        self._group_of[topic] = group

    def check(self, network: Network, now_ns: int) -> list[FlagChange]:
        """Judge all topics; returns whose flag changes now. Called about every second."""
        for group in self._groups.values():
            if self._judge(group, network, now_ns):
                self._undecided.update(dict.fromkeys(sorted(group.topics)))
        changes: list[FlagChange] = []
        for topic in list(self._undecided):
            if len(changes) == CHANGES_PER_CHECK:
                break
            del self._undecided[topic]
            group_of = self._group_of.get(topic)
            reason = group_of.reason if group_of is not None else ""
            if reason and topic not in self._flags:
                self._flags[topic] = reason
                changes.append(FlagChange(topic, reason))
            elif not reason and self._flags.pop(topic, ""):
                changes.append(FlagChange(topic, ""))
        return changes

    def validate(self) -> None:
        """Assert the invariants; tests call this after every step."""
        assert all(group.topics for group in self._groups.values())
        for topic, group in self._group_of.items():
            assert topic in group.topics and self._groups[group.interest] is group
            assert topic in self._undecided or bool(group.reason) == (topic in self._flags)
        assert sum(len(group.topics) for group in self._groups.values()) == len(self._group_of)
        assert self._flags.keys() <= self._group_of.keys() | self._undecided.keys()

    # Details

    def _judge(self, group: _Group, network: Network, now_ns: int) -> bool:
        """Judge a group; says whether its flag changes now."""
        percent = CLEAR_MARGIN_PERCENT if group.reason else 0
        reason = _why_not(group.interest, self._configured, network, percent)
        if bool(reason) == bool(group.reason):
            group.since_ns = None
            return False
        if group.since_ns is None:
            group.since_ns = now_ns
        patience_ns = CLEAR_AFTER_NS if group.reason else FLAG_AFTER_NS
        if now_ns - group.since_ns < patience_ns:
            return False
        group.reason = reason
        group.since_ns = None
        return True


def _why_not(interest: Interest, configured: Delays, network: Network, percent: int) -> str:
    """What keeps a topic from being admitted as the network is, if all delays were longer by this much."""
    try:
        for delays, check in _delays(interest, configured, network):
            check(interest.qos, delays.longer_by(percent) if percent else delays)
    except AdmissionError as error:
        return str(error)
    return ""


def _delays(interest: Interest, configured: Delays, network: Network) -> Iterable[tuple[Delays, _Check]]:
    """The delays to check deadline and losses with; nothing if nobody across the network is reachable."""
    publishers = _farthest_by_lan(interest.publishers, network)
    subscribers = _farthest_by_lan(interest.subscribers, network)
    pairs = [
        (there_ns, back_ns)
        for lan, there_ns in publishers.items()
        for other, back_ns in subscribers.items()
        if lan != other
    ]
    if not pairs:
        return
    late_ns = max((network.noticed_late_ns.get(edge, 0) for edge, _ in interest.publishers), default=0)
    backup_ns = network.to_routers_ns.get(interest.backup, 0) if interest.backup is not None else 0
    failover_ns = configured.failover_ns + late_ns
    there_ns, back_ns = max(pairs, key=sum)
    yield configured.at_least(Delays(there_ns, back_ns, backup_ns, failover_ns)), check_deadline
    there_ns = max(there_ns for there_ns, _ in pairs)
    yield configured.at_least(Delays(there_ns, 0, backup_ns, failover_ns)), check_losses


def _farthest_by_lan(parties: Iterable[Party], network: Network) -> dict[str, int]:
    farthest: dict[str, int] = {}
    for edge, lan in parties:
        delay_ns = network.to_edges_ns.get(edge)
        if delay_ns is not None:
            farthest[lan] = max(farthest.get(lan, 0), delay_ns)
    return farthest
