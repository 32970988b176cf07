"""Connections of dblocks' own: opened, kept for the next user, and closed."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ... import clock, forks
from . import dialects, forking, transactions

logger = logging.getLogger("dblocks")

READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


class _Beside(dict[str, Connection]):
    """A thread's connections beside its transactions, closed when the thread ends."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def __del__(self) -> None:
        # A forked child only drops those of other threads: they are the parent's.
        if self._pid == os.getpid():
            for connection in self.values():
                close(connection)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.beside = _Beside()
        #: Connections whose transactions pin rows until the caller's have ended.
        self.pins: dict[str, Connection] = {}
        #: This thread is dblocks' own: nothing runs on Django's connections.
        self.is_own = False
        #: Nothing may hang for long.
        self.waits_briefly = False


_thread = _Thread()

#: Every open connection of dblocks' own in this process. After a fork the child must
#: keep them all: deallocating one would end the parent's session.
_open: set[Connection] = set()
_inherited: list[object] = []


def separate_connection(alias: str, **limits: int) -> Connection:
    """Return a new connection to a database, outside Django's and outside any pool.

    Of a driver option in ``limits`` and in the settings, the smaller value counts.
    """
    own = connections[alias]
    options = {**own.settings_dict["OPTIONS"]}
    options.pop("pool", None)
    for name, limit in limits.items():
        # Some drivers know fractions, and some wait for ever below zero.
        if not 0 < float(options.get(name) or 0) <= limit:
            options[name] = limit
    # The settings of the connection, which name the test database too. Not copy(): some
    # options, such as an SSLContext, can't be copied. With autocommit: nobody commits.
    settings = {**own.settings_dict, "OPTIONS": options, "AUTOCOMMIT": True}
    connection: Connection = type(own)(settings, alias)
    _open_whole(connection)
    # Its thread may end before it is closed.
    connection.inc_thread_sharing()
    _open.add(connection)
    return connection


def _open_whole(connection: Connection) -> None:
    """Have a connection closed if an error ends its opening.

    Django would use it half set up: it may lack autocommit or a role.
    """
    kind, its_own = type(connection), weakref.ref(connection)

    def connect() -> None:
        if (own := its_own()) is None:
            return
        try:
            kind.connect(own)
        except BaseException:
            _close(own)
            raise

    connection.connect = connect  # type: ignore[method-assign]


def close(connection: Connection) -> None:
    """Close a connection of dblocks' own, or one that would harm a forked child's."""
    _open.discard(connection)
    with forking.noted(connection):
        _close(connection)
    forking.forget(connection)


def _close(connection: Connection) -> None:
    try:
        dialects.known(connection).close(connection)
    except Error:
        logger.debug("closing failed database=%s", connection.alias, exc_info=True)


LINGER = 2.0
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
        idle.append((clock.monotonic(), connection))
        self._tidy_later()

    def _tidy_later(self) -> None:
        if self._tidying.acquire(blocking=False):
            timer = threading.Timer(LINGER, self._tidy)
            timer.daemon, timer.name = True, "dblocks-idle"
            try:
                timer.start()
            except BaseException as error:
                self._tidying.release()
                if not isinstance(error, RuntimeError):
                    raise

    def _tidy(self) -> None:
        self._tidying.release()
        self.close_idle(LINGER / 2)
        if any(self._idle.values()):
            self._tidy_later()

    def drop(self, connection: Connection | None) -> None:
        """Close a connection."""
        if connection is not None:
            close(connection)

    def close_idle(self, older_than: float = 0.0) -> None:
        """Close connections that have been idle for longer than this, in seconds."""
        since = clock.monotonic() - older_than
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


def runs_apart() -> bool:
    """Tell whether nothing runs on Django's connections in this thread."""
    return _thread.is_own


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
            dialect = dialects.of(connection)
            if dialect.has_row_locks:
                # The snapshot of the first pin would hide later grants.
                connection.cursor().execute(READ_COMMITTED)
                connection.isolation_level = "read committed"  # type: ignore[attr-defined]
            if dialect.may_idle:
                # A time limit of the session would unpin the rows.
                connection.cursor().execute(dialect.may_idle)
        except BaseException:
            close(connection)
            raise
        transactions.at_end(transactions.UNPIN, partial(_discard, _thread.pins, alias))
        _thread.pins[alias] = connection
    return connection


def is_pinning(alias: str) -> bool:
    """Tell whether this thread has rows of a database pinned until its commit."""
    return alias in _thread.pins


def unpin(alias: str) -> None:
    """Unpin this thread's rows of a database; nothing that they guard will commit."""
    _discard(_thread.pins, alias)


def connection_beside(alias: str) -> Connection:
    """Return this thread's connection beside its transactions."""
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
        try:
            if not connection.autocommit:
                # The server may notice later that the connection was closed.
                with suppress(Error):
                    connection.rollback()
        finally:
            close(connection)


def discard_beside(connection: Connection) -> None:
    """Close a connection if it is this thread's beside its transactions."""
    if connection is _thread.beside.get(connection.alias):
        _discard(_thread.beside, connection.alias)


def discard_if_idle(own: Connection, used: Connection) -> None:
    """Close a connection that replaced an unusable one."""
    if not _thread.is_own and not own.in_atomic_block:
        discard_beside(used)


def _close_inherited() -> None:
    """Close the parent's connections that would harm the child's.

    Not if another thread may have been in SQLite: closing would harm the parent's
    connections, or wait for ever.
    """
    mine = [*_open, *connections.all(initialized_only=True)]
    if forking.in_files() or forking.others_use_files(mine):
        return
    for connection in mine:
        if dialects.known(connection).harms_after_fork(connection):
            close(connection)


def _after_fork_in_child() -> None:
    _close_inherited()
    forking.begin_anew()
    _inherited.extend([*_open, _thread.beside])
    _open.clear()
    _thread.__init__()  # type: ignore[misc]
    for connection in connections.all(initialized_only=True):
        vars(connection).pop("close", None)


forks.in_child(_after_fork_in_child)
