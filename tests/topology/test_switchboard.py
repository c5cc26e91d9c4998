"""Lines of the switchboard: relayed to where they lead, cut and healed one by one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from overlay.locator import Locator
from topology.switchboard import Switchboard

TIMEOUT_S = 5.0
SHORT_S = 0.15
"""Long enough for something that must not come to come."""


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def board() -> AsyncIterator[Switchboard]:
    switchboard = Switchboard("127.0.0.1")
    yield switchboard
    await switchboard.close()


async def _dial(
    locator: str, through: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = Locator.parse(through or locator)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    if through is not None:
        writer.write(f"CONNECT {locator} HTTP/1.1\r\n\r\n".encode())
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
    return reader, writer


async def _answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"x")
    assert await asyncio.wait_for(reader.readexactly(1), TIMEOUT_S) == b"x"


async def _is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"x")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(1), SHORT_S)


async def test_a_line_with_a_target_leads_there_and_can_be_cut(board: Switchboard, echo: str) -> None:
    line = (await board.obey({"command": "open", "line": "a zookeeper-1", "target": echo}))["locator"]
    other = (await board.obey({"command": "open", "line": "b zookeeper-1", "target": echo}))["locator"]
    mine, theirs = await _dial(line), await _dial(other)
    await _answers(*mine)
    await board.obey({"command": "cut", "line": "a zookeeper-1"})
    await _is_silent(*mine)
    await _answers(*theirs)
    await board.obey({"command": "heal", "line": "a zookeeper-1"})
    assert await asyncio.wait_for(mine[0].readexactly(1), TIMEOUT_S) == b"x", "what waited comes through"
    for _, writer in (mine, theirs):
        writer.close()
        await writer.wait_closed()


async def test_a_broker_is_cut_off_from_one_other_only(board: Switchboard, echo: str) -> None:
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as server:
        second = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        proxy = (await board.obey({"command": "open", "line": "router-1"}))["locator"]
        one, other = await _dial(echo, proxy), await _dial(second, proxy)
        await board.obey({"command": "cut", "line": "router-1", "target": echo})
        await _is_silent(*one)
        await _answers(*other)
        # A new connection is not answered either.
        dialling = asyncio.create_task(_dial(echo, proxy))
        await asyncio.wait({dialling}, timeout=SHORT_S)
        assert not dialling.done()
        await board.obey({"command": "heal", "line": "router-1", "target": echo})
        again = await asyncio.wait_for(dialling, TIMEOUT_S)
        await _answers(*again)
        assert await asyncio.wait_for(one[0].readexactly(1), TIMEOUT_S) == b"x"
        for _, writer in (one, other, again):
            writer.close()
            await writer.wait_closed()
