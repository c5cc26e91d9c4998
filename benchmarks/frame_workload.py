"""Topics and publishers of FRAME's experiment: Table 2's categories in the numbers of section VI.A.

Ten topics each are in categories 0 and 1, five in category 5; all others are spread evenly over
categories 2 to 4. A publisher is a proxy for ten topics (categories 0 and 1), fifty (2 to 4) or
one (5) and sends a message of each of its topics at once, every period. The proxies of a category
take turns over the period, so that the load is even.
"""

from dataclasses import dataclass
from typing import Final

from overlay.limits import MILLISECOND_NS
from overlay.qos import Reliability, TopicQos

PAYLOAD_BYTES: Final = 16
FAILOVER_MS: Final = 50.0
"""x of the paper: from the death of a primary until the edges have turned to the backup."""
SUBSCRIBER_DELAY_MS: Final = 1.0
"""Least time from a routing broker to a subscriber, which the paper has as 1 ms in a LAN."""
BACKUP_DELAY_MS: Final = 0.05
PAPER_TOPICS: Final = (1_525, 4_525, 7_525, 10_525, 13_525)


@dataclass(frozen=True, slots=True)
class Category:
    """A row of FRAME's Table 2."""

    number: int
    period_ms: int
    deadline_ms: int
    loss_tolerance: int | None
    """None: best effort."""
    retention: int
    topics_per_proxy: int

    @property
    def period_ns(self) -> int:
        """The period in nanoseconds."""
        return self.period_ms * MILLISECOND_NS

    @property
    def deadline_ns(self) -> int:
        """The deadline in nanoseconds."""
        return self.deadline_ms * MILLISECOND_NS

    def qos(self) -> TopicQos:
        """What its topics are declared with."""
        best_effort = self.loss_tolerance is None
        return TopicQos(
            period_ms=self.period_ms,
            deadline_ms=self.deadline_ms,
            loss_tolerance=self.loss_tolerance,
            retention=self.retention,
            reliability=Reliability.BEST_EFFORT if best_effort else Reliability.RELIABLE,
        )


CATEGORIES: Final = (
    Category(0, 50, 50, 0, 2, 10),
    Category(1, 50, 50, 3, 0, 10),
    Category(2, 100, 100, 0, 1, 50),
    Category(3, 100, 100, 3, 0, 50),
    Category(4, 100, 100, None, 0, 50),
    Category(5, 500, 500, 0, 1, 1),
)
_FIXED: Final = {0: 10, 1: 10, 5: 5}
TOPICS_LEAST: Final = sum(_FIXED.values()) + 3


@dataclass(frozen=True, slots=True)
class Proxy:
    """One publishing client."""

    category: Category
    topics: tuple[int, ...]
    """Numbers of its topics, from 0."""
    phase_ns: int
    """When in the period it sends."""


def topics_per_category(topics: int) -> tuple[int, ...]:
    """How many topics each category gets."""
    if topics < TOPICS_LEAST:
        raise ValueError(f"{topics} topics: at least {TOPICS_LEAST} are needed for one in every category")
    rest = topics - sum(_FIXED.values())
    spread = {2: (rest + 2) // 3, 3: (rest + 1) // 3, 4: rest // 3}
    return tuple({**_FIXED, **spread}[category.number] for category in CATEGORIES)


def categories_of(topics: int) -> tuple[int, ...]:
    """The category of each topic, by the topic's number."""
    counts = topics_per_category(topics)
    return tuple(number for number, count in enumerate(counts) for _ in range(count))


def proxies(topics: int) -> tuple[Proxy, ...]:
    """All publishing clients."""
    found: list[Proxy] = []
    first = 0
    for category, count in zip(CATEGORIES, topics_per_category(topics), strict=True):
        size = category.topics_per_proxy
        groups = [
            range(start, min(start + size, first + count)) for start in range(first, first + count, size)
        ]
        for turn, group in enumerate(groups):
            found.append(Proxy(category, tuple(group), category.period_ns * turn // len(groups)))
        first += count
    return tuple(found)


def offered_rate(topics: int) -> float:
    """Messages per second that all publishers together are meant to send."""
    counts = topics_per_category(topics)
    return sum(1_000 * count / category.period_ms for category, count in zip(CATEGORIES, counts, strict=True))


def topic_name(number: int, category: int) -> str:
    """The name of a topic."""
    return f"frame/{category}/{number:05d}"
