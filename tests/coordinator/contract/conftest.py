"""The same tests run against a real ZooKeeper through kazoo, and against the model of it."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from coordinator import EmbeddedZooKeeper, Session, SessionState, ZooKeeperClient
from coordinator.client import MakeClient
from simulation.zookeeper import Ensemble, Member
from simulation.zookeeper_client import ModelClient
from tests.coordinator.faults import FaultProxy, _end_session, eventually

SESSION_TIMEOUT_S = 2.0


class Servers:
    """What a contract test may do: open sessions, and do harm to them."""

    def __init__(self, hosts: str, chroot: str, make_client: MakeClient) -> None:
        self.hosts = hosts
        self.chroot = chroot
        self._make_client = make_client
        self._stack = AsyncExitStack()

    async def session(self, hosts: str | None = None, **options: Any) -> Session:
        """A session of its own."""
        session = Session(
            hosts or self.hosts,
            self.chroot,
            session_timeout_s=SESSION_TIMEOUT_S,
            make_client=self._make_client,
            **options,
        )
        await session.start()
        self._stack.push_async_callback(session.close)
        return session

    async def proxy(self) -> FaultProxy:
        """A way to the servers that can be broken."""
        return await self._stack.enter_async_context(FaultProxy(self.hosts))

    async def expire(self, session: Session) -> None:
        """End a session as the server does; returns when it has found out and has a new one."""
        before = session.statistics().expiries
        await self._end(session)
        await eventually(lambda: session.statistics().expiries > before, "the session is lost")
        await eventually(lambda: session.state is SessionState.CONNECTED, "there is a new session")

    async def close(self) -> None:
        """Close all sessions."""
        await self._stack.aclose()

    async def _end(self, session: Session) -> None:
        raise NotImplementedError


class RealServers(Servers):
    """A real ZooKeeper, through kazoo."""

    async def _end(self, session: Session) -> None:
        assert isinstance(session._client, ZooKeeperClient)
        await asyncio.to_thread(_end_session, self.hosts, session._client.credentials)


class ModelServers(Servers):
    """The model of ZooKeeper, on real sockets."""

    def __init__(self, ensemble: Ensemble, hosts: str, chroot: str) -> None:
        super().__init__(hosts, chroot, partial(ModelClient, randomness=random.Random(1)))
        self._ensemble = ensemble

    async def _end(self, session: Session) -> None:
        holder = self._ensemble.sessions[session.session_id].holder
        self._ensemble.end_session(session.session_id)
        holder.drop()


@pytest.fixture(params=["zookeeper", "model"])
async def servers(request: pytest.FixtureRequest, chroot: str) -> AsyncIterator[Servers]:
    """Servers of either kind."""
    if request.param == "zookeeper":
        zookeeper: EmbeddedZooKeeper = request.getfixturevalue("zookeeper")
        real = RealServers(zookeeper.hosts, chroot, ZooKeeperClient)
        yield real
        await real.close()
        return
    loop = asyncio.get_running_loop()
    ensemble = Ensemble(loop, random.Random(1))
    member = Member(ensemble, loop, "only")
    server = await member.listen("127.0.0.1", 0)
    model = ModelServers(ensemble, f"127.0.0.1:{server.sockets[0].getsockname()[1]}", chroot)
    yield model
    await model.close()
    member.stop_serving()
    server.close()
    await server.wait_closed()
    ensemble.close()
