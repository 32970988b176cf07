"""Locks: what is exclusive, and how it is taken."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from itertools import chain
from types import FrameType
from typing import Any, Generic, TypeVar

from . import clock, signals, validation
from .advice import warn_of_template
from .backends.database import transactions
from .backends.values import FOREVER, first_free
from .conf import backends
from .decorators.functions import LeaseCalls
from .exceptions import LockTimeout
from .holding import owners
from .holding.holds import Hold, terms
from .holding.sets import give_back
from .lease_blocks import LeaseBlock, sync_only
from .leases import Lease, Leases
from .permits import row_keys
from .validation import UNSET, Key, OnLocked, Unset
from .waiting.attempt import Attempt
from .waiting.threads import call_in_thread
from .waiting.together import Refused, aget_all, get_all

logger = logging.getLogger("dblocks")

F = TypeVar("F", bound=Callable[..., Any])
L = TypeVar("L", bound=LeaseBlock)


@dataclass(eq=False, repr=False)
class Lock(Generic[L]):
    """A named lock: what to lock, and how.

    Made by :func:`dblocks.distributed_lock`, which describes what it promises. Use it
    as a context manager (``with``, ``async with``), as a decorator, or through
    :meth:`acquire` and :meth:`try_acquire`. Making one does no I/O; threads and tasks
    may share it.

    Its owner may take it again. With ``owner=``, that is whoever presents the same id.
    Without, it is the current asyncio task; in sync code that asgiref runs for a task,
    that one call; else the current thread. ::

        report = distributed_lock("report", timeout=0)

        lease = report.try_acquire()
        if lease is None:
            return "somebody else is making the report"
        with lease:
            ...

    Its attributes have the names of :func:`~dblocks.distributed_lock`'s arguments.
    Durations are in seconds.
    """

    keys: tuple[Key, ...]
    permits: int
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
        self._entered: list[_Entry] = []
        self._is_literal = True
        self._templates: Mapping[str, str] = {}
        self._is_one = len(self.keys) == 1

    def __getstate__(self) -> dict[str, Any]:
        # Nobody has entered a copy, such as the one that a spawned process gets.
        return {**vars(self), "_entered": []}

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        permits = f" permits={self.permits}" if self.permits > 1 else ""
        return f"<Lock {keys}{permits} backend={self.backend!r}>"

    @property
    def key(self) -> Key | None:
        """The key, or ``None`` for a lock of several keys."""
        return self.keys[0] if self._is_one else None

    def __call__(self, function: F) -> F:
        """Decorate a function, so that its calls hold the lock."""
        decorated: F = LeaseCalls.decorate(self, function)
        return decorated

    def for_call(
        self, keys: str | tuple[str, ...], note: str, templates: Mapping[str, str]
    ) -> Lock[Any]:
        """Return the same lock for one call of a decorated function.

        The decorator has made the keys and the note, and handles ``on_locked`` itself.

        Args:
            keys: A ``str`` if the lock has one key.
            templates: By key, the template that the key was made from, if any.
        """
        lock: Lock[Any] = object.__new__(Lock)
        is_one = isinstance(keys, str)
        lock.__dict__.update(
            self.__dict__,
            keys=(keys,) if is_one else keys,
            note=note,
            on_locked=None,
            _entered=[],
            _is_literal=False,
            _templates=templates,
            _is_one=is_one,
        )
        validation.permits(self.permits, of_one=is_one)
        return lock

    # Acquiring

    @sync_only
    def acquire(self, timeout: float | timedelta | None = UNSET) -> L:
        """Wait for the lock and take it.

        Args:
            timeout: How long to wait, in seconds or as a ``timedelta``. ``0`` tries
                once, ``None`` waits forever. Default: the lock's own.

        Returns:
            Lease | Leases: The :class:`Lease`; for several keys, their :class:`Leases`.

        Raises:
            LockTimeout: Somebody else held the key all that time.
            LockError: This thread's own transaction has locked the key's row.
            SynchronousOnlyOperation: An event loop is running in this thread.
            TransactionManagementError: The lock can't be taken beside the open
                transaction (SQLite, or autocommit switched off by hand).
            NotSupportedError: The backend can't keep what was asked for.
            DatabaseError: A fault of the database. It never means "taken".
        """
        return self._acquire(self._attempts(timeout))

    @sync_only
    def try_acquire(self, timeout: float | timedelta | None = 0) -> L | None:
        """Take the lock and return its lease, or ``None`` if it stays taken.

        Args:
            timeout: As for :meth:`acquire`. Default: 0, which doesn't wait.

        Returns:
            Lease | Leases | None: As for :meth:`acquire`.

        Raises:
            LockError, TransactionManagementError, DatabaseError: As for
                :meth:`acquire`. A fault is never reported as ``None``.
        """
        attempts = self._attempts(timeout)
        found = self._get(attempts)
        return None if isinstance(found, Refused) else self._leases(attempts, found)

    @sync_only
    def locked(self) -> bool:
        """Tell whether anybody, the caller included, has a lease on the key.

        With permits, whether all of them are taken. With several keys, whether at least
        one is taken. A key that is cooling counts as taken. What a ``transaction_lock``
        holds can't be seen without waiting for it.

        The answer may be out of date when you read it: to act on it, take the lock.
        """
        rows = [row_keys(key, self.permits) for key in self._distinct()]
        seen = backends[self.backend].read_all(list(chain.from_iterable(rows)))
        return any(first_free(seen, keys).remaining > 0 for keys in rows)

    async def aacquire(self, timeout: float | timedelta | None = UNSET) -> L:
        """Async twin of :meth:`acquire`. Waiting holds no thread."""
        self._refuse_atomic()
        attempts = self._attempts(timeout)
        found = await aget_all(attempts)
        if isinstance(found, Refused):
            raise self._timed_out(found)
        return await self._aleases(attempts, found)

    async def atry_acquire(self, timeout: float | timedelta | None = 0) -> L | None:
        """Async twin of :meth:`try_acquire`."""
        self._refuse_atomic()
        attempts = self._attempts(timeout)
        found = await aget_all(attempts)
        if isinstance(found, Refused):
            return None
        return await self._aleases(attempts, found)

    async def alocked(self) -> bool:
        """Async twin of :meth:`locked`."""
        return await call_in_thread(backends[self.backend], self.locked)

    def _refuse_atomic(self) -> None:
        if self.atomic:
            raise TypeError(
                "atomic=True can't be used in async code: Django has no async "
                "transactions. Run the block through sync_to_async()."
            )

    def _distinct(self) -> list[str]:
        """Return the distinct keys, in the order in which all callers take them."""
        keys = [validation.literal("key", key) for key in self.keys]
        if self.permits > 1:
            validation.key_of_permits(keys[0], self.permits)
        return sorted(set(keys)) if len(keys) > 1 else keys

    def _attempts(
        self, timeout: object = UNSET, by: owners.Owner | None = None
    ) -> list[Attempt]:
        if self.on_locked is not None:
            raise TypeError(
                f"on_locked is for the decorator form alone: leave "
                f"{self.on_locked!r} out here. A with block and acquire() raise "
                f"LockTimeout; try_acquire() returns None."
            )
        keys = self._distinct()
        if by is None and self._is_literal:
            for key in keys:
                warn_of_template(key)
        backend = backends[self.backend]
        wait = self.timeout if timeout is UNSET else validation.timeout(timeout)
        lease = backend.lease if isinstance(self.lease, Unset) else self.lease
        max_hold = FOREVER if self.max_hold is None else self.max_hold
        backend.check_terms(lease, self.hold_at_least)
        by = by or owners.current()
        how = terms(min(lease, max_hold), self.renew, max_hold, self.hold_at_least)
        note = validation.literal("note", self.note)
        wait = backend.timeout if isinstance(wait, Unset) else wait
        started = clock.monotonic()
        return [
            Attempt(
                backend,
                key,
                how,
                by,
                self.owner,
                note,
                Lock,
                wait,
                started,
                self.permits,
                template=self._templates.get(key),
            )
            for key in keys
        ]

    def _acquire_for(self, owner: owners.Owner) -> L:
        """Take the lock for another line of execution."""
        return self._acquire(self._attempts(by=owner))

    @staticmethod
    def _get(attempts: list[Attempt]) -> list[Hold] | Refused:
        if not attempts[0].backend.has_table:
            # Raises with autocommit off, where nobody would see when to release. The
            # database engine does this itself.
            transactions.transaction_is_open()
        return get_all(attempts)

    def _acquire(self, attempts: list[Attempt]) -> L:
        found = self._get(attempts)
        if isinstance(found, Refused):
            raise self._timed_out(found)
        return self._leases(attempts, found)

    def _leases(self, attempts: list[Attempt], holds: list[Hold]) -> L:
        """Return the leases of what was granted."""
        leases = [
            Lease(hold, attempt, self.atomic and self._is_one)
            for attempt, hold in zip(attempts, holds, strict=True)
        ]
        by = attempts[0].by
        try:
            found: Any = leases[0]
            if self._is_one:
                by.add(found)
            else:
                found = Leases(leases, self.atomic)
                by.add(*leases, found)
            for attempt, lease in zip(attempts, leases, strict=True):
                _tell_acquired(attempt, lease)
        except BaseException:
            give_back([lease._hold for lease in leases if lease._close()])
            raise
        done: L = found
        return done

    def _timed_out(self, refused: Refused) -> LockTimeout:
        """Log that the key stayed taken, and return the error that says so."""
        attempt, seen = refused
        error = seen.as_timeout(attempt.key, self.backend, attempt.timeout)
        signals.log_timeout(error, clock.monotonic() - attempt.started)
        return error

    async def _aleases(self, attempts: list[Attempt], holds: list[Hold]) -> L:
        """:meth:`_leases` for async code: a sync receiver may need a thread."""
        if not signals.lock_acquired.receivers:
            return self._leases(attempts, holds)
        return await call_in_thread(
            attempts[0].backend,
            partial(copy_context().run, self._leases, attempts, holds),
            LeaseBlock._undo,
        )

    # As a context manager

    def __enter__(self) -> L:
        entry = _Entry(_frame_that_others_may_close())
        try:
            return self._enter(entry)
        except BaseException:
            self._forget(entry)
            if entry.lease is not None:
                entry.lease.__exit__(*sys.exc_info())
            raise

    @sync_only
    def _enter(self, entry: _Entry) -> L:
        attempts = self._attempts()
        entry.by = attempts[0].by
        entry.lease = lease = self._acquire(attempts)
        if self.atomic:
            lease.__enter__()
        self._entered.append(entry)
        return lease

    def __exit__(self, *exc_info: Any) -> None:
        self._leave(_frame_that_others_may_close()).__exit__(*exc_info)

    # Plain functions, not coroutines, so that their caller is the block's own frame.

    def __aenter__(self) -> Coroutine[Any, Any, L]:
        return self._aenter(_Entry(_frame_that_others_may_close()))

    async def _aenter(self, entry: _Entry) -> L:
        try:
            entry.lease = lease = await self.aacquire()
            entry.by = owners.current()
            self._entered.append(entry)
            return lease
        except BaseException:
            self._forget(entry)
            if entry.lease is not None:
                await entry.lease.__aexit__(*sys.exc_info())
            raise

    def __aexit__(self, *exc_info: Any) -> Coroutine[Any, Any, None]:
        return self._leave(_frame_that_others_may_close()).__aexit__(*exc_info)

    def _forget(self, entry: _Entry) -> None:
        """Forget a block that an exception kept from being entered."""
        with suppress(ValueError):
            self._entered.remove(entry)

    def _leave(self, frame: FrameType | None) -> LeaseBlock:
        """Remove the entry of the block that is left, and return its lease."""
        inside = found = list(self._entered)
        if len(inside) > 1:
            found = [x for x in inside if frame is not None and x.frame is frame]
            if not found:
                # An ExitStack enters and leaves in frames of its own.
                me = owners.current()
                mine = [x for x in inside if x.by is me]
                found = [x for x in mine if x.frame is None] or mine
        if not found:
            raise RuntimeError(f"{self!r} is left where it was not entered.")
        self._entered.remove(found[-1])
        lease: LeaseBlock = found[-1].lease
        return lease


@dataclass(eq=False, slots=True)
class _Entry:
    """A block that has been entered, or is being entered.

    Attributes:
        frame: The block's frame, if another thread or task may close it.
        by: The owner that enters the block.
        lease: The block's lease or leases, once granted.
    """

    frame: FrameType | None
    by: owners.Owner | None = None
    lease: Any = None


_CLOSABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


def _frame_that_others_may_close() -> FrameType | None:
    """Return the caller's caller, if it is a generator or coroutine.

    Another thread or task may close it, as the garbage collector does.
    """
    frame = sys._getframe(2)
    return frame if frame.f_code.co_flags & _CLOSABLE else None


def _tell_acquired(attempt: Attempt, lease: Lease) -> None:
    if (observer := signals.observer) is not None:
        observer.acquired(attempt)
    if logger.isEnabledFor(logging.DEBUG) or signals.lock_acquired.receivers:
        facts = lease._hold.facts(waited=clock.monotonic() - attempt.started)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "acquired key=%(key)r permit=%(permit)s backend=%(backend)s "
                "owner=%(owner)s fencing_token=%(fencing_token)s waited=%(waited).3f",
                signals.shown(facts),
            )
        facts |= {"reentered": attempt.reentered, "lease": lease}
        signals.send(signals.lock_acquired, Lock, **facts)
