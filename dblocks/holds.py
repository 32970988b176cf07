"""What this process holds: one :class:`Hold` a grant, shared by its leases."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import clock
from .backends.base import FOREVER, BaseBackend, Grant, Renewal
from .waiting import Gate, lines

if TYPE_CHECKING:
    from .leases import Lease


@dataclass(frozen=True)
class Terms:
    """How a grant is held; the outermost acquisition's rule. Seconds.

    Attributes:
        margin: How long before the database's expiry the lease counts as over.
        interval: Between renewals.
    """

    lease: float
    renew: bool = True
    max_hold: float = FOREVER
    hold_at_least: float = 0.0
    margin: float = field(init=False)
    interval: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", margin(self.lease))
        object.__setattr__(self, "interval", (self.lease - self.margin) / 3)


terms = lru_cache(maxsize=256)(Terms)


def margin(lease: float) -> float:
    """Return how long before the database's expiry a lease counts as over."""
    return min(max(0.1 * lease, 0.25), lease / 2)


class Hold:
    """A grant that this process has.

    Attributes:
        grant: Key, owner and fencing token.
        started: Local clock before the request for it was sent.
        deadline: Local clock at which it counts as over, unless renewed before.
        renew_at: Local clock of its next renewal.
        explicit: Whether the owner id was given by the caller, and may be in use in
            other threads and processes as well.
        leases: How many leases of it are open.
        written: How many of them the database has counted.
        test_connection: The connection of a ``TestCase`` that it was granted on.
        owed: A renewal is due there.
        gate: The gate that it was queued for at, kept until it is released.
        failing: The last renewal failed, or has not come back.
        lost_reason: Why it is lost, once that is known.
        closed: The last lease was released.
    """

    def __init__(
        self,
        backend: BaseBackend,
        grant: Grant,
        terms: Terms,
        started: float,
        *,
        explicit: bool,
        note: str = "",
    ) -> None:
        self.backend = backend
        self.grant = grant
        self.terms = terms
        self.started = started
        self.explicit = explicit
        self.note = note
        self.leases = 0
        self.written = 0
        self.test_connection: object = None
        self.gate: Gate | None = None
        self.owed = False
        self.failing = False
        self.lost_reason: str | None = None
        self.closed = False
        self.mutex = threading.RLock()
        self.callbacks: list[tuple[weakref.ref[Lease], Callable[[Any], object]]] = []
        self.deadline = started + terms.lease - terms.margin
        self.renew_at = started + terms.interval if terms.renew else float("inf")

    def renewal(self, lease: float | None = None) -> Renewal:
        """Return what to ask for, by default one more lease."""
        lease = self.terms.lease if lease is None else lease
        return Renewal(self.grant, lease, self.terms.max_hold)

    def remaining(self) -> float:
        """Seconds for which it is certain that nobody else can have the key."""
        if self.lost_reason is not None or self.closed:
            return 0.0
        return max(0.0, self.deadline - clock.monotonic())

    def extend(self, sent: float, lease: float | None = None) -> bool:
        """Note a renewal that was sent at ``sent``; too late it brings nothing back."""
        with self.mutex:
            if not self.is_live():
                return False
            self.failing = False
            lease = self.terms.lease if lease is None else lease
            end = min(sent + lease, self.started + self.terms.max_hold)
            self.deadline = max(self.deadline, end - margin(lease))
            if self.terms.renew:
                self.renew_at = sent + self.terms.interval
            return True

    def is_live(self) -> bool:
        """Tell whether it is still held; if its time ran out, note the loss."""
        if self.lost_reason is not None or self.closed:
            return False
        if clock.monotonic() < self.deadline:
            return True
        self.lose("backend" if self.failing else "expired")
        return False

    def lose(self, reason: str) -> None:
        """Note that it is lost, once, and tell those who asked to be told."""
        with self.mutex:
            if self.lost_reason is not None:
                return
            self.lost_reason = reason
        from .renewal import announce_loss, timekeeper

        timekeeper.discard(self)
        lines.wake(self.backend, self.grant.key)
        announce_loss(self, reason)
        if self.gate is not None:
            # Not here: this may be the timekeeper, which does no I/O. Where no thread
            # can be started, the gate is freed with the hold.
            with suppress(RuntimeError):
                threading.Thread(target=self.leave_gate, daemon=True).start()

    def leave_gate(self) -> None:
        """Let the next waiter in, if this one queued."""
        with self.mutex:
            gate, self.gate = self.gate, None
        if gate is not None:
            gate.leave()


class Registry:
    """The holds of explicit owners, which any thread of the process may join."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.mutex = threading.RLock()
        self._holds: weakref.WeakValueDictionary[tuple[BaseBackend, str, str], Hold] = (
            weakref.WeakValueDictionary()
        )

    def find(self, backend: BaseBackend, key: str, owner: str) -> Hold | None:
        hold = self._holds.get((backend, key, owner))
        return hold if hold is not None and not hold.closed else None

    def add(self, hold: Hold) -> None:
        self._holds[hold.backend, hold.grant.key, hold.grant.owner] = hold


registry = Registry()
os.register_at_fork(after_in_child=registry.reset)
