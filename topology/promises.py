"""What the overlay promises, and whether it held. Pure: verdicts from what was measured.

A promise that cannot be checked counts as broken: a checker without data must never be green.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from overlay.limits import SECOND_NS
from topology.checker import Stream, TopicVerdict
from topology.gateway import GatewayStatistics
from topology.model import Topology

STILL_FLOWING_NS: Final = SECOND_NS
"""At the end of a run the latest message delivered is at most this old, and one period."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Something the overlay promises, and whether it held."""

    name: str
    held: bool
    detail: str


def leader_in_time(killed: str, leader: str, change_ms: float, limit_ms: float) -> Promise:
    """A new leader within the session timeout and a grace."""
    return Promise(
        "a new leader in time",
        change_ms <= limit_ms,
        f"{leader} leads {change_ms:.0f} ms after {killed} was killed, promised are {limit_ms:.0f} ms",
    )


def healthy_keep_topics(
    before: Mapping[str, tuple[str, str]], after: Mapping[str, tuple[str, str]], dead: str
) -> Promise:
    """Primary and backup of a topic stay where they are unless one of them died.

    A topic whose primary died has another one; a topic whose backup died keeps its primary.
    """
    wrong = [] if before else ["no assignment is known from before the crash"]
    for topic, (primary, backup) in before.items():
        now = after.get(topic)
        if now is None:
            wrong.append(f"{topic} is gone")
        elif primary == dead:
            if now[0] in {dead, ""}:
                wrong.append(f"{topic} has no new primary")
        elif now[0] != primary:
            wrong.append(f"{topic} moved from {primary} to {now[0] or 'nobody'}")
        elif backup not in {dead, "", now[1]}:
            wrong.append(f"backup of {topic} moved from {backup} to {now[1] or 'nobody'}")
    kept = sum(dead not in pair for pair in before.values())
    story = (
        f"{kept} topics not on {dead} stayed where they were, the other {len(before) - kept} got a new broker"
    )
    return Promise(
        "healthy brokers keep their topics",
        not wrong,
        "; ".join(wrong) or story,
    )


def losses_tolerated(verdicts: Sequence[TopicVerdict]) -> Promise:
    """No subscriber lost more messages in a row than its topic bears."""
    beyond = [
        f"{verdict.topic}: {verdict.longest_loss_run} in a row, tolerated are {verdict.loss_tolerance}"
        for verdict in verdicts
        if not verdict.within_tolerance
    ]
    sent = sum(verdict.sent for verdict in verdicts)
    if not sent:
        beyond.append("nothing was sent")
    lost = sum(verdict.lost for verdict in verdicts)
    bearable = f", at most {max(verdict.longest_loss_run for verdict in verdicts)} in a row" if lost else ""
    return Promise(
        "losses within tolerance", not beyond, "; ".join(beyond) or f"{lost} lost of {sent}{bearable}"
    )


def no_duplicates(verdicts: Sequence[TopicVerdict], dropped: int) -> Promise:
    """No application got a message twice; `dropped` copies were stopped by the edges on the way."""
    twice = [f"{verdict.topic}: {verdict.duplicates}" for verdict in verdicts if verdict.duplicates]
    return Promise(
        "no duplicates",
        bool(verdicts) and not twice,
        "; ".join(twice) or f"edges dropped {dropped} copies of messages that were sent again",
    )


def order_kept(verdicts: Sequence[TopicVerdict]) -> Promise:
    """No application got a message after a later one of the same publisher."""
    back = [f"{verdict.topic}: {verdict.reordered} steps back" for verdict in verdicts if verdict.reordered]
    return Promise(
        "order kept",
        bool(verdicts) and not back,
        "; ".join(back) or "every publisher's messages came in the order they were sent",
    )


def messages_genuine(delivered: int, forged: int) -> Promise:
    """Every message delivered is the one its publisher logged under that number."""
    return Promise(
        "messages are genuine",
        delivered > 0 and not forged,
        f"{forged} of {delivered} are not what was published" if forged else f"all {delivered} delivered",
    )


def bounds_true(bounds: int, broken: int) -> Promise:
    """No message was older than its age bound said."""
    return Promise(
        "ages never understated",
        bounds > 0 and not broken,
        f"{broken} of {bounds} age bounds were below the truth" if broken else f"{bounds} bounds checked",
    )


def gets_topics(assignment: Mapping[str, tuple[str, str]], router: str) -> Promise:
    """A routing broker that joined serves topics."""
    topics = sorted(topic for topic, pair in assignment.items() if router in pair)
    return Promise(
        "the new broker gets topics", bool(topics), f"{router} serves {', '.join(topics) or 'none'}"
    )


def keeps_flowing(silence_ms: float | None, limit_ms: float) -> Promise:
    """No stream fell silent for long; None: there was no stream."""
    if silence_ms is None:
        return Promise("messages keep flowing", False, "there was no stream to watch")
    return Promise(
        "messages keep flowing",
        silence_ms <= limit_ms,
        f"longest silence of a stream {silence_ms:.0f} ms beyond its period, allowed are {limit_ms:.0f}",
    )


def whole_again(after_ms: float | None, limit_s: float, trouble: str = "") -> Promise:
    """When all faults are undone, every topic has its brokers again in time; None: it had not."""
    if after_ms is None:
        return Promise("whole again", False, trouble)
    return Promise(
        "whole again",
        after_ms <= 1e3 * limit_s,
        f"every topic had primary and backup {after_ms:.0f} ms after the last repair",
    )


def messages_flow(streams: Iterable[Stream], stopped_ns: int, reassigned_ms: float | None = None) -> Promise:
    """Every subscriber still hears every publisher of its topic at the end."""
    dried = set()
    count = 0
    for stream in streams:
        count += 1
        last_ns = max(stream.sent_ns, default=0)
        if stopped_ns - last_ns > STILL_FLOWING_NS + stream.period_ns:
            dried.add(stream.topic)
    if not count:
        dried.add("any topic")
    story = f"all {count} streams flow"
    if reassigned_ms is not None:
        story += f"; edges sent to new primaries {reassigned_ms:.0f} ms after the kill"
    return Promise(
        "messages flow again",
        not dried,
        f"at the end nothing came of {', '.join(sorted(dried))}" if dried else story,
    )


def local_stays_local(
    topology: Topology, topic_ids: Mapping[str, int], passed: Sequence[GatewayStatistics]
) -> Promise:
    """What is wanted in one LAN only is not seen at any gateway to the WAN."""
    problems = []
    local = []
    for topic, topic_id in topic_ids.items():
        count = sum(_messages_of(statistics, topic_id) for statistics in passed)
        if not topology.crosses_wan(topic):
            local.append(topic)
            if count:
                problems.append(f"{count} messages of {topic} left the LAN")
        elif not count:
            # A tap that sees nothing proves nothing: it must have seen the topics that do cross.
            problems.append(f"{topic} was not seen at any gateway")
    blind = sum(statistics.unreadable for statistics in passed)
    if blind:
        problems.append(f"{blind} connections could not be read")
    if not topic_ids:
        problems.append("no topic is known")
    total = sum(sum(statistics.messages_out.values()) for statistics in passed)
    return Promise(
        "local topics stay local",
        not problems,
        "; ".join(problems)
        or f"of {total} messages sent to the cloud none was of {', '.join(sorted(local)) or 'a local topic'}",
    )


def nothing_else_died(dead: Sequence[str]) -> Promise:
    """Only the brokers we killed ended."""
    return Promise(
        "nothing else died", not dead, f"{', '.join(dead)} ended" if dead else "every other process lived"
    )


def _messages_of(statistics: GatewayStatistics, topic_id: int) -> int:
    key = str(topic_id)
    return statistics.messages_out.get(key, 0) + statistics.messages_back.get(key, 0)
