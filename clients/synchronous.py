"""The client for scripts without an event loop: the asynchronous one on a thread of its own.

with connect_synchronously("10.0.0.7:7400") as client:
    client.publish("plant/temperature", b"21.5")
    for message in client.subscribe("plant/alarm"):
        print(message.payload)
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from clients.awareness import AwarenessEvent
from clients.client import CONNECT_TIMEOUT_S, Client
from clients.errors import ClosedError
from clients.publisher import Publisher
from clients.subscription import ReceivedMessage, Subscription
from overlay.qos import SubscriptionQos, TopicQos

Result = TypeVar("Result")


class SynchronousSubscription:
    """Iterates over messages, blocking; ends when the client is closed."""

    def __init__(self, client: "SynchronousClient", subscription: Subscription) -> None:
        self._client = client
        self._subscription = subscription

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return self

    def __next__(self) -> ReceivedMessage:
        try:
            return self.receive()
        except ClosedError:
            raise StopIteration from None

    def receive(self, timeout_s: float | None = None) -> ReceivedMessage:
        """The next message. Raises TimeoutError if none comes in time."""
        return self._client.run(self._subscription.receive(timeout_s))

    def next_event(self, timeout_s: float | None = None) -> AwarenessEvent:
        """The next slow or missing message, if subscribed with `aware`. Raises TimeoutError."""
        return self._client.run(self._subscription.next_event(timeout_s))

    def events(self) -> Iterator[AwarenessEvent]:
        """All events, blocking in between; ends when the client is closed."""
        with contextlib.suppress(ClosedError):
            while True:
                yield self.next_event()

    def close(self) -> None:
        """End the subscription."""
        self._client.run(self._subscription.close())


class SynchronousClient:
    """A blocking client. Use `connect_synchronously()` to get one."""

    def __init__(self, *edges: str, timeout_s: float = CONNECT_TIMEOUT_S, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="isthmus client", daemon=True)
        self._thread.start()
        self._publishers: dict[str, Publisher] = {}
        try:
            self._client = self.run(self._start(edges, timeout_s, options))
        except BaseException:
            self._stop_loop()
            raise

    def publish(self, topic: str, payload: bytes, qos: TopicQos | None = None) -> int:
        """Publish a message; the first one on a topic declares it. Returns the sequence."""
        publisher = self._publishers.get(topic)
        if publisher is None:
            publisher = self._publishers[topic] = self.run(self._client.publisher(topic, qos))
        return self.run(publisher.publish(payload))

    def subscribe(
        self,
        topic: str,
        qos: TopicQos | None = None,
        *,
        request: SubscriptionQos | None = None,
        limit_ms: float | None = None,
        allowance_ms: float | None = None,
        aware: bool = False,
    ) -> SynchronousSubscription:
        """Subscribe; messages arrive from now on. The options are those of the asynchronous client."""
        subscribing = self._client.subscribe(
            topic, qos, request=request, limit_ms=limit_ms, allowance_ms=allowance_ms, aware=aware
        )
        return SynchronousSubscription(self, self.run(subscribing))

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the edge broker has everything published. Raises TimeoutError."""
        self.run(self._client.flush(timeout_s))

    def close(self) -> None:
        """Send what waits, then leave."""
        if self._thread.is_alive():
            self.run(self._client.close())
            self._stop_loop()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the client's loop and wait for it."""
        if not self._thread.is_alive():
            work.close()
            raise ClosedError("the client has been closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @staticmethod
    async def _start(edges: tuple[str, ...], timeout_s: float, options: dict[str, Any]) -> Client:
        client = Client(edges, **options)
        await client.start(timeout_s)
        return client

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def connect_synchronously(*edges: str, **options: Any) -> Iterator[SynchronousClient]:
    """Connect to one of the edge brokers given as host:port, or to one found in the LAN."""
    client = SynchronousClient(*edges, **options)
    try:
        yield client
    finally:
        client.close()
