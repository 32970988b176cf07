"""Gates made of the server's session locks: ``GET_LOCK`` and advisory locks.

The server frees them when the session ends, so a waiter that dies leaves nothing
behind. They say who may look, never who holds: the row does.

A session lock can only be freed by the session that took it, so each gate has a
connection of its own while it is queued for or held; idle ones are kept for the next.
Nothing here may wait for another thread: the garbage collector or a signal handler may
run any of it in the middle of itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress

from django.db import DatabaseError, InterfaceError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ... import forks
from ..gates import Gate, GateClosed
from . import dialects, transactions
from .own_connections import IdleConnections, separate_connection

logger = logging.getLogger("dblocks")

MAX_GATES = 32
"""The most connections that a process opens for gates; more waiters do without."""


class Connections(IdleConnections):
    """The connections that the gates of this process use."""

    def __init__(self) -> None:
        super().__init__()
        self._places = deque(range(MAX_GATES))

    def take(self, alias: str) -> Connection:
        """Return a connection, or raise ``GateClosed`` if there are too many."""
        idle = self.find(alias)
        if idle is not None:
            return idle
        try:
            self._places.pop()
        except IndexError:
            raise GateClosed from None
        new = None
        try:
            new = separate_connection(alias)
            new.ensure_connection()
            if not dialects.of(new).has_relied_on_sessions(new):
                _do_without(alias)
                raise GateClosed
        except BaseException:
            self.drop(new)
            raise
        return new

    def drop(self, connection: Connection | None) -> None:
        """Close a connection, which frees whatever it has locked."""
        self._places.append(0)
        super().drop(connection)


pool = Connections()
forks.in_child(pool.__init__)  # type: ignore[misc]


_without: set[str] = set()
"""The databases whose session locks can't be relied on."""


def _do_without(alias: str) -> None:
    if alias not in _without:
        _without.add(alias)
        logger.warning(
            "session locks are not used database=%s: it is behind a pooler, or one of "
            "a cluster; waiters look at the lock from time to time instead",
            alias,
        )


def available(connection: Connection) -> bool:
    """Tell, without asking the database, whether it may have gates."""
    dialect = dialects.of(connection)
    return (
        dialect.has_session_locks
        and connection.alias not in _without
        # Django's setting for poolers that give each transaction another session.
        and not connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
        and not dialect.waits_for_all(connection)
        and not transactions.in_test_case(connection)
    )


def waiters(connection: Connection, keys: Iterable[str]) -> Mapping[str, int]:
    """Return how many sessions queue for each key; omit keys without known waiters.

    On MySQL and MariaDB, only users who may see other users' sessions count those.
    """
    if not available(connection):
        return {}
    dialect = dialects.of(connection)
    with connection.cursor() as cursor:
        lengths = dict(dialects.send(cursor, dialect.queues, None, "fetchall"))
    names = {key: dialect.session_lock_name(connection, key) for key in keys}
    # The first waiter may have the gate, and no longer queue for it. Its second lock
    # tells it from the key's holder, who may have the gate as well.
    firsts = {key: dialect.session_lock_name(connection, key + _FIRST) for key in names}
    taken = dialect.taken_session_locks(connection, list(firsts.values()))
    counts = {
        key: lengths.get(name, 0) + (firsts[key] in taken)
        for key, name in names.items()
    }
    return {key: count for key, count in counts.items() if count}


_FIRST = "\0first"
"""Follows the key in the name of a session lock whose owner waits for the key.

No key has a NUL."""


class SessionLock(Gate):
    """A gate for one key on one database."""

    def __init__(self, alias: str, key: str, shortest: float) -> None:
        self.shortest = shortest
        self._alias, self._key = alias, key
        self._mutex = threading.Lock()
        self._connection: Connection | None = None
        self._left = False
        self._pid = os.getpid()

    def enter(self, seconds: float) -> None:
        with self._mutex:
            if not self._left:
                self._enter(seconds)
        if self._left:
            self.leave()

    def _enter(self, seconds: float) -> None:
        try:
            if self._connection is None:
                self._connection = pool.take(self._alias)
            dialect = dialects.of(self._connection)
            name = dialect.session_lock_name(self._connection, self._key)
            self.held = dialect.take_session_lock(self._connection, name, seconds)
        except (DatabaseError, InterfaceError) as error:
            connection, self._connection = self._connection, None
            if connection is not None:
                pool.drop(connection)
            logger.debug("no gate key=%r error=%s", self._key, error)
            raise GateClosed from error

    def show_waiter(self, waits: bool) -> None:
        with self._mutex:
            if not self._left and self._connection is not None:
                self._show_waiter(self._connection, waits)
        if self._left:
            self.leave()

    def _show_waiter(self, connection: Connection, waits: bool) -> None:
        dialect = dialects.of(connection)
        name = dialect.session_lock_name(connection, self._key + _FIRST)
        do = dialect.try_session_lock if waits else dialect.free_session_lock
        # If the session is gone, so is the gate, as its next use finds out.
        with suppress(DatabaseError, InterfaceError):
            dialect.ask_session(connection, do, [name])
        self.shows_waiter = waits

    def leave(self) -> None:
        self._left = True
        if asyncio._get_running_loop() is not None:
            with suppress(RuntimeError):
                threading.Thread(target=self.leave, daemon=True).start()
            return
        # A thread that is still queueing has the mutex, and cleans up afterwards.
        if self._pid != os.getpid() or not self._mutex.acquire(blocking=False):
            return
        try:
            connection, self._connection = self._connection, None
            self.held = False
            if connection is not None:
                self._free(connection)
        finally:
            self._mutex.release()

    def _free(self, connection: Connection) -> None:
        try:
            dialect = dialects.of(connection)
            dialect.ask_session(connection, dialect.free_session_locks)
        except (DatabaseError, InterfaceError) as error:
            logger.debug("gate not freed key=%r error=%s", self._key, error)
            pool.drop(connection)
        except BaseException:
            pool.drop(connection)
            raise
        else:
            pool.give_back(connection)

    def __del__(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            # Any thread may be running this, and at any moment; also the end of the
            # process, where no thread starts and all sessions end.
            with suppress(RuntimeError):
                threading.Thread(target=pool.drop, args=[self._connection]).start()
