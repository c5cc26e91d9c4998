"""What goes wrong in a run, drawn from its seed.

Two kinds of faults have a life of their own each. Faults of the *data plane* (brokers, clients, links
between them) come one after the other, and only when the overlay has recovered from the last one: what
is promised is promised for one of them at a time (docs/guarantees.md). Faults of *ZooKeeper* (its
members, the ways to it, sessions) come whenever they like, also while the data plane has one.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from coordinator.session import SessionState
from overlay.limits import MILLISECOND_NS, SECOND_NS
from routing_broker import RoutingBroker
from simulation.checkers import Excuse, LeaderChecker
from simulation.handovers import FOR_EVER_NS
from simulation.nodes import ClientProcess, EdgeProcess, RouterProcess
from simulation.overlay_model import MEMBERS, PLANNED_FAILOVER_MS, SimulatedOverlay
from simulation.pipes import Pipe
from simulation.zookeeper_client import ModelClient

_HEALTHY_FOR_NS: Final = 2 * SECOND_NS
"""How long all has to be well before the next fault of the data plane."""
_AFTERMATH_NS: Final = SECOND_NS
"""How long after the overlay has recovered from an excused fault what is lost may be a consequence."""
_ON_ITS_WAY_NS: Final = SECOND_NS
"""How long before an edge fails what is lost there may have been published, in an overlay that is well."""
_WAITING_NS: Final = 3 * SECOND_NS
"""How long before a primary is cut off what is lost there may have been published."""

Heal = Callable[[], None]
Fault = Callable[[], tuple[str, Heal]]


@dataclass(slots=True)
class _Open:
    """An excuse whose end is not known yet."""

    excuse: Excuse
    applies: Callable[[], bool] | None
    """Asked at its end: whether what is not promised has happened at all; always if None."""
    is_over: bool = False
    """The fault is; its consequences are not."""


class Faults:
    """Injects faults into an overlay and takes them back."""

    def __init__(self, overlay: SimulatedOverlay, leaders: LeaderChecker, seed: int) -> None:
        self._overlay = overlay
        self._leaders = leaders
        self._least_s = 0.0
        """How long the fault that is being injected has to last."""
        self._randomness = random.Random(f"faults/{seed}")
        self.injected: list[str] = []
        self._excuses: list[Excuse] = []
        self._open: list[_Open] = []
        self._data: tuple[int, Heal] | None = None
        self._data_faults = 0
        self._zookeeper: tuple[int, Heal] | None = None
        self._zookeeper_faults = 0
        self._zookeeper_healed_ns = -FOR_EVER_NS
        """When the last of them was taken back."""
        self._healthy_since_ns: int | None = None
        self._next_zookeeper_ns = 0
        self._data_kinds: tuple[Fault, ...] = (
            self._kill_router,
            self._kill_router,
            self._lose_power,
            self._freeze_router,
            self._cut_edge,
            self._cut_one_way,
            self._cut_routers,
            self._reset_connections,
            self._slow_link,
            self._freeze_edge,
            self._kill_edge,
            self._kill_client,
            self._kill_primary_behind_cut,
            self._restart_leader_unnoticed,
        )
        if overlay.has_direct_paths:
            self._data_kinds += (self._cut_direct, self._cut_direct, self._slow_direct)
        self._zookeeper_kinds: tuple[Fault, ...] = (
            self._cut_broker_off_zookeeper,
            self._cut_broker_off_zookeeper,
            self._slow_zookeeper,
            self._close_member,
            self._cut_member_off,
            self._lag_member,
            self._close_all_members,
            self._expire_session,
            self._reset_zookeeper,
        )

    def step(self) -> None:
        """Take back what is over, inject what is due; called several times a second."""
        now_ns = self._overlay.world.now_ns
        if any(item.is_over for item in self._open) and not self._overlay.what_is_wrong():
            self._end_excuses()
        if self._data is not None and self._data[0] <= now_ns:
            self._data[1]()
            self._data = None
            self._healthy_since_ns = None
        if self._zookeeper is not None and self._zookeeper[0] <= now_ns:
            self._zookeeper[1]()
            self._zookeeper = None
            self._zookeeper_healed_ns = now_ns
            self._next_zookeeper_ns = now_ns + self._duration_ns(0.0, 6.0)
        if self._data is None:
            self._watch_health(now_ns)
            if (
                self._healthy_since_ns is not None
                and now_ns - self._healthy_since_ns >= _HEALTHY_FOR_NS
                and self._randomness.random() < 0.5
            ):
                self._data_faults += 1
                self._data = self._inject(self._data_kinds, now_ns, 0.1, 8.0)
        if self._zookeeper is None and now_ns >= self._next_zookeeper_ns:
            self._zookeeper_faults += 1
            self._zookeeper = self._inject(self._zookeeper_kinds, now_ns, 0.1, 8.0)

    def heal(self) -> None:
        """Take everything back."""
        for active in (self._data, self._zookeeper):
            if active is not None:
                active[1]()
        self._data = self._zookeeper = None

    def excuses(self) -> list[Excuse]:
        """What is not judged, when the overlay has recovered or had its time to."""
        if not self._overlay.what_is_wrong():
            self._end_excuses()
        return self._excuses + [item.excuse for item in self._open]

    def _end_excuses(self) -> None:
        """The overlay has recovered: from now on everything counts."""
        until_ns = self._overlay.world.now_ns + _AFTERMATH_NS
        over = [item for item in self._open if item.is_over]
        self._open = [item for item in self._open if not item.is_over]
        self._excuses += [
            replace(item.excuse, until_ns=until_ns) for item in over if item.applies is None or item.applies()
        ]

    def _watch_health(self, now_ns: int) -> None:
        if self._overlay.what_is_wrong():
            self._healthy_since_ns = None
        elif self._healthy_since_ns is None:
            self._healthy_since_ns = now_ns

    def _inject(
        self, kinds: tuple[Fault, ...], now_ns: int, least_s: float, most_s: float
    ) -> tuple[int, Heal]:
        duration_ns = self._duration_ns(least_s, most_s)
        self._least_s = 0.0
        what, heal = self._randomness.choice(kinds)()
        until_ns = now_ns + max(duration_ns, int(self._least_s * SECOND_NS))
        what = f"{now_ns / SECOND_NS:.2f} s: {what}, until {until_ns / SECOND_NS:.2f} s"
        self.injected.append(what)
        self._overlay.world.note(what, "fault")
        return until_ns, heal

    def _duration_ns(self, least_s: float, most_s: float) -> int:
        # Short ones are as likely as long ones: a fault that is over before it is noticed is one too.
        return int(least_s * SECOND_NS) + int((most_s - least_s) * SECOND_NS * self._randomness.random() ** 2)

    # Data plane

    def _kill_router(self) -> tuple[str, Heal]:
        router = self._randomness.choice(self._overlay.routers)
        router.kill(self._randomness)
        return f"kill {router.name}", router.start

    def _lose_power(self) -> tuple[str, Heal]:
        router = self._randomness.choice(self._overlay.routers)
        router.lose_power()
        heal = self._isolate(router.name, self._names_but(router.name))

        def back() -> None:
            heal()
            router.start()

        return f"{router.name} loses power", back

    def _freeze_router(self) -> tuple[str, Heal]:
        router = self._randomness.choice(self._overlay.routers)
        router.freeze()
        return f"freeze {router.name}", router.thaw

    def _freeze_edge(self) -> tuple[str, Heal]:
        edge = self._randomness.choice(self._overlay.edges)
        clients = self._clients_of(edge)
        edge.freeze()
        return f"freeze {edge.name}", self._excused_unless_taken_over(edge, clients, edge.thaw)

    def _kill_edge(self) -> tuple[str, Heal]:
        edge = self._randomness.choice(self._overlay.edges)
        clients = self._clients_of(edge)
        edge.kill(self._randomness)
        return f"kill {edge.name}", self._excused_unless_taken_over(edge, clients, edge.start)

    def _kill_client(self) -> tuple[str, Heal]:
        client = self._randomness.choice(self._overlay.clients)
        client.kill(self._randomness)
        # Its new subscriptions are known everywhere when all is well, not before if ZooKeeper is away.
        return f"kill {client.name}", self._excused([client], client.start, 0)

    def _kill_primary_behind_cut(self) -> tuple[str, Heal]:
        """A primary dies while it cannot reach an edge: only the copies at its backup are left.

        Topics whose deadline spares them copies are not promised anything then. It is killed only if it had
        the same backup all the time.
        """
        overlay, randomness = self._overlay, self._randomness
        plan = randomness.choice(overlay.topics)
        record = overlay.record_of(plan.name)
        primary = next(router for router in overlay.routers if record and router.name == record.primary)
        edge = randomness.choice([edge for edge in overlay.edges if edge.lan not in plan.publisher])
        heal_cut = self._isolate(edge.name, [primary.name])
        copied = [topic for topic in overlay.topics if overlay.is_replicated(topic)]
        kill_after_s = randomness.uniform(3.0, 5.0)
        self._least_s = kill_after_s + 0.5
        before = [overlay.record_of(topic.name) for topic in overlay.topics]

        def kill() -> None:
            if before == [overlay.record_of(topic.name) for topic in overlay.topics]:
                primary.kill(randomness)

        timer = overlay.network.kernel.call_later(kill_after_s, kill)
        spared = [topic.name for topic in overlay.topics if topic not in copied]

        def heal() -> None:
            timer.cancel()
            heal_cut()
            if not primary.is_alive:
                primary.start()

        what = f"cut {edge.name} from {primary.name} and kill {primary.name} {kill_after_s:.2f} s later"
        return what, self._excused(overlay.clients, heal, _WAITING_NS, topics=spared)

    def _restart_leader_unnoticed(self) -> tuple[str, Heal]:
        """What a killed leader had written reaches ZooKeeper when its successor has been elected.

        Routing brokers lose their sessions on the way, so losses are not judged.
        """
        overlay, randomness = self._overlay, self._randomness
        leader = next(router for router in overlay.routers if router.broker and router.broker.is_leader)
        other = randomness.choice([router for router in overlay.routers if router is not leader])
        assert other.broker is not None
        assert leader.broker is not None
        client = leader.broker.session._client
        assert isinstance(client, ModelClient)
        kernel = overlay.network.kernel
        restart_after_s = randomness.uniform(0.02, 0.2)
        self._least_s = 2.0
        held: list[Pipe] = []

        def hold() -> None:
            client.before_transaction = None
            for name in MEMBERS:
                for end in overlay.network.connections_between(leader.name, name):
                    end.outward.hold()
                    held.append(end.outward)
            kernel.call_later(restart_after_s, restart)

        def restart() -> None:
            leader.kill()
            leader.start()
            self._leaders.on_epoch.append(release)

        def release() -> None:
            client.before_transaction = None
            for pipe in held:
                pipe.release()
            held.clear()

        client.before_transaction = hold
        overlay.ensemble.end_session(other.broker.session.session_id)
        what = f"expire {other.name}, restart {leader.name} and delay what it wrote"
        return what, self._excused(overlay.clients, release, _WAITING_NS)

    def _cut_edge(self) -> tuple[str, Heal]:
        edge, router = self._edge_and_router()
        return f"cut {edge} from {router}", self._excused_if_moved(self._isolate(edge, [router]))

    def _cut_one_way(self) -> tuple[str, Heal]:
        pair = list(self._edge_and_router())
        self._randomness.shuffle(pair)
        network = self._overlay.network
        network.block(*pair)
        heal = self._excused_if_moved(lambda: network.unblock(*pair))
        return f"cut the way from {pair[0]} to {pair[1]}", heal

    def _cut_routers(self) -> tuple[str, Heal]:
        one, other = self._randomness.sample(self._overlay.routers, 2)
        return f"cut {one.name} from {other.name}", self._isolate(one.name, [other.name])

    def _reset_connections(self) -> tuple[str, Heal]:
        process = self._randomness.choice(self._overlay.brokers)
        others = [name for name in self._names_but(process.name) if name not in MEMBERS]
        other = self._randomness.choice(others)
        for end in self._overlay.network.connections_between(process.name, other):
            end.reset()
        return f"reset connections of {process.name} and {other}", _nothing

    def _slow_link(self) -> tuple[str, Heal]:
        pair = list(self._edge_and_router())
        self._randomness.shuffle(pair)
        return f"slow the way from {pair[0]} to {pair[1]}", self._slow(pair[0], pair[1], 200)

    def _cut_direct(self) -> tuple[str, Heal]:
        one, other = self._edges_of_two_lans()
        network = self._overlay.network
        if self._randomness.random() < 0.5:
            return f"cut {one} from {other}", self._isolate(one, [other])
        network.block(one, other)
        return f"cut the way from {one} to {other}", lambda: network.unblock(one, other)

    def _slow_direct(self) -> tuple[str, Heal]:
        one, other = self._edges_of_two_lans()
        return f"slow the way from {one} to {other}", self._slow(one, other, 200)

    # ZooKeeper

    def _cut_broker_off_zookeeper(self) -> tuple[str, Heal]:
        broker = self._randomness.choice(self._overlay.brokers)
        heal = self._isolate(broker.name, list(MEMBERS))
        heal = self._excused_if_session_ends(broker, heal)
        return f"cut {broker.name} from ZooKeeper", heal

    def _slow_zookeeper(self) -> tuple[str, Heal]:
        broker = self._randomness.choice(self._overlay.brokers)
        heals = [self._slow(broker.name, name, 2_000) for name in MEMBERS]

        def heal() -> None:
            for item in heals:
                item()

        heal = self._excused_if_session_ends(broker, heal)
        return f"slow the way from {broker.name} to ZooKeeper", heal

    def _close_member(self) -> tuple[str, Heal]:
        name = self._randomness.choice(MEMBERS)
        self._overlay.close_member(name)
        heal = self._excused_if_sessions_end(lambda: self._overlay.open_member(name))
        return f"close {name}", heal

    def _cut_member_off(self) -> tuple[str, Heal]:
        name = self._randomness.choice(MEMBERS)
        member, _ = self._overlay.members[name]
        member.cut_off = True

        return f"cut {name} from its ensemble", self._excused_if_sessions_end(member.rejoin)

    def _lag_member(self) -> tuple[str, Heal]:
        name = self._randomness.choice(MEMBERS)
        member, _ = self._overlay.members[name]
        member.lag_s = self._randomness.uniform(0.05, 2.0)

        def heal() -> None:
            member.lag_s = 0.0
            member.catch_up()

        return f"{name} lags by {member.lag_s:.2f} s", self._excused_if_sessions_end(heal)

    def _close_all_members(self) -> tuple[str, Heal]:
        overlay = self._overlay
        for name in MEMBERS:
            overlay.close_member(name)
        overlay.ensemble.paused = True

        def heal() -> None:
            overlay.ensemble.resume()
            for name in MEMBERS:
                overlay.open_member(name)

        return "close all of ZooKeeper", self._excused_if_sessions_end(heal)

    def _expire_session(self) -> tuple[str, Heal]:
        sessions = list(self._overlay.ensemble.sessions)
        if not sessions:
            return "expire no session", _nothing
        session = self._randomness.choice(sessions)
        heal: Heal = _nothing
        for broker in self._overlay.brokers:
            if broker.broker is not None and broker.broker.session.session_id == session:
                leader = broker.broker if isinstance(broker.broker, RoutingBroker) else None
                if leader is not None and leader.is_leader and not self._hears_zookeeper(leader):
                    # ZooKeeper itself would wait for the session's timeout, and the lease is shorter.
                    return "expire no session", _nothing
                heal = self._excused_if_session_ends(broker, heal)
        self._overlay.ensemble.end_session(session)
        return f"expire session {session:x}", heal

    def _reset_zookeeper(self) -> tuple[str, Heal]:
        broker = self._randomness.choice(self._overlay.brokers)
        for name in MEMBERS:
            for end in self._overlay.network.connections_between(broker.name, name):
                end.reset()
        return f"reset connections of {broker.name} to ZooKeeper", _nothing

    # Details

    def _hears_zookeeper(self, broker: RoutingBroker) -> bool:
        """What ZooKeeper tells it arrives soon."""
        ways = [self._overlay.network.path(name, broker.id) for name in MEMBERS]
        return broker.session.state is SessionState.CONNECTED and not any(
            way.is_blocked or way.slow_ns for way in ways
        )

    def _edge_and_router(self) -> tuple[str, str]:
        return (
            self._randomness.choice(self._overlay.edges).name,
            self._randomness.choice(self._overlay.routers).name,
        )

    def _edges_of_two_lans(self) -> tuple[str, str]:
        one = self._randomness.choice(self._overlay.edges)
        other = self._randomness.choice([edge for edge in self._overlay.edges if edge.lan != one.lan])
        return one.name, other.name

    def _names_but(self, name: str) -> list[str]:
        return [other for other in self._overlay.network.machines if other != name]

    def _clients_of(self, edge: EdgeProcess) -> list[ClientProcess]:
        """The clients that an edge serves now."""
        return [
            process
            for process in self._overlay.clients
            if process.client is not None and process.client.edge == edge.name
        ]

    def _isolate(self, name: str, others: list[str]) -> Heal:
        network = self._overlay.network
        for other in others:
            network.block(name, other)
            network.block(other, name)

        def heal() -> None:
            for other in others:
                network.unblock(name, other)
                network.unblock(other, name)

        return heal

    def _slow(self, source: str, target: str, most_ms: int) -> Heal:
        path = self._overlay.network.path(source, target)
        slow_ns = self._randomness.randrange(most_ms * MILLISECOND_NS)
        path.slow_ns += slow_ns

        def heal() -> None:
            path.slow_ns -= slow_ns

        return heal

    def _excused(
        self,
        clients: Iterable[ClientProcess],
        heal: Heal,
        before_ns: int,
        *,
        topics: Iterable[str] | None = None,
        applies: Callable[[], bool] | None = None,
    ) -> Heal:
        """What these clients should receive around this fault is not promised."""
        world = self._overlay.world
        names = frozenset(client.name for client in clients)
        only = None if topics is None else frozenset(topics)
        item = _Open(Excuse(names, world.now_ns - before_ns, FOR_EVER_NS, only), applies)
        self._open.append(item)

        def over() -> None:
            item.is_over = True
            heal()

        return over

    def _excused_unless_taken_over(self, edge: EdgeProcess, clients: list[ClientProcess], heal: Heal) -> Heal:
        """The clients of an edge that dies or freezes go on at another one of their LAN, if it has one.

        That takes longer than topics are planned for only if ZooKeeper does not answer.
        """
        overlay = self._overlay
        if sum(other.lan == edge.lan for other in overlay.edges) == 1:
            return self._excused(clients, heal, _ON_ITS_WAY_NS)
        late: list[ClientProcess] = []
        before = self._zookeeper_faults
        settled_ns = int(overlay.shape.session_timeout_s * SECOND_NS)
        disturbed = self._zookeeper is not None or (
            overlay.world.now_ns - self._zookeeper_healed_ns < settled_ns
        )

        def look() -> None:
            late.extend(client for client in clients if not overlay.is_served(client))

        def applies() -> bool:
            return bool(late) and (disturbed or self._zookeeper_faults > before)

        overlay.network.kernel.call_later(PLANNED_FAILOVER_MS / 1000, look)
        return self._excused(clients, heal, _ON_ITS_WAY_NS, applies=applies)

    def _excused_if_session_ends(
        self, broker: RouterProcess | EdgeProcess, heal: Heal, *, alive: bool = False
    ) -> Heal:
        """Who is served by an edge whose session ends misses what is published until it has registered again.

        A routing broker whose session ends is replaced as if it had died. That costs nobody more than the
        tolerance, unless something else happens to the data plane before all is well again. `alive`: not if
        the session ended because its broker died.
        """
        overlay = self._overlay
        session = broker.broker.session.session_id if broker.broker is not None else 0
        clients = self._clients_of(broker) if isinstance(broker, EdgeProcess) else overlay.clients
        faults = self._data_faults - (self._data is not None)
        starts = broker.starts

        def applies() -> bool:
            ended = session not in overlay.ensemble.sessions
            if alive and (not session or broker.starts != starts or not broker.is_alive):
                return False
            return ended and (isinstance(broker, EdgeProcess) or self._data_faults > faults)

        return self._excused(clients, heal, _ON_ITS_WAY_NS, applies=applies)

    def _excused_if_sessions_end(self, heal: Heal) -> Heal:
        """The same for all routing brokers: ZooKeeper itself has a fault, and anybody's session may end."""
        for broker in self._overlay.routers:
            heal = self._excused_if_session_ends(broker, heal, alive=True)
        return heal

    def _excused_if_moved(self, heal: Heal) -> Heal:
        """A primary that is replaced while it cannot reach an edge keeps what waits for it.

        Copies save that; topics whose deadline spares them copies are not promised anything then.
        """
        overlay = self._overlay
        from_ns = overlay.world.now_ns - _WAITING_NS
        spared = [topic.name for topic in overlay.topics if not overlay.is_replicated(topic)]
        before = {name: overlay.record_of(name) for name in spared}
        names = frozenset(client.name for client in overlay.clients)

        def over() -> None:
            moved = frozenset(name for name in spared if overlay.record_of(name) != before[name])
            if moved:
                self._open.append(_Open(Excuse(names, from_ns, FOR_EVER_NS, moved), None, is_over=True))
            heal()

        return over


def _nothing() -> None:
    """There is nothing to take back."""
