"""Locks and leases: what is exclusive, and the proof of holding it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, connections
from django.db import transaction as db_transaction
from django.utils.asyncio import async_unsafe

from . import arguments, clock, ownership, signals, transactions
from .arguments import UNSET, OnLocked, Unset
from .backends.base import (
    FOREVER,
    PINNED_GRACE,
    BaseBackend,
    Grant,
    Reading,
    Request,
)
from .conf import DEFAULT_ALIAS, backends
from .exceptions import LeaseLost, LockTimeout
from .holds import Hold, Terms, registry
from .renewal import timekeeper
from .waiting import Gate, GateClosed, Place, lines

logger = logging.getLogger("dblocks")

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

PATIENCE = 1.0
"""Seconds for which passing faults are sat out where the caller's wait is shorter."""

MAX_PAUSE = 5.0
"""Seconds after which one that stands in line looks whether it is first."""

LONG_WAIT = 1.0
"""Seconds after which a wait is worth a line in the log."""

_sync_only = async_unsafe(
    "A lock's sync form was used inside a running event loop; use its async twin: "
    "async with, aacquire(), atry_acquire(), alocked(), arenew(), arelease()."
)


class Lock:
    """A named lock: what to lock, and how.

    Exclusive among all processes that use the same database (or other engine): at any
    moment at most one owner has a lease on the key that isn't over. Making one does
    no I/O and is possible at import time; the object may be shared by threads and
    used again, as a context manager (``with``, ``async with``), as a decorator, or
    through :meth:`acquire` and :meth:`try_acquire`. Made by
    :func:`dblocks.distributed_lock`, which documents the arguments.

    Re-entrant for its owner: the current asyncio task; in sync code that asgiref runs
    for a task, that one call; else the current thread; or whoever presents the same
    ``owner=``.
    """

    def __init__(
        self,
        key: str | Callable[..., str],
        *,
        timeout: object = UNSET,
        lease: object = UNSET,
        renew: bool = True,
        max_hold: object = None,
        hold_at_least: object = 0,
        owner: str | None = None,
        atomic: bool = False,
        on_locked: OnLocked = None,
        note: str = "",
        backend: str = DEFAULT_ALIAS,
    ) -> None:
        self.key = key if callable(key) else arguments.key(key)
        self.on_locked = arguments.on_locked(on_locked)
        self.timeout: float | Unset | None = UNSET
        if not isinstance(timeout, Unset):
            self.timeout = arguments.timeout(timeout)
        self._lease = lease if isinstance(lease, Unset) else arguments.lease(lease)
        self._renew = arguments.flag("renew", renew)
        self._max_hold = arguments.max_hold(max_hold, self._renew)
        self._hold_at_least = arguments.bounded("hold_at_least", hold_at_least)
        self.owner = None if owner is None else arguments.owner(owner)
        self.atomic = arguments.flag("atomic", atomic)
        self.note = arguments.text("note", note)
        self.backend = arguments.text("backend", backend)
        self._entered: dict[ownership.Owner, list[Lease]] = {}

    def __repr__(self) -> str:
        return f"<Lock {self.key!r} backend={self.backend!r}>"

    def __call__(self, function: F) -> F:
        """Decorate a function, so that its calls hold the lock."""
        from .decorators import decorate

        decorated: F = decorate(self, function)
        return decorated

    def with_key(self, key: str) -> Lock:
        """Return the same lock for another key."""
        lock = object.__new__(Lock)
        lock.__dict__.update(self.__dict__, key=arguments.key(key), _entered={})
        return lock

    # Acquiring

    @_sync_only
    def acquire(self, timeout: object = UNSET) -> Lease:
        """Wait for the lock and take it.

        Args:
            timeout: Seconds or ``timedelta`` to wait; ``0`` tries once, ``None``
                waits for ever. Default: the lock's.

        Raises:
            LockTimeout: Somebody else had the key all that time.
            LockError: This thread's own transaction has the key's row locked.
            SynchronousOnlyOperation: An event loop is running in this thread.
            TransactionManagementError: It can't be taken beside the open transaction
                (SQLite, or autocommit switched off by hand).
            DatabaseError: The database's own; it never means "taken".
        """
        wait = self._wait(timeout)
        return self._or_timeout(_run(self._acquiring(ownership.current(), wait)), wait)

    @_sync_only
    def try_acquire(self, timeout: object = 0) -> Lease | None:
        """Take the lock and return the lease, or ``None`` when it stays taken.

        Args:
            timeout: As for :meth:`acquire`; default 0, don't wait.

        Raises:
            LockError, TransactionManagementError, DatabaseError: As for
                :meth:`acquire`; a fault is never ``None``.
        """
        wait = self._wait(timeout)
        lease = _run(self._acquiring(ownership.current(), wait))
        return lease if isinstance(lease, Lease) else None

    @_sync_only
    def locked(self) -> bool:
        """Tell whether anybody, the caller included, has a lease on the key.

        A key that is cooling counts as locked. What a ``transaction_lock`` holds
        can't be seen without waiting for it.
        """
        return self._is_locked()

    async def aacquire(self, timeout: object = UNSET) -> Lease:
        """:meth:`acquire` for async code; waits without holding a thread."""
        wait = self._wait(timeout)
        lease = await _arun(self._acquiring(ownership.current(), wait))
        return self._or_timeout(lease, wait)

    async def atry_acquire(self, timeout: object = 0) -> Lease | None:
        """:meth:`try_acquire` for async code."""
        wait = self._wait(timeout)
        lease = await _arun(self._acquiring(ownership.current(), wait))
        return lease if isinstance(lease, Lease) else None

    async def alocked(self) -> bool:
        """:meth:`locked` for async code."""
        return await sync_to_async(self._is_locked)()

    def _is_locked(self) -> bool:
        reading = backends[self.backend].read(self._literal_key)
        return reading is not None and reading.remaining > 0

    @property
    def _literal_key(self) -> str:
        if callable(self.key):
            raise TypeError(
                f"key={self.key!r} is a callable, which only the decorator form calls; "
                f"here the key must be a str."
            )
        return self.key

    def _wait(self, timeout: object) -> float | None:
        if not isinstance(timeout, Unset):
            return arguments.timeout(timeout)
        if not isinstance(self.timeout, Unset):
            return self.timeout
        return backends[self.backend].timeout

    def _terms(self, backend: BaseBackend) -> Terms:
        lease = backend.lease if isinstance(self._lease, Unset) else self._lease
        max_hold = FOREVER if self._max_hold is None else self._max_hold
        return Terms(min(lease, max_hold), self._renew, max_hold, self._hold_at_least)

    def _acquiring(
        self, me: ownership.Owner, timeout: float | None
    ) -> Generator[Step, Any, Lease | Reading]:
        """Acquire in steps: what to call, and for how long to wait between."""
        key = self._literal_key
        backend = backends[self.backend]
        started = clock.monotonic()
        give_up = started + (FOREVER if timeout is None else timeout)
        found: Lease | Reading
        seen: Reading | None = None
        if (
            timeout == 0
            or self.owner is not None
            or (backend, key) in me.holds
            or not backend.can_write()
        ):
            # Not behind those who may be waiting for this owner itself.
            found = yield self._try(backend, key, me, started, give_up)
            if isinstance(found, Lease):
                return found
            seen = found
        line, place = lines.join(backend, key)
        gate: Gate | None = None
        try:
            while not line.is_first(place) and clock.monotonic() < give_up:
                yield Pause(place, min(give_up - clock.monotonic(), MAX_PAUSE))
            if seen is None and not line.is_first(place):
                # Its time is over: what the first has seen holds for all.
                seen = line.last_seen()
            if seen is None:
                found = yield self._try(backend, key, me, started, give_up)
                if isinstance(found, Lease):
                    return found
                seen = found
            line.saw(seen)
            found = seen
            if line.is_first(place):
                # In the thread whose connection tells whether there may be one.
                gate = yield Call(partial(backend.gate, key))
            delays = backend.pauses(key, alone=gate is not None)
            told = False
            while True:
                now = clock.monotonic()
                # Free, but not to be had, perhaps for an instant only.
                until = give_up
                if found.remaining <= 0:
                    until = max(give_up, started + PINNED_GRACE)
                if now >= until:
                    self._timed_out(backend, key, found, now - started)
                    return found
                if not told and now - started > LONG_WAIT:
                    told = True
                    logger.info("waiting key=%r holder=%s", key, found.holder)
                if gate is not None and not gate.held:
                    try:
                        yield Aside(partial(gate.enter, until - now))
                    except GateClosed:
                        gate = None
                        delays = backend.pauses(key, alone=False)
                else:
                    delay = min(next(delays), until - now)
                    if found.remaining > 0:
                        delay = min(delay, found.remaining)
                    yield Pause(place, delay)
                found = (yield Call(partial(backend.read, key))) or Reading()
                line.saw(found)
                if found.remaining <= 0 or found.owner == self.owner:
                    queued = gate is not None and gate.held
                    found = yield self._try(backend, key, me, started, give_up, queued)
                    if isinstance(found, Lease):
                        if queued and found.take_gate(gate):
                            gate = None
                        return found
        finally:
            lines.leave(backend, key, place)
            if gate is not None:
                gate.leave()

    def _try(
        self,
        backend: BaseBackend,
        key: str,
        me: ownership.Owner,
        started: float,
        give_up: float,
        queued: bool = False,
    ) -> Call:
        patience = max(give_up - clock.monotonic(), PATIENCE)
        at_once = give_up <= started
        return Call(
            partial(self._attempt, backend, key, me, patience, started, queued, at_once)
        )

    def _attempt(
        self,
        backend: BaseBackend,
        key: str,
        me: ownership.Owner,
        patience: float,
        started: float,
        queued: bool,
        at_once: bool,
    ) -> Lease | Reading:
        terms = self._terms(backend)
        if self.owner is None:
            hold = me.holds.get((backend, key))
        else:
            hold = registry.find(backend, key, self.owner)
        if hold is not None and not hold.is_live():
            hold = None
        reentered = hold is not None
        if hold is not None and not backend.can_write():
            lease = Lease(self, hold, me, counted=False)
        else:
            sent = clock.monotonic()
            found = self._ask(backend, key, me, hold, terms, patience, queued, at_once)
            if isinstance(found, Reading):
                if hold is None:
                    return found
                reason = found.reason_for(hold.grant)
                if reason is not None:
                    hold.lose(reason)
                    return found
                # Still ours; a guard of our own transaction has it pinned.
                lease = Lease(self, hold, me, counted=False)
            else:
                lease = self._granted(backend, found, terms, sent, hold, me)
                reentered = lease._hold is hold
        me.add(lease)
        waited = clock.monotonic() - started
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "acquired key=%r backend=%s owner=%s fencing_token=%s waited=%.3f",
                key,
                backend.alias,
                lease.owner,
                lease.fencing_token,
                waited,
            )
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send_robust(
                sender=Lock,
                key=key,
                backend=backend.alias,
                owner=lease.owner,
                fencing_token=lease.fencing_token,
                waited=waited,
                reentered=reentered,
                lease=lease,
            )
        return lease

    def _ask(
        self,
        backend: BaseBackend,
        key: str,
        me: ownership.Owner,
        hold: Hold | None,
        terms: Terms,
        patience: float,
        queued: bool,
        at_once: bool,
    ) -> Grant | Reading:
        if hold is not None:
            owner = hold.grant.owner
        elif self.owner is not None:
            owner = self.owner
        else:
            owner = os.urandom(16).hex()
        request = Request(
            key=key,
            owner=owner,
            lease=terms.lease,
            max_hold=hold.terms.max_hold if hold is not None else terms.max_hold,
            holder=ownership.holder(me),
            note=self.note,
            count=None if self.owner else 1 if hold is None else hold.leases + 1,
            queued=queued,
            reenter=hold is not None or self.owner is not None,
            at_once=at_once,
        )
        return backend.try_acquire(request, patience)

    def _granted(
        self,
        backend: BaseBackend,
        grant: Grant,
        terms: Terms,
        sent: float,
        hold: Hold | None,
        me: ownership.Owner,
    ) -> Lease:
        with registry.mutex:
            if self.owner is not None:
                hold = registry.find(backend, grant.key, self.owner)
            if hold is not None and hold.grant != grant:
                hold.lose("expired")
                hold = None
            if hold is not None and hold.extend(sent, terms.lease):
                return Lease(self, hold, me, counted=True)
            hold = Hold(
                backend, grant, terms, sent, explicit=bool(self.owner), note=self.note
            )
            hold.test_connection = backend.test_connection()
            lease = Lease(self, hold, me, counted=True)
            if self.owner is not None:
                registry.add(hold)
            else:
                me.holds[backend, grant.key] = hold
        timekeeper.add(hold)
        return lease

    def _timed_out(
        self, backend: BaseBackend, key: str, reading: Reading, waited: float
    ) -> None:
        signals.lock_timed_out.send_robust(
            sender=Lock,
            key=key,
            backend=backend.alias,
            waited=waited,
            holder=reading.holder,
            note=reading.note,
            retry_after=max(0.0, reading.remaining),
        )

    def _or_timeout(self, found: Lease | Reading, timeout: float | None) -> Lease:
        if isinstance(found, Lease):
            return found
        raise LockTimeout(
            self._literal_key,
            timeout=timeout,
            holder=found.holder,
            note=found.note,
            acquired_at=found.acquired_at,
            retry_after=found.remaining,
        )

    # As a context manager

    @_sync_only
    def __enter__(self) -> Lease:
        lease = self.acquire().__enter__()
        self._entered.setdefault(ownership.current(), []).append(lease)
        return lease

    @_sync_only
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave().__exit__(exc_type, exc, traceback)

    async def __aenter__(self) -> Lease:
        if self.atomic:
            raise TypeError(
                "atomic=True can't be used with async with: Django has no async "
                "transactions. Run the block through sync_to_async()."
            )
        lease = await self.aacquire()
        self._entered.setdefault(ownership.current(), []).append(lease)
        return lease

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave().__aexit__(exc_type, exc, traceback)

    def _leave(self) -> Lease:
        entered = self._entered
        me: ownership.Owner | None = ownership.current()
        if me not in entered:
            # A generator that another thread or task closes.
            me = next(iter(entered)) if len(entered) == 1 else None
        if me is None:
            raise RuntimeError(f"{self!r} is left where it was not entered.")
        lease = entered[me].pop()
        if not entered[me]:
            del entered[me]
        return lease


class Lease:
    """The proof of holding a lock, for a bounded time that is renewed.

    A context manager that releases on leaving, and then raises :exc:`LeaseLost` if the
    lease was lost meanwhile and the body raised nothing itself. May be handed to
    another thread and released there. One that nothing refers to any more is renewed
    no longer, with a ``ResourceWarning``. ``key``, ``owner`` and ``backend`` say what
    is held, by whom and where.
    """

    def __init__(
        self, lock: Lock, hold: Hold, me: ownership.Owner, *, counted: bool
    ) -> None:
        self._hold = hold
        self._atomic = lock.atomic
        self._block: AbstractContextManager[None] | None = None
        self._pid = os.getpid()
        self._open = True
        self._deferred = False
        self._committed = False
        with hold.mutex:
            hold.leases += 1
            hold.written += counted

    def __repr__(self) -> str:
        state = "held" if self.held else self.lost_reason or "released"
        return f"<Lease {self.key!r} fencing_token={self.fencing_token} {state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_open", False) and self._hold.lost_reason is None:
            _warn(
                f"{self!r} was dropped without release(); it is not renewed any more.",
                ResourceWarning,
                stacklevel=2,
            )

    @property
    def key(self) -> str:
        """What is locked."""
        return self._hold.grant.key

    @property
    def owner(self) -> str:
        """The owner's id, up to 64 characters."""
        return self._hold.grant.owner

    @property
    def backend(self) -> str:
        """The alias of the backend in ``DBLOCKS``."""
        return self._hold.backend.alias

    @property
    def fencing_token(self) -> int | None:
        """A number greater than that of every earlier grant of this key, ever.

        Re-entering gives the same one. A resource that remembers the greatest token
        it has seen can refuse whoever comes with a smaller one (Kleppmann, "How to do
        distributed locking", 2016). ``None`` on engines without tokens.
        """
        return self._hold.grant.version

    @property
    def open(self) -> bool:
        """Whether it has not been released."""
        return self._open

    @property
    def lost_reason(self) -> str | None:
        """Why the lease is lost, or ``None``.

        ``"expired"``, ``"taken"`` (somebody else has it), ``"forced"``
        (force-released, and nobody has had it since), ``"backend"`` (the database was
        out of reach until the deadline) or ``"forked"`` (a child process inherited
        it).
        """
        return self._hold.lost_reason

    @property
    def held(self) -> bool:
        """Whether the lock is held for all that is known here. No I/O.

        Never true once the database would grant the key to somebody else, but for
        three cases that :meth:`guard` covers: a force release, known at the next
        renewal; a database clock that was set forward; and a suspended machine
        without a clock that counts suspension.
        """
        return self._open and self._hold.is_live()

    def remaining(self) -> float:
        """Return the seconds that are left, 0.0 when over.

        Counted on the local monotonic clock from before the last successful request
        was sent, less a margin of max(10 % of the lease, 0.25 s), itself at most half
        the lease.
        """
        return self._hold.remaining() if self._open else 0.0

    def check(self) -> None:
        """Raise :exc:`LeaseLost` unless the lock is :attr:`held`. No I/O."""
        if not self.held:
            raise self._lost()

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            self.key,
            fencing_token=self.fencing_token,
            reason=self.lost_reason or "released",
        )

    @_sync_only
    def guard(self, using: str | None = None) -> None:
        """Verify, in the caller's transaction, that the lock is still held.

        Pins the lock's row until that transaction ends: nobody can take the lock over
        before the commit. It asks the row, not the clock: overdue but not taken
        passes. The holder's own renewals don't disturb it, at any isolation level.

        Args:
            using: The alias of the transaction's database; default: the lock's.

        Raises:
            LeaseLost: Somebody else may have the lock; let it roll back the block.
            TransactionManagementError: There is no transaction open.
            NotSupportedError: The backend has no guard, or the locks live in another
                database.
        """
        if not self._open or self.lost_reason == "forked":
            raise self._lost()
        try:
            self._hold.backend.guard(self._hold.grant, using)
        except LeaseLost as error:
            self._hold.lose(error.reason)
            raise

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call a function once, with the lease, when the lease is found lost.

        It runs in a thread of dblocks, by the local deadline at the latest (after a
        force release, at the next renewal); at once if the lease is lost already. Its
        errors are logged.
        """
        with self._hold.mutex:
            self._hold.callbacks.append((weakref.ref(self), callback))
            lost = self.lost_reason
        if lost is not None:
            from .renewal import run_callbacks

            run_callbacks(self._hold)

    def take_gate(self, gate: Gate | None) -> bool:
        """Keep a gate until the release; ``False`` if it isn't needed."""
        hold = self._hold
        with hold.mutex:
            if hold.leases > 1 or hold.gate is not None or not hold.is_live():
                return False
            hold.gate = gate
            return True

    # Renewing

    @_sync_only
    def renew(self, lease: object = None) -> None:
        """Extend the lease from now.

        Args:
            lease: For how long, seconds or ``timedelta``; default: the lock's lease.
                It never shortens and never passes ``max_hold``.

        Raises:
            LeaseLost: It is gone; a lost lease is never brought back.
            DatabaseError: The database is out of reach, or a transaction has the row
                pinned for longer than a second; the lease runs on as before.
        """
        self._renew_now(None if lease is None else arguments.lease(lease))

    async def arenew(self, lease: object = None) -> None:
        """:meth:`renew` for async code."""
        seconds = None if lease is None else arguments.lease(lease)
        await sync_to_async(self._renew_now)(seconds)

    def _renew_now(self, lease: float | None) -> None:
        self.check()
        hold = self._hold
        give_up = clock.monotonic() + PATIENCE
        while True:
            sent = clock.monotonic()
            outcome = hold.backend.renew([hold.renewal(lease)])
            if hold.grant in outcome.extended:
                hold.extend(sent, lease)
                break
            if hold.grant in outcome.lost:
                hold.lose(outcome.lost[hold.grant])
                break
            if clock.monotonic() >= give_up:
                raise DatabaseError(
                    f"The lease on {self.key!r} was not renewed: a transaction has "
                    f"its row locked. It is held for {self.remaining():.1f} s more."
                )
            time.sleep(0.01)
        self.check()

    # Releasing

    @_sync_only
    def release(self) -> bool:
        """Give the lock back.

        Idempotent. Inside an open transaction the lock is kept, and renewed, until
        that transaction has ended, by commit or by rollback.

        Returns:
            ``True`` if it was held until now, ``False`` if it had been lost or given
            back before.

        Raises:
            DatabaseError: The database is out of reach; the lease is left to lapse.
        """
        return self._release_or_defer()

    async def arelease(self) -> bool:
        """:meth:`release` for async code. Goes on if the task is cancelled."""
        releasing = asyncio.ensure_future(sync_to_async(self._release_or_defer)())
        try:
            return await asyncio.shield(releasing)
        except asyncio.CancelledError:
            releasing.add_done_callback(_retrieve)
            raise

    def _release_or_defer(self) -> bool:
        if not self._open or self._deferred:
            return False
        if self.lost_reason is None and transactions.transaction_is_open():
            if not self._hold.is_live():
                return self._release()
            self._deferred = True
            transactions.at_end(self._release_at_end)
            return True
        return self._release()

    def _release_at_end(self) -> None:
        try:
            if not self._release() and not self._committed:
                logger.warning(
                    "lost before the transaction ended key=%r reason=%s",
                    self.key,
                    self.lost_reason,
                )
        except (DatabaseError, InterfaceError) as error:
            self._log_lapse(error)

    def _log_lapse(self, error: Exception) -> None:
        logger.warning(
            "not released, left to lapse key=%r fencing_token=%s error=%s",
            self.key,
            self.fencing_token,
            error,
        )

    def _release(self) -> bool:
        hold = self._hold
        with hold.mutex:
            if not self._open:
                return False
            live = hold.is_live() or (self._committed and hold.lost_reason != "forked")
            self._open = False
            hold.leases -= 1
            left = hold.leases
            uncounted = hold.written <= left
            if not uncounted:
                hold.written -= 1
            if not left:
                hold.closed = True
        if not left:
            timekeeper.discard(hold)
        if not live:
            return False
        if uncounted:
            return True
        try:
            held = hold.backend.release(
                hold.grant,
                count=None if hold.explicit else left,
                hold_at_least=hold.terms.hold_at_least,
                patience=PATIENCE,
            )
        finally:
            if not left:
                hold.leave_gate()
                lines.wake(hold.backend, hold.grant.key)
        if not held:
            hold.lose(hold.backend.reason(hold.grant))
            return False
        if not left:
            self._tell_released()
        return True

    def _tell_released(self) -> None:
        held_for = clock.monotonic() - self._hold.started
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "released key=%r backend=%s owner=%s fencing_token=%s held_for=%.3f",
                self.key,
                self.backend,
                self.owner,
                self.fencing_token,
                held_for,
            )
        if signals.lock_released.receivers:
            signals.lock_released.send_robust(
                sender=Lock,
                key=self.key,
                backend=self.backend,
                owner=self.owner,
                fencing_token=self.fencing_token,
                held_for=held_for,
                lease=self,
            )

    # As a context manager

    @_sync_only
    def __enter__(self) -> Lease:
        if self._atomic:
            block = self._committing()
            try:
                block.__enter__()
            except BaseException:
                self._leave(*sys.exc_info())
                raise
            self._block = block
        return self

    @_sync_only
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            try:
                block.__exit__(exc_type, exc, traceback)
            except BaseException:
                self._leave(*sys.exc_info())
                raise
        self._leave(exc_type, exc, traceback)

    def _leave(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        try:
            self._release_or_defer()
        except (DatabaseError, InterfaceError) as error:
            self._log_lapse(error)
        if self.lost_reason is not None and exc_type is None and not self._committed:
            raise self._lost()

    async def __aenter__(self) -> Lease:
        if self._atomic:
            raise TypeError("atomic=True can't be used with async with.")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.arelease()
        except (DatabaseError, InterfaceError) as error:
            self._log_lapse(error)
        if self.lost_reason is not None and exc_type is None:
            raise self._lost()

    @contextmanager
    def _committing(self, using: str = DEFAULT_DB_ALIAS) -> Generator[None]:
        """A transaction that commits only while the lock is still held."""
        with ExitStack() as pins:
            with db_transaction.atomic(using=using):
                yield
                self.verify([using], pins)
            self.note_commit()

    def note_commit(self) -> None:
        """Note that a guarded transaction was committed: that verdict is final."""
        self._committed = True

    def is_in_database(self, using: str) -> bool:
        """Tell whether the lock is a row of this database."""
        return self._hold.backend.is_in_database(using)

    def verify(self, aliases: Sequence[str], pins: ExitStack) -> None:
        """Guard the transactions on some databases that are about to commit.

        Transactions that will be rolled back are let through.

        Args:
            pins: Closed after the commits.

        Raises:
            LeaseLost: The lock is no longer held.
        """
        aliases = [a for a in aliases if not connections[a].needs_rollback]
        if not aliases:
            return
        if not self._open or self.lost_reason == "forked":
            raise self._lost()
        if not self._hold.backend.has_guard:
            self.check()
            return
        try:
            self._hold.backend.pin(self._hold.grant, aliases, pins)
        except LeaseLost as error:
            self._hold.lose(error.reason)
            raise


def current_lease(key: str | None = None) -> Lease:
    """Return the innermost lease of the current owner.

    Args:
        key: Only of this key.

    Raises:
        LookupError: There is none.
    """
    lease = ownership.current().innermost(key)
    if lease is None:
        wanted = "a lease" if key is None else f"a lease on {key!r}"
        raise LookupError(f"The current thread or task has no {wanted[2:]}.")
    return lease


# Steps: how acquiring runs, in a thread or in an event loop


@dataclass(frozen=True)
class Call:
    """Call this where database calls are made; its result is sent back."""

    function: Callable[[], object]


@dataclass(frozen=True)
class Aside:
    """Call this, which may block; in an event loop in a thread of its own."""

    function: Callable[[], object]


@dataclass(frozen=True)
class Pause:
    """Wait until the place is woken, or for so many seconds."""

    place: Place
    seconds: float


Step = Call | Aside | Pause


def _run(steps: Generator[Step, Any, T]) -> T:
    """Run steps in this thread."""
    result: object = None
    error: Exception | None = None
    try:
        while True:
            step = steps.send(result) if error is None else steps.throw(error)
            result = error = None
            if isinstance(step, Pause):
                step.place.wait(step.seconds)
                continue
            try:
                result = step.function()
            except Exception as caught:
                error = caught
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        steps.close()


async def _arun(steps: Generator[Step, Any, T]) -> T:
    """Run steps from an event loop: calls in a thread, waits in the loop."""
    result: object = None
    error: Exception | None = None
    try:
        while True:
            step = steps.send(result) if error is None else steps.throw(error)
            result = error = None
            try:
                if isinstance(step, Pause):
                    await step.place.await_(step.seconds)
                elif isinstance(step, Aside):
                    await _aside(step.function)
                else:
                    result = await _Call(step.function).result()
            except Exception as caught:
                error = caught
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        steps.close()


async def _aside(function: Callable[[], object]) -> None:
    """Run a blocking function in a thread of its own.

    Not in the loop's pool, which as many waiting keys could use up, nor in the thread
    that asgiref shares, where the holder's release would stand behind it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def call() -> None:
        error = None
        try:
            function()
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=call, name="dblocks-gate", daemon=True).start()
    await done


class _Call:
    """A call in a thread that gives a lease back if nobody waits for it any more."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._mutex = threading.Lock()
        self._abandoned = False
        self._lease: Lease | None = None

    async def result(self) -> object:
        try:
            return await sync_to_async(self._run)()
        except asyncio.CancelledError:
            with self._mutex:
                self._abandoned = True
                lease, self._lease = self._lease, None
            if lease is not None:
                # In the thread that it was taken in, whose connection may be the only
                # one that sees it (a TestCase's); a second cancel doesn't stop it.
                returning = asyncio.ensure_future(sync_to_async(_give_back)(lease))
                await asyncio.shield(returning)
            raise

    def _run(self) -> object:
        if not self._is_awaited(None):
            return None
        result = self._function()
        lease = result if isinstance(result, Lease) else None
        if not self._is_awaited(lease) and lease is not None:
            _give_back(lease)
        return result

    def _is_awaited(self, lease: Lease | None) -> bool:
        """Tell whether somebody waits; who ceases to from now on gives this back."""
        with self._mutex:
            self._lease = None if self._abandoned else lease
            return not self._abandoned


def _give_back(lease: Lease) -> None:
    try:
        lease._release()
    except (DatabaseError, InterfaceError) as error:
        lease._log_lapse(error)


def _retrieve(future: asyncio.Future[bool]) -> None:
    if not future.cancelled() and future.exception() is not None:
        logger.warning("not released, left to lapse error=%s", future.exception())
