"""The Python client: publish and subscribe through an edge broker of the LAN."""

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
    "BacklogFullError",
    "Client",
    "ClientError",
    "ClosedError",
    "EdgeNotFoundError",
    "Overflow",
    "PayloadTooLargeError",
    "Publisher",
    "ReceivedMessage",
    "RefusedError",
    "Reliability",
    "Subscription",
    "SubscriptionQos",
    "SubscriptionStatistics",
    "SynchronousClient",
    "TopicQos",
    "connect",
    "connect_synchronously",
]
