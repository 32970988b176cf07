"""Makes the lock table, or brings it up to date, for a ``migrate`` under a lock.

Several machines may start that at once. The lock that serializes them needs a table,
which only migrations make. So dblocks' own migrations run first, on one machine at a
time, under a native lock of the database.
"""

from __future__ import annotations

import threading

from django.db import OperationalError, connections, transaction
from django.db.migrations.executor import MigrationExecutor

from ..backends.database import dialects
from ..backends.database.checks import flaw_of_tables
from ..backends.database.own_connections import close, separate_connection

PAUSE = 0.1
"""Seconds between attempts to get the native lock."""


def make_tables(
    using: str, called_off: threading.Event, migrating: threading.Event
) -> None:
    """Run dblocks' own migrations if need be; wait while another machine does.

    ``called_off`` ends the wait; ``migrating`` is set during the migrations, which
    shouldn't be interrupted.
    """
    has_server = dialects.of(connections[using]).has_row_locks
    attempt = _on_server if has_server else _on_sqlite
    while not attempt(using, migrating) and not called_off.wait(PAUSE):
        pass


def _on_server(using: str, migrating: threading.Event) -> bool:
    """Make the tables if the native lock is free; tell whether it was."""
    connection = separate_connection(using)
    try:
        alone = dialects.of(connection).try_migration_lock(connection)
        if alone:
            _migrate(using, migrating)
        return alone
    finally:
        close(connection)


def _on_sqlite(using: str, migrating: threading.Event) -> bool:
    """Do the same under the database's one write lock, in its transaction."""
    connection = connections[using]
    try:
        connection.ensure_connection()
        # Migrations need that, and SQLite can't do it inside a transaction.
        connection.disable_constraint_checking()
        connection.transaction_mode = "IMMEDIATE"  # type: ignore[attr-defined]
        with transaction.atomic(using=using):
            _migrate(using, migrating)
        return True
    except OperationalError as error:
        if not dialects.of(connection).is_transient(error):
            raise
        return False
    finally:
        # The next connection gets the settings' transaction mode, and checks again.
        connection.close()


def _migrate(using: str, migrating: threading.Event) -> None:
    connection = connections[using]
    if flaw_of_tables(connection) is None:
        return
    migrating.set()
    try:
        # Not the command, whose signals run other apps' code: it may need their tables.
        executor = MigrationExecutor(connection)
        executor.migrate(executor.loader.graph.leaf_nodes("dblocks"))
    finally:
        migrating.clear()
