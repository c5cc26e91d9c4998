"""A real ZooKeeper that does not let everybody in: access lists, digest credentials, TLS, forged epochs."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import (
    CoordinationTimeoutError,
    Coordinator,
    EmbeddedZooKeeper,
    NotAllowedError,
    Session,
    TopicView,
    ZooKeeperSecurity,
    ZooKeeperStartError,
)
from coordinator.kazoo_client import _poll
from coordinator.paths import topic_path
from coordinator.records import EpochRecord, TopicRecord
from overlay.messages import Role
from overlay.qos import TopicQos
from runtime.certificates import make_authority, make_certificate, make_server_certificate
from runtime.errors import ConfigurationError
from runtime.tls import CertificateName, Tls
from tests.coordinator.faults import eventually

pytestmark = pytest.mark.integration

OURS = ZooKeeperSecurity("isthmus", "correct horse")
STRANGERS = [ZooKeeperSecurity(), ZooKeeperSecurity("isthmus", "wrong"), ZooKeeperSecurity("other", "horse")]


@asynccontextmanager
async def session_of(hosts: str, chroot: str, security: ZooKeeperSecurity) -> AsyncIterator[Session]:
    session = Session(hosts, chroot, make_client=security.make_client)
    await session.start()
    try:
        yield session
    finally:
        await session.close()


def test_a_second_answer_in_one_encrypted_record_does_not_wait_for_a_third(certificates: Path) -> None:
    """ZooKeeper may put several answers into one record; after the first nothing is left in the kernel."""
    tls = Tls.of_broker(certificates, Role.EDGE, "server")
    assert tls.accepting is not None
    near, far = socket.socketpair()
    near.settimeout(10)
    far.settimeout(10)
    with ThreadPoolExecutor(1) as other:
        accepting = other.submit(tls.accepting.wrap_socket, far, server_side=True)
        with tls.dialling.wrap_socket(near) as client, accepting.result(10) as server:
            server.sendall(b"first second")
            assert _poll([client], [], [], 10) == ([client], [], [])
            assert client.recv(6) == b"first "
            assert _poll([client], [], [], 0.05) == ([client], [], [])
            assert client.recv(6) == b"second"
            assert _poll([client], [], [], 0.05) == ([], [], [])


@pytest.mark.parametrize("stranger", STRANGERS, ids=["nobody", "wrong password", "another user"])
async def test_strangers_neither_read_nor_write_znodes(
    zookeeper_hosts: str, chroot: str, stranger: ZooKeeperSecurity
) -> None:
    async with (
        session_of(zookeeper_hosts, chroot, OURS) as session,
        session_of(zookeeper_hosts, chroot, stranger) as outside,
    ):
        coordinator = Coordinator(session)
        await coordinator.start()
        await coordinator.declare_topic("t", TopicQos())
        forged = EpochRecord(99, "intruder", "candidate").to_json()
        for attempt in (
            outside.get("/epoch"),
            outside.set("/epoch", forged),
            outside.delete("/epoch"),
            outside.get(topic_path("t")),
            outside.set(topic_path("t"), b"{}"),
            outside.create("/brokers/routing/intruder", b"{}", ephemeral=True),
            outside.children("/topics"),
        ):
            with pytest.raises(NotAllowedError, match="check zookeeper_credentials"):
                await attempt
        assert EpochRecord.from_json((await session.get("/epoch"))[0]).epoch == 0
        await coordinator.close()


async def test_every_znode_of_an_overlay_is_closed_to_strangers(zookeeper_hosts: str, chroot: str) -> None:
    async with session_of(zookeeper_hosts, chroot, OURS) as session:
        coordinator = Coordinator(session)
        await coordinator.start()
        await coordinator.declare_topic("t", TopicQos())
        async with session_of(zookeeper_hosts, "/", ZooKeeperSecurity()) as outside:

            async def walk(path: str) -> int:
                with pytest.raises(NotAllowedError):
                    await outside.get(chroot + path.rstrip("/"))
                children = await session.children(path)
                found = 1
                for child in children:
                    found += await walk(f"{path.rstrip('/')}/{child}")
                return found

            assert await walk("/") > 6
        await coordinator.close()


async def test_an_assignment_of_an_older_epoch_is_not_believed(zookeeper_hosts: str, chroot: str) -> None:
    async with session_of(zookeeper_hosts, chroot, OURS) as session:
        coordinator = Coordinator(session)
        await coordinator.start()
        record = await coordinator.declare_topic("t", TopicQos())
        views: list[TopicView] = []
        watch = coordinator.watch_topic("t", views.append)

        async def write(**changes: object) -> TopicRecord:
            changed = replace(record, **changes)
            await session.set(topic_path("t"), changed.to_json())
            return changed

        current = await write(primary="r1", backup="r2", epoch=7)
        await eventually(lambda: bool(views) and views[-1].record == current)
        await write(primary="forged", backup=None, epoch=6)
        await eventually(lambda: coordinator.statistics().mirror_failures == 1)
        assert views[-1].record == current
        current = await write(primary="r2", backup="r1", epoch=8)
        await eventually(lambda: views[-1].record == current)
        assert all(view.record.primary != "forged" for view in views)
        watch.cancel()
        await coordinator.close()


def test_credentials_are_read_from_a_file_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "zookeeper"
    path.write_text("isthmus:correct horse\n")
    security = ZooKeeperSecurity.load(path, None, None)
    assert security == OURS
    assert "horse" not in repr(security)
    for text in ("", "isthmus", "isthmus:", ":x", "a:b\nc:d"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="expected one line user:password"):
            ZooKeeperSecurity.load(path, None, None)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ZooKeeperSecurity.load(tmp_path / "missing", None, None)
    with pytest.raises(ConfigurationError, match=r"authority\.pem does not exist"):
        ZooKeeperSecurity.load(None, tmp_path, None)


# Encrypted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zookeeper-certificates")
    make_authority(folder)
    make_certificate(folder, Role.EDGE, "ea")
    make_server_certificate(folder, ["127.0.0.1"])
    return folder


@pytest.fixture(scope="module")
def encrypted(folder: Path) -> Iterator[EmbeddedZooKeeper]:
    with EmbeddedZooKeeper(certificates=folder) as server:
        yield server


EDGE = CertificateName(Role.EDGE, "ea")


async def test_requests_over_tls_are_answered_many_at_a_time(
    encrypted: EmbeddedZooKeeper, folder: Path, chroot: str
) -> None:
    security = replace(ZooKeeperSecurity.load(None, folder, EDGE), user="u", password="p")
    async with session_of(encrypted.secure_hosts, chroot, security) as session:
        await asyncio.gather(*(session.create(f"/{number}", bytes(5_000)) for number in range(300)))
        found = await asyncio.gather(*(session.get(f"/{number}") for number in range(300)))
        assert [len(data) for data, _ in found] == [5_000] * 300
        assert len(await session.children("/")) == 300


async def test_who_has_no_certificate_of_the_authority_gets_no_session(
    encrypted: EmbeddedZooKeeper, folder: Path, tmp_path: Path
) -> None:
    make_authority(tmp_path)
    make_certificate(tmp_path, Role.EDGE, "ea")
    foreign = ZooKeeperSecurity.load(None, tmp_path, EDGE)
    trusting = replace(foreign, authority=str(folder / "authority.pem"))
    for security in (ZooKeeperSecurity.load(None, folder, None), foreign, trusting):
        session = Session(encrypted.secure_hosts, "/x", make_client=security.make_client)
        with pytest.raises(CoordinationTimeoutError):
            await session.start(timeout_s=1.0)


async def test_a_server_with_a_certificate_for_another_host_is_not_talked_to(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("authority.pem", "authority.key"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    make_server_certificate(tmp_path, ["zk.example"])
    with EmbeddedZooKeeper(certificates=tmp_path) as server:
        security = ZooKeeperSecurity.load(None, folder, EDGE)
        session = Session(server.secure_hosts, "/x", make_client=security.make_client)
        with pytest.raises(CoordinationTimeoutError):
            await session.start(timeout_s=1.0)


@pytest.mark.slow
async def test_an_ensemble_encrypts_among_its_servers_too(folder: Path) -> None:
    with EmbeddedZooKeeper(3, certificates=folder) as server:
        assert "sslQuorum=true" in (server.directory / "server-1" / "zoo.cfg").read_text()
        security = ZooKeeperSecurity.load(None, folder, EDGE)
        async with session_of(server.secure_hosts, "/x", security) as session:
            assert await session.create("/a", b"1") == "/a"
            assert (await session.get("/a"))[0] == b"1"


def test_a_server_without_its_certificate_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ZooKeeperStartError, match="make it with `isthmus certs zookeeper"):
        EmbeddedZooKeeper(certificates=tmp_path).start()
