"""What publishers and subscriptions share: being declared, being ended."""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from overlay.errors import CloseReason, ProtocolError, QosError
from overlay.messages import Declare, Declared, EndpointKind, QosIntent
from overlay.names import check_topic
from overlay.qos import TopicQos

if TYPE_CHECKING:
    from clients.client import Client


class Endpoint:
    """One end of a topic at this client."""

    kind: ClassVar[EndpointKind]

    def __init__(self, client: "Client", endpoint_id: int, topic: str, qos: TopicQos | None) -> None:
        self.topic = check_topic(topic)
        self.endpoint_id = endpoint_id
        self.topic_id = 0
        self.qos = qos or TopicQos()
        """What the overlay serves the topic with, once declared; follows every change."""
        self._asked = qos
        self._was_declared = False
        self._client = client
        self._declared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: Exception | None = None

    def declaration(self) -> Declare:
        """The frame that tells an edge broker of this endpoint."""
        asked = self._asked.to_record() if self._asked is not None else None
        # The topic may have been changed since the first time: then it is as it is.
        intent = QosIntent.NEW if self._was_declared else QosIntent.MATCH
        return Declare(self.endpoint_id, self.kind, self.topic, asked, intent)

    def set_declared(self, message: Declared) -> None:
        """The edge broker knows this endpoint."""
        self.set_served(message.qos)
        self.topic_id = message.topic_id
        self._was_declared = True
        if not self._declared.done():
            self._declared.set_result(None)

    def set_served(self, record: Mapping[str, object]) -> None:
        """The edge broker says what the topic is served with; raises ProtocolError on anything else."""
        try:
            qos = TopicQos.from_record(record)
        except QosError as error:
            raise ProtocolError(CloseReason.BAD_MESSAGE, f"{self.topic}: {error}") from error
        self.set_qos(qos)

    def set_qos(self, qos: TopicQos) -> None:
        """What the overlay serves the topic with from now on."""
        self.qos = qos

    def refuse(self, error: Exception) -> bool:
        """The edge broker refuses; says whether the endpoint is at its end."""
        self.end(error)
        return True

    def connection_lost(self) -> None:
        """The edge broker is gone; another one will be told of this endpoint."""

    async def wait_declared(self) -> None:
        """Wait for the edge broker's answer; raises what it refused with."""
        await asyncio.shield(self._declared)

    def end(self, error: Exception) -> None:
        """No more messages; later calls raise `error`."""
        self._ended = error
        if not self._declared.done():
            self._declared.set_exception(error)

    def check_open(self) -> None:
        """Raise if the endpoint has ended."""
        if self._ended is not None:
            raise self._ended

    async def close(self) -> None:
        """Take the endpoint back."""
        await self._client.undeclare(self.endpoint_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
