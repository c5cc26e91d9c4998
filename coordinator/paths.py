"""Where things are in the ZooKeeper tree, below the chroot.

A topic name may hold any printable text; quoted, it is one znode name.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from overlay.errors import InvalidNameError
from overlay.names import check_name, check_topic

CLUSTER: Final = "/cluster"
LEADER: Final = "/leader"
EPOCH: Final = "/epoch"
IDS: Final = "/ids"
"""Its version is the topic id that was given out last."""
BROKERS: Final = "/brokers"
ROUTERS: Final = "/brokers/routing"
EDGES: Final = "/brokers/edge"
ASSIGNMENTS: Final = "/assignments"
TOPICS: Final = "/topics"
FLAGS: Final = "/flags"
"""Topics whose promises do not hold now, ephemeral, one znode for each: <router>.<topic>."""

FOLDERS: Final = (LEADER, IDS, BROKERS, ROUTERS, EDGES, ASSIGNMENTS, TOPICS, FLAGS)
"""Every persistent folder, parents first."""

NAMES_CACHED: Final = 65_536
"""A leader translates all names every time one topic is added."""


@lru_cache(maxsize=NAMES_CACHED)
def quote_topic(name: str) -> str:
    """The znode name of a topic."""
    quoted = quote(check_topic(name), safe="")
    # ZooKeeper refuses these two as path elements, and quote leaves the dot alone.
    return quoted.replace(".", "%2E") if quoted in {".", ".."} else quoted


@lru_cache(maxsize=NAMES_CACHED)
def unquote_topic(node: str) -> str | None:
    """The topic that a znode name stands for; None if no topic has that znode name.

    Anyone may put a znode into the tree by hand. What is no topic must not stop a broker.
    """
    topic = unquote(node)
    try:
        return topic if quote_topic(topic) == node else None
    except InvalidNameError:
        return None


def unquote_topics(nodes: Iterable[str]) -> set[str]:
    """The topics among znode names."""
    return {topic for node in nodes if (topic := unquote_topic(node)) is not None}


def is_router(node: str) -> bool:
    """Whether a znode name can be that of a router."""
    try:
        return check_name("router", node) == node
    except InvalidNameError:
        return False


def topic_path(name: str) -> str:
    """Where the record of a topic is; its endpoints are the children."""
    return f"{TOPICS}/{quote_topic(name)}"


def router_path(router: str) -> str:
    """Where a routing broker registers."""
    return f"{ROUTERS}/{check_name('router', router)}"


def edge_path(edge: str) -> str:
    """Where an edge broker registers."""
    return f"{EDGES}/{check_name('edge', edge)}"


def folder_path(router: str) -> str:
    """The folder that names the topics a router serves."""
    return f"{ASSIGNMENTS}/{check_name('router', router)}"


def assignment_path(router: str, topic: str) -> str:
    """The znode that tells a router to serve a topic."""
    return f"{folder_path(router)}/{quote_topic(topic)}"


def flag_path(router: str, topic: str) -> str:
    """Where a router flags a topic."""
    return f"{FLAGS}/{check_name('router', router)}.{quote_topic(topic)}"
