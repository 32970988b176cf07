"""Locks in the memory of one process, for tests."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from django.core.checks import CheckMessage

from .. import clock, forks
from ..permits import apart, row_key, row_keys
from .base import BaseBackend
from .messages import warning
from .values import (
    FOREVER,
    Described,
    Entry,
    Grant,
    Granted,
    Reading,
    Renewal,
    Renewed,
    Request,
    first_free,
)


@dataclass(frozen=True)
class _Row:
    """A key's state; times are of the local clock."""

    version: int
    expires_at: float
    min_until: float = 0.0
    max_until: float = FOREVER
    acquired_at: float | None = None
    owner: str = ""
    holder: str = ""
    note: str = ""
    hold_count: int = 0
    requested_at: float | None = None


class _Table:
    """The locks of one alias, guarded by one mutex.

    Tokens start above those of all rows that were ever cleared away.
    """

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.rows: dict[str, _Row] = {}
        self.floor = 0

    def row(self, key: str) -> _Row:
        return self.rows.get(key) or _Row(version=self.floor, expires_at=float("-inf"))


_tables: dict[str, _Table] = {}


def _after_fork_in_child() -> None:
    # Another thread may have held the mutex at the moment of the fork.
    for table in _tables.values():
        table.mutex = threading.RLock()


forks.in_child(_after_fork_in_child)


class LocMemBackend(BaseBackend):
    """Locks in the memory of this process: one table per alias, the process's clock.

    Keeps the contract of the database backend within one process, with fencing tokens
    but without a guard, and needs no database. What is held outlives the
    ``override_settings`` block in which it was taken.
    """

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        super().__init__(alias, config)
        self._table = _tables.setdefault(alias, _Table())

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        with self._table.mutex:
            now = clock.monotonic()
            key = self._row_key(request, now)
            row = self._table.row(key)
            again = row.expires_at > now
            if again and row.owner != request.owner:
                return first_free({key: _reading(row, now)}, [key])
            grant = Grant(key, request.owner, row.version + (not again))
            if again:
                # In this call, a signal handler may change the row, or end the grant.
                lost = request.forfeits(grant)
                row = self._table.row(key)
                if (row.owner, row.version) != (grant.owner, grant.version):
                    return self.try_acquire(request, patience)
                counted = row.hold_count - lost + 1 if row.hold_count > lost else 1
                row = replace(_extended(row, now, request.lease), hold_count=counted)
            else:
                row = _Row(
                    version=row.version + 1,
                    expires_at=now + min(request.lease, request.max_hold),
                    min_until=now + request.hold_at_least,
                    max_until=now + request.max_hold,
                    acquired_at=now,
                    owner=request.owner,
                    holder=request.holder,
                    note=request.note,
                    hold_count=1,
                )
            self._table.rows[key] = row
            return Granted(grant, row.max_until - now, again=again)

    def _row_key(self, request: Request, now: float) -> str:
        """Return the key of the row that the owner has, or can have first."""
        first = row_key(request.key, request.permit)

        def preference(key: str) -> tuple[bool, float, bool]:
            row = self._table.row(key)
            is_mine = row.owner == request.owner and row.expires_at > now
            return not is_mine, max(row.expires_at, now), key != first

        return min(row_keys(request.key, request.permits), key=preference)

    def reenter(self, renewal: Renewal, count: int | None, patience: float) -> Renewed:
        with self._table.mutex:
            outcome = self.renew([renewal])
            if renewal.grant in outcome.extended:
                row = self._table.row(renewal.grant.key)
                count = row.hold_count + 1 if count is None else count
                self._table.rows[renewal.grant.key] = replace(row, hold_count=count)
        return outcome

    def read_all(
        self, keys: Sequence[str], patience: float | None = None
    ) -> dict[str, Reading]:
        with self._table.mutex:
            now, rows = clock.monotonic(), self._table.rows
            return {key: _reading(rows[key], now) for key in keys if key in rows}

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        outcome = Renewed()
        with self._table.mutex:
            now = clock.monotonic()
            for grant, lease in renewals:
                row = self._table.row(grant.key)
                reason = _reading(row, now).reason_for(grant)
                if reason is None:
                    self._table.rows[grant.key] = _extended(row, now, lease)
                    outcome.extended.add(grant)
                    if row.requested_at is not None:
                        outcome.requested.add(grant)
                else:
                    outcome.lost[grant] = reason
        return outcome

    def release(self, grant: Grant, *, count: int | None, deadline: float) -> bool:
        with self._table.mutex:
            row = self._table.row(grant.key)
            if (row.owner, row.version) != (grant.owner, grant.version):
                return False
            left = row.hold_count - 1 if count is None else count
            row = replace(row, hold_count=left)
            if left <= 0:
                free_at = max(clock.monotonic(), row.min_until)
                row = replace(row, owner="", expires_at=free_at, requested_at=None)
            self._table.rows[grant.key] = row
            return True

    def undo_all(self, grants: Sequence[Grant]) -> None:
        with self._table.mutex:
            for grant in grants:
                row = self._table.row(grant.key)
                if (row.owner, row.version) == (grant.owner, grant.version):
                    self._table.rows[grant.key] = replace(row, min_until=0.0)
            super().undo_all(grants)

    def entries(self, key: str | None = None) -> list[Entry]:
        with self._table.mutex:
            now = clock.monotonic()
            rows = list(self._table.rows.items())
        return [
            _entry(name, row, now)
            for name, row in rows
            if key in (None, apart(name)[0])
        ]

    def end_grant(
        self, row_key: str, version: int | None, age: float
    ) -> Described | None:
        with self._table.mutex:
            now = clock.monotonic()
            row = self._table.row(row_key)
            free = not row.owner and row.expires_at <= now
            if free or version not in (None, row.version):
                return None
            if row.acquired_at is None or now - row.acquired_at < age:
                return None
            self._table.rows[row_key] = _Row(
                row.version + 1, expires_at=now, holder=row.holder, note=row.note
            )
        return row.owner, row.holder, row.version

    def ask_holder(self, row_key: str, version: int | None) -> Described | None:
        with self._table.mutex:
            now = clock.monotonic()
            row = self._table.row(row_key)
            is_held = row.owner and row.expires_at > now
            if not is_held or version not in (None, row.version):
                return None
            if row.requested_at is None:
                self._table.rows[row_key] = replace(row, requested_at=now)
        return row.owner, row.holder, row.version

    def check(self) -> Iterator[CheckMessage]:
        if "test" not in sys.argv[1:2]:
            yield warning(
                "W009",
                f"DBLOCKS[{self.alias!r}] keeps its locks in the memory of this "
                f"process.",
                "Use LocMemBackend in tests only: other processes don't see its locks.",
            )

    def move_clock(self, seconds: float) -> None:
        """Do nothing: the local clock is moved for everybody anyway."""

    def clear(self) -> None:
        """Free all keys of this alias. Fencing tokens go on rising."""
        with self._table.mutex:
            versions = [row.version for row in self._table.rows.values()]
            # One more: whoever holds a forgotten lock finds it force-released.
            self._table.floor = max([self._table.floor, *(v + 1 for v in versions)])
            self._table.rows.clear()


def _extended(row: _Row, now: float, lease: float) -> _Row:
    end = min(now + lease, row.max_until)
    return replace(row, expires_at=max(row.expires_at, end))


def _reading(row: _Row, now: float) -> Reading:
    return Reading(
        owner=row.owner,
        holder=row.holder,
        note=row.note,
        version=row.version,
        acquired_at=_moment(row.acquired_at, now),
        remaining=row.expires_at - now,
        limit=row.max_until - now,
    )


def _entry(key: str, row: _Row, now: float) -> Entry:
    return Entry(
        key=key,
        owner=row.owner,
        holder=row.holder,
        note=row.note,
        hold_count=row.hold_count,
        version=row.version,
        acquired_at=_moment(row.acquired_at, now),
        expires_at=_moment(row.expires_at, now),
        remaining=row.expires_at - now,
        release_requested_at=_moment(row.requested_at, now),
    )


def _moment(instant: float | None, now: float) -> datetime | None:
    """Return an instant of the local clock in UTC."""
    if instant is None:
        return None
    return datetime.now(timezone.utc) + timedelta(seconds=instant - now)
