"""The Python client: publish and subscribe through an edge broker of the LAN."""

from clients.awareness import AwarenessEvent, Gap, MissedPeriod, SlowMessage
from clients.client import Client, connect
from clients.errors import (
    BacklogFullError,
    ClientError,
    ClosedError,
    EdgeNotFoundError,
    PayloadTooLargeError,
    RefusedError,
)
from clients.publisher import Publisher
from clients.subscription import Overflow, ReceivedMessage, Subscription, SubscriptionStatistics
from clients.synchronous import SynchronousClient, connect_synchronously
from overlay.qos import BEST_EFFORT, Reliability, SubscriptionQos, TopicQos

__all__ = [
    "BEST_EFFORT",
    "AwarenessEvent",
    "BacklogFullError",
    "Client",
    "ClientError",
    "ClosedError",
    "EdgeNotFoundError",
    "Gap",
    "MissedPeriod",
    "Overflow",
    "PayloadTooLargeError",
    "Publisher",
    "ReceivedMessage",
    "RefusedError",
    "Reliability",
    "SlowMessage",
    "Subscription",
    "SubscriptionQos",
    "SubscriptionStatistics",
    "SynchronousClient",
    "TopicQos",
    "connect",
    "connect_synchronously",
]
