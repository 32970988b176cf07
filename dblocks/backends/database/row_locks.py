"""Locking the row of a key in a transaction, on every database.

Callers wait in the database's own queue, and the end of the transaction releases.
Both forms exclude each other on the same key: whoever locks the row makes sure that it
has no lease, and whoever wants a lease finds the row locked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.transaction import TransactionManagementError

from ... import clock
from ...validation import RowWait
from ..values import Reading
from . import dialects, owed, table, transactions, write_lock
from .connections import PATIENCE, run
from .expressions import UtcNow
from .row_waits import Wait, WaitOver, end_overdue, rows_of
from .table import WITHOUT_SNAPSHOT

LOOKS = (0.0, 0.002, 0.005, 0.01, 0.02)
"""Seconds before each look whether a row stays locked."""


class StaleSnapshot(OperationalError):
    """The transaction sees the key's row as it was at some earlier time."""


class Incomplete(Exception):
    """Not all of the rows could be locked."""


def hides_rows(connection: Connection) -> bool:
    """Tell whether the transaction sees rows as they were when it began to read."""
    dialect = dialects.of(connection)
    return dialect.snapshots_hide_rows and (
        dialect.session_isolation(connection) not in WITHOUT_SNAPSHOT
    )


def lock_rows(using: str, keys: Sequence[str], how: RowWait) -> Any:
    """Lock the rows of some keys in the current transaction.

    Returns the rows by key, or ``None`` if they are skipped.
    """
    connection = connections[using]
    if not connection.in_atomic_block:
        raise TransactionManagementError(
            f"for_update({keys[0]!r}) locks a row until the end of a transaction: call "
            f"it inside transaction.atomic(using={using!r})."
        )
    owed.catch_up(connection)
    wait = Wait(keys, how)
    if len(keys) > 1 and dialects.of(connection).keeps_row_locks:
        return _one_by_one(connection, wait)
    return _locked(connection, wait, fresh=False)


def _one_by_one(connection: Connection, wait: Wait) -> Any:
    """Lock rows one by one, in order, where a locked row stays locked until the end.

    If one statement locked only some of them, a holder whose lease this caller waits
    for might want one of those.
    """
    rows: dict[str, Any] = {}
    for key in wait.keys:
        row = _locked(connection, wait.of(key), fresh=False)
        if row is None:
            return None
        rows |= row
    return rows


def _locked(connection: Connection, wait: Wait, *, fresh: bool) -> Any:
    """Lock the rows, and remember it; ``fresh``: the transaction began for this."""
    if not dialects.of(connection).has_row_locks:
        try:
            return write_lock.lock(connection, wait)
        except DatabaseError as error:
            transactions.was_ended(connection, error)
            raise
    try:
        rows = _lock(connection, wait, fresh)
    except BaseException:
        if wait.may_pin:
            transactions.doom(connection)
        raise
    for key in rows or ():
        transactions.note_row_lock(connection.alias, key)
    return rows


@contextmanager
def own_transaction(
    connection: Connection, keys: Sequence[str], how: RowWait
) -> Iterator[Any]:
    """A transaction that begins with the rows of some keys locked."""
    begin = _begin if dialects.of(connection).has_row_locks else write_lock.begin
    with ExitStack() as block:
        yield begin(connection, Wait(keys, how), block)


def _begin(connection: Connection, wait: Wait, block: ExitStack) -> Any:
    patience = max(wait.give_up, wait.started + PATIENCE)
    while True:
        with ExitStack() as attempt:
            attempt.enter_context(transaction.atomic(using=connection.alias))
            try:
                rows = _locked(connection, wait, fresh=True)
            except OperationalError as error:
                # The snapshot is older than the last holder's writes, or too few rows
                # are locked. Nothing was done in this transaction yet: start another.
                stale = dialects.known(connection).is_stale_snapshot(error)
                if not (stale or isinstance(error, StaleSnapshot)):
                    raise
                if clock.monotonic() >= patience:
                    raise wait.timed_out(None) from error
            else:
                if rows is None:
                    break
                block.enter_context(attempt.pop_all())
                return rows
    # Skipped, in a transaction that has locked none of them.
    block.enter_context(transaction.atomic(using=connection.alias))
    return None


def _lock(connection: Connection, wait: Wait, fresh: bool) -> Any:
    """Lock the rows once none of them has a lease.

    It looks on another connection: a leased row must never stay locked, or its holder
    could not renew it; a row that this transaction inserts holds up every try.
    """
    unseen = 0
    while True:
        locks_gaps = unseen and dialects.of(connection).keeps_row_locks
        look = table.read_all if locks_gaps else table.ensure_rows
        try:
            found = run(connection, look, wait.keys)
            if len(found) < len(wait.keys):
                # The row was deleted during the wait. InnoDB may have locked its gap
                # for this transaction, and nobody else could insert the row again.
                if fresh:
                    raise StaleSnapshot(f"The row of {wait.key!r} was deleted.")
                found = table.ensure_rows(connection, wait.keys)
        except table.GapLocked:
            if wait.left and not wait.how.skip:
                continue
            return wait.refuse(None)
        seen = wait.taken(found)
        if seen.remaining > 0:
            _refuse_pinned_lease(connection, wait, seen)
            if not wait.left:
                return wait.refuse(seen)
            wait.pause(seen.remaining)
            continue
        try:
            rows = _select(connection, wait, fresh)
        except WaitOver:
            if wait.left and not wait.how.skip:
                continue
            _refuse_pinned_lease(connection, wait, seen)
            return wait.refuse(seen)
        if rows is not None:
            return rows
        if wait.how.skip and _are_locked(connection, wait, fresh):
            return wait.refuse(None)
        if fresh and dialects.of(connection).keeps_row_locks:
            raise StaleSnapshot(f"The row of the lock {wait.key!r} was leased.")
        unseen += 1
        wait.may_pin = dialects.of(connection).keeps_row_locks
        if unseen > 1 or wait.how.skip:
            _refuse_stale_snapshot(connection, wait, seen)
            if not wait.left:
                return wait.refuse(seen)
        wait.pause(0.001)


def _are_locked(connection: Connection, wait: Wait, fresh: bool) -> bool:
    """Tell whether others have locked a row, not that this transaction can't see it."""
    dialect = dialects.of(connection)
    if dialect.snapshots_hide_rows:
        return bool(_free_rows(connection, wait).count() == len(wait.keys))
    if not fresh and dialect.session_isolation(connection) not in WITHOUT_SNAPSHOT:
        # Or the row was leased meanwhile, and this transaction keeps it locked.
        wait.may_pin = True
        wait.may_pin = run(connection, table.is_locked, wait.key) and (
            not table.is_locked(connection, wait.key)
        )
    return not wait.may_pin


def _free_rows(connection: Connection, wait: Wait, *more: str) -> Any:
    keys = [*wait.keys, *more]
    return rows_of(connection).filter(key__in=keys, expires_at__lte=UtcNow())


def _select(connection: Connection, wait: Wait, fresh: bool) -> Any:
    """Lock the rows if none has a lease; ``None`` if one has, or can't be seen.

    On PostgreSQL it writes the rows: a later transaction with a snapshot that is older
    than this one's commit is then refused, even if this one has no snapshot itself. In
    a cluster the write makes one of two transactions on different nodes fail.
    """
    skip, left = wait.how.skip, wait.left
    nowait = left == 0 and not skip
    dialect = dialects.of(connection)
    more = table.beyond(connection, wait.keys)
    free = _free_rows(connection, wait, *more).order_by("key")
    locking = free.select_for_update(nowait=nowait, skip_locked=skip)
    limit = None if nowait or skip or left > 86400 else left
    try:
        with dialect.bounded(connection, limit):
            rows = {row.key: row for row in locking}
            if len(rows) < len(wait.keys):
                # Leaving the block unlocks the rows that matched, on PostgreSQL.
                raise Incomplete
            if dialect.certifies or dialect.snapshots_hide_rows:
                table.touch(connection, list(rows))
            end_overdue(connection, rows)
            return rows
    except Incomplete:
        return None
    except OperationalError as error:
        overdue = limit is not None and not wait.left and dialect.is_cut_off(error)
        if not (overdue or dialect.is_wait_over(error)):
            raise
        if not fresh and transactions.was_ended(connection, error):
            raise
        raise WaitOver from error


def _refuse_stale_snapshot(connection: Connection, wait: Wait, seen: Reading) -> None:
    """Raise if the row will never be seen free in this transaction."""
    if hides_rows(connection):
        isolation = dialects.of(connection).session_isolation(connection)
        raise StaleSnapshot(
            f"The row of the lock {wait.key!r} changed after this transaction's "
            f"snapshot ({isolation}) was taken, which therefore can't lock it. Take "
            f"the lock before the transaction reads anything."
        )
    _refuse_pinned_lease(connection, wait, seen)


def _refuse_pinned_lease(connection: Connection, wait: Wait, seen: Reading) -> None:
    """Raise if a lease that was granted meanwhile can't be renewed."""
    wait.may_pin = wait.may_pin and _stays_locked(connection, wait.key)
    if wait.may_pin:
        raise wait.timed_out(seen) from OperationalError(
            f"The lock {wait.key!r} was leased while this transaction waited for its "
            f"row, and the row stays locked until the transaction ends: it has to be "
            f"rolled back. Run it again."
        )


def _stays_locked(connection: Connection, key: str) -> bool:
    """Tell whether this transaction may have kept a row that it didn't get.

    InnoDB keeps it locked if the transaction had to wait for the row, and with
    snapshots in any case. Others' single statements lock it for an instant only.
    """
    for pause in LOOKS:
        time.sleep(pause)
        if not run(connection, table.is_locked, key):
            return False
    # Another transaction may have it locked, such as one with the holder's guard.
    isolation = dialects.of(connection).session_isolation(connection)
    return isolation not in WITHOUT_SNAPSHOT or not table.is_locked(connection, key)
