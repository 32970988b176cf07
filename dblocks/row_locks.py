"""Locking the row of a key in a transaction, on every database.

The database's own queue does the waiting and the end of the transaction the release.
Both forms exclude each other on the same key: whoever locks the row finds it free of
a lease, and whoever wants a lease finds the row locked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F
from django.db.transaction import TransactionManagementError

from . import models, ownership, transactions
from .arguments import PessimisticWait
from .backends.base import FOREVER, Reading
from .exceptions import LockError, LockTimeout
from .functions import UtcNow
from .waiting import pauses


def lock_row(
    using: str, key: str, wait: PessimisticWait, give_up: float | None = None
) -> models.DistributedLock | None:
    """Lock a key's row in the current transaction; see ``objects.for_update()``.

    Args:
        give_up: For a transaction that was begun for the row: when the wait is over,
            by ``time.monotonic()``.
    """
    connection = connections[using]
    if not connection.in_atomic_block:
        raise TransactionManagementError(
            f"for_update({key!r}) locks a row until the end of a transaction: call it "
            f"inside transaction.atomic(using={using!r})."
        )
    refuse_nesting(using, key)
    if connection.vendor == "sqlite":
        row = _lock_sqlite(connection, key, wait)
    else:
        row = _lock(connection, key, wait, give_up)
    if row is not None:
        transactions.note_row_lock(using, key)
    return row


def refuse_nesting(using: str, key: str) -> None:
    """Raise if the current owner has a lease on the key: it would wait for itself."""
    for (backend, held_key), hold in list(ownership.current().holds.items()):
        if held_key == key and backend.is_in_database(using) and hold.is_live():
            raise LockError(
                f"The lock {key!r} is leased by the same owner: its row can't be "
                f"locked inside. Use one form, distributed_lock or transaction_lock, "
                f"not both."
            )


def _end(wait: PessimisticWait) -> float:
    """Return when a wait that begins now is over."""
    return time.monotonic() + (FOREVER if wait.timeout is None else wait.timeout)


@contextmanager
def own_transaction(
    connection: BaseDatabaseWrapper, key: str, wait: PessimisticWait
) -> Iterator[models.DistributedLock | None]:
    """A transaction that begins with the key's row locked."""
    with ExitStack() as block:
        if connection.vendor == "sqlite":
            yield _begin_sqlite(connection, key, wait, block)
        else:
            yield _begin(connection, key, wait, block)


def _begin(
    connection: BaseDatabaseWrapper, key: str, wait: PessimisticWait, block: ExitStack
) -> models.DistributedLock | None:
    give_up = _end(wait)
    patience = max(give_up, time.monotonic() + PATIENCE)
    while True:
        with ExitStack() as attempt:
            attempt.enter_context(transaction.atomic(using=connection.alias))
            try:
                row = lock_row(connection.alias, key, wait, give_up)
            except OperationalError as error:
                # The snapshot is older than what the last holder wrote. Nothing was
                # done in this transaction yet: another one begins.
                stale = transactions.is_serialization_failure(connection, error)
                if time.monotonic() >= patience or not (
                    stale or isinstance(error, StaleSnapshot)
                ):
                    raise
            else:
                block.enter_context(attempt.pop_all())
                return row


def _lock(
    connection: BaseDatabaseWrapper,
    key: str,
    wait: PessimisticWait,
    give_up: float | None,
) -> models.DistributedLock | None:
    using = connection.alias
    own = give_up is not None
    give_up = _end(wait) if give_up is None else give_up
    transactions.run(using, lambda beside, _: models.ensure_row(beside, key))
    delays = pauses()
    unseen = 0
    while True:
        # By reading, on another connection: a leased row must never stay locked, or
        # its holder could not renew it.
        seen = transactions.run(
            using, lambda beside, _: models.read(beside, key), writes=False
        )
        if seen is not None and seen.remaining <= 0:
            left = max(0.0, give_up - time.monotonic())
            try:
                row = _select(connection, key, left, wait, mark=own)
            except WaitOver:
                if time.monotonic() < give_up and not wait.skip:
                    continue
                _refuse(key, wait, seen)
                return None
            if row is not None:
                return row
            if wait.skip and _sees_it_free(connection, key):
                return None
            unseen += 1
            if unseen > 1 or wait.skip:
                _refuse_stale_snapshot(connection, key, wait, seen)
        elif time.monotonic() >= give_up:
            _refuse(key, wait, seen or Reading())
            return None
        delay = min(next(delays), max(0.0, give_up - time.monotonic()))
        time.sleep(min(delay, max(seen.remaining, 0.001)) if seen else delay)


PATIENCE = 1.0
"""Seconds for which a transaction of dblocks' own is begun anew if it must be."""


class WaitOver(Exception):
    """The database gave the row's lock to nobody in time."""


class StaleSnapshot(OperationalError):
    """The transaction sees the key's row as it was some time ago."""


def _select(
    connection: BaseDatabaseWrapper,
    key: str,
    left: float,
    wait: PessimisticWait,
    *,
    mark: bool,
) -> models.DistributedLock | None:
    """Lock the row if it is free of a lease; ``None`` if it isn't, or can't be seen.

    Args:
        mark: Where transactions have snapshots, see to it that PostgreSQL refuses the
            row to the next one if its snapshot is older than this one's commit.
    """
    nowait = left == 0 and not wait.skip
    keys = [key]
    if connection.vendor == "mysql" and _isolation(connection) in _WITHOUT_SNAPSHOT:
        # By range, InnoDB lets go of a row that turns out not to match; "key = …"
        # keeps it locked. With snapshots it keeps both, and the gap behind the row.
        keys.append(f"{key}\0")
    free = models.DistributedLock.objects.using(connection.alias).filter(
        key__in=keys, expires_at__lte=UtcNow()
    )
    rows = free.select_for_update(nowait=nowait, skip_locked=wait.skip)
    limit = None if nowait or wait.skip or left > 86400 else left
    try:
        with _bounded(connection, limit) as isolation:
            row: models.DistributedLock | None = next(iter(rows), None)
            if mark and row is not None and isolation not in _WITHOUT_SNAPSHOT:
                free.update(hold_count=F("hold_count"))
            return row
    except OperationalError as error:
        if _is_lock_timeout(connection, error):
            raise WaitOver from error
        raise


def _sees_it_free(connection: BaseDatabaseWrapper, key: str) -> bool:
    """Tell whether the transaction's snapshot has a free row of the key."""
    rows = models.DistributedLock.objects.using(connection.alias)
    return (
        connection.vendor != "postgresql"
        or rows.filter(key=key, expires_at__lte=UtcNow()).exists()
    )


_WITHOUT_SNAPSHOT = {None, "read committed", "read uncommitted"}


def _isolation(connection: Any) -> str:
    """Return the isolation level of a session on MySQL or MariaDB."""
    level: str | None = connection.isolation_level
    if level is None:
        with connection.cursor() as cursor:
            # tx_isolation or transaction_isolation, by version.
            cursor.execute("SHOW SESSION VARIABLES LIKE 't%%x%%\\_isolation'")
            level = str(cursor.fetchone()[-1]).lower().replace("-", " ")
    return level


_MYSQL_WAIT_OVER = {1205, 1969, 3024, 3572}


def _is_lock_timeout(connection: BaseDatabaseWrapper, error: OperationalError) -> bool:
    if connection.vendor == "mysql":
        return error.args[0] in _MYSQL_WAIT_OVER
    return transactions.sqlstate(error) == "55P03"


@contextmanager
def _bounded(
    connection: BaseDatabaseWrapper, limit: float | None
) -> Iterator[str | None]:
    """Bound how long a statement waits, in fractions of a second.

    Yields the transaction's isolation level, on PostgreSQL.
    """
    if connection.vendor == "postgresql":
        milliseconds = 0 if limit is None else max(1, round(limit * 1000))
        # The savepoint keeps the transaction usable after a wait that ran out, and
        # going back to it undoes the setting.
        with transaction.atomic(using=connection.alias):
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT current_setting('lock_timeout'), "
                    "current_setting('transaction_isolation'), "
                    "set_config('lock_timeout', %s, true)",
                    [f"{milliseconds}ms"],
                )
                before, isolation, _ = cursor.fetchone()
            yield isolation
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [before])
    elif limit is None:
        yield None
    else:
        with connection.execute_wrapper(partial(_with_limit, connection, limit)):
            yield None


def _with_limit(
    connection: Any,
    limit: float,
    execute: Callable[..., Any],
    sql: str,
    params: Any,
    many: bool,
    context: Any,
) -> Any:
    limit = max(limit, 0.001)
    if connection.mysql_is_mariadb:
        sql = f"SET STATEMENT max_statement_time={limit:.6f} FOR {sql}"
    else:
        hint = f"SELECT /*+ MAX_EXECUTION_TIME({max(1, round(limit * 1000))}) */"
        sql = sql.replace("SELECT", hint, 1)
    return execute(sql, params, many, context)


def _refuse_stale_snapshot(
    connection: BaseDatabaseWrapper, key: str, wait: PessimisticWait, seen: Reading
) -> None:
    """Raise if the row will never be seen free in this transaction."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            isolation = str(cursor.fetchone()[0])
    else:
        isolation = _isolation(connection)
    if isolation in _WITHOUT_SNAPSHOT:
        return
    if connection.vendor == "postgresql":
        raise StaleSnapshot(
            f"The row of the lock {key!r} changed after this transaction's snapshot "
            f"({isolation}) was taken, which therefore can't lock it. Take the lock "
            f"before the transaction reads anything."
        )
    # A lease was granted in the same instant, and InnoDB keeps its row locked here.
    transaction.set_rollback(True, using=connection.alias)
    raise _timeout(key, wait, seen)


def _refuse(key: str, wait: PessimisticWait, seen: Reading) -> None:
    """Do what is to be done about a key that stayed taken."""
    if not wait.skip:
        raise _timeout(key, wait, seen)


def _timeout(key: str, wait: PessimisticWait, seen: Reading) -> LockTimeout:
    leased = seen.remaining > 0
    return LockTimeout(
        key,
        timeout=wait.timeout,
        holder=seen.holder if leased else "",
        note=seen.note if leased else "",
        acquired_at=seen.acquired_at if leased else None,
        retry_after=seen.remaining,
    )


# SQLite


def _begin_sqlite(
    connection: BaseDatabaseWrapper, key: str, wait: PessimisticWait, block: ExitStack
) -> models.DistributedLock | None:
    """Begin a transaction that has the write lock and finds the key free.

    The wait for a lease is over before the transaction begins: inside, it would keep
    the holder from releasing.
    """
    give_up = _end(wait)
    for delay in pauses():
        seen = models.read(connection, key) or Reading()
        left = max(0.0, give_up - time.monotonic())
        if seen.remaining <= 0:
            with ExitStack() as attempt:
                try:
                    with busy_timeout(connection, left):
                        attempt.enter_context(transaction.atomic(connection.alias))
                except WaitOver:
                    break
                now = PessimisticWait(0.0, skip=True)
                row = lock_row(connection.alias, key, now)
                if row is not None:
                    block.enter_context(attempt.pop_all())
                    return row
        if left == 0:
            break
        time.sleep(min(delay, left))
    _refuse(key, wait, seen)
    return None


def _lock_sqlite(
    connection: BaseDatabaseWrapper, key: str, wait: PessimisticWait
) -> models.DistributedLock | None:
    """Take the database's only write lock, in the transaction that is open."""
    give_up = _end(wait)
    for delay in pauses():
        seen = models.read(connection, key) or Reading()
        left = give_up - time.monotonic()
        if seen.remaining <= 0 or left <= 0:
            break
        time.sleep(min(delay, left, seen.remaining))
    rows = models.DistributedLock.objects.using(connection.alias).filter(key=key)
    try:
        with busy_timeout(connection, max(0.0, left)):
            models.ensure_row(connection, key)
            rows.update(version=F("version"))
    except WaitOver:
        _refuse(key, wait, Reading())
        return None
    seen = models.read(connection, key) or Reading()
    if seen.remaining > 0:
        _refuse(key, wait, seen)
        return None
    row: models.DistributedLock = rows.get()
    return row


@contextmanager
def busy_timeout(
    connection: BaseDatabaseWrapper, timeout: float | None
) -> Iterator[None]:
    """Bound how long SQLite waits for its write lock; running out is ``WaitOver``."""
    limit = FOREVER if timeout is None else timeout
    started = time.monotonic()
    before = _set_busy_timeout(connection, limit)
    try:
        yield
    except OperationalError as error:
        waited = time.monotonic() - started >= 0.9 * limit
        snapshot = transactions.is_serialization_failure(connection, error)
        if snapshot or not waited or not transactions.is_transient(connection, error):
            raise
        raise WaitOver from error
    finally:
        _set_busy_timeout(connection, before)


def _set_busy_timeout(connection: BaseDatabaseWrapper, seconds: float) -> float:
    connection.ensure_connection()
    raw: Any = connection.connection
    before: float = raw.execute("PRAGMA busy_timeout").fetchone()[0] / 1000
    raw.execute(f"PRAGMA busy_timeout = {min(round(seconds * 1000), 2**31 - 1)}")
    return before
