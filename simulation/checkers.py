"""What must hold, judged by someone who knows the true time and everything that was published."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator import RecordError, TopicRecord
from coordinator.operations import Create, SetData
from coordinator.records import EpochRecord
from overlay.limits import MILLISECOND_NS
from overlay.qos import TopicQos
from simulation.handovers import Handovers
from simulation.nodes import History, Published, RouterProcess, Subscribed, seconds
from simulation.zookeeper import Tree, Txn

_AGE_ROUNDING_MS = 1e-6


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken."""

    promise: str
    detail: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Excuse:
    """What these clients should have received in this time may be lost beyond its tolerance.

    Whatever was born before its end and entered the overlay after its beginning.
    """

    subscribers: frozenset[str]
    from_ns: int
    until_ns: int
    topics: frozenset[str] | None = None
    """Only those of these topics; all if None."""


@dataclass(slots=True)
class Judgement:
    """What check_messages found, and of how much it could have."""

    violations: list[Violation] = field(default_factory=list)
    owed: int = 0
    """Pairs of a message and a subscription that it should reach."""
    judged: int = 0
    """Those not under an excuse."""


def check_messages(
    history: History,
    qos: Mapping[str, TopicQos],
    lives: Mapping[str, int],
    excuses: Sequence[Excuse],
    handovers: Handovers,
) -> Judgement:
    """Losses against tolerance, duplicates, order, and ages of everything that was received.

    `lives`: which life each client is in; what it did in an earlier one ended with that.
    """
    judgement = Judgement()
    for subscribed in history.subscribed:
        judgement.violations += _check_order(subscribed)
        judgement.violations += _check_ages(subscribed)
        for publisher, published in history.published.items():
            if published.topic == subscribed.topic:
                excused = [
                    item
                    for item in excuses
                    if subscribed.client in item.subscribers
                    and (item.topics is None or published.topic in item.topics)
                ]
                ends = any(item.start != lives[item.client] for item in (published, subscribed))
                counts = [
                    not any(
                        item.from_ns <= handovers.entered_ns(published.client, born_ns)
                        and born_ns <= item.until_ns
                        for item in excused
                    )
                    for born_ns in published.born_ns
                ]
                _check_losses(
                    judgement, subscribed, publisher, published, qos[published.topic], counts, ends=ends
                )
    return judgement


def _check_order(subscribed: Subscribed) -> list[Violation]:
    found: list[Violation] = []
    highest: dict[int, int] = {}
    for message in subscribed.messages:
        before = highest.get(message.publisher, 0)
        if message.sequence <= before:
            what = "duplicate" if message.sequence == before else "order"
            found.append(
                Violation(
                    what,
                    f"{subscribed.client} got {message.sequence} of {subscribed.topic} after {before}, "
                    f"at {seconds(message.at_ns)}",
                )
            )
        highest[message.publisher] = max(before, message.sequence)
    return found


def _check_ages(subscribed: Subscribed) -> list[Violation]:
    found: list[Violation] = []
    for message in subscribed.messages:
        age_ms = (message.at_ns - message.born_ns) / MILLISECOND_NS
        if message.age_bound_ms is not None and message.age_bound_ms < age_ms - _AGE_ROUNDING_MS:
            found.append(
                Violation(
                    "age bound",
                    f"{subscribed.client} was told that {message.sequence} of {subscribed.topic} is at most "
                    f"{message.age_bound_ms:.6f} ms old, it was {age_ms:.6f} at {seconds(message.at_ns)}",
                )
            )
    return found


def _check_losses(
    judgement: Judgement,
    subscribed: Subscribed,
    publisher: int,
    published: Published,
    qos: TopicQos,
    counts: Sequence[bool],
    *,
    ends: bool,
) -> None:
    """No more losses in a row than tolerated, from the first message received or owed on.

    `counts` says of each message whether its loss does.
    """
    if qos.loss_tolerance is None:
        return
    # What was published before is owed to nobody who comes later, even if something of it still came.
    got = sorted(
        {
            item.sequence
            for item in subscribed.messages
            if item.publisher == publisher and item.born_ns >= subscribed.since_ns
        }
    )
    if published.born_ns and published.born_ns[0] >= subscribed.since_ns:
        # A subscriber that came before the first message must have it.
        got = [0, *got]
    if not got:
        return
    # What either side sent or should have received when it died is nobody's promise.
    last = got[-1] if ends else len(published.born_ns)
    first = max(got[0], 1)
    judgement.owed += last - first + 1
    judgement.judged += sum(counts[first - 1 : last])
    for before, after in zip(got, [*got[1:], last + 1], strict=True):
        if sum(counts[before : after - 1]) > qos.loss_tolerance:
            born = published.born_ns[before : after - 1]
            judgement.violations.append(
                Violation(
                    "loss",
                    f"{subscribed.client} missed {before + 1} to {after - 1} of {subscribed.topic} in a row, "
                    f"tolerated {qos.loss_tolerance}; born {seconds(born[0])} to {seconds(born[-1])}",
                )
            )


class LeaderChecker:
    """At most one acting leader: by what routers believe, and by what ZooKeeper has accepted."""

    def __init__(self, chroot: str) -> None:
        self.violations: list[Violation] = []
        self._epoch_path = f"{chroot}/epoch"
        self._topics = f"{chroot}/topics/"
        self._epoch = 0
        self.on_epoch: list[Callable[[], None]] = []
        """Called once when an epoch begins."""
        self._writer: dict[int, int] = {}
        """Session that raised each epoch."""

    def committed(self, txn: Txn, tree: Tree) -> None:
        """A write is about to be applied."""
        for operation in txn.operations:
            if not isinstance(operation, SetData | Create):
                continue
            if operation.path == self._epoch_path:
                epoch = EpochRecord.from_json(operation.data).epoch
                if epoch > self._epoch:
                    self._writer[epoch] = txn.session
                    self._epoch = epoch
                    waiting, self.on_epoch = self.on_epoch, []
                    for call in waiting:
                        call()
            elif isinstance(operation, SetData) and self._is_topic(operation.path):
                self._assigned(txn, tree, operation)

    def _is_topic(self, path: str) -> bool:
        return path.startswith(self._topics) and "/" not in path[len(self._topics) :]

    def _assigned(self, txn: Txn, tree: Tree, operation: SetData) -> None:
        try:
            before = TopicRecord.from_json(tree.nodes[operation.path].data)
            after = TopicRecord.from_json(operation.data)
        except RecordError:
            return
        if (before.primary, before.backup, before.epoch) == (after.primary, after.backup, after.epoch):
            return
        if after.epoch != self._epoch or txn.session != self._writer.get(self._epoch):
            self.violations.append(
                Violation(
                    "fencing",
                    f"the leader of epoch {after.epoch} moved {after.name} in epoch {self._epoch}",
                )
            )

    def look(self, routers: Iterable[RouterProcess], now_ns: int) -> None:
        """Count the routers that would act as leader at this moment."""
        leaders = [
            router.name
            for router in routers
            if router.is_running and router.broker is not None and router.broker.is_leader
        ]
        if len(leaders) > 1:
            self.violations.append(
                Violation("one leader", f"{' and '.join(leaders)} both lead at {seconds(now_ns)}")
            )


def check_copies(routers: Iterable[RouterProcess]) -> list[Violation]:
    """When nothing is on its way, backups hold nothing and primaries wait for nothing."""
    found: list[Violation] = []
    for router in routers:
        if router.broker is not None:
            statistics = router.broker.core.statistics()
            if statistics.copies_kept or statistics.copies_undispatched:
                found.append(
                    Violation(
                        "copies",
                        f"{router.name} keeps {statistics.copies_kept} copies and waits for "
                        f"{statistics.copies_undispatched} although nothing is on its way",
                    )
                )
    return found


def serves_for_others(router: RouterProcess) -> bool:
    """It still serves topics that were taken from it, for a while (routing_broker.broker)."""
    return router.broker is not None and bool(router.broker._leaving)
