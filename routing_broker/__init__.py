"""The routing broker: in the cloud, forwards between the edge brokers of different LANs."""

from routing_broker.broker import RoutingBroker
from routing_broker.core import RouterCore

__all__ = ["RouterCore", "RoutingBroker"]
