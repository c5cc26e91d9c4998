"""What an egress remembers of a publisher, against a model that remembers everything."""

from hypothesis import given
from hypothesis import strategies as st

from overlay.history import Histories, History, Verdict
from overlay.limits import MISSING_SEQUENCES_MAX

# Mostly small steps forwards and backwards, sometimes a gap larger than what is remembered.
_steps = st.lists(
    st.integers(-6, 8) | st.sampled_from([-300, MISSING_SEQUENCES_MAX + 40, 2 * MISSING_SEQUENCES_MAX]),
    max_size=60,
)


class Model:
    """Remembers every sequence; only the latest missing ones count as late when they come."""

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.missing: list[int] = []
        self.gaps: list[int] = []

    def judge(self, sequence: int) -> Verdict:
        if not self.delivered or sequence > self.delivered[-1]:
            if self.delivered and sequence > self.delivered[-1] + 1:
                self.gaps.append(sequence - self.delivered[-1] - 1)
                self.missing += range(self.delivered[-1] + 1, sequence)
                self.missing = self.missing[-MISSING_SEQUENCES_MAX:]
            self.delivered.append(sequence)
            return Verdict.NEW
        if sequence in self.missing:
            self.missing.remove(sequence)
            return Verdict.LATE
        return Verdict.DUPLICATE


@given(st.integers(1, 1000), _steps)
def test_history_judges_like_a_model_that_remembers_everything(first: int, steps: list[int]) -> None:
    history = History()
    model = Model()
    sequence = first
    assert history.judge(sequence) is model.judge(sequence)
    for step in steps:
        sequence = max(1, model.delivered[-1] + step)
        assert history.judge(sequence) is model.judge(sequence)
        history.validate()
        assert history.highest == model.delivered[-1]
        assert history.lost == sum(model.gaps)
        assert history.longest_gap == max(model.gaps, default=0)


@given(st.lists(st.integers(1, 40), max_size=80))
def test_what_is_delivered_only_rises_whatever_arrives(sequences: list[int]) -> None:
    history = History()
    delivered = [sequence for sequence in sequences if history.judge(sequence) is Verdict.NEW]
    assert delivered == sorted(set(delivered))


@given(st.lists(st.integers(1, 30), max_size=60))
def test_every_sequence_is_new_or_late_at_most_once(sequences: list[int]) -> None:
    history = History()
    counted = [sequence for sequence in sequences if history.judge(sequence) is not Verdict.DUPLICATE]
    assert len(counted) == len(set(counted))


def test_what_came_before_the_first_message_is_no_loss() -> None:
    history = History()
    assert history.judge(1000) is Verdict.NEW
    assert history.lost == 0
    assert history.judge(999) is Verdict.DUPLICATE


def test_a_skipped_message_is_late_once_and_then_a_duplicate() -> None:
    history = History()
    assert [history.judge(sequence) for sequence in (1, 3, 2, 2, 3)] == [
        Verdict.NEW,
        Verdict.NEW,
        Verdict.LATE,
        Verdict.DUPLICATE,
        Verdict.DUPLICATE,
    ]
    assert (history.lost, history.longest_gap) == (1, 1)


def test_a_gap_as_wide_as_the_sequence_space_is_remembered_at_its_end_only() -> None:
    history = History()
    history.judge(1)
    assert history.judge(2**64 - 1) is Verdict.NEW
    history.validate()
    assert history.lost == 2**64 - 3
    assert history.judge(2**64 - 1 - MISSING_SEQUENCES_MAX) is Verdict.LATE
    assert history.judge(2**64 - 2 - MISSING_SEQUENCES_MAX) is Verdict.DUPLICATE


def test_a_sequence_no_publisher_gives_changes_nothing() -> None:
    history = History()
    for sequence in (0, -1, -(2**63)):
        assert history.judge(sequence) is Verdict.DUPLICATE
    assert history.judge(5) is Verdict.NEW
    assert history.judge(-5) is Verdict.DUPLICATE
    assert (history.highest, history.lost) == (5, 0)
    history.validate()


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=120),
    st.integers(1, 5),
)
def test_publishers_that_come_and_go_are_forgotten_but_for_what_they_lost(
    heard: list[tuple[int, int]], most: int
) -> None:
    histories, lost, longest_gap = Histories(most), 0, 0
    lately: list[int] = []
    for publisher, sequence in heard:
        history = histories.of(publisher)
        before = history.lost
        history.judge(sequence)
        lost += history.lost - before
        longest_gap = max(longest_gap, history.longest_gap)
        lately = [publisher, *(other for other in lately if other != publisher)][:most]
        kept = dict(histories)
        assert kept[publisher] is histories.of(publisher) is history
        assert set(lately) <= kept.keys()
        assert len(kept) <= 2 * most
        assert (histories.lost, histories.longest_gap) == (lost, longest_gap)
