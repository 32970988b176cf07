"""The connection that a lock operation runs on.

Lock operations never run in the caller's transaction: nobody would see them until its
commit, its rollback would undo them, and its snapshot would hide the present row. If
the thread's connection is in autocommit, they use that; inside ``atomic()`` they use a
second one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.transaction import TransactionManagementError

from ... import clock, forks
from . import dialects, transactions
from .forking import Busy, keep_out
from .own_connections import (
    close,
    connection_beside,
    discard_beside,
    discard_if_idle,
    idle,
    is_pinning,
    runs_apart,
    separate_connection,
)

logger = logging.getLogger("dblocks")

T = TypeVar("T")

LEAST_REPEATS = 5
"""How often an operation that collides is repeated even if its patience is over."""

OUTAGE = 5.0
"""The most seconds for which one operation tries to reach a server that went away."""

RECONNECTING = 10
"""The factor by which pauses are longer while the server can't be reached again."""


BESIDE_WRITER = (
    "SQLite has one writer: a lock can't be taken beside this open transaction. Take "
    "the lock first: decorate the view (a class at its dispatch), or use atomic=True "
    "in place of atomic(); or use transaction_lock inside it; or keep the locks in a "
    'database file of their own (OPTIONS={"using": …}).'
)


class ReplyLost(DatabaseError):
    """The statement was carried out, but its reply can't be trusted."""


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Raw connections of Django's that are dead or the parent process's.
        self.unusable: dict[str, object] = {}
        #: The connections on which an operation of this thread is under way. A signal
        #: handler that interrupts it needs another one.
        self.busy = Busy()


_thread = _Thread()

#: Raw connections of the parent's: deallocating one would end its session.
_inherited: list[object] = []


def is_alone(connection: Any) -> bool:
    """Tell whether another connection can't see what this one sees."""
    dialect = dialects.of(connection)
    return (
        _is_in_memory(connection)
        or transactions.in_test_case(connection)
        or (connection.in_atomic_block and dialect.keeps_readers_out(connection))
    )


def _is_in_memory(connection: Any) -> bool:
    is_on_server = dialects.known(connection).has_row_locks
    return not is_on_server and bool(connection.is_in_memory_db())


@contextmanager
def reading_beside(connection: Connection) -> Iterator[Connection]:
    """A connection for reads that the open transaction can't make, or mustn't yet."""
    if is_alone(connection):
        yield connection
        return
    limits = dialects.of(connection).short_waits
    beside = separate_connection(connection.alias, **limits)
    try:
        yield beside
    finally:
        close(beside)


def can_write(alias: str) -> bool:
    """Tell whether a lock can be written during this thread's open transactions."""
    connection = connections[alias]
    in_own = connection.in_atomic_block and not transactions.in_test_case(connection)
    if not in_own and not is_pinning(alias):
        # Also reached in an event loop, which may not ask a server for its dialect.
        return True
    return dialects.of(connection).has_row_locks


def check_caller(alias: str) -> None:
    """Raise if async code would wait for the transaction that it runs in.

    Raises:
        TransactionManagementError: The sync code around it has the one writer.
    """
    around = transactions.caller()
    while around is not None:
        for each in list(around.connections):
            is_mine = each.alias == alias and transactions.in_transaction(each)
            if not is_mine or transactions.in_test_case(each):
                continue
            if not dialects.known(each).has_row_locks:
                raise TransactionManagementError(BESIDE_WRITER)
        around = around.outer


def _connection(connection: Connection, *, writes: bool) -> Connection:
    alias = connection.alias
    if runs_apart():
        return connection_beside(alias)
    transactions.unpin_if_over()
    in_block = connection.in_atomic_block
    if writes and (in_block or is_pinning(alias)) and not can_write(alias):
        if not in_block:
            raise TransactionManagementError(
                f"SQLite has one writer: a lock with atomic=True keeps {alias!r} for "
                f"itself until this thread's transactions have ended. Take all keys "
                f"with one lock."
            )
        raise TransactionManagementError(BESIDE_WRITER)
    if in_block:
        # A read, too, would begin a snapshot there on SQLite, or see an old one.
        return connection if is_alone(connection) else connection_beside(alias)
    closed = connection.connection is None
    if closed and _has_pool(connection):
        return connection
    settings = connection.settings_dict
    if not (settings["AUTOCOMMIT"] if closed else connection.autocommit):
        raise _autocommit_is_off(connection)
    if _thread.unusable and not closed:
        if _thread.unusable.get(alias) is connection.connection:
            return connection_beside(alias)
        _thread.unusable.pop(alias, None)
    return connection


def _autocommit_is_off(connection: Connection) -> TransactionManagementError:
    return TransactionManagementError(
        f"Autocommit is off on the database {connection.alias!r}, and not by atomic(): "
        f"a lock operation would join that transaction. Switch it on, and use "
        f"transaction.atomic()."
    )


def _has_pool(connection: Connection) -> bool:
    """Tell whether it is Django's, and takes its connection out of a pool."""
    return bool(connection.settings_dict["OPTIONS"].get("pool"))


def _spare(connection: Connection) -> Connection | None:
    """Return a connection to use instead of one that can't be used."""
    if connection.connection is None and _has_pool(connection):
        # Waiters must not use up the pool, and holders must be able to release.
        alias = connection.alias
        return idle.find(alias) or separate_connection(alias)
    if connection not in _thread.busy:
        return None
    if dialects.of(connection).has_row_locks:
        return separate_connection(connection.alias)
    if connection.in_atomic_block:
        return None
    # The interrupted code may be SQLite's one writer, so this uses its connection, but
    # through another object: since Python 3.14 a signal handler may run while that code
    # has the mutex of Django's object.
    twin: Connection = connection.copy()
    twin.connection, twin.autocommit = connection.connection, connection.autocommit
    return twin


def _put_away(spare: Connection, *, served: bool) -> None:
    raw, own = spare.connection, connections[spare.alias]
    if raw is not None and any(raw is busy.connection for busy in _thread.busy):
        # The interrupted operation goes on with this connection.
        spare.connection = None
    elif served and own.connection is None and _has_pool(own):
        idle.give_back(spare)
    else:
        idle.drop(spare)


def run(
    own: Connection,
    operation: Callable[..., T],
    *arguments: Any,
    patience: float | None = None,
    writes: bool = True,
    again: Callable[..., Any] | None = None,
    one_statement: bool = False,
    answered: bool = False,
) -> T:
    """Run a lock operation outside the caller's transactions.

    If the database asks for it, the operation is repeated for ``patience`` seconds; by
    default for as long as a statement of the caller's would wait by itself. After a
    dropped connection it is repeated on one of dblocks' own; Django's is left as it was
    found, because a new one would silently lack the session's settings.

    Args:
        own: The thread's connection to the database.
        operation: Gets the connection and the arguments.
        writes: Whether it writes; a SQLite transaction allows reads beside it.
        again: Replaces the operation once its answer was lost: it may have been done.
        one_statement: The operation is one statement: if its connection was dropped
            before, nothing of it was done.
        answered: The server has answered an earlier operation of this wait. If it went
            away, it is waited for, as it is if a connection of this thread was dropped.
    """
    started, waited, attempt, busy = clock.monotonic(), 0.0, 0, _thread.busy
    dropped = answered or own.alias in _thread.unusable
    while True:
        connection = _connection(own, writes=writes)
        spare, served = _spare(connection), False
        connection = spare or connection
        busy.add(connection)
        try:
            limit = dialects.of(connection).limit(connection, patience, waited)
            if limit is None:
                result = operation(connection, *arguments)
            else:
                with limit:
                    result = operation(connection, *arguments)
            served = True
            return result
        except (DatabaseError, InterfaceError) as error:
            dialect = dialects.known(connection)
            reconnecting = dropped and connection.connection is None
            seconds = _sits_out(connection, error, patience, attempt, reconnecting)
            if not _may_repeat(own, connection, error, started + seconds, reconnecting):
                raise
            dropped = dropped or dialect.is_lost(error)
            if _may_be_done(dialect, error, reconnecting, one_statement):
                operation = again or operation
            logger.debug("repeating database=%s error=%s", own.alias, error)
        finally:
            busy.remove(connection)
            if spare is not None:
                _put_away(spare, served=served)
            elif connection is not own:
                discard_if_idle(own, connection)
        attempt += 1
        time.sleep(dialect.pause(attempt) * (RECONNECTING if reconnecting else 1))
        waited = clock.monotonic() - started


def _sits_out(
    connection: Connection,
    error: Exception,
    patience: float | None,
    attempt: int,
    reconnecting: bool,
) -> float:
    """Return for how many seconds errors such as this one are sat out."""
    dialect = dialects.known(connection)
    seconds = dialect.sits_out(connection) if patience is None else patience
    if attempt < LEAST_REPEATS and seconds and dialect.is_collision(error):
        return float("inf")
    return min(seconds, OUTAGE) if reconnecting else seconds


def _may_repeat(
    own: Connection,
    connection: Connection,
    error: Exception,
    give_up: float,
    reconnecting: bool,
) -> bool:
    """Tell whether to repeat an operation; note a bad connection, to avoid it.

    Args:
        reconnecting: The server has been there, and may be about to restart.
    """
    dialect = dialects.known(connection)
    if clock.monotonic() >= give_up:
        return False
    if isinstance(error, ReplyLost):
        return True
    if connection.in_atomic_block:
        return False
    if reconnecting:
        return True
    if not dialect.is_lost(error):
        is_transient = dialect.is_transient(error)
        if not is_transient:
            # It may lead to a server that is no longer the primary.
            discard_beside(connection)
        return is_transient
    if connection.connection is None:
        return False
    if connection is not own:
        discard_beside(connection)
    elif connection.autocommit:
        _thread.unusable[own.alias] = connection.connection
    else:
        # It was being opened, and would look as if the caller had begun by hand.
        connection.close()
    return True


def _may_be_done(
    dialect: dialects.Dialect, error: Exception, reconnecting: bool, one_statement: bool
) -> bool:
    """Tell whether an operation may have been carried out, but its answer was lost."""
    if isinstance(error, ReplyLost):
        return True
    if reconnecting or not dialect.is_lost(error):
        return False
    return not (one_statement and dialect.is_unsent(error))


PATIENCE = 1.0
"""Seconds for which a transaction of dblocks' own is repeated if need be."""


def committing(using: str) -> Connection:
    """Return this thread's connection, on which what is written will be committed.

    Raises:
        TransactionManagementError: Autocommit is off, so that nothing is committed,
            not even by ``atomic()``.
    """
    connection: Connection = transaction.get_connection(using)
    in_own = connection.in_atomic_block and connection.commit_on_exit
    if not (in_own or connection.get_autocommit()):
        raise _autocommit_is_off(connection)
    return connection


def run_in_transaction(using: str, act: Callable[[Connection], T]) -> T:
    """Act in a transaction, which is repeated if the database asks for that.

    Inside the caller's transaction it isn't repeated.
    """
    connection = committing(using)
    give_up, attempt = clock.monotonic() + PATIENCE, 0
    while True:
        try:
            with transaction.atomic(using=using):
                return act(connection)
        except DatabaseError as error:
            dialect, attempt = dialects.known(connection), attempt + 1
            collides = attempt <= LEAST_REPEATS and dialect.is_collision(error)
            over = clock.monotonic() >= give_up and not collides
            if connection.in_atomic_block or over or not dialect.is_transient(error):
                raise
            time.sleep(dialect.pause(attempt))


def _after_fork_in_child() -> None:
    _thread.__init__()  # type: ignore[misc]
    for connection in connections.all(initialized_only=True):
        # A database in memory was copied, connections and all.
        if connection.connection is not None and not _is_in_memory(connection):
            _inherited.append(connection.connection)
            _thread.unusable[connection.alias] = connection.connection


keep_out(_thread)
forks.in_child(_after_fork_in_child)
