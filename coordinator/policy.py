"""Load policies: what one topic costs a router, and when reported loads can be trusted.

The planner in `assignment` does the rest, so that a policy is a few lines.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from coordinator.errors import UnknownPolicyError
from coordinator.records import RouterRecord


class LoadPolicy(Protocol):
    """How load is measured. The load of a router is what its topics cost, divided by its capacity."""

    @property
    def name(self) -> str:
        """How a configuration names this policy."""

    @property
    def tolerance(self) -> float:
        """A topic is moved only if that lowers the higher of two loads by more than this share."""

    def topic_costs(self, routers: Mapping[str, RouterRecord]) -> Mapping[str, float]:
        """What one topic costs on each router; above 0."""

    def trusts(self, router: RouterRecord, primaries: int) -> bool:
        """Whether what `router` reports is about the `primaries` topics it serves now."""


class FewestTopics:
    """PubSubCoord's policy: a router is loaded by the number of its topics."""

    name: Final = "fewest-topics"
    tolerance: Final = 0.0

    def topic_costs(self, routers: Mapping[str, RouterRecord]) -> Mapping[str, float]:
        """All topics cost the same."""
        return dict.fromkeys(routers, 1.0)

    def trusts(self, router: RouterRecord, primaries: int) -> bool:
        """The count is our own."""
        return True


class MessageRate:
    """A router is loaded by the messages it reports per second, spread evenly over its topics."""

    name: Final = "message-rate"
    tolerance: Final = 0.2
    _LEAST_SHARE: Final = 0.05
    """An idle topic costs this share of an average one, so that idle topics spread as well."""

    def topic_costs(self, routers: Mapping[str, RouterRecord]) -> Mapping[str, float]:
        """The rate per topic of each router; where nothing is known, the average."""
        rate = sum(router.messages_per_s for router in routers.values())
        topics = sum(router.topics for router in routers.values())
        if rate <= 0 or topics <= 0:
            return dict.fromkeys(routers, 1.0)
        average = rate / topics
        return {
            name: max(router.messages_per_s / router.topics, self._LEAST_SHARE * average)
            if router.topics > 0
            else average
            for name, router in routers.items()
        }

    def trusts(self, router: RouterRecord, primaries: int) -> bool:
        """A rate that was measured over other topics says nothing: wait for the next report.

        Without this, moves made on an old report would be made again on the same old report.
        """
        return router.topics == primaries


POLICIES: Final[tuple[LoadPolicy, ...]] = (FewestTopics(), MessageRate())


def policy_by_name(name: str) -> LoadPolicy:
    """The policy a configuration names."""
    for policy in POLICIES:
        if policy.name == name:
            return policy
    known = ", ".join(policy.name for policy in POLICIES)
    raise UnknownPolicyError(f"load policy is {name!r}: use one of {known}")
