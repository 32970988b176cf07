"""The pessimistic form: the database holds the lock until a transaction ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, NotSupportedError, connections, transaction
from django.utils.asyncio import async_unsafe

from . import validation
from .advice import warn_of_template
from .backends.database import row_locks
from .backends.database.transactions import in_transaction, transaction_is_open
from .conf import DEFAULT_ALIAS, backends
from .decorators.decoratable import refuse_bare
from .decorators.functions import RowCalls
from .exceptions import LockError
from .holding import owners
from .validation import UNSET, Key, RowWait

if TYPE_CHECKING:
    from .models import DistributedLock

F = TypeVar("F", bound=Callable[..., Any])


def transaction_lock(
    *keys: Key,
    timeout: float | timedelta | None = UNSET,
    nowait: bool = False,
    skip_locked: bool = False,
    backend: str = DEFAULT_ALIAS,
) -> TransactionLock:
    """Return a lock that lasts as long as the caller's transaction.

    It locks the key's row with ``SELECT … FOR UPDATE``, in the transaction that is open
    on the lock's database, or in one that it opens. The database holds the lock until
    that transaction ends. There is no lease: nothing to renew, and nothing to lose but
    the connection. This lock and a ``distributed_lock`` on the same key exclude each
    other. Making it does no I/O and works at import time; it may be shared by threads
    and used many times. ::

        @transaction_lock("stock:{product_id}", timeout=5)
        def sell(product_id): ...

        with transaction_lock("stock:7", nowait=True) as row: ...

        with transaction_lock("account:1", "account:2") as rows: ...

    One transaction may lock the same row again. If the same owner has a lease on the
    key, it raises :exc:`LockError`. It waits for other transactions in the database's
    own queue, and for a lease by reading. Whatever the transaction read earlier may be
    older than the lock: take the lock first. SQLite has no row locks; there it takes
    the database's write lock.

    Args:
        keys: As for :func:`distributed_lock`. The rows of several keys are locked in
            sorted order, in one statement (on MySQL and MariaDB, one by one in a
            transaction that is open already), and come as a mapping from key to row.
        timeout: How long to wait, in seconds or as a ``timedelta``; fractions count.
            ``None`` waits forever. Default: the setting ``TIMEOUT``, 3 s. Not with
            ``nowait`` or ``skip_locked``.
        nowait: Raise at once if the key is taken.
        skip_locked: If the key is taken, yield ``None``, or skip the function. Not for
            views.
        backend: An alias in the setting ``DBLOCKS``, of a database backend.

    Returns:
        The lock. Nothing is locked until it is entered or called as decorated.

    Raises:
        InvalidKey: The key can't name a lock.
        TypeError: An argument has the wrong type, or the decorated function is async.
        ValueError: An argument is out of range, or excludes another.
        LockTimeout: On entering: the key stayed taken. The caller's transaction stays
            usable, except on MySQL and MariaDB, which may have to roll it back if
            somebody got a lease meanwhile.
        LockError: On entering: the same owner has a lease on the key.
        TransactionManagementError: On entering: autocommit is off without ``atomic()``.
        NotSupportedError: On entering: the locks are in another database, or in none.
    """
    if timeout is UNSET and len(keys) == 1:
        refuse_bare("transaction_lock", keys[0], sys._getframe(1))
    return TransactionLock(keys, timeout, nowait, skip_locked, backend)


class TransactionLock:
    """A key whose row the database itself locks. Made by :func:`transaction_lock`.

    As a context manager it yields the row; with several keys, a mapping from key to
    row; when skipped, ``None``. It is a decorator as well. May be shared by threads and
    used many times.
    """

    def __init__(
        self,
        keys: tuple[Key, ...],
        timeout: object,
        nowait: bool,
        skip_locked: bool,
        backend: str,
    ) -> None:
        self.keys: tuple[Key, ...] = validation.named(keys)
        self.backend: str = validation.text("backend", backend)
        self._wait = validation.row_wait(nowait, skip_locked, timeout)
        self._entered = threading.local()
        self._is_literal = True
        self._is_one = len(self.keys) == 1

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        return f"<TransactionLock {keys} backend={self.backend!r}>"

    @property
    def key(self) -> Key | None:
        """The key, or ``None`` for a lock of several keys."""
        return self.keys[0] if self._is_one else None

    def with_keys(self, keys: str | tuple[str, ...]) -> TransactionLock:
        """Return the same lock for other keys; a single one is given as a ``str``."""
        lock = object.__new__(TransactionLock)
        is_one = isinstance(keys, str)
        lock.__dict__.update(
            self.__dict__,
            keys=(keys,) if is_one else keys,
            _entered=threading.local(),
            _is_literal=False,
            _is_one=is_one,
        )
        return lock

    @property
    def skips(self) -> bool:
        """Whether a taken key is passed over."""
        return self._wait is not None and self._wait.skip

    def __call__(self, function: F) -> F:
        """Decorate a function, so that its calls run in a transaction with the row."""
        decorated: F = RowCalls.decorate(self, function)
        return decorated

    @async_unsafe
    def __enter__(self) -> Any:
        if self._is_literal:
            for key in self.keys:
                if isinstance(key, str):
                    warn_of_template(key)
        block = self._block()
        rows = block.__enter__()
        self._entered.__dict__.setdefault("blocks", []).append(block)
        if rows is None:
            return None
        return next(iter(rows.values())) if self._is_one else rows

    def __exit__(self, *exc_info: Any) -> bool | None:
        block: AbstractContextManager[Any] = self._entered.blocks.pop()
        return block.__exit__(*exc_info)

    @contextmanager
    def _block(self) -> Iterator[dict[str, DistributedLock] | None]:
        keys = sorted({validation.literal("key", key) for key in self.keys})
        backend = backends[self.backend]
        if not backend.has_table:
            raise NotSupportedError(
                f"The backend {backend.alias!r} keeps no rows that a transaction could "
                f"lock; use distributed_lock."
            )
        wait = (self._wait or RowWait(backend.timeout))._replace(backend=self.backend)
        using = backend.using
        connection = connections[using]
        if using != DEFAULT_DB_ALIAS and not in_transaction(connection):
            raise NotSupportedError(
                f"The locks are in the database {using!r}: a row locked there says "
                f"nothing about a transaction on {DEFAULT_DB_ALIAS!r}. Use "
                f"distributed_lock with atomic=True, or open "
                f"transaction.atomic(using={using!r}) around it."
            )
        _refuse_nesting(using, keys)
        _refuse_without_autocommit(using)
        if in_transaction(connection):
            yield row_locks.lock_rows(using, keys, wait)
        elif connection.in_atomic_block:
            # A TestCase's transaction.
            with transaction.atomic(using=using):
                yield row_locks.lock_rows(using, keys, wait)
        else:
            with row_locks.own_transaction(connection, keys, wait) as rows:
                yield rows


@async_unsafe
def lock_row(using: str, key: str, wait: RowWait) -> Any:
    """Lock a key's row in the current transaction; see ``objects.for_update()``."""
    _refuse_nesting(using, [key])
    _refuse_without_autocommit(using)
    rows = row_locks.lock_rows(using, [key], wait)
    return None if rows is None else rows[key]


def _refuse_nesting(using: str, keys: Sequence[str]) -> None:
    """Raise if the current owner has a lease on a key: it would wait for itself."""
    for key in keys:
        for lease in owners.current().leases(key):
            # A permit is leased in a row of its own.
            if lease._hold.grant.key != key:
                continue
            if lease.held and lease._backend.is_in_database(using):
                raise LockError(
                    f"The lock {key!r} is leased by the same owner: its row can't be "
                    f"locked inside. Use one form, distributed_lock or "
                    f"transaction_lock, not both."
                )


def _refuse_without_autocommit(using: str) -> None:
    """Raise if autocommit is off: the end of such a transaction can't be seen."""
    connection = connections[using]
    if not connection.settings_dict["AUTOCOMMIT"]:
        # Only an open connection tells whether it is off.
        connection.ensure_connection()
    transaction_is_open()
