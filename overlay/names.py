"""Which names brokers, LANs and topics may have."""

import re

from overlay.errors import InvalidNameError
from overlay.limits import NAME_MAX_CHARACTERS, TOPIC_MAX_BYTES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can name a broker or LAN (`kind` says which, for the error)."""
    if len(name) > NAME_MAX_CHARACTERS:
        raise InvalidNameError(
            f"{kind} name has {len(name)} characters, at most {NAME_MAX_CHARACTERS} are allowed: shorten it"
        )
    if not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"{kind} name {name!r} cannot be used: "
            "use letters, digits, '-' and '_', starting with a letter or digit"
        )
    return name


def check_topic(topic: str) -> str:
    """Return `topic` if it can name a topic: any printable text, `/` for hierarchy."""
    size = len(topic.encode("utf-8", "surrogatepass"))
    if size > TOPIC_MAX_BYTES:
        raise InvalidNameError(
            f"topic name has {size} bytes, at most {TOPIC_MAX_BYTES} are allowed: shorten it"
        )
    if not topic or not topic.isprintable() or topic != topic.strip():
        raise InvalidNameError(
            f"topic name {topic!r} cannot be used: give printable text without leading or trailing blanks"
        )
    return topic
