"""The session against a real server: requests, states, the lease, and every way to lose a connection."""

import asyncio
import struct

import pytest

from coordinator import (
    BadVersionError,
    ConnectionLostError,
    CoordinationTimeoutError,
    EmbeddedZooKeeper,
    NodeExistsError,
    NodeTooLargeError,
    NoNodeError,
    NotEmptyError,
    Session,
    SessionClosedError,
    SessionState,
    TransactionFailedError,
)
from coordinator.limits import NODE_MAX_BYTES, REQUESTS_IN_FLIGHT_MAX
from coordinator.operations import Check, Create, Delete, Hint, HintKind, NodeStat, SetData, WatchKind
from overlay.limits import SECOND_NS
from tests.coordinator.faults import (
    Fleet,
    eventually,
    expire_session,
    lose_connection,
    no_leaks,
    server_watches,
    watches_become,
)

pytestmark = pytest.mark.integration


async def test_requests_and_their_errors(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, f"{chroot}/nested") as fleet:
        session = await fleet.session()
        assert session.chroot == f"{chroot}/nested"
        assert await session.create("/a", b"1") == "/a"
        data, stat = await session.get("/a")
        assert (data, stat.version, stat.ephemeral_owner) == (b"1", 0, 0)
        assert (await session.set("/a", b"2", 0)).version == 1
        assert await session.create("/a/b/c", makepath=True) == "/a/b/c"
        assert await session.children("/a") == ["b"]
        numbered = await session.create("/a/n-", sequence=True, ephemeral=True)
        assert numbered == "/a/n-0000000001"
        found = await session.exists(numbered)
        assert found is not None
        assert found.ephemeral_owner == session.session_id != 0
        assert await session.exists("/nothing") is None
        with pytest.raises(NodeExistsError, match="/a exists"):
            await session.create("/a")
        with pytest.raises(NoNodeError):
            await session.create("/x/y")
        with pytest.raises(BadVersionError):
            await session.set("/a", b"", 7)
        with pytest.raises(NotEmptyError):
            await session.delete("/a")
        with pytest.raises(NoNodeError):
            await session.get("/nothing")


async def test_a_transaction_is_all_or_nothing(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        results = await session.transaction([Create("/a", b"x"), SetData("/a", b"y", 0), Check("/a", 1)])
        assert results[0] == "/a"
        assert isinstance(results[1], NodeStat)
        assert results[1].version == 1
        with pytest.raises(TransactionFailedError) as failure:
            await session.transaction([Create("/b"), Delete("/a", 5), Create("/c")])
        assert failure.value.index == 1
        assert isinstance(failure.value.cause, BadVersionError)
        assert sorted(await session.children("/")) == ["a"]


async def test_what_is_too_large_for_a_znode_is_refused_here(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        await session.create("/full", bytes(NODE_MAX_BYTES))
        data, _ = await session.get("/full")
        assert len(data) == NODE_MAX_BYTES
        for attempt in (
            session.create("/over", bytes(NODE_MAX_BYTES + 1)),
            session.set("/full", bytes(NODE_MAX_BYTES + 1)),
            session.transaction([Create("/one", bytes(600_000)), Create("/two", bytes(600_000))]),
        ):
            with pytest.raises(NodeTooLargeError, match=str(NODE_MAX_BYTES)):
                await attempt
        assert session.state is SessionState.CONNECTED


async def test_more_requests_than_fit_in_flight_wait_their_turn(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        count = 5 * REQUESTS_IN_FLIGHT_MAX
        asked = [asyncio.ensure_future(session.create(f"/n{number}")) for number in range(count)]
        most = 0
        while not all(request.done() for request in asked):
            most = max(most, session.statistics().requests_in_flight)
            await asyncio.sleep(0)
        assert 0 < most <= REQUESTS_IN_FLIGHT_MAX
        assert len(await session.children("/")) == count


async def test_a_stalled_connection_does_not_block_the_event_loop(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        session = await fleet.session(proxy.hosts)
        proxy.stall()
        asked = [asyncio.ensure_future(session.get("/")) for _ in range(1000)]
        await eventually(lambda: session.statistics().requests_in_flight == REQUESTS_IN_FLIGHT_MAX)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ConnectionLostError}
        proxy.resume()
        await session.wait_connected()
        await session.get("/")


async def test_no_server_is_an_error_with_a_remedy() -> None:
    async with no_leaks():
        session = Session("127.0.0.1:1", session_timeout_s=1.0)
        with pytest.raises(
            CoordinationTimeoutError, match=r"127\.0\.0\.1:1 within 0\.3 s: check the address"
        ):
            await session.start(timeout_s=0.3)
        assert session.state is SessionState.CLOSED


async def test_a_closed_session_says_so(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        states: list[SessionState] = []
        session.add_listener(states.append)
        await session.close()
        await session.close()
        assert states == [SessionState.CLOSED]
        with pytest.raises(SessionClosedError):
            await session.get("/")
        with pytest.raises(SessionClosedError):
            await session.wait_connected()
        with pytest.raises(SessionClosedError):
            await session.start()


async def test_a_watch_fires_once_on_the_event_loop(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        hints: list[tuple[Hint, bool]] = []

        def note(hint: Hint) -> None:
            hints.append((hint, asyncio.get_running_loop().is_running()))

        assert await session.exists("/a", note) is None
        await session.create("/a")
        await eventually(lambda: hints)
        assert hints == [(Hint(HintKind.CHANGED, WatchKind.DATA, "/a"), True)]
        await session.children("/a", note)
        await session.create("/a/b")
        await eventually(lambda: len(hints) == 2)
        await session.create("/a/c")
        assert len(hints) == 2
        assert session.statistics().watches == 0


async def test_a_forgotten_watch_is_removed_at_the_server(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        await session.create("/a")
        before = await server_watches(zookeeper_hosts)
        hints: list[Hint] = []
        other: list[Hint] = []
        await session.get("/a", hints.append)
        await session.get("/a", other.append)
        await session.children("/a", hints.append)
        assert await server_watches(zookeeper_hosts) == before + 2
        session.forget_watch(WatchKind.CHILDREN, "/a", hints.append)
        session.forget_watch(WatchKind.DATA, "/a", hints.append)
        await watches_become(zookeeper_hosts, before + 1)
        await session.set("/a", b"x")
        await eventually(lambda: other)
        assert hints == []


async def test_watches_are_spent_with_the_connection(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        hints: list[Hint] = []
        await session.children("/", hints.append)
        session_id = session.session_id
        await lose_connection(session)
        assert [hint.kind for hint in hints] == [HintKind.SPENT]
        assert session.session_id == session_id
        assert session.statistics().watches == 0


async def test_suspended_and_lost_are_different(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        states: list[SessionState] = []
        remove = session.add_listener(states.append)
        await session.create("/mine", ephemeral=True)
        first = session.session_id
        await lose_connection(session)
        assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
        assert session.session_id == first
        assert await session.exists("/mine") is not None
        states.clear()
        await expire_session(session, zookeeper_hosts)
        assert states == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
        assert session.session_id not in {0, first}
        assert await session.exists("/mine") is None
        remove()
        await lose_connection(session)
        assert len(states) == 3


async def test_an_answer_that_got_lost_leaves_the_write_applied(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        session = await fleet.session(proxy.hosts)
        proxy.swallow_answers()
        request = asyncio.ensure_future(session.create("/a", b"applied"))
        await eventually(lambda: proxy.swallowed_bytes > 0)
        proxy.cut()
        with pytest.raises(ConnectionLostError, match="may have been applied"):
            await request
        proxy.resume()
        await session.wait_connected()
        assert (await session.get("/a"))[0] == b"applied"


async def test_the_lease_lapses_before_the_server_ends_the_session(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=1.5) as fleet:
        proxy = await fleet.proxy()
        session = await fleet.session(proxy.hosts)
        other = await fleet.session()
        clock = session.clock
        await session.create("/mine", ephemeral=True)
        assert session.timeout_s == 1.5
        until_ns = session.lease_until_ns
        assert until_ns is not None
        assert 0 < until_ns - clock() <= 0.8 * 1.5 * SECOND_NS
        await eventually(lambda: (session.lease_until_ns or 0) > until_ns, "the lease is renewed by itself")
        proxy.stall()
        await eventually(lambda: not session.lease_valid(clock()), "the lease lapses")
        assert session.statistics().expiries == 0
        assert await other.exists("/mine") is not None
        gone: list[Hint] = []
        await other.exists("/mine", gone.append)
        await eventually(lambda: gone, "the server ends the session")
        proxy.resume()
        await eventually(lambda: session.statistics().expiries == 1, "the session learns of it")
        await eventually(lambda: session.lease_valid(clock()), "the new session has a lease")


async def test_a_session_knows_how_long_the_server_has_answered(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        session = await fleet.session(proxy.hosts)
        since_ns, until_ns = session.answering_ns
        assert 0 < since_ns <= until_ns <= session.clock()
        await eventually(lambda: session.answering_ns[1] > until_ns, "the server answers on")
        assert session.answering_ns[0] == since_ns
        proxy.stall()
        asked_ns = session.clock()
        await eventually(lambda: session.state is not SessionState.CONNECTED, "the connection breaks")
        assert session.answering_ns[0] == since_ns and session.answering_ns[1] < asked_ns
        proxy.resume()
        await eventually(lambda: session.answering_ns[1] > asked_ns, "it answers again")
        assert session.answering_ns[0] > asked_ns


async def test_reads_alone_do_not_extend_the_lease(zookeeper_hosts: str, chroot: str) -> None:
    # So long a timeout that the lease is not renewed by itself meanwhile.
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=30.0) as fleet:
        now_ns = 1
        session = await fleet.session(clock=lambda: now_ns)
        until_ns = session.lease_until_ns
        now_ns = SECOND_NS
        await session.get("/")
        await session.children("/")
        await session.exists("/")
        assert session.lease_until_ns == until_ns
        await session.create("/a")
        assert session.lease_until_ns == SECOND_NS + int(0.8 * session.timeout_s * SECOND_NS)


async def test_a_server_restart_keeps_the_session(chroot: str) -> None:
    with EmbeddedZooKeeper() as server:
        async with Fleet(server.hosts, chroot, session_timeout_s=8.0) as fleet:
            session = await fleet.session()
            await session.create("/mine", ephemeral=True)
            first = session.session_id
            await asyncio.to_thread(server.kill_member, 0)
            await eventually(lambda: session.state is SessionState.SUSPENDED)
            with pytest.raises(ConnectionLostError, match="not connected to ZooKeeper"):
                await session.get("/mine")
            await asyncio.to_thread(server.restart_member, 0)
            await asyncio.wait_for(session.wait_connected(), 10)
            assert session.session_id == first
            assert await session.exists("/mine") is not None


async def test_a_client_killed_by_garbage_is_replaced(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        session = await fleet.session(proxy.hosts)
        # An answer to a request that was never made.
        proxy.inject(struct.pack("!iiqi", 16, 123456, 1, 0))
        await eventually(lambda: session.statistics().clients_replaced == 1)
        await eventually(lambda: session.state is SessionState.CONNECTED)
        await session.create("/alive")


async def test_closing_while_the_server_is_silent_is_quick(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=10.0) as fleet:
        proxy = await fleet.proxy()
        async with no_leaks():
            session = await fleet.session(proxy.hosts)
            proxy.stall()
            async with asyncio.timeout(5):
                await session.close()
            proxy.resume()


async def test_many_lost_connections_and_sessions_leak_nothing(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        await fleet.session()
        watches = await server_watches(zookeeper_hosts)
        async with no_leaks():
            session = Session(zookeeper_hosts, chroot, session_timeout_s=2.0)
            await session.start()
            for number in range(100):
                await session.children("/", lambda hint: None)
                if number % 10 == 0:
                    await expire_session(session, zookeeper_hosts)
                else:
                    await lose_connection(session)
            assert session.statistics().expiries == 10
            assert session.statistics().reconnects >= 100
            await session.close()
        await watches_become(zookeeper_hosts, watches)
