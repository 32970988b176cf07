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
    presents the same ``owner=``. No I/O happens here; it works at import time. ::

        with distributed_lock("import", lease=60) as lease:
            ...

        @distributed_lock("order:{order_id}", timeout=2)
        def pay(request, order_id): ...

    Durations are seconds or ``timedelta``. Times are the database's; mutual exclusion
    by a lease alone ends with the lease: a holder that is paused for longer is caught
    by ``atomic=True``, :meth:`Lease.guard` or the fencing token.

    Args:
        key: What is locked, up to 255 characters, compared exactly. In the decorator
            form a ``str.format`` template over the call's arguments, or a callable
            that gets them and returns the key.
        timeout: How long to wait; ``0`` tries once, ``None`` waits for ever. Default:
            setting ``TIMEOUT``, 3 s.
        lease: How long it is held without being renewed, 0.1 s to 366 days. Default:
            setting ``LEASE``, 30 s.
        renew: Renew in the background for as long as the lease is referred to.
        max_hold: No renewal moves the expiry beyond this long after the acquisition.
        hold_at_least: After an early release the key stays taken, *cooling*, until
            this long after the acquisition (Chubby's lock-delay, 2006, and ShedLock's
            ``lockAtLeastFor`` are the models).
        owner: An explicit owner id, up to 64 characters.
        atomic: Run the body in ``transaction.atomic()`` and commit only while still
            holding.
        on_locked: Decorator form, when the wait ran out: ``None``, ``"raise"``,
            ``"skip"`` or a callable ``(exc, *args, **kwargs)``.
        note: Free text for people, up to 255 characters.
        backend: Alias in the setting ``DBLOCKS``.

    Raises:
        InvalidKey: The key can't name a lock.
        TypeError, ValueError: Another argument is unfit.
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
    connection. Excludes leases on the same key and is excluded by them. ::

        @transaction_lock("stock:{product_id}", timeout=5)
        def sell(product_id): ...

        with transaction_lock("stock:7", nowait=True) as row: ...

    On SQLite, which has no row locks, it takes the database's write lock.

    Args:
        key: As for :func:`distributed_lock`.
        timeout: Seconds or ``timedelta`` to wait, fractions kept; ``None`` waits for
            ever. Default: setting ``TIMEOUT``, 3 s. Not with the other two.
        nowait: Raise at once when the key is taken.
        skip_locked: Yield ``None``, or skip the function, when the key is taken.
        backend: Alias in the setting ``DBLOCKS``, of a database backend.

    Raises:
        LockTimeout: The key stayed taken; the caller's transaction stays usable.
        LockError: The same owner holds a lease on the key.
        NotSupportedError: The locks are in another database, or in none.
        TypeError, ValueError: An argument is unfit.
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
