"""Dialling: keeping on trying, changing the address, going through a proxy."""

import asyncio
from pathlib import Path

import pytest

from overlay.errors import CloseReason
from overlay.limits import (
    HANDSHAKE_FRAME_MAX_BYTES,
)
from overlay.locator import Locator
from overlay.messages import Role
from runtime.tls import Tls
from tests.runtime.nodes import Node, RawPeer, World


async def test_a_dialer_keeps_trying_until_somebody_listens(world: World) -> None:
    server = await world.node("server", listen=True)
    locator = world.locators["server"]
    await server.hub.close()
    node = await world.node("a")
    link = node.link("server")
    dialer = node.hub.dial(link, locator)
    await node.until(lambda: bool(dialer.last_error))
    assert str(locator) in dialer.last_error
    successor = await world.node("server")
    await successor.hub.listen(locator.host, locator.port)
    await node.until(lambda: link.is_up)
    await dialer.stop()
    assert not link.is_up
    await successor.until(lambda: ("down", "a", CloseReason.GOODBYE) in successor.events)


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "no-such-host.invalid"])
async def test_an_impossible_host_is_an_error_of_the_dialer_and_not_its_end(world: World, host: str) -> None:
    node = await world.node("a")
    dialer = node.hub.dial(node.link("nowhere"), Locator(host, 7400))
    await node.until(lambda: bool(dialer.last_error))
    assert dialer.last_error.startswith(f"{host}:7400: ")
    await dialer.stop()


async def test_an_address_that_cannot_be_asked_for_is_asked_for_again(world: World, server: Node) -> None:
    node = await world.node("a")
    link = node.link("server")
    failures = iter([OSError("no such interface"), OSError("no such interface")])

    async def choose() -> Locator:
        for failure in failures:
            raise failure
        return world.locators["server"]

    dialer = node.hub.dial(link, choose)
    await node.until(lambda: bool(dialer.last_error))
    assert dialer.last_error == "no address to dial: no such interface"
    await node.until(lambda: link.is_up)


async def test_a_stopped_dialer_makes_room_for_another(world: World, server: Node) -> None:
    node = await world.node("a")
    link = await world.connect(node, server)
    (dialer,) = node.hub._dialers.values()
    await dialer.stop(CloseReason.GOODBYE, "changed my mind")
    await server.until(lambda: ("down", "a", CloseReason.GOODBYE) in server.events)
    node.hub.dial(link, world.locators["server"])
    await node.until(lambda: link.is_up)
    assert link.connects == 2


async def test_an_address_can_be_chosen_anew_before_every_attempt(world: World, server: Node) -> None:
    node = await world.node("a")
    link = node.link("server")
    asked: list[Locator] = []

    async def choose() -> Locator:
        asked.append(Locator("127.0.0.1", 1) if not asked else world.locators["server"])
        return asked[-1]

    node.hub.dial(link, choose)
    await node.until(lambda: link.is_up)
    assert len(asked) == 2


# Through a proxy


async def _proxy(peer: RawPeer, target: Locator, answer: bytes) -> None:
    """A minimal HTTP proxy: one CONNECT, then bytes both ways."""
    request = await peer._reader.readuntil(b"\r\n\r\n")
    assert request.startswith(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n".encode())
    for at in range(len(answer)):
        await peer.send(answer[at : at + 1])
        await asyncio.sleep(0)
    if b" 200 " not in answer:
        return
    reader, writer = await asyncio.open_connection(target.host, target.port)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(2**16):
            sink.write(data)
            await sink.drain()
        sink.close()

    await asyncio.gather(pump(peer._reader, writer), pump(reader, peer.writer))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
async def test_a_connection_through_a_proxy_works_like_any_other(
    world: World, certificates: Path, encrypted: bool
) -> None:
    def tls(name: str) -> Tls | None:
        return Tls.of_broker(certificates, Role.EDGE, name) if encrypted else None

    server = await world.node("server", listen=True, tls=tls("server"))
    target = world.locators["server"]
    proxy = await world.raw_server(
        lambda peer: _proxy(peer, target, b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n")
    )
    node = await world.node("a", tls=tls("a"))
    link = node.link("server")
    node.hub.dial(link, target, proxy)
    await node.until(lambda: link.is_up)
    node.send("server", 2)
    server.send("a", 1)
    await server.until(lambda: server.got.get("a") == [1, 2])
    await node.until(lambda: node.got.get("server") == [1])
    await node.hub.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "the proxy answered b'HTTP/1.1 403 Forbidden'"),
        (b"what?\r\n\r\n", "the proxy answered b'what?'"),
        (b"x" * (HANDSHAKE_FRAME_MAX_BYTES + 1), "the proxy's answer does not end"),
        (b"x" * (HANDSHAKE_FRAME_MAX_BYTES + 1) + b"\r\n\r\n", "the proxy's answer does not end"),
    ],
    ids=["forbidden", "not HTTP", "endless", "long"],
)
async def test_a_proxy_that_refuses_is_named(world: World, answer: bytes, words: str) -> None:
    async def serve(peer: RawPeer) -> None:
        await peer._reader.readuntil(b"\r\n\r\n")
        await peer.send(answer)
        await peer._reader.read()

    node = await world.node("a")
    dialer = node.hub.dial(node.link("server"), Locator("10.1.2.3", 7400), await world.raw_server(serve))
    await node.until(lambda: bool(node.closed))
    assert words in node.closed[0][1]
    await dialer.stop()
    assert node.events == []
