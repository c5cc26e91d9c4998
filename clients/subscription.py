"""A subscription: an asynchronous iterator over the messages of one topic."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Final

from clients.awareness import Awareness, AwarenessEvent, Gap, SlowMessage
from clients.endpoint import Endpoint
from clients.errors import ClosedError
from clients.resuming import Arrived, Resumption
from overlay.history import Histories, Verdict
from overlay.limits import MILLISECOND_NS, RESUME_PUBLISHERS_MAX, SECOND_NS
from overlay.messages import Declare, Declared, EndpointKind, Message
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
    """When it was published, on the clock of the edge broker where it entered; 0 if not known."""
    age_bound_ms: float | None = None
    """How old the message was at most when it arrived here; None if that is not known (yet)."""
    limit_ms: float | None = None
    """What the subscription calls slow; None without a limit."""
    received_ns: int = 0
    """This client's monotonic clock when it arrived: what has passed since comes on top of its age."""

    @property
    def fast(self) -> bool:
        """The message is proven to have come within the limit."""
        return self.age_bound_ms is not None and self.limit_ms is not None and not self.slow

    @property
    def slow(self) -> bool:
        """The message may have come later than the limit. Without an age bound it is neither."""
        if self.age_bound_ms is None or self.limit_ms is None:
            return False
        return self.age_bound_ms > self.limit_ms


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """What a subscription has seen."""

    delivered: int
    duplicates: int
    late: int
    lost: int
    longest_loss_run: int
    dropped: int
    slow: int = 0
    age_unknown: int = 0
    """Delivered messages without an age bound."""
    events_dropped: int = 0


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
        limit_ms: float | None = None,
        allowance_ms: float | None = None,
        aware: bool = False,
    ) -> None:
        super().__init__(client, endpoint_id, topic, qos)
        for name, value in (("limit_ms", limit_ms), ("allowance_ms", allowance_ms)):
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{name} is {value:g}: give a time above 0, or leave it out")
        self._limit_ms = limit_ms
        self._allowance_ms = allowance_ms
        self._awareness = Awareness(topic, client.clock) if aware else None
        self._slow = 0
        self._age_unknown = 0
        self._request = request
        self._overflow = overflow
        self._queue: deque[ReceivedMessage] = deque()
        self._arrived = asyncio.Event()
        self._histories = Histories()
        self._delivered = 0
        self._duplicates = 0
        self._late = 0
        self._dropped = 0
        self._holding = False
        self._resumption: Resumption | None = None
        """Set for a while after the edge has changed."""
        self._releasing: asyncio.TimerHandle | None = None

    def declaration(self) -> Declare:
        """The frame that tells an edge broker of this subscription."""
        request = self._request.to_record() if self._request is not None else None
        resume = None
        if self._was_declared:
            histories = islice(self._histories, RESUME_PUBLISHERS_MAX)
            resume = tuple(number for item, history in histories for number in (item, history.highest))
        return replace(
            super().declaration(), request=request, watches=self._awareness is not None, resume=resume
        )

    @property
    def limit_ms(self) -> float | None:
        """What counts as slow: what was asked for, else the deadline the topic is served with."""
        return self.qos.deadline_ms if self._limit_ms is None else self._limit_ms

    def set_qos(self, qos: TopicQos) -> None:
        """What the topic is served with from now on."""
        super().set_qos(qos)
        if self._awareness is not None:
            # A message a period later may take as long as messages may take.
            allowance_ms = self._allowance_ms or self.limit_ms or qos.period_ms or 0.0
            self._awareness.allow(qos.period_ms, allowance_ms)

    def set_publishers(self, live: frozenset[int]) -> None:
        """Who publishes on the topic now."""
        if self._awareness is not None:
            self._awareness.set_publishers(live)

    async def next_event(self, timeout_s: float | None = None) -> AwarenessEvent:
        """The next slow or missing message. Raises TimeoutError; ClosedError at the end."""
        awareness = self._awareness
        if awareness is None:
            raise ClosedError(f"the subscription on {self.topic} is not aware: subscribe with aware=True")
        async with asyncio.timeout(timeout_s):
            while not awareness.has_events:
                self.check_open()
                await awareness.wait()
        return awareness.take()

    async def events(self) -> AsyncIterator[AwarenessEvent]:
        """All events, until the subscription ends."""
        with contextlib.suppress(ClosedError):
            while True:
                yield await self.next_event()

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
            lost=self._histories.lost,
            longest_loss_run=self._histories.longest_gap,
            dropped=self._dropped,
            slow=self._slow,
            age_unknown=self._age_unknown,
            events_dropped=self._awareness.dropped if self._awareness is not None else 0,
        )

    def deliver(
        self, message: Message, age_ns: int | None, now_ns: int, bound_ns: int = 0, edge: int = 0
    ) -> Verdict | None:
        """A message arrived from an edge broker, of this age at most; says whether it is new.

        None: that will be told when it is known, because the edge has just changed.
        """
        if self._resumption is None:
            return self._accept(message, age_ns, now_ns)
        self._deliver_in_order(self._resumption, Arrived(message, age_ns, now_ns, bound_ns, edge))
        return None

    def resume(self) -> None:
        """The edge broker has changed: messages may come out of order for a while."""
        if self._resumption is None:
            self._resumption = Resumption()
        self._resumption.begin(self._client.clock())

    def set_declared(self, message: Declared) -> None:
        """The edge broker knows this subscription; a new one now has sent again what was missed."""
        super().set_declared(message)
        if self._resumption is not None:
            self._resumption.served(self._client.clock())

    def _deliver_in_order(self, resumption: Resumption, arrived: Arrived) -> None:
        history = self._histories.of(arrived.message.publisher)
        for item in resumption.take(arrived, history, self.qos):
            self._accept_late(item)
        self._look_again(resumption, arrived.now_ns)

    def _accept_late(self, item: Arrived) -> None:
        verdict = self._accept(item.message, item.age_ns, item.now_ns)
        self._client.trace(item.message, verdict, item.age_ns, item.bound_ns, item.now_ns, item.edge)

    def _release_held(self) -> None:
        self._releasing = None
        if self._resumption is not None and self._ended is None:
            now_ns = self._client.clock()
            for item in self._resumption.release(now_ns):
                self._accept_late(item)
            self._look_again(self._resumption, now_ns)

    def _look_again(self, resumption: Resumption, now_ns: int) -> None:
        """Come back when the next message stops waiting for its predecessors, or forget all that."""
        if self._releasing is None and (due_ns := resumption.due_ns) is not None:
            wait_s = max(0, due_ns - now_ns) / SECOND_NS
            self._releasing = asyncio.get_running_loop().call_later(wait_s, self._release_held)
        elif resumption.is_over(now_ns):
            self._resumption = None

    def _accept(self, message: Message, age_ns: int | None, now_ns: int) -> Verdict:
        """Give the application a message if it is new."""
        history = self._histories.of(message.publisher)
        highest = history.highest
        verdict = history.judge(message.sequence)
        if verdict is not Verdict.NEW:
            if verdict is Verdict.LATE:
                self._late += 1
            else:
                self._duplicates += 1
            return verdict
        self._delivered += 1
        received = ReceivedMessage(
            self.topic,
            message.payload,
            message.publisher,
            message.sequence,
            message.born_ns,
            None if age_ns is None else age_ns / MILLISECOND_NS,
            self.limit_ms,
            now_ns,
        )
        self._age_unknown += age_ns is None
        self._slow += received.slow
        if self._awareness is not None:
            self._tell(self._awareness, received, highest)
        self._queue.append(received)
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
        if self._releasing is not None:
            self._releasing.cancel()
        self._arrived.set()
        if self._awareness is not None:
            self._awareness.end()

    def _tell(self, awareness: Awareness, message: ReceivedMessage, highest: int) -> None:
        """Tell what a message says about itself and those before it."""
        if highest and message.sequence > highest + 1:
            awareness.tell(Gap(self.topic, message.publisher, highest + 1, message.sequence - 1))
        if message.slow:
            assert message.age_bound_ms is not None and message.limit_ms is not None
            awareness.tell(
                SlowMessage(
                    self.topic, message.publisher, message.sequence, message.age_bound_ms, message.limit_ms
                )
            )
        awareness.heard(message.publisher, message.sequence)

    async def _wait(self) -> None:
        while not self._queue:
            self.check_open()
            self._arrived.clear()
            await self._arrived.wait()

    def _took(self) -> None:
        if self._holding and len(self._queue) < QUEUE_MAX_MESSAGES // 2:
            self._holding = False
            self._client.resume_reading()
