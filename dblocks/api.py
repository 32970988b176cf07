"""The functions that make locks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from .arguments import UNSET, OnLocked, Unset
from .conf import DEFAULT_ALIAS
from .locks import Lock


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
