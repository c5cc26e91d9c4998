"""Which routing brokers serve a broker's topics: counted as topics come and go, for there are thousands."""

from collections import Counter
from collections.abc import Set as AbstractSet


class Partners:
    """The routing brokers, others than ourselves, that serve our topics."""

    def __init__(self, router: str = "") -> None:
        """`router` is our own name, if we are one."""
        self._router = router
        self._roles: dict[str, tuple[str | None, str | None]] = {}
        """Primary and backup by topic."""
        self._topics: Counter[str] = Counter()
        """How many topics are shared with whom."""
        self._primaries = 0

    @property
    def names(self) -> AbstractSet[str]:
        """The other routing brokers."""
        return self._topics.keys()

    @property
    def primaries(self) -> int:
        """Of how many topics this broker is the primary."""
        return self._primaries

    def set_topic(self, topic: str, primary: str | None, backup: str | None) -> None:
        """Who serves a topic of ours."""
        self.forget_topic(topic)
        self._roles[topic] = primary, backup
        self._primaries += primary == self._router
        self._topics.update(self._others(primary, backup))

    def forget_topic(self, topic: str) -> None:
        """The topic is ours no longer."""
        roles = self._roles.pop(topic, None)
        if roles is None:
            return
        self._primaries -= roles[0] == self._router
        for name in self._others(*roles):
            self._topics[name] -= 1
            if not self._topics[name]:
                del self._topics[name]

    def validate(self) -> None:
        """Assert the invariants; tests call this after every step."""
        assert self._topics == Counter(
            name for roles in self._roles.values() for name in self._others(*roles)
        )
        assert all(count > 0 for count in self._topics.values())
        assert self._primaries == sum(primary == self._router for primary, _ in self._roles.values())

    def _others(self, *roles: str | None) -> list[str]:
        return [name for name in roles if name is not None and name != self._router]
