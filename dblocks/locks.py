"""Locks: what is exclusive, and how it is taken."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from . import clock, signals, validation
from .advice import warn_of_template
from .backends.values import FOREVER, Reading
from .conf import DEFAULT_ALIAS, backends
from .decorators.decoratable import is_bare
from .decorators.functions import LeaseCalls
from .exceptions import LockTimeout
from .holding import owners
from .holding.holds import Hold, terms
from .leases import Lease, sync_only
from .validation import UNSET, OnLocked, Unset
from .waiting.attempt import Attempt
from .waiting.threads import call_in_thread
from .waiting.wait import aget, get, give_back

logger = logging.getLogger("dblocks")

F = TypeVar("F", bound=Callable[..., Any])


def distributed_lock(
    key: str | Callable[..., str],
    *,
    timeout: float | timedelta | Unset | None = UNSET,
    lease: float | timedelta | Unset = UNSET,
    renew: bool = True,
    max_hold: float | timedelta | None = None,
    hold_at_least: float | timedelta = 0,
    owner: str | None = None,
    atomic: bool = False,
    on_locked: OnLocked = None,
    note: str | Callable[..., str] = "",
    backend: str = DEFAULT_ALIAS,
) -> Lock:
    """Return a lock: a context manager, a decorator, and what hands out leases.

    At most one owner at a time, among all processes on the same database, has a lease
    on ``key``. Re-entrant for the owner: the current thread, asyncio task, or whoever
    presents the same ``owner=``. No I/O happens here; it works at import time, and the
    lock may be shared by threads and used again. ::

        with distributed_lock("import", lease=60) as lease:
            ...

        @distributed_lock("order:{order_id}", timeout=2)
        def pay(request, order_id): ...

    Entering waits for ``timeout`` and raises :exc:`LockTimeout` when somebody else had
    the key all that time; a database error stays Django's own. The lease is renewed by
    a thread of dblocks until the block is left. Leaving releases, and raises
    :exc:`LeaseLost` if the lease was lost meanwhile, unless the body raised already.

    Nothing runs in the caller's transaction: inside ``atomic()`` a second connection is
    used (on SQLite that is refused). A release inside a transaction is put off until
    that has ended, by commit or by rollback.

    Durations are seconds or ``timedelta``. Times are the database's. Not guaranteed:
    mutual exclusion by a lease alone ends with the lease; a holder that is paused for
    longer is caught by ``atomic=True``, :meth:`Lease.guard` or the fencing token.

    Args:
        key: What is locked, up to 255 characters, compared exactly. In the decorator
            form a ``str.format`` template over the call's arguments, or a callable
            that gets them and returns the key.
        timeout: How long to wait; ``0`` tries once, ``None`` waits for ever. Default:
            setting ``TIMEOUT``, 3 s.
        lease: How long it is held without being renewed, 0.1 s to 366 days; under 1 s
            is for tests. Default: setting ``LEASE``, 30 s.
        renew: Renew in the background, at a third of what ``remaining()`` starts from,
            for as long as the lease is referred to.
        max_hold: No renewal moves the expiry beyond this long after the acquisition;
            ``None`` for no limit. Not with ``renew=False``.
        hold_at_least: After an early release, by an exception too, the key stays taken,
            *cooling*, until this long after the acquisition (Chubby's lock-delay, 2006,
            and ShedLock's ``lockAtLeastFor`` are the models).
        owner: An explicit owner id, up to 64 characters: whoever presents the same one,
            in any thread, process or machine, re-enters. Default: made anew for each
            outermost acquisition.
        atomic: Run the body in ``transaction.atomic()`` on the default database and
            commit only while still holding. Not on async functions and blocks.
        on_locked: Decorator form, when the wait ran out: ``None`` (a view answers 423,
            any other call raises :exc:`LockTimeout`), ``"raise"``, ``"skip"`` (return
            ``None`` without running, by default without waiting) or a callable
            ``(exc, *args, **kwargs)`` whose result is returned. Refused on entering
            in any other form.
        note: Free text for people, up to 255 characters. In the decorator form a
            template or a callable, like the key; by default the function's name, or
            the method and the URL pattern of a view.
        backend: Alias in the setting ``DBLOCKS``.

    Raises:
        InvalidKey: The key can't name a lock.
        TypeError: An argument, or what is decorated, is of the wrong type.
        ValueError: An argument is out of range.
    """
    if timeout is lease is UNSET and is_bare(key, sys._getframe(1)):
        raise TypeError(
            "@distributed_lock is used without parentheses: write "
            '@distributed_lock("key"), or give the key as a template or a callable.'
        )
    return Lock(
        key=key if callable(key) else validation.key(key),
        on_locked=validation.on_locked(on_locked),
        timeout=timeout if timeout is UNSET else validation.timeout(timeout),
        lease=lease if isinstance(lease, Unset) else validation.lease(lease),
        renew=validation.flag("renew", renew),
        max_hold=validation.max_hold(max_hold, renew),
        hold_at_least=validation.bounded("hold_at_least", hold_at_least),
        owner=None if owner is None else validation.owner(owner),
        atomic=validation.flag("atomic", atomic),
        note=note if callable(note) else validation.text("note", note),
        backend=validation.text("backend", backend),
    )


@dataclass(eq=False, repr=False)
class Lock:
    """A named lock: what to lock, and how.

    Made by :func:`dblocks.distributed_lock`, which tells what it promises; used as a
    context manager (``with``, ``async with``), as a decorator, or through
    :meth:`acquire` and :meth:`try_acquire`.

    Re-entrant for its owner: the current asyncio task; in sync code that asgiref runs
    for a task, that one call; else the current thread; or whoever presents the same
    ``owner=``. ::

        report = distributed_lock("report", timeout=0)

        lease = report.try_acquire()
        if lease is None:
            return "somebody else is at it"
        with lease:
            ...

    Attributes:
        key, backend, owner, note, atomic, on_locked, renew: As given.
        timeout, lease, max_hold, hold_at_least: As given, in seconds.
    """

    key: str | Callable[..., str]
    on_locked: OnLocked
    timeout: float | Unset | None
    lease: float | Unset
    renew: bool
    max_hold: float | None
    hold_at_least: float
    owner: str | None
    atomic: bool
    note: str | Callable[..., str]
    backend: str

    def __post_init__(self) -> None:
        self._entered: dict[owners.Owner, list[Lease]] = {}
        self._is_literal = True

    def __repr__(self) -> str:
        return f"<Lock {self.key!r} backend={self.backend!r}>"

    def __call__(self, function: F) -> F:
        """Decorate a function, so that its calls hold the lock."""
        decorated: F = LeaseCalls.decorate(self, function)
        return decorated

    def for_call(self, key: str, note: str) -> Lock:
        """Return the same lock for one call of a decorated function.

        The decorator has made the key and the note, and sees to ``on_locked`` itself.
        """
        lock = object.__new__(Lock)
        lock.__dict__.update(
            self.__dict__,
            key=key,
            note=note,
            on_locked=None,
            _entered={},
            _is_literal=False,
        )
        return lock

    # Acquiring

    @sync_only
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
        attempt = self._attempt(timeout)
        return self._lease(attempt, get(attempt))

    @sync_only
    def try_acquire(self, timeout: object = 0) -> Lease | None:
        """Take the lock and return the lease, or ``None`` when it stays taken.

        Args:
            timeout: As for :meth:`acquire`; default 0, don't wait.

        Raises:
            LockError, TransactionManagementError, DatabaseError: As for
                :meth:`acquire`; a fault is never ``None``.
        """
        attempt = self._attempt(timeout)
        found = get(attempt)
        return None if isinstance(found, Reading) else self._lease(attempt, found)

    @sync_only
    def locked(self) -> bool:
        """Tell whether anybody, the caller included, has a lease on the key.

        A key that is cooling counts as locked. What a ``transaction_lock`` holds
        can't be seen without waiting for it.
        """
        reading = backends[self.backend].read(validation.literal("key", self.key))
        return reading is not None and reading.remaining > 0

    async def aacquire(self, timeout: object = UNSET) -> Lease:
        """:meth:`acquire` for async code; waits without holding a thread."""
        attempt = self._attempt(timeout)
        return await self._alease(attempt, await aget(attempt))

    async def atry_acquire(self, timeout: object = 0) -> Lease | None:
        """:meth:`try_acquire` for async code."""
        attempt = self._attempt(timeout)
        found = await aget(attempt)
        if isinstance(found, Reading):
            return None
        return await self._alease(attempt, found)

    async def alocked(self) -> bool:
        """:meth:`locked` for async code."""
        return await call_in_thread(backends[self.backend], self.locked)

    def _attempt(
        self, timeout: object = UNSET, by: owners.Owner | None = None
    ) -> Attempt:
        if self.on_locked is not None:
            raise TypeError(
                f"on_locked is for the decorator form alone: leave "
                f"{self.on_locked!r} out here. A with block and acquire() raise "
                f"LockTimeout; try_acquire() returns None."
            )
        key = validation.literal("key", self.key)
        if by is None and self._is_literal:
            warn_of_template(key)
        backend = backends[self.backend]
        wait = self.timeout if timeout is UNSET else validation.timeout(timeout)
        lease = backend.lease if isinstance(self.lease, Unset) else self.lease
        max_hold = FOREVER if self.max_hold is None else self.max_hold
        return Attempt(
            backend,
            key,
            terms(min(lease, max_hold), self.renew, max_hold, self.hold_at_least),
            by or owners.current(),
            self.owner,
            validation.literal("note", self.note),
            Lock,
            backend.timeout if isinstance(wait, Unset) else wait,
        )

    def _acquire_for(self, owner: owners.Owner) -> Lease:
        """Take the lock for another line of execution."""
        attempt = self._attempt(by=owner)
        return self._lease(attempt, get(attempt))

    def _lease(self, attempt: Attempt, found: Hold | Reading) -> Lease:
        """Return a lease of what was granted, or raise ``LockTimeout``."""
        if isinstance(found, Reading):
            raise self._timed_out(attempt, found)
        lease = Lease(found, self.atomic)
        try:
            attempt.by.add(lease)
            _tell_acquired(attempt, lease)
        except BaseException:
            if lease._close():
                give_back(found)
            raise
        return lease

    def _timed_out(self, attempt: Attempt, found: Reading) -> LockTimeout:
        """Log that the key stayed taken, and return the error that says so."""
        error = LockTimeout(
            attempt.key,
            timeout=attempt.timeout,
            holder=found.holder,
            note=found.note,
            acquired_at=found.acquired_at,
            retry_after=found.remaining,
        )
        signals.log_timeout(error, clock.monotonic() - attempt.started)
        return error

    async def _alease(self, attempt: Attempt, found: Hold | Reading) -> Lease:
        """:meth:`_lease` for async code; the signal's receivers may be sync."""
        if not signals.lock_acquired.receivers:
            return self._lease(attempt, found)
        return await call_in_thread(
            attempt.backend,
            lambda: self._lease(attempt, found),
            lambda lease: lease and lease._release_now(),
        )

    # As a context manager

    @sync_only
    def __enter__(self) -> Lease:
        attempt = self._attempt()
        lease = self._lease(attempt, get(attempt))
        if self.atomic:
            lease.__enter__()
        self._entered.setdefault(attempt.by, []).append(lease)
        return lease

    def __exit__(self, *exc_info: Any) -> None:
        self._leave().__exit__(*exc_info)

    async def __aenter__(self) -> Lease:
        if self.atomic:
            raise TypeError(
                "atomic=True can't be used with async with: Django has no async "
                "transactions. Run the block through sync_to_async()."
            )
        lease = await self.aacquire()
        self._entered.setdefault(owners.current(), []).append(lease)
        return lease

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._leave().__aexit__(*exc_info)

    def _leave(self) -> Lease:
        entered = self._entered
        # One alone may be a generator's that another thread or task closes.
        inside = list(entered)
        me = inside[0] if len(inside) == 1 else owners.current()
        if me not in entered:
            raise RuntimeError(f"{self!r} is left where it was not entered.")
        lease = entered[me].pop()
        if not entered[me]:
            del entered[me]
        return lease


def _tell_acquired(attempt: Attempt, lease: Lease) -> None:
    if logger.isEnabledFor(logging.DEBUG) or signals.lock_acquired.receivers:
        facts = lease._hold.facts(waited=clock.monotonic() - attempt.started)
        logger.debug(
            "acquired key=%(key)r backend=%(backend)s owner=%(owner)s "
            "fencing_token=%(fencing_token)s waited=%(waited).3f",
            facts,
        )
        signals.lock_acquired.send_robust(
            Lock, **facts, reentered=attempt.reentered, lease=lease
        )
