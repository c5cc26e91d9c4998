"""What the control plane relies on, of a real ZooKeeper and of its model alike."""

import asyncio

import pytest

from coordinator import (
    BadVersionError,
    ConnectionLostError,
    CoordinationError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    SessionState,
    TransactionFailedError,
)
from coordinator.operations import Check, Create, Delete, Hint, HintKind, NodeStat, SetData, WatchKind
from tests.coordinator.contract.conftest import SESSION_TIMEOUT_S, Servers
from tests.coordinator.faults import DEADLINE_S, eventually

pytestmark = pytest.mark.integration


class Hints:
    """Collects what watches say."""

    def __init__(self) -> None:
        self.seen: list[tuple[HintKind, WatchKind, str]] = []

    def __call__(self, hint: Hint) -> None:
        self.seen.append((hint.kind, hint.watch, hint.path))


async def test_versions_count_changes_of_data(servers: Servers) -> None:
    session = await servers.session()
    await session.create("/a", b"0")
    for version in range(3):
        assert (await session.set("/a", str(version).encode(), version)).version == version + 1
    with pytest.raises(BadVersionError):
        await session.set("/a", b"", 2)
    assert (await session.set("/a", b"any")).version == 4
    data, stat = await session.get("/a")
    assert (data, stat.version, stat.ephemeral_owner) == (b"any", 4, 0)
    with pytest.raises(BadVersionError):
        await session.delete("/a", 3)
    await session.delete("/a", 4)
    await session.create("/a")
    _, again = await session.get("/a")
    assert again.version == 0
    assert again.created_zxid > stat.created_zxid


async def test_errors(servers: Servers) -> None:
    session = await servers.session()
    await session.create("/a")
    await session.create("/a/b")
    with pytest.raises(NodeExistsError):
        await session.create("/a")
    with pytest.raises(NoNodeError):
        await session.create("/x/y")
    with pytest.raises(NotEmptyError):
        await session.delete("/a")
    for request in (session.get("/x"), session.children("/x"), session.delete("/x"), session.set("/x", b"")):
        with pytest.raises(NoNodeError):
            await request
    assert await session.exists("/x") is None
    await session.create("/mortal", ephemeral=True)
    with pytest.raises(CoordinationError):
        await session.create("/mortal/child")


async def test_numbers_of_sequential_znodes_never_repeat(servers: Servers) -> None:
    session = await servers.session()
    await session.create("/folder")
    made = [await session.create("/folder/n-", sequence=True) for _ in range(2)]
    assert made == ["/folder/n-0000000000", "/folder/n-0000000001"]
    await session.delete(made[1])
    await session.create("/folder/other")
    # Creations count, of any kind; deletions do not.
    assert await session.create("/folder/n-", sequence=True) == "/folder/n-0000000003"
    names, stat = await session.children_and_stat("/folder")
    assert sorted(names) == ["n-0000000000", "n-0000000003", "other"]
    assert (stat.children, stat.children_version) == (3, 5)
    with pytest.raises(NoNodeError):
        await session.create("/nowhere/n-", sequence=True)


async def test_a_transaction_is_all_or_nothing(servers: Servers) -> None:
    session = await servers.session()
    results = await session.transaction(
        [Create("/a", b"x"), SetData("/a", b"y", 0), Check("/a", 1), Create("/a/b"), Delete("/a/b")]
    )
    assert results[0] == "/a"
    assert isinstance(results[1], NodeStat)
    assert results[1].version == 1
    assert results[2:] == (True, "/a/b", True)
    for index, operations in (
        (1, [Create("/b"), Delete("/a", 5), Create("/c")]),
        (0, [Check("/a", 0), Create("/b")]),
        (2, [Create("/b"), Create("/b/c"), Create("/b")]),
        (0, [Check("/nothing"), Create("/b")]),
    ):
        with pytest.raises(TransactionFailedError) as failure:
            await session.transaction(operations)
        assert failure.value.index == index
    assert await session.children("/") == ["a"]
    assert (await session.get("/a"))[0] == b"y"


async def test_ephemeral_znodes_go_with_their_session(servers: Servers) -> None:
    owner, other = await servers.session(), await servers.session()
    await owner.create("/a", ephemeral=True)
    await owner.create("/b")
    stat = await other.exists("/a")
    assert stat is not None
    assert stat.ephemeral_owner == owner.session_id != other.session_id
    await owner.close()
    assert await other.children("/") == ["b"]


async def test_an_expired_session_has_lost_everything_and_gets_a_new_one(servers: Servers) -> None:
    owner, other = await servers.session(), await servers.session()
    states: list[SessionState] = []
    owner.add_listener(states.append)
    hints = Hints()
    before = owner.session_id
    await owner.create("/a", ephemeral=True)
    assert await other.exists("/a", hints) is not None
    await servers.expire(owner)
    await eventually(lambda: hints.seen, "the other session is told")
    assert hints.seen == [(HintKind.CHANGED, WatchKind.DATA, "/a")]
    assert await other.exists("/a") is None
    assert owner.session_id not in (0, before)
    assert states[-2:] == [SessionState.LOST, SessionState.CONNECTED]
    assert await owner.create("/a", ephemeral=True) == "/a"


async def test_a_broken_connection_does_not_end_a_session(servers: Servers) -> None:
    session = await servers.session()
    hints = Hints()
    before = session.session_id
    await session.create("/a", ephemeral=True)
    await session.get("/a", hints)
    assert session._client is not None
    session._client.drop_connection()
    await eventually(lambda: session.statistics().reconnects, "the session has reconnected")
    assert (session.session_id, session.statistics().expiries) == (before, 0)
    assert hints.seen == [(HintKind.SPENT, WatchKind.DATA, "/a")]
    stat = await session.exists("/a")
    assert stat is not None
    assert stat.ephemeral_owner == before
    await session.set("/a", b"1")
    assert len(hints.seen) == 1  # the watch went with its connection


async def test_a_watch_fires_once(servers: Servers) -> None:
    session, other = await servers.session(), await servers.session()
    data, children, absent = Hints(), Hints(), Hints()
    await session.create("/a")
    await session.get("/a", data)
    await session.children("/a", children)
    await session.exists("/b", absent)
    await other.set("/a", b"1")
    await other.set("/a", b"2")
    await other.create("/a/x")
    await other.create("/a/y")
    await other.create("/b")
    await eventually(lambda: absent.seen, "the last of the watches has fired")
    assert data.seen == [(HintKind.CHANGED, WatchKind.DATA, "/a")]
    assert children.seen == [(HintKind.CHANGED, WatchKind.CHILDREN, "/a")]
    assert absent.seen == [(HintKind.CHANGED, WatchKind.DATA, "/b")]


async def test_a_deletion_fires_all_watches_of_a_znode(servers: Servers) -> None:
    session, other = await servers.session(), await servers.session()
    data, children, parent = Hints(), Hints(), Hints()
    await session.create("/a")
    await session.create("/a/b")
    await session.get("/a/b", data)
    await session.children("/a/b", children)
    await session.children("/a", parent)
    await other.delete("/a/b")
    await eventually(lambda: data.seen and children.seen and parent.seen, "all of them have fired")


async def test_no_watch_is_set_on_what_cannot_be_read(servers: Servers) -> None:
    session = await servers.session()
    hints = Hints()
    with pytest.raises(NoNodeError):
        await session.get("/a", hints)
    assert session.watch_count == 0
    await session.create("/a")
    await session.exists("/a")
    assert not hints.seen


async def test_a_watch_that_was_taken_back_does_not_fire(servers: Servers) -> None:
    session = await servers.session()
    kept, forgotten = Hints(), Hints()
    await session.create("/a")
    await session.get("/a", forgotten)
    session.forget_watch(WatchKind.DATA, "/a", forgotten)
    await eventually(lambda: not session.statistics().requests_in_flight, "the server was told")
    await session.get("/a", kept)
    await session.set("/a", b"1")
    await eventually(lambda: kept.seen, "the other watch has fired")
    assert not forgotten.seen


async def test_news_of_a_change_comes_before_what_is_read_after_it(servers: Servers) -> None:
    session, other = await servers.session(), await servers.session()
    hints = Hints()
    await session.create("/a", b"old")
    await session.get("/a", hints)
    await other.set("/a", b"new")
    async with asyncio.timeout(DEADLINE_S):
        while (await session.get("/a"))[0] != b"new":
            continue
    assert hints.seen == [(HintKind.CHANGED, WatchKind.DATA, "/a")]


async def test_a_request_without_an_answer_may_have_been_applied(servers: Servers) -> None:
    proxy = await servers.proxy()
    session, other = await servers.session(proxy.hosts), await servers.session()
    proxy.swallow_answers()
    request = asyncio.ensure_future(session.create("/a"))
    async with asyncio.timeout(DEADLINE_S):
        while await other.exists("/a") is None:
            continue
    proxy.cut()
    proxy.resume()
    with pytest.raises(ConnectionLostError):
        await request
    await session.wait_connected()
    with pytest.raises(NodeExistsError):
        await session.create("/a")


async def test_the_server_gives_up_on_who_is_silent(servers: Servers) -> None:
    proxy = await servers.proxy()
    session, other = await servers.session(proxy.hosts), await servers.session()
    await session.create("/a", ephemeral=True)
    proxy.stall()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    hints = Hints()
    assert await other.exists("/a", hints) is not None
    await eventually(lambda: hints.seen, "the session has ended", 4 * SESSION_TIMEOUT_S)
    # Not before its time: a lease must be over before the session is.
    assert loop.time() - began_s > 0.9 * SESSION_TIMEOUT_S
    assert not session.lease_valid(session.clock())
    proxy.cut()
    proxy.resume()
    await eventually(lambda: session.statistics().expiries == 1, "the session has found out")


async def test_sync_shows_what_others_have_written(servers: Servers) -> None:
    session, other = await servers.session(), await servers.session()
    for number in range(20):
        await other.create(f"/n{number}")
        await session._call(lambda done: session._at_client("sync", servers.chroot, done), True)
        assert await session.exists(f"/n{number}") is not None
