"""One run from its seed: start an overlay, break it, heal it, judge it."""

import gc
import logging
import time
from dataclasses import dataclass
from typing import Final

from overlay.limits import MILLISECOND_NS, SECOND_NS
from routing_broker.broker import TOPIC_LINGER_S
from simulation.ablations import Ablation, without
from simulation.checkers import (
    Judgement,
    LeaderChecker,
    Violation,
    check_copies,
    check_messages,
    serves_for_others,
)
from simulation.faults import Faults
from simulation.handovers import Handovers
from simulation.nodes import RouterProcess, seconds
from simulation.overlay_model import CHROOT, Errors, SimulatedOverlay, bury, close
from simulation.schedule import LivelockError

_logger = logging.getLogger(__name__)

_LOOK_NS: Final = 250 * MILLISECOND_NS
"""How often invariants are asserted and faults decided."""
_START_MAX_NS: Final = 40 * SECOND_NS
_FAULTS_NS: Final = 30 * SECOND_NS
_RECOVER_MAX_NS: Final = 60 * SECOND_NS
_AFTER_NS: Final = 3 * SECOND_NS
_DRAIN_NS: Final = 12 * SECOND_NS
_COPIES_GONE_NS: Final = 8 * SECOND_NS
"""And so long after that all copies are gone: an edge may have died last whose session outlives it by four
seconds and its routes by two more, each noticed up to a second late; ten later it is given up."""
_TOPIC_LEFT_NS: Final = round(TOPIC_LINGER_S * SECOND_NS)
"""So long a routing broker goes on serving a topic that was taken from it. It keeps what waits for an edge,
which may have been restarted and have no reason to connect to it again."""
_EDGE_GIVEN_UP_NS: Final = 12 * SECOND_NS
"""And so long after that the edge is given up."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown."""

    seed: int
    violations: tuple[Violation, ...]
    simulated_s: float
    wall_s: float
    trace_hash: str
    faults: tuple[str, ...]
    published: int
    delivered: int
    owed: int
    """Pairs of a message and a subscription that it should reach."""
    judged: int
    """Those whose loss would count: not around a fault for which nothing is promised."""
    steps: int
    crash: str = ""
    """Why the run could not be judged, if it could not."""

    @property
    def verdict(self) -> str:
        """`held`, `broken` or `unknown`."""
        if self.violations:
            return "broken"
        return "unknown" if self.crash else "held"

    def to_record(self) -> dict[str, object]:
        """For JSON."""
        return {
            "seed": self.seed,
            "verdict": self.verdict,
            "simulated_s": round(self.simulated_s, 3),
            "wall_s": round(self.wall_s, 3),
            "trace_hash": self.trace_hash,
            "crash": self.crash,
            "violations": [str(item) for item in self.violations],
            "faults": list(self.faults),
            "published": self.published,
            "delivered": self.delivered,
            "owed": self.owed,
            "judged": self.judged,
        }


def simulate(seed: int, ablation: Ablation | None = None, log: list[str] | None = None) -> Outcome:
    """Run one seed, without one safeguard if `ablation` says so; `log` gets the whole history."""
    began_s = time.perf_counter()
    collecting = gc.isenabled()
    # What is thrown away in cycles is freed at the end: a run is short, and collecting costs time. What
    # was there before (all modules) is not looked through for what the run has left.
    gc.disable()
    gc.freeze()
    try:
        with without(ablation):
            outcome = _Run(seed, log).outcome(began_s)
        bury()
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return outcome


class _Run:
    def __init__(self, seed: int, log: list[str] | None) -> None:
        self._seed = seed
        self._overlay = SimulatedOverlay(seed)
        self._overlay.world.log = log
        self._leaders = LeaderChecker(CHROOT)
        self._faults = Faults(self._overlay, self._leaders, seed)
        self._overlay.ensemble.on_commit.append(self._leaders.committed)
        self._violations: list[Violation] = []
        self._judgement = Judgement()
        self._handovers = Handovers()
        self._served_ns: dict[str, int] = {}
        """Routing brokers that have served topics which were taken from them, and when last."""

    def outcome(self, began_s: float) -> Outcome:
        """Everything, from start to verdict."""
        overlay = self._overlay
        errors = Errors(overlay.world)
        loggers = [logging.getLogger(name) for name in ("isthmus", "coordinator")]
        for logger in loggers:
            logger.addHandler(errors)
        crash = ""
        try:
            self._go_through()
        except LivelockError as error:
            self._violations.append(Violation("livelock", str(error)))
        except Exception as error:
            _logger.exception("seed %d cannot be judged", self._seed)
            crash = repr(error)
        finally:
            for logger in loggers:
                logger.removeHandler(errors)
            close(overlay)
        self._violations += self._leaders.violations[:5]
        self._violations += [Violation("exception", what) for what in overlay.world.failures[:5]]
        return Outcome(
            self._seed,
            tuple(self._violations),
            overlay.world.now_ns / SECOND_NS,
            time.perf_counter() - began_s,
            f"{overlay.world.digest:08x}",
            tuple(self._faults.injected),
            sum(len(item.born_ns) for item in overlay.history.published.values()),
            sum(len(item.messages) for item in overlay.history.subscribed),
            self._judgement.owed,
            self._judgement.judged,
            overlay.world.steps,
            crash,
        )

    def _go_through(self) -> None:
        overlay = self._overlay
        overlay.start()
        if not self._wait_until_well(_START_MAX_NS, "starts"):
            return
        end_ns = overlay.world.now_ns + _FAULTS_NS
        while overlay.world.now_ns < end_ns:
            self._faults.step()
            self._advance(_LOOK_NS)
        self._faults.heal()
        recovered = self._wait_until_well(_RECOVER_MAX_NS, "recovers")
        excuses = self._faults.excuses()
        self._advance(_AFTER_NS)
        for client in overlay.clients:
            client.publishing = False
        self._advance(_DRAIN_NS)
        qos = {topic.name: topic.qos for topic in overlay.topics}
        lives = {client.name: client.starts for client in overlay.clients}
        self._judgement = check_messages(overlay.history, qos, lives, excuses, self._handovers)
        self._violations += self._judgement.violations
        if recovered:
            self._violations += self._wait_until_copies_are_gone()
        self._violations += [Violation("refusal", reason) for reason in overlay.history.refusals[:5]]
        self._violations += [Violation("forgery", what) for what in overlay.history.forgeries[:5]]

    def _wait_until_copies_are_gone(self) -> list[Violation]:
        overlay = self._overlay
        end_ns = overlay.world.now_ns + _COPIES_GONE_NS
        last_ns = end_ns + _TOPIC_LEFT_NS + _EDGE_GIVEN_UP_NS
        while left := check_copies(overlay.routers):
            # Also if it has left its topics before anybody looked for copies.
            served_ns = [ns for name, ns in self._served_ns.items() if check_copies(self._named(name))]
            end_ns = min(max(end_ns, *(ns + _EDGE_GIVEN_UP_NS for ns in served_ns), 0), last_ns)
            if overlay.world.now_ns >= end_ns:
                break
            self._advance(_LOOK_NS)
        return left

    def _named(self, name: str) -> list[RouterProcess]:
        return [router for router in self._overlay.routers if router.name == name]

    def _wait_until_well(self, most_ns: int, what: str) -> bool:
        world = self._overlay.world
        end_ns = world.now_ns + most_ns
        while wrong := self._overlay.what_is_wrong():
            if world.now_ns >= end_ns:
                self._violations.append(
                    Violation("liveness", f"not within {most_ns / SECOND_NS:g} s that it {what}: {wrong}")
                )
                return False
            self._advance(_LOOK_NS)
        return True

    def _advance(self, duration_ns: int) -> None:
        world = self._overlay.world
        end_ns = world.now_ns + duration_ns
        while world.now_ns < end_ns:
            world.run_until(min(end_ns, world.now_ns + _LOOK_NS))
            try:
                self._overlay.validate()
            except AssertionError as error:
                self._violations.append(Violation("validate", f"at {seconds(world.now_ns)}: {error!r}"))
            self._leaders.look(self._overlay.routers, world.now_ns)
            self._handovers.look(self._overlay.clients, self._overlay.edges, world.now_ns)
            for router in self._overlay.routers:
                if serves_for_others(router):
                    self._served_ns[router.name] = world.now_ns
