"""Locks in a table of the database that the project already runs."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from types import ModuleType
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import (
    DEFAULT_DB_ALIAS,
    DatabaseError,
    NotSupportedError,
    connections,
    router,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from .. import gates, transactions
from ..exceptions import LeaseLost, LockError
from ..waiting import Gate, local_pause
from .base import BaseBackend, Grant, Reading, Renewal, RenewalSession, Renewed, Request


class DatabaseBackend(BaseBackend):
    """One row a key, one conditional ``UPDATE`` a verb, the database's clock.

    Option ``using``: the database alias; by default the router's for writing. Option
    ``session_locks``: ``False`` where the server's session locks can't be relied on
    (behind a pooler that gives each transaction another session); by default that is
    found out as far as it can be.
    """

    has_guard = True
    option_names = frozenset({"using", "session_locks"})

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        super().__init__(alias, config)
        if not isinstance(self.options.get("session_locks", True), bool):
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}]['OPTIONS']: session_locks must be True or False, "
                f"not {self.options['session_locks']!r}."
            )
        using = self.options.get("using")
        if using is not None and using not in connections:
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}]: there is no database {using!r} in DATABASES."
            )

    @cached_property
    def _table(self) -> ModuleType:
        # The models can be imported only once the apps are ready.
        from .. import models

        return models

    @property
    def using(self) -> str:
        """The alias of the database that the locks are in."""
        alias: str | None = self.options.get("using")
        if alias is not None:
            return alias
        if not router.routers:
            return DEFAULT_DB_ALIAS
        return str(router.db_for_write(self._table.DistributedLock))

    def try_acquire(self, request: Request, patience: float) -> Grant | Reading:
        using, models = self.using, self._table
        if transactions.has_row_lock(using, request.key):
            raise LockError(
                f"The row of the lock {request.key!r} is locked by this thread's own "
                f"transaction: a lease on it would wait for itself. Use one form, "
                f"distributed_lock or transaction_lock, not both."
            )

        def take(connection: BaseDatabaseWrapper, doubtful: bool) -> Any:
            if connection.in_atomic_block:
                _catch_up(connection)
            if request.at_once and connection.vendor == "sqlite":
                # Its one writer may be at work for long; who is refused and won't
                # wait is told by reading.
                seen = models.read(connection, request.key)
                if seen and seen.remaining > 0 and seen.owner != request.owner:
                    return seen
            return models.take(
                connection,
                key=request.key,
                owner=request.owner,
                lease=request.lease,
                holder=request.holder,
                note=request.note,
                count=request.count,
                max_hold=request.max_hold,
                queued=request.queued or not self._has_gates(connection),
                # After a lost reply the key may be ours.
                reenter=request.reenter or doubtful,
            )

        row = transactions.run(using, take, patience=patience)
        transactions.warn_of_snapshot(using)
        if isinstance(row, Reading):
            return row
        return Grant(request.key, request.owner, models.version_of(row))

    def read(self, key: str) -> Reading | None:
        models = self._table

        def read(connection: BaseDatabaseWrapper, doubtful: bool) -> Reading | None:
            _catch_up(connection)
            reading: Reading | None = models.read(connection, key)
            return reading

        return transactions.run(self.using, read, writes=False)

    def renew(self, renewals: Sequence[Renewal], patience: float = 1.0) -> Renewed:
        def renew(connection: BaseDatabaseWrapper, doubtful: bool) -> Renewed:
            overdue = transactions.in_test_case(connection)
            return _renew(connection, renewals, overdue=overdue)

        return transactions.run(self.using, renew, patience=patience)

    def release(
        self,
        grant: Grant,
        *,
        count: int | None,
        hold_at_least: float,
        patience: float,
    ) -> bool:
        models = self._table

        def release(connection: BaseDatabaseWrapper, doubtful: bool) -> bool:
            if connection.in_atomic_block:
                _catch_up(connection)
            if doubtful and count is None:
                # Counting down twice would free the lock under a co-owner.
                raise DatabaseError(
                    f"The answer to the release of {grant.key!r} was lost; whether "
                    f"its holds were counted down is not known."
                )
            if models.release(
                connection, grant, count=count, hold_at_least=hold_at_least
            ):
                return True
            if not doubtful:
                return False
            # Freed, and not taken over since, is what our lost release leaves.
            seen = models.read(connection, grant.key)
            return seen is not None and (seen.owner, seen.version) == (
                "",
                grant.version,
            )

        return transactions.run(self.using, release, patience=patience)

    def _has_gates(self, connection: BaseDatabaseWrapper) -> bool:
        return self.options.get("session_locks", True) and gates.available(connection)

    def gate(self, key: str) -> Gate | None:
        if not self._has_gates(connections[self.using]):
            return None
        return gates.SessionGate(self.using, key)

    def pause(self, known_for: float, *, alone: bool) -> float:
        if connections[self.using].vendor == "sqlite":
            return local_pause(known_for)
        return super().pause(known_for, alone=alone)

    def renewal_session(self) -> RenewalSession:
        return _DatabaseRenewalSession(self)

    def is_in_database(self, using: str) -> bool:
        return using == self.using

    def can_write(self) -> bool:
        connection = connections[self.using]
        return connection.vendor != "sqlite" or not (
            connection.in_atomic_block and not transactions.in_test_case(connection)
        )

    def guard(self, grant: Grant, using: str | None) -> None:
        if using is not None and using != self.using:
            raise NotSupportedError(
                f"The lock {grant.key!r} is in the database {self.using!r} and can't "
                f"be guarded in a transaction on {using!r}. Use atomic=True, or a "
                f"FencedModel."
            )
        connection = connections[self.using]
        if not transactions.in_transaction(connection):
            if transactions.transaction_is_open():
                raise NotSupportedError(
                    f"The lock {grant.key!r} is in the database {self.using!r}, where "
                    f"no transaction is open, and can't be guarded in one on another "
                    f"database. Use atomic=True, or a FencedModel."
                )
            raise TransactionManagementError(
                f"guard() needs an open transaction on the database {self.using!r}: "
                f"call it inside transaction.atomic(), or use atomic=True."
            )
        self._verify(connection, grant)

    def pin(self, grant: Grant, aliases: Sequence[str], pins: ExitStack) -> None:
        if self.using in aliases:
            self._verify(connections[self.using], grant)
            return
        connection = transactions.separate_connection(self.using)
        pins.callback(transactions.close, connection)
        connection.ensure_connection()
        connection.set_autocommit(
            False, force_begin_transaction_with_broken_autocommit=True
        )
        pins.callback(connection.rollback)
        self._verify(connection, grant)

    def _verify(self, connection: BaseDatabaseWrapper, grant: Grant) -> None:
        models = self._table
        try:
            current = models.pin(connection, grant)
        except DatabaseError as error:
            if not transactions.is_serialization_failure(connection, error):
                raise
            current = False
        if not current:
            raise LeaseLost(
                grant.key,
                fencing_token=grant.version,
                reason=self._reason_or_taken(grant),
            )

    def _reason_or_taken(self, grant: Grant) -> str:
        try:
            seen = self.read(grant.key)
        except DatabaseError:
            seen = None
        return (seen and seen.reason_for(grant)) or "taken"

    def test_connection(self) -> object:
        connection = connections[self.using]
        return connection if transactions.in_test_case(connection) else None


class _DatabaseRenewalSession(RenewalSession):
    """Renews on a connection of its own, whose waits are short."""

    def __init__(self, backend: DatabaseBackend) -> None:
        super().__init__(backend)
        self._using = backend.using
        self._connection: BaseDatabaseWrapper | None = None

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        if self._connection is None:
            options = _SHORT_WAITS.get(connections[self._using].vendor, {})
            self._connection = transactions.separate_connection(self._using, **options)
            if self._connection.vendor == "sqlite":
                self._connection.settings_dict["OPTIONS"]["timeout"] = 0
        connection = self._connection
        give_up = time.monotonic() + _SQLITE_PATIENCE
        while True:
            try:
                return _renew(connection, renewals)
            except Exception as error:
                if not transactions.is_transient(connection, error):
                    self.close()
                    raise
                if connection.vendor != "sqlite" or time.monotonic() >= give_up:
                    raise
                # SQLite's own wait looks ever more seldom, ten times a second in the
                # end, and never finds the gap between two writers at work.
                time.sleep(random.uniform(0.001, 0.005))

    def close(self) -> None:
        if self._connection is not None:
            transactions.close(self._connection)
            self._connection = None
        connections.close_all()


_SQLITE_PATIENCE = 1.0
"""Seconds for which a renewal tries to get at SQLite's one writer's lock."""

# Seconds after which a renewal thread gives a silent server up and connects anew.
_SHORT_WAITS: dict[str, dict[str, object]] = {
    "mysql": {"connect_timeout": 5, "read_timeout": 5, "write_timeout": 5},
    "postgresql": {"connect_timeout": 5, "tcp_user_timeout": 5000},
}


def _renew(
    connection: BaseDatabaseWrapper,
    renewals: Sequence[Renewal],
    *,
    overdue: bool = False,
) -> Renewed:
    from .. import models

    outcome = Renewed(models.renew(connection, renewals, overdue=overdue))
    rest = [r.grant for r in renewals if r.grant not in outcome.extended]
    if rest:
        seen = models.read_all(connection, [grant.key for grant in rest])
        for grant in rest:
            reading = seen.get(grant.key)
            reason = reading.reason_for(grant) if reading else "expired"
            if reason is not None:
                outcome.lost[grant] = reason
    return outcome


def _catch_up(connection: BaseDatabaseWrapper) -> None:
    """Renew what this ``TestCase`` holds: no other thread can see its rows."""
    if transactions.in_test_case(connection):
        from ..renewal import timekeeper

        holds = timekeeper.owed(connection)
        if holds:
            renewals = [hold.renewal() for hold in holds]
            outcome = _renew(connection, renewals, overdue=True)
            for hold in holds:
                if hold.grant in outcome.lost:
                    hold.lose(outcome.lost[hold.grant])
