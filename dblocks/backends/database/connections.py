"""The connection that a lock operation runs on.

Lock operations never run in the caller's transaction: nobody would see them until its
commit, its rollback would undo them, and its snapshot would hide the present row. If
the thread's connection is in autocommit, they use that; inside ``atomic()`` they use a
second one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from django.db import DatabaseError, Error, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.transaction import TransactionManagementError

from ... import forks
from . import dialects, transactions

logger = logging.getLogger("dblocks")

T = TypeVar("T")

LEAST_REPEATS = 5
"""How often an operation that collides with another is repeated, however late it is."""

READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


class ReplyLost(DatabaseError):
    """The statement was carried out, but its reply can't be trusted."""


class _Beside(dict[str, Connection]):
    """A thread's connections beside its transactions, closed when the thread ends."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def __del__(self) -> None:
        # A forked child drops those of other threads: they are the parent's.
        if self._pid == os.getpid():
            for connection in self.values():
                close(connection)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.beside = _Beside()
        #: Raw connections of Django's that are dead or the parent process's.
        self.unusable: dict[str, object] = {}
        #: Connections whose transactions pin rows until the caller's have ended.
        self.pins: dict[str, Connection] = {}
        #: This thread is dblocks' own: nothing runs on Django's connections.
        self.is_own = False
        #: Nothing may hang for long.
        self.waits_briefly = False
        #: The connections on which an operation of this thread is under way. A signal
        #: handler that interrupts it needs another one.
        self.busy: list[Connection] = []


_thread = _Thread()

#: Every open connection of dblocks' own in this process. After a fork the child must
#: keep them all: deallocating one would end the parent's session.
_open: set[Connection] = set()
_inherited: list[object] = []


def separate_connection(alias: str, **limits: int) -> Connection:
    """Return a new connection to a database, outside Django's and outside any pool.

    Of a driver option in ``limits`` and in the settings, the smaller value counts.
    """
    # Not connections.create_connection(): a copy uses the test database too.
    connection: Connection = connections[alias].copy()
    options = connection.settings_dict["OPTIONS"]
    options.pop("pool", None)
    for name, limit in limits.items():
        options[name] = min(int(options.get(name) or limit), limit)
    # Its thread may end before it is closed.
    connection.inc_thread_sharing()
    _open.add(connection)
    return connection


def close(connection: Connection) -> None:
    """Close a connection of dblocks' own."""
    _open.discard(connection)
    try:
        connection.close()
    except Error:
        logger.debug("closing failed database=%s", connection.alias, exc_info=True)


KEPT_IDLE = 2.0
"""Seconds for which an unused connection waits for the next user."""


class IdleConnections:
    """Connections of dblocks' own that nobody is using.

    Nothing here may wait for another thread: the garbage collector or a signal handler
    may run any of it in the middle of itself.
    """

    def __init__(self) -> None:
        self._idle: dict[str, deque[tuple[float, Connection]]] = {}
        self._tidying = threading.Lock()

    def find(self, alias: str) -> Connection | None:
        """Return one to a database, if there is one."""
        with suppress(IndexError):
            return self._idle.setdefault(alias, deque()).pop()[1]
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next user."""
        idle = self._idle.setdefault(connection.alias, deque())
        idle.append((time.monotonic(), connection))
        self._tidy_later()

    def _tidy_later(self) -> None:
        if self._tidying.acquire(blocking=False):
            timer = threading.Timer(KEPT_IDLE, self._tidy)
            timer.daemon, timer.name = True, "dblocks-idle"
            try:
                timer.start()
            except BaseException as error:
                self._tidying.release()
                if not isinstance(error, RuntimeError):
                    raise

    def _tidy(self) -> None:
        self._tidying.release()
        self.close_idle(KEPT_IDLE / 2)
        if any(self._idle.values()):
            self._tidy_later()

    def drop(self, connection: Connection | None) -> None:
        """Close a connection."""
        if connection is not None:
            close(connection)

    def close_idle(self, older_than: float = 0.0) -> None:
        """Close what has been idle for so many seconds."""
        since = time.monotonic() - older_than
        for idle in list(self._idle.values()):
            # Others may take a connection that is seen here.
            with suppress(IndexError):
                while idle[0][0] <= since:
                    self.drop(idle.popleft()[1])


idle = IdleConnections()
"""Used instead of connections that would come from a pool."""

forks.in_child(idle.__init__)  # type: ignore[misc]


def run_apart() -> None:
    """Keep this thread, dblocks' own, off Django's connections and pools."""
    _thread.is_own = True


@contextmanager
def short_waits(alias: str) -> Iterator[None]:
    """Run this thread's operations apart, on a connection whose waits are short."""
    _thread.is_own = _thread.waits_briefly = True
    try:
        yield
    finally:
        _thread.is_own = _thread.waits_briefly = False
        _discard(_thread.beside, alias)


def pin_connection(alias: str) -> Connection:
    """Return a connection in a transaction that ends after this thread's last one."""
    connection = _thread.pins.get(alias)
    if connection is None:
        connection = separate_connection(alias)
        try:
            connection.set_autocommit(
                False, force_begin_transaction_with_broken_autocommit=True
            )
            if dialects.of(connection).has_row_locks:
                # The snapshot of the first pin would hide later grants.
                connection.cursor().execute(READ_COMMITTED)
        except BaseException:
            close(connection)
            raise
        transactions.at_end(transactions.UNPIN, partial(_discard, _thread.pins, alias))
        _thread.pins[alias] = connection
    return connection


def is_alone(connection: Any) -> bool:
    """Tell whether another connection wouldn't see what this one does."""
    shared = dialects.of(connection).has_row_locks or not connection.is_in_memory_db()
    return not shared or transactions.in_test_case(connection)


@contextmanager
def reading_beside(connection: Connection) -> Iterator[Connection]:
    """A connection for reads that an open transaction can't make, or not yet."""
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
    if not in_own and alias not in _thread.pins:
        # Also reached in an event loop, which may not ask a server for its dialect.
        return True
    return dialects.of(connection).has_row_locks


def _beside(alias: str) -> Connection:
    beside = _thread.beside.get(alias)
    if beside is None:
        brief = _thread.waits_briefly
        limits = dialects.of(connections[alias]).short_waits if brief else {}
        beside = _thread.beside[alias] = separate_connection(alias, **limits)
        in_atomic = not _thread.is_own and connections[alias].in_atomic_block
        if in_atomic and beside.settings_dict["CONN_MAX_AGE"] == 0:
            transactions.at_end(
                transactions.CLOSE, partial(_discard, _thread.beside, alias)
            )
        _close_together(connections[alias], _thread.beside)
    return beside


def _close_together(connection: Connection, beside: _Beside) -> None:
    """Close the second connection whenever the thread's own is closed."""
    if "close" in vars(connection):
        return
    alias, kind = connection.alias, type(connection)
    its_own, all_beside = weakref.ref(connection), weakref.ref(beside)

    def close_both() -> None:
        own, others = its_own(), all_beside()
        if own is None:
            return
        if others and alias in others and not own.in_atomic_block:
            close(others.pop(alias))
        kind.close(own)

    connection.close = close_both  # type: ignore[method-assign]


def _discard(kept: dict[str, Connection], alias: str) -> None:
    if (connection := kept.pop(alias, None)) is not None:
        if not connection.autocommit:
            # Django doesn't close what is in memory.
            with suppress(Error):
                connection.rollback()
        close(connection)


def _discard_if_idle(own: Connection, used: Connection) -> None:
    """Close a connection that replaced an unusable one."""
    idle = not _thread.is_own and not own.in_atomic_block
    if idle and used is _thread.beside.get(own.alias):
        _discard(_thread.beside, own.alias)


def _connection(connection: Connection, *, writes: bool) -> Connection:
    alias = connection.alias
    if _thread.is_own:
        return _beside(alias)
    in_block = connection.in_atomic_block
    if writes and (in_block or _thread.pins) and not can_write(alias):
        if not in_block:
            raise TransactionManagementError(
                f"SQLite has one writer: a lock with atomic=True keeps {alias!r} for "
                f"itself until this thread's transactions have ended. Take all keys "
                f"with one lock."
            )
        raise TransactionManagementError(
            "SQLite has one writer: a lock can't be taken beside this open "
            "transaction. Take the lock first: decorate the view (a class at its "
            "dispatch), or use atomic=True in place of atomic(); or use "
            "transaction_lock inside it; or keep the locks in a database file of "
            'their own (OPTIONS={"using": …}).'
        )
    if in_block:
        # A read, too, would begin a snapshot there on SQLite, or see an old one.
        return connection if is_alone(connection) else _beside(alias)
    if connection.connection is None:
        if _would_use_pool(connection):
            return connection
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


def _would_use_pool(connection: Connection) -> bool:
    """Tell whether it is Django's, and would take a connection out of a pool."""
    closed = connection.connection is None
    return closed and bool(connection.settings_dict["OPTIONS"].get("pool"))


def _spare(connection: Connection) -> Connection | None:
    """Return a connection to use instead of one that can't be used."""
    if connection.connection is None and _would_use_pool(connection):
        # Waiters must not use up the pool, and holders must be able to release.
        alias = connection.alias
        return idle.find(alias) or separate_connection(alias)
    if connection not in _thread.busy:
        return None
    if dialects.of(connection).has_row_locks:
        return separate_connection(connection.alias)
    if connection.in_atomic_block:
        return None
    # SQLite's one writer may be at work. Another object, because the interrupted code
    # may have the mutex of Django's: since Python 3.14, signal handlers run there.
    twin: Connection = connection.copy()
    twin.connection, twin.autocommit = connection.connection, connection.autocommit
    return twin


def _put_away(spare: Connection, *, served: bool) -> None:
    raw = spare.connection
    if raw is not None and any(raw is busy.connection for busy in _thread.busy):
        # What was interrupted goes on with it.
        spare.connection = None
    elif served and _would_use_pool(connections[spare.alias]):
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
        again: Replaces it once it may have been carried out and its answer was lost.
    """
    started, waited, attempt = time.monotonic(), 0.0, 0
    while True:
        connection = _connection(own, writes=writes)
        spare, served = _spare(connection), False
        connection = spare or connection
        _thread.busy.append(connection)
        try:
            with dialects.of(connection).waiting(connection, patience, waited):
                result = operation(connection, *arguments)
            served = True
            return result
        except (DatabaseError, InterfaceError) as error:
            dialect = dialects.known(connection)
            sits_out = dialect.sits_out(connection) if patience is None else patience
            give_up = started + sits_out
            if attempt < LEAST_REPEATS and sits_out and dialect.is_collision(error):
                give_up = float("inf")
            if not _may_repeat(own, connection, error, give_up):
                raise
            lost = dialect.is_lost(error)
            if again is not None and (lost or isinstance(error, ReplyLost)):
                operation = again
            logger.debug("repeating database=%s error=%s", own.alias, error)
        finally:
            _thread.busy.remove(connection)
            if spare is not None:
                _put_away(spare, served=served)
            elif _thread.beside:
                _discard_if_idle(own, connection)
        attempt += 1
        time.sleep(dialect.pause(attempt))
        waited = time.monotonic() - started


def _may_repeat(
    own: Connection, connection: Connection, error: Exception, give_up: float
) -> bool:
    """Tell whether to repeat an operation; note a dead connection, to avoid it."""
    dialect = dialects.known(connection)
    if time.monotonic() >= give_up:
        return False
    if isinstance(error, ReplyLost):
        return True
    if connection.in_atomic_block:
        return False
    if not dialect.is_lost(error):
        return dialect.is_transient(error)
    if connection.connection is None:
        return False
    if connection is own:
        _thread.unusable[own.alias] = connection.connection
    elif connection is _thread.beside.get(own.alias):
        _discard(_thread.beside, own.alias)
    return True


def _after_fork_in_child() -> None:
    _inherited.extend([*_open, _thread.beside])
    _open.clear()
    _thread.__dict__.clear()
    _thread.__init__()  # type: ignore[misc]
    for connection in connections.all(initialized_only=True):
        vars(connection).pop("close", None)
        if connection.connection is not None:
            _inherited.append(connection.connection)
            _thread.unusable[connection.alias] = connection.connection


forks.in_child(_after_fork_in_child)
