"""What is different on SQLite."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.core.checks import CheckMessage
from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ...messages import warning
from .base import Dialect

STARVED = 0.9
"""Seconds for which dblocks gives way to readers, with a rollback journal."""

BRIEF = 1
"""Seconds: up to this timeout of the driver, dblocks itself waits, once connected."""


class BusyTimeout:
    """Bounds how long SQLite waits for its locks, in seconds.

    A class, because a generator's context takes longer than all of its statements.

    ``repeated``: a statement that gives up is repeated, so a shorter timeout may stay.
    """

    _before: int | None = None

    def __init__(
        self, connection: Connection, limit: float, *, repeated: bool = False
    ) -> None:
        self._connection = connection
        self._limit = round(min(limit * 1000, 2**31 - 1))
        self._repeated = repeated

    def __enter__(self) -> None:
        if self._connection.connection is None:
            _connect(self._connection, self._limit / 1000)
        # Not through Django's cursor: this calls only the library and touches no file.
        raw: Any = self._connection.connection
        before = raw.execute("PRAGMA busy_timeout").fetchone()[0]
        if self._repeated and 0 < before <= self._limit:
            return
        self._raw, self._before = raw, before
        raw.execute(f"PRAGMA busy_timeout = {self._limit}").fetchone()

    def __exit__(self, *exc_info: object) -> None:
        before, self._before = self._before, None
        # If it was reopened meanwhile, the new connection has a timeout of its own.
        if before is not None and self._connection.connection is self._raw:
            self._raw.execute(f"PRAGMA busy_timeout = {before}").fetchone()

    def __del__(self) -> None:
        # A signal handler that raises may have kept the block from being left.
        if self._before is not None:
            self.__exit__()


def _has_wal(connection: Any) -> bool:
    """Tell whether readers and the writer don't block each other."""
    raw = connection.connection
    known: tuple[object, bool] | None = connection.__dict__.get("_dblocks_wal")
    if known is None or known[0] is not raw:
        try:
            with BusyTimeout(connection, 0.0):
                mode = raw.execute("PRAGMA journal_mode").fetchone()[0]
        except connection.Database.DatabaseError:
            # Somebody is keeping readers out, or the file is no database: then the next
            # statement says so.
            return False
        known = connection.__dict__["_dblocks_wal"] = raw, mode == "wal"
    return known[1]


def _connect(connection: Any, limit: float) -> None:
    """Connect; reads of the file wait for no more than ``limit`` seconds meanwhile.

    Django's own first statements read it in SQLite 3.53, and ``init_command`` may.
    """
    usual, own = _timeout(connection), connection.settings_dict
    # An odd number of milliseconds, to be told from what init_command may set, and half
    # a millisecond more, so that rounding down gives that number.
    limit = ((int(min(limit, usual) * 1000) | 1) + 0.5) / 1000
    connection.settings_dict = {**own, "OPTIONS": {**own["OPTIONS"], "timeout": limit}}
    try:
        connection.ensure_connection()
    finally:
        connection.settings_dict = own
    raw: Any = connection.connection
    if raw.execute("PRAGMA busy_timeout").fetchone()[0] == int(limit * 1000):
        raw.execute(f"PRAGMA busy_timeout = {int(usual * 1000)}").fetchone()


def _timeout(connection: Connection) -> float:
    return float(connection.settings_dict["OPTIONS"].get("timeout", 5.0))


class SQLite(Dialect):
    """One file, one writer, no server."""

    name = "sqlite"
    has_row_locks = False
    has_session_locks = False
    fills_by_name = True
    # A try must be answered within a second, and waits for other writers too.
    patience = 0.5
    short_waits = {"timeout": BRIEF}
    # SQLite has no queue in which other writers could get ahead of pruning.
    prune_rests = 5
    _format = "'%%Y-%%m-%%d %%H:%%M:%%f000'"
    now = f"STRFTIME({_format}, 'NOW')"
    # Rounded: days in a double are some 40 µs off, and 20 s would be 20.00001.
    seconds_until = "ROUND((JULIANDAY({}) - JULIANDAY('NOW')) * 86400.0, 3)".format
    greatest = "MAX"
    share = ""
    strength = ""
    rows = "VALUES {}".format
    all_or_none = (
        f"UPDATE {Dialect.table} SET {{0}} WHERE {{1}} "
        f"AND (SELECT COUNT(*) FROM {Dialect.table} WHERE {{1}}) = {{2}}"
    ).format
    stale_snapshot = "SQLITE_BUSY_SNAPSHOT"

    def after(self, moment: str, seconds: str) -> str:
        moment = "'NOW'" if moment == self.now else moment
        return (
            f"STRFTIME({self._format}, {moment}, PRINTF('%%+.6f seconds', {seconds}))"
        )

    def sits_out(self, connection: Connection) -> float:
        return max(1.0, _timeout(connection))

    def keeps_readers_out(self, connection: Any) -> bool:
        return connection.transaction_mode == "EXCLUSIVE" and not _has_wal(connection)

    def close(self, connection: Connection) -> None:
        super().close(connection)
        # Django leaves a database in memory open, because it would be gone with its
        # only connection.
        if connection.connection is not None:
            Connection.close(connection)

    def harms_after_fork(self, connection: Any) -> bool:
        # SQLite takes the parent's lock on the file for the child's, so that others may
        # delete a write-ahead log that the child goes on with.
        raw = connection.connection
        if raw is None or connection.is_in_memory_db():
            return False
        with suppress(connection.Database.ProgrammingError):  # closed by others
            return not raw.in_transaction
        return False

    def limit(
        self, connection: Connection, patience: float | None, waited: float
    ) -> BusyTimeout | None:
        if connection.in_atomic_block:
            return None
        if connection.connection is None:
            seconds = self.sits_out(connection) if patience is None else patience
            _connect(connection, min(BRIEF, max(0.0, seconds - waited)))
        if not _has_wal(connection):
            # A statement that waits for readers, in order to commit, keeps them from
            # writing: SQLite refuses their writes at once, and they fail. But if one
            # reader follows another, only such a wait ever succeeds.
            return BusyTimeout(connection, 0.0 if waited < STARVED else 0.1)
        if patience is None:
            if _timeout(connection) > BRIEF:
                return None
            patience = 0.0
        return BusyTimeout(connection, max(0.0, patience - waited), repeated=True)

    def pause(self, attempt: int) -> float:
        # SQLite itself looks ever less often, in the end ten times a second, and never
        # finds the gap between two busy writers.
        return random.uniform(0.001, 0.005) * min(attempt, 4)

    def is_transient(self, error: BaseException) -> bool:
        return isinstance(error, OperationalError) and "locked" in str(error)

    def has_ended_transaction(
        self, connection: Connection, error: BaseException
    ) -> bool:
        # As a full disk may, with a rollback journal.
        raw: Any = connection.connection
        return raw is not None and not raw.in_transaction

    def code(self, error: BaseException) -> object:
        return getattr(error.__cause__, "sqlite_errorname", "")

    def findings(self, connection: Any) -> Iterator[CheckMessage]:
        version: tuple[int, ...] = connection.Database.sqlite_version_info
        if version < (3, 35):
            yield warning(
                "W007",
                f"SQLite {'.'.join(map(str, version))} is too old for locks.",
                "dblocks needs SQLite 3.35 or newer (UPDATE … RETURNING).",
            )
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            has_rollback = cursor.fetchone()[0] not in {"wal", "memory"}
            cursor.execute("PRAGMA locking_mode")
            keeps_file = cursor.fetchone()[0] == "exclusive"
        if keeps_file and not connection.is_in_memory_db():
            yield warning(
                "W017",
                f"A connection to {connection.alias!r} keeps the SQLite file for "
                f"itself: leases can't be renewed, and others can't take any.",
                "Take PRAGMA locking_mode=EXCLUSIVE out of its init_command.",
            )
        wanted = []
        if connection.transaction_mode not in {"IMMEDIATE", "EXCLUSIVE"}:
            wanted.append('"transaction_mode": "IMMEDIATE"')
        if has_rollback:
            wanted.append('"init_command": "PRAGMA journal_mode=WAL"')
        if wanted and not connection.is_in_memory_db():
            yield warning(
                "W010",
                f"The SQLite database {connection.alias!r} lacks a setting: "
                f"its transactions can fail where others write at the same time.",
                f"Set {' and '.join(wanted)} in DATABASES[…]['OPTIONS'].",
            )
