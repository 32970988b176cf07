"""The guard: verifies grants in a transaction, and pins them until its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from django.db import DatabaseError, NotSupportedError, connections
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.transaction import TransactionManagementError

from ...exceptions import LeaseLost
from ...permits import apart
from ..base import BaseBackend
from ..values import Grant, Reading
from . import dialects, table, transactions
from .connections import reading_beside, run
from .dialects.sqlite import BusyTimeout
from .own_connections import is_pinning, pin_connection, unpin
from .row_locks import StaleSnapshot, hides_rows

logger = logging.getLogger("dblocks")


class DatabaseGuards(BaseBackend):
    """The part of the engine that guards the caller's transactions."""

    has_guard = True

    def guard(self, grants: Sequence[Grant], using: str | None) -> None:
        key = grants[0].key
        if using is not None and using != self.using:
            raise NotSupportedError(
                f"The lock {key!r} is in the database {self.using!r} and can't "
                f"be guarded in a transaction on {using!r}. Use atomic=True, or a "
                f"FencedModel."
            )
        connection = connections[self.using]
        if not transactions.in_transaction(connection):
            if transactions.transaction_is_open():
                raise NotSupportedError(
                    f"The lock {key!r} is in the database {self.using!r}, where "
                    f"no transaction is open, and can't be guarded in one on another "
                    f"database. Use atomic=True, or a FencedModel."
                )
            raise TransactionManagementError(
                f"guard() needs an open transaction on the database {self.using!r}: "
                f"call it inside transaction.atomic(using={self.using!r}), or use "
                f"atomic=True."
            )
        self._verify(connection, grants)

    def guard_commits(self, grants: Sequence[Grant], aliases: Sequence[str]) -> None:
        connection = connections[self.using]
        if transactions.in_test_case(connection) or self._ends_last(aliases):
            self._verify(connection, grants, alone=set(aliases) == {self.using})
        else:
            # Raises with autocommit off, where nobody would see until when to pin.
            transactions.transaction_is_open()
            if dialects.of(connection).certifies:
                # The pinning transaction is rolled back, so other nodes never see it.
                self._touch(grants)
            self._pin(grants)

    def _pin(self, grants: Sequence[Grant]) -> None:
        """Verify and pin grants until the caller's last transaction has ended."""
        has_others = is_pinning(self.using)
        try:
            self._verify(pin_connection(self.using), grants)
        except BaseException as error:
            if not has_others:
                unpin(self.using)
            elif isinstance(error, DatabaseError):
                # The error may have unpinned rows that guard these transactions' work.
                for own in connections.all(initialized_only=True):
                    if transactions.in_transaction(own):
                        transactions.doom(own)
            raise

    def _ends_last(self, aliases: Sequence[str]) -> bool:
        """Tell whether the caller's transaction here outlasts those that now commit.

        Raises:
            TransactionManagementError: It may end earlier, and SQLite allows no other
                transaction to pin the rows.
        """
        connection = connections[self.using]
        can_pin = dialects.of(connection).has_row_locks
        if not connection.in_atomic_block or (can_pin and connection.needs_rollback):
            return False
        # With several databases, the first one commits last.
        if self.using == aliases[0]:
            return True
        if self.using in aliases:
            return not can_pin
        outermost = [transactions.is_outermost(connections[a]) for a in aliases]
        if not can_pin and not all(outermost):
            raise TransactionManagementError(
                f"The commit can't be guarded: the transaction on {self.using!r}, "
                f"where the lock is, may end before the outermost one on "
                f"{', '.join(map(repr, aliases))}, and SQLite has one writer. Leave "
                f"out the one on {self.using!r}."
            )
        return all(outermost)

    def _verify(
        self, connection: Connection, grants: Sequence[Grant], *, alone: bool = False
    ) -> None:
        """Verify and pin grants.

        Args:
            alone: The connection's transaction commits next, and no other one with it.
        """
        dialect = dialects.of(connection)
        missing, error = list(grants), None
        blame = partial(self._blame, grants)
        if dialect.certifies and connection is connections[self.using]:
            # A pinning transaction is never committed.
            transactions.if_commit_fails(connection.alias, blame)
        try:
            missing = table.pin(connection, grants)
        except DatabaseError as raised:
            transactions.was_ended(connection, raised)
            blame(raised)
            if not dialect.is_stale_snapshot(raised) and not dialect.is_busy(raised):
                raise
            error = raised
        if not missing:
            return
        lost, reason = self._first_lost(connection, missing)
        if error is None and reason is None and _is_hidden(connection, lost):
            error = StaleSnapshot(
                f"The guard can't see the row of the lock {lost.key!r} as it is: this "
                f"transaction's snapshot is older than the lease. Take the lock before "
                f"the transaction reads anything."
            )
        if error is None or reason is not None:
            # If this transaction itself ended the grant, only a read inside shows that.
            seen = table.read(connection, lost.key) if reason is None else None
            own = None if seen is None else seen.reason_for(lost)
            raise _lease_lost(lost, reason or own or "taken")
        if dialect.has_row_locks or not alone:
            raise error
        # SQLite refused the write, because another transaction writes or has written:
        # so this one has written nothing, and may commit. If it goes on after this
        # block, it must have read the grants: else it could write after a take-over.
        if not transactions.is_outermost(connection) and not _sees(connection, grants):
            raise error

    def _blame(self, grants: Sequence[Grant], error: DatabaseError) -> None:
        """Raise ``LeaseLost`` if a transaction lost a conflict over these grants.

        A node may learn of the next grant only when a transaction commits.
        """
        dialect = dialects.known(connections[self.using])
        if not dialect.certifies or not dialect.is_collision(error):
            return
        try:
            self._touch(grants)
        except DatabaseError:
            # The answer is unknown: the database's error is raised.
            logger.debug("asking the cluster failed", exc_info=True)

    def _touch(self, grants: Sequence[Grant]) -> None:
        """Make sure that all nodes agree that these grants are current.

        Raises:
            LeaseLost: They don't.
        """
        connection = connections[self.using]
        if run(connection, table.touch_current, grants):
            return
        lost, reason = self._first_lost(connection, grants)
        raise _lease_lost(lost, reason or "taken")

    def _first_lost(
        self, connection: Connection, grants: Sequence[Grant]
    ) -> tuple[Grant, str | None]:
        """Return the first of some grants that is lost, and why, as far as known."""
        seen = self._seen_beside(connection, grants)
        if seen is None:
            return _first_lost_within(connection, grants)
        for grant in grants:
            it = seen.get(grant.key)
            if reason := "taken" if it is None else it.reason_for(grant):
                return grant, reason
        return grants[0], None

    def _seen_beside(
        self, connection: Connection, grants: Sequence[Grant]
    ) -> dict[str, Reading] | None:
        """Read what the caller's transaction can't see, or mustn't read yet.

        Returns ``None`` if it can't be read.
        """
        keys = [grant.key for grant in grants]
        try:
            if dialects.of(connection).has_row_locks:
                return self.read_all(keys)
            with reading_beside(connection) as beside:
                return table.read_all(beside, keys)
        except DatabaseError:
            logger.debug("reading beside a transaction failed", exc_info=True)
            return None


def _is_hidden(connection: Connection, grant: Grant) -> bool:
    """Tell whether a transaction sees the row only as it was before the grant."""
    if not hides_rows(connection):
        return False
    return _predates(table.read(connection, grant.key) or Reading(), grant)


def _first_lost_within(
    connection: Connection, grants: Sequence[Grant]
) -> tuple[Grant, str | None]:
    """Look in the transaction itself, on SQLite, while others keep readers out.

    With a rollback journal nothing has changed since it began to read.
    """
    if not dialects.of(connection).has_row_locks:
        with suppress(DatabaseError), BusyTimeout(connection, 0.0):
            seen = table.read_all(connection, [grant.key for grant in grants])
            for grant in grants:
                it = seen.get(grant.key, Reading())
                # Overdue alone isn't lost.
                if not it.is_of(grant) and not _predates(it, grant):
                    return grant, it.reason_for(grant)
    return grants[0], None


def _sees(connection: Connection, grants: Sequence[Grant]) -> bool:
    """Tell whether a transaction on SQLite has read that grants are current.

    From then on it can write only as long as that is so.
    """
    with suppress(DatabaseError), BusyTimeout(connection, 0.0):
        seen = table.read_all(connection, [grant.key for grant in grants])
        return all(seen.get(g.key, Reading()).is_of(g) for g in grants)
    return False


def _predates(seen: Reading, grant: Grant) -> bool:
    """Tell whether a row was read as it was before a grant."""
    return (seen.version or 0) < (grant.version or 0)


def _lease_lost(grant: Grant, reason: str) -> LeaseLost:
    key, version = apart(grant.key)[0], grant.version
    return LeaseLost(key, fencing_token=version, reason=reason)
