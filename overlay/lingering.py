"""What has just gone may be back in a moment: keep it a little longer.

When a broker's ZooKeeper session expires, everything it had registered vanishes and comes back a
moment later, while the broker itself works on. Routes built from registrations must not follow
such a blink, or messages fall into it. Who cannot ask ZooKeeper does not hear who is back: for what is
gone, time passes only while ZooKeeper answers.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Lingering(Generic[Item]):
    """A set whose items stay for a while after they are gone."""

    __slots__ = ("_gone", "_linger_ns", "_present")

    def __init__(self, linger_ns: int) -> None:
        self._linger_ns = linger_ns
        self._present: frozenset[Item] = frozenset()
        self._gone: dict[Item, int] = {}

    def update(self, present: Iterable[Item], now_ns: int) -> None:
        """These are there now."""
        before = self._present
        self._present = frozenset(present)
        for item in before - self._present:
            self._gone[item] = now_ns
        for item in self._present & self._gone.keys():
            del self._gone[item]

    def expect(self, item: Item, now_ns: int) -> None:
        """This will be there in a moment; if it does not come, it is gone as if it had just left."""
        if item not in self._present:
            self._gone[item] = now_ns

    def expire(self, until_ns: int, heard_since_ns: int = 0) -> bool:
        """Let go of what has been gone for long enough; says whether something was.

        It would have been heard until `until_ns`, without a break since `heard_since_ns`, if it were back.
        """
        if not self._gone:
            return False
        late = [
            item
            for item, gone_ns in self._gone.items()
            if until_ns - max(gone_ns, heard_since_ns) >= self._linger_ns
        ]
        for item in late:
            del self._gone[item]
        return bool(late)

    @property
    def is_settled(self) -> bool:
        """Nothing is kept that has gone."""
        return not self._gone

    def __iter__(self) -> Iterator[Item]:
        yield from self._present
        yield from self._gone
