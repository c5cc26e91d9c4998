"""The trace of one client: what it published, what was delivered to it."""

import asyncio

from librt.strings import read_i64_le

from clients.endpoint import Endpoint
from overlay.batch import BORN_OFFSET, Run
from overlay.history import Verdict
from overlay.messages import Message, Role
from overlay.trace import UNKNOWN_SLACK, Event, Reason
from overlay.tracer import Tracer
from runtime.link import Link
from runtime.tracing import TraceRecorder, TraceSettings

_EVENTS = {
    Verdict.NEW: (Event.DELIVERED, Reason.NONE),
    Verdict.DUPLICATE: (Event.DUPLICATE, Reason.NONE),
    Verdict.LATE: (Event.DROPPED, Reason.LATE),
}


class ClientTracing:
    """Records what passes a client, from its first connection on."""

    def __init__(self, settings: TraceSettings, node: str) -> None:
        self._settings = settings
        self._node = node
        self._deadlines_ns: dict[int, int] = {}
        self._recorder: TraceRecorder | None = None
        self._tracer: Tracer | None = None
        self._flushing: asyncio.Task[None] | None = None

    def welcome(self, link: Link, edge: str, lan: str) -> int:
        """Connected to an edge broker: its number. Raises TracingError if the folder cannot be used."""
        if self._recorder is None:
            self._recorder = TraceRecorder.here(self._settings, self._node, Role.CLIENT, lan)
            self._tracer = Tracer(self._recorder.log)
            self._flushing = asyncio.get_running_loop().create_task(self._recorder.flush_regularly())
        assert self._tracer is not None
        link.outbox.trace = self._tracer.link(edge)
        return self._recorder.log.peer(edge)

    def define_topic(self, endpoint: Endpoint) -> None:
        """An endpoint has been declared, or its topic has changed."""
        if self._tracer is not None:
            self._deadlines_ns[endpoint.topic_id] = endpoint.qos.deadline_ns or 0
            self._tracer.define_topic(endpoint.topic_id, endpoint.topic, endpoint.qos)

    def publish(self, run: Run) -> None:
        """A message is published; the outbox records when it leaves."""
        if self._tracer is not None:
            self._tracer.publish(run, read_i64_le(run.data, BORN_OFFSET))

    def deliver(
        self,
        message: Message,
        verdict: Verdict,
        age_ns: int | None,
        link_bound_ns: int,
        now_ns: int,
        edge: int,
    ) -> None:
        """A message came for a subscription, of this age at most; its last link took at most so long."""
        if self._recorder is None:
            return
        log = self._recorder.log
        if not log.sampling.is_sampled(message.publisher, message.sequence):
            return
        event, reason = _EVENTS[verdict]
        deadline_ns = self._deadlines_ns.get(message.topic_id, 0)
        log.record(
            event,
            message.topic_id,
            message.publisher,
            message.sequence,
            born_ns=message.born_ns,
            in_ns=now_ns,
            age_bound_ns=age_ns or 0,
            link_bound_ns=link_bound_ns,
            slack_ns=deadline_ns - age_ns if age_ns and deadline_ns else UNKNOWN_SLACK,
            deadline_ns=deadline_ns,
            peer_in=edge,
            reason=reason,
        )

    async def close(self) -> None:
        """Write what is left."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.wait({self._flushing})
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
