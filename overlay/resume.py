"""Reading what a RESUME frame says: garbage raises ProtocolError and nothing else."""

from collections.abc import Mapping, Sequence

from overlay.errors import CloseReason, ProtocolError, QosError
from overlay.messages import Resume
from overlay.qos import NO_REQUEST, SubscriptionQos


def check_sender(message: Resume, edge: str, lan: str) -> None:
    """An edge tells of its own subscribers, not of another's."""
    if (message.edge, message.lan) != (edge, lan):
        raise ProtocolError(
            CloseReason.BAD_MESSAGE,
            f"edge {edge} of LAN {lan} speaks for edge {message.edge} of LAN {message.lan}",
        )


def request_of(message: Resume) -> SubscriptionQos:
    """What the subscriber needs beyond what the topic has."""
    if message.request is None:
        return NO_REQUEST
    try:
        return SubscriptionQos.from_record(message.request)
    except QosError as error:
        raise ProtocolError(CloseReason.BAD_MESSAGE, f"Resume: {error}") from error


def positions_of(numbers: Sequence[int]) -> Mapping[int, int]:
    """Last sequences received, by publisher."""
    if len(numbers) % 2:
        raise ProtocolError(
            CloseReason.BAD_MESSAGE, f"{len(numbers)} numbers are no pairs of publisher and sequence"
        )
    return dict(zip(numbers[::2], numbers[1::2], strict=True))
