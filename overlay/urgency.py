"""Deadline classes: the byte in a data frame's header that says how urgent its messages are.

A frame holds messages of one class. The class orders nothing by itself, deadlines do; it lets a
hop tell bulk from urgent without opening the frame.
"""

from typing import Final

from overlay.limits import MILLISECOND_NS, SECOND_NS
from overlay.qos import TopicQos

SHEDDABLE: Final = 0x80
"""Set in the class of best-effort topics: such frames go first when there is too much."""
UNORDERED: Final = 0x40
"""Set in the class of messages whose copies travel on several ways and may overtake each other."""
_LEVEL: Final = 0x3F
NO_DEADLINE_NS: Final = 60 * SECOND_NS
"""A topic without a deadline is treated as if it had this one, so that it cannot starve."""
_CLASS_LIMITS_NS: Final = tuple(
    limit * MILLISECOND_NS for limit in (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
)
LEVELS: Final = len(_CLASS_LIMITS_NS) + 2
"""From 0, of frames that do not say, to the least urgent."""


def deadline_ns(qos: TopicQos) -> int:
    """The topic's deadline, or the one it is treated as having."""
    return NO_DEADLINE_NS if qos.deadline_ns is None else qos.deadline_ns


def class_least_ns(urgency: int) -> int:
    """The shortest deadline a message of this class can have, almost; 0 for the most urgent."""
    level = level_of(urgency)
    return _CLASS_LIMITS_NS[min(level, len(_CLASS_LIMITS_NS) + 1) - 2] if level > 1 else 0


def level_of(urgency: int) -> int:
    """How urgent a class is, whatever else it says: 1 is the most urgent."""
    return urgency & _LEVEL


def urgency(qos: TopicQos) -> int:
    """The deadline class of a topic: 1 is the most urgent."""
    wanted_ns = deadline_ns(qos)
    level = 1 + sum(wanted_ns > limit_ns for limit_ns in _CLASS_LIMITS_NS)
    return level | SHEDDABLE if qos.loss_tolerance is None else level
