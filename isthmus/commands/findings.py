"""What a check of `isthmus doctor` finds."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: Level
    found: str
    remedy: str = ""
