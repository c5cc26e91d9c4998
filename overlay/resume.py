"""Reading what a RESUME frame says: garbage raises ProtocolError and nothing else."""

from collections.abc import Mapping, Sequence

from overlay.errors import CloseReason, InvalidNameError, ProtocolError, QosError
from overlay.limits import ENDPOINT_ID_MAX, RESUME_PUBLISHERS_MAX
from overlay.messages import Resume
from overlay.names import check_name
from overlay.qos import NO_REQUEST, SubscriptionQos


def check_sender(message: Resume, edge: str, lan: str) -> None:
    """An edge tells of its own subscribers, not of another's."""
    if (message.edge, message.lan) != (edge, lan):
        raise ProtocolError(
            CloseReason.BAD_MESSAGE,
            f"edge {edge} of LAN {lan} speaks for edge {message.edge} of LAN {message.lan}",
        )


def read_resume(message: Resume) -> tuple[Mapping[int, int], SubscriptionQos]:
    """What the subscriber has received, and what it needs beyond what the topic has.

    All of the frame is checked: who passes it on must not be taken for the one who made it up.
    """
    try:
        check_name("LAN", message.lan)
        check_name("edge", message.edge)
        request = NO_REQUEST if message.request is None else SubscriptionQos.from_record(message.request)
    except (InvalidNameError, QosError) as error:
        raise ProtocolError(CloseReason.BAD_MESSAGE, f"Resume: {error}") from error
    if message.endpoint > ENDPOINT_ID_MAX:
        raise ProtocolError(
            CloseReason.BAD_MESSAGE, f"Resume: endpoint {message.endpoint}: it must fit in 63 bits"
        )
    return positions_of(message.positions), request


def positions_of(numbers: Sequence[int]) -> Mapping[int, int]:
    """Last sequences received, by publisher."""
    if len(numbers) % 2 or len(numbers) > 2 * RESUME_PUBLISHERS_MAX:
        raise ProtocolError(
            CloseReason.BAD_MESSAGE,
            f"{len(numbers)} numbers are no pairs of publisher and sequence, of which at most "
            f"{RESUME_PUBLISHERS_MAX} are allowed",
        )
    return dict(zip(numbers[::2], numbers[1::2], strict=True))
