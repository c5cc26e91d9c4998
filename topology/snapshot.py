"""Who is where in a running testbed, put together from what the brokers say about themselves."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from topology.driver import Driver


@dataclass(frozen=True, slots=True)
class BrokerView:
    """One broker."""

    name: str
    role: str
    lan: str
    host: str
    """Host label of a routing broker."""
    locator: str
    http: str
    alive: bool
    ready: bool
    leader: bool
    epoch: int
    topics: int
    """Topics a router is the primary of, or an edge has endpoints of."""
    clients: int
    links_up: tuple[str, ...]
    """Other brokers it is connected to."""


@dataclass(frozen=True, slots=True)
class TopicView:
    """One topic."""

    topic: str
    primary: str
    backup: str
    edges: tuple[str, ...]
    """Edges with endpoints of it."""
    published: int
    """Messages from publishers since the edges started."""
    delivered: int
    """Messages given to the subscribers of all edges, once per edge."""
    targets: Mapping[str, str]
    """Routing broker each edge with publishers sends to, where one is needed."""
    lans_publishing: tuple[str, ...]
    lans_subscribing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole testbed at one moment."""

    brokers: tuple[BrokerView, ...]
    topics: tuple[TopicView, ...]

    @property
    def leader(self) -> str:
        """The routing broker that leads with the highest epoch; empty if none does."""
        leaders = [broker for broker in self.brokers if broker.leader]
        return max(leaders, key=lambda broker: broker.epoch).name if leaders else ""

    @property
    def epoch(self) -> int:
        """The leader's epoch; 0 without a leader."""
        return max((broker.epoch for broker in self.brokers if broker.leader), default=0)

    @property
    def assignment(self) -> dict[str, tuple[str, str]]:
        """Primary and backup of every topic."""
        return {topic.topic: (topic.primary, topic.backup) for topic in self.topics}

    def topic(self, name: str) -> TopicView | None:
        """One topic; None if no edge knows it."""
        return next((topic for topic in self.topics if topic.topic == name), None)

    def to_record(self) -> dict[str, Any]:
        """The plain form, for JSON."""
        return {"leader": self.leader, **asdict(self)}


async def take_snapshot(driver: Driver, skip: Collection[str] = ()) -> Snapshot:
    """Ask every broker but those to skip; who does not answer is shown as not ready."""
    statuses = await driver.statuses(name for name in driver.nodes if name not in skip)
    return Snapshot(
        brokers=tuple(_broker(driver, name, statuses.get(name, {})) for name in driver.nodes),
        topics=_topics(driver, statuses),
    )


def _broker(driver: Driver, name: str, status: Mapping[str, Any]) -> BrokerView:
    node = driver.nodes[name]
    is_router = node.role == "router"
    topics = status.get("primary_of", ()) if is_router else status.get("core", {}).get("topics", ())
    return BrokerView(
        name=name,
        role=node.role,
        lan=node.lan,
        host=status.get("host", "") if is_router else "",
        locator=node.locator,
        http=node.http,
        alive=node.is_alive,
        ready=bool(status.get("ready")),
        leader=bool(status.get("leader")),
        epoch=int(status.get("epoch", 0)),
        topics=len(topics),
        clients=len(status.get("clients", ())),
        links_up=tuple(sorted(link["peer"] for link in status.get("links", ()) if link["up"])),
    )


def _topics(driver: Driver, statuses: Mapping[str, Mapping[str, Any]]) -> tuple[TopicView, ...]:
    seen: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for name, status in statuses.items():
        if driver.nodes[name].role == "edge":
            for topic in status["core"]["topics"]:
                seen.setdefault(topic["topic"], []).append((name, topic))
    return tuple(_topic(driver, topic, views) for topic, views in sorted(seen.items()))


def _topic(driver: Driver, topic: str, views: list[tuple[str, Mapping[str, Any]]]) -> TopicView:
    # Edges learn of an assignment at their own pace; where they differ, it is not settled yet.
    primaries = {view["primary"] for _, view in views}
    backups = {view["backup"] for _, view in views}
    return TopicView(
        topic=topic,
        primary=primaries.pop() if len(primaries) == 1 else "",
        backup=backups.pop() if len(backups) == 1 else "",
        edges=tuple(edge for edge, _ in views),
        published=sum(view["messages"] for _, view in views),
        delivered=sum(view["delivered"] for _, view in views),
        targets={edge: view["target"] for edge, view in views if view["target"]},
        lans_publishing=tuple(sorted({driver.nodes[edge].lan for edge, view in views if view["publishers"]})),
        lans_subscribing=tuple(
            sorted({driver.nodes[edge].lan for edge, view in views if view["subscribers"]})
        ),
    )
