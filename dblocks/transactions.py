"""Beside and at the end of the caller's transactions.

Lock operations never run in a transaction of the caller's: they would be seen by
nobody until its commit, undone by its rollback, and blind behind its snapshot. This
module finds the connection that they run on, repeats what the database asks to be
repeated, and does what is due when the caller's transaction ends.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from django.core.signals import request_finished, request_started
from django.db import (
    DatabaseError,
    Error,
    InterfaceError,
    OperationalError,
    connections,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

logger = logging.getLogger("dblocks")

T = TypeVar("T")


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Connections beside a transaction, by alias.
        self.beside: dict[str, BaseDatabaseWrapper] = {}
        #: Raw connections of Django's that are dead or the parent process's.
        self.unusable: dict[str, object] = {}
        #: What runs when the thread's last open transaction has ended.
        self.at_end: list[Callable[[], None]] = []
        #: Keys whose rows the open transaction has locked, by database.
        self.row_locks: set[tuple[str, str]] = set()


_thread = _Thread()

#: Every open connection of dblocks' own in this process. After a fork the child must
#: not let go of one: to deallocate it would end the parent's session.
_open: set[BaseDatabaseWrapper] = set()
_inherited: list[object] = []


# Which connection


def in_test_case(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether Django's ``TestCase`` wraps what runs on this connection."""
    blocks: list[Any] = connection.atomic_blocks
    return bool(blocks) and blocks[0]._from_testcase


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether the caller has a transaction open; a ``TestCase``'s isn't one."""
    blocks: list[Any] = connection.atomic_blocks
    return connection.in_atomic_block and not all(b._from_testcase for b in blocks)


def transaction_is_open() -> bool:
    """Tell whether this thread has a transaction open on any database."""
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            if in_transaction(connection):
                return True
        elif connection.connection is not None and not connection.autocommit:
            raise TransactionManagementError(
                f"Autocommit is off on the database {connection.alias!r} without "
                f"atomic(): dblocks can't see where such a transaction ends, and a "
                f"lock must be kept until then. Use transaction.atomic()."
            )
    return False


def separate_connection(alias: str, **options: object) -> BaseDatabaseWrapper:
    """Return a new connection to a database, outside Django's and outside any pool.

    Args:
        options: Driver options, where the settings don't give them.
    """
    # Not connections.create_connection(): a copy follows the test database.
    connection: BaseDatabaseWrapper = connections[alias].copy()
    connection.settings_dict["OPTIONS"].pop("pool", None)
    for name, value in options.items():
        connection.settings_dict["OPTIONS"].setdefault(name, value)
    _open.add(connection)
    return connection


def close(connection: BaseDatabaseWrapper) -> None:
    """Close a connection of dblocks' own."""
    _open.discard(connection)
    try:
        connection.close()
    except Error:
        logger.debug("closing failed database=%s", connection.alias, exc_info=True)


def _beside(alias: str) -> BaseDatabaseWrapper:
    connection = _thread.beside.get(alias)
    if connection is None:
        connection = _thread.beside[alias] = separate_connection(alias)
    return connection


def _connection(alias: str, *, writes: bool) -> BaseDatabaseWrapper:
    connection = connections[alias]
    if connection.in_atomic_block:
        if in_test_case(connection):
            return connection
        if connection.vendor != "sqlite":
            return _beside(alias)
        if not writes:
            return connection
        raise TransactionManagementError(
            "SQLite has one writer: a lock can't be taken beside this open "
            "transaction. Take the lock before the transaction, or keep the locks in "
            'a database file of their own (OPTIONS={"using": …}).'
        )
    if connection.connection is None:
        connection.ensure_connection()
    if not connection.autocommit:
        raise TransactionManagementError(
            f"Autocommit is off on the database {alias!r} without atomic(): a lock "
            f"operation would join that transaction. Use transaction.atomic()."
        )
    if _thread.unusable:
        if _thread.unusable.get(alias) is connection.connection:
            return _beside(alias)
        _thread.unusable.pop(alias, None)
    return connection


def run(
    alias: str,
    operation: Callable[[BaseDatabaseWrapper, bool], T],
    *,
    patience: float = 1.0,
    writes: bool = True,
) -> T:
    """Run a lock operation outside the caller's transactions.

    What the database asks to be repeated is repeated for ``patience`` seconds. After
    a dropped connection that is done on one of dblocks' own; Django's is left as it
    was found, because a new one would lack the session's settings in silence.

    Args:
        operation: Gets the connection, and whether an earlier attempt may have been
            carried out although its answer was lost.
        writes: Whether it writes; reading is possible beside a SQLite transaction.
    """
    give_up = time.monotonic() + patience
    doubtful = False
    while True:
        connection = _connection(alias, writes=writes)
        try:
            return operation(connection, doubtful)
        except (DatabaseError, InterfaceError) as error:
            lost = connection_lost(connection, error)
            if connection.in_atomic_block or time.monotonic() >= give_up:
                raise
            if lost and connection.connection is not None:
                doubtful = True
                if connection is connections[alias]:
                    _thread.unusable[alias] = connection.connection
                else:
                    _discard(alias)
            elif lost or not is_transient(connection, error):
                raise
            logger.debug("repeating database=%s error=%s", alias, error)
            time.sleep(random.uniform(0.005, 0.03))
        finally:
            beside = _thread.beside and connection is _thread.beside.get(alias)
            if beside and not connections[alias].in_atomic_block:
                _discard(alias)


def _discard(alias: str) -> None:
    close(_thread.beside.pop(alias))


_LEVELS = {3: "repeatable read", 4: "serializable"}
_snapshots_warned: set[str] = set()


def warn_of_snapshot(alias: str) -> None:
    """Warn, once a database, of a lock that is taken inside a snapshot's transaction.

    What such a transaction read before the lock was taken stays as old as that.
    """
    if alias in _snapshots_warned or alias not in _thread.beside:
        return
    connection = connections[alias]
    if not in_transaction(connection):
        return
    level: Any = getattr(connection, "isolation_level", None)
    if connection.vendor == "mysql":
        level = level or "repeatable read"
    elif connection.vendor == "postgresql":
        level = _LEVELS.get(int(level)) if level is not None else None
    if level in _LEVELS.values():
        _snapshots_warned.add(alias)
        logger.warning(
            "A lock is taken inside a transaction on the database %r at %s: what that "
            "transaction has read before may be older than the lock. Take the lock "
            "first.",
            alias,
            str(level).upper(),
        )


# What the database says


_MYSQL_TRANSIENT = {1020, 1205, 1213, 3058, 3572}
_MYSQL_LOST = {1053, 1927, 2006, 2013, 2055, 4031}
_POSTGRESQL_TRANSIENT = {"40001", "40P01", "55P03"}
_POSTGRESQL_LOST = {"57P01", "57P02", "57P05", "25P03"}


def sqlstate(error: BaseException) -> str | None:
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def is_transient(connection: BaseDatabaseWrapper, error: BaseException) -> bool:
    """Tell whether the database asks for the statement to be repeated."""
    if connection.vendor == "mysql":
        return bool(error.args) and error.args[0] in _MYSQL_TRANSIENT
    if connection.vendor == "postgresql":
        return sqlstate(error) in _POSTGRESQL_TRANSIENT
    return isinstance(error, OperationalError) and "locked" in str(error)


def is_serialization_failure(
    connection: BaseDatabaseWrapper, error: BaseException
) -> bool:
    """Tell whether the row changed behind the snapshot of the transaction."""
    if connection.vendor == "mysql":
        return bool(error.args) and error.args[0] == 1020
    if connection.vendor == "postgresql":
        return sqlstate(error) == "40001"
    code = getattr(error.__cause__, "sqlite_errorname", "")
    return code == "SQLITE_BUSY_SNAPSHOT"


def connection_lost(connection: BaseDatabaseWrapper, error: BaseException) -> bool:
    """Tell whether the error means that the connection is gone."""
    if connection.vendor == "mysql":
        if isinstance(error, InterfaceError):
            return True
        return bool(error.args) and error.args[0] in _MYSQL_LOST
    if connection.vendor == "postgresql":
        state = sqlstate(error)
        if state is not None:
            return state in _POSTGRESQL_LOST or state.startswith("08")
        # What libpq itself reports, about the connection, has no state.
        return isinstance(error, (OperationalError, InterfaceError))
    return False


# The end of a transaction


def at_end(function: Callable[[], None]) -> None:
    """Call a function when the last open transaction of this thread has ended."""
    _thread.at_end.append(function)


def note_row_lock(alias: str, key: str) -> None:
    """Remember that the open transaction has a key's row locked."""
    _thread.row_locks.add((alias, key))


def has_row_lock(alias: str, key: str) -> bool:
    """Tell whether the open transaction has a key's row locked."""
    return (alias, key) in _thread.row_locks


def watch_transactions() -> None:
    """Learn of the end of every transaction, by commit or by rollback.

    Django has hooks for a commit alone, and drops them on rollback. ``Atomic`` is
    where all transactions end; it is wrapped once.
    """
    original = transaction.Atomic.__exit__
    if hasattr(original, "_dblocks"):
        return

    @functools.wraps(original)
    def leave(self: Any, *exc_info: Any) -> Any:
        try:
            return original(self, *exc_info)
        finally:
            if _thread.at_end or _thread.beside or _thread.row_locks:
                _transaction_ended()

    leave._dblocks = True  # type: ignore[attr-defined]
    transaction.Atomic.__exit__ = leave  # type: ignore[method-assign]
    request_started.connect(_close_old_connections)
    request_finished.connect(_close_old_connections)


def _transaction_ended() -> None:
    try:
        if transaction_is_open():
            return
    except TransactionManagementError:
        return
    _thread.row_locks.clear()
    functions, _thread.at_end = _thread.at_end, []
    for function in functions:
        function()
    for alias, connection in list(_thread.beside.items()):
        if connection.settings_dict["CONN_MAX_AGE"] == 0:
            _discard(alias)


def _close_old_connections(**kwargs: object) -> None:
    for alias, connection in list(_thread.beside.items()):
        if not connections[alias].in_atomic_block:
            connection.close_if_unusable_or_obsolete()
            if connection.connection is None:
                _discard(alias)


def _after_fork_in_child() -> None:
    _inherited.extend(_open)
    _open.clear()
    _thread.__init__()  # type: ignore[misc]
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None:
            _inherited.append(connection.connection)
            _thread.unusable[connection.alias] = connection.connection


os.register_at_fork(after_in_child=_after_fork_in_child)
