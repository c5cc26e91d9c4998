"""One hostile peer as a process: `python -m benchmarks.hostile_peer KIND HOST:PORT COUNT TOPIC`.

It says `ready` when the attack is under way and goes on until it is killed.
"""

import asyncio
import contextlib
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from struct import pack
from typing import Final

from clients import Client
from overlay.codec import decode_heartbeat, encode, encode_heartbeat
from overlay.framing import FrameReader
from overlay.limits import HEARTBEAT_INTERVAL_MAX_NS, SECOND_NS
from overlay.locator import Locator
from overlay.messages import Declare, EndpointKind, FrameKind, Heartbeat, Hello, Role
from overlay.qos import BEST_EFFORT

_AT_A_TIME: Final = 100
_AGAIN_S: Final = 0.05
_DRIP_S: Final = 0.1
_ADDRESSES: Final = 24
"""Addresses silent connections come from, so that no limit of one address hides what they cost."""
_IDLE_HEARTBEAT_NS: Final = HEARTBEAT_INTERVAL_MAX_NS
_FLOOD_BYTES: Final = 200
_FLOOD_BATCH: Final = 500

FLOOD_TOPIC: Final = "flood"

HELLO: Final = encode(Hello(Role.CLIENT, "00000000000000aa", 170, 200_000_000))


async def _connect(target: Locator, number: int, spread: bool) -> socket.socket | None:
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        if spread:
            sock.bind((f"127.66.0.{1 + number % _ADDRESSES}", 0))
        await loop.sock_connect(sock, target)
    except OSError:
        sock.close()
        return None
    return sock


async def _keep_open(target: Locator, count: int, first: bytes, *, spread: bool) -> None:
    """Hold `count` connections that have said `first`; what the broker closes is opened again."""
    held: list[socket.socket | None] = [None] * count
    ready = False
    while True:
        for start in range(0, count, _AT_A_TIME):
            await asyncio.gather(
                *(_renew(held, number, target, first, spread) for number in range(start, start + _AT_A_TIME))
            )
        if not ready:
            print("ready", flush=True)
            ready = True
        await asyncio.sleep(_AGAIN_S)


async def _renew(
    held: list[socket.socket | None], number: int, target: Locator, first: bytes, spread: bool
) -> None:
    if number >= len(held):
        return
    sock = held[number]
    if sock is not None:
        try:
            if sock.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        sock.close()
    sock = held[number] = await _connect(target, number, spread)
    if sock is not None and first:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(sock, first)


async def silent(target: Locator, count: int, topic: str) -> None:
    """Connections that say nothing at all."""
    await _keep_open(target, count, b"", spread=True)


async def half_open(target: Locator, count: int, topic: str) -> None:
    """Connections that stop in the middle of their introduction."""
    await _keep_open(target, count, HELLO[: len(HELLO) // 2], spread=True)


async def idle(target: Locator, count: int, topic: str) -> None:
    """Clients that introduce themselves, stay alive, and have nothing else to say."""
    loop = asyncio.get_running_loop()
    clients: list[socket.socket] = []
    for start in range(0, count, _AT_A_TIME):
        came = await asyncio.gather(
            *(_introduce(target, number) for number in range(start, min(count, start + _AT_A_TIME)))
        )
        clients += came
    print("ready", flush=True)
    # A few at a time: ten thousand that speak in the same moment are another attack.
    pause_s = _IDLE_HEARTBEAT_NS / SECOND_NS / 2 / (1 + count // _AT_A_TIME)
    while True:
        for number, sock in enumerate(clients):
            await loop.sock_sendall(sock, encode_heartbeat(Heartbeat(1, 0, 0, 0)))
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(4096):
                    raise ConnectionError("the broker has sent a client away that did nothing wrong")
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(pause_s)


async def _introduce(target: Locator, number: int) -> socket.socket:
    sock = await _connect(target, number, spread=True)
    if sock is None:
        raise ConnectionError(f"client {number} was not let in")
    loop = asyncio.get_running_loop()
    incarnation = 1 + number
    hello = Hello(Role.CLIENT, f"{incarnation:016x}", incarnation, _IDLE_HEARTBEAT_NS)
    await loop.sock_sendall(sock, encode(hello))
    reader = FrameReader()
    frames: list[tuple[int, bytes]] = []
    while len(frames) < 2:  # a welcome and a first heartbeat
        data = await loop.sock_recv(sock, 4096)
        reader.feed(data)
        frames += reader.take_frames()
        if not data or (frames and frames[0][0] != FrameKind.WELCOME):
            raise ConnectionError(f"client {number} was not welcome")
    theirs, now_ns = decode_heartbeat(frames[1][1]), time.monotonic_ns()
    await loop.sock_sendall(sock, encode_heartbeat(Heartbeat(now_ns, theirs.sent_ns, now_ns, 0)))
    return sock


async def huge_length(target: Locator, count: int, topic: str) -> None:
    """Connections that announce a frame of 2^32 - 1 bytes, again and again."""
    await _keep_open(target, count, pack("<IB", 2**32 - 1, FrameKind.DATA) + bytes(1_000), spread=False)


async def garbage(target: Locator, count: int, topic: str) -> None:
    """Connections that send noise, again and again."""
    await _keep_open(target, count, b"\x80\x00\x00\x00\x01" + b"\xc1" * 127, spread=False)


async def slow(target: Locator, count: int, topic: str) -> None:
    """Connections that send their introduction a byte at a time."""

    async def drip(number: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock = await _connect(target, number, spread=True)
            if sock is not None:
                with contextlib.suppress(OSError):
                    for byte in HELLO:
                        await loop.sock_sendall(sock, bytes([byte]))
                        await asyncio.sleep(_DRIP_S)
                sock.close()
            await asyncio.sleep(_AGAIN_S)

    dripping = [asyncio.create_task(drip(number)) for number in range(count)]
    await asyncio.sleep(1)
    print("ready", flush=True)
    await asyncio.gather(*dripping)


async def stalled_subscriber(target: Locator, count: int, topic: str) -> None:
    """Clients that subscribe to what others publish, stay alive, and take none of it."""
    await asyncio.gather(*(_stall(target, number, topic) for number in range(count)))
    print("ready", flush=True)
    await asyncio.Event().wait()


async def _stall(target: Locator, number: int, topic: str) -> None:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, target)
    incarnation = 1000 + number
    await loop.sock_sendall(sock, encode(Hello(Role.CLIENT, f"{incarnation:016x}", incarnation, 200_000_000)))
    await loop.sock_sendall(sock, encode(Declare(1, EndpointKind.SUBSCRIBER, topic)))
    reader = FrameReader()
    reader.open_up()
    while True:
        reader.feed(await loop.sock_recv(sock, 4096))
        if any(kind == FrameKind.DECLARED for kind, _ in reader.take_frames()):
            break

    async def stay_alive() -> None:
        while True:
            await asyncio.sleep(0.2)
            await loop.sock_sendall(sock, encode_heartbeat(Heartbeat(1, 0, 0, 0)))

    _TASKS.append(asyncio.create_task(stay_alive()))


_TASKS: list[asyncio.Task[None]] = []


async def flood(target: Locator, count: int, topic: str) -> None:
    """A client that publishes as fast as it can, on a topic that somebody elsewhere subscribes to."""
    client = Client([str(target)])
    await client.start()
    publisher = await client.publisher(FLOOD_TOPIC, BEST_EFFORT)
    await publisher.wait_for_subscribers(count)
    print("ready", flush=True)
    while True:
        await publisher.publish_many([bytes(_FLOOD_BYTES)] * _FLOOD_BATCH)


async def sink(target: Locator, count: int, topic: str) -> None:
    """Where a flood goes."""
    client = Client([str(target)])
    await client.start()
    subscription = await client.subscribe(FLOOD_TOPIC, BEST_EFFORT)
    print("ready", flush=True)
    async for _ in subscription:
        pass


KINDS: Final[dict[str, Callable[[Locator, int, str], Awaitable[None]]]] = {
    "silent": silent,
    "idle": idle,
    "half-open": half_open,
    "slow": slow,
    "huge-length": huge_length,
    "garbage": garbage,
    "stalled-subscriber": stalled_subscriber,
    "flood": flood,
}
_HELPERS: Final[dict[str, Callable[[Locator, int, str], Awaitable[None]]]] = {"sink": sink}


def main(kind: str, target: str, count: str, topic: str) -> None:
    """Attack until killed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_run((KINDS | _HELPERS)[kind](Locator.parse(target), int(count), topic)))


async def _run(attack: Awaitable[None]) -> None:
    await attack


if __name__ == "__main__":
    main(*sys.argv[1:])
