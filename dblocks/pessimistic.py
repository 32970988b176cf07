"""The pessimistic form: the database holds the lock until a transaction ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, NotSupportedError, connections, transaction

from . import arguments
from .arguments import UNSET, PessimisticWait, Unset
from .backends.base import BaseBackend
from .conf import DEFAULT_ALIAS, backends
from .transactions import in_transaction

if TYPE_CHECKING:
    from .models import DistributedLock

F = TypeVar("F", bound=Callable[..., Any])


class TransactionLock:
    """A key whose row the database itself locks; made by ``transaction_lock()``.

    A context manager that yields the row (``None`` when skipped), or a decorator. May
    be shared by threads and used again.
    """

    def __init__(
        self,
        key: str | Callable[..., str],
        *,
        timeout: object = UNSET,
        nowait: bool = False,
        skip_locked: bool = False,
        backend: str = DEFAULT_ALIAS,
    ) -> None:
        self.key = key if callable(key) else arguments.key(key)
        self.backend = arguments.text("backend", backend)
        unset = isinstance(timeout, Unset)
        if timeout is None and (nowait or skip_locked):
            raise ValueError(
                "timeout=None waits for ever, nowait=True and skip_locked=True not at "
                "all: leave one out"
            )
        wait = arguments.pessimistic_wait(
            nowait, skip_locked, None if unset else timeout
        )
        self._wait = None if unset and not nowait and not skip_locked else wait
        self._entered = threading.local()

    def __repr__(self) -> str:
        return f"<TransactionLock {self.key!r} backend={self.backend!r}>"

    def with_key(self, key: str) -> TransactionLock:
        """Return the same lock for another key."""
        lock = object.__new__(TransactionLock)
        lock.__dict__.update(
            self.__dict__, key=arguments.key(key), _entered=threading.local()
        )
        return lock

    @property
    def skips(self) -> bool:
        """Whether a taken key is passed over."""
        return self._wait is not None and self._wait.skip

    def __call__(self, function: F) -> F:
        """Decorate a function, so that its calls run in a transaction with the row."""
        from .decorators import decorate_with_row

        decorated: F = decorate_with_row(self, function)
        return decorated

    def __enter__(self) -> DistributedLock | None:
        block = self._block()
        row = block.__enter__()
        blocks: list[Any] = self._entered.__dict__.setdefault("blocks", [])
        blocks.append(block)
        return row

    def __exit__(self, *exc_info: Any) -> bool | None:
        block: AbstractContextManager[Any] = self._entered.blocks.pop()
        return block.__exit__(*exc_info)

    @contextmanager
    def _block(self) -> Iterator[DistributedLock | None]:
        if callable(self.key):
            raise TypeError(
                f"key={self.key!r} is a callable, which only the decorator form calls; "
                f"here the key must be a str."
            )
        from . import row_locks

        backend = backends[self.backend]
        wait = self._wait or PessimisticWait(backend.timeout)
        using = _database(backend)
        connection = connections[using]
        row_locks.refuse_nesting(using, self.key)
        if in_transaction(connection):
            yield row_locks.lock_row(using, self.key, wait)
        elif connection.in_atomic_block:
            # A TestCase's transaction.
            with transaction.atomic(using=using):
                yield row_locks.lock_row(using, self.key, wait)
        else:
            with row_locks.own_transaction(connection, self.key, wait) as row:
                yield row


def _database(backend: BaseBackend) -> str:
    """Return the database whose transaction is to lock the row."""
    using: str | None = getattr(backend, "using", None)
    if using is None:
        raise NotSupportedError(
            f"The backend {backend.alias!r} keeps no rows that a transaction could "
            f"lock; use distributed_lock."
        )
    outside = using != DEFAULT_DB_ALIAS
    if outside and not in_transaction(connections[using]):
        raise NotSupportedError(
            f"The locks are in the database {using!r}: a row locked there says nothing "
            f"about a transaction on {DEFAULT_DB_ALIAS!r}. Use distributed_lock with "
            f"atomic=True, or open transaction.atomic(using={using!r}) around it."
        )
    return using
