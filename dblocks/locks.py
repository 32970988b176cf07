"""Locks: what is exclusive, and how it is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from asgiref.sync import sync_to_async

from . import arguments, ownership
from .acquisition import Acquisition
from .arguments import UNSET, OnLocked, Unset
from .backends.base import FOREVER, BaseBackend
from .conf import DEFAULT_ALIAS, backends
from .holds import Terms, terms
from .leases import Lease, sync_only

F = TypeVar("F", bound=Callable[..., Any])


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
        self.lease = lease if isinstance(lease, Unset) else arguments.lease(lease)
        self.renew = arguments.flag("renew", renew)
        self.max_hold = arguments.max_hold(max_hold, self.renew)
        self.hold_at_least = arguments.bounded("hold_at_least", hold_at_least)
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
        acquisition = self._acquisition(timeout)
        return acquisition.lease(acquisition.run())

    @sync_only
    def try_acquire(self, timeout: object = 0) -> Lease | None:
        """Take the lock and return the lease, or ``None`` when it stays taken.

        Args:
            timeout: As for :meth:`acquire`; default 0, don't wait.

        Raises:
            LockError, TransactionManagementError, DatabaseError: As for
                :meth:`acquire`; a fault is never ``None``.
        """
        found = self._acquisition(timeout).run()
        return found if isinstance(found, Lease) else None

    @sync_only
    def locked(self) -> bool:
        """Tell whether anybody, the caller included, has a lease on the key.

        A key that is cooling counts as locked. What a ``transaction_lock`` holds
        can't be seen without waiting for it.
        """
        return self._is_locked()

    async def aacquire(self, timeout: object = UNSET) -> Lease:
        """:meth:`acquire` for async code; waits without holding a thread."""
        acquisition = self._acquisition(timeout)
        return acquisition.lease(await acquisition.arun())

    async def atry_acquire(self, timeout: object = 0) -> Lease | None:
        """:meth:`try_acquire` for async code."""
        found = await self._acquisition(timeout).arun()
        return found if isinstance(found, Lease) else None

    async def alocked(self) -> bool:
        """:meth:`locked` for async code."""
        return await sync_to_async(self._is_locked)()

    def _is_locked(self) -> bool:
        reading = backends[self.backend].read(self.literal_key)
        return reading is not None and reading.remaining > 0

    def terms(self, backend: BaseBackend) -> Terms:
        """How it is held on a backend, whose settings give the defaults."""
        lease = backend.lease if isinstance(self.lease, Unset) else self.lease
        max_hold = FOREVER if self.max_hold is None else self.max_hold
        return terms(min(lease, max_hold), self.renew, max_hold, self.hold_at_least)

    @property
    def literal_key(self) -> str:
        """The key, if it is not a callable that only a decorator can call."""
        if callable(self.key):
            raise TypeError(
                f"key={self.key!r} is a callable, which only the decorator form calls; "
                f"here the key must be a str."
            )
        return self.key

    def _acquisition(self, timeout: object) -> Acquisition:
        if not isinstance(timeout, Unset):
            wait = arguments.timeout(timeout)
        elif not isinstance(self.timeout, Unset):
            wait = self.timeout
        else:
            wait = backends[self.backend].timeout
        return Acquisition(self, ownership.current(), wait)

    # As a context manager

    @sync_only
    def __enter__(self) -> Lease:
        acquisition = self._acquisition(UNSET)
        lease = acquisition.lease(acquisition.run())
        if self.atomic:
            lease.__enter__()
        self._entered.setdefault(acquisition.me, []).append(lease)
        return lease

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
        # One alone may be a generator's that another thread or task closes.
        owners = list(entered)
        me = owners[0] if len(owners) == 1 else ownership.current()
        if me not in entered:
            raise RuntimeError(f"{self!r} is left where it was not entered.")
        lease = entered[me].pop()
        if not entered[me]:
            del entered[me]
        return lease
