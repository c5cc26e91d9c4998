"""The latest messages of one publisher, kept by the ingress edge for sending again.

FRAME calls this the publisher's retention buffer (N messages); the edge keeps it as the
publisher's proxy. Messages that could not be sent yet, because no routing broker is reachable,
are kept beyond N up to a limit of their own; what falls off then is lost and counted. All publishers of
an edge share its room in memory: when it is full, those that take most of it give their oldest messages
away, so that few large ones cannot push out many small ones.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from librt.strings import read_i64_le

from overlay.batch import SEQUENCE_OFFSET
from overlay.limits import UNSENT_MAX_MESSAGES

_OBJECT_BYTES: Final = 48
"""What a message takes in memory beside its bytes."""


class Room:
    """The memory that all retentions of an edge may take together."""

    __slots__ = ("most_bytes", "used_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0


class Retention:
    """Messages of one publisher in order: first the retained ones, then those never sent."""

    __slots__ = ("_capacity", "_messages", "_room", "_unsent", "_unsent_most", "dropped", "kept_bytes")

    def __init__(
        self, capacity: int, unsent_most: int = UNSENT_MAX_MESSAGES, room: Room | None = None
    ) -> None:
        self._capacity = capacity
        self._unsent_most = unsent_most
        self._room = room or Room(0)
        self.kept_bytes = 0
        """What its messages take in memory."""
        self._messages: deque[bytes] = deque()
        self._unsent = 0
        self.dropped = 0
        """Messages that fell off before they could be sent."""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def unsent(self) -> int:
        """Messages that no routing broker has been sent."""
        return self._unsent

    @property
    def messages(self) -> list[bytes]:
        """Everything kept, in order; it stays as it is."""
        return list(self._messages)

    def keep_sent(self, message: bytes) -> None:
        """Keep a message that is going out right now."""
        assert not self._unsent, "unsent messages must go out before newer ones"
        messages = self._messages
        messages.append(message)
        more = len(message) + _OBJECT_BYTES
        if len(messages) > self._capacity:
            more -= len(messages.popleft()) + _OBJECT_BYTES
        self.kept_bytes += more
        self._room.used_bytes += more

    def keep_unsent(self, message: bytes) -> None:
        """Keep a message that cannot go out yet."""
        self._messages.append(message)
        self._take(len(message) + _OBJECT_BYTES)
        self._unsent += 1
        if self._unsent > self._unsent_most:
            self._unsent -= 1
            self.dropped += 1
        self._trim()

    def resend(self) -> list[bytes]:
        """Everything kept, in order, for a new routing broker; all of it counts as sent now."""
        again = list(self._messages)
        self.count_as_sent()
        return again

    def count_as_sent(self) -> None:
        """Nobody waits for what was not sent: it is kept like everything else."""
        self._unsent = 0
        self._trim()

    def after(self, sequence: int | None) -> list[bytes]:
        """What is kept beyond this sequence.

        None: of a publisher that the subscriber has never heard. It is owed everything if it may have been
        there from the first message on, and nothing if it cannot be told from one that has just come.
        """
        messages = self._messages
        if sequence is None:
            young = bool(messages) and read_i64_le(messages[0], SEQUENCE_OFFSET) == 1
            return list(messages) if young else []
        return [message for message in messages if read_i64_le(message, SEQUENCE_OFFSET) > sequence]

    def recall(self, undelivered: Mapping[int, bytes]) -> None:
        """The routing broker is gone: merge what it never acknowledged, by sequence, with what is kept.

        All of it counts as unsent again, in the order of the sequences.
        """
        if not undelivered:
            self._unsent = len(self._messages)
            return
        by_sequence = {read_i64_le(message, SEQUENCE_OFFSET): message for message in self._messages}
        by_sequence.update(undelivered)
        if len(by_sequence) > len(self._messages):
            self._messages = deque([by_sequence[sequence] for sequence in sorted(by_sequence)])
            self._take(sum(len(message) + _OBJECT_BYTES for message in self._messages) - self.kept_bytes)
        overflow = len(self._messages) - self._unsent_most
        for _ in range(overflow):
            self._let_go_of_oldest()
            self.dropped += 1
        self._unsent = len(self._messages)

    def resize(self, capacity: int) -> None:
        """Keep this many from now on. What was never sent is kept in any case."""
        self._capacity = capacity
        self._trim()

    def forget(self) -> None:
        """Drop all messages: nobody else is interested any more."""
        self._messages.clear()
        self._unsent = 0
        self._take(-self.kept_bytes)

    def forget_sent(self) -> None:
        """Drop what was sent; what waits to be sent stays."""
        while len(self._messages) > self._unsent:
            self._let_go_of_oldest()

    def make_room(self, least_bytes: int) -> None:
        """Let the oldest messages go that take at least this much; those never sent are lost and counted."""
        until = self.kept_bytes - least_bytes
        while self._messages and self.kept_bytes > until:
            self._let_go_of_oldest()
            if self._unsent > len(self._messages):
                self._unsent -= 1
                self.dropped += 1

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.kept_bytes == sum(len(message) + _OBJECT_BYTES for message in self._messages)
        assert 0 <= self._unsent <= min(len(self._messages), self._unsent_most)
        assert len(self._messages) <= max(self._capacity, self._unsent)

    def _trim(self) -> None:
        # Unsent messages are the newest ones: only those sent before may fall off here.
        keep = max(self._capacity, self._unsent)
        while len(self._messages) > keep:
            self._let_go_of_oldest()

    def _let_go_of_oldest(self) -> None:
        self._take(-len(self._messages.popleft()) - _OBJECT_BYTES)

    def _take(self, more_bytes: int) -> None:
        self.kept_bytes += more_bytes
        self._room.used_bytes += more_bytes


def make_room(room: Room, retentions: Sequence[Retention]) -> None:
    """Let messages go until a sixteenth of the room is free: the oldest of those who keep most."""
    goal = room.most_bytes - room.most_bytes // 16
    while room.used_bytes > goal:
        largest = max(retentions, key=lambda retention: retention.kept_bytes)
        largest.make_room(min(room.used_bytes - goal, largest.kept_bytes // 2 + 1))
