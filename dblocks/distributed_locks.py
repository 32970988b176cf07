"""The lock that lasts until it is released: a lease, kept by the database."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, overload

from . import validation
from .conf import DEFAULT_ALIAS
from .decorators.decoratable import is_bare
from .leases import Lease, Leases
from .locks import Lock
from .validation import UNSET, Key, OnLocked, Unset


@overload
def distributed_lock(
    key: Key,
    /,
    *,
    permits: int = ...,
    timeout: float | timedelta | None = ...,
    lease: float | timedelta = ...,
    renew: bool = ...,
    max_hold: float | timedelta | None = ...,
    hold_at_least: float | timedelta = ...,
    owner: str | None = ...,
    atomic: bool = ...,
    on_locked: OnLocked = ...,
    note: str | Callable[..., str] = ...,
    backend: str = ...,
) -> Lock[Lease]: ...


@overload
def distributed_lock(
    *keys: Key,
    permits: int = ...,
    timeout: float | timedelta | None = ...,
    lease: float | timedelta = ...,
    renew: bool = ...,
    max_hold: float | timedelta | None = ...,
    hold_at_least: float | timedelta = ...,
    owner: str | None = ...,
    atomic: bool = ...,
    on_locked: OnLocked = ...,
    note: str | Callable[..., str] = ...,
    backend: str = ...,
) -> Lock[Leases]: ...


def distributed_lock(
    *keys: Key,
    permits: int = 1,
    timeout: float | timedelta | None = UNSET,
    lease: float | timedelta = UNSET,
    renew: bool = True,
    max_hold: float | timedelta | None = None,
    hold_at_least: float | timedelta = 0,
    owner: str | None = None,
    atomic: bool = False,
    on_locked: OnLocked = None,
    note: str | Callable[..., str] = "",
    backend: str = DEFAULT_ALIAS,
) -> Lock[Any]:
    """Return a lock: a context manager, a decorator, and what hands out leases.

    At most one owner at a time, among all processes on the same database, has a lease
    on a key; with ``permits``, at most so many. Re-entrant for the owner: the current
    thread, asyncio task, or whoever presents the same ``owner=``. No I/O happens here;
    it works at import time, and the lock may be shared by threads and used again. ::

        with distributed_lock("import", lease=60) as lease:
            ...

        @distributed_lock("order:{order_id}", timeout=2)
        def pay(request, order_id): ...

        @distributed_lock("account:{source_id}", "account:{target_id}", atomic=True)
        def transfer(source_id, target_id, amount): ...

        with distributed_lock("export", permits=3) as lease: ...

    Several keys are taken together, all or none, in one order of their own whatever
    the order given, so that those who share keys can't deadlock each other; what is
    handed out then is :class:`Leases`.

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
        keys: What is locked: one key or several, each up to 255 characters and
            compared exactly; equal ones count once, and there may be 1,000. In the
            decorator form ``str.format`` templates over the call's arguments, or
            callables that get them and return a key or an iterable of keys.
        permits: How many owners may have the key at a time, 1 to 1,000; not with
            several keys. Callers that disagree see the permits below their own number.
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
    bare = len(keys) == 1 and timeout is lease is UNSET
    if bare and is_bare(keys[0], sys._getframe(1)):
        raise TypeError(
            "@distributed_lock is used without parentheses: write "
            '@distributed_lock("key"), or give the key as a template or a callable.'
        )
    return Lock(
        keys=validation.named(keys),
        permits=validation.permits(permits, of_one=len(keys) == 1),
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
