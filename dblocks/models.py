"""The lock table, and the only code that writes it.

The row is the truth: a key is free when ``expires_at`` is in the database's past. A
grant raises ``version``, the fencing token, and nothing lowers it. Every write is one
conditional ``UPDATE``; the conditions stand in this module alone, so that the
argument for their correctness can be read in one place.

Three rules make them hold on every database:

* All times are the database's clock, read when the statement begins. A statement
  that waits for the row keeps its earlier reading, which only ever refuses more.
* MySQL and MariaDB evaluate ``SET`` from left to right with the new values, so
  ``expires_at``, ``owner`` and ``hold_count``, which other columns ask for, come
  after those that ask.
* Rows stay until they are pruned, and pruning raises a floor below which no token
  of a new row can start.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import (
    DatabaseError,
    IntegrityError,
    OperationalError,
    connections,
    models,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, Q, Value, When, sql
from django.db.models.constants import OnConflict
from django.db.models.functions import Coalesce, Greatest, Least
from django.db.models.lookups import LessThanOrEqual
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from . import arguments, gates, transactions
from .backends.base import FOREVER, PINNED_GRACE, Grant, Reading, Renewal
from .conf import DEFAULT_ALIAS, backends
from .fields import ExactCharField, GuardConstraint, UTCDateTimeField, as_utc
from .functions import (
    After,
    Announced,
    AnyOf,
    Locking,
    NobodyQueues,
    RowIn,
    SecondsUntil,
    UtcNow,
)
from .signals import announce_force_release
from .statements import Slot, Statement, kept, kind

_BATCH_SIZES = 1, 16, 250
"""How many leases one statement renews; what is between takes the next larger."""

_PRUNE_RESTS = {"sqlite": 5}
"""Pruning rests that many times as long as each of its batches took; else once.

SQLite has one writer, and no queue in which the others would get ahead.
"""

_LOCK_WAIT_TIMEOUT = 1205


class State(models.TextChoices):
    """What a row means at this moment, by the database's clock."""

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

    Each runs as one statement where it can, on the connection of the queryset's
    database as it stands: inside ``atomic()`` in that transaction. To lock from
    application code use :func:`dblocks.distributed_lock`, which keeps out of the
    caller's transactions.
    """

    def held(self) -> LockQuerySet:
        """Return the locks that somebody holds, their time not over."""
        return self._in(State.HELD)

    def expired(self) -> LockQuerySet:
        """Return the locks that were not released and are overdue."""
        return self._in(State.EXPIRED)

    def cooling(self) -> LockQuerySet:
        """Return the locks released early and kept by ``hold_at_least``."""
        return self._in(State.COOLING)

    def free(self) -> LockQuerySet:
        """Return the locks that nobody holds."""
        return self._in(State.FREE)

    def _in(self, state: Any) -> LockQuerySet:
        rows: LockQuerySet = self.filter(_STATES[state])
        return rows

    def with_state(self) -> LockQuerySet:
        """Annotate ``state`` (see :class:`State`) and ``remaining``, in seconds."""
        states = [
            When(condition, then=Value(str(state)))
            for state, condition in _STATES.items()
        ]
        rows: LockQuerySet = self.annotate(
            state=Case(*states, output_field=models.CharField()),
            remaining=SecondsUntil(F("expires_at")),
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
    ) -> DistributedLock | None:
        """Take a key for an owner without waiting.

        Args:
            key: What is locked.
            owner: Who takes it. The owner that holds it gets one more hold of the
                same version.
            lease: How long it is held unless renewed.
            holder: Who that is, for people.
            note: Free text for people.

        Returns:
            The row, or ``None`` when somebody else has the key. On MySQL and MariaDB
            only ``key``, ``owner`` and ``version`` come with it; the other fields
            are read when they are asked for.

        Raises:
            InvalidKey: The key can't name a lock.
            TypeError, ValueError: Another argument is unfit.
            DatabaseError: Whatever the database says; it never means "taken".
        """
        self._for_write = True
        connection = connections[self.db]
        patience = time.monotonic() + PINNED_GRACE
        while True:
            row = take(
                connection,
                key=arguments.key(key),
                owner=arguments.owner(owner),
                lease=arguments.lease(lease),
                holder=arguments.text("holder", holder),
                note=arguments.text("note", note),
            )
            if isinstance(row, Reading):
                if row.remaining > 0 or time.monotonic() >= patience:
                    return None
                time.sleep(0.005)
                continue
            if len(row) == len(_COLUMNS):
                values = [
                    as_utc(value) if name in _MOMENTS else value
                    for name, value in zip(_COLUMNS, row, strict=True)
                ]
                names = _COLUMNS
            else:
                names, values = ["key", "owner", "version"], [key, owner, row[0]]
            granted: DistributedLock = self.model.from_db(self.db, names, values)
            return granted

    def renew(
        self, key: str, *, owner: str, version: int, lease: float | timedelta
    ) -> bool:
        """Extend a grant to ``lease`` from now; an overdue one stays overdue.

        Returns:
            Whether the grant was current and is extended.
        """
        self._for_write = True
        grant = Grant(arguments.key(key), arguments.owner(owner), version)
        renewal = Renewal(grant, arguments.lease(lease), FOREVER)
        return grant in renew(connections[self.db], [renewal], wait=True)

    def release(
        self,
        key: str,
        *,
        owner: str,
        version: int,
        hold_at_least: float | timedelta = 0,
    ) -> bool:
        """Give back one hold of a grant; the last one frees the key.

        Args:
            hold_at_least: How long after the acquisition the key stays taken,
                *cooling*, all the same.

        Returns:
            Whether the grant was current.
        """
        self._for_write = True
        return release(
            connections[self.db],
            Grant(arguments.key(key), arguments.owner(owner), version),
            hold_at_least=arguments.duration("hold_at_least", hold_at_least),
        )

    def force_release(
        self,
        key: str,
        *,
        version: int | None = None,
        older_than: float | timedelta | None = None,
        by: object = None,
        reason: str = "",
    ) -> bool:
        """Free a key over its holder's head, and fence the holder off.

        The holder isn't stopped: it finds out at its next renewal or at its guard.

        Args:
            version: Only this grant; a lock that changed hands is left alone.
            older_than: Only if it has been held longer than this.
            by: Who does it, for the signal: a user, a name.
            reason: Why, for the signal.

        Returns:
            Whether there was something to release and it was released.
        """
        key = arguments.key(key)
        self._for_write = True
        rows = self.filter(key=key).exclude(_STATES[State.FREE])
        if version is not None:
            rows = rows.filter(version=version)
        if older_than is not None:
            age = arguments.duration("older_than", older_than)
            rows = rows.filter(acquired_at__lte=After(UtcNow(), Value(-age)))
        missed = None
        while True:
            row = rows.first()
            # The same one again is a snapshot's, older than what the update sees.
            if row is None or row.version == missed:
                return False
            missed = row.version
            if rows.filter(version=row.version).update(
                version=F("version") + 1,
                hold_count=0,
                acquired_at=None,
                owner="",
                expires_at=UtcNow(),
            ):
                break
        announce_force_release(
            DistributedLock,
            key=key,
            using=self.db,
            owner=row.owner,
            holder=row.holder,
            fencing_token=row.version,
            by=by,
            reason=reason,
        )
        return True

    def stale(self, older_than: float | timedelta) -> LockQuerySet:
        """Return the locks whose key has been free, or overdue, for ``older_than``."""
        age = arguments.duration("older_than", older_than)
        rows: LockQuerySet = self.filter(expires_at__lt=After(UtcNow(), Value(-age)))
        return rows

    def prune(
        self,
        older_than: float | timedelta,
        *,
        batch_size: int = 200,
        progress: Callable[[int], object] | None = None,
    ) -> int:
        """Delete rows whose key has been free, or overdue, for ``older_than``.

        Works in batches of ``batch_size`` rows, each in a transaction of its own that
        locks only what it deletes and passes over rows that are at work, and rests
        after each for as long as that took; on SQLite, which has one writer, longer.

        Args:
            progress: Called after each batch with how many were deleted so far.

        Returns:
            How many rows were deleted.
        """
        self._for_write = True
        stale = self.stale(older_than)
        deleted, after = 0, ""
        while True:
            keys = list(
                stale.filter(key__gt=after)
                .order_by("key")
                .values_list("key", flat=True)[:batch_size]
            )
            if not keys:
                return deleted
            after = keys[-1]
            started = time.monotonic()
            deleted += self._prune(stale.filter(key__in=keys))
            if progress is not None:
                progress(deleted)
            connection = connections[self.db]
            if not connection.in_atomic_block:
                rest = _PRUNE_RESTS.get(connection.vendor, 1)
                time.sleep(rest * (time.monotonic() - started))

    def _prune(self, stale: LockQuerySet) -> int:
        """Delete rows in a transaction that is repeated if the database asks for it."""
        connection = connections[self.db]
        floor = TokenFloor.objects.using(self.db)
        skip = connection.features.has_select_for_update_skip_locked
        give_up = time.monotonic() + 1.0
        ensure_floor(connection)
        while True:
            try:
                with transaction.atomic(using=self.db):
                    # The floor first: an insert that waits for it reads the raised one.
                    floor.select_for_update().get(pk=1)
                    rows = stale.select_for_update(skip_locked=skip)
                    doomed = dict(rows.values_list("key", "version"))
                    if doomed:
                        highest = Value(max(doomed.values()))
                        floor.filter(pk=1).update(value=Greatest(F("value"), highest))
                        doomed_rows = self.model._base_manager.using(self.db)
                        doomed_rows.filter(key__in=doomed)._raw_delete(self.db)
                return len(doomed)
            except DatabaseError as error:
                transient = transactions.is_transient(connection, error)
                if connection.in_atomic_block or not transient:
                    raise
                if time.monotonic() >= give_up:
                    raise
                time.sleep(random.uniform(0.005, 0.03))

    def for_update(
        self,
        key: str,
        *,
        nowait: bool = False,
        skip_locked: bool = False,
        timeout: float | timedelta | None = None,
    ) -> DistributedLock | None:
        """Lock a key's row in the current transaction, until that ends.

        The database holds it; there is no lease. Excludes leases on the same key and
        is excluded by them.

        Args:
            nowait: Raise at once when the key is taken.
            skip_locked: Return ``None`` when the key is taken.
            timeout: How long to wait, seconds or ``timedelta``; ``None`` waits for
                ever. Not together with the other two.

        Raises:
            LockTimeout: The key was taken until the wait ran out. The transaction
                stays usable.
            TransactionManagementError: There is no transaction.
        """
        from . import row_locks

        self._for_write = True
        return row_locks.lock_row(
            self.db,
            arguments.key(key),
            arguments.pessimistic_wait(nowait, skip_locked, timeout),
        )


class LockManager(models.Manager.from_queryset(LockQuerySet)):  # type: ignore[misc]
    """The manager of the lock table, on the database of ``DBLOCKS["default"]``."""

    def get_queryset(self) -> LockQuerySet:
        rows: LockQuerySet = super().get_queryset()
        if self._db is None:
            using = backends.settings[DEFAULT_ALIAS]["OPTIONS"].get("using")
            if using is not None:
                rows = rows.using(using)
        return rows


class DistributedLock(models.Model):
    """A named lock: who has it, until when, under which version.

    Attributes:
        key: What is locked, compared exactly.
        owner: The owner's id; empty when nobody has it.
        holder, note: Who that is and what for, for people; kept after a release.
        hold_count: Acquisitions outstanding.
        version: The fencing token of the latest grant; nothing lowers it.
        acquired_at: Since when, in UTC; ``None`` after a force release.
        expires_at: The key is free when this is in the database's past.
        state, remaining: As :meth:`LockQuerySet.with_state` annotates them.
    """

    key = ExactCharField(_("key"), max_length=255, primary_key=True)
    owner = ExactCharField(_("owner"), max_length=64, blank=True, default="")
    holder = ExactCharField(_("holder"), max_length=255, blank=True, default="")
    note = ExactCharField(_("note"), max_length=255, blank=True, default="")
    hold_count = models.IntegerField(_("hold count"), default=0)
    version = models.BigIntegerField(_("version"), default=0)
    acquired_at = UTCDateTimeField(_("held since"), null=True, blank=True)
    expires_at = UTCDateTimeField(_("expires at"))

    objects = LockManager()

    if TYPE_CHECKING:
        state: str
        remaining: float

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view",)
        permissions = [("force_release_distributedlock", _("Can force release lock"))]
        constraints = [
            GuardConstraint(fields=["key", "version"], name="dblocks_key_version"),
        ]

    def __str__(self) -> str:
        return str(self.key)


class TokenFloor(models.Model):
    """One row: no new lock's token starts at or below ``value``.

    A counter in a row starts again when the row is deleted and made anew. Pruning
    raises this floor first, and the insert of a new lock reads it under a lock.
    """

    value = models.BigIntegerField(default=0)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.value)


# Statements. All values are slots; durations are seconds.

_COLUMNS = [field.attname for field in DistributedLock._meta.concrete_fields]
_MOMENTS = {"acquired_at", "expires_at"}
_READING = ["owner", "holder", "note", "version", "acquired_at"]
_TEXT = ExactCharField()
_INTEGER = models.BigIntegerField()
_MOMENT = UTCDateTimeField()

_KEY, _OWNER, _VERSION = (
    Slot("key", _TEXT),
    Slot("owner", _TEXT),
    Slot("version", _INTEGER),
)
_HOLDER, _NOTE = Slot("holder", _TEXT), Slot("note", _TEXT)
_COUNT = Slot("count", _INTEGER)
_LEASE, _MAX_HOLD = Slot("lease"), Slot("max_hold")
# Who is not queueing lets those pass that are, unless they don't come: the first of
# them may be a process that was stopped.
_NOBODY_BEFORE = Q(expires_at__lte=After(UtcNow(), Value(-PINNED_GRACE))) | Q(
    NobodyQueues(Slot("gate", models.BigIntegerField()))
)
_COOLED = After(F("acquired_at"), Slot("hold_at_least"))

_CURRENT = Q(key=_KEY, owner=_OWNER, version=_VERSION)


def _extended(lease: Any, max_hold: Any) -> Greatest:
    """The later expiry of a held row: never earlier, never past the limit."""
    return Greatest(
        F("expires_at"),
        Least(After(UtcNow(), lease), After(F("acquired_at"), max_hold)),
    )


def _field(name: str) -> models.Field[Any, Any]:
    [field] = [f for f in DistributedLock._meta.concrete_fields if f.attname == name]
    copy: models.Field[Any, Any] = field.clone()
    return copy


def _update(
    connection: BaseDatabaseWrapper, condition: Q, values: dict[str, Any]
) -> tuple[str, Sequence[Any]]:
    query = DistributedLock._base_manager.filter(condition).query.chain(sql.UpdateQuery)
    query.add_update_values(values)
    text, params = query.get_compiler(connection=connection).as_sql()
    return text, params


def _returning(connection: BaseDatabaseWrapper, *names: str) -> str:
    """The clause that returns the row, for the databases that have one."""
    if connection.vendor == "mysql":
        return ""
    columns = []
    for field in DistributedLock._meta.concrete_fields:
        if names and field.attname not in names:
            continue
        column = connection.ops.quote_name(str(field.column))
        if isinstance(field, UTCDateTimeField) and connection.vendor == "postgresql":
            column = f"({column} AT TIME ZONE 'UTC')"
        columns.append(column)
    return " RETURNING " + ", ".join(columns)


_GRANTED: dict[str, Any] = {
    "version": Announced(F("version") + 1),
    "hold_count": 1,
    "holder": _HOLDER,
    "note": _NOTE,
    "acquired_at": UtcNow(),
    "expires_at": After(UtcNow(), _LEASE),
    "owner": _OWNER,
}


@kept
def _grant(connection: BaseDatabaseWrapper) -> Statement:
    return _granting(connection, _NOBODY_BEFORE)


@kept
def _grant_queued(connection: BaseDatabaseWrapper) -> Statement:
    return _granting(connection, Q())


def _granting(connection: BaseDatabaseWrapper, turn: Q) -> Statement:
    """Grant a free key. Another transaction's row lock answers at once: taken."""
    free, prefix = Q(key=_KEY) & _OVER, ""
    if connection.vendor == "postgresql":
        if turn:
            # The gate must not be tried, and so taken, for a key that isn't free.
            free = Q(
                Case(
                    When(_OVER, then=turn),
                    default=False,
                    output_field=models.BooleanField(),
                ),
                key=_KEY,
            )
        free = _unlocked(free)
    elif kind(connection) == "mariadb":
        free &= turn
        prefix = "SET STATEMENT innodb_lock_wait_timeout=0 FOR "
    elif connection.vendor == "mysql":
        free = _unlocked(free & turn)
    text, params = _update(connection, free, _GRANTED)
    return Statement(prefix + text + _returning(connection, "version"), params)


def _unlocked(condition: Q) -> Q:
    rows = DistributedLock._base_manager.filter(condition).values("key")
    return Q(key=Locking(rows, skip_locked=True, materialize=True))


@kept
def _acquire(connection: BaseDatabaseWrapper) -> Statement:
    """Grant a free key, or count one more hold of the owner that has it."""
    condition = Q(key=_KEY) & (_OVER | Q(owner=_OWNER))
    if connection.vendor != "sqlite":
        condition = _unlocked(condition)

    def by_turn(field: str, again: Any) -> Case:
        first = _GRANTED[field]
        return Case(When(_OVER, then=first), default=again, output_field=_field(field))

    text, params = _update(
        connection,
        condition,
        {
            "version": Announced(
                Case(
                    When(_OVER, then=F("version") + 1),
                    default=F("version"),
                    output_field=_INTEGER,
                )
            ),
            "hold_count": by_turn("hold_count", Coalesce(_COUNT, F("hold_count") + 1)),
            "holder": by_turn("holder", F("holder")),
            "note": by_turn("note", F("note")),
            "acquired_at": by_turn("acquired_at", F("acquired_at")),
            "expires_at": by_turn("expires_at", _extended(_LEASE, _MAX_HOLD)),
            "owner": _OWNER,
        },
    )
    return Statement(text + _returning(connection), params)


@kept
def _create(connection: BaseDatabaseWrapper) -> Statement:
    floor = Locking(TokenFloor.objects.filter(pk=1).values("value"), strength="SHARE")
    return _insert(
        connection,
        DistributedLock(
            key=_KEY,
            owner=_OWNER,
            holder=_HOLDER,
            note=_NOTE,
            hold_count=1,
            version=Announced(floor + 1, output_field=_INTEGER),
            acquired_at=UtcNow(),
            expires_at=After(UtcNow(), _LEASE),
        ),
        _returning(connection),
    )


@kept
def _create_floor(connection: BaseDatabaseWrapper) -> Statement:
    return _insert(connection, TokenFloor(pk=1, value=0))


@kept
def _create_free(connection: BaseDatabaseWrapper) -> Statement:
    floor = Locking(TokenFloor.objects.filter(pk=1).values("value"), strength="SHARE")
    return _insert(
        connection,
        DistributedLock(key=_KEY, version=floor, expires_at=UtcNow()),
    )


def _insert(
    connection: BaseDatabaseWrapper, row: models.Model, returning: str = ""
) -> Statement:
    # MySQL's INSERT IGNORE would hide every other error as well.
    ignore = None if connection.vendor == "mysql" else OnConflict.IGNORE
    query = sql.InsertQuery(type(row), on_conflict=ignore)
    query.insert_values(row._meta.concrete_fields, [row])
    [(text, params)] = query.get_compiler(connection=connection).as_sql()
    return Statement(text + returning, params)


@kept
def _read(connection: BaseDatabaseWrapper) -> Statement:
    rows = DistributedLock._base_manager.filter(key=_KEY).values_list(
        *_READING, SecondsUntil("expires_at")
    )
    return Statement(*rows.query.get_compiler(connection=connection).as_sql())


@kept
def _free(connection: BaseDatabaseWrapper) -> Statement:
    freed = {"expires_at": UtcNow(), "owner": "", "hold_count": 0}
    return Statement(*_update(connection, _CURRENT, freed))


@kept
def _release(connection: BaseDatabaseWrapper) -> Statement:
    left = Coalesce(_COUNT, F("hold_count") - 1, output_field=_INTEGER)
    over = When(LessThanOrEqual(left, 0), then=Greatest(UtcNow(), _COOLED))
    return Statement(
        *_update(
            connection,
            _CURRENT,
            {
                "expires_at": Case(over, default=F("expires_at"), output_field=_MOMENT),
                "owner": Case(
                    When(LessThanOrEqual(left, 0), then=Value("")),
                    default=F("owner"),
                    output_field=_TEXT,
                ),
                "hold_count": left,
            },
        )
    )


@kept
def _renew(
    connection: BaseDatabaseWrapper, size: int, wait: bool, overdue: bool
) -> Statement:
    grants = [
        (
            Slot(f"key{n}", _TEXT),
            Slot(f"owner{n}", _TEXT),
            Slot(f"version{n}", _INTEGER),
        )
        for n in range(size)
    ]
    current = Q(
        RowIn(["key", "owner", "version"], grants), key__in=[key for key, *_ in grants]
    )
    if not overdue:
        current &= ~_OVER
    extended = {"expires_at": _extended(_LEASE, _MAX_HOLD)}
    rows = DistributedLock._base_manager.filter(current).values("key")
    if connection.vendor == "mysql":
        if not wait:
            return _renew_joined(connection, rows[:size], extended)
        return Statement(*_update(connection, current, extended))
    if connection.vendor == "postgresql" and not wait:
        locking = Locking(rows, strength="NO KEY UPDATE", skip_locked=True)
        current = Q(AnyOf("key", locking))
    text, params = _update(connection, current, extended)
    return Statement(text + _returning(connection, "key", "version"), params)


def _renew_joined(
    connection: BaseDatabaseWrapper,
    rows: models.QuerySet[Any, Any],
    extended: dict[str, Any],
) -> Statement:
    """Renew on MySQL and MariaDB, where only this shape never waits for a row.

    The optimizer must find the unlocked rows first and come to the others by the
    primary key, or it locks what it passes, and the ``LIMIT`` keeps the derived table
    from being merged, without ``SKIP LOCKED``, into the update.
    """
    text, params = _update(connection, Q(), extended)
    inner, inner_params = rows.query.get_compiler(connection=connection).as_sql()
    quote = connection.ops.quote_name
    table, key, due = quote(DistributedLock._meta.db_table), quote("key"), quote("due")
    by_primary = f"{table} FORCE INDEX (PRIMARY)"
    inner = inner.replace(f"FROM {table}", f"FROM {by_primary}", 1)
    text = text.replace(
        f"UPDATE {table} SET",
        f"UPDATE ({inner} FOR UPDATE SKIP LOCKED) AS {due} "
        f"STRAIGHT_JOIN {by_primary} ON {table}.{key} = {due}.{key} SET",
        1,
    )
    return Statement(text, [*inner_params, *params])


@kept
def _pin(connection: BaseDatabaseWrapper) -> Statement:
    if connection.vendor == "sqlite":
        # There is no row lock; the database's only write lock does as well.
        return Statement(*_update(connection, _CURRENT, {"version": F("version")}))
    rows = DistributedLock._base_manager.filter(_CURRENT).values("version")
    text, params = rows.query.get_compiler(connection=connection).as_sql()
    strength = "KEY SHARE" if connection.vendor == "postgresql" else "UPDATE"
    return Statement(f"{text} FOR {strength}", params)


def _affected(
    connection: BaseDatabaseWrapper, statement: Statement, values: dict[str, object]
) -> int:
    with statement.execute(connection, values) as cursor:
        affected: int = cursor.rowcount
        return affected


def _returned(
    connection: BaseDatabaseWrapper, statement: Statement, values: dict[str, object]
) -> tuple[Any, ...] | None:
    """Run what grants: the row, on MySQL and MariaDB ``(version,)``, or ``None``."""
    with statement.execute(connection, values) as cursor:
        if cursor.description is None:
            return (getattr(cursor, "lastrowid", 0),) if cursor.rowcount else None
        rows = cursor.fetchall()
    return rows[0] if rows else None


def _granted(
    connection: BaseDatabaseWrapper, statement: Statement, values: dict[str, object]
) -> tuple[Any, ...] | None:
    """Run an update that grants; ``None`` when the row isn't free or is locked."""
    try:
        return _returned(connection, statement, values)
    except OperationalError as error:
        if kind(connection) == "mariadb" and error.args[0] == _LOCK_WAIT_TIMEOUT:
            return None
        raise


def _inserted(
    connection: BaseDatabaseWrapper, statement: Statement, values: dict[str, object]
) -> tuple[Any, ...] | None:
    """Run an insert; ``None`` when the row is there already."""
    savepoint = connection.savepoint() if connection.in_atomic_block else None
    try:
        row = _returned(connection, statement, values)
    except IntegrityError:
        if savepoint:
            connection.savepoint_rollback(savepoint)
        return None
    if savepoint:
        connection.savepoint_commit(savepoint)
    return row


def take(
    connection: BaseDatabaseWrapper,
    *,
    key: str,
    owner: str,
    lease: float,
    holder: str = "",
    note: str = "",
    count: int | None = None,
    max_hold: float = FOREVER,
    queued: bool = True,
    reenter: bool = True,
) -> tuple[Any, ...] | Reading:
    """Grant a key to an owner, or read who has it.

    Args:
        queued: The caller has the key's gate, or there are no gates; otherwise it
            lets those pass that queue at the gate.
        reenter: The owner may hold the key already, and then holds it once more.
        count: The number of holds that the owner has with this one; ``None`` counts
            up. Who knows it can ask again after a lost reply and have one hold.
        max_hold: No re-entry moves the expiry beyond this long after acquisition.

    Returns:
        The granted row, on MySQL and MariaDB ``(version,)``; or the reading of the
        row that somebody else has. A reading that is overdue means that a
        transaction has the row locked.
    """
    values: dict[str, object] = {
        "key": key,
        "owner": owner,
        "lease": min(lease, max_hold),
        "holder": holder,
        "note": note,
        "count": count,
        "max_hold": max_hold,
    }
    if reenter:
        statement = _acquire(connection)
    elif queued or connection.vendor == "sqlite":
        statement = _grant_queued(connection)
    else:
        statement = _grant(connection)
        values["gate"] = gates.name(connection, key)
    for _attempt in range(3):
        row = _granted(connection, statement, values)
        if row is not None:
            return row
        seen = read(connection, key)
        if seen is not None:
            return seen
        row = _inserted(connection, _create(connection), values)
        if row is not None:
            return row
        ensure_floor(connection)
    # The row is there and the snapshot of the caller's transaction can't see it.
    return Reading("", "", "", 0, None, remaining=1.0)


def ensure_floor(connection: BaseDatabaseWrapper) -> None:
    """Make the floor's row if a flush of the database removed it."""
    _inserted(connection, _create_floor(connection), {})


def ensure_row(connection: BaseDatabaseWrapper, key: str) -> None:
    """Make a free row for a key that has none."""
    while read(connection, key) is None:
        if _inserted(connection, _create_free(connection), {"key": key}) is None:
            ensure_floor(connection)


def read(connection: BaseDatabaseWrapper, key: str) -> Reading | None:
    """Read a row without locking it; ``None`` when the key has none."""
    with _read(connection).execute(connection, {"key": key}) as cursor:
        rows = cursor.fetchall()
    return _reading(rows[0]) if rows else None


def read_all(
    connection: BaseDatabaseWrapper, keys: Sequence[str]
) -> dict[str, Reading]:
    """Read rows without locking them, by key; keys without a row are left out."""
    rows = DistributedLock._base_manager.filter(key__in=keys).values_list(
        "key", *_READING, SecondsUntil("expires_at")
    )
    query = rows.query.get_compiler(connection=connection).as_sql()
    with connection.cursor() as cursor:
        cursor.execute(*query)
        return {key: _reading(row) for key, *row in cursor.fetchall()}


def _reading(row: Sequence[Any]) -> Reading:
    owner, holder, note, version, acquired_at, remaining = row
    return Reading(owner, holder, note, version, as_utc(acquired_at), float(remaining))


def version_of(row: tuple[Any, ...]) -> int:
    """Return the token in what :func:`take` granted."""
    version: int = row[0] if len(row) == 1 else row[_COLUMNS.index("version")]
    return version


def release(
    connection: BaseDatabaseWrapper,
    grant: Grant,
    *,
    count: int | None = None,
    hold_at_least: float = 0.0,
) -> bool:
    """Give back one hold, or all but ``count``; return whether it was current."""
    values: dict[str, object] = grant._asdict()
    if count == 0 and not hold_at_least:
        return bool(_affected(connection, _free(connection), values))
    values |= {"count": count, "hold_at_least": hold_at_least}
    return bool(_affected(connection, _release(connection), values))


def pin(connection: BaseDatabaseWrapper, grant: Grant) -> bool:
    """Verify a grant in the current transaction and keep others off until its end."""
    with _pin(connection).execute(connection, grant._asdict()) as cursor:
        if connection.vendor == "sqlite":
            return bool(cursor.rowcount)
        return bool(cursor.fetchall())


def renew(
    connection: BaseDatabaseWrapper,
    renewals: Sequence[Renewal],
    *,
    wait: bool = False,
    overdue: bool = False,
) -> set[Grant]:
    """Extend grants, a few hundred alike in one statement; return those that were.

    Rows that a transaction has locked are passed over, unless told to ``wait``: one
    pinned row must not make all leases of a process lapse. Overdue ones are only
    extended if told so, by who knows that nobody else can see the row.
    """
    alike: dict[tuple[float, float], list[Grant]] = {}
    for renewal in renewals:
        terms = renewal.lease, renewal.max_hold
        alike.setdefault(terms, []).append(renewal.grant)
    renewed: set[Grant] = set()
    for (lease, max_hold), grants in alike.items():
        values: dict[str, object] = {"lease": lease, "max_hold": max_hold}
        for start in range(0, len(grants), _BATCH_SIZES[-1]):
            batch = grants[start : start + _BATCH_SIZES[-1]]
            renewed |= _renew_batch(connection, batch, values, wait, overdue)
    return renewed


def _renew_batch(
    connection: BaseDatabaseWrapper,
    grants: list[Grant],
    values: dict[str, object],
    wait: bool,
    overdue: bool,
) -> set[Grant]:
    size = next(size for size in _BATCH_SIZES if size >= len(grants))
    # The last one once more in every slot that is left over.
    for number, grant in enumerate(grants + grants[-1:] * (size - len(grants))):
        for name, value in grant._asdict().items():
            values[f"{name}{number}"] = value
    statement = _renew(connection, size, wait, overdue)
    if connection.vendor != "mysql":
        # A key alone may be the row of the successor, which is renewed along.
        with statement.execute(connection, values) as cursor:
            renewed = {(key, version) for key, version in cursor.fetchall()}
        return {grant for grant in grants if (grant.key, grant.version) in renewed}
    affected = _affected(connection, statement, values)
    if affected == len(grants):
        return set(grants)
    if len(grants) == 1:
        return set()
    # The count doesn't say which are gone or locked.
    middle = len(grants) // 2
    return _renew_batch(
        connection, grants[:middle], values, wait, overdue
    ) | _renew_batch(connection, grants[middle:], values, wait, overdue)


def make_older(connection: BaseDatabaseWrapper, seconds: float) -> None:
    """Move all moments into the past, as if that much time had gone by; for tests."""
    ago = Value(-seconds)
    older = {name: After(F(name), ago) for name in sorted(_MOMENTS)}
    _affected(connection, Statement(*_update(connection, Q(), older)), {})
