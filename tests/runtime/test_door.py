"""A crowd at the door is let in a few at a time, and nobody who was let in is forgotten."""

import asyncio
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

import pytest

from overlay.limits import CONNECTIONS_AT_A_TIME as AT_A_TIME
from runtime.door import REST_S, Door


class House:
    """Who has come in."""

    def __init__(self) -> None:
        self.entered: list[asyncio.BaseTransport] = []

    def guest(self) -> asyncio.Protocol:
        house = self

        class Guest(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                house.entered.append(transport)

        return Guest()


@asynccontextmanager
async def house_with_door() -> AsyncIterator[tuple[House, Door, tuple[str, int]]]:
    house = House()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    address = listening.getsockname()
    door = Door(asyncio.get_running_loop(), listening, house.guest)
    try:
        yield house, door, address
    finally:
        await door.close()
        for transport in house.entered:
            transport.abort()  # type: ignore[attr-defined]


def knock(stack: ExitStack, address: tuple[str, int], count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def test_a_crowd_is_let_in_a_few_at_a_time():
    async with house_with_door() as (house, _, address):
        with ExitStack() as stack:
            knock(stack, address, 3 * AT_A_TIME)
            began_s = time.monotonic()
            await until(lambda: len(house.entered) >= 3 * AT_A_TIME)
            assert time.monotonic() - began_s >= 2 * REST_S
            assert len(house.entered) == 3 * AT_A_TIME


async def test_all_who_were_taken_are_handed_over_before_the_door_is_closed():
    async with house_with_door() as (house, door, address):
        with ExitStack() as stack:
            knock(stack, address, 2 * AT_A_TIME)
            await until(lambda: bool(door._entering))
            assert not house.entered
            await door.close()
            assert len(house.entered) == AT_A_TIME
            with pytest.raises(OSError):
                socket.create_connection(address)


async def test_without_descriptors_people_wait(caplog: pytest.LogCaptureFixture):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with house_with_door() as (house, _, address):
        with ExitStack() as stack:
            knock(stack, address, 1)
            os.close(lowest_free := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            try:
                await until(lambda: "cannot take connections" in caplog.text)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert not house.entered
            await until(lambda: len(house.entered) == 1)
