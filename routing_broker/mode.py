"""The configurations FRAME compares (FRAME, VI.A)."""

from dataclasses import replace
from enum import StrEnum

from overlay.bounds import Delays, retention_without_replication
from overlay.qos import TopicQos


class Mode(StrEnum):
    """How a routing broker orders and replicates."""

    FRAME = "frame"
    """Earliest deadline first; replicates where the bounds demand it; prunes."""
    FRAME_PLUS = "frame+"
    """The same; edges retain one message more where that spares replication."""
    FCFS = "fcfs"
    """First come, first served; replicates everything first; prunes."""
    FCFS_MINUS = "fcfs-"
    """The same without pruning: the backup's buffer is full when it is needed."""

    @property
    def by_deadline(self) -> bool:
        """Serve by deadline rather than by arrival."""
        return self in (Mode.FRAME, Mode.FRAME_PLUS)

    @property
    def selective(self) -> bool:
        """Replicate only what the bounds demand."""
        return self in (Mode.FRAME, Mode.FRAME_PLUS)

    @property
    def coordinates(self) -> bool:
        """Cancel replication and prune copies of what has been dispatched."""
        return self is not Mode.FCFS_MINUS

    def retained(self, qos: TopicQos, delays: Delays) -> TopicQos:
        """A topic as its ingress edges keep it: with FRAME+, one message more where that helps."""
        if self is not Mode.FRAME_PLUS or not qos.kept_messages:
            return qos
        return replace(qos, retention=retention_without_replication(qos, delays))
