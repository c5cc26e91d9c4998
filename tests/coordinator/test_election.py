"""The election: who leads, who waits, and that an old leader cannot act once there is a new one."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import Coordinator, FencedError, Session
from coordinator.election import Candidacy, Mandate, Standing, standing
from coordinator.limits import REQUESTS_IN_FLIGHT_MAX
from coordinator.operations import Create
from tests.coordinator.faults import (
    Fleet,
    eventually,
    expire_session,
    lose_connection,
    no_leaks,
    watches_become,
)

GUIDS = ["a" * 32, "b" * 32, "c" * 32]


@given(st.permutations(range(12)), st.integers(1, 3))
def test_everyone_but_the_first_has_exactly_one_predecessor(order: list[int], count: int) -> None:
    names = [f"candidate-{number:032x}-{order[number]:010d}" for number in range(count)]
    places = [standing(names, f"{number:032x}") for number in range(count)]
    assert sum(place.first for place in places) == 1
    waited_for = [place.predecessor for place in places if place.predecessor is not None]
    assert len(set(waited_for)) == len(waited_for) == count - 1


def test_a_candidate_finds_itself_by_its_guid() -> None:
    names = ["candidate-x-0000000007", "candidate-y-0000000003", "no candidate", "candidate-z-last"]
    assert standing(names, "x") == Standing("candidate-x-0000000007", "candidate-y-0000000003")
    assert standing(names, "y").first
    assert standing(names, "q") == Standing(None, None)
    assert not standing([], "x").first


@dataclass
class Candidate:
    """A candidacy that only records what happens to it."""

    session: Session
    mandates: list[Mandate] = field(default_factory=list)
    changes: list[tuple[bool, int, int]] = field(default_factory=list)

    def join(self, name: str) -> "Candidate":
        self.candidacy = Candidacy(self.session, name, self._lead, self._note)
        return self

    async def _lead(self, mandate: Mandate) -> None:
        self.mandates.append(mandate)
        await asyncio.Event().wait()

    def _note(self, leads: bool, epoch: int) -> None:
        self.changes.append((leads, epoch, time.monotonic_ns()))

    @property
    def leads(self) -> bool:
        return self.candidacy.is_leader


async def candidate(fleet: Fleet, name: str, hosts: str | None = None) -> Candidate:
    session = await fleet.session(hosts)
    await Coordinator(session).start()
    return Candidate(session).join(name)


@pytest.mark.integration
async def test_the_first_leads_and_the_next_takes_over(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        first = await candidate(fleet, "r1")
        await eventually(lambda: first.leads)
        second, third = await candidate(fleet, "r2"), await candidate(fleet, "r3")
        await eventually(lambda: second.session.statistics().watches and third.session.statistics().watches)
        assert (first.candidacy.epoch, second.leads, third.leads) == (1, False, False)
        # Each waits for the one before: the last takes notice of the middle one, and does not lead.
        await second.candidacy.close()
        await eventually(lambda: third.session.statistics().hints)
        await eventually(lambda: third.session.statistics().watches)
        assert first.leads
        assert third.changes == []
        await first.candidacy.close()
        await eventually(lambda: third.leads)
        assert third.candidacy.epoch == 2
        assert [change[:2] for change in first.changes] == [(True, 1), (False, 1)]
        await third.candidacy.close()
        assert await third.session.children("/leader") == []


@pytest.mark.integration
async def test_a_lost_connection_does_not_end_a_leadership(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        first = await candidate(fleet, "r1")
        await eventually(lambda: first.leads)
        await lose_connection(first.session)
        await eventually(lambda: first.session.statistics().watches == 2, "it watches its znodes again")
        assert first.leads
        assert [change[:2] for change in first.changes] == [(True, 1)]


@pytest.mark.integration
async def test_an_expired_session_ends_a_leadership(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        first = await candidate(fleet, "r1")
        await eventually(lambda: first.leads)
        second = await candidate(fleet, "r2")
        await eventually(lambda: second.session.statistics().watches)
        await expire_session(first.session, zookeeper_hosts)
        await eventually(lambda: second.leads)
        assert not first.leads
        assert not first.mandates[0].valid()
        with pytest.raises(FencedError, match="lease of epoch 1 has lapsed"):
            await first.mandates[0].commit([Create("/forbidden")])
        await second.candidacy.close()
        await eventually(lambda: first.leads, "the first stands again, in its new session")
        assert first.candidacy.epoch == 3


@pytest.mark.integration
async def test_a_candidate_whose_answer_got_lost_stands_once(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        session = await fleet.session(proxy.hosts)
        await Coordinator(session).start()
        observer = await fleet.session()
        create = session.create

        async def create_and_lose(path: str, *arguments: object, **options: object) -> str:
            session.create = create  # type: ignore[method-assign]
            proxy.swallow_answers()
            request = asyncio.ensure_future(create(path, *arguments, **options))  # type: ignore[arg-type]
            while not await observer.children("/leader"):
                pass
            proxy.cut()
            proxy.resume()
            return await request

        session.create = create_and_lose  # type: ignore[method-assign]
        first = Candidate(session).join("r1")
        await eventually(lambda: first.leads)
        assert session.statistics().answers_lost > 0
        assert len(await observer.children("/leader")) == 1


@pytest.mark.integration
async def test_a_claim_whose_answer_got_lost_is_made_again(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        proxy = await fleet.proxy()
        session = await fleet.session(proxy.hosts)
        await Coordinator(session).start()
        observer = await fleet.session()
        transaction = session.transaction

        async def claim_and_lose(operations: object) -> object:
            session.transaction = transaction  # type: ignore[method-assign]
            proxy.swallow_answers()
            request = asyncio.ensure_future(transaction(operations))  # type: ignore[arg-type]
            while (await observer.get("/epoch"))[1].version == 0:
                pass
            proxy.cut()
            proxy.resume()
            return await request

        session.transaction = claim_and_lose  # type: ignore[assignment]
        first = Candidate(session).join("r1")
        # Its work begins a moment after it leads.
        await eventually(lambda: first.leads and first.mandates)
        assert first.candidacy.epoch == 2
        assert [mandate.epoch for mandate in first.mandates] == [2]


@pytest.mark.integration
async def test_a_restarted_router_does_not_wait_for_its_own_ghost(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=20.0) as fleet:
        proxy = await fleet.proxy()
        ghost = await candidate(fleet, "r1", proxy.hosts)
        await eventually(lambda: ghost.leads)
        proxy.refuse(True)
        proxy.cut()
        again = await candidate(fleet, "r1")
        await eventually(lambda: again.leads, deadline_s=5)
        assert again.candidacy.epoch == 2
        # The ghost's lease would hold for long, but the server knows better.
        assert ghost.mandates[0].valid()
        proxy.refuse(False)
        await ghost.session.wait_connected()
        with pytest.raises(FencedError, match="epoch 1 is over"):
            await ghost.mandates[0].commit([Create("/forbidden")])
        await eventually(lambda: not ghost.leads)
        assert await again.session.exists("/forbidden") is None


@pytest.mark.integration
async def test_a_frozen_leader_stops_before_the_next_one_acts(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=1.5) as fleet:
        proxy = await fleet.proxy()
        old = await candidate(fleet, "r1", proxy.hosts)
        await eventually(lambda: old.leads)
        new = await candidate(fleet, "r2")
        await eventually(lambda: new.session.statistics().watches)
        proxy.stall()
        await eventually(lambda: new.leads)
        assert [change[:2] for change in old.changes] == [(True, 1), (False, 1)]
        assert old.changes[1][2] < new.changes[0][2]
        # It has not heard of its end: LOST comes only with the next connection.
        assert old.session.statistics().expiries == 0
        with pytest.raises(FencedError, match="lease of epoch 1 has lapsed"):
            await old.mandates[0].commit([Create("/forbidden")])
        proxy.resume()
        await eventually(lambda: old.session.statistics().expiries == 1)
        assert new.leads
        assert not old.leads


@pytest.mark.integration
async def test_a_leader_whose_session_survived_claims_again(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=2.0) as fleet:
        proxy = await fleet.proxy()
        only = await candidate(fleet, "r1", proxy.hosts)
        await eventually(lambda: only.leads)
        session_id = only.session.session_id
        proxy.stall()
        await eventually(lambda: not only.leads)
        proxy.resume()
        await eventually(lambda: only.leads)
        if only.session.session_id == session_id:
            assert only.candidacy.epoch == 2
        assert [mandate.epoch for mandate in only.mandates] == sorted({m.epoch for m in only.mandates})


@pytest.mark.integration
async def test_a_leader_gives_up_when_its_candidacy_is_removed(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        first = await candidate(fleet, "r1")
        await eventually(lambda: first.leads)
        second = await candidate(fleet, "r2")
        await eventually(lambda: second.session.statistics().watches)
        (lowest, _) = sorted(
            await second.session.children("/leader"), key=lambda name: name.rpartition("-")[2]
        )
        await second.session.delete(f"/leader/{lowest}")
        await eventually(lambda: second.leads and not first.leads)
        with pytest.raises(FencedError):
            await first.mandates[0].commit([Create("/forbidden")])


@pytest.mark.integration
async def test_a_leader_stops_at_the_hint_and_does_not_wait_for_an_answer(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        first = await candidate(fleet, "r1")
        await eventually(lambda: first.leads and first.session.statistics().watches == 2)
        observer = await fleet.session()
        (own,) = await observer.children("/leader")
        # Whatever it asks from now on stays unasked.
        for _ in range(REQUESTS_IN_FLIGHT_MAX):
            await first.session._window.acquire()
        await observer.delete(f"/leader/{own}")
        await eventually(lambda: not first.leads)
        assert first.session.lease_valid(first.session.clock())
        assert not first.mandates[0].valid()
        for _ in range(REQUESTS_IN_FLIGHT_MAX):
            first.session._window.release()
        await eventually(lambda: first.leads, "it stands again")
        assert first.candidacy.epoch == 2


@pytest.mark.integration
async def test_a_leader_whose_work_fails_leads_again(
    zookeeper_hosts: str, chroot: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("coordinator.election.RETRY_S", 0.01)
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        session = await fleet.session()
        await Coordinator(session).start()
        attempts: list[int] = []

        async def work(mandate: Mandate) -> None:
            attempts.append(mandate.epoch)
            if len(attempts) < 3:
                raise ValueError("a defect")
            await asyncio.Event().wait()

        candidacy = Candidacy(session, "r1", work)
        await eventually(lambda: len(attempts) == 3)
        assert attempts == [1, 2, 3]
        assert "the leader's work failed" in caplog.text
        await candidacy.close()


FROZEN = """
import asyncio, sys, time
from coordinator import Coordinator, Session
from coordinator.election import Candidacy

async def main(hosts, chroot):
    session = Session(hosts, chroot, session_timeout_s=1.0)
    await session.start()
    await Coordinator(session).start()
    async def work(mandate):
        await asyncio.Event().wait()
    candidacy = Candidacy(session, "frozen", work)
    while True:
        # One line for every moment at which this process would act as leader.
        if candidacy.is_leader:
            print(candidacy.epoch, time.monotonic_ns(), flush=True)
        await asyncio.sleep(0.002)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.integration
async def test_a_stopped_process_notices_by_its_lease_when_it_wakes(
    zookeeper_hosts: str, chroot: str
) -> None:
    async with Fleet(zookeeper_hosts, chroot, session_timeout_s=2.0) as fleet:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FROZEN, zookeeper_hosts, chroot, stdout=asyncio.subprocess.PIPE
        )
        acts: list[tuple[int, int]] = []

        async def read() -> None:
            assert process.stdout is not None
            async for line in process.stdout:
                if not line.endswith(b"\n"):
                    return  # it was killed while it wrote
                epoch, at_ns = line.split()
                acts.append((int(epoch), int(at_ns)))

        reading = asyncio.ensure_future(read())
        try:
            await eventually(lambda: acts, "the process leads")
            new = await candidate(fleet, "r2")
            await eventually(lambda: new.session.statistics().watches)
            os.kill(process.pid, signal.SIGSTOP)
            await eventually(lambda: new.leads)
            os.kill(process.pid, signal.SIGCONT)
            woken_ns = time.monotonic_ns()
            # It stands again behind us: then it has been awake for long enough to have done wrong.
            while len(await new.session.children("/leader")) < 2:
                assert time.monotonic_ns() - woken_ns < 10e9
            await new.candidacy.close()
            await eventually(lambda: acts[-1][0] == 3, "it leads again, by a new election")
            took_over_ns = new.changes[0][2]
            assert [act for act in acts if act[0] == 1 and act[1] > took_over_ns] == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            await reading


@pytest.mark.integration
async def test_many_elections_leak_nothing(zookeeper_hosts: str, chroot: str) -> None:
    async with Fleet(zookeeper_hosts, chroot) as fleet:
        first, second = await fleet.session(), await fleet.session()
        await Coordinator(first).start()
        await watches_become(zookeeper_hosts, 0)
        async with no_leaks():
            for _ in range(50):
                one = Candidate(first).join("r1")
                await eventually(lambda one=one: one.leads)
                two = Candidate(second).join("r2")
                await eventually(lambda: second.statistics().watches)
                await one.candidacy.close()
                await eventually(lambda two=two: two.leads)
                await two.candidacy.close()
        await watches_become(zookeeper_hosts, 0)
        assert await first.children("/leader") == []
