"""What a subscriber of FRAME's experiment keeps of the messages it gets: losses, order, latencies.

Memory does not grow with the run: per topic the sequences' state, per category a histogram, and
the full course of a few topics for the plot.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

BUCKET_NS: Final = 1 << 17
"""Width of a bucket of the latency histogram, about 0.13 ms."""
BUCKETS: Final = 1 << 14
"""The last bucket, at about 2.1 s, holds all that is above."""
PEAK_WINDOW_NS: Final = 20_000_000
SLOW_WINDOW_NS: Final = 30_000_000
"""Windows with a peak above this are told one by one, so that late messages can be explained."""
_UNHEARD: Final = -1
MISSING_MAX: Final = 100_000
"""Missing sequences remembered, to tell what comes late from what comes twice."""
GAPS_MAX: Final = 10_000
COURSE_MAX: Final = 100_000
"""Messages kept per topic whose full course is wanted."""


class Record:
    """Everything about the messages of the measured time; those born before or after only count for order."""

    def __init__(
        self, categories: Mapping[int, int], deadlines_ns: Sequence[int], courses: Iterable[int]
    ) -> None:
        """The category of each topic id, the deadline of each category, the topic ids to keep in full."""
        # Ids are given out one after the other, so lists are small and faster than maps.
        topics = max(categories) + 1
        kinds = len(deadlines_ns)
        self.start_ns = 2**63
        self.end_ns = 2**63
        self.topic_ids = tuple(categories)
        self.categories = [categories.get(topic, 0) for topic in range(topics)]
        self.deadlines_ns = [deadlines_ns[category] for category in self.categories]
        self.latest = [_UNHEARD] * topics
        self.longest_run = [0] * topics
        self.lost = 0
        self.gaps: list[tuple[int, int, int]] = []
        """The first losses: when they were noticed, the topic id, how many messages."""
        self.duplicates = 0
        self.reordered = 0
        self.unheard = len(categories)
        """Topics of which nothing has come yet."""
        self.late = [0] * kinds
        self.histograms = [[0] * BUCKETS for _ in range(kinds)]
        self.peaks: list[tuple[int, list[int]]] = []
        """Highest latency per category of what came in a window of time; windows by their end."""
        self.courses = {topic: (array("q"), array("q")) for topic in courses}
        """Of some topics: when each message was sent, and its latency."""
        self._window_end_ns = 0
        self._window = [0] * kinds
        self._missing: dict[int, set[int]] = {}
        self._missing_total = 0

    def measure(self, start_ns: int, end_ns: int) -> None:
        """Count what is sent from `start_ns` until before `end_ns`."""
        self.start_ns = start_ns
        self.end_ns = end_ns

    def take(self, messages: Iterable[tuple[int, int, int]], now_ns: int) -> None:
        """Messages arrive together: topic id, sequence, time of sending."""
        if now_ns >= self._window_end_ns:
            self._next_window(now_ns)
        latest = self.latest
        categories = self.categories
        deadlines_ns = self.deadlines_ns
        histograms = self.histograms
        window = self._window
        start_ns = self.start_ns
        end_ns = self.end_ns
        courses = self.courses
        for topic, sequence, sent_ns in messages:
            if sequence == latest[topic] + 1:
                latest[topic] = sequence
            elif not self._take_irregular(topic, sequence, now_ns):
                continue
            if start_ns <= sent_ns < end_ns:
                latency_ns = now_ns - sent_ns
                category = categories[topic]
                if latency_ns > deadlines_ns[topic]:
                    self.late[category] += 1
                window[category] = max(window[category], latency_ns)
                bucket = latency_ns >> 17
                histograms[category][bucket if bucket < BUCKETS else -1] += 1
                if topic in courses:
                    self._keep(topic, sent_ns, latency_ns)

    def finish(self, last_sent: Mapping[int, int], now_ns: int) -> None:
        """The run is over; `last_sent` is each topic's last sequence of the measured time."""
        self._next_window(now_ns)
        for topic, sequence in last_sent.items():
            if sequence > self.latest[topic]:
                self._lose(topic, sequence - self.latest[topic], now_ns)

    def delivered(self, category: int) -> int:
        """Distinct messages of the measured time."""
        return sum(self.histograms[category])

    def quantile_ms(self, category: int, share: float) -> float:
        """The latency that this share of a category's messages kept below; rounded up to a bucket."""
        histogram = self.histograms[category]
        wanted = share * sum(histogram)
        seen = 0
        for bucket, count in enumerate(histogram):
            seen += count
            if seen >= wanted:
                return (bucket + 1) * BUCKET_NS / 1e6
        return 0.0

    def peak_ms(self, category: int, since_ns: int) -> float:
        """The highest latency of what arrived since then (up to a window before)."""
        return max((peaks[category] for end_ns, peaks in self.peaks if end_ns > since_ns), default=0) / 1e6

    def slow_windows(self, above_ns: int) -> list[tuple[int, list[float]]]:
        """When a message took longer than this: ends of windows, and the peaks of all categories in ms."""
        return [
            (end_ns, [round(peak / 1e6, 2) for peak in peaks])
            for end_ns, peaks in self.peaks
            if max(peaks) > above_ns
        ]

    def to_result(self, crash_ns: int | None) -> dict[str, Any]:
        """All of it, as JSON has it."""
        kinds = range(len(self.late))
        return {
            "lost": self.lost,
            "gaps": self.gaps,
            "duplicates": self.duplicates,
            "reordered": self.reordered,
            "longest_run": {str(topic): self.longest_run[topic] for topic in self.topic_ids},
            "delivered": [self.delivered(kind) for kind in kinds],
            "late": self.late,
            "p50_ms": [self.quantile_ms(kind, 0.5) for kind in kinds],
            "p99_ms": [self.quantile_ms(kind, 0.99) for kind in kinds],
            "p999_ms": [self.quantile_ms(kind, 0.999) for kind in kinds],
            "peak_ms": [self.peak_ms(kind, self.start_ns) for kind in kinds],
            "peak_after_crash_ms": None
            if crash_ns is None
            else [self.peak_ms(kind, crash_ns) for kind in kinds],
            "slow_windows": self.slow_windows(SLOW_WINDOW_NS),
            "courses": {
                str(topic): {"sent_ns": sent.tolist(), "latency_ns": latency.tolist()}
                for topic, (sent, latency) in self.courses.items()
            },
        }

    def _take_irregular(self, topic: int, sequence: int, now_ns: int) -> bool:
        """A sequence that is not the next one; says whether the message is new."""
        latest = self.latest[topic]
        if latest == _UNHEARD:
            self.unheard -= 1
            self.latest[topic] = sequence
            return True
        if sequence > latest:
            if now_ns >= self.start_ns:
                self._lose(topic, sequence - latest - 1, now_ns)
                if self._missing_total < MISSING_MAX:
                    missing = range(latest + 1, sequence)
                    self._missing.setdefault(topic, set()).update(missing)
                    self._missing_total += len(missing)
            self.latest[topic] = sequence
            return True
        if sequence in self._missing.get(topic, ()):
            self.reordered += 1
        else:
            self.duplicates += 1
        return False

    def _lose(self, topic: int, run: int, now_ns: int) -> None:
        self.lost += run
        if len(self.gaps) < GAPS_MAX:
            self.gaps.append((now_ns, topic, run))
        self.longest_run[topic] = max(self.longest_run[topic], run)

    def _next_window(self, now_ns: int) -> None:
        if any(self._window):
            self.peaks.append((self._window_end_ns, self._window))
        self._window = [0] * len(self._window)
        self._window_end_ns = now_ns + PEAK_WINDOW_NS

    def _keep(self, topic: int, sent_ns: int, latency_ns: int) -> None:
        sent, latencies = self.courses[topic]
        if len(sent) < COURSE_MAX:
            sent.append(sent_ns)
            latencies.append(latency_ns)
