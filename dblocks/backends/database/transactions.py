"""The caller's transactions: which are open, and what happens when they end.

Django has hooks for the commit only, and drops them on rollback. Every transaction
begins and ends in ``Atomic``, which is wrapped once, when the app is ready.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from itertools import chain
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.transaction import TransactionManagementError

from ... import forks
from ...exceptions import LockError
from . import dialects

logger = logging.getLogger("dblocks")

UNPIN, RELEASE, CLOSE = range(3)
"""The order of work at a transaction's end: rows must be unlocked to be written."""


class Caller:
    """A thread that has transactions open, for the async code that it runs.

    Django runs the queries of that code in those transactions.
    """

    def __init__(self, due: list[Callable[[], object]], outer: Caller | None) -> None:
        self.over = False
        #: The caller around this one, where threads wait for each other's code.
        self.outer = outer
        #: The connections on which the thread has begun transactions.
        self.connections: set[Connection] = set()
        self._due = due

    def is_open(self) -> bool:
        """Tell whether a transaction is open; not while the last one's hooks run."""
        return not self.over and any(map(_keeps_open, list(self.connections)))

    def at_end(self, function: Callable[[], object]) -> bool:
        """Have a function release when the last transaction ends; ``False`` if it has.

        In that case, too, the function may be called.
        """
        self._due.append(function)
        return not self.over

    def end(self) -> None:
        self.over = True
        # A thread that appends to the old list from now on sees that this is over.
        self._due, self.connections = [], set()


class _Thread(threading.local):
    def __init__(self) -> None:
        #: How many blocks are open, those of a ``TestCase`` apart.
        self.blocks = 0
        self.caller: Caller | None = None
        #: How many transactions are ending: a hook may have one of its own.
        self.leaving = 0
        #: What runs when the last open transaction has ended, by stage.
        self.due: tuple[list[Callable[[], object]], ...] = ([], [], [])
        #: Keys whose rows a transaction has locked, by database, and how many blocks
        #: were open then.
        self.row_locks: dict[tuple[str, str], int] = {}
        #: What guards want called when the commit of their transaction fails, by
        #: database.
        self.guards: dict[str, list[Callable[[DatabaseError], object]]] = {}


_thread = _Thread()

_caller: ContextVar[Caller | None] = ContextVar("dblocks_caller", default=None)

_inherited: list[object] = []
"""The blocks of the parent's transactions, which end there."""


def _after_fork_in_child() -> None:
    _thread.__init__()  # type: ignore[misc]
    _caller.set(None)
    for own in connections.all(initialized_only=True):
        _inherited.extend(own.atomic_blocks)


forks.in_child(_after_fork_in_child)

_test_cases: weakref.WeakSet[Connection] = weakref.WeakSet()
"""The connections on which a ``TestCase`` has begun a transaction."""


def in_test_case(connection: Connection) -> bool:
    """Tell whether a ``TestCase`` of Django's wraps this connection."""
    blocks: list[Any] = connection.atomic_blocks
    return bool(blocks) and blocks[0]._from_testcase


def end_of_test(connection: Connection) -> Callable[[], bool]:
    """Return a function that tells whether the current block of a ``TestCase`` is over.

    The block is a test's own, or the one around all tests of a class.
    """
    blocks: list[Any] = connection.atomic_blocks
    mine = [block for block in blocks if block._from_testcase][-1]
    return lambda: mine not in connection.atomic_blocks


def test_case_is_open(alias: str) -> bool:
    """Tell whether a ``TestCase`` wraps a connection to a database in any thread."""
    return any(c.alias == alias and in_test_case(c) for c in list(_test_cases))


def in_transaction(connection: Connection) -> bool:
    """Tell whether the caller, apart from a ``TestCase``, has a transaction open."""
    blocks: list[Any] = connection.atomic_blocks
    mine = [block for block in blocks if not block._from_testcase]
    return connection.in_atomic_block and bool(mine) and mine[0] not in _inherited


def _keeps_open(connection: Connection) -> bool:
    """Tell, also in another thread, whether a transaction is open or being ended."""
    if in_transaction(connection):
        return True
    # A connection that was closed inside its block has no transaction, but isn't back
    # in autocommit either.
    is_there = connection.connection is not None
    return is_there and not (connection.autocommit or in_test_case(connection))


def is_outermost(connection: Connection) -> bool:
    """Tell whether the caller's innermost block is the one that commits."""
    blocks: list[Any] = connection.atomic_blocks
    return sum(not block._from_testcase for block in blocks) == 1


def transaction_is_open() -> bool:
    """Tell whether this thread has a transaction open on any database.

    Raises:
        TransactionManagementError: Autocommit is off without ``atomic()``.
    """
    for alias in connections.settings:
        # As connections.all(initialized_only=True), which takes twice as long.
        connection = getattr(connections._connections, alias, None)  # type: ignore[attr-defined]
        if connection is None:
            continue
        if connection.in_atomic_block and connection.commit_on_exit:
            if in_transaction(connection):
                return True
        elif connection.connection is not None and not connection.autocommit:
            raise TransactionManagementError(
                f"Autocommit is off on the database {connection.alias!r} without "
                f"atomic(): dblocks can't see where such a transaction ends, and a "
                f"lock must be kept until then. Use transaction.atomic()."
            )
    return False


def caller() -> Caller | None:
    """Return the thread whose transaction is around this code, if it is still open."""
    found = _caller.get()
    while found is not None and not found.is_open():
        found = found.outer
    return found


def at_end(stage: int, function: Callable[[], object]) -> None:
    """Call a function when the last open transaction of this thread has ended.

    If an interrupt ends the call, the function is called again, and must do its work
    only once.
    """
    _thread.due[stage].append(function)


def at_own_end(function: Callable[[], object]) -> bool:
    """Have a function release when this thread's transactions end; ``False`` if none.

    Raises:
        TransactionManagementError: As :func:`transaction_is_open`.
    """
    if not transaction_is_open():
        return False
    at_end(RELEASE, function)
    return True


def unpin_if_over() -> None:
    """Unpin rows after the commit that they were pinned for, even during its hooks."""
    if not _thread.due[UNPIN]:
        return
    with suppress(TransactionManagementError):
        if not transaction_is_open():
            _run_all(_thread.due[UNPIN][:])


def doom(connection: Connection) -> None:
    """Mark the whole open transaction for rollback, whichever savepoints it has.

    Inside a ``TestCase``, only what the test itself opened.
    """
    # The rollback to a savepoint would clear the mark.
    blocks: list[Any] = connection.atomic_blocks
    savepoints: list[Any] = connection.savepoint_ids
    for number, outer in enumerate(blocks[:-1]):
        if not outer._from_testcase:
            savepoints[number] = None
    transaction.set_rollback(True, using=connection.alias)


def was_ended(connection: Connection, error: DatabaseError) -> bool:
    """Tell whether an error ended the caller's transaction, and let nothing commit."""
    dialect = dialects.known(connection)
    ended = connection.in_atomic_block and dialect.has_ended_transaction(
        connection, error
    )
    if ended:
        # What the caller wrote before would be missing, and the rest committed.
        transaction.set_rollback(True, using=connection.alias)
    return ended


def note_row_lock(alias: str, key: str) -> None:
    """Remember that the open transaction has locked a key's row."""
    depth = len(connections[alias].atomic_blocks)
    # The outer of two blocks that have locked it decides when it is unlocked.
    _thread.row_locks[alias, key] = min(
        _thread.row_locks.get((alias, key)) or depth, depth
    )


def may_have_row_lock(alias: str, key: str) -> bool:
    """Tell whether the open transaction may have locked a key's row."""
    return (alias, key) in _thread.row_locks and in_transaction(connections[alias])


def refuse_own_row_lock(alias: str, key: str, *, certain: bool = False) -> None:
    """Raise if the open transaction has locked a key's row.

    If ``certain``, not for a row that InnoDB may have unlocked with a savepoint.
    """
    depth = _thread.row_locks.get((alias, key))
    if depth is None or not in_transaction(connections[alias]):
        return
    if depth or not certain:
        raise LockError(
            f"The row of the lock {key!r} is locked by this thread's own transaction: "
            f"a lease on it would wait for itself. Use one form, distributed_lock or "
            f"transaction_lock, not both."
        )


_snapshots_warned: set[str] = set()


def warn_of_snapshot(connection: Connection) -> None:
    """Warn, once for each database, of a lock that is taken under an old snapshot.

    Whatever the transaction read before it took the lock stays as old as that.
    """
    alias = connection.alias
    if not in_transaction(connection) or alias in _snapshots_warned:
        return
    level = dialects.of(connection).isolation(connection)
    if level is not None:
        _snapshots_warned.add(alias)
        logger.warning(
            "A lock is taken inside a transaction on the database %r at %s: what that "
            "transaction has read before may be older than the lock. Take the lock "
            "first.",
            alias,
            level.upper(),
        )


def if_commit_fails(alias: str, function: Callable[[DatabaseError], object]) -> None:
    """Call a function with the error if the open transaction can't be committed.

    If it raises, its error replaces that one.
    """
    _thread.guards.setdefault(alias, []).append(function)


def watch() -> None:
    """Learn of every transaction's end, by commit or by rollback."""
    enter, leave = transaction.Atomic.__enter__, transaction.Atomic.__exit__
    if hasattr(leave, "_dblocks"):
        return

    @functools.wraps(enter)
    def watched_enter(self: Any) -> None:
        # A commit's hook may begin this block, before the committed one is left.
        if _thread.row_locks:
            _forget_unlocked_rows(transaction.get_connection(self.using))
        unpin_if_over()
        enter(self)
        if self._from_testcase:
            _test_cases.add(transaction.get_connection(self.using))
        else:
            _begin_block(_thread, transaction.get_connection(self.using))

    @functools.wraps(leave)
    def watched_leave(self: Any, exc_type: Any, exc: Any, traceback: Any) -> Any:
        thread = _thread
        outer = thread.leaving
        goes_back = exc_type is not None or _goes_back(thread, self.using)
        if thread.blocks and not self._from_testcase:
            thread.blocks -= 1
        try:
            thread.leaving = outer + 1
            return leave(self, exc_type, exc, traceback)
        except DatabaseError as error:
            _close_if_dropped(transaction.get_connection(self.using), error)
            if exc_type is None and thread.guards:
                _end_guards(transaction.get_connection(self.using), error)
            raise
        finally:
            thread.leaving = outer
            if thread.guards:
                _end_guards(transaction.get_connection(self.using))
            if thread.row_locks:
                _leave_row_locks(transaction.get_connection(self.using), goes_back)
            # The hooks of a commit run before the end of the outermost block.
            if not outer:
                _outermost_left(thread)

    watched_leave._dblocks = True  # type: ignore[attr-defined]
    transaction.Atomic.__enter__ = watched_enter  # type: ignore[method-assign]
    transaction.Atomic.__exit__ = watched_leave  # type: ignore[method-assign]


def _begin_block(thread: _Thread, connection: Connection) -> None:
    thread.blocks += 1
    if thread.caller is None:
        thread.caller = Caller(thread.due[RELEASE], caller())
    thread.caller.connections.add(connection)
    _caller.set(thread.caller)


def _end_guards(connection: Connection, error: DatabaseError | None = None) -> None:
    """Ask the guards of a transaction that is over why it failed, if it did."""
    if not in_transaction(connection):
        for guard in _thread.guards.pop(connection.alias, []):
            if error is not None:
                guard(error)


def _close_if_dropped(connection: Connection, error: DatabaseError) -> None:
    """Close a dropped connection that looks as if the caller had begun by hand."""
    is_off = connection.commit_on_exit and not connection.autocommit
    is_lost = dialects.known(connection).is_lost(error)
    if is_off and is_lost and not connection.in_atomic_block:
        connection.close()


def _forget_unlocked_rows(connection: Connection) -> None:
    """Forget the row locks of a transaction that is over, before the next begins."""
    if not in_transaction(connection):
        for alias, key in list(_thread.row_locks):
            if alias == connection.alias:
                _thread.row_locks.pop((alias, key), None)


def _goes_back(thread: _Thread, using: str | None) -> bool:
    """Tell whether a block of a transaction with row locks is marked for rollback."""
    return bool(thread.row_locks) and transaction.get_connection(using).needs_rollback


def _leave_row_locks(connection: Connection, goes_back: bool) -> None:
    """Note what becomes of row locks when a block inside their transaction is left."""
    if not in_transaction(connection):
        return
    depth, locks = len(connection.atomic_blocks), _thread.row_locks
    for (alias, key), blocks in list(locks.items()):
        if alias != connection.alias or blocks <= depth:
            continue
        # While the rollback is still to come, nothing went back to a savepoint yet.
        if not goes_back or connection.needs_rollback:
            locks[alias, key] = depth
        elif dialects.of(connection).keeps_row_locks:
            locks[alias, key] = 0
        else:
            locks.pop((alias, key), None)


def _outermost_left(thread: _Thread) -> None:
    due = thread.due
    try:
        _do_if_over(thread)
    except Exception:
        raise
    except BaseException:
        # The interrupt may have come before any of the work was begun.
        if thread.due is due:
            _do_if_over(thread)
        else:
            _run_all(chain(*due))
        raise


def _end_caller(thread: _Thread) -> None:
    if thread.caller is not None:
        thread.caller.end()
        thread.caller = None


def _do_if_over(thread: _Thread) -> None:
    if not thread.blocks:
        # First: async code that defers a release after this makes it by itself.
        _end_caller(thread)
    # The functions that are due notice by themselves that autocommit is off.
    with suppress(TransactionManagementError):
        if not any(thread.due) or transaction_is_open():
            return
    thread.blocks = 0
    _end_caller(thread)
    due, thread.due = thread.due, ([], [], [])
    _run_all(chain(*due))


def _run_all(functions: Iterable[Callable[[], object]]) -> None:
    """Call each, even if one of them raises, and then raise the first error."""
    first: BaseException | None = None
    for function in functions:
        try:
            function()
        except BaseException as error:
            first = first or error
            if not isinstance(error, Exception):
                # An interrupt came before, during or after it.
                _run_all([function])
    try:
        if first is not None:
            raise first
    finally:
        # This frame, which the error keeps, must not keep the error.
        del first
