"""The manager of the lock table: its states and its verbs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections, models
from django.db.models import Case, Q, Value, When
from django.utils.translation import pgettext_lazy

from . import clock, interventions, transaction_locks, validation
from .backends.database import (
    deletion,
    dialects,
    owed,
    session_locks,
    table,
    transactions,
)
from .backends.database.expressions import After, SecondsUntil, UtcNow
from .backends.values import PINNED_GRACE, Grant, Reading, Renewal, Request, Waiters
from .conf import DEFAULT_ALIAS, backends
from .signals import announce_force_release, log_request

if TYPE_CHECKING:
    from .models import DistributedLock


class State(models.TextChoices):
    """The state of a lock at this moment, by the database's clock."""

    HELD = "held", pgettext_lazy("state of a lock", "held")
    EXPIRED = "expired", pgettext_lazy("state of a lock", "expired")
    COOLING = "cooling", pgettext_lazy("state of a lock", "cooling")
    FREE = "free", pgettext_lazy("state of a lock", "free")


_OVER = Q(expires_at__lte=UtcNow())
_FREE_OWNER = Q(owner="")
_STATES = {
    State.HELD: ~_FREE_OWNER & ~_OVER,
    State.EXPIRED: ~_FREE_OWNER & _OVER,
    State.COOLING: _FREE_OWNER & ~_OVER,
    State.FREE: _FREE_OWNER & _OVER,
}


class LockQuerySet(models.QuerySet["DistributedLock"]):
    """The verbs of the lock table. Durations are seconds or ``timedelta``.

    Each verb runs as one statement where it can, on the queryset's database, and inside
    ``atomic()`` in that transaction. In application code use
    :func:`dblocks.distributed_lock` instead: it stays out of the caller's transactions.

    A lock with permits has a row for each of them; ``permit``, from 0 to 999, names
    one. Without ``permit`` a verb is about the row of a lock without permits.

    A key that can't name a lock raises :exc:`~dblocks.InvalidKey`; another wrong
    argument raises ``TypeError`` or ``ValueError``. A fault of the database raises
    Django's ``DatabaseError``, which never means "taken".
    """

    def held(self) -> LockQuerySet:
        """Return the locks that somebody holds and that are not overdue."""
        return self._in(State.HELD)

    def expired(self) -> LockQuerySet:
        """Return the locks that are overdue: never released, their time is over."""
        return self._in(State.EXPIRED)

    def cooling(self) -> LockQuerySet:
        """Return the locks that ``hold_at_least`` keeps after a release."""
        return self._in(State.COOLING)

    def free(self) -> LockQuerySet:
        """Return the locks that were released and whose keys are free."""
        return self._in(State.FREE)

    def _in(self, state: Any) -> LockQuerySet:
        rows: LockQuerySet = self.filter(_STATES[state])
        return rows

    def with_state(self) -> LockQuerySet:
        """Annotate ``state`` (a :class:`State`) and ``remaining``, in seconds."""
        whens = [When(q, then=Value(str(state))) for state, q in _STATES.items()]
        rows: LockQuerySet = self.annotate(  # type: ignore[no-redef]
            state=Case(*whens, output_field=models.CharField()),
            remaining=SecondsUntil("expires_at"),
        )
        return rows

    def acquire(
        self,
        key: str,
        *,
        owner: str,
        lease: float | timedelta,
        holder: str = "",
        note: str = "",
        permit: int | None = None,
    ) -> DistributedLock | None:
        """Take a key for an owner, without waiting for it.

        Args:
            key: What to lock.
            owner: Who takes it. An owner that holds the key already gets one more hold
                of the same version.
            lease: How long it is held unless it is renewed.
            holder: Who that is, for people.
            note: Free text for people.
            permit: The number of a permit, from 0; ``None`` is a lock without permits.

        Returns:
            The row, or ``None`` if somebody else has the key. ``key``, ``owner`` and
            ``version`` are loaded; the other fields are read when they are first used.
        """
        self._for_write = True
        request = Request(
            key=validation.key_of_row(key, permit),
            owner=validation.owner(owner),
            lease=validation.lease(lease),
            holder=validation.text("holder", holder),
            note=validation.text("note", note),
            explicit=True,
            queued=True,
        )
        patience = clock.monotonic() + PINNED_GRACE
        # If this inserts a row, it locks the floor to read the row's token from it.
        transactions.note_row_lock(self.db, deletion.FLOOR)
        while True:
            answer = table.take(owed.settled(self.db), request)
            if not isinstance(answer, Reading):
                names = list(answer.grant._fields)
                row: DistributedLock
                row = self.model.from_db(self.db, names, list(answer.grant))
                return row
            if answer.remaining > 0 or clock.monotonic() >= patience:
                return None
            time.sleep(0.005)

    def renew(
        self,
        key: str,
        *,
        owner: str,
        version: int,
        lease: float | timedelta,
        permit: int | None = None,
    ) -> bool:
        """Extend a grant to ``lease`` from now; an overdue one stays overdue.

        Returns:
            Whether the grant was current and has been extended.
        """
        self._for_write = True
        row_key = validation.key_of_row(key, permit)
        grant = Grant(row_key, validation.owner(owner), validation.version(version))
        renewal = Renewal(grant, validation.lease(lease))
        renewed = table.renew(owed.settled(self.db), [renewal], wait=True)
        return grant in renewed.extended

    def release(
        self, key: str, *, owner: str, version: int, permit: int | None = None
    ) -> bool:
        """Give back one hold of a grant. The last one frees the key.

        If the row has a ``min_until``, the key stays taken, *cooling*, until then.

        Returns:
            Whether the grant was current.
        """
        self._for_write = True
        row_key = validation.key_of_row(key, permit)
        grant = Grant(row_key, validation.owner(owner), validation.version(version))
        return table.release(owed.settled(self.db), grant)

    def force_release(
        self,
        key: str,
        *,
        version: int | None = None,
        older_than: float | timedelta | None = None,
        by: object = None,
        reason: str = "",
        permit: int | None = None,
    ) -> bool:
        """Take a key away from its holder, and fence that holder off.

        The holder learns of it at its next renewal or at its guard. Its code is not
        stopped, except a command that runs under ``run_locked``.

        Args:
            version: Release only the grant with this fencing token, no later one.
            older_than: Release only a lock that has been held for longer than this, in
                seconds or as a ``timedelta``, at most 366000 days.
            by: Who does it, for the signal and the history: a user or a name.
            reason: Why, for the same.

        Returns:
            Whether this call released something.
        """
        row_key = validation.key_of_row(key, permit)
        how = validation.intervention(by, reason, version)
        self._for_write = True
        rows = self.filter(key=row_key).exclude(_STATES[State.FREE])
        if version is not None:
            rows = rows.filter(version=version)
        if older_than is not None:
            age = validation.age(older_than)
            rows = rows.filter(acquired_at__lte=After(UtcNow(), Value(-age)))
        missed = None
        # The same grant again comes from a snapshot older than what the update sees.
        while (row := rows.first()) and (row.owner, row.version) != missed:
            grant = Grant(row_key, row.owner, row.version)
            if interventions.end_grant(self.db, grant, holder=row.holder, **how):
                ended = row.owner, row.holder, row.version
                announce_force_release(self.model, row_key, ended, using=self.db, **how)
                return True
            missed = row.owner, row.version
        return False

    def request_release(
        self,
        key: str,
        *,
        version: int | None = None,
        by: object = None,
        reason: str = "",
        permit: int | None = None,
    ) -> bool:
        """Ask the holder of a key to finish. Nothing is taken away.

        The holder learns of it at its next renewal, by ``lease.release_requested``;
        ``run_locked`` sends its command a SIGTERM. The request ends with the grant.

        Args:
            version: Ask only the grant with this fencing token, no later one.
            by: Who asks, for the log and the history: a user or a name.
            reason: Why, for the same.

        Returns:
            Whether somebody holds the lock, not overdue, and has been asked.
        """
        row_key = validation.key_of_row(key, permit)
        how = validation.intervention(by, reason, version)
        self._for_write = True
        owed.settled(self.db)
        rows = self.held().filter(key=row_key)
        if version is not None:
            rows = rows.filter(version=version)
        row = rows.first()
        if row is None:
            return False
        grant = Grant(row_key, row.owner, row.version)
        if not interventions.ask_holder(self.db, grant, holder=row.holder, **how):
            return False
        log_request(row_key, (row.owner, row.holder, row.version), **how)
        return True

    def stale(self, older_than: float | timedelta) -> LockQuerySet:
        """Return the locks whose key has been free, or overdue, for ``older_than``."""
        age = validation.age(older_than)
        rows: LockQuerySet = self.filter(expires_at__lte=After(UtcNow(), Value(-age)))
        return rows

    def prune(
        self,
        older_than: float | timedelta,
        *,
        batch_size: int = 200,
        progress: Callable[[int], object] | None = None,
    ) -> int:
        """Delete the rows of keys that have been free, or overdue, for ``older_than``.

        Works in batches of ``batch_size`` rows. Each has a transaction of its own,
        locks only what it deletes, and leaves out rows that are in use. After each it
        pauses for as long as that took; on SQLite, which has one writer, for longer.
        Call it outside ``atomic()``: inside, nobody gets a key that has no row before
        the end of that transaction.

        Args:
            batch_size: From 1 to 10,000.
            progress: Called after each batch with the number of rows deleted so far.

        Returns:
            How many rows were deleted.
        """
        size = validation.batch_size(batch_size)
        self._for_write = True
        stale = self.stale(older_than)
        keys = stale.order_by("key").values_list("key", flat=True)
        connection = connections[self.db]
        deleted, after = 0, ""
        while batch := list(keys.filter(key__gt=after)[:size]):
            after = batch[-1]
            started = clock.monotonic()
            deleted += deletion.prune(self.db, stale, batch)
            if progress is not None:
                progress(deleted)
            if not connection.in_atomic_block:
                rest = dialects.of(connection).prune_rests
                time.sleep(rest * (clock.monotonic() - started))
        return deleted

    def delete(self) -> tuple[int, dict[str, int]]:
        """Delete rows, held ones too; the next tokens of their keys are higher still.

        Use :meth:`prune` to clean up: a holder whose row is deleted loses the lock.
        """
        self._for_write = True
        self._result_cache = None
        return deletion.remove(self, models.QuerySet.delete)

    # Like Django's own delete(), it isn't a method of the manager.
    delete.queryset_only = True  # type: ignore[attr-defined]
    delete.alters_data = True  # type: ignore[attr-defined]

    def waiters(self, key: str) -> Waiters:
        """Return who waits for a key, as far as the database knows.

        Those who wait for a permit count, whichever permit they get. On MariaDB, MySQL
        and PostgreSQL each waiting process counts once; a process that waits without a
        session lock, or has only just begun to wait, isn't seen.

        Returns:
            ``number`` (``None`` if unknown), ``since`` and ``names``.
        """
        key = validation.key(key)
        self._for_write = True
        connection = connections[self.db]
        if not session_locks.available(connection):
            return Waiters()
        return Waiters(session_locks.waiters(connection, [key]).get(key, 0))

    def for_update(
        self,
        key: str,
        *,
        nowait: bool = False,
        skip_locked: bool = False,
        timeout: float | timedelta | None = None,
    ) -> DistributedLock | None:
        """Lock a key's row until the current transaction ends.

        The database holds the lock; there is no lease. This lock and leases on the same
        key exclude each other.

        Args:
            nowait: Raise at once if the key is taken.
            skip_locked: Return ``None`` if the key is taken.
            timeout: How long to wait; ``None``, the default, waits forever. Not with
                ``nowait`` or ``skip_locked``.

        Returns:
            The row.

        Raises:
            LockTimeout: The key stayed taken, as :func:`transaction_lock` describes.
            LockError: The current owner has a lease on the key.
            TransactionManagementError: No transaction is open.
        """
        self._for_write = True
        given = validation.UNSET if timeout is None else timeout
        wait = validation.row_wait(nowait, skip_locked, given)
        row: DistributedLock | None = transaction_locks.lock_row(
            self.db, validation.key(key), wait or validation.RowWait(None)
        )
        return row


if TYPE_CHECKING:
    # What from_queryset() makes, for type checkers that can't look into it.
    class _Manager(LockQuerySet, models.Manager["DistributedLock"]):  # type: ignore[misc]
        def get_queryset(self) -> LockQuerySet: ...
else:
    _Manager = models.Manager.from_queryset(LockQuerySet)


class LockManager(_Manager):
    """The manager of the lock table, on the database of ``DBLOCKS["default"]``."""

    @property
    def db(self) -> str:
        backend = backends[DEFAULT_ALIAS]
        return self._db or (backend.using if backend.has_table else super().db)

    def get_queryset(self) -> LockQuerySet:
        rows = super().get_queryset()
        return rows.using(self.db) if backends[DEFAULT_ALIAS].has_table else rows
