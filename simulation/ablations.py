"""Safeguards, each with what the overlay is like without it.

A safeguard that can be left out without any run noticing is not tested. So each one can be taken out
here, for the length of a run, by replacing the one method that makes it. Nothing in the product knows
of this, and no setting of a broker can switch a safeguard off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from coordinator.election import Mandate
from coordinator.operations import Operation, OperationResult
from coordinator.session import Session
from edge_broker.declarations import Declarations
from overlay.bounds import UNBOUNDED
from overlay.history import History, Verdict
from overlay.retention import Retention
from routing_broker.core import RouterCore


class Ablation(StrEnum):
    """A safeguard to do without."""

    FENCING = "fencing"
    DEDUPE = "dedupe"
    RESEND = "resend"
    REPLICATION = "replication"
    LEASE = "lease"
    PRUNING = "pruning"
    RESUME = "resume"


class CompiledError(RuntimeError):
    """A compiled method cannot be replaced."""


async def _commit_unfenced(self: Mandate, operations: list[Operation]) -> tuple[OperationResult, ...]:
    """A leader writes although another one may have been elected."""
    return await self._session.transaction(operations)


def _judge_new(self: History, sequence: int) -> Verdict:
    """Every message counts as new."""
    self.highest = max(self.highest, sequence)
    return Verdict.NEW


def _resend_unsent(self: Retention) -> list[bytes]:
    """A new routing broker is sent nothing that another one was sent before."""
    self._unsent = 0
    self._trim()
    return []


def _replicate_nothing(self: RouterCore, copy: object, touched: object, now_ns: int) -> None:
    """Backups get no copies."""


def _lease_for_ever(self: Session) -> int | None:
    """Who has had a session believes to have it still."""
    return None if self._lease_sent_ns is None else UNBOUNDED


def _take_no_prunes(self: RouterCore) -> dict[str, list[tuple[int, int]]]:
    """Backups are not told what was dispatched."""
    self._to_prune.clear()
    return {}


def _begin_anew(self: Declarations, topic: object, client: object, message: object) -> None:
    """Who comes from another edge begins like one that was never there."""


_REPLACED: Final[dict[Ablation, tuple[type, str, object]]] = {
    Ablation.FENCING: (Mandate, "commit", _commit_unfenced),
    Ablation.DEDUPE: (History, "judge", _judge_new),
    Ablation.RESEND: (Retention, "resend", _resend_unsent),
    Ablation.REPLICATION: (RouterCore, "_replicate", _replicate_nothing),
    Ablation.LEASE: (Session, "lease_until_ns", property(_lease_for_ever)),
    Ablation.PRUNING: (RouterCore, "take_prunes", _take_no_prunes),
    Ablation.RESUME: (Declarations, "_resume", _begin_anew),
}


@contextmanager
def without(ablation: Ablation | None) -> Iterator[None]:
    """Do without a safeguard for a while."""
    if ablation is None:
        yield
        return
    owner, name, replacement = _REPLACED[ablation]
    original = getattr(owner, name)
    try:
        setattr(owner, name, replacement)
    except TypeError:
        raise CompiledError(f"{owner.__name__}.{name} is compiled: run `make interpret` first") from None
    try:
        yield
    finally:
        setattr(owner, name, original)
