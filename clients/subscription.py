"""A subscription: an asynchronous iterator over the messages of one topic."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from clients.endpoint import Endpoint
from clients.errors import ClosedError
from overlay.history import History, Verdict
from overlay.messages import Declare, EndpointKind, Message
from overlay.qos import SubscriptionQos, TopicQos

if TYPE_CHECKING:
    from clients.client import Client

QUEUE_MAX_MESSAGES: Final = 65_536


class Overflow(StrEnum):
    """What happens when a subscriber does not keep up."""

    WAIT = "wait"
    """Stop reading from the edge broker, for all subscriptions of this client, until there is room."""
    DROP_OLDEST = "drop_oldest"
    """Drop the oldest waiting message, counted in `statistics().dropped`."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message as the application gets it."""

    topic: str
    payload: bytes
    publisher: int
    """Tells publishers apart; sequences count per publisher."""
    sequence: int
    born_ns: int
    """The publisher's monotonic clock when it published; comparable only on the publisher's own host."""


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """What a subscription has seen."""

    delivered: int
    duplicates: int
    late: int
    lost: int
    longest_loss_run: int
    dropped: int


class Subscription(Endpoint):
    """Messages of one topic, in the order of each publisher. Get one with `client.subscribe(topic)`."""

    kind = EndpointKind.SUBSCRIBER

    def __init__(
        self,
        client: "Client",
        endpoint_id: int,
        topic: str,
        qos: TopicQos | None,
        overflow: Overflow,
        request: SubscriptionQos | None = None,
    ) -> None:
        super().__init__(client, endpoint_id, topic, qos)
        self._request = request
        self._overflow = overflow
        self._queue: deque[ReceivedMessage] = deque()
        self._arrived = asyncio.Event()
        self._histories: dict[int, History] = {}
        self._delivered = 0
        self._duplicates = 0
        self._late = 0
        self._dropped = 0
        self._holding = False

    def declaration(self) -> Declare:
        """The frame that tells an edge broker of this subscription."""
        request = self._request.to_record() if self._request is not None else None
        return replace(super().declaration(), request=request)

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        return self

    async def __anext__(self) -> ReceivedMessage:
        try:
            return await self.receive()
        except ClosedError:
            raise StopAsyncIteration from None

    async def receive(self, timeout_s: float | None = None) -> ReceivedMessage:
        """The next message. Raises TimeoutError if none comes in time."""
        if not self._queue:
            async with asyncio.timeout(timeout_s):
                await self._wait()
        message = self._queue.popleft()
        self._took()
        return message

    async def receive_many(self, timeout_s: float | None = None) -> list[ReceivedMessage]:
        """All messages that wait, at least one."""
        if not self._queue:
            async with asyncio.timeout(timeout_s):
                await self._wait()
        messages = list(self._queue)
        self._queue.clear()
        self._took()
        return messages

    @property
    def is_full(self) -> bool:
        """The queue has reached its limit and the edge broker must wait."""
        return self._holding

    def statistics(self) -> SubscriptionStatistics:
        """What this subscription has seen; losses count from each publisher's first message here."""
        return SubscriptionStatistics(
            delivered=self._delivered,
            duplicates=self._duplicates,
            late=self._late,
            lost=sum(history.lost for history in self._histories.values()),
            longest_loss_run=max((history.longest_gap for history in self._histories.values()), default=0),
            dropped=self._dropped,
        )

    def deliver(self, message: Message) -> Verdict:
        """A message arrived from the edge broker; says whether it is new."""
        history = self._histories.get(message.publisher)
        if history is None:
            history = self._histories[message.publisher] = History()
        verdict = history.judge(message.sequence)
        if verdict is not Verdict.NEW:
            if verdict is Verdict.LATE:
                self._late += 1
            else:
                self._duplicates += 1
            return verdict
        self._delivered += 1
        self._queue.append(
            ReceivedMessage(self.topic, message.payload, message.publisher, message.sequence, message.born_ns)
        )
        if len(self._queue) >= QUEUE_MAX_MESSAGES:
            if self._overflow is Overflow.WAIT:
                self._holding = True
                self._client.pause_reading()
            else:
                self._queue.popleft()
                self._dropped += 1
        self._arrived.set()
        return verdict

    def end(self, error: Exception) -> None:
        """No more messages; those that wait can still be taken."""
        super().end(error)
        self._arrived.set()

    async def _wait(self) -> None:
        while not self._queue:
            self.check_open()
            self._arrived.clear()
            await self._arrived.wait()

    def _took(self) -> None:
        if self._holding and len(self._queue) < QUEUE_MAX_MESSAGES // 2:
            self._holding = False
            self._client.resume_reading()
