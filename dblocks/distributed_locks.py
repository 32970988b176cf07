"""The lock that lasts until it is released: a lease, kept by the database."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict, overload

from . import validation
from .conf import DEFAULT_ALIAS
from .decorators.decoratable import refuse_bare
from .leases import Lease, Leases
from .locks import Lock
from .validation import UNSET, Key, OnLocked, Unset

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Options(TypedDict, total=False):
    """The types of :func:`distributed_lock`'s options, for its overloads."""

    permits: int
    timeout: float | timedelta | None
    lease: float | timedelta
    renew: bool
    max_hold: float | timedelta | None
    hold_at_least: float | timedelta
    owner: str | None
    atomic: bool
    on_locked: OnLocked
    note: str | Callable[..., str]
    backend: str


@overload
def distributed_lock(key: Key, /, **options: Unpack[_Options]) -> Lock[Lease]: ...


@overload
def distributed_lock(*keys: Key, **options: Unpack[_Options]) -> Lock[Leases]: ...


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
    """Return a lock: a context manager, a decorator, and a source of leases.

    At most one owner at a time holds a key, among all processes that use the same
    backend; with ``permits``, at most that many owners. The owner is the current
    asyncio task or thread, or whoever presents the same ``owner=``, and may take its
    own lock again. Making a lock does no I/O and works at import time. One lock may be
    shared by threads and used many times. ::

        with distributed_lock("import", lease=60) as lease:
            ...

        @distributed_lock("order:{order_id}", timeout=2)
        def pay(request, order_id): ...

        @distributed_lock("account:{source_id}", "account:{target_id}", atomic=True)
        def transfer(source_id, target_id, amount): ...

        with distributed_lock("export", permits=3) as lease: ...

    Several keys are taken together, all or none. dblocks sorts them first, so callers
    that share keys can't deadlock each other. Entering the lock then gives
    :class:`Leases`.

    Entering waits for ``timeout`` and raises :exc:`LockTimeout` if somebody else held
    the key all that time. A database error stays Django's own. A thread of dblocks
    renews the lease until the block ends. Leaving the block releases the lock. It
    raises :exc:`LeaseLost` if the lease was lost in the meantime, unless the body has
    raised already.

    Nothing runs in the caller's transaction: inside ``atomic()`` dblocks uses a second
    connection, and on SQLite it refuses. A release inside a transaction is postponed
    until that transaction ends, by commit or by rollback.

    Durations are seconds or ``timedelta``. The database's clock decides when a lease is
    over. A lease alone excludes others only while it lasts: to stop a holder that was
    paused for longer, use ``atomic=True``, :meth:`Lease.guard` or the fencing token.

    Args:
        keys: What to lock: one key or up to 1,000, each of 1 to 255 characters and
            compared exactly; equal keys count once. As a decorator, ``str.format``
            templates over the call's arguments, or callables that get those arguments
            and return a key or an iterable of keys.
        permits: How many owners may hold the key at a time, 1 to 1,000; one key only.
            Callers that disagree see only the permits below their own number.
        timeout: How long to wait. ``0`` tries once, ``None`` waits forever. Default:
            the setting ``TIMEOUT``, 3 s.
        lease: How long the lock is held without being renewed, 0.1 s to 366 days.
            Below 1 s is for tests. Default: the setting ``LEASE``, 30 s.
        renew: Renew in the background, each time a third of the initial
            ``remaining()`` has passed, for as long as something refers to the lease.
        max_hold: No renewal extends the lease beyond this long after the acquisition.
            ``None``, the default, sets no limit. Not with ``renew=False``.
        hold_at_least: After an early release, even by an exception, the key stays
            taken, or *cooling*, until this long after the acquisition. Default: 0.
            Chubby's lock-delay (2006) and ShedLock's ``lockAtLeastFor`` are the models.
        owner: An explicit owner id, up to 64 characters. Whoever presents the same id
            re-enters, from any thread, process or machine. Default: a new id for each
            outermost acquisition.
        atomic: Run the body in ``transaction.atomic()`` on the database ``default``,
            and commit only while the lock is still held. Such a lease is entered once:
            by the lock's own ``with``, or by one of yours. Sync code only.
        on_locked: What a decorated call does when the wait runs out. ``None``: a view
            answers 423, any other call raises :exc:`LockTimeout`. ``"raise"``: every
            call raises it. ``"skip"``: return ``None`` without running, and don't wait
            unless ``timeout`` is given; not for views. A callable: return what
            ``on_locked(exc, *args, **kwargs)`` returns. For decorators only.
        note: Free text for people, up to 255 characters. As a decorator, a template or
            a callable, like the key; by default the function's name, or the method and
            URL pattern of a view.
        backend: An alias in the setting ``DBLOCKS``.

    Returns:
        Lock: Nothing is held until it is entered or acquired, or a function that it
            decorates is called.

    Raises:
        InvalidKey: The key can't name a lock.
        TypeError: An argument, or the decorated object, has the wrong type.
        ValueError: An argument is out of range, or excludes another.
    """
    if len(keys) == 1 and timeout is lease is UNSET:
        refuse_bare("distributed_lock", keys[0], sys._getframe(1))
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
