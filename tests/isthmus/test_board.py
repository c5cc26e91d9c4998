"""The board of `isthmus watch`: what an operator sees, so far and in the end."""

from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console

from isthmus.board import ROWS, Board, line

START = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def topic(name: str, window: int, *, p99_ms: float | None = 5.0, missed: int = 0) -> dict[str, Any]:
    return {
        "window_start": START + timedelta(seconds=10 * window),
        "topic": name,
        "deliveries": 200,
        "p50_ms": 1.0,
        "p99_ms": p99_ms,
        "missed": missed,
    }


def text_of(board: Board) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(board.render())
    return captured.get()


def test_before_anything_came_it_says_what_it_waits_for() -> None:
    assert "nothing has come yet" in text_of(Board("watch", 10, 20))


def test_a_topic_is_shown_so_far_and_then_final() -> None:
    board = Board("watch", 10, 20)
    board.add("topics", [topic("valve", 0), topic("valve", 1)], final=False)
    shown = text_of(board)
    assert "topics, 12:00:00 UTC and 10 s on, so far" in shown
    assert "valve" in shown and "20" in shown
    assert "links follow" in shown
    board.add("topics", [topic("valve", 0, missed=7)], final=True)
    board.add("topics", [topic("valve", 0, missed=3)], final=False)  # too late: it was final
    shown = text_of(board)
    assert "so far" not in shown and "7" in shown


def test_windows_that_some_nodes_have_not_told_of_are_not_shown_once_there_are_others() -> None:
    board = Board("watch", 10, 20)
    for newest, shown in ((0, "12:00:00"), (1, "12:00:00"), (2, "12:00:00"), (3, "12:00:10")):
        board.add("topics", [topic("valve", newest)], final=False)
        assert f"topics, {shown} UTC and 10 s on, so far" in text_of(board)


def test_the_worst_come_first_and_the_rest_is_counted() -> None:
    board = Board("watch", 10, 20)
    rows = [topic(f"t{number:02}", 0, p99_ms=float(number)) for number in range(ROWS + 3)]
    rows.append(topic("missing", 0, p99_ms=0.1, missed=1))
    board.add("topics", rows, final=True)
    lines = text_of(board).splitlines()
    names = [row.split("│")[1].strip() for row in lines if row.startswith("│")]
    assert names[:2] == ["missing", f"t{ROWS + 2:02}"] and len(names) == ROWS
    assert any("4 more, all better" in row for row in lines)


def test_a_line_is_as_high_as_its_values() -> None:
    assert line([1.0, None, 8.0, 4.0]) == "▂ █▅"
    assert line([0.0, 0.0]) == "▁▁"
    assert line([]) == ""
