"""Four-letter words: against the real server, and against sockets that misbehave."""

import socket
from collections.abc import Awaitable, Callable

import pytest

from coordinator.embedded import EmbeddedZooKeeper
from coordinator.errors import FourLetterError
from coordinator.fourletter import four_letter, four_letter_sync, parse_fields, parse_mntr

Ask = Callable[[str, int, str, float], Awaitable[str]]


async def _ask_sync(host: str, port: int, word: str, timeout_s: float) -> str:
    return four_letter_sync(host, port, word, timeout_s)


both = pytest.mark.parametrize("ask", [four_letter, _ask_sync], ids=["async", "sync"])


@pytest.mark.integration
@both
async def test_real_server_answers(zookeeper: EmbeddedZooKeeper, ask: Ask) -> None:
    port = zookeeper.members[0].client_port
    assert await ask("127.0.0.1", port, "ruok", 5) == "imok"
    assert parse_fields(await ask("127.0.0.1", port, "srvr", 5), ": ")["Mode"] == "standalone"


@pytest.mark.integration
async def test_mntr_of_the_real_server(zookeeper: EmbeddedZooKeeper) -> None:
    statistics = parse_mntr(await four_letter("127.0.0.1", zookeeper.members[0].client_port, "mntr", 5))
    assert statistics["zk_server_state"] == "standalone"
    assert str(statistics["zk_version"]).startswith("3.")
    for name in ("zk_avg_latency", "zk_max_latency", "zk_znode_count", "zk_watch_count"):
        assert isinstance(statistics[name], float), name
    assert float(statistics["zk_znode_count"]) >= 1


@pytest.mark.integration
@pytest.mark.parametrize("word", ["dump", "wchp", "wchc"])
async def test_names_of_znodes_are_told_to_nobody(zookeeper: EmbeddedZooKeeper, word: str) -> None:
    with pytest.raises(FourLetterError, match=f"refuses {word}"):
        await four_letter("127.0.0.1", zookeeper.members[0].client_port, word, 5)


def test_parse_mntr_keeps_text_and_skips_headings() -> None:
    assert parse_mntr("heading\nzk_version\t3.9.5-1, built\nzk_avg_latency\t0.25\nzk_watch_count\t12\n") == {
        "zk_version": "3.9.5-1, built",
        "zk_avg_latency": 0.25,
        "zk_watch_count": 12.0,
    }


@pytest.mark.parametrize("text", ["This ZooKeeper instance is not currently serving requests\n", ""])
def test_parse_mntr_of_a_server_that_does_not_serve(text: str) -> None:
    with pytest.raises(FourLetterError, match="not serving"):
        parse_mntr(text)


@both
async def test_nobody_listens(ask: Ask) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with pytest.raises(FourLetterError, match="cannot be asked ruok"):
            await ask("127.0.0.1", reserved.getsockname()[1], "ruok", 5)


@both
async def test_silent_server_times_out(ask: Ask) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(FourLetterError, match=r"within 0\.2 s"),
    ):
        await ask("127.0.0.1", silent.getsockname()[1], "ruok", 0.2)


@both
@pytest.mark.parametrize("word", ["", "ruo", "ruok!", "r-ok", "ruök"])
async def test_not_a_word(ask: Ask, word: str) -> None:
    with pytest.raises(FourLetterError, match="no four-letter word"):
        await ask("127.0.0.1", 1, word, 1)
