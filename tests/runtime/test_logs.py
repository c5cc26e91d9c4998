"""Structured logs: one line per event, whatever is in it."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.logs import JsonFormatter, TextFormatter, configure_logging


def _record(message: str = "link up", **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("isthmus.hub", logging.INFO, __file__, 1, message, (), None)
    record.created = 1_700_000_000.25
    for name, value in extra.items():
        setattr(record, name, value)
    return record


def _failed_record() -> logging.LogRecord:
    try:
        raise ValueError("broken")
    except ValueError:
        return logging.LogRecord("isthmus.hub", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())


@pytest.fixture
def _root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    noisy = [logging.getLogger(name) for name in ("kazoo", "aiohttp.access", "asyncio")]
    before = (root.handlers[:], root.level, [logger.level for logger in noisy])
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    for logger, level in zip(noisy, before[2], strict=True):
        logger.setLevel(level)


def test_text_has_time_level_node_logger_event_and_pairs() -> None:
    line = TextFormatter("edge-a").format(_record(peer="r1", count=3))
    assert line == "2023-11-14T22:13:20.250+00:00 INFO    edge-a hub: link up peer=r1 count=3"


def test_json_has_the_same_by_name() -> None:
    content = json.loads(JsonFormatter("edge-a").format(_record(peer="r1", count=3, names={"x"})))
    assert content == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "info",
        "node": "edge-a",
        "logger": "isthmus.hub",
        "event": "link up",
        "peer": "r1",
        "count": 3,
        "names": "{'x'}",
    }


def test_a_traceback_follows_the_line_of_text_and_is_a_field_of_json() -> None:
    first, *rest = TextFormatter("n").format(_failed_record()).splitlines()
    assert first.endswith("hub: failed")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: broken"
    assert "ValueError: broken" in json.loads(JsonFormatter("n").format(_failed_record()))["exception"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("two words", '"two words"'),
        ("", '""'),
        ("x\n2023 ERROR forged", '"x\\n2023 ERROR forged"'),
        (None, "None"),
        (1.5, "1.5"),
    ],
)
def test_a_value_that_would_not_end_where_it_seems_to_is_quoted(value: object, shown: str) -> None:
    assert TextFormatter("n").format(_record(detail=value)).endswith(f" detail={shown}")


@given(st.text())
def test_an_event_is_one_line_whatever_a_peer_says(detail: str) -> None:
    for formatter in (TextFormatter("n"), JsonFormatter("n")):
        assert len(formatter.format(_record(detail=detail)).splitlines()) == 1
    assert json.loads(JsonFormatter("n").format(_record(detail=detail)))["detail"] == detail


@pytest.mark.usefixtures("_root_logger_restored")
@pytest.mark.parametrize("style", ["text", "json"])
def test_configured_logs_go_to_standard_error_from_the_level_on(
    capsys: pytest.CaptureFixture[str], style: str
) -> None:
    configure_logging("edge-a", "warning", style)
    logging.getLogger("isthmus.hub").info("not heard")
    logging.getLogger("isthmus.hub").warning("heard", extra={"peer": "r1"})
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    if style == "json":
        assert json.loads(line)["event"] == "heard"
    else:
        assert line.endswith("WARNING edge-a hub: heard peer=r1")


@pytest.mark.usefixtures("_root_logger_restored")
def test_noisy_libraries_are_quiet_at_info_and_even_quieter_at_error() -> None:
    configure_logging("n", "info")
    assert not logging.getLogger("kazoo").isEnabledFor(logging.INFO)
    assert logging.getLogger("isthmus.hub").isEnabledFor(logging.INFO)
    configure_logging("n", "error")
    assert not logging.getLogger("kazoo").isEnabledFor(logging.WARNING)
    assert len(logging.getLogger().handlers) == 1
