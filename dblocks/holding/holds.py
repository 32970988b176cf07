"""What this process holds: one :class:`Hold` for each grant, shared by its leases.

A hold is a small state machine: held, then released or lost for one reason, which are
final. Looking at a hold changes nothing.
"""

from __future__ import annotations

import threading
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from .. import clock, permits
from ..backends.base import BaseBackend
from ..backends.gates import Gate
from ..backends.values import FOREVER, UNBOUND, Binding, Granted, Renewal, Renewed
from . import news
from .owners import Owner
from .registry import registry

LONGEST_TURN = 0.25
"""Seconds for which a re-entry waits while another thread writes the row."""

RELEASED = "released"

Callbacks = list[tuple["weakref.ref[Any]", Callable[[Any], object]]]
"""Functions, each called once with its lease, unless nothing refers to the lease."""


@dataclass(frozen=True)
class Terms:
    """How a grant is held, in seconds. The outermost acquisition decides.

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


@dataclass(eq=False)
class Claim:
    """Who asks for a key, and how it is to be held.

    Attributes:
        by: The line of execution that asks.
        owner: The explicit owner's id, or ``None``.
        sender: The sender of the signals.
        template: The template that a decorator made the key from, if one did.
        loop: The event loop that asks, if any; the claim ends when the loop is closed.
    """

    backend: BaseBackend
    key: str
    terms: Terms
    by: Owner
    owner: str | None
    note: str
    sender: type
    template: str | None = field(default=None, kw_only=True)
    loop: AbstractEventLoop | None = field(default=None, init=False)


class Hold:
    """A grant that this process has.

    Attributes:
        key, permit: What is held, as the caller named it.
        by: Who acquired it first.
        explicit: The caller gave the owner's id, which may be in use in other threads
            and processes too.
        started: Local clock before the request for it was sent.
        known_at: Local clock when the registry added it.
        limit: Local clock beyond which no renewal moves the deadline.
        deadline: Local clock at which it counts as over, unless renewed before.
        renew_at: Local clock of its next renewal.
        failing: The last renewal failed, or has not come back.
        counted: How many acquisitions are outstanding in this process.
        entered_again: There has been more than one acquisition.
        written: One item for each acquisition that the engine counts. Whoever takes an
            item out has one subtracted: a release, or the explicit owner's return after
            a loss.
        promised: Weak references to the claims that are about to make a lease of it.
        leases: Weak references to the open leases: a hold that nothing refers to any
            more is not renewed.
        gate: The gate through which it was acquired, kept until it is released.
        binding: What binds it to the thread that acquired it.
        ref: The registry's weak reference to it.
    """

    failing = False
    known_at = float("inf")
    counted = 1
    entered_again = False
    ref: weakref.ref[Hold] | None = None
    _lost_at: float | None = None

    def __init__(
        self, claim: Claim, granted: Granted, sent: float, binding: Binding = UNBOUND
    ) -> None:
        self.backend = claim.backend
        self.grant = granted.grant
        self.key, self.permit = claim.key, None
        if granted.grant.key != claim.key:
            self.key, self.permit = permits.apart(granted.grant.key)
        self.terms = terms = claim.terms
        self.by = claim.by
        self.explicit = claim.owner is not None
        self.note = claim.note
        self.sender = claim.sender
        self.template = claim.template
        self.written: list[None] = [None]
        self.started = sent
        self.limit = sent + granted.limit
        self.promised: set[weakref.ref[Claim]] = set()
        self.promise(claim)
        self.leases: set[weakref.ref[Any]] = set()
        self.gate: Gate | None = granted.gate
        self.binding = binding
        self.loss_callbacks: Callbacks = []
        self.request_callbacks: Callbacks = []
        self._requests: dict[str, object] = {}
        #: One verb at a time writes the row. It may wait there for a transaction of
        #: another thread of the owner: that thread must not wait long for the mutex.
        self.mutex = threading.RLock()
        #: Guards ``counted``; held for an instant.
        self._counting = threading.RLock()
        #: Filled once, by the first to end it. No mutex: the scheduler must never wait.
        self._end: dict[str, list[str]] = {}
        length = min(terms.lease, granted.limit)
        self.deadline = sent + length - margin(length)
        self.renew_at = sent + terms.interval if terms.renew else float("inf")

    # Looking at it

    def is_live(self) -> bool:
        """Tell whether it is held, as far as this process knows."""
        if self._end or self.counted <= 0 or clock.monotonic() >= self.deadline:
            return False
        return self.binding.is_rolled_back is None or not self.is_over_with_its_test()

    def is_over_with_its_test(self) -> bool:
        """Tell whether it was granted in a ``TestCase`` that is over."""
        is_rolled_back = self.binding.is_rolled_back
        return is_rolled_back is not None and is_rolled_back()

    def remaining(self) -> float:
        """Return the seconds for which certainly nobody else can have the key."""
        return max(0.0, self.deadline - clock.monotonic()) if self.is_live() else 0.0

    @property
    def lost_reason(self) -> str | None:
        """Why it is lost, or ``None``."""
        end = self._end.get("as")
        if end is None:
            return self._overdue()
        return None if end[0] == RELEASED else end[0]

    @property
    def release_requested(self) -> bool:
        """Whether the holder is known to have been asked to finish."""
        return bool(self._requests)

    @property
    def over_at(self) -> float:
        """Local clock at which it was lost, or will count as over."""
        return self.deadline if self._lost_at is None else self._lost_at

    def _overdue(self) -> str | None:
        if not self.counted or clock.monotonic() < self.deadline:
            return None
        return "backend" if self.failing else "expired"

    def is_referred_to(self) -> bool:
        """Tell whether an open lease is in use, or a claim is about to make one."""
        for promise in list(self.promised):
            claim = promise()
            if claim is not None and not (claim.loop and claim.loop.is_closed()):
                return True
        return any(ref() is not None for ref in list(self.leases))

    def facts(self, **more: object) -> dict[str, object]:
        """Return what the signals and the log say about it."""
        return {
            "key": self.key,
            "permit": self.permit,
            "backend": self.backend.alias,
            "owner": self.grant.owner,
            "fencing_token": self.grant.version,
            **more,
        }

    def renewal(self, lease: float | None = None) -> Renewal:
        """Return the renewal to ask for, by default for one more lease."""
        return Renewal(self.grant, self.terms.lease if lease is None else lease)

    # What happens to it

    def promise(self, claim: Claim) -> None:
        """Note that a claim is about to make a lease of it."""
        self.promised.add(weakref.ref(claim, self.promised.discard))

    def keep_promise(self, claim: Claim) -> None:
        """Note that a claim has made its lease."""
        self.promised.discard(weakref.ref(claim))

    def _ends(self, state: str) -> bool:
        mine = [state]
        return self._end.setdefault("as", mine) is mine

    def lose(self, reason: str) -> None:
        """Note a loss once, and report it."""
        # If the last release is under way, it finds out by itself.
        if self.counted:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._ends(reason):
            self._lost_at = clock.monotonic()
            news.tell_loss(self, reason)
            if self.explicit:
                registry.forfeit(self.backend, self.grant, self.written)
            registry.discard(self)
            registry.freed(self.backend, self.key)

    def note_overdue(self) -> None:
        """Note the loss if its time is over."""
        reason = None if self._end else self._overdue()
        if reason is not None:
            self.lose(reason)

    def note_answer(
        self, outcome: Renewed, sent: float, lease: float | None = None
    ) -> bool:
        """Note the outcome of a renewal; ``False`` if it must be tried again."""
        if self.grant in outcome.requested:
            mine = object()
            # Reported once, even if several simultaneous renewals hear of it.
            if self._requests.setdefault("first", mine) is mine:
                news.tell_request(self)
        if self.grant in outcome.extended:
            self.extend(sent, lease)
        elif self.grant in outcome.lost:
            self.lose(outcome.lost[self.grant])
        else:
            return False
        return True

    def extend(self, sent: float, lease: float | None = None) -> bool:
        """Note a renewal sent at ``sent``; a late reply brings no lost lease back."""
        if not self.is_live():
            return False
        lease = self.terms.lease if lease is None else lease
        length = min(lease, self.limit - sent)
        self.deadline = max(self.deadline, sent + length - margin(length))
        self.failing = False
        if self.terms.renew:
            self.renew_at = sent + self.terms.interval
        return True

    def enter_again(self, claim: Claim, patience: float) -> bool:
        """Count one more acquisition by the owner; ``False`` if it isn't held.

        Only the process counts it if the row can't be written during the caller's
        transaction, if a guard of that transaction has the row pinned, or if another
        thread is writing the row and waits, perhaps for that transaction.
        """
        turn = self.backend.can_write() and self.mutex.acquire(timeout=LONGEST_TURN)
        try:
            # Not before its turn: a release in between would leave its count in the row
            # to this acquisition, which is about to add one of its own.
            if not self._count_one_more(claim):
                return False
            return self._write_entry(claim, patience) if turn else True
        finally:
            if turn:
                self.mutex.release()

    def _count_one_more(self, claim: Claim) -> bool:
        with self._counting:
            if not self.is_live():
                return False
            self.promise(claim)
            self.entered_again = True
            self.counted += 1
            return True

    def _count_one_less(self) -> None:
        with self._counting:
            self.counted -= 1

    def _write_entry(self, claim: Claim, patience: float) -> bool:
        sent, lease = clock.monotonic(), claim.terms.lease
        counted = self.counted
        try:
            outcome = self.backend.reenter(
                self.renewal(lease), None if self.explicit else counted, patience
            )
        except BaseException:
            self.forsake()
            raise
        if self.grant in outcome.lost:
            self.lose(outcome.lost[self.grant])
        elif self.grant not in outcome.extended:
            return True
        else:
            more = 1 if self.explicit else counted - len(self.written)
            self.written.extend([None] * more)
            if self.extend(sent, lease):
                return True
            # An explicit owner takes the key again, and then subtracts its lost holds.
            self.note_overdue()
            if self.explicit:
                registry.forfeit(self.backend, self.grant, self.written)
        self._count_one_less()
        return False

    def release(self, committed: bool = False) -> bool:
        """Release one acquisition; tell whether it was held until now.

        Args:
            committed: A guard has found it current in a transaction that committed.

        Raises:
            DatabaseError: The engine is out of reach; the grant is left to lapse.
        """
        with self.mutex:
            held = self._give_back(committed)
            return self._write_release() if held is None else held

    def _give_back(self, committed: bool) -> bool | None:
        """Count one acquisition less; tell if it was held. ``None``: ask the engine."""
        # A guard's verdict is final; a child never releases for its parent.
        final = committed and self._end.get("as") != ["forked"]
        if not final:
            self.note_overdue()
        self._count_one_less()
        if self.counted == 0:
            registry.discard(self)
        if self._end and not final and self.lost_reason is not None:
            return False
        return None if len(self.written) > self.counted and self._take_out() else True

    def _take_out(self) -> bool:
        """Take one written hold out; ``False`` if none is left.

        An explicit owner may have taken the key again, after a lease that is overdue
        but guarded, and have subtracted its lost holds.
        """
        try:
            self.written.pop()
        except IndexError:
            return False
        return True

    def _write_release(self) -> bool:
        try:
            held = self.backend.release(
                self.grant,
                count=None if self.explicit else self.counted,
                deadline=self.deadline,
            )
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            self._asked()
        return self._released(held)

    def _failed(self, error: BaseException) -> None:
        if self.explicit and not self.backend.may_have_written(error):
            registry.return_forfeited(self.backend, self.grant, 1)
        if self.counted == 0:
            self._ends(RELEASED)

    def _asked(self) -> None:
        """Let waiters in after the last release, whatever its outcome."""
        if self.counted == 0:
            self.leave_gate()
            registry.freed(self.backend, self.key)

    def _released(self, held: bool) -> bool:
        if not held:
            self._lose(self.backend.reason(self.grant))
        elif self.counted == 0:
            self._ends(RELEASED)
        return held

    def forsake(self) -> None:
        """Give it up without telling the engine: it lapses."""
        self._count_one_less()
        if self.explicit and len(self.written) > self.counted and self._take_out():
            registry.return_forfeited(self.backend, self.grant, 1)
        if self.counted == 0:
            registry.discard(self)
            self._ends(RELEASED)
        self._asked()

    def keep_gate(self, gate: Gate | None) -> bool:
        """Keep a gate until the release; ``False`` if it isn't needed."""
        with self._counting:
            if gate is None or not gate.held or self.gate is not None:
                return False
            if self.counted > 1 or not self.is_live():
                return False
            self.gate = gate
            return True

    def leave_gate(self) -> None:
        """Let the next waiter in, if this one queued."""
        # Without the mutex: a hanging release may have it. Leaving twice is harmless.
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.leave()

    def forget_parent(self) -> None:
        """Lose it in a forked child: it is the parent's."""
        self.mutex, self._counting = threading.RLock(), threading.RLock()
        self._ends("forked")
