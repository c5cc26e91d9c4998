"""The edge broker: one or more per LAN, joins its clients with the rest of the overlay."""

from edge_broker.broker import EdgeBroker
from edge_broker.core import EdgeCore

__all__ = ["EdgeBroker", "EdgeCore"]
