"""Locking keys on SQLite, which has no row locks but one lock for all that writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from django.db import OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ... import clock
from ..values import Reading
from . import dialects, table, transactions
from .connections import reading_beside, run
from .dialects.sqlite import BusyTimeout
from .row_waits import LONGEST_PAUSE, Wait, WaitOver, end_overdue, rows_of


def begin(connection: Connection, wait: Wait, block: ExitStack) -> Any:
    """Begin a transaction that has the write lock and finds the key free.

    Waits for a lease before the transaction begins: inside, the wait would keep the
    holder from releasing.
    """
    while True:
        try:
            seen = _look(connection, wait, writes=True)
        except WaitOver:
            return wait.refuse(None)
        left = wait.left
        if seen.remaining <= 0:
            with ExitStack() as attempt:
                try:
                    with _bounded(connection, left):
                        attempt.enter_context(transaction.atomic(connection.alias))
                        seen = _take(connection, wait)
                except WaitOver:
                    return wait.refuse(seen)
                if seen.remaining <= 0:
                    block.enter_context(attempt.pop_all())
                    return _locked(connection, wait)
        if left == 0:
            return wait.refuse(seen)
        wait.pause(LONGEST_PAUSE)


def lock(connection: Connection, wait: Wait) -> Any:
    """Take the database's only write lock, in the transaction that is open."""
    with reading_beside(connection) as beside:
        while True:
            try:
                seen = _look(beside, wait, writes=False)
            except WaitOver:
                return wait.refuse(None)
            if seen.remaining <= 0:
                break
            if not wait.left:
                return wait.refuse(seen)
            wait.pause(seen.remaining)
    try:
        with _bounded(connection, wait.left):
            seen = _take(connection, wait)
    except WaitOver:
        return wait.refuse(None)
    return wait.refuse(seen) if seen.remaining > 0 else _locked(connection, wait)


def _look(connection: Connection, wait: Wait, *, writes: bool) -> Reading:
    """Read the keys; raise ``WaitOver`` if readers are kept out for all that time."""
    dialect = dialects.of(connection)
    patience = max(wait.left, dialect.patience)
    look = partial(run, connection, table.read_all, patience=patience, writes=writes)
    try:
        return wait.taken(look(wait.keys))
    except OperationalError as error:
        if not dialect.is_busy(error):
            raise
        raise WaitOver from error


def _take(connection: Connection, wait: Wait) -> Reading:
    # Write before reading: after a read SQLite doesn't wait for other writers.
    table.touch(connection, wait.keys[:1])
    return wait.taken(table.ensure_rows(connection, wait.keys))


def _locked(connection: Connection, wait: Wait) -> Any:
    for key in wait.keys:
        transactions.note_row_lock(connection.alias, key)
    found = rows_of(connection).filter(key__in=wait.keys).order_by("key")
    rows = {row.key: row for row in found}
    end_overdue(connection, rows)
    return rows


@contextmanager
def _bounded(connection: Connection, limit: float) -> Iterator[None]:
    """Bound how long SQLite waits for its write lock; then raise ``WaitOver``."""
    started = clock.monotonic()
    dialect = dialects.of(connection)
    try:
        with BusyTimeout(connection, limit):
            yield
    except OperationalError as error:
        waited = clock.monotonic() - started >= 0.9 * limit
        snapshot = dialect.is_stale_snapshot(error)
        if snapshot or not waited or not dialect.is_transient(error):
            raise
        raise WaitOver from error
