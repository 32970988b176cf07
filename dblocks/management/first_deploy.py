"""The lock table for the very first ``migrate``, which several machines start at once.

The lock that is to keep them apart needs a table that only migrations make. So dblocks'
own migrations are run first, by one machine at a time under a native lock of the
database, which needs no table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder

from dblocks import transactions

APP = "dblocks"
PAUSE = 0.1
"""Seconds between attempts to be the one that makes the tables."""

_NUMBER = int.from_bytes(
    hashlib.sha256(b"dblocks migrate").digest()[:8], "big", signed=True
)


def table_is_missing(using: str) -> bool:
    """Tell whether a database answers and has no lock table."""
    from dblocks.models import DistributedLock

    table = DistributedLock._meta.db_table
    return table not in connections[using].introspection.table_names()


def make_tables(
    using: str,
    sleep: Callable[[float], bool],
    begin: Callable[[], object] = lambda: None,
) -> None:
    """Run dblocks' own migrations unless it has tables; wait for whoever does it now.

    Args:
        using: The alias of the locks' database.
        sleep: Sleeps so many seconds and says whether to go on.
        begin: Called before tables are made, which shouldn't be interrupted.
    """
    going_on = True
    while going_on:
        with _alone(using) as alone:
            if alone:
                if _is_new(using):
                    begin()
                    _migrate(using)
                return
        going_on = sleep(PAUSE)


def _is_new(using: str) -> bool:
    applied = MigrationRecorder(connections[using]).applied_migrations()
    return all(app != APP for app, _ in applied) and table_is_missing(using)


def _migrate(using: str) -> None:
    # Not the command: its signals would run other apps' code before their tables exist.
    executor = MigrationExecutor(connections[using])
    executor.migrate(executor.loader.graph.leaf_nodes(APP))


@contextmanager
def _alone(using: str) -> Iterator[bool]:
    """Be the only one in this block, or learn at once that somebody else is."""
    vendor = connections[using].vendor
    if vendor == "sqlite":
        with _sqlite_write_lock(using) as alone:
            yield alone
        return
    connection = transactions.separate_connection(using)
    try:
        if vendor == "mysql":
            name = hashlib.sha256(str(connection.settings_dict["NAME"]).encode())
            alone = _ask(connection, "GET_LOCK(%s, 0)", APP + name.hexdigest()[:40])
        elif vendor == "postgresql":
            # In a transaction: a pooler may change the session between two.
            connection.ensure_connection()
            connection.set_autocommit(False)
            alone = _ask(connection, "pg_try_advisory_xact_lock(%s)", _NUMBER)
        else:
            alone = True
        yield alone
    finally:
        transactions.close(connection)


def _ask(connection: BaseDatabaseWrapper, call: str, argument: object) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {call}", [argument])
        return bool(cursor.fetchone()[0])


@contextmanager
def _sqlite_write_lock(using: str) -> Iterator[bool]:
    """The database's only write lock, in whose transaction the migrations then run."""
    connection = connections[using]
    try:
        connection.ensure_connection()
        # SQLite can't switch them off inside a transaction, and migrations want to.
        connection.disable_constraint_checking()
        connection.transaction_mode = "IMMEDIATE"  # type: ignore[attr-defined]
        with ExitStack() as stack:
            try:
                stack.enter_context(transaction.atomic(using=using))
                alone = True
            except OperationalError as error:
                if not transactions.is_transient(connection, error):
                    raise
                alone = False
            yield alone
    finally:
        # The next one has the settings' transaction mode and checks again.
        connection.close()
