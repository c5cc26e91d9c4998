"""An edge core with a few clients, to publish through and to look at."""

from collections.abc import Iterable

from edge_broker.core import EdgeCore
from edge_broker.model import Peer, Topic
from overlay.limits import RETAINED_MAX_BYTES, UNSENT_MAX_MESSAGES
from overlay.messages import EndpointKind, Message
from overlay.outbox import Outbox
from overlay.qos import TopicQos
from tests.wires import body_of, drain

PUB, SUB = EndpointKind.PUBLISHER, EndpointKind.SUBSCRIBER
RETENTION = 4
ORIGIN = 1234
RELIABLE = TopicQos(retention=RETENTION)
NOW = 10**12
HERE, NEIGHBOUR, REMOTE = ("plant", "e1"), ("plant", "e2"), ("office", "e9")


class Lan:
    """An edge core with one publishing and one subscribing client, and outboxes for its brokers."""

    def __init__(
        self,
        qos: TopicQos = RELIABLE,
        unsent_most: int = UNSENT_MAX_MESSAGES,
        retained_most_bytes: int = RETAINED_MAX_BYTES,
    ) -> None:
        self.core = EdgeCore(
            "e1", "plant", ORIGIN, unsent_most=unsent_most, retained_most_bytes=retained_most_bytes
        )
        self.topic = self.core.ensure_topic(1, "t", qos)
        self.publisher = self.core.client("client:p", Outbox())
        self.core.add_endpoint(self.publisher, PUB, 100, self.topic)
        self.outboxes: dict[str, Outbox] = {}
        self.sequence = 0
        self.now_ns = NOW
        self.clock_shift_ns = 0
        """What the edge knows of the clock of whoever sends to it."""

    def subscribe(self, name: str = "s", endpoint: int = 200) -> Peer:
        client = self.core.client(f"client:{name}", Outbox())
        self.core.add_endpoint(client, SUB, endpoint, self.topic)
        self.core.validate()
        return client

    def interest(
        self,
        *subscribers: tuple[str, str],
        primary: str | None = "r1",
        backup: str | None = "r2",
        publishers: Iterable[int] = (100,),
        topic: Topic | None = None,
    ) -> set[str]:
        touched = self.core.set_interest(
            topic or self.topic,
            primary=primary,
            backup=backup,
            subscribers=subscribers,
            publishers=frozenset(publishers),
            now_ns=self.now_ns,
        )
        self.core.validate()
        return {peer.name for peer in touched}

    def router_up(self, name: str) -> set[str]:
        outbox = self.outboxes.setdefault(name, Outbox())
        self.core.router_up(name, outbox, self.now_ns)
        return self.turn()

    def router_down(self, name: str) -> set[str]:
        self.core.router_down(name, self.now_ns)
        return self.turn()

    def router_trusted(self, name: str) -> set[str]:
        self.core.router_trusted(name, self.now_ns)
        return self.turn()

    def turn(self) -> set[str]:
        """Let all topics turn to their new target."""
        touched: set[Peer] = set()
        self.core.validate()
        while self.core.is_turning:
            touched |= self.core.turn_some(self.now_ns)
            self.core.validate()
        return {peer.name for peer in touched}

    def publish(self, count: int = 1, size: int = 1) -> set[str]:
        first = self.sequence + 1
        self.sequence += count
        return self.publish_sequences(range(first, self.sequence + 1), size)

    def publish_sequences(self, sequences: Iterable[int], size: int = 1) -> set[str]:
        messages = [a_message(sequence, size) for sequence in sequences]
        count, touched = self.core.admit_from_client(
            self.publisher, body_of(messages, origin=55), self.clock_shift_ns, self.now_ns
        )
        assert count == len(messages)
        self.core.validate()
        return {peer.name for peer in touched}

    def arrive(self, *sequences: int, publisher: int = 300, topic_id: int = 1) -> set[str]:
        """A frame from a routing broker or another edge."""
        body = body_of(
            [a_message(sequence, publisher=publisher, topic_id=topic_id) for sequence in sequences]
        )
        count, touched = self.core.admit_from_broker(body, self.clock_shift_ns, self.now_ns)
        assert count == len(sequences)
        self.core.validate()
        return {peer.name for peer in touched}

    def sent_to(self, name: str) -> list[int]:
        """The sequences that wait for a broker, taken out."""
        return sequences_in(self.outboxes[name])

    @property
    def dropped(self) -> dict[str, int]:
        return {reason: count for reason, count in self.core.statistics().dropped.items() if count}


def a_message(
    sequence: int, size: int = 1, publisher: int = 100, topic_id: int = 1, born_ns: int = NOW
) -> Message:
    return Message(topic_id, publisher, sequence, born_ns, bytes(size))


def sequences_in(outbox: Outbox) -> list[int]:
    return [message.sequence for message in drain(outbox)]
