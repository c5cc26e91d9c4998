"""Earliest deadline first, in time that does not grow with the queue.

A calendar of one-millisecond buckets: jobs of the same millisecond stay in the order they came,
and a heap holds only the buckets that exist. Pushing and popping cost O(1) per job and
O(log buckets) per millisecond of deadlines, whatever the number of jobs. First come, first
served is the same calendar with all deadlines equal.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar

Job = TypeVar("Job")

BUCKET_SHIFT: Final = 20
"""A bucket spans 2^20 ns, about a millisecond."""
_NO_KEY: Final = -(2**63)


class Calendar(Generic[Job]):
    """Jobs by deadline; ties in the order they were pushed."""

    __slots__ = ("_buckets", "_keys", "_last_bucket", "_last_key", "_size")

    def __init__(self) -> None:
        self._buckets: dict[int, deque[Job]] = {}
        self._keys: list[int] = []
        self._size = 0
        # Most pushes go where the last one went.
        self._last_key = _NO_KEY
        self._last_bucket: deque[Job] = deque()

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
            self._last_bucket.append(job)
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = deque()
            heappush(self._keys, key)
        bucket.append(job)
        self._last_key = key
        self._last_bucket = bucket

    def first(self) -> Job | None:
        """The job to do next, without taking it; None if there is none."""
        return self._buckets[self._keys[0]][0] if self._keys else None

    def next_deadline_ns(self) -> int | None:
        """The deadline of the next job, rounded down to its bucket."""
        return self._keys[0] << BUCKET_SHIFT if self._keys else None

    def pop(self) -> Job:
        """Take the job to do next. There must be one."""
        key = self._keys[0]
        bucket = self._buckets[key]
        job = bucket.popleft()
        self._size -= 1
        if not bucket:
            heappop(self._keys)
            del self._buckets[key]
            if key == self._last_key:
                self._last_key = _NO_KEY
                self._last_bucket = deque()
        return job

    def clear(self) -> None:
        """Forget all jobs."""
        self._buckets.clear()
        self._keys.clear()
        self._size = 0
        self._last_key = _NO_KEY
        self._last_bucket = deque()

    def validate(self) -> None:
        """Assert the invariants."""
        assert sorted(self._keys) == sorted(self._buckets)
        assert all(self._buckets.values())
        assert self._size == sum(map(len, self._buckets.values()))
        assert self._last_key == _NO_KEY or self._buckets.get(self._last_key) is self._last_bucket


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
