"""A publisher: one topic, messages numbered from 1."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from clients.endpoint import Endpoint
from clients.errors import BacklogFullError, ClosedError, PayloadTooLargeError
from overlay.batch import Run, encode_message
from overlay.limits import PAYLOAD_MAX_BYTES
from overlay.messages import Declare, Declared, EndpointKind, QosIntent
from overlay.qos import TopicQos
from overlay.retention import Retention

if TYPE_CHECKING:
    from clients.client import Client


class Publisher(Endpoint):
    """Publishes on one topic. Get one with `client.publisher(topic)`."""

    kind = EndpointKind.PUBLISHER

    def __init__(self, client: "Client", endpoint_id: int, topic: str, qos: TopicQos | None) -> None:
        super().__init__(client, endpoint_id, topic, qos)
        self.sequence = 0
        """Sequence of the last message published."""
        self.subscribers = 0
        """Subscribers of the topic in all LANs, as far as the edge broker knows."""
        self._kept = 0
        self._retention = Retention(0)
        """What was published last: an edge that dies takes with it what it has not passed on."""
        self._matched = asyncio.Event()
        self._change: asyncio.Future[None] | None = None
        """Done when the edge broker has answered a change of the topic's quality of service."""

    async def publish(self, payload: bytes) -> int:
        """Publish a message, waiting first if too much waits already; returns its sequence."""
        if not self._client.has_room:
            await self._client.wait_for_room()
        return self.publish_nowait(payload)

    def publish_nowait(self, payload: bytes) -> int:
        """Publish without waiting; raises BacklogFullError if too much waits already."""
        return self.publish_many_nowait((payload,))

    async def publish_many(self, payloads: Iterable[bytes]) -> int:
        """Publish several messages as one batch; returns the sequence of the last."""
        if not self._client.has_room:
            await self._client.wait_for_room()
        return self.publish_many_nowait(payloads)

    def publish_many_nowait(self, payloads: Iterable[bytes]) -> int:
        """Publish a batch without waiting; raises BacklogFullError if too much waits already."""
        self.check_open()
        batch = list(payloads)
        for payload in batch:
            if len(payload) > PAYLOAD_MAX_BYTES:
                raise PayloadTooLargeError(
                    f"payload of {len(payload)} bytes, at most {PAYLOAD_MAX_BYTES} are allowed: "
                    "split it, or publish a reference to it"
                )
        if not self._client.has_room:
            raise BacklogFullError("the edge broker has not taken what was published before: publish later")
        born_ns = self._client.clock()
        connected = self._client.is_connected
        if connected and self._retention.unsent:
            self._retention.count_as_sent()
        for payload in batch:
            self.sequence += 1
            message = encode_message(self.topic_id, self.endpoint_id, self.sequence, born_ns, payload)
            if self._kept and connected:
                self._retention.keep_sent(message)
            elif self._kept:
                self._retention.keep_unsent(message)
            self._client.send(Run(1, message))
        return self.sequence

    async def wait_for_subscribers(self, least: int = 1, timeout_s: float | None = None) -> None:
        """Wait until the topic has this many subscribers anywhere. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self.subscribers < least:
                self.check_open()
                self._matched.clear()
                await self._matched.wait()

    async def change_qos(self, qos: TopicQos) -> None:
        """Give the topic another quality of service, for all its publishers and subscribers.

        Raises RefusedError with the reason if it cannot be; then everything stays as it was.
        """
        self.check_open()
        if self._change is not None:
            raise ClosedError(f"topic {self.topic} is being changed already: wait for that first")
        self._change = asyncio.get_running_loop().create_future()
        try:
            self._client.change_qos(
                Declare(self.endpoint_id, self.kind, self.topic, qos.to_record(), QosIntent.CHANGE)
            )
            await self._change
            self._asked = qos
        finally:
            self._change = None

    def set_qos(self, qos: TopicQos) -> None:
        """What the topic is served with from now on."""
        super().set_qos(qos)
        self._kept = qos.kept_messages
        self._retention.resize(self._kept)

    def publish_again(self, undelivered: Mapping[int, bytes]) -> None:
        """Another edge has taken over: send what is kept, and what the old one never acknowledged."""
        self._retention.recall(undelivered)
        for message in self._retention.resend():
            self._client.send_again(Run(1, message))

    def set_declared(self, message: Declared) -> None:
        """The edge broker knows this publisher, or has changed its topic."""
        super().set_declared(message)
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def refuse(self, error: Exception) -> bool:
        """The edge broker refuses; if it refuses a change, the publisher stays as it was."""
        if self._change is None or self._change.done():
            return super().refuse(error)
        self._change.set_exception(error)
        return False

    def connection_lost(self) -> None:
        """What the edge broker took last may have died with it; whether it made a change is not known."""
        # However much is published until there is an edge again, it takes no place of what is kept.
        self._retention.recall({})
        if self._change is not None and not self._change.done():
            self._change.set_exception(
                ClosedError(f"the connection was lost while topic {self.topic} was changed: try again")
            )

    def set_subscribers(self, count: int) -> None:
        """The edge broker tells how many subscribers there are."""
        self.subscribers = count
        self._matched.set()

    def end(self, error: Exception) -> None:
        """No more messages; later calls raise `error`."""
        super().end(error)
        self._matched.set()
        if self._change is not None and not self._change.done():
            self._change.set_exception(error)
