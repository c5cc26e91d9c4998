"""Encrypted connections over real sockets: who is let in, who is not, and that nothing else changes."""

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from overlay.codec import decode, encode
from overlay.errors import CloseReason, ProtocolError
from overlay.framing import FrameReader, frame
from overlay.limits import HANDSHAKE_FRAME_MAX_BYTES, TLS_HANDSHAKE_MAX_BYTES
from overlay.messages import Close, FrameKind, Hello, Role, Welcome
from runtime.certificates import make_authority, make_certificate
from runtime.connection import _NOT_SENT_LOW_WATER_BYTES, Connection
from runtime.errors import ConfigurationError
from runtime.operations import OperationsServer
from runtime.tls import CertificateName, Tls, TlsChannel, speaks_tls
from tests.runtime.nodes import CLUSTER, Node, World


@pytest.fixture
async def secure(world: World, certificates: Path) -> Node:
    return await world.node("server", listen=True, tls=Tls.of_broker(certificates, Role.EDGE, "server"))


async def secure_node(world: World, certificates: Path, name: str, role: Role = Role.EDGE) -> Node:
    return await world.node(name, role, tls=Tls.of_broker(certificates, role, name))


class EncryptedPeer:
    """A peer that encrypts with any certificate and says of itself whatever it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._frames = FrameReader()
        self._frames.open_up()

    @classmethod
    async def connect(cls, world: World, server: Node, tls: Tls) -> "EncryptedPeer":
        locator = world.locators[server.hub.identity.node]
        return cls(*await asyncio.open_connection(locator.host, locator.port, ssl=tls.dialling))

    async def say(self, **fields: object) -> Welcome | Close:
        hello = {"node": "a", "role": Role.EDGE, "incarnation": 7, "heartbeat_ns": 10**7, "cluster": CLUSTER}
        self.writer.write(encode(Hello(**hello | fields)))
        async with asyncio.timeout(8):
            while not (frames := self._frames.take_frames(at_most=1)):
                data = await self._reader.read(2**16)
                if not data:
                    raise EOFError
                self._frames.feed(data)
        message = decode(*frames[0])
        assert isinstance(message, Welcome | Close)
        return message

    async def close(self) -> None:
        self.writer.transport.abort()
        with suppress(OSError):
            await self.writer.wait_closed()


# Let in


async def test_brokers_with_certificates_of_their_authority_talk(
    world: World, certificates: Path, secure: Node
) -> None:
    node = await secure_node(world, certificates, "a")
    link = await world.connect(node, secure)
    node.send("server", 3, size=100_000)
    secure.send("a", 2)
    await secure.until(lambda: secure.got.get("a") == [1, 2, 3])
    await node.until(lambda: node.got.get("server") == [1, 2])
    assert link.connection is not None
    assert link.connection.peer_certificate == CertificateName(Role.EDGE, "server")


async def test_what_brokers_need_of_the_socket_works_under_encryption(
    world: World, certificates: Path, secure: Node
) -> None:
    node = await secure_node(world, certificates, "a")
    link = await world.connect(node, secure)
    connection = link.connection
    assert isinstance(connection, Connection) and connection._transport is not None
    sock = connection._transport.get_extra_info("socket")
    low_water = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
    assert low_water == _NOT_SENT_LOW_WATER_BYTES
    assert connection.liveness is not None
    assert connection._host_answers(connection.liveness)
    await node.until_idle(link)


async def test_what_a_killed_peer_had_still_sent_is_read(
    world: World, certificates: Path, secure: Node
) -> None:
    node = await secure_node(world, certificates, "a")
    await world.connect(node, secure)
    connection = secure.links["a"].connection
    assert connection is not None and connection._transport is not None
    connection._transport.pause_reading()
    node.send("server", 5)
    await node.until(lambda: node.links["server"].outbox.statistics().messages_sent == 5)
    # What happens when a write fails while bytes wait to be read; on loopback they are there at once.
    connection._read_rest()
    assert secure.got["a"] == [1, 2, 3, 4, 5]


async def test_a_link_resumes_over_a_new_encrypted_connection(
    world: World, certificates: Path, secure: Node
) -> None:
    node = await secure_node(world, certificates, "a")
    link = await world.connect(node, secure)
    for round_number in range(1, 4):
        node.send("server", 4)
        assert link.connection is not None
        link.connection.abort(CloseReason.LOST, "cut")
        expected = set(range(1, 4 * round_number + 1))
        await secure.until(lambda expected=expected: expected <= set(secure.got.get("a", [])))
        await node.until(lambda: link.is_up)
    assert sorted(set(secure.got["a"])) == list(range(1, 13))


# Not let in


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"node": "b"}, "it is edge b, its certificate is for isthmus:edge/a"),
        ({"role": Role.ROUTER}, "it is router a, its certificate is for isthmus:edge/a"),
    ],
    ids=["another name", "another role"],
)
async def test_a_broker_that_claims_to_be_another_is_refused(
    world: World, certificates: Path, secure: Node, said: dict[str, object], words: str
) -> None:
    peer = await EncryptedPeer.connect(world, secure, Tls.of_broker(certificates, Role.EDGE, "a"))
    answer = await peer.say(**said)
    assert isinstance(answer, Close)
    assert answer.reason == CloseReason.WRONG_IDENTITY
    assert words in answer.detail
    assert secure.links == {}
    await peer.close()


async def test_nobody_waits_in_the_name_of_another(world: World, certificates: Path, secure: Node) -> None:
    """A routing broker that comes back counts the edges that wait for it: only true ones."""
    held: list[str] = []
    secure.hub.hold_edges(held.append)
    peer = await EncryptedPeer.connect(world, secure, Tls.of_broker(certificates, Role.EDGE, "a"))
    answer = await peer.say(node="b")
    assert isinstance(answer, Close)
    assert answer.reason == CloseReason.WRONG_IDENTITY
    assert held == []
    await peer.close()


@pytest.mark.parametrize("principal", ["", "alice"], ids=["no certificate", "a client's certificate"])
async def test_a_broker_must_have_a_brokers_certificate(
    world: World, certificates: Path, secure: Node, principal: str
) -> None:
    peer = await EncryptedPeer.connect(world, secure, Tls.of_client(certificates, principal))
    answer = await peer.say()
    assert isinstance(answer, Close)
    assert answer.reason == CloseReason.WRONG_IDENTITY
    assert secure.links == {}
    await peer.close()


async def test_a_routing_broker_takes_nobody_without_a_certificate(world: World, certificates: Path) -> None:
    router = await world.node(
        "r1", Role.ROUTER, listen=True, tls=Tls.of_broker(certificates, Role.ROUTER, "r1")
    )
    peer = await EncryptedPeer.connect(world, router, Tls.of_client(certificates))
    with pytest.raises((EOFError, ssl.SSLError, ConnectionError)):
        await peer.say()
    await router.until(lambda: len(router.closed) == 1)
    assert router.closed[0][0] is CloseReason.TLS_FAILED
    assert "peer did not return a certificate" in router.closed[0][1]
    await peer.close()


async def test_a_certificate_of_another_authority_is_refused(
    world: World, secure: Node, tmp_path: Path, certificates: Path
) -> None:
    make_authority(tmp_path)
    make_certificate(tmp_path, Role.EDGE, "a")
    # It trusts the right authority, but has its own certificate from another one.
    (tmp_path / "authority.pem").write_bytes((certificates / "authority.pem").read_bytes())
    node = await secure_node(world, tmp_path, "a")
    node.hub.dial(node.link("server"), world.locators["server"])
    await secure.until(lambda: len(secure.closed) >= 1)
    assert secure.closed[0][0] is CloseReason.TLS_FAILED
    assert "check the certificates" in secure.closed[0][1]
    assert secure.links == {}


async def test_a_broker_of_another_authority_is_not_talked_to(
    world: World, secure: Node, tmp_path: Path
) -> None:
    make_authority(tmp_path)
    make_certificate(tmp_path, Role.EDGE, "a")
    node = await secure_node(world, tmp_path, "a")
    dialer = node.hub.dial(node.link("server"), world.locators["server"])
    await node.until(lambda: "tls_failed" in dialer.last_error)
    assert "certificate" in dialer.last_error
    assert node.events == []


async def test_an_expired_certificate_is_refused(
    world: World, secure: Node, tmp_path: Path, certificates: Path
) -> None:
    for name in ("authority.pem", "authority.key"):
        (tmp_path / name).write_bytes((certificates / name).read_bytes())
    make_certificate(tmp_path, Role.EDGE, "a", days=-1)
    node = await secure_node(world, tmp_path, "a")
    node.hub.dial(node.link("server"), world.locators["server"])
    await secure.until(lambda: len(secure.closed) >= 1)
    assert secure.closed[0][0] is CloseReason.TLS_FAILED
    assert "certificate has expired" in secure.closed[0][1]


async def test_a_broker_found_at_the_address_of_another_is_not_talked_to(
    world: World, certificates: Path
) -> None:
    """Its certificate is good, but for another name than the one it gives."""
    impostor = await world.node(
        "server", listen=True, tls=Tls.of_broker(certificates, Role.EDGE, "bystander")
    )
    node = await secure_node(world, certificates, "a")
    dialer = node.hub.dial(node.link("server"), world.locators["server"])
    await node.until(lambda: "wrong_identity" in dialer.last_error)
    assert "says it is edge server, its certificate is for isthmus:edge/bystander" in dialer.last_error
    assert impostor.got == {}


async def test_without_encryption_nobody_gets_in(world: World, secure: Node) -> None:
    node = await world.node("a")
    dialer = node.hub.dial(node.link("server"), world.locators["server"])
    await node.until(lambda: "tls_failed" in dialer.last_error)
    assert "only TLS is spoken here: give certificates" in dialer.last_error
    assert secure.links == {}


async def test_with_encryption_nobody_gets_in_where_there_is_none(
    world: World, certificates: Path, server: Node
) -> None:
    node = await secure_node(world, certificates, "a")
    node.hub.dial(node.link("server"), world.locators["server"])
    await server.until(lambda: len(server.closed) >= 1)
    assert server.closed[0] == (CloseReason.TLS_FAILED, "the peer speaks TLS: give us certificates")


async def test_only_tls_13_is_spoken(world: World, certificates: Path, secure: Node) -> None:
    tls = Tls.of_broker(certificates, Role.EDGE, "a")
    tls.dialling.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.dialling.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        await EncryptedPeer.connect(world, secure, tls)
    await secure.until(lambda: secure.closed[:1] != [])
    assert secure.closed[0][0] is CloseReason.TLS_FAILED


async def test_tls_must_be_established_within_the_time_of_a_handshake(world: World, secure: Node) -> None:
    peer = await world.raw(secure)
    channel_start = b"\x16\x03\x01"
    await peer.send(channel_start)
    await secure.until(lambda: len(secure.closed) == 1)
    assert secure.closed[0][0] is CloseReason.HANDSHAKE_TIMEOUT


# The channel itself


def channels(certificates: Path) -> tuple[TlsChannel, TlsChannel]:
    server = Tls.of_broker(certificates, Role.EDGE, "server").accept()
    return Tls.of_client(certificates, "alice").dial(), server


def shake_hands(client: TlsChannel, server: TlsChannel) -> None:
    waiting = client.start()
    while waiting:
        assert server.decrypt(waiting) == b""
        assert client.decrypt(server.take()) == b""
        waiting = client.take()
    assert client.is_established and server.is_established


def test_a_stream_means_the_same_however_it_is_cut(certificates: Path) -> None:
    client, server = channels(certificates)
    shake_hands(client, server)
    data = bytes(range(256)) * 400
    encrypted = client.encrypt(data)
    assert b"\x00\x01\x02\x03" not in encrypted
    got = b"".join(server.decrypt(encrypted[at : at + 977]) for at in range(0, len(encrypted), 977))
    assert got == data
    assert server.peer == CertificateName(Role.CLIENT, "alice")


def test_a_changed_byte_ends_the_channel(certificates: Path) -> None:
    client, server = channels(certificates)
    shake_hands(client, server)
    encrypted = bytearray(client.encrypt(b"message"))
    encrypted[-1] ^= 1
    with pytest.raises(ProtocolError, match="tls_failed"):
        server.decrypt(bytes(encrypted))


def test_what_may_come_before_the_peer_is_known_is_bounded(certificates: Path) -> None:
    _, server = channels(certificates)
    # A handshake record announces 16 MiB of ClientHello, which never ends.
    record = b"\x16\x03\x01\x40\x00" + (b"\x01\xff\xff\xff" + bytes(2**14))[: 2**14]
    sent = 0
    with pytest.raises(ProtocolError, match="tls_failed"):
        while sent <= 2 * TLS_HANDSHAKE_MAX_BYTES:
            server.decrypt(record)
            sent += len(record)


def test_frames_are_not_taken_for_tls() -> None:
    assert not speaks_tls(encode(Hello(Role.EDGE, "a", 1, 10**7)))
    for length in range(HANDSHAKE_FRAME_MAX_BYTES):
        assert not speaks_tls(frame(FrameKind.HELLO, bytes(length)))
    assert speaks_tls(b"\x16\x03\x01\x00")


def test_names_in_certificates_are_read_strictly() -> None:
    assert CertificateName.parse("isthmus:edge/a") == (Role.EDGE, "a")
    for text in ("isthmus:edge/", "isthmus:king/a", "edge/a", "isthmus:edge", "https://edge/a"):
        assert CertificateName.parse(text) is None


# Files


def test_missing_and_unusable_files_are_named(tmp_path: Path, certificates: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"authority.pem does not exist: make it with `isthmus cert"):
        Tls.of_client(tmp_path)
    (tmp_path / "authority.pem").write_bytes((certificates / "authority.pem").read_bytes())
    with pytest.raises(ConfigurationError, match=r"edge-x.pem does not exist"):
        Tls.of_broker(tmp_path, Role.EDGE, "x")
    (tmp_path / "edge-x.pem").write_text("nonsense")
    (tmp_path / "edge-x.key").write_text("nonsense")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        Tls.of_broker(tmp_path, Role.EDGE, "x")


def test_keys_are_for_their_owner_only_and_authorities_are_not_replaced(tmp_path: Path) -> None:
    make_authority(tmp_path)
    make_certificate(tmp_path, Role.CLIENT, "alice")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}
    with pytest.raises(ConfigurationError, match="exists: choose another folder"):
        make_authority(tmp_path)
    with pytest.raises(ConfigurationError, match="name 'a/b' cannot be used"):
        make_certificate(tmp_path, Role.EDGE, "a/b")
    with pytest.raises(ConfigurationError, match="has no authority"):
        make_certificate(tmp_path / "elsewhere", Role.EDGE, "a")


# What an operator asks


async def test_other_hosts_are_answered_over_https_and_need_a_certificate(
    certificates: Path, tmp_path: Path
) -> None:
    make_authority(tmp_path)
    make_certificate(tmp_path, Role.CLIENT, "alice")
    (tmp_path / "authority.pem").write_bytes((certificates / "authority.pem").read_bytes())
    server = OperationsServer(dict, str, list)
    # All addresses of this host, as other hosts would reach it; asked on loopback.
    address = await server.start("0.0.0.0", 0, Tls.of_broker(certificates, Role.EDGE, "server"))
    url = f"{address.replace('0.0.0.0', '127.0.0.1')}/healthz"
    assert url.startswith("https://")
    try:
        for folder, principal, let_in in (
            (certificates, "alice", True),
            (certificates, "", False),
            (tmp_path, "alice", False),
        ):
            context = Tls.of_client(folder, principal).dialling
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
                if let_in:
                    async with session.get(url) as response:
                        assert await response.text() == "ok\n"
                else:
                    with pytest.raises((aiohttp.ClientError, ConnectionError)):
                        await session.get(url)
    finally:
        await server.close()


async def test_this_host_is_answered_without_certificates(certificates: Path) -> None:
    server = OperationsServer(dict, str, list)
    address = await server.start("127.0.0.1", 0, Tls.of_broker(certificates, Role.EDGE, "server"))
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/healthz") as response:
            assert await response.text() == "ok\n"
    finally:
        await server.close()
