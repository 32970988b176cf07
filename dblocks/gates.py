"""Gates made of the server's session locks: ``GET_LOCK`` and advisory locks.

The server frees them when the session ends, so a waiter that dies leaves nothing
behind. They say who may look, never who holds: the row does.

A session lock can only be freed by the session that took it, so each gate has a
connection of its own while it is queued for or held; idle ones are kept for the next.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import threading
import time
from functools import lru_cache

from django.db import DatabaseError, InterfaceError
from django.db.backends.base.base import BaseDatabaseWrapper

from . import transactions
from .waiting import Gate, GateClosed

logger = logging.getLogger("dblocks")

MAX_GATES = 32
"""Connections that a process opens for gates; waiters beyond them do without."""

KEPT_IDLE = 2.0
"""Seconds for which an unused connection waits for the next waiter."""


def name(connection: BaseDatabaseWrapper, key: str) -> str | int:
    """Return what a key's gate is called on a database.

    On PostgreSQL a number, of the database; on MySQL and MariaDB a name, of the whole
    server, which must be short and, on MySQL, is not case-sensitive.
    """
    if connection.vendor == "postgresql":
        return int.from_bytes(_digest("dblocks", key)[:8], "big", signed=True)
    digest = _digest(str(connection.settings_dict["NAME"]), key)
    return f"dblocks:{digest.hex()[:40]}"


@lru_cache(maxsize=1024)
def _digest(prefix: str, key: str) -> bytes:
    return hashlib.sha256(f"{prefix}\0{key}".encode()).digest()


class Connections:
    """The connections that the gates of this process stand on."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._mutex = threading.Lock()
        self._idle: dict[str, list[tuple[float, BaseDatabaseWrapper]]] = {}
        self._count = 0
        self._timer: threading.Timer | None = None

    def take(self, alias: str) -> BaseDatabaseWrapper:
        """Return a connection, or raise ``GateClosed`` when there are too many."""
        with self._mutex:
            idle = self._idle.get(alias)
            if idle:
                return idle.pop()[1]
            if self._count >= MAX_GATES:
                raise GateClosed
            self._count += 1
        try:
            connection = transactions.separate_connection(alias)
            # Taken in one thread, freed in another, never used by two at once.
            connection.inc_thread_sharing()
            connection.ensure_connection()
            _prepare(connection)
        except BaseException:
            self.drop(connection)
            raise
        return connection

    def give_back(self, connection: BaseDatabaseWrapper) -> None:
        """Keep a connection without locks for the next gate."""
        with self._mutex:
            idle = self._idle.setdefault(connection.alias, [])
            idle.append((time.monotonic(), connection))
            if self._timer is None:
                self._start_timer()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(KEPT_IDLE, self._tidy)
        self._timer.daemon = True
        self._timer.start()

    def _tidy(self) -> None:
        with self._mutex:
            self._timer = None
        self.close_idle(KEPT_IDLE / 2)

    def drop(self, connection: BaseDatabaseWrapper) -> None:
        """Close a connection, and with it free whatever it has locked."""
        with self._mutex:
            self._count -= 1
        transactions.close(connection)

    def close_idle(self, older_than: float = 0.0) -> None:
        """Close what has been idle for so many seconds."""
        since = time.monotonic() - older_than
        with self._mutex:
            old = []
            for alias, idle in self._idle.items():
                old += [connection for at, connection in idle if at <= since]
                self._idle[alias] = [pair for pair in idle if pair[0] > since]
            if any(self._idle.values()):
                self._start_timer()
        for connection in old:
            self.drop(connection)


pool = Connections()
os.register_at_fork(after_in_child=pool.reset)


_without: set[str] = set()
"""The databases whose session locks can't be relied on."""


def available(connection: BaseDatabaseWrapper) -> bool:
    """Tell, without asking the database, whether there may be gates on it.

    Not behind a pooler that gives each transaction another session: Django's setting
    for such poolers tells.
    """
    return (
        connection.vendor in {"mysql", "postgresql"}
        and connection.alias not in _without
        and not connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
        and not transactions.in_test_case(connection)
    )


def _prepare(connection: BaseDatabaseWrapper) -> None:
    """Find out whether session locks work; a Galera cluster doesn't replicate them."""
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute("SHOW VARIABLES LIKE 'wsrep_on'")
            row = cursor.fetchone()
        if row is not None and row[1].upper() == "ON":
            _without.add(connection.alias)
            raise GateClosed


class Queues:
    """How many sessions queued at the gates of a database at one moment.

    The first of each queue, who has the gate and looks at the row, is not counted.
    On MySQL and MariaDB sessions of other users count only for who may see them.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._lengths: dict[str | int, int] = {}
        if not available(connection):
            return
        with connection.cursor() as cursor:
            cursor.execute(_QUEUES[connection.vendor])
            for gate, length in cursor.fetchall():
                if isinstance(gate, str):
                    found = _GATE_NAME.search(gate)
                    gate = found and found[0]
                self._lengths[gate] = length

    def length(self, key: str) -> int | None:
        """Return how many queue for a key; ``None`` if none are known to."""
        if not self._lengths:
            return None
        return self._lengths.get(name(self._connection, key))


_QUEUES = {
    "mysql": "SELECT info, COUNT(*) FROM information_schema.processlist "
    "WHERE state = 'User lock' GROUP BY info",
    "postgresql": "SELECT (classid::bigint << 32) | objid::bigint, COUNT(*) "
    "FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND NOT granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = CURRENT_DATABASE()) "
    "GROUP BY 1",
}
_GATE_NAME = re.compile(r"dblocks:[0-9a-f]{40}")


class SessionGate(Gate):
    """A gate for one key on one database."""

    def __init__(self, alias: str, key: str) -> None:
        self._alias = alias
        self._key = key
        self._mutex = threading.Lock()
        self._connection: BaseDatabaseWrapper | None = None
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
            self.held = _lock(self._connection, self._key, seconds)
        except (DatabaseError, InterfaceError) as error:
            connection, self._connection = self._connection, None
            if connection is not None:
                pool.drop(connection)
            logger.debug("no gate key=%r error=%s", self._key, error)
            raise GateClosed from error

    def leave(self) -> None:
        self._left = True
        if _in_event_loop():
            threading.Thread(target=self.leave, daemon=True).start()
            return
        # Whoever still queues in another thread cleans up afterwards.
        if self._pid != os.getpid() or not self._mutex.acquire(blocking=False):
            return
        try:
            connection, self._connection = self._connection, None
            self.held = False
            if connection is not None:
                self._free(connection)
        finally:
            self._mutex.release()

    def _free(self, connection: BaseDatabaseWrapper) -> None:
        try:
            _unlock(connection)
        except (DatabaseError, InterfaceError) as error:
            logger.debug("gate not freed key=%r error=%s", self._key, error)
            pool.drop(connection)
        else:
            pool.give_back(connection)

    def __del__(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            # Any thread may be running this, and at any moment.
            threading.Thread(target=pool.drop, args=[self._connection]).start()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _lock(connection: BaseDatabaseWrapper, key: str, seconds: float) -> bool:
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute("SELECT GET_LOCK(%s, %s)", [name(connection, key), seconds])
            return bool(cursor.fetchone()[0])
        milliseconds = max(1, round(seconds * 1000))
        if getattr(connection, "_dblocks_timeout", None) != milliseconds:
            cursor.execute(f"SET lock_timeout = {milliseconds}")
            connection._dblocks_timeout = milliseconds  # type: ignore[attr-defined]
        try:
            cursor.execute("SELECT pg_advisory_lock(%s)", [name(connection, key)])
        except DatabaseError as error:
            if transactions.sqlstate(error) != "55P03":
                raise
            return False
        return True


def _unlock(connection: BaseDatabaseWrapper) -> None:
    # All of the session's: a wait that timed out may have been granted as well.
    mysql = connection.vendor == "mysql"
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT RELEASE_ALL_LOCKS()" if mysql else "SELECT pg_advisory_unlock_all()"
        )
        cursor.fetchone()
