"""Earliest deadline first, in time that does not grow with the queue; by urgency when that is not enough.

A calendar of one-millisecond buckets: jobs of the same millisecond stay in the order they came,
and a heap holds only the buckets that exist. Pushing and popping cost O(1) per job and
O(log buckets) per millisecond of deadlines, whatever the number of jobs. First come, first
served is the same calendar with all deadlines equal.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar, cast

from overlay.messages import UNKNOWN_CLOCK_SHIFT

Job = TypeVar("Job")

BUCKET_SHIFT: Final = 20
"""A bucket spans 2^20 ns, about a millisecond."""
BUCKET_NS: Final = 1 << BUCKET_SHIFT
_GRANULES_SHIFT: Final = 4
"""Births are told apart to a sixteenth of the deadline, or to a bucket."""
UNKNOWN_BIRTH: Final = -(2**63)
"""Instead of a time: nobody knows when the message was born."""
_NO_KEY: Final = -(2**63)
_ALL_LEVELS: Final = 2**31
_TAKEN_MOST: Final = 64
"""A bucket has so many places of jobs that have been taken, or as many as jobs wait in it."""


class _Bucket(Generic[Job]):
    """Jobs of one millisecond, first in, first out. There are few in most: a deque would cost more."""

    __slots__ = ("first", "jobs")

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.first = 0
        """Where the next job is; those before it have been taken."""

    def __len__(self) -> int:
        return len(self.jobs) - self.first

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs[self.first :])

    def take(self) -> Job:
        """The next job. There must be one."""
        first = self.first
        job = self.jobs[first]
        self.jobs[first] = cast("Job", None)  # it is not ours to keep
        first += 1
        if first >= _TAKEN_MOST and first * 2 >= len(self.jobs):
            del self.jobs[:first]  # a bucket may never run empty
            first = 0
        self.first = first
        return job


class Calendar(Generic[Job]):
    """Jobs by deadline; ties in the order they were pushed."""

    __slots__ = ("_buckets", "_keys", "_last_bucket", "_last_key", "_size")

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket[Job]] = {}
        self._keys: list[int] = []
        self._size = 0
        # Most pushes go where the last one went.
        self._last_key = _NO_KEY
        self._last_bucket: _Bucket[Job] = _Bucket()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Job]:
        """All jobs, in the order they would be done."""
        for key in sorted(self._keys):
            yield from self._buckets[key]

    def push(self, deadline_ns: int, job: Job) -> None:
        """Add a job that should be done by `deadline_ns`."""
        key = deadline_ns >> BUCKET_SHIFT
        self._size += 1
        if key == self._last_key:
            self._last_bucket.jobs.append(job)
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
            heappush(self._keys, key)
        bucket.jobs.append(job)
        self._last_key = key
        self._last_bucket = bucket

    def first(self) -> Job | None:
        """The job to do next, without taking it; None if there is none."""
        if not self._keys:
            return None
        bucket = self._buckets[self._keys[0]]
        return bucket.jobs[bucket.first]

    def next_deadline_ns(self) -> int | None:
        """The deadline of the next job, rounded down to its bucket."""
        return self._keys[0] << BUCKET_SHIFT if self._keys else None

    def pop(self) -> Job:
        """Take the job to do next. There must be one."""
        key = self._keys[0]
        bucket = self._buckets[key]
        job = bucket.take()
        self._size -= 1
        if not len(bucket):
            heappop(self._keys)
            del self._buckets[key]
            if key == self._last_key:
                self._last_key = _NO_KEY
        return job

    def clear(self) -> None:
        """Forget all jobs."""
        self._buckets.clear()
        self._keys.clear()
        self._size = 0
        self._last_key = _NO_KEY

    def validate(self) -> None:
        """Assert the invariants."""
        assert sorted(self._keys) == sorted(self._buckets)
        assert all(len(bucket) for bucket in self._buckets.values())
        assert self._size == sum(map(len, self._buckets.values()))
        assert self._last_key == _NO_KEY or self._buckets.get(self._last_key) is self._last_bucket


class Lanes(Generic[Job]):
    """Jobs by deadline and by level: 0 is the most urgent level.

    As long as all can be done in time, the earliest deadline comes first, whatever its level. Once that one
    is late, there is more to do than can be done in time, and the earliest deadline first would make all of
    them late. Then the most urgent level comes first, by deadline within it.
    """

    __slots__ = ("_lanes", "_levels", "_size")

    def __init__(self) -> None:
        self._lanes: dict[int, Calendar[Job]] = {}
        self._levels: list[int] = []
        """Those that have been used, the most urgent first."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Job]:
        """All jobs, by level and deadline."""
        for level in self._levels:
            yield from self._lanes[level]

    def push(self, level: int, deadline_ns: int, job: Job) -> None:
        """Add a job that should be done by `deadline_ns`."""
        lane = self._lanes.get(level)
        if lane is None:
            lane = self._lanes[level] = Calendar()
            self._levels = sorted(self._lanes)
        lane.push(deadline_ns, job)
        self._size += 1

    def choose(self, now_ns: int, levels: int) -> Calendar[Job] | None:
        """Where the next job is, among this many levels; None if there is none. To be taken by `pop`."""
        chosen: Calendar[Job] | None = None
        most_urgent: Calendar[Job] | None = None
        earliest_ns = 0
        for level in self._levels:
            lane = self._lanes[level]
            if level >= levels or not len(lane):
                continue
            due_ns = lane.next_deadline_ns()
            assert due_ns is not None
            if most_urgent is None:
                most_urgent = lane
            if chosen is None or due_ns < earliest_ns:
                chosen = lane
                earliest_ns = due_ns
        return most_urgent if earliest_ns + BUCKET_NS <= now_ns else chosen

    def pop(self, lane: Calendar[Job]) -> Job:
        """Take the next job of a lane that was chosen."""
        self._size -= 1
        return lane.pop()

    def pop_earliest(self) -> Job:
        """Take the job that is due first, whatever its level. There must be one."""
        lane = self.choose(_NO_KEY, _ALL_LEVELS)
        assert lane is not None
        return self.pop(lane)

    def next_deadline_ns(self) -> int | None:
        """The earliest deadline, rounded down to its bucket."""
        lane = self.choose(_NO_KEY, _ALL_LEVELS)
        return lane.next_deadline_ns() if lane is not None else None

    def clear(self) -> None:
        """Forget all jobs."""
        self._lanes.clear()
        self._levels = []
        self._size = 0

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._levels == sorted(self._lanes)
        assert self._size == sum(len(lane) for lane in self._lanes.values())
        for lane in self._lanes.values():
            lane.validate()


def granule_ns(deadline_ns: int) -> int:
    """How far apart births must be to count as different, if messages are due so long after them.

    A power of two, so that where granules begin is a matter of the origin's clock alone. A message is
    treated as due earlier than it is by less than this, and with neighbours of its granule it costs
    one job for all. A message due in a second need not be told from one born twenty milliseconds before.
    """
    return 1 << max(BUCKET_SHIFT, (deadline_ns >> _GRANULES_SHIFT).bit_length() - 1)


def granule_born_ns(born_ns: int, clock_shift_ns: int, granule_ns: int) -> int:
    """When the granule began that a message was born in, on our clock; UNKNOWN_BIRTH if nobody knows.

    Messages are due so long after this, not after their own birth: a run is queued with the deadline of
    its first message, and may begin with one that is older than the next by another publisher. Only if
    all messages of a granule are due at the same time does a publisher's later one never come before.
    """
    if not born_ns or clock_shift_ns == UNKNOWN_CLOCK_SHIFT:
        return UNKNOWN_BIRTH
    return (born_ns & -granule_ns) - clock_shift_ns


class Unsure:
    """How long messages of one deadline must queue behind some whose age was not known.

    Ages become known with the first heartbeats of a link. A message that is known to be old would
    overtake those of its own publisher that were taken for new. All routes with the same deadline
    share this, so that it outlives a route that is made anew.
    """

    __slots__ = ("until_ns",)

    def __init__(self, until_ns: int = 0) -> None:
        self.until_ns = until_ns
        """Latest deadline of a run whose age was not known: none of its successors may be due before."""
