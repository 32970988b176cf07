"""The engine that keeps locks in a table of the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import (
    DEFAULT_DB_ALIAS,
    OperationalError,
    connections,
    router,
)
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.transaction import TransactionManagementError

from ...permits import apart, row_keys
from ..gates import Gate
from ..values import (
    UNBOUND,
    Binding,
    Grant,
    Granted,
    Reading,
    Renewal,
    Renewed,
    Request,
    Taken,
    Waiters,
    first_free,
)
from . import (
    dialects,
    one_writer,
    owed,
    permit_rows,
    session_locks,
    several_rows,
    table,
    transactions,
)
from .checks import DatabaseChecks
from .connections import can_write, check_caller, run
from .guards import DatabaseGuards
from .own_connections import short_waits

T = TypeVar("T")


_of_tests: dict[tuple[str, str], tuple[Connection, object]] = {}
"""By database and key, the connection and outermost block of the test that asked.

Not a backend's, because a test may replace the setting, and with it all backends.
"""


class DatabaseBackend(DatabaseGuards, DatabaseChecks):
    """Locks as rows of a table: one row per key, one conditional ``UPDATE`` per verb.

    The database's clock decides. ``OPTIONS`` may have ``using``, an alias in
    ``DATABASES`` (default: where the router writes the lock's model), and
    ``session_locks``: ``False`` where waiters can't rely on the server's session locks,
    as behind a pooler that gives each transaction another session. By default dblocks
    finds that out as far as it can.
    """

    has_table = True
    option_names = frozenset({"using", "session_locks"})

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        super().__init__(alias, config)
        if not isinstance(self.options.get("session_locks", True), bool):
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}]['OPTIONS']: session_locks must be True or False, "
                f"not {self.options['session_locks']!r}."
            )
        using = self.options.get("using")
        if using is not None and using not in connections:
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}]: there is no database {using!r} in DATABASES."
            )

    @property
    def using(self) -> str:
        """The alias of the database that the locks are in."""
        alias: str | None = self.options.get("using")
        if alias is None and router.routers:
            alias = router.db_for_write(apps.get_model("dblocks", "DistributedLock"))
        return DEFAULT_DB_ALIAS if alias is None else alias

    @property
    def system(self) -> str:  # type: ignore[override]
        return dialects.known(connections[self.using]).name

    # The verbs

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        own = connections[self.using]
        keys = row_keys(request.key, request.permits)
        if self._are_a_tests(own, keys):
            return Reading()
        again = permit_rows.take_again if request.permits > 1 else None
        try:
            answer = self._run(
                own,
                self._take,
                request,
                patience=patience,
                again=again,
                answered=request.gate is not None,
            )
        except OperationalError as error:
            if not _is_busy(own, error):
                raise
            answer = _see_while_busy(own, keys)
        if own.in_atomic_block:
            self._note_block(own, keys)
        if isinstance(answer, Granted):
            request.binding = _binding(own)
        elif answer.remaining <= 0:
            for key in keys:
                transactions.refuse_own_row_lock(own.alias, key)
        return answer

    def _take(self, connection: Connection, request: Request) -> Granted | Reading:
        if not dialects.of(connection).has_row_locks:
            return one_writer.take(connection, request)
        if not self._has_session_locks(connection):
            request.queued = True
        take = permit_rows.take if request.permits > 1 else table.take
        return take(connection, request)

    def try_acquire_all(
        self, request: Request, keys: Sequence[str], patience: float
    ) -> list[Granted] | Taken | None:
        own = connections[self.using]
        if self._are_a_tests(own, keys):
            return None
        try:
            answer = self._run(
                own,
                self._take_all,
                request,
                keys,
                patience=patience,
                again=several_rows.take_again,
            )
        except OperationalError as error:
            if not _is_busy(own, error):
                raise
            return Taken(keys[0], _see_while_busy(own, keys[:1]))
        if own.in_atomic_block:
            self._note_block(own, keys)
        request.binding = _binding(own)
        return answer

    def _take_all(
        self, connection: Connection, request: Request, keys: Sequence[str]
    ) -> list[Granted] | Taken | None:
        if not dialects.of(connection).has_row_locks:
            return one_writer.take_all(connection, request, keys)
        request.queued = not self._has_session_locks(connection)
        return several_rows.take(connection, request, keys)

    def reenter(self, renewal: Renewal, count: int | None, patience: float) -> Renewed:
        own = connections[self.using]
        try:
            return self._run(own, table.reenter, renewal, count, patience=patience)
        except OperationalError as error:
            if not _is_busy(own, error):
                raise
            # The owner has the key; only the process counts this re-entry.
            return Renewed()

    def may_have_written(self, error: BaseException) -> bool:
        return not dialects.known(connections[self.using]).is_undone(error)

    def read_all(
        self, keys: Sequence[str], patience: float | None = None
    ) -> dict[str, Reading]:
        return self._run(
            connections[self.using],
            table.read_all,
            keys,
            patience=patience,
            writes=False,
            # Only a waiter, which the server has answered before, gives its patience.
            answered=patience is not None,
        )

    def look(self, keys: Sequence[str], patience: float | None = None) -> Reading:
        try:
            return super().look(keys, patience)
        except OperationalError as error:
            if not _is_busy(connections[self.using], error):
                raise
            # Readers were kept out for all that time: the key counts as taken.
            return Reading(remaining=1.0)

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        def renew(connection: Connection) -> Renewed:
            in_test = transactions.in_test_case(connection)
            return table.renew(connection, renewals, overdue=in_test)

        try:
            return run(connections[self.using], renew)
        except TransactionManagementError:
            if can_write(self.using):
                raise
            raise TransactionManagementError(
                "SQLite has one writer: a lease can't be renewed beside this thread's "
                "open transaction. Renew it before that begins, or give the lock a "
                "lease that outlasts it."
            ) from None

    def release(self, grant: Grant, *, count: int | None, deadline: float) -> bool:
        again = partial(table.release_again, deadline=deadline)
        own = connections[self.using]
        return self._run(
            own, table.release, grant, count, again=again, one_statement=True
        )

    def release_all(
        self, grants: Sequence[Grant], *, count: int | None, deadline: float
    ) -> set[Grant]:
        again = partial(several_rows.release_again, deadline=deadline)
        own = connections[self.using]
        return self._run(
            own, several_rows.release, grants, count, again=again, one_statement=True
        )

    def undo_all(self, grants: Sequence[Grant]) -> None:
        self._run(connections[self.using], several_rows.undo, grants)

    def _run(
        self,
        own: Connection,
        operation: Callable[..., T],
        *arguments: Any,
        patience: float | None = None,
        **options: Any,
    ) -> T:
        if own.in_atomic_block:
            owed.catch_up(own)
        if patience is not None:
            patience = max(patience, dialects.known(own).patience)
        return run(own, operation, *arguments, patience=patience, **options)

    # Queueing

    def _has_session_locks(self, connection: Connection) -> bool:
        wanted: bool = self.options.get("session_locks", True)
        return wanted and session_locks.available(connection)

    def gate(self, request: Request) -> Gate | None:
        key = request.key
        connection = connections[self.using]
        if not dialects.of(connection).has_row_locks:
            return one_writer.gate(connection, key)
        if not self._has_session_locks(connection):
            return None
        shortest = dialects.of(connection).shortest_queueing
        return session_locks.SessionLock(self.using, key, shortest)

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        # Also asked in an event loop, which may not ask a server for its dialect.
        return not dialects.known(connections[self.using]).has_row_locks

    def renewal_session(self) -> AbstractContextManager[object]:
        return short_waits(self.using)

    # The caller's transactions

    def can_write(self) -> bool:
        connection = connections[self.using]
        # In a TestCase, the rollback of a savepoint would undo the re-entry's write.
        undoable = transactions.in_test_case(connection)
        if undoable and transactions.in_transaction(connection):
            return False
        return can_write(self.using)

    def check_caller(self) -> None:
        check_caller(self.using)

    # Operators

    def waiters(self, key: str) -> Waiters:
        found: Waiters = self._locks().waiters(key)
        return found

    def force_release(self, key: str, **which: Any) -> bool:
        released: bool = self._locks().force_release(key, **which)
        return released

    def request_release(self, key: str, **which: Any) -> bool:
        requested: bool = self._locks().request_release(key, **which)
        return requested

    def _locks(self) -> Any:
        return apps.get_model("dblocks", "DistributedLock").objects.using(self.using)

    # Tests

    def test_connection(self) -> object:
        return _binding(connections[self.using]).test_connection

    def is_in_test_case(self) -> bool:
        return transactions.test_case_is_open(self.using)

    def owe(
        self,
        connection: object,
        renewal: Renewal,
        answer: Callable[[Renewed], object],
        is_live: Callable[[], bool],
    ) -> None:
        owed.owe(connection, renewal, answer, is_live)

    def _note_block(self, own: Connection, keys: Sequence[str]) -> None:
        if transactions.in_test_case(own):
            for key in keys:
                _of_tests[own.alias, key] = own, own.atomic_blocks[0]
        transactions.warn_of_snapshot(own)

    def _are_a_tests(self, own: Connection, keys: Sequence[str]) -> bool:
        """Tell whether a row may be in the transaction of another thread's test.

        Inserting it would mean waiting for the end of that test.

        Raises:
            LockError: The caller's own transaction has one of the rows locked.
            TransactionManagementError: Autocommit was switched off by hand: nobody
                would see when to release.
        """
        transactions.transaction_is_open()
        for key in keys:
            transactions.refuse_own_row_lock(own.alias, key, certain=True)
        return bool(_of_tests) and any(_is_a_tests(own, key) for key in keys)

    def move_clock(self, seconds: float) -> None:
        self._run(connections[self.using], table.make_older, seconds)

    def clear(self) -> None:
        locks = self._locks()
        for row in locks.exclude(pk__in=locks.free()).values_list("key", flat=True):
            key, permit = apart(row)
            locks.force_release(key, permit=permit, by="dblocks.test", reason="cleared")


def _binding(own: Connection) -> Binding:
    bar = None
    if not dialects.of(own).has_row_locks:
        # After a renewal's write, a transaction that has read before can't write.
        bar = partial(transactions.in_transaction, own)
    if own.in_atomic_block and transactions.in_test_case(own):
        return Binding(own, transactions.end_of_test(own), bar)
    return Binding(renewal_bar=bar) if bar else UNBOUND


def _is_a_tests(own: Connection, key: str) -> bool:
    place = _of_tests.get((own.alias, key))
    if place is None:
        return False
    connection, block = place
    blocks = connection.atomic_blocks
    if blocks and blocks[0] is block:
        return connection is not own
    _of_tests.pop((own.alias, key), None)
    return False


def _see_while_busy(own: Connection, keys: Sequence[str]) -> Reading:
    """Look at keys while another transaction has the write lock, perhaps for them."""
    try:
        seen = run(own, table.read_all, keys, writes=False, patience=0.0)
    except OperationalError as error:
        if not _is_busy(own, error):
            raise
        # The other transaction keeps readers out as well.
        return Reading()
    return first_free(seen, keys)


def _is_busy(connection: Connection, error: Exception) -> bool:
    """Tell whether others kept SQLite busy all that time."""
    return dialects.known(connection).is_busy(error)
