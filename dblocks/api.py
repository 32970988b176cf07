"""The functions that make locks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType, FunctionType

from .arguments import UNSET, OnLocked, Unset
from .conf import DEFAULT_ALIAS
from .locks import Lock
from .pessimistic import TransactionLock


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
    note: str = "",
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
            ``(exc, *args, **kwargs)`` whose result is returned.
        note: Free text for people, up to 255 characters.
        backend: Alias in the setting ``DBLOCKS``.

    Raises:
        InvalidKey: The key can't name a lock.
        TypeError: An argument, or what is decorated, is of the wrong type.
        ValueError: An argument is out of range.
    """
    if timeout is lease is UNSET and _is_bare(key, sys._getframe(1)):
        raise TypeError(
            "@distributed_lock is used without parentheses: write "
            '@distributed_lock("key"), or give the key as a template or a callable.'
        )
    return Lock(
        key,
        timeout=timeout,
        lease=lease,
        renew=renew,
        max_hold=max_hold,
        hold_at_least=hold_at_least,
        owner=owner,
        atomic=atomic,
        on_locked=on_locked,
        note=note,
        backend=backend,
    )


def transaction_lock(
    key: str | Callable[..., str],
    *,
    timeout: float | timedelta | Unset | None = UNSET,
    nowait: bool = False,
    skip_locked: bool = False,
    backend: str = DEFAULT_ALIAS,
) -> TransactionLock:
    """Return a lock that lasts as long as the caller's transaction.

    ``SELECT … FOR UPDATE`` on the lock's row, in the transaction that is open on the
    lock's database, or in one that it opens. The database holds it until that
    transaction ends; there is no lease, nothing to renew and nothing to lose but the
    connection. Excludes leases on the same key and is excluded by them. No I/O happens
    here; it works at import time, and may be shared by threads and used again. ::

        @transaction_lock("stock:{product_id}", timeout=5)
        def sell(product_id): ...

        with transaction_lock("stock:7", nowait=True) as row: ...

    The same transaction may lock a row again; nested with a lease of the same owner on
    the same key it raises. For another transaction it waits in the database's own
    queue, for a lease by reading. What the transaction has read before may be older
    than the lock: take the lock first. On SQLite, which has no row locks, it takes the
    database's write lock.

    Args:
        key: As for :func:`distributed_lock`.
        timeout: Seconds or ``timedelta`` to wait, fractions kept; ``None`` waits for
            ever. Default: setting ``TIMEOUT``, 3 s. Not with the other two.
        nowait: Raise at once when the key is taken.
        skip_locked: Yield ``None``, or skip the function, when the key is taken. Not
            on views.
        backend: Alias in the setting ``DBLOCKS``, of a database backend.

    Raises:
        InvalidKey: The key can't name a lock.
        TypeError: An argument is of the wrong type, or what is decorated is async.
        ValueError: An argument is out of range, or excludes another.
        LockTimeout: On entering: the key stayed taken; the caller's transaction stays
            usable.
        LockError: On entering: the same owner holds a lease on the key.
        NotSupportedError: On entering: the locks are in another database, or in none.
    """
    if timeout is UNSET and _is_bare(key, sys._getframe(1)):
        raise TypeError(
            "@transaction_lock is used without parentheses: write "
            '@transaction_lock("key"), or give the key as a template or a callable.'
        )
    return TransactionLock(
        key,
        timeout=timeout,
        nowait=nowait,
        skip_locked=skip_locked,
        backend=backend,
    )


def _is_bare(key: object, caller: FrameType) -> bool:
    """Tell whether ``key`` is the function under a decorator without parentheses.

    A callable key looks the same but for this: the function that is being decorated
    is being defined by the caller, where it has no name yet.
    """
    if isinstance(key, str):
        return False
    if isinstance(key, type):
        return True
    if not isinstance(key, FunctionType) or key.__name__ == "<lambda>":
        return False
    function = inspect.unwrap(key)
    code = getattr(function, "__code__", None)
    if not any(constant is code for constant in caller.f_code.co_consts):
        return False
    named = list(caller.f_locals.values())
    return not any(value is key or value is function for value in named)
